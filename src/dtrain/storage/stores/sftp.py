"""Access the file system of an SSH server. Folders are real, and rename is atomic, so steps commit as on a local disk.

There is one connection, used by one thread at a time, because paramiko's client is not thread-safe. The next attempt replaces a
broken connection. SFTP has no common request to sync a file: acknowledged data are as durable as the server makes them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtrain.storage.retry import TruncatedError
from dtrain.storage.stores.base import FileStat, Upload

_TIMEOUT_S = 60.0


def make_options() -> dict[str, Any]:
    """Return options for fsspec: timeouts, and only hosts in ``~/.ssh/known_hosts``."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # of an extra, which may not be installed
        """Policy that refuses unknown servers; fsspec would trust every server."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = Path("~/.ssh/known_hosts").expanduser()
            keys = paramiko.HostKeys(str(known) if known.exists() else None)
            if not keys.check(hostname, key):
                text = f"the host key ({key.get_name()}) is not in {known}. Compare the key, then add it with ssh-keyscan."
                raise PermissionError(errno.EACCES, text, hostname)

    return {"timeout": 10, "banner_timeout": 20, "auth_timeout": 20, "host_key_policy": KnownHosts()}


class SftpStore:
    """Store of an SSH server."""

    supports_rename = True
    part_bytes = 4 * 2**20
    # One request uses the connection while the other collects its data.
    max_requests = 2

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._lock = threading.RLock()
        self._broken = False

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """Yield the connected client for this thread alone."""
        with self._lock:
            if self._broken:
                with contextlib.suppress(Exception):
                    self._fs.client.close()
                self._fs._connect()
                self._broken = False
            _set_timeout(self._fs.ftp.get_channel())
            try:
                yield self._fs.ftp
            except (FileNotFoundError, FileExistsError, PermissionError):
                raise
            except Exception:
                self._broken = not self._alive()
                # paramiko reports a lost connection with errors of many classes.
                if self._broken:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection to the SFTP server is lost") from None
                raise

    def _alive(self) -> bool:
        transport = self._fs.client.get_transport()
        if transport is None or not transport.is_active():
            return False
        try:
            self._fs.ftp.stat(".")
        except Exception:  # noqa: BLE001  # after any error the connection is unusable
            return False
        return True

    def stat(self, key: str) -> FileStat | None:
        with self.connected() as ftp:
            try:
                status = ftp.stat(key)
            except FileNotFoundError:
                return None
        return FileStat(size=None if stat.S_ISDIR(status.st_mode) else status.st_size)

    def list_names(self, key: str) -> list[str]:
        with self.connected() as ftp:
            return [str(name) for name in ftp.listdir(key)]

    def list_recursive(self, key: str) -> list[str]:
        """Return all entries that are not folders. Links are included and not followed."""
        found: list[str] = []
        with self.connected() as ftp:
            for entry in ftp.listdir_attr(key):
                below = f"{key.rstrip('/')}/{entry.filename}"
                found += self.list_recursive(below) if stat.S_ISDIR(entry.st_mode) else [below]
        return found

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        with self.connected() as ftp, ftp.open(key, "rb") as file:
            file._start_prefetch = functools.partial(_send_requests, file)
            data = b"".join(file.readv([(at, min(32768, end - at)) for at in range(begin, end, 32768)]))
        if len(data) != end - begin:
            raise TruncatedError(f"the server must send {end - begin} bytes, got {len(data)}")
        return data

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        temporary = f"{key}.{secrets.token_hex(4)}.tmp"
        with self.connected() as ftp:
            try:
                _write_at(ftp, temporary, "wx", 0, data)
                if mark is not None:
                    self.rename_if_absent(ftp, temporary, key)
                else:
                    ftp.posix_rename(temporary, key)
            except BaseException:
                with contextlib.suppress(Exception):
                    ftp.remove(temporary)
                raise

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Return True if the file has this content. Files on an SSH server have no metadata for a mark."""
        return self.stat(key) == FileStat(size=len(data)) and self.read_range(key, 0, len(data)) == data

    def rename_if_absent(self, ftp: Any, old: str, new: str) -> None:
        """Rename a file to a name that must not exist."""
        try:
            # The rename of SFTP, unlike that of POSIX, fails if the name exists.
            ftp.rename(old, new)
        except OSError:
            if self.stat(new) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
            raise

    def upload(self, key: str, count: int) -> Upload:
        return _SftpUpload(self, key)

    def copy(self, old: str, new: str) -> None:
        raise OSError(errno.EOPNOTSUPP, "SFTP has no links and no copies on the server")

    def rename(self, old: str, new: str) -> None:
        with self.connected() as ftp:
            ftp.posix_rename(old, new)

    def make_folder(self, key: str) -> None:
        with self.connected() as ftp:
            try:
                ftp.mkdir(key)
            except OSError:
                if self.stat(key) is not None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from None
                raise

    def remove(self, key: str) -> None:
        with self.connected() as ftp:
            ftp.remove(key)

    def remove_folder(self, key: str) -> None:
        with self.connected() as ftp:
            ftp.rmdir(key)

    def close(self) -> None:
        self._fs.client.close()


class _SftpUpload:
    """Upload to a temporary file, written at offsets and renamed at the end."""

    def __init__(self, store: SftpStore, key: str) -> None:
        self._store, self._key = store, key
        self._temporary = f"{key}.{secrets.token_hex(4)}.tmp"
        self._sizes: dict[int, int] = {}
        with store.connected() as ftp:
            _write_at(ftp, self._temporary, "wx", 0, b"")

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        with self._store.connected() as ftp:
            _write_at(ftp, self._temporary, "r+", begin, data)
        self._sizes[number] = len(data)

    def finish(self) -> None:
        with self._store.connected() as ftp:
            self._store.rename_if_absent(ftp, self._temporary, self._key)

    def is_committed(self) -> bool:
        status = self._store.stat(self._key)
        return self._store.stat(self._temporary) is None and status == FileStat(size=sum(self._sizes.values()))

    def clean_up(self, *, finished: bool) -> None:
        if not finished:
            self._store.remove(self._temporary)


def _set_timeout(channel: Any) -> None:
    """Give each request to a silent server one timeout, and then close the connection.

    After a failed read, paramiko asks the server to close the file. On an open connection, this would wait for another timeout.

    Mutates: ``channel``.
    """
    channel.settimeout(_TIMEOUT_S)
    for name in ("recv", "send"):
        setattr(channel, name, functools.partial(_close_on_timeout, channel, getattr(type(channel), name)))


def _close_on_timeout(channel: Any, do: Callable[[Any, Any], Any], argument: Any) -> Any:
    try:
        return do(channel, argument)
    except TimeoutError:
        channel.get_transport().close()
        raise


def _send_requests(file: Any, *args: Any) -> None:
    """Send the read requests of ``readv`` from this thread.

    paramiko would start a thread for the requests. If the connection breaks, that thread dies with a traceback on stderr; in
    this thread, the reader gets the error and tries again. The 256 requests of a read of 8 MiB have 8 KiB and do not block.

    Mutates: ``file``, as paramiko's ``_start_prefetch`` does.
    """
    file._prefetching, file._prefetch_done = True, False
    file._prefetch_thread(*args)


def _write_at(ftp: Any, key: str, mode: str, begin: int, data: bytes) -> None:
    """Write data with many requests in parallel. The last byte waits for all answers.

    When a file is closed, paramiko drops unread answers, which may be the server's "no space left".
    """
    with ftp.open(key, mode) as file:
        file.seek(begin)
        file.set_pipelined(True)
        file.write(data[:-1])
        file.set_pipelined(False)
        file.write(data[-1:])
