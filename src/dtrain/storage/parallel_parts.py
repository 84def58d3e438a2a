"""Process numbered parts in order with several threads. The first error stops all threads, and no thread outlives the call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from dtrain.launch import heartbeats

# Interval at which the waiting thread looks for finished parts.
_POLL_S = 0.5


def for_each_part(count: int, do: Callable[[int], None], *, threads: int, name: str, activity: str | None = None) -> None:
    """Call ``do(0)`` to ``do(count - 1)`` once each with ``threads`` threads, in order. All calls have ended on return.

    Args:
        count: number of parts.
        do: function of a part number, called from several threads.
        threads: maximum number of threads; with 1, the calling thread does the work.
        name: name of the threads.
        activity: word for the heartbeat to the launcher, sent whenever parts are done; None sends no heartbeat.

    Raises:
        BaseException: the first error of ``do``, or Ctrl-C, after all threads have ended.
    """
    if min(threads, count) <= 1:
        for number in range(count):
            do(number)
            if activity is not None:
                heartbeats.heartbeat(activity)
        return
    errors: list[BaseException] = []

    def run(number: int) -> None:
        # The other threads may take a part before the waiting thread cancels it.
        if not errors:
            try:
                do(number)
            except BaseException as error:
                errors.append(error)
                raise

    pool = ThreadPoolExecutor(min(threads, count), thread_name_prefix=name)
    try:
        pending: set[Future[None]] = {pool.submit(run, number) for number in range(count)}
        while pending and not errors:
            done, pending = wait(pending, None if activity is None else _POLL_S, FIRST_EXCEPTION)
            if done and activity is not None:
                heartbeats.heartbeat(activity)
    finally:
        # An interrupt, or a thread that cannot be started, leaves parts in the queue.
        pool.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
