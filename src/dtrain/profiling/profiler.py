"""Run torch's profiler in selected steps, as a context manager (``profile``) or a transform (``step_profiler``).

``schedule`` selects the steps. ``ProfilerDriver`` switches a ``TraceRecorder`` on and off, which writes one trace per cycle.
Ranks compare their clocks, so that traces can be merged. ``snapshot_on_oom`` writes a snapshot after an out-of-memory error.
"""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, record_function, supported_activities

from dtrain import spans, storage
from dtrain.arguments import check_int, warn
from dtrain.device import is_accelerator
from dtrain.dist.collectives import all_gather_numbers, raise_if_any_failed
from dtrain.dist.context import register_shutdown_hook
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, OutOfMemoryError
from dtrain.memory.device_memory import is_out_of_memory, snapshot_suffix, write_snapshot
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

TRACE_FORMAT = 1
"""Version of the metadata under ``dtrain`` in a trace."""
# The tightest bounds of all rounds are used. The first rounds are slow.
_ROUNDS = 8


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
            warn(f"profile: {type(error).__name__}: {error}. This rank writes no more traces.")


# The driver that owns the profiler, if any: a fact of the process, because torch allows one profiler per process. The reference
# is weak, so that a dropped step is freed.
_ACTIVE: weakref.WeakSet[ProfilerDriver] = weakref.WeakSet()


def _close_active(error: BaseException | None) -> None:
    """Close the active profiler, at the end of ``init_dist``'s block and of the process."""
    for driver in list(_ACTIVE):
        driver.close()


class ClockOffset(NamedTuple):
    """Offset of a clock in nanoseconds: the true value is within ``error_bound_ns`` of ``ahead_ns``."""

    ahead_ns: int
    error_bound_ns: int


