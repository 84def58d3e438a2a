"""Run torch's profiler in selected steps of a loop, as a context manager (``profile``) or a transform (``step_profiler``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from dtrain import spans, storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.profiling.driver import PhaseSchedule, ProfilerDriver, schedule
from dtrain.profiling.trace_recorder import ProfileOptions
from dtrain.state import TrainState
from dtrain.step.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics

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
