"""The thread that carries out saves, in their order, while training goes on: one for each process, whatever it saves.

Its collectives run on the ``background`` group, which no other thread uses. So ranks agree on the order of saves by calling
``save_sharded`` in the same order, and on nothing else.

Copies of what is to be saved, in host memory that is used again and again: training may go on when they are made."""

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
from dtrain.dist.shutdown import register_shutdown_hook
from dtrain.errors import CheckpointError

T = TypeVar("T")
_POLL_S = 0.5  # while waiting: how often to tell the launcher that the save gets on


@dataclass(slots=True, eq=False)
class SaveTask(Generic[T]):
    """A piece of work in the thread: its result, and how far it is."""

    name: str
    future: Future[T] = field(init=False, repr=False)
    progress: int = 0  # goes up with every piece that is done
    failure_reported: bool = False  # somebody was told that it failed
    cancelled: bool = False  # nobody waits for it any more, and what it works on may change

    def advance(self) -> None:
        """Note that the work gets on. Called by the threads that do it.

        Raises:
            CheckpointError: it was given up.
        """
        self.progress += 1
        self.raise_if_cancelled()

    def raise_if_cancelled(self) -> None:
        """Raise if the work is not wanted any more."""
        if self.cancelled:
            raise CheckpointError(f"{self.name} was interrupted")

    def result(self, timeout_s: float | None = None) -> T:
        """What the work returned; waits for it.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds.
            Exception: what the work raised.
        """
        with spans.outermost_span("save"):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> T:
        moved = self.progress
        if not self.future.done():
            heartbeats.heartbeat("save")
        while True:
            step_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s)
            try:
                result = self.future.result(step_s)
            except NotYet:
                if self.future.done():  # just now; or it was the work that ran out of time
                    self.failure_reported = self.future.exception() is not None
                    return self.future.result()
                if timeout_s is not None and (timeout_s := timeout_s - step_s) <= 0:
                    raise TimeoutError(f"{self.name} has not ended yet") from None
                if self.progress != moved:
                    moved = self.progress
                    heartbeats.heartbeat("save")
            except BaseException:
                self.failure_reported = self.future.done()  # else an interrupt while waiting
                _shut_down_if_idle(wait=self.failure_reported)
                raise
            else:
                _shut_down_if_idle(wait=True)
                return result


@dataclass(slots=True, eq=False)
class _SaveThreadState:
    """The thread of this process and what it has to do; a fork has none of it."""

    pid: int = 0
    thread: ThreadPoolExecutor | None = None
    tasks: list[SaveTask[object]] = field(default_factory=list)
    hooks_registered: bool = False
    finished_thread: ThreadPoolExecutor | None = None  # the last one that has nothing to do any more
    lock: threading.Lock = field(default_factory=threading.Lock)


_STATE = _SaveThreadState()


def submit(name: str, work: Callable[[SaveTask[T]], T]) -> SaveTask[T]:
    """Have ``work`` done by the thread, after all that it was given before.

    Args:
        name: for messages.
        work: gets its own task, to tell how far it is.
    """
    process = _current_state()
    if not process.hooks_registered:
        process.hooks_registered = True
        register_shutdown_hook("saves", _on_dist_shutdown)
        atexit.register(_at_exit, os.getpid())
    task: SaveTask[T] = SaveTask(name)
    with process.lock:
        if process.thread is None:
            process.thread = ThreadPoolExecutor(1, thread_name_prefix="dtrain-save")
        task.future = process.thread.submit(work, task)
        process.tasks = [old for old in process.tasks if _is_pending(old)]
        process.tasks.append(task)  # type: ignore[arg-type]
    task.future.add_done_callback(_shut_down_if_idle)
    return task


def _shut_down_if_idle(_: object = None, *, wait: bool = False) -> None:
    """Let the thread end when it has nothing to do: a process without threads may be forked.

    Called at the end of each task by the thread itself, and by who has waited for one.
    """
    process = _current_state()
    with process.lock:
        if process.thread is not None and all(task.future.done() for task in process.tasks):
            process.finished_thread, process.thread = process.thread, None
            process.finished_thread.shutdown(wait=False)
        ended = process.finished_thread
    if wait and ended is not None:
        ended.shutdown()


