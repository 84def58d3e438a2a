"""Run torch's profiler in selected steps, as a context manager (``profile``) or a transform (``step_profiler``).

``schedule`` selects the steps. ``snapshot_on_oom`` writes a memory snapshot when an out-of-memory error occurs.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

import torch

from dtrain import spans, storage
from dtrain.arguments import check_int
from dtrain.dist.collectives import raise_if_any_failed
from dtrain.dist.context import register_shutdown_hook
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, OutOfMemoryError
from dtrain.memory.device_memory import is_out_of_memory, snapshot_suffix, write_snapshot
from dtrain.profiling.trace_recorder import ClockOffset, ProfileOptions, TraceRecorder, measure_clock_offset
from dtrain.state import TrainState
from dtrain.step.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics

ProfilerPhase: TypeAlias = Literal["skip", "wait", "warmup", "active", "save"]
"""Phase of a step. ``warmup``: the profiler is prepared. ``active``: it records. ``save``: it records, then writes the trace.
"""

PhaseSchedule: TypeAlias = Callable[[int], ProfilerPhase]
"""Phase of a step by index from 0; equal on all ranks."""


def schedule(*, skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1) -> PhaseSchedule:
    """Create a profiler schedule: skip ``skip_first`` steps, then wait, warm up and record, ``repeat`` times.

    Args:
        skip_first: number of steps before the first cycle. The first step of a process compiles and allocates, so its trace is
            not typical.
        wait: number of steps without profiler at the start of each cycle.
        warmup: number of steps with a prepared profiler that records nothing, to keep the startup cost out of the trace.
        active: number of recorded steps, in one trace per cycle.
        repeat: number of cycles; 0 repeats forever.

    Example:
        >>> import dtrain as dt
        >>> phase_of = dt.profiling.schedule(skip_first=1, wait=1, warmup=1, active=2)
        >>> [phase_of(index) for index in range(6)]
        ['skip', 'wait', 'warmup', 'active', 'save', 'skip']

    Raises:
        ConfigError: an argument is not an integer, or too small.
    """
    for name, number, least in (
        ("skip_first", skip_first, 0),
        ("wait", wait, 0),
        ("warmup", warmup, 0),
        ("active", active, 1),
        ("repeat", repeat, 0),
    ):
        check_int("schedule", name, number, minimum=least)
    cycle = wait + warmup + active

    def phase_of(index: int) -> ProfilerPhase:
        position = index - skip_first
        if position < 0 or (repeat and position >= repeat * cycle):
            return "skip"
        position %= cycle
        if position < wait:
            return "wait"
        if position < wait + warmup:
            return "warmup"
        return "active" if position < cycle - 1 else "save"

    return phase_of


_DEFAULT_SCHEDULE = schedule(skip_first=1, wait=0, warmup=1, active=4, repeat=1)

RankSelection = Literal["all"] | Sequence[int]


def profile(
    path: str | Path,
    *,
    schedule: PhaseSchedule = _DEFAULT_SCHEDULE,
    ranks: RankSelection = "all",
    record_shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
    flops: bool = False,
    compress: bool = False,
) -> ProfilerContext:
    """Profile a loop with torch's profiler in the steps that the schedule selects.

    Call ``profiler.step()`` at the end of each step. Per cycle of the schedule, each rank writes
    ``trace-rank-00003-step-00000120.pt.trace.json`` to ``path``, named after its first step, for Perfetto,
    ``chrome://tracing`` and TensorBoard's profiler. ``merge_traces`` merges the traces of all ranks, and ``diagnose`` reports
    bottlenecks. Outside of the recorded steps no profiler runs. At the end of the block, also after an exception, an
    unfinished recording is written. A trace of the same steps is replaced.

    Steps have the numbers of dtrain's step if the loop uses one, else numbers from 0.

    Args:
        path: local folder, created if missing; reports read ``run / "traces"``.
        schedule: phase of a step by index since the start of the block: ``schedule(...)`` or your own function; equal on all
            ranks.
        ranks: recording ranks, ``"all"`` or a list; with many ranks, select a few, because traces are large.
        record_shapes: if True, record the shapes of arguments.
        memory: if True, record allocations for ``memory_timeline``; on CUDA, and inside ``testing.memory_budget``, also write
            a snapshot per recording, ``memory-rank-00003-step-00000120.pickle`` (``.json``), see ``write_snapshot``.
        stacks: if True, record the call stack of each operation.
        flops: if True, record FLOPs of matrix products and convolutions.
        compress: if True, write ``.json.gz``.

    Returns:
        A ``ProfilerContext``.

    Collective: at the start of the block and of each recording, an exchange on the control channel, and per recording ten small
        all-gathers to compare clocks; so every rank enters the block, recording or not. None if one rank records.
    Host sync: at the end of each recording, on the recording ranks; none else.

    Example:
        >>> import tempfile
        >>> import dtrain as dt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dt.profiling.profile(
        ...         folder, schedule=dt.profiling.schedule(warmup=1, active=2)
        ...     ) as profiler:
        ...         for _ in range(5):
        ...             _ = torch.ones(3).sum()
        ...             profiler.step()
        ...     [path.name for path in Path(folder).iterdir()]
        ['trace-rank-00000-step-00000001.pt.trace.json']

    Raises:
        ConfigError: ``schedule`` is not a function, ``ranks`` has unknown ranks, or ``path`` is on a server; at the start of
            the block or of a recording, another profiler runs in this process.
        PeerError: another profiler runs on another rank.
    """
    driver = _make_driver(
        path, schedule, ranks, record_shapes=record_shapes, memory=memory, stacks=stacks, flops=flops, compress=compress
    )
    return ProfilerContext(driver)


class ProfilerContext:
    """Context manager of a profiled loop, for a single use. See ``profile``."""

    __slots__ = ("_count", "_driver", "_start_step")

    def __init__(self, driver: ProfilerDriver) -> None:
        self._driver = driver
        self._count = 0
        # dtrain's step at the start of the block
        self._start_step = 0

    def __enter__(self) -> ProfilerContext:
        if self._driver.step is not None:
            raise ConfigError("profile: context must be new, got a used one. Call dt.profiling.profile for each loop.")
        self._driver.claim()
        try:
            self._start_step = spans.position()[0]
            self._driver.begin(0)
        except BaseException:
            self._driver.close()
            raise
        return self

    def step(self) -> None:
        """End a step of the loop.

        Raises:
            ConfigError: the call is outside of the block.
        """
        if self._driver.step is None:
            raise ConfigError(
                "profile: step() must be called inside the with block, got a call outside. Move the call into the block."
            )
        self._count += 1
        now = spans.position()[0]
        self._driver.advance(now if now > self._start_step else self._count)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._driver.close()


def step_profiler(
    path: str | Path,
    *,
    schedule: PhaseSchedule = _DEFAULT_SCHEDULE,
    ranks: RankSelection = "all",
    record_shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
    flops: bool = False,
    compress: bool = False,
) -> Transform:
    """Profile steps with a transform instead of a context manager. List the transform first.

    Options and files are those of ``profile``. In the traces ``dtrain.step`` is the step function; the rest of a
    ``ProfilerStep#`` is the loop, such as loader and logging. A recording that is open at the end of the run is written at the
    end of ``init_dist``'s block or at exit; after an error in a step, immediately. Results do not change.

    Args:
        path: see ``profile``.
        schedule: phase of a step by index since the start of the process, so that a resumed run is profiled again.
        ranks: see ``profile``.
        record_shapes: see ``profile``.
        memory: see ``profile``.
        stacks: see ``profile``.
        flops: see ``profile``.
        compress: see ``profile``.

    Collective: see ``profile``.
    Host sync: at the end of each recording.

    Example:
        import dtrain as dt

        profiler = dt.profiling.step_profiler("traces", schedule=dt.profiling.schedule(skip_first=10, active=3))
        step = dt.compose_step(loss_fn, [profiler, dt.transforms.clip_by_norm(1.0)])

    Raises:
        ConfigError: see ``profile``; in the step that starts a recording, another profiler runs in this process.
        PeerError: another profiler runs on another rank.
    """
    driver = _make_driver(
        path, schedule, ranks, record_shapes=record_shapes, memory=memory, stacks=stacks, flops=flops, compress=compress
    )

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            driver.enter_step_fn(state.step)
            try:
                return inner(state, batch, microbatch_size=microbatch_size)
            except BaseException:
                driver.close()
                raise

        return grad_fn

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step = state.step
            try:
                result = inner(state, metrics)
            except BaseException:
                driver.close()
                raise
            driver.leave_step_fn(step)
            return result

        return update_fn

    return Transform(name="step_profiler", grad=grad, update=update, uses_grad=False, read_only=True)


def _make_driver(path: str | Path, schedule: PhaseSchedule, ranks: RankSelection, **options: bool) -> ProfilerDriver:
    folder = storage.resolve_path(path)
    if not isinstance(folder, Path):
        raise ConfigError(f"profile: path must be a local folder, got {path}. Copy the traces afterwards.")
    if not callable(schedule):
        raise ConfigError(
            f"profile: schedule must be a function of a step's index, got {schedule!r}. Use dt.profiling.schedule(active=4)."
        )
    world = get_dist_info().world_size
    if ranks != "all" and (
        isinstance(ranks, str) or not ranks or any(type(rank) is not int or not 0 <= rank < world for rank in ranks)
    ):
        raise ConfigError(
            f"profile: ranks must be 'all' or a list of ranks from 0 to {world - 1}, got {ranks!r}. "
            "Pass ranks=[0], for example."
        )
    return ProfilerDriver(ProfileOptions(folder=folder, **options), schedule, None if ranks == "all" else frozenset(ranks))


class ProfilerDriver:
    """Driver of the profiler, shared by ``profile`` and ``step_profiler``.

    Args:
        options: recording options.
        schedule: phase of each step, by index since the driver was created.
        ranks: recording ranks; None for all ranks.

    Attributes:
        step: step in progress; None before the first step.
    """

    def __init__(self, options: ProfileOptions, schedule: PhaseSchedule, ranks: frozenset[int] | None) -> None:
        self._options, self._schedule, self._ranks = options, schedule, ranks
        self.step: int | None = None
        self._index = 0
        self._phase: ProfilerPhase = "skip"
        self._in_step_fn = False
        self._recorder: TraceRecorder | None = None
        # True after a failure on this rank, which ends profiling
        self._broken = False

    def begin(self, step: int) -> None:
        """Begin the first step, with number ``step``."""
        self.step = step
        self._apply_phase(step)

    def advance(self, step: int) -> None:
        """End a step and begin ``step``."""
        if self._recorder is not None:
            self._recorder.end_step(done=True)
        self._index, self.step, self._in_step_fn = self._index + 1, step, False
        self._apply_phase(step)

    def enter_step_fn(self, step: int) -> None:
        """Enter the step function of ``step``, several times if a transform recomputes the gradient."""
        if self.step is None:
            self.begin(step)
        # The last update was skipped, or the caller caught its error.
        elif self._in_step_fn and self.step != step:
            self.advance(step)
        if not self._in_step_fn and self._recorder is not None and self._phase in ("active", "save"):
            self._recorder.enter_step_fn()
        self._in_step_fn = True

    def leave_step_fn(self, step: int) -> None:
        """Leave the step function. The time until ``enter_step_fn`` belongs to the loop."""
        if self._recorder is not None:
            self._recorder.leave_step_fn()
        self.advance(step + 1)

    def close(self) -> None:
        """Stop and write the recorded steps. Without a recording, do nothing."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            with self._guard():
                path = recorder.write()
                if path is not None:
                    spans.record_event("profiled", step=recorder.first_step, path=str(path))
        _ACTIVE.discard(self)

    def __del__(self) -> None:
        # A step may be dropped during a recording, as in a notebook.
        if self._recorder is not None:
            self.close()

    def claim(self) -> None:
        """Claim the profiler of this process on all recording ranks or on none, before the ranks compare clocks.

        Collective: one exchange, if more than one rank records.

        Raises:
            ConfigError: another profiler is running.
            PeerError: another profiler is running on another rank.
        """
        recording, error = self._recording_ranks(), None
        if get_dist_info().rank in recording and not self._broken and self not in _ACTIVE:
            if _ACTIVE or torch.autograd._profiler_enabled():
                other = "another dt.profiling.profile or dt.profiling.step_profiler" if _ACTIVE else "a profiler of torch's own"
                error = ConfigError(
                    f"profile: only one profiler can run per process, got {other}. End the running profiler first."
                )
            else:
                _ACTIVE.add(self)
                atexit.unregister(_close_active)
                atexit.register(_close_active, None)
                register_shutdown_hook("profile", _close_active)
        try:
            if len(recording) > 1:
                raise_if_any_failed(error, caller="profile")
            elif error is not None:
                raise error
        except BaseException:
            _ACTIVE.discard(self)
            raise

    def _recording_ranks(self) -> frozenset[int]:
        return frozenset(range(get_dist_info().world_size)) if self._ranks is None else self._ranks

    def _apply_phase(self, step: int) -> None:
        """Apply the phase of the step that begins."""
        before, self._phase = self._phase, self._schedule(self._index)
        is_idle = self._phase in ("skip", "wait")
        if before == "save" or (is_idle and before not in ("skip", "wait")):
            self.close()
        if is_idle:
            return
        if before in ("skip", "wait", "save"):
            self.claim()
            self._open_recorder()
        if self._recorder is not None and self._phase != "warmup":
            with self._guard():
                self._recorder.begin_step(step)

    def _open_recorder(self) -> None:
        """Open a recorder on the recording ranks. The remaining ranks only compare clocks."""
        recording = self._recording_ranks()
        offset = measure_clock_offset() if len(recording) > 1 else ClockOffset(0, 0)
        if get_dist_info().rank in recording and not self._broken:
            with self._guard():
                self._recorder = TraceRecorder(options=self._options, offset=offset)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Count the time as the profiler's own. After an error, end profiling on this rank, so that training continues."""
        try:
            with spans.span("profile", "other"):
                yield
        except Exception as error:  # noqa: BLE001 - for example a full disk, or a device without profiler
            self._broken, self._recorder = True, None
            spans.record_event("dropped", logger="profile", error=f"{type(error).__name__}: {error}")
            _ACTIVE.discard(self)
            warnings.warn(f"profile: {type(error).__name__}: {error}. This rank writes no more traces.", stacklevel=2)