def measure_clock_offset() -> ClockOffset:
    """Measure this rank's ``time.time_ns`` minus that of rank 0; zeros on rank 0 and for a single rank.

    No rank leaves a gather before all ranks have entered. So the time of rank r after the gather is later than the time of
    rank 0 before the gather, and vice versa: each round gives a lower and an upper bound, and the tightest bounds of all
    rounds are used. The bounds hold on any network, unless a clock is set in the meantime.

    Collective: ten all-gathers of two numbers on the control channel, about a millisecond.
    """
    info = get_dist_info()
    if info.world_size == 1:
        return ClockOffset(0, 0)
    # Seconds of each rank as origin: float64 then holds the rest to a fraction of a nanosecond.
    zero = time.time_ns() // 10**9
    starts = [int(row[0]) for row in all_gather_numbers([zero, 0], caller="profile")]
    entry_times, rows_of_rank_0, exit_times = [], [], [0.0]
    for _ in range(_ROUNDS + 1):
        entry_times.append(float(time.time_ns() - zero * 10**9))
        # Each gather also sends the exit time of the last gather.
        rows = all_gather_numbers([entry_times[-1], exit_times[-1]], caller="profile")
        rows_of_rank_0.append(rows[0])
        exit_times.append(float(time.time_ns() - zero * 10**9))
    lower = max(entry - later[1] for entry, later in zip(entry_times[:-1], rows_of_rank_0[1:], strict=True))
    upper = min(exit_time - first[0] for exit_time, first in zip(exit_times[1:-1], rows_of_rank_0[:-1], strict=True))
    origin_offset = (zero - starts[0]) * 10**9
    if info.rank == 0:
        return ClockOffset(0, 0)
    return ClockOffset(origin_offset + round((lower + upper) / 2), round(abs(upper - lower) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Recording options and the output folder."""

    folder: Path
    record_shapes: bool
    memory: bool
    stacks: bool
    flops: bool
    compress: bool


@dataclass(slots=True, eq=False)
class TraceRecorder:
    """Recorder of one trace: ``begin_step`` at the start of each step after the warm-up, ``write`` at the end.

    Args:
        options: recording options.
        offset: offset of this rank's clock.
    """

    options: ProfileOptions
    offset: ClockOffset
    first_step: int | None = None
    _profiler: torch.profiler.profile = field(init=False)
    _steps: list[dict[str, Any]] = field(default_factory=list)
    # span totals at the start of the step in progress
    _last_totals: Mapping[str, spans.SpanTime] | None = None
    # open marks: the step, then the step function
    _open_marks: list[record_function] = field(default_factory=list)
    # True if this recorder enabled CUDA's allocation history; a history enabled earlier stays on
    _records_history: bool = False

    def __post_init__(self) -> None:
        on_device = is_accelerator(get_dist_info().device)
        self._profiler = torch.profiler.profile(
            activities=supported_activities() if on_device else [ProfilerActivity.CPU],
            record_shapes=self.options.record_shapes,
            profile_memory=self.options.memory,
            with_stack=self.options.stacks,
            with_flops=self.options.flops,
            # There is one cycle. torch 2.11 warns otherwise that the events of earlier cycles are lost.
            acc_events=True,
        )
        self._profiler.prepare_trace()

    def begin_step(self, step: int) -> None:
        """Mark the start of ``step``. The first step starts the recording."""
        if self.first_step is None:
            if self.options.memory and get_dist_info().device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
                torch.cuda.memory._record_memory_history(stacks="python")
                self._records_history = True
            self._profiler.start_trace()
            self.first_step = step
        self._steps.append({"step": step, "done": False, "spans": {}})
        self._last_totals = spans.totals()
        self._open(f"ProfilerStep#{step}")

    def end_step(self, *, done: bool) -> None:
        """Mark the end of the step in progress, if any. ``done`` is False if the end of the recording cuts the step short."""
        while self._open_marks:
            self._open_marks.pop().__exit__(None, None, None)
        before, self._last_totals = self._last_totals, None
        if before is not None:
            zero = spans.SpanTime(0, 0.0)
            passed = {name: total.seconds - before.get(name, zero).seconds for name, total in spans.totals().items()}
            positive = {name: seconds for name, seconds in passed.items() if seconds > 0}
            self._steps[-1] |= {"done": done, "spans": positive}

    def enter_step_fn(self) -> None:
        """Mark the start of the step function. The time before belongs to the loop."""
        self._open("dtrain.step")

    def leave_step_fn(self) -> None:
        """Mark the end of the step function."""
        if len(self._open_marks) == 2:
            self._open_marks.pop().__exit__(None, None, None)

    def write(self) -> Path | None:
        """Stop, write the recorded steps and return the file; None if no step was recorded."""
        recorded = self.first_step is not None
        try:
            self.end_step(done=False)
            if not recorded:
                # A prepared profiler can be stopped only after a start.
                self._profiler.start_trace()
            else:
                self._profiler.add_metadata_json("dtrain", json.dumps(self._metadata()))
            self._profiler.stop_trace()
            return self._write_files() if recorded else None
        finally:
            if self._records_history:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _open(self, name: str) -> None:
        mark = record_function(name)
        mark.__enter__()
        self._open_marks.append(mark)

    def _metadata(self) -> dict[str, Any]:
        info = get_dist_info()
        return {
            "format": TRACE_FORMAT,
            "rank": info.rank,
            "world_size": info.world_size,
            "device": info.device.type,
            "offset_ns": self.offset.ahead_ns,
            "offset_bound_ns": self.offset.error_bound_ns,
            "steps": self._steps,
        }

    def _write_files(self) -> Path:
        storage.make_folders(self.options.folder)
        label = f"rank-{get_dist_info().rank:05d}-step-{self.first_step:08d}"
        path = self.options.folder / f"trace-{label}.pt.trace.json{'.gz' if self.options.compress else ''}"
        self._export(path)
        suffix = snapshot_suffix() if self.options.memory else None
        if suffix is not None:
            write_snapshot(self.options.folder / f"memory-{label}{suffix}")
        return path

    def _export(self, path: Path) -> None:
        """Write the trace under a temporary name and rename the file, so that a trace is complete or absent.

        torch first writes ``NAME.tmp`` and raises nothing on a full disk. Its own compression would use the system's folder
        for temporary files.
        """
        plain = path.with_name(f".unfinished-{path.name.removesuffix('.gz')}")
        packed, partial = plain.with_name(f"{plain.name}.gz"), plain.with_name(f"{plain.name}.tmp")
        try:
            with suppress(FileNotFoundError):
                # A killed process may have left the file.
                storage.remove_file(plain)
            self._profiler.export_chrome_trace(str(plain))
            if not storage.exists(plain):
                raise OSError(f"torch could not write {path}. Check that the disk is not full")
            if self.options.compress:
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target)
            storage.rename(packed if self.options.compress else plain, path)
        finally:
            for file in (plain, packed, partial):
                with suppress(OSError):
                    storage.remove_file(file)


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
        warn(f"snapshot_on_oom: {failure}. No snapshot is written.")
