"""Run saves in their order in one background thread per process, while training continues.

The collectives of the thread run on the ``background`` group, which no other thread uses. Ranks agree on the order of saves by
calling ``save_sharded`` in the same order.

``StagingPool`` owns reusable host memory for copies of the state, so that training may continue during a save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dtrain import spans
from dtrain.checkpoint.data_file import FileLayout, SerializedFile, TensorSlot, flatten, group_slots, serialize_in_place
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.process_instance import process_instance
from dtrain.checkpoint.write_plan import RankWritePlan
from dtrain.device import is_accelerator
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
                self.thread.shut_down_if_idle(wait=self.failure_reported)
                raise
            else:
                self.thread.shut_down_if_idle(wait=True)
                return result


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


def save_thread() -> SaveThread:
    """Return the thread of this process."""
    return process_instance(SaveThread)


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
        # Without a header, two layouts cannot be told apart.
        if self.header != layout.header or not layout.header:
            self.header, self.views = layout.header, {}
        if layout.header and not self.views:
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
    """Pool of staging buffers: one per save in progress, each of the largest size needed so far."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StagedFiles:
    """Contents of a rank's files in memory, and the buffers to release after the save.

    Args:
        files: contents by file name.
        copy_events: events after the copies from GPUs.
    """

    files: Mapping[str, SerializedFile]
    copy_events: Sequence[torch.Event]
    buffers: Sequence[StagingBuffer]
    pool: StagingPool

    def wait(self) -> None:
        """Wait for the copies from GPUs."""
        for event in self.copy_events:
            event.synchronize()

    def release(self) -> None:
        """Return the buffers to their pool."""
        for buffer in self.buffers:
            self.pool.release(buffer)


def stage_files(write_plan: RankWritePlan, pool: StagingPool, *, copy: bool) -> StagedFiles:
    """Serialize a rank's files. Tensors are copied if ``copy`` is True, or if they are not on the CPU."""
    accelerators = {
        tensor.device for tensor in write_plan.tensors.values() if not tensor.is_cpu and is_accelerator(tensor.device)
    }
    if not copy and not accelerators:
        files = {name: serialize_in_place(file, write_plan.tensors) for name, file in write_plan.files.items()}
        return StagedFiles(files=files, copy_events=(), buffers=(), pool=pool)
    buffers = [pool.acquire(file.size, pinned=bool(accelerators)) for file in write_plan.files.values()]
    pairs = zip(buffers, write_plan.files.items(), strict=True)
    files = {name: buffer.fill(file, write_plan.tensors) for buffer, (name, file) in pairs}
    # The copies are in the order of each device's current stream.
    copy_events = [torch.accelerator.current_stream(device).record_event() for device in accelerators]
    return StagedFiles(files=files, copy_events=copy_events, buffers=buffers, pool=pool)
