"""``profile`` and ``step_profiler``: torch's profiler in some steps of a loop, as a context and as a transform."""

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
from dtrain.transform import GradFn, Transform, UpdateFn
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
    """A context around a loop, in which torch's profiler records the steps that the schedule names.

    The loop calls ``prof.step()`` at the end of each step. For each cycle of the schedule each rank leaves
    ``trace-rank-00003-step-00000120.pt.trace.json`` in ``path``, named after its first step. Perfetto and
    ``chrome://tracing`` open it, and TensorBoard's profiler, which goes by the end of the name. ``merge_traces`` makes one of
    all ranks', and ``diagnose`` says what stands out. Outside of the windows there is no profiler. Leaving the context in the
    middle of one writes what is there, after an exception, too. A trace of the same steps is replaced.

    Steps are numbered as dtrain's step counts them, if it is used in the loop; else from 0.

    Args:
        path: on this machine, made if it is missing; ``run.folder / "traces"`` is where a report looks.
        schedule: the phase of a step by its index since the context was entered: ``schedule(...)``, or a function of your own.
            The same on all ranks.
        ranks: who records, ``"all"`` or some numbers. The files of a rank are as large as its steps have operations: of many
            ranks, name a few.
        record_shapes: of the arguments of operations.
        memory: every allocation, for ``memory_timeline``. On CUDA, and inside ``testing.memory_budget``, also a snapshot at the
            end of each window, ``memory-rank-00003-step-00000120.pickle`` (``.json``); see ``write_snapshot``.
        stacks: the lines of code that called each operation.
        flops: of matrix products and convolutions.
        compress: write ``.json.gz``.

    Returns:
        A ``ProfilerContext``.

    Collective: on entering it and where a window opens, an exchange on the control group, and there ten small all-gathers,
        which compare the clocks; so every rank enters the context, whether it records or not. None if one rank records.
    Host sync: at the end of each window, on the ranks that record; none else.

    Raises:
        ConfigError: no function for a schedule, ranks that there are none of, a folder on a server; entering it, or where a
            window opens, when another profiler runs in this process.
        PeerError: it does on another rank.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with profile(folder, schedule=cyclic(warmup=1, active=2)) as prof:
        ...         for _ in range(5):
        ...             _ = torch.ones(3).sum()
        ...             prof.step()
        ...     [path.name for path in Path(folder).iterdir()]
        ['trace-rank-00000-step-00000001.pt.trace.json']
    """
    what = ProfileOptions(
        folder=_local_folder(path), record_shapes=record_shapes, memory=memory, stacks=stacks, flops=flops, compress=compress
    )
    return ProfilerContext(_make_driver(what, schedule, ranks))


class ProfilerContext:
    """A loop that is profiled; made by ``profile``, and of one use."""

    __slots__ = ("_at", "_count", "_driver")

    def __init__(self, driver: ProfilerDriver) -> None:
        self._driver = driver
        self._count = 0
        self._at = 0  # how far dtrain's own step was when this began

    def __enter__(self) -> ProfilerContext:
        if self._driver.step is not None:
            raise ConfigError("profile: this one was used already; make a new one for each loop")
        self._driver.claim()
        try:
            self._at = spans.position()[0]
            self._driver.begin(0)
        except BaseException:
            self._driver.close()
            raise
        return self

    def step(self) -> None:
        """A step of the loop has ended.

        Raises:
            ConfigError: outside of the context.
        """
        if self._driver.step is None:
            raise ConfigError("profile: step() is called inside the context; with dt.profiling.profile(folder) as prof: ...")
        self._count += 1
        now = spans.position()[0]
        self._driver.advance(now if now > self._at else self._count)

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
    """``profile`` as a transform: list it first, and it follows the steps by itself.

    In its traces ``dtrain.step`` is what the step function does, so the rest of a ``ProfilerStep#`` is the loop around it: the
    loader, the logging. A window that is open when the run ends is written when ``init_dist``'s block is left, or at exit; one
    in which the step raises is written at once. Nothing that is computed changes.

    Args:
        path: see ``profile``.
        schedule: by the index of the step since this process began, so a run that is resumed is profiled again.
        ranks: see ``profile``.
        record_shapes: see ``profile``.
        memory: see ``profile``.
        stacks: see ``profile``.
        flops: see ``profile``.
        compress: see ``profile``.

    Collective: see ``profile``.
    Host sync: at the end of each window.

    Raises:
        ConfigError: as ``profile`` does; in the step where a window opens, when another profiler runs in this process.
        PeerError: it does on another rank.
    """
    what = ProfileOptions(
        folder=_local_folder(path), record_shapes=record_shapes, memory=memory, stacks=stacks, flops=flops, compress=compress
    )
    driver = _make_driver(what, schedule, ranks)

    def grad(inner: GradFn) -> GradFn:
        def marked(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            driver.enter_step_fn(state.step)
            try:
                return inner(state, batch, microbatch_size=microbatch_size)
            except BaseException:
                driver.close()
                raise

        return marked

    def update(inner: UpdateFn) -> UpdateFn:
        def followed(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            step = state.step
            try:
                stepped = inner(state, metrics)
            except BaseException:
                driver.close()
                raise
            driver.leave_step_fn(step)
            return stepped

        return followed

    return Transform(name="profiled", grad=grad, update=update, uses_grad=False, read_only=True)


def _local_folder(folder: str | Path) -> Path:
    place = storage.resolve_path(folder)
    if not isinstance(place, Path):
        raise ConfigError(f"profile: traces are written to a folder of this machine, got {folder}; copy them afterwards")
    return place


def _make_driver(what: ProfileOptions, schedule: PhaseSchedule, ranks: RankSelection) -> ProfilerDriver:
    if not callable(schedule):
        raise ConfigError(
            f"profile: schedule is a function of a step's index, such as dt.profiling.schedule(active=4), got {schedule!r}"
        )
    if ranks == "all":
        return ProfilerDriver(what, schedule, None)
    world = get_dist_info().world_size
    if isinstance(ranks, str) or not ranks or any(type(rank) is not int or not 0 <= rank < world for rank in ranks):
        raise ConfigError(f"profile: ranks is 'all', or some of the ranks 0 to {world - 1}, got {ranks!r}")
    return ProfilerDriver(what, schedule, frozenset(ranks))
