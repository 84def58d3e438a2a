"""Send requests to a server: ``RemoteStore``, with fsspec as far as all servers agree, ``Upload`` in parts, and retries.

Transient failures are a lost or refused connection, a timeout, an incomplete body, and the answers 408, 429, 500, 502, 503
("slow down") and 504. They are retried a few times after growing random delays. Permanent failures such as 403, 404 and 412 are
raised at once. Retries of the libraries are disabled if possible, because attempts multiply.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from dtrain.errors import DtrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """Status of a name: a file with its size, or a folder (``size`` is None). ``ranges`` is True if ranges can be read.

    ``version`` is a text that changes with every write of the file; None if the server has no such text.
    """

    size: int | None
    ranges: bool = True
    version: str | None = field(default=None, compare=False)


class RemoteStore:
    """Store of one bucket or server. The defaults are for object stores, which have no real folders.

    A file of one request is created by ``put``, and a file of many parts by an ``Upload``. Both write a random mark, which
    distinguishes the file from a file of another process if the answer of the server is lost.

    Args:
        fs: fsspec's file system.
    """

    # Options of fsspec's file system; the user's configuration overrides them by name.
    options: ClassVar[dict[str, Any]] = {"use_listings_cache": False}
    # True if folders are real and can be renamed atomically.
    supports_rename = False
    # Minimum size of the parts of an upload in bytes, except for the last part.
    part_bytes = 8 * 2**20
    # True if ranges of all files can be read.
    has_ranges = True
    # Number of parallel requests, because a single request mostly waits for the network.
    max_requests = 8

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    @classmethod
    def connection_options(cls, authority: str, configured: dict[str, Any]) -> dict[str, Any]:
        """Return the options of fsspec's file system: our defaults, which the user's configuration overrides by name."""
        nested = {name: {**value, **configured.get(name, {})} for name, value in cls.options.items() if isinstance(value, dict)}
        return {**cls.options, **configured, **nested}

    def stat(self, key: str) -> FileStat | None:
        """Return the status of a name, or None without one."""
        try:
            info = self.fs.info(key)
        except FileNotFoundError:
            return None
        version = info.get("ETag") or info.get("etag")
        return FileStat(size=None if info["type"] == "directory" else int(info["size"]), version=version)

    def list_names(self, key: str) -> list[str]:
        """Return the names in a folder."""
        return list(self.list_sizes(key))

    def list_sizes(self, key: str) -> dict[str, int | None]:
        """Return the names in a folder with their sizes, None for a folder."""
        entries = self.fs.ls(key, detail=True)
        if not entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        sizes = {}
        for entry in entries:
            name = entry["name"].strip("/")
            # A folder may have an object of its own name.
            if name != key.strip("/"):
                sizes[name.rsplit("/", 1)[-1]] = None if entry["type"] == "directory" else int(entry["size"])
        return sizes

    def list_recursive(self, key: str) -> list[str]:
        """Return the keys of all files below a folder."""
        return [str(name) for name in self.fs.find(key)]

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Return all bytes ``[begin, end)`` of a file."""
        data = self._read(key, begin, end)
        if len(data) != end - begin:
            raise TruncatedError(f"the server must send {end - begin} bytes, got {len(data)}")
        return data

    def _read(self, key: str, begin: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(key, start=begin, end=end))

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        """Write a file atomically. With a mark, which the file gets, raise ``FileExistsError`` if the file exists."""
        raise NotImplementedError

    def mark_of(self, key: str) -> str | None:
        """Return the mark that a file was created with."""
        return None

    def has_content(self, key: str, data: bytes) -> bool:
        """Return True if a file has this content."""
        return self.stat(key) == FileStat(size=len(data)) and (not data or self.read_range(key, 0, len(data)) == data)

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        """Return True if a ``put`` of this content with this mark has created the file."""
        return self.mark_of(key) == mark

    def begin_upload(self, upload: Upload) -> Any:
        """Start an upload, and return its id."""

    def send_part(self, upload: Upload, number: int, begin: int, data: bytes) -> Any:
        """Send a part that begins at byte ``begin``, and return its tag. Threads may send parts in parallel and again."""
        raise NotImplementedError

    def finish_upload(self, upload: Upload) -> None:
        """Create the file from all parts. Raise ``FileExistsError`` if the file exists."""
        raise NotImplementedError

    def is_committed(self, upload: Upload) -> bool:
        """Return True if the name has the upload's content: ``finish_upload`` succeeded, but its answer was lost."""
        return self.mark_of(upload.key) == upload.mark

    def clean_up_upload(self, upload: Upload, *, finished: bool) -> None:
        """Remove sent parts that are not part of a finished file."""

    def copy(self, old: str, new: str) -> None:
        """Copy a file on the server without sending its bytes. Raise ``OSError`` if the server cannot."""
        self.fs.cp_file(old, new)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder. Requires ``supports_rename``."""
        raise NotImplementedError("object stores have no folders to rename")

    def make_folder(self, key: str) -> None:
        """Create a folder, which must not exist. Without real folders, do nothing."""

    def remove(self, key: str) -> None:
        """Remove a file."""
        self.fs.rm_file(key)

    def remove_folder(self, key: str) -> None:
        """Remove an empty folder. Without real folders, do nothing."""

    def close(self) -> None:
        """Close the connections. fsspec's file system closes its connections when it is deleted."""


