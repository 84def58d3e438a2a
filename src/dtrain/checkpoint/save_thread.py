"""Run saves in their order in one background thread per process, while training continues.

The collectives of the thread run on the ``background`` group, which no other thread uses. Ranks agree on the order of saves by
calling ``save_sharded`` in the same order.

``StagingPool`` owns reusable host memory for copies of the state, so that training may continue during a save.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dtrain import heartbeats, spans
from dtrain.checkpoint.data_file import FileLayout, SerializedFile, TensorSlot, flatten, group_slots
from dtrain.checkpoint.layout import DTYPES
from dtrain.dist.context import register_shutdown_hook
from dtrain.errors import CheckpointError

T = TypeVar("T")
# Interval at which a waiting thread reports progress to the launcher.
_POLL_S = 0.5


@dataclass(slots=True, eq=False)
class SaveTask(Generic[T]):
    """Task of the thread: its result and its progress.

    Args:
        progress: increases with every finished part.
        failure_reported: True if a caller has received the failure.
        cancelled: True if no caller waits any more, and the inputs may change.
    """

    name: str
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
            raise CheckpointError(f"{self.name} was interrupted")

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the task and return its result.

        Raises:
            TimeoutError: the task takes longer than ``timeout_s`` seconds.
            Exception: the exception of the task.
        """
        with spans.outermost_span("save"):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> T:
        reported_progress = self.progress
        if not self.future.done():
            heartbeats.heartbeat("save")
        while True:
            step_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s)
            try:
                result = self.future.result(step_s)
            except NotYet:
                # The task has ended just now, or the task itself has raised a TimeoutError.
                if self.future.done():
                    self.failure_reported = self.future.exception() is not None
                    return self.future.result()
                if timeout_s is not None and (timeout_s := timeout_s - step_s) <= 0:
                    raise TimeoutError(f"{self.name} has not ended yet") from None
                if self.progress != reported_progress:
                    reported_progress = self.progress
                    heartbeats.heartbeat("save")
            except BaseException:
                # If the task is not done, an interrupt has ended the wait.
                self.failure_reported = self.future.done()
                _shut_down_if_idle(wait=self.failure_reported)
                raise
            else:
                _shut_down_if_idle(wait=True)
                return result


@dataclass(slots=True, eq=False)
class _SaveThreadState:
    """Thread and tasks of this process; a fork starts without them.

    Args:
        finished_thread: the last thread that has shut down.
    """

    pid: int = 0
    thread: ThreadPoolExecutor | None = None
    tasks: list[SaveTask[object]] = field(default_factory=list)
    hooks_registered: bool = False
    finished_thread: ThreadPoolExecutor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_STATE = _SaveThreadState()


def submit(name: str, work: Callable[[SaveTask[T]], T]) -> SaveTask[T]:
    """Submit ``work`` to the thread, after all earlier tasks.

    Args:
        name: name of the task in messages.
        work: function that receives its own task, to report progress.
    """
    state = _current_state()
    if not state.hooks_registered:
        state.hooks_registered = True
        register_shutdown_hook("saves", _on_dist_shutdown)
        atexit.register(_at_exit, os.getpid())
    task: SaveTask[T] = SaveTask(name)
    with state.lock:
        if state.thread is None:
            state.thread = ThreadPoolExecutor(1, thread_name_prefix="dtrain-save")
        task.future = state.thread.submit(work, task)
        state.tasks = [old for old in state.tasks if _is_pending(old)]
        state.tasks.append(task)  # type: ignore[arg-type]
    task.future.add_done_callback(_shut_down_if_idle)
    return task


def _shut_down_if_idle(_: object = None, *, wait: bool = False) -> None:
    """Shut down the thread if no task is left, because only a process without threads may fork safely.

    Called by the thread at the end of each task, and by callers that have waited for a task.
    """
    state = _current_state()
    with state.lock:
        if state.thread is not None and all(task.future.done() for task in state.tasks):
            state.finished_thread, state.thread = state.thread, None
            state.finished_thread.shutdown(wait=False)
        ended = state.finished_thread
    if wait and ended is not None:
        ended.shutdown()


def wait_for_slot(max_running: int) -> None:
    """Wait until fewer than ``max_running`` tasks are running. Failures are not raised."""
    running = [task for task in _current_state().tasks if not task.future.done()]
    for task in running[: max(0, len(running) - max_running + 1)]:
        wait(task)


def wait(task: SaveTask[T]) -> None:
    """Wait for the end of a task. A failure remains unreported."""
    before = task.failure_reported
    try:
        task.result()
    except Exception:  # noqa: BLE001 - the task keeps the exception
        task.failure_reported = before


