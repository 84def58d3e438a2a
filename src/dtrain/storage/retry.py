"""Try again what a server or the network may do better the next time: a few times, after growing, random pauses.

Again: a lost or refused connection, a time-out, a body that ends too early, and the answers 408, 429, 500, 502, 503 ("slow
down") and 504. Not again: what will be no different, such as 403, 404 and 412. The libraries' own retries are switched off
where they can be, since tries multiply.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from dtrain.errors import DtrainError

Result = TypeVar("Result")

_RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_ERROR_CLASSES: tuple[tuple[type[OSError], int, int], ...] = (
    (FileNotFoundError, errno.ENOENT, 404),
    (FileExistsError, errno.EEXIST, 412),
    (PermissionError, errno.EACCES, 403),
)
_NETWORK_ERRNOS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EPIPE})
# Lost connections, time-outs and bodies cut short, as the libraries say it. Looked up by name: what is not imported has raised
# nothing.
_LIBRARY_ERRORS = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "azure.core.exceptions": ("ServiceRequestError", "ServiceResponseError", "DecodeError"),
    "botocore.exceptions": (
        "ChecksumError",  # of a body that lost its end: S3 may send one with it
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
    """A server sent fewer bytes than it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and after what pauses: the k-th is half of to all of ``initial_delay_s`` times 2**k, at most ``max_delay_s``."""

    max_attempts: int = 7
    initial_delay_s: float = 0.25
    max_delay_s: float = 8.0
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = field(default_factory=lambda: random.Random().random)

    def delays(self) -> Iterator[float]:
        """Seconds before each try after the first."""
        for turn in range(self.max_attempts - 1):
            yield min(self.max_delay_s, self.initial_delay_s * 2**turn) * (1 + self.jitter()) / 2

    def call(self, name: str, do: Callable[[], Result]) -> Result:
        """What ``do()`` returns, called again while what it raises may pass.

        Args:
            name: of the file, for the error.
            do: may be called again when it has failed, whether or not the server did what was asked.

        Raises:
            OSError: the last error, whatever the library made of it.
            DtrainError: our own, as it is.
        """
        for pause in self.delays():
            try:
                return do()
            except DtrainError:
                raise
            except Exception as error:
                if not is_transient(error):
                    raise to_os_error(error, name) from error
            self.sleep(pause)
        try:
            return do()
        except DtrainError:
            raise
        except Exception as error:
            tried = f" (tried {self.max_attempts} times)" if is_transient(error) else ""
            raise to_os_error(error, name, tried) from error


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, _PERMANENT_ERRORS):
        return False
    if any(
        isinstance(error, kind) for kind in _loaded_library_errors()
    ):  # before the status: aiohttp gives one to a body cut short
        return True
    code = http_status(error)
    if code is not None:
        return code in _RETRY_STATUSES
    return isinstance(error, ConnectionError | TimeoutError | EOFError) or (
        isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS
    )


def _loaded_library_errors() -> Iterator[type]:
    for module, names in _LIBRARY_ERRORS.items():
        if module in sys.modules:
            yield from (kind for name in names if isinstance(kind := getattr(sys.modules[module], name, None), type))


def http_status(error: BaseException) -> int | None:
    """The HTTP status that an error of any of the libraries stands for; None when it stands for none."""
    seen: BaseException | None = error
    for _ in range(4):  # libraries wrap each other's errors, and keep them as the cause
        if seen is None:
            return None
        answer = getattr(seen, "response", None)
        if isinstance(answer, dict):
            code = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(code, int):
                return code
        for name in ("status_code", "status", "code"):
            value = getattr(seen, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
        seen = seen.__cause__
    return None


def to_os_error(error: Exception, name: str, more: str = "") -> OSError:
    """The error as an ``OSError`` of one line that carries the file's name; missing, taken and forbidden keep their classes."""
    said = (isinstance(error, OSError) and error.strerror) or str(error).strip() or type(error).__name__
    text = said.splitlines()[0].rstrip(".") + more
    code = http_status(error)
    for kind, number, status in _ERROR_CLASSES:
        if isinstance(error, kind) or (code == status and not isinstance(error, _PERMANENT_ERRORS)):
            return kind(number, text if kind is PermissionError else os.strerror(number), name)
    return OSError(error.errno if isinstance(error, OSError) and error.errno else errno.EIO, text, name)
