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
from typing import Any, ClassVar

from dtrain.storage.remote_store import FileStat, RemoteStore, Upload

_TIMEOUT_S = 60.0


class SftpStore(RemoteStore):
    """Store of an SSH server."""

    options: ClassVar[dict[str, Any]] = {"timeout": 10, "banner_timeout": 20, "auth_timeout": 20}

    supports_rename = True
    part_bytes = 4 * 2**20
    # One request uses the connection while the other collects its data.
    max_requests = 2

    @classmethod
    def connection_options(cls, authority: str, configured: dict[str, Any]) -> dict[str, Any]:
        user, _, host = authority.rpartition("@")
        name, _, port = host.partition(":")
        address = {"host": name, **({"username": user} if user else {}), **({"port": int(port)} if port else {})}
        return {"host_key_policy": _known_hosts_policy(), **super().connection_options(authority, configured), **address}

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        self._lock = threading.RLock()
        self._broken = False

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield the connected client for this thread alone."""
        with self._lock:
            if self._broken:
                with contextlib.suppress(Exception):
                    self.fs.client.close()
                self.fs._connect()
                self._broken = False
            _set_timeout(self.fs.ftp.get_channel())
            try:
                yield self.fs.ftp
            except (FileNotFoundError, FileExistsError, PermissionError):
                raise
            except Exception:
                self._broken = not self._alive()
                # paramiko reports a lost connection with errors of many classes.
                if self._broken:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection to the SFTP server is lost") from None
                raise

    def _alive(self) -> bool:
        transport = self.fs.client.get_transport()
        if transport is None or not transport.is_active():
            return False
        try:
            self.fs.ftp.stat(".")
        except Exception:  # noqa: BLE001  # after any error the connection is unusable
            return False
        return True

    def stat(self, key: str) -> FileStat | None:
        with self._connected() as ftp:
            try:
                status = ftp.stat(key)
            except FileNotFoundError:
                return None
        return FileStat(size=None if stat.S_ISDIR(status.st_mode) else status.st_size)

    def list_sizes(self, key: str) -> dict[str, int | None]:
        with self._connected() as ftp:
            entries = {str(entry.filename): entry for entry in ftp.listdir_attr(key)}
        sizes = {name: None if stat.S_ISDIR(entry.st_mode) else int(entry.st_size) for name, entry in entries.items()}
        # A listing describes a link, a status its target.
        links = [name for name, entry in entries.items() if stat.S_ISLNK(entry.st_mode)]
        targets = {name: self.stat(f"{key.rstrip('/')}/{name}") for name in links}
        return {**sizes, **{name: None if target is None else target.size for name, target in targets.items()}}

    def list_recursive(self, key: str) -> list[str]:
        """Return all entries that are not folders. Links are included and not followed."""
        keys: list[str] = []
        with self._connected() as ftp:
            for entry in ftp.listdir_attr(key):
                below = f"{key.rstrip('/')}/{entry.filename}"
                keys += self.list_recursive(below) if stat.S_ISDIR(entry.st_mode) else [below]
        return keys

    def _read(self, key: str, begin: int, end: int) -> bytes:
        with self._connected() as ftp, ftp.open(key, "rb") as file:
            file._start_prefetch = functools.partial(_send_requests, file)
            return b"".join(file.readv([(offset, min(32768, end - offset)) for offset in range(begin, end, 32768)]))

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        temporary = f"{key}.{secrets.token_hex(4)}.tmp"
        with self._connected() as ftp:
            try:
                _write_at(ftp, temporary, "wx", 0, data)
                if mark is not None:
                    self._rename_if_absent(ftp, temporary, key)
                else:
                    ftp.posix_rename(temporary, key)
            except BaseException:
                with contextlib.suppress(Exception):
                    ftp.remove(temporary)
                raise

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Return True if the file has this content. Files on an SSH server have no metadata for a mark."""
        return self.has_content(key, data)

    def _rename_if_absent(self, ftp: Any, old: str, new: str) -> None:
        """Rename a file to a name that must not exist."""
        try:
            # The rename of SFTP, unlike that of POSIX, fails if the name exists.
            ftp.rename(old, new)
        except OSError:
            if self.stat(new) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
            raise

    def begin_upload(self, upload: Upload) -> str:
        """Create a temporary file, which gets the parts at their offsets and is renamed at the end."""
        temporary = f"{upload.key}.{secrets.token_hex(4)}.tmp"
        with self._connected() as ftp:
            _write_at(ftp, temporary, "wx", 0, b"")
        return temporary

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> int:
        with self._connected() as ftp:
            _write_at(ftp, upload.id, "r+", begin, data)
        return len(data)

    def finish_upload(self, upload: Upload) -> None:
        with self._connected() as ftp:
            self._rename_if_absent(ftp, upload.id, upload.key)

    def is_committed(self, upload: Upload) -> bool:
        return self.stat(upload.id) is None and self.stat(upload.key) == FileStat(size=sum(upload.tags))

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        if not finished:
            self.remove(upload.id)

    def copy(self, old: str, new: str) -> None:
        raise OSError(errno.EOPNOTSUPP, "SFTP has no links and no copies on the server")

    def rename(self, old: str, new: str) -> None:
        with self._connected() as ftp:
            ftp.posix_rename(old, new)

    def make_folder(self, key: str) -> None:
        with self._connected() as ftp:
            try:
                ftp.mkdir(key)
            except OSError:
                if self.stat(key) is not None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from None
                raise

    def remove(self, key: str) -> None:
        with self._connected() as ftp:
            ftp.remove(key)

    def remove_folder(self, key: str) -> None:
        with self._connected() as ftp:
            ftp.rmdir(key)

    def close(self) -> None:
        self.fs.client.close()


def _known_hosts_policy() -> Any:
    """Return paramiko's policy for servers in ``~/.ssh/known_hosts`` only. fsspec would trust every server."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # of an extra, which may not be installed
        """Policy that refuses unknown servers."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            hosts_file = Path("~/.ssh/known_hosts").expanduser()
            keys = paramiko.HostKeys(str(hosts_file) if hosts_file.exists() else None)
            if not keys.check(hostname, key):
                text = f"the host key ({key.get_name()}) is not in {hosts_file}. Compare the key, then add it with ssh-keyscan."
                raise PermissionError(errno.EACCES, text, hostname)

    return KnownHosts()


def _set_timeout(channel: Any) -> None:
    """Give each request to a silent server one timeout, and then close the connection.

    After a failed read, paramiko asks the server to close the file. On an open connection, this would wait for another timeout.

    Mutates: ``channel``.
    """

    def close_on_timeout(do: Callable[[Any, Any], Any], argument: Any) -> Any:
        try:
            return do(channel, argument)
        except TimeoutError:
            channel.get_transport().close()
            raise

    channel.settimeout(_TIMEOUT_S)
    for name in ("recv", "send"):
        setattr(channel, name, functools.partial(close_on_timeout, getattr(type(channel), name)))


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