def has_unreported_failure() -> bool:
    """Return True if a task has failed and no caller has received the failure."""
    return any(_is_unreported_failure(task) for task in _current_state().tasks)


def wait_all() -> None:
    """Wait for all tasks, and raise the first unreported failure.

    Raises:
        Exception: the first failure; further failures are added as notes.
    """
    tasks = list(_current_state().tasks)
    for task in tasks:
        wait(task)
    errors = []
    for task in tasks:
        if _is_unreported_failure(task):
            task.failure_reported = True
            errors.append(task.future.exception())
    if errors and errors[0] is not None:
        for other in errors[1:]:
            errors[0].add_note(f"a later task failed, too: {other}")
        raise errors[0]


def _current_state() -> _SaveThreadState:
    if _STATE.pid != os.getpid():
        _STATE.pid, _STATE.thread, _STATE.tasks, _STATE.hooks_registered = os.getpid(), None, [], False
        _STATE.finished_thread, _STATE.lock = None, threading.Lock()
    return _STATE


def _is_unreported_failure(task: SaveTask[object]) -> bool:
    return not task.failure_reported and task.future.done() and task.future.exception() is not None


def _is_pending(task: SaveTask[object]) -> bool:
    return not task.future.done() or _is_unreported_failure(task)


def _on_dist_shutdown(error: BaseException | None) -> None:
    """Finish all saves at the end of ``init_dist``'s block, also if the block has failed."""
    try:
        wait_all()
    except Exception as failure:
        # Without an error of its own, the program would end as if all saves had succeeded.
        if error is None or isinstance(error, SystemExit):
            raise
        error.add_note(f"a save in the background failed, too: {failure}")


def _at_exit(pid: int) -> None:
    """Exit with an error code if the process ends with an unreported failure, and without ``init_dist``'s block."""
    if pid != os.getpid():
        return
    try:
        wait_all()
    except Exception as failure:  # noqa: BLE001 - an exception of an exit handler does not change the exit code
        traceback.print_exception(failure)
        message = "dtrain: a save in the background failed, and the program ended without waiting for its result"
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


PAGE_BYTES = 4096


@dataclass(slots=True, eq=False, repr=False)
class StagingBuffer:
    """Staging memory for one file at a time, pinned if tensors come from a GPU.

    Views of the memory are kept while the layout of the file does not change.

    Args:
        views: views of groups by the first and last key of the group.
    """

    memory: Tensor
    header: bytes = b""
    views: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def fill(self, layout: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
        """Copy a file into the memory. Copies from a GPU are enqueued on its current stream and not awaited.

        The caller must disable autograd.

        Mutates: the memory.
        """
        if self.header != layout.header:
            self.header, self.views = layout.header, {}
            self.memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        for group in group_slots(layout, tensors):
            _copy_flat([tensors[slot.key] for slot in group], self._view(layout, group))
        return SerializedFile.from_buffers([memoryview(self.memory[: layout.size].numpy().data)])

    def _view(self, layout: FileLayout, group: Sequence[TensorSlot]) -> Tensor:
        # Tensors that have moved to another device form other groups.
        ends = group[0].key, group[-1].key
        view = self.views.get(ends)
        if view is None:
            begin, end = layout.ranges[group[0].key][0], layout.ranges[group[-1].key][1]
            view = self.memory[begin:end].view(DTYPES[group[0].dtype])
            self.views[ends] = view
        return view


def _copy_flat(tensors: Sequence[Tensor], into: Tensor) -> None:
    if len(tensors) > 1 and tensors[0].device == into.device:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=into)
    else:
        into.copy_(flatten(tensors), non_blocking=True)


def _allocate_aligned(size: int, pinned: bool) -> Tensor:
    """Allocate page-aligned memory, from which the chunks of a file are written to the disk without another copy."""
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + size]


class StagingPool:
    """Pool of the staging buffers of a process: one per save in progress, each of the largest size needed so far."""

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []

    def acquire(self, size: int, *, pinned: bool) -> StagingBuffer:
        """Return an unused buffer of at least ``size`` bytes, to be released. The first call allocates memory."""
        fitting = [b for b in self._free if b.memory.numel() >= size and b.memory.is_pinned() == pinned]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(best)
            return best
        if self._free:
            # The buffer is too small for this run, so only the new buffer is kept.
            self._free.pop()
        return StagingBuffer(_allocate_aligned(size, pinned))

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)
