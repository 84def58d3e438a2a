"""Work on numbered parts by several threads: they are taken in order, the first error ends all, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtrain import heartbeats

_POLL_S = 0.5  # between two looks at how many parts are done


class _PartQueue:
    """Hands out the numbers 0 to ``count`` - 1, until an error."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._next, self._count = 0, count
        self.done = 0
        self.error: BaseException | None = None

    def take(self) -> int | None:
        with self._lock:
            if self._next == self._count:
                return None
            self._next += 1
            return self._next - 1

    def stop(self, error: BaseException | None = None) -> None:
        """Hand out no more. The first error is kept."""
        with self._lock:
            self._next = self._count
            if self.error is None:
                self.error = error

    def run(self, do: Callable[[int], None]) -> None:
        """A thread's whole life."""
        try:
            while (part := self.take()) is not None:
                do(part)
                with self._lock:
                    self.done += 1
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            self.stop(error)


def for_each_part(count: int, do: Callable[[int], None], *, threads: int, name: str, activity: str | None = None) -> None:
    """``do(0)`` to ``do(count - 1)``, each once, by ``threads`` threads that take them in order; all are done on return.

    Args:
        count: of parts.
        do: called from several threads at a time.
        threads: at most so many; with 1 everything happens in the calling thread.
        name: of the threads.
        activity: a word for the launcher, which hears it whenever parts have been done; None tells the launcher nothing.

    Raises:
        BaseException: the first that ``do`` raised, when no thread works any more. An interrupt (Ctrl-C) comes through as late.
    """
    threads = min(threads, count)
    if threads <= 1:
        for part in range(count):
            do(part)
            if activity is not None:
                heartbeats.heartbeat(activity)
        return
    turns = _PartQueue(count)
    workers = [
        threading.Thread(target=turns.run, args=(do,), name=f"{name}-{number}", daemon=True) for number in range(threads)
    ]
    started: list[threading.Thread] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        for worker in started:
            _join_with_heartbeat(worker, turns, activity)
    finally:
        turns.stop()  # when this is an interrupt, or a thread could not be had
        for worker in started:
            worker.join()
    if turns.error is not None:
        raise turns.error


def _join_with_heartbeat(worker: threading.Thread, turns: _PartQueue, doing: str | None) -> None:
    """Wait until a thread ends, and tell the launcher that the work gets on as long as it does."""
    if doing is None:
        worker.join()
        return
    seen = 0
    while worker.is_alive():
        worker.join(_POLL_S)
        if turns.done != seen:
            seen = turns.done
            heartbeats.heartbeat(doing)