def wait_for_slot(max_running: int) -> None:
    """Wait until fewer than ``max_running`` tasks are under way, whatever becomes of the others."""
    running = [task for task in _current_state().tasks if not task.future.done()]
    for task in running[: max(0, len(running) - max_running + 1)]:
        wait(task)


def wait(task: SaveTask[T]) -> None:
    """Wait for the end of a task; a failure of it stays to be raised."""
    before = task.failure_reported
    try:
        task.result()
    except Exception:  # noqa: BLE001 - kept in the task
        task.failure_reported = before


def has_unreported_failure() -> bool:
    """Whether a task has failed and nobody was told."""
    return any(_is_unreported_failure(task) for task in _current_state().tasks)


def wait_all() -> None:
    """Wait for all tasks, and raise the first failure that nobody was told of.

    Raises:
        Exception: that failure; the others are notes of it.
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
            errors[0].add_note(f"after it, too: {other}")
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
    """At the end of ``init_dist``'s block: the saves that were begun are finished, also when the loop has failed."""
    try:
        wait_all()
    except Exception as failure:
        if error is None or isinstance(error, SystemExit):  # a program that thinks that all is well
            raise
        error.add_note(f"besides, a save in the background failed: {failure}")


def _at_exit(pid: int) -> None:
    """At the end of a process that never left such a block: a failure that nobody was told of is its exit code."""
    if pid != os.getpid():
        return
    try:
        wait_all()
    except Exception as failure:  # noqa: BLE001 - what an exit handler raises does not change the exit code
        traceback.print_exception(failure)
        message = "dtrain: a save in the background failed and the program has ended without asking for it"
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


PAGE_BYTES = 4096


@dataclass(slots=True, eq=False, repr=False)
class StagingBuffer:
    """Memory for one file at a time, pinned where tensors come from a GPU; and its views, kept while the layout stays."""

    memory: Tensor
    header: bytes = b""
    views: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # by the first and last key of a run

    def fill(self, placed: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
        """The file's image, copied. From a GPU the copy is asked for, in the order of its stream, and not waited for.

        To be called where no gradients are recorded.

        Mutates: the memory.
        """
        if self.header != placed.header:
            self.header, self.views = placed.header, {}
            self.memory[: len(placed.header)] = torch.frombuffer(bytearray(placed.header), dtype=torch.uint8)
        for run in group_slots(placed, tensors):
            _copy_flat([tensors[box.key] for box in run], self._view(placed, run))
        return SerializedFile.from_buffers([memoryview(self.memory[: placed.size].numpy().data)])

    def _view(self, placed: FileLayout, run: Sequence[TensorSlot]) -> Tensor:
        ends = run[0].key, run[-1].key  # tensors that have moved to another device make other runs
        view = self.views.get(ends)
        if view is None:
            begin, end = placed.ranges[run[0].key][0], placed.ranges[run[-1].key][1]
            view = self.memory[begin:end].view(DTYPES[run[0].dtype])
            self.views[ends] = view
        return view


def _copy_flat(tensors: Sequence[Tensor], into: Tensor) -> None:
    if len(tensors) > 1 and tensors[0].device == into.device:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=into)
    else:
        into.copy_(flatten(tensors), non_blocking=True)


def _allocate_aligned(size: int, pinned: bool) -> Tensor:
    """Memory that begins at a page: the chunks of a file whose image it is go to the disk without another copy."""
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + size]


class StagingPool:
    """The buffers of a process: as many as there were saves in flight at a time, each as large as was ever needed."""

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []

    def acquire(self, size: int, *, pinned: bool) -> StagingBuffer:
        """A buffer of at least ``size`` bytes that nobody uses; ``give`` it back. The first time costs an allocation."""
        fitting = [b for b in self._free if b.memory.numel() >= size and b.memory.is_pinned() == pinned]
        if fitting:
            found = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(found)
            return found
        if self._free:
            self._free.pop()  # too small for this run: do not keep both
        return StagingBuffer(_allocate_aligned(size, pinned))

    def release(self, buffer: StagingBuffer) -> None:
        """Take back a buffer."""
        self._free.append(buffer)
