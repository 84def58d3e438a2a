"""Retries: transient errors, number of attempts, delays."""

import errno
import http.client

import pytest

from dtrain.errors import ConfigError
from dtrain.storage.remote_store import RetryPolicy, TruncatedError, http_status, is_transient


def failing(*errors):
    """Return a function that raises these errors, one at each call, and then returns "done"; and the list of its calls."""
    left, calls = list(errors), []

    def do():
        calls.append(1)
        if left:
            raise left.pop(0)
        return "done"

    return do, calls


def retry(draw=1.0, **options):
    slept = []
    return RetryPolicy(sleep=slept.append, jitter=lambda: draw, **options), slept


class Answered(Exception):
    def __init__(self, status):
        super().__init__(f"answered {status}")
        self.status_code = status


@pytest.mark.parametrize(
    ("draw", "expected"), [(0.0, [0.125, 0.25, 0.5, 1, 2, 4]), (1.0, [0.25, 0.5, 1, 2, 4, 8])], ids=["short", "long"]
)
def test_delays_grow_with_jitter(draw, expected):
    trying, slept = retry(draw)
    do, _ = failing(*[ConnectionResetError()] * 6)
    assert trying.call("file", do) == "done"
    assert slept == expected


def test_delays_are_bounded():
    trying, _ = retry(max_attempts=20, initial_delay_s=1, max_delay_s=3)
    assert max(trying.delays()) == 3


def test_error_names_the_file_and_the_number_of_attempts():
    trying, slept = retry(max_attempts=3)
    do, calls = failing(*[Answered(503)] * 9)
    with pytest.raises(OSError, match=r"^\[Errno 5\] answered 503 \(tried 3 times\): 's3://bucket/x'$"):
        trying.call("s3://bucket/x", do)
    assert (len(calls), len(slept)) == (3, 2)


@pytest.mark.parametrize(
    "error",
    [
        *[Answered(status) for status in (408, 429, 500, 502, 503, 504)],
        ConnectionResetError(),
        ConnectionRefusedError(),
        TimeoutError(),
        TruncatedError("the server must send 4 bytes, got 3"),
        EOFError(),
        http.client.IncompleteRead(b""),
        OSError(errno.EHOSTUNREACH, "no route"),
    ],
    ids=str,
)
def test_transient_errors_are_retried(error):
    trying, slept = retry()
    do, calls = failing(error)
    assert trying.call("file", do) == "done"
    assert (len(calls), len(slept)) == (2, 1)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Answered(400), OSError),
        (Answered(401), OSError),
        (Answered(403), PermissionError),
        (Answered(404), FileNotFoundError),
        (Answered(412), FileExistsError),
        (Answered(501), OSError),
        (FileNotFoundError(2, "x"), FileNotFoundError),
        (FileExistsError("x"), FileExistsError),
        (PermissionError(13, "x"), PermissionError),
        (ValueError("a bug\nwith two lines"), OSError),
        (OSError(errno.ENOSPC, "full"), OSError),
    ],
    ids=lambda value: str(value).split("\n")[0] if isinstance(value, Exception) else "",
)
def test_permanent_errors_are_converted_and_raised_at_once(error, raised):
    trying, slept = retry()
    do, calls = failing(error)
    with pytest.raises(raised, match=r"'the file'$") as caught:
        trying.call("the file", do)
    assert (len(calls), slept) == (1, [])
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    assert caught.value.errno == (errno.ENOSPC if "full" in str(error) else caught.value.errno)


def test_interrupt_is_not_retried():
    trying, slept = retry()
    do, calls = failing(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        trying.call("file", do)
    assert (len(calls), slept) == (1, [])


def test_http_status_is_found_in_the_cause():
    outer = OSError(errno.EBUSY, "slow down")
    outer.__cause__ = Answered(503)
    assert http_status(outer) == 503
    assert is_transient(outer)
    assert http_status(OSError("nothing said")) is None


def test_library_errors_are_classified():
    exceptions = pytest.importorskip("botocore.exceptions")
    answer = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
    assert is_transient(exceptions.ClientError(answer, "PutObject"))
    assert is_transient(exceptions.EndpointConnectionError(endpoint_url="x"))
    assert not is_transient(exceptions.NoCredentialsError())
    aiohttp = pytest.importorskip("aiohttp")
    assert is_transient(aiohttp.ClientPayloadError("short"))
    azure = pytest.importorskip("azure.core.exceptions")
    assert is_transient(azure.ServiceRequestError("no connection"))
    assert not is_transient(azure.ResourceNotFoundError("none"))


def test_own_errors_propagate_unchanged():
    trying, slept = retry()
    do, calls = failing(ConfigError("no account"))
    with pytest.raises(ConfigError, match="no account"):
        trying.call("file", do)
    assert (len(calls), slept) == (1, [])