class Upload:
    """Upload of a file in parts, which is not visible before ``RemoteStore.finish_upload``. The store gives ids and tags."""

    def __init__(self, store: RemoteStore, key: str) -> None:
        self.key, self.mark = key, secrets.token_hex(16)
        self._tags: dict[int, Any] = {}
        self.id = store.begin_upload(self)

    def add_part(self, number: int, tag: Any) -> None:
        """Record a sent part."""
        self._tags[number] = tag

    @property
    def tags(self) -> list[Any]:
        """Tags of all sent parts, in order."""
        return [self._tags[number] for number in sorted(self._tags)]


Result = TypeVar("Result")

_RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_ERROR_CLASSES: tuple[tuple[type[OSError], int, int], ...] = (
    (FileNotFoundError, errno.ENOENT, 404),
    (FileExistsError, errno.EEXIST, 412),
    (PermissionError, errno.EACCES, 403),
)
_NETWORK_ERRNOS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EPIPE})
# Classes of the libraries for lost connections, timeouts and incomplete bodies. They are looked up by name, because a library
# that is not imported has raised no error.
_LIBRARY_ERRORS = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "azure.core.exceptions": ("ServiceRequestError", "ServiceResponseError", "DecodeError"),
    "botocore.exceptions": (
        # S3 may send the checksum of an incomplete body with the body.
        "ChecksumError",
        "ConnectionError",
        "FlexibleChecksumError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseStreamingError",
    ),
    "botocore.parsers": ("ResponseParserError",),
    "fsspec.exceptions": ("FSTimeoutError",),
    "google.auth.exceptions": ("TransportError",),
    "http.client": ("IncompleteRead",),
    "oci.exceptions": ("RequestException",),
    "paramiko.ssh_exception": ("ChannelException",),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
}


class TruncatedError(ConnectionError):
    """Server sent fewer bytes than the file has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number of attempts and delays: delay k is ``initial_delay_s * 2**k``, at most ``max_delay_s``, times 0.5 to 1."""

    max_attempts: int = 7
    initial_delay_s: float = 0.25
    max_delay_s: float = 8.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)

    def delays(self) -> Iterator[float]:
        """Iterate over the delays in seconds before each further attempt."""
        for attempt in range(self.max_attempts - 1):
            yield min(self.max_delay_s, self.initial_delay_s * 2**attempt) * (1 + self.jitter()) / 2

    def call(self, name: str, do: Callable[[], Result]) -> Result:
        """Return ``do()``, called again after transient errors.

        Args:
            name: name of the file for errors.
            do: function that may be called again after a failure, even if the server has done the work.

        Raises:
            OSError: the last error, converted from the error of the library.
            DtrainError: an error of dtrain, unchanged.
        """
        delays = self.delays()
        while True:
            try:
                return do()
            except DtrainError:
                raise
            except Exception as error:
                if not is_transient(error):
                    raise to_os_error(error, name) from error
                delay = next(delays, None)
                if delay is None:
                    raise to_os_error(error, name, f" (tried {self.max_attempts} times)") from error
            self.sleep(delay)


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed a little later."""
    if isinstance(error, _PERMANENT_ERRORS):
        return False
    # Classes are checked before the status, because aiohttp's error for an incomplete body has a status.
    loaded = [(sys.modules[module], names) for module, names in _LIBRARY_ERRORS.items() if module in sys.modules]
    if any(isinstance(error, getattr(module, name, ())) for module, names in loaded for name in names):
        return True
    code = http_status(error)
    if code is not None:
        return code in _RETRY_STATUSES
    return isinstance(error, ConnectionError | TimeoutError | EOFError) or (
        isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS
    )


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of any library, or None without one."""
    cause: BaseException | None = error
    # Libraries wrap errors of other libraries, and keep them as the cause.
    for _ in range(4):
        if cause is None:
            return None
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):
            code = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(code, int):
                return code
        for name in ("status_code", "status", "code"):
            value = getattr(cause, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
        cause = cause.__cause__
    return None


def to_os_error(error: Exception, name: str, suffix: str = "") -> OSError:
    """Convert an error to an ``OSError`` of one line with the file's name, of the class for missing, existing or forbidden."""
    message = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    text = message.splitlines()[0].rstrip(".") + suffix
    code = http_status(error)
    for kind, number, status in _ERROR_CLASSES:
        if isinstance(error, kind) or (code == status and not isinstance(error, _PERMANENT_ERRORS)):
            return kind(number, text if kind is PermissionError else os.strerror(number), name)
    return OSError(error.errno if isinstance(error, OSError) and error.errno else errno.EIO, text, name)
