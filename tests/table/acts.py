"""Actions on a running job of the truth table, and its surroundings."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from jobs import Job

Act = Callable[[Job, int], None]
"""Called with the job and its number of ranks, once all of them are up."""
World = Callable[[], AbstractContextManager[Mapping[str, str]]]
"""Holds something while the job runs; gives variables for it."""

USUAL_PORT = 29500  # torchrun's, and a common value of MASTER_PORT
_ANSWER_S = 5.0  # time to wait for a rank that may never answer
_APART_S = 0.5  # a person takes longer to press a key again


def send(*names: str) -> Act:
    """Send signals to the launcher; the second when the ranks have heard of the first."""

    def act(job: Job, n: int) -> None:
        for k, name in enumerate(names):
            if k == 1:
                _wait_until_asked(job, n)
            if k:
                time.sleep(_APART_S)
            job.process.send_signal(signal.Signals[name])  # an ended process gets no signal

    return act


def _wait_until_asked(job: Job, n: int) -> None:
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and not all((job.folder / f"asked-{rank}").exists() for rank in range(n)):
        time.sleep(0.01)


@contextlib.contextmanager
def empty_world() -> Iterator[Mapping[str, str]]:
    """Nothing."""
    yield {}


@contextlib.contextmanager
def taken_port() -> Iterator[Mapping[str, str]]:
    """Listen where the environment says that the ranks meet."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already, which is as good
            server.bind(("", USUAL_PORT))
            server.listen()
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(USUAL_PORT), "TAKEN": str(USUAL_PORT)}
