"""Run saves in their order in one background thread per process, while training continues.

The collectives of the thread run on the ``background`` group, which no other thread uses. Ranks agree on the order of saves by
calling ``save_sharded`` in the same order.

``process_instance`` keeps the objects that a process has once: this thread, the locks and the open Checkpointers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar, cast

from dtrain import spans
from dtrain.dist.context import current_context
from dtrain.errors import CheckpointError
from dtrain.launch import heartbeats

T = TypeVar("T")
# Interval at which a waiting thread reports progress to the launcher.
_POLL_S = 0.5


@dataclass(slots=True, eq=False)
class SaveTask(Generic[T]):
    """Task of the thread: its result and its progress.

    Args:
        thread: thread that runs the task.
        progress: increases with every finished part.
        failure_reported: True if a caller has received the failure.
        cancelled: True if no caller waits any more, and the inputs may change.
    """

    name: str
    thread: SaveThread
    future: Future[T] = field(init=False, repr=False)
    progress: int = 0
    failure_reported: bool = False
    cancelled: bool = False

    def advance(self) -> None:
        """Record progress. Called by the threads of the task.

        Raises:
            CheckpointError: the task was cancelled.
        """
        self.progress += 1
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """Raise if the task was cancelled."""
        if self.cancelled:
            raise CheckpointError(f"{self.name} was interrupted. Call save_sharded again to save the state.")

    @property
    def has_unreported_failure(self) -> bool:
        """True if the task has failed and no caller has received the failure."""
        return not self.failure_reported and self.future.done() and self.future.exception() is not None

    def wait(self) -> None:
        """Wait for the end of the task. A failure remains unreported."""
        before = self.failure_reported
        try:
            self.result()
        except Exception:  # noqa: BLE001 - the task keeps the exception
            self.failure_reported = before

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the task and return its result.

        Raises:
            TimeoutError: the task takes longer than ``timeout_s`` seconds.
            Exception: the exception of the task.
        """
        with spans.outermost_span("save"):
            deadline = inf if timeout_s is None else time.monotonic() + timeout_s
            reported_progress = self.progress
            if not self.future.done():
                heartbeats.heartbeat("save")
            while not futures.wait([self.future], max(0.0, min(_POLL_S, deadline - time.monotonic()))).done:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self.name} has not ended yet")
                if self.progress != reported_progress:
                    reported_progress = self.progress
                    heartbeats.heartbeat("save")
            self.failure_reported = self.future.exception() is not None
            self.thread.shut_down_if_idle(wait=True)
            return self.future.result()


class SaveThread:
    """Thread that runs tasks in their order. It ends whenever no task is left, and starts again with the next task."""

    def __init__(self) -> None:
        self.tasks: list[SaveTask[Any]] = []
        self._lock = threading.Lock()
        self._running: ThreadPoolExecutor | None = None
        # The last thread that was told to end.
        self._ended: ThreadPoolExecutor | None = None

    def submit(self, name: str, work: Callable[[SaveTask[T]], T]) -> SaveTask[T]:
        """Submit ``work``, to run after all earlier tasks.

        Args:
            name: name of the task in messages.
            work: function that receives its own task, to report progress.
        """
        task: SaveTask[T] = SaveTask(name, self)
        with self._lock:
            if self._running is None:
                self._running = ThreadPoolExecutor(1, thread_name_prefix="dtrain-save")
            task.future = self._running.submit(work, task)
            self.tasks = [old for old in self.tasks if not old.future.done() or old.has_unreported_failure]
            self.tasks.append(task)
        task.future.add_done_callback(self.shut_down_if_idle)
        return task

    def shut_down_if_idle(self, _: object = None, *, wait: bool = False) -> None:
        """End the thread if no task is left, because only a process without threads may fork safely.

        Called by the thread at the end of each task, and by callers that have waited for a task.
        """
        with self._lock:
            if self._running is not None and all(task.future.done() for task in self.tasks):
                self._ended, self._running = self._running, None
                self._ended.shutdown(wait=False)
            ended = self._ended
        if wait and ended is not None:
            ended.shutdown()

    def wait_for_slot(self, max_running: int) -> None:
        """Wait until fewer than ``max_running`` tasks are running. Failures are not raised."""
        running = [task for task in self.tasks if not task.future.done()]
        for task in running[: max(0, len(running) - max_running + 1)]:
            task.wait()

    @property
    def has_unreported_failure(self) -> bool:
        """True if a task has failed and no caller has received the failure."""
        return any(task.has_unreported_failure for task in self.tasks)

    def wait_all(self) -> None:
        """Wait for all tasks, and raise the first unreported failure.

        Raises:
            Exception: the first failure; further failures are added as notes.
        """
        tasks = list(self.tasks)
        for task in tasks:
            task.wait()
        errors = []
        for task in tasks:
            if task.has_unreported_failure:
                task.failure_reported = True
                errors.append(task.future.exception())
        if errors and errors[0] is not None:
            for other in errors[1:]:
                errors[0].add_note(f"a later task failed, too: {other}")
            raise errors[0]


# These objects belong to the process instead of a ``Checkpointer``. The locks: a lock file names a process. The save thread:
# the collectives of saves need one order, because the process has one background process group. The open Checkpointers: the
# end of ``init_dist``'s block closes them.
_INSTANCES: dict[tuple[int, object], object] = {}


def process_instance(make: Callable[[], T]) -> T:
    """Return the object of this process that ``make()`` made on the first call. A fork makes an object of its own."""
    key = os.getpid(), make
    if key not in _INSTANCES:
        # Two threads may make the first call at once.
        _INSTANCES.setdefault(key, make())
    return cast(T, _INSTANCES[key])


def leave_saves() -> None:
    """Wait for the saves in progress, and forget their failures, because a rank has died. Nothing of them was committed.

    Mutates: the background channel, which no rank can use any more.
    """
    plane, thread = current_context().control_plane, save_thread()
    if plane is not None:
        plane["background"].shut_down()
    for task in list(thread.tasks):
        task.wait()
        task.failure_reported = True


def save_thread() -> SaveThread:
    """Return the thread of this process."""
    return process_instance(SaveThread)
