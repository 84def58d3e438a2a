"""A file system behind an SSH server. Folders are real, and a rename is the server's own: steps commit as on a local disk.

One connection, used by one thread at a time: paramiko's client is not made for more. A connection that broke is made anew by
the next try. SFTP has no way to wait for the disk that every server knows: what was acknowledged is as safe as the server
makes it.
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
    """For fsspec: time-outs, and only hosts that ``~/.ssh/known_hosts`` knows."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # of an extra, which may not be installed
        """Refuses a server that it does not know; fsspec would trust whoever answers."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = Path("~/.ssh/known_hosts").expanduser()
            keys = paramiko.HostKeys(str(known) if known.exists() else None)
            if not keys.check(hostname, key):
                text = f"its host key ({key.get_name()}) is not in {known}; compare it, then add it with ssh-keyscan"
                raise PermissionError(errno.EACCES, text, hostname)

    return {"timeout": 10, "banner_timeout": 20, "auth_timeout": 20, "host_key_policy": KnownHosts()}


class SftpStore:
    """A server."""

    supports_rename = True
    part_bytes = 4 * 2**20
    max_requests = 2  # one is on the connection while the other gets its bytes together

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self._lock = threading.RLock()
        self._broken = False

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """The client, connected, for this thread alone."""
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
                if self._broken:  # paramiko says this with errors of many classes
                    raise ConnectionResetError(errno.ECONNRESET, "the connection to the SFTP server is lost") from None
                raise

    def _alive(self) -> bool:
        transport = self._fs.client.get_transport()
        if transport is None or not transport.is_active():
            return False
        try:
            self._fs.ftp.stat(".")
        except Exception:  # noqa: BLE001  # whatever it is, this connection is of no use
            return False
        return True

    def stat(self, key: str) -> FileStat | None:
        with self.connected() as ftp:
            try:
                found = ftp.stat(key)
            except FileNotFoundError:
                return None
        return FileStat(size=None if stat.S_ISDIR(found.st_mode) else found.st_size)

    def list_names(self, key: str) -> list[str]:
        with self.connected() as ftp:
            return [str(name) for name in ftp.listdir(key)]

    def list_recursive(self, key: str) -> list[str]:
        """All that is no folder, links included and never followed."""
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
            raise TruncatedError(f"{len(data)} bytes came of {end - begin}")
        return data

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        side = f"{key}.{secrets.token_hex(4)}.tmp"
        with self.connected() as ftp:
            try:
                _write_at(ftp, side, "wx", 0, data)
                if mark is not None:
                    self.rename_if_absent(ftp, side, key)
                else:
                    ftp.posix_rename(side, key)
            except BaseException:
                with contextlib.suppress(Exception):
                    ftp.remove(side)
                raise

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Whether it has this content: files have nothing beside it that a mark could be in."""
        return self.stat(key) == FileStat(size=len(data)) and self.read_range(key, 0, len(data)) == data

    def rename_if_absent(self, ftp: Any, old: str, new: str) -> None:
        """Rename a file to a name that must not be taken."""
        try:
            ftp.rename(old, new)  # of SFTP, not of POSIX: the server refuses when the name is taken
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
    """A file under another name, written at offsets, which gets its own at the end."""

    def __init__(self, store: SftpStore, key: str) -> None:
        self._store, self._key = store, key
        self._side = f"{key}.{secrets.token_hex(4)}.tmp"
        self._sizes: dict[int, int] = {}
        with store.connected() as ftp:
            _write_at(ftp, self._side, "wx", 0, b"")

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        with self._store.connected() as ftp:
            _write_at(ftp, self._side, "r+", begin, data)
        self._sizes[number] = len(data)

    def finish(self) -> None:
        with self._store.connected() as ftp:
            self._store.rename_if_absent(ftp, self._side, self._key)

    def is_committed(self) -> bool:
        found = self._store.stat(self._key)
        return self._store.stat(self._side) is None and found == FileStat(size=sum(self._sizes.values()))

    def clean_up(self, *, finished: bool) -> None:
        if not finished:
            self._store.remove(self._side)


def _set_timeout(channel: Any) -> None:
    """Give each request to a silent server one time-out, and close the connection after it.

    paramiko asks the server to close a file whose read has failed. On an open connection that waits for as long again.

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

    paramiko starts a thread for them. If the connection breaks meanwhile, that thread dies with a traceback on stderr; here
    the reader gets the error, and tries again. A piece of 8 MiB is 256 requests, together 8 KiB: to send them does not block.

    Mutates: ``file``, as paramiko's ``_start_prefetch`` does.
    """
    file._prefetching, file._prefetch_done = True, False
    file._prefetch_thread(*args)


def _write_at(ftp: Any, key: str, mode: str, begin: int, data: bytes) -> None:
    """Many requests without waiting for each answer. The last byte waits for all: paramiko drops answers that it has not read
    when a file is closed, and with them the server's "no space left"."""
    with ftp.open(key, mode) as file:
        file.seek(begin)
        file.set_pipelined(True)
        file.write(data[:-1])
        file.set_pipelined(False)
        file.write(data[-1:])
