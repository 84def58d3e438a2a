"""Process numbered parts in order with several threads. The first error stops all threads, and no thread outlives the call."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtrain.launch import heartbeats

# Interval at which a waiting thread checks the number of finished parts.
_POLL_S = 0.5


class _PartQueue:
    """Queue of the numbers 0 to ``count`` - 1, emptied by an error.

    ``concurrent.futures`` would take no work once the interpreter has begun to exit, when the last save may still be written.
    """

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
        """Empty the queue, and keep the first error."""
        with self._lock:
            self._next = self._count
            if self.error is None:
                self.error = error

    def run(self, do: Callable[[int], None]) -> None:
        """Process parts until the queue is empty. The target of a thread."""
        try:
            while (number := self.take()) is not None:
                do(number)
                with self._lock:
                    self.done += 1
        except BaseException as error:  # noqa: BLE001  # the waiting thread raises the error
            self.stop(error)


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
    threads = min(threads, count)
    if threads <= 1:
        for number in range(count):
            do(number)
            if activity is not None:
                heartbeats.heartbeat(activity)
        return
    part_queue = _PartQueue(count)
    workers = [
        threading.Thread(target=part_queue.run, args=(do,), name=f"{name}-{number}", daemon=True) for number in range(threads)
    ]
    started: list[threading.Thread] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        reported = 0
        for worker in started:
            while worker.is_alive():
                worker.join(None if activity is None else _POLL_S)
                if activity is not None and part_queue.done != reported:
                    reported = part_queue.done
                    heartbeats.heartbeat(activity)
    finally:
        # An interrupt, or a thread that cannot be started, leaves parts in the queue.
        part_queue.stop()
        for worker in started:
            worker.join()
    if part_queue.error is not None:
        raise part_queue.error
