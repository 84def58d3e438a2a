"""Retry requests to servers after transient failures: a few times, after growing random delays.

Transient failures are a lost or refused connection, a timeout, an incomplete body, and the answers 408, 429, 500, 502, 503
("slow down") and 504. Permanent failures such as 403, 404 and 412 are raised at once. Retries of the libraries are disabled if
possible, because attempts multiply.
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
    if any(isinstance(error, kind) for kind in _loaded_library_errors()):
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