# The driver that owns the profiler, if any: a fact of the process, because torch allows one profiler per process. The reference
# is weak, so that a dropped step is freed.
_ACTIVE: weakref.WeakSet[ProfilerDriver] = weakref.WeakSet()


def _close_active(error: BaseException | None) -> None:
    """Close the active profiler, at the end of ``init_dist``'s block and of the process."""
    for driver in list(_ACTIVE):
        driver.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSnapshotTransform(Transform):
    """Transform that is also a context manager. See ``snapshot_on_oom``."""

    folder: storage.AnyPath

    def __enter__(self) -> OomSnapshotTransform:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _write_snapshot_if_oom(error, self.folder, spans.position()[0])


def snapshot_on_oom(path: str | Path) -> OomSnapshotTransform:
    """Write a memory snapshot after an out-of-memory error, as a transform or as a context manager.

    The file is ``oom-rank-00003-step-00000120.pickle`` on CUDA, with lines of code after
    ``torch.cuda.memory._record_memory_history()``, and ``.json`` inside ``testing.memory_budget``; see ``write_snapshot``. The
    snapshot is written while the frames of the step and their tensors are alive. The error propagates.

    List the transform first. A failed attempt of ``auto_microbatch`` that is repeated with a smaller size writes no snapshot.
    If the smallest size fails (``OutOfMemoryError``), the memory of the attempt is already free. On a CPU without a budget,
    memory use is unknown, and a warning is given.

    Args:
        path: local folder or, on a CPU, a folder on a server; created if missing. Reports read ``run / "memory"``.

    Example:
        >>> import tempfile
        >>> import dtrain as dt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         with dt.testing.memory_budget(100), dt.profiling.snapshot_on_oom(folder):
        ...             _ = torch.zeros(1000)
        ...     except torch.OutOfMemoryError:
        ...         [path.name[:14] for path in Path(folder).iterdir()]
        ['oom-rank-00000']
    """
    folder = storage.resolve_path(path)

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            with _snapshot_after_oom(folder, state.step):
                return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            with _snapshot_after_oom(folder, state.step):
                return inner(state, metrics)

        return update_fn

    return OomSnapshotTransform(
        name="snapshot_on_oom", grad=grad, update=update, uses_grad=False, read_only=True, folder=folder
    )


@contextmanager
def _snapshot_after_oom(folder: storage.AnyPath, step: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _write_snapshot_if_oom(error, folder, step)
        raise


def _write_snapshot_if_oom(error: BaseException, folder: storage.AnyPath, step: int) -> None:
    """Write the snapshot after an out-of-memory error. A failure here must not replace the error."""
    if not is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
        return
    try:
        suffix, rank = snapshot_suffix(), get_dist_info().rank
        if suffix is None:
            raise OSError("CPU memory is counted only inside testing.memory_budget")
        storage.make_folders(folder)
        path = write_snapshot(folder / f"oom-rank-{rank:05d}-step-{step:08d}{suffix}")
        spans.record_event("out_of_memory", step=step, snapshot=path)
    except Exception as failure:  # noqa: BLE001 - for example a full disk, or no memory for the file
        spans.record_event("dropped", logger="snapshot_on_oom", error=f"{type(failure).__name__}: {failure}")
        warnings.warn(f"snapshot_on_oom: {failure}. No snapshot is written.", stacklevel=2)
