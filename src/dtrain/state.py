"""``TrainState``: everything a training step reads and replaces, and ``ShardSpec``: how its model is laid out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.clock import Clock
from dtrain.dist import preemption
from dtrain.dist.batch_info import LoaderHistory, StepBatch, TrackedLoader
from dtrain.dist.init import check_init_dist_called, get_dist_info
from dtrain.dist.mesh import ReplicaInfo
from dtrain.dist.step_sync import StepCounts
from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError, StaleStateError
from dtrain.fqn import parameters_by_fqn, unwrap_module
from dtrain.init_checks import check_fused_foreach, check_model_and_optimizer, check_optimizer_params, check_params
from dtrain.run_context import RunContext
from dtrain.typing import Batch, TransformState

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate", "none"]
Accumulate = Literal["local", "sharded"]
Buffers = Literal["broadcast", "mean", "local"]
_SPEC_ATTRIBUTE = "_dtrain_spec"  # the attribute of a module that shard_model leaves its ShardSpec in
_RUNS_ATTRIBUTE = "_dtrain_runs"  # the attribute of a model that Step.init leaves its _Runs in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSpec:
    """How a model is laid out. ``shard_model`` sets it; a plain model in one process has ``strategy="none"``.

    Args:
        strategy: the name that ``shard_model`` was given.
        mesh: the whole mesh, None for a plain model.
        data_rank: this rank's place among those that see different data.
        data_ranks: how many of those there are.
        ranks_per_batch: ranks that work on one batch together, over the mesh's ``cp`` and ``tp``; those of a batch follow each other.
        counts_in_loss: whether this rank's sums count. Ranks along ``tp`` compute the same ones, so only those of the first do.
        accumulate: whether gradients wait for a step's last microbatch at full size, or as shards.
        buffers: what becomes of persistent buffers that a forward changed.
        ignored_params: names of the parameters that are whole on every rank.
        compute_device: the device of forward and backward, where parameters are kept on another one; else None.
        replica_info: the copies of the model while they train apart: gradients are summed within each, and parameters may differ. None
            otherwise, and always in what ``shard_model`` sets; see ``split_replicas``.
    """

    strategy: Strategy = "none"
    mesh: DeviceMesh | None = field(default=None, repr=False)
    data_rank: int = 0
    data_ranks: int = 1
    ranks_per_batch: int = 1
    counts_in_loss: bool = True
    accumulate: Accumulate = "local"
    buffers: Buffers = "broadcast"
    ignored_params: tuple[str, ...] = ()
    compute_device: torch.device | None = None
    replica_info: ReplicaInfo | None = field(default=None, repr=False)


def attach_spec(model: nn.Module, spec: ShardSpec) -> None:
    """Remember ``spec`` on ``model``. Mutates: ``model`` (one attribute, in no state dict)."""
    setattr(unwrap_module(model), _SPEC_ATTRIBUTE, spec)


def get_spec(model: nn.Module) -> ShardSpec:
    """The ``ShardSpec`` of a model, that of a plain one when ``shard_model`` never saw it."""
    spec = unwrap_module(model).__dict__.get(_SPEC_ATTRIBUTE)  # nn.Module is slow to say that it has no such attribute
    return spec if isinstance(spec, ShardSpec) else ShardSpec()


def get_device(model: nn.Module) -> torch.device:
    """Where ``model`` computes: where its parameters are, unless they are kept elsewhere; a model without any, as this rank."""
    return get_spec(model).compute_device or next((param.device for param in model.parameters()), get_dist_info().device)


class _ModelRuns:
    """The runs that train a model, oldest first. An attribute of the model, with weak references: it keeps no run alive."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[weakref.ref[RunContext]] = []

    def add(self, shared: RunContext) -> None:
        self._runs = [run for run in self._runs if run() is not None]
        self._runs.append(weakref.ref(shared))

    def live(self) -> list[RunContext]:
        return [run for ref in self._runs if (run := ref()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy or a pickle of the model is trained by none of these runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TrainState:
    """A training run between two steps. ``Step.init`` makes the first one, a step replaces it.

    Args:
        model: mutated in place by training.
        optimizer: mutated in place by training.
        spec: how the model is laid out.
        params: clean name -> parameter (sharded ones are DTensors), captured once; a tied parameter appears once.
        aliases: further names of tied parameters -> the name in ``params``.
        clock: how far training has come.
        transform_states: each transform's own state, by the transform's name.
        seed: what all derived random streams start from.
        step_counts: what the ranks agreed for the step in progress; None between steps.
        step_batch: the batch of the step in progress; None between steps.
        loader_history: the loaders that batches came from; in no checkpoint.

    A state that has been stepped is spent: using it again raises ``StaleStateError``, since its parameters are gone.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    spec: ShardSpec
    params: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    transform_states: Mapping[str, TransformState] = field(default_factory=dict)
    seed: int = 0
    step_counts: StepCounts | None = None
    step_batch: StepBatch | None = None
    loader_history: LoaderHistory = field(default_factory=LoaderHistory)
    generation: int = 0
    run_context: RunContext = field(default_factory=RunContext)

    @classmethod
    def newest(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainState:
        """Return the newest state of ``model``, where the variable that held it is out of reach, as after Ctrl-C in a function.

        It is the state after the last complete step. The model keeps no state alive: some state of the run must still be held.
        In an ``except`` block the interrupted function holds one.

        Args:
            model: the model that was given to ``Step.init``.
            optimizer: that of the run, needed where several optimizers train parts of the model in runs of their own.

        Raises:
            ConfigError: no run of ``model`` is alive, or several are and none contains the others.
            StaleStateError: an update or a load was interrupted, so the parameters belong to no step.

        Example:
            >>> import dtrain as dt
            >>> model = torch.nn.Linear(1, 1)
            >>> step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch).mean(), weight=len))
            >>> def train():
            ...     state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            ...     state, metrics = step(state, torch.ones(2, 1))
            ...     raise KeyboardInterrupt
            >>> try:
            ...     train()
            ... except KeyboardInterrupt:
            ...     state = dt.TrainState.newest(model)
            >>> state.step
            1
        """
        runs = _live_runs(model, optimizer)
        if not runs:
            raise ConfigError(
                "TrainState.newest: no state of this model is alive; call it in the `except` block around the function that "
                "trains, with the model that Step.init was given"
            )
        shared = runs[-1]
        if shared.interrupted_write is not None:
            raise StaleStateError(f"TrainState.newest: {shared.interrupted_write}")
        made = object.__new__(cls)
        for put, value in zip(_SET_FIELDS, (*shared.newest_fields, shared), strict=True):
            put(made, value)
        if made.generation != shared.generation:
            raise StaleStateError(
                f"TrainState.newest: step {made.step} was interrupted after the update and before the tick of the clock; load "
                "the last checkpoint"
            )
        return made

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def device(self) -> torch.device:
        """Where the model computes: where its parameters are, unless they are offloaded."""
        return self.spec.compute_device or next(iter(self.params.values())).device

    def crossed(self, interval: Duration | int | str) -> bool:
        """Return True if the last step crossed a boundary of ``interval``: ``"100ba"``, ``"1ep"``, ``"0.1dur"``, ``100``.

        An epoch is one of the loader's. After every step on its last batch the answer is True: if a batch takes several steps,
        ask once, after the last of them.

        Raises:
            ConfigError: no duration, a share of a run of unknown length, or epochs of batches that no loader handed out.
        """
        return self.clock.crossed(interval)

    def reached(self, point: Duration | int | str) -> bool:
        """Whether training has come as far as ``point``, in any unit: a loop over tokens or hours ends by it."""
        return self.clock.reached(point)

    @property
    def padding_sample(self) -> Batch | None:
        """A real sample for a rank that has none in the batch of the step in progress; None if the loader has none."""
        return None if self.step_batch is None or self.step_batch.info is None else self.step_batch.info.padding_sample

    def with_padding_sample(self, sample: Batch | None) -> TrainState:
        """This state with another spare sample: the one that a batch method made of the loader's."""
        if self.step_batch is None or self.step_batch.info is None:
            return self
        return self._replace(step_batch=replace(self.step_batch, info=replace(self.step_batch.info, padding_sample=sample)))

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to None. Mutates: the parameters' gradients."""
        for param in self.params.values():
            param.grad = None

    def _check_not_stale(self, caller: str) -> None:
        """Raise ``StaleStateError`` if a later state of this run exists, or its parameters are swapped for an average."""
        if self.run_context.swapped_average is not None:
            raise StaleStateError(
                f"{caller}: the average {self.run_context.swapped_average!r} is in the place of the parameters; leave "
                f"`with dt.transforms.use_average(state, {self.run_context.swapped_average!r}):` first"
            )
        if self.run_context.interrupted_write is not None:
            raise StaleStateError(f"{caller}: {self.run_context.interrupted_write}")
        if self.generation != self.run_context.generation:
            raise StaleStateError(
                f"{caller}: this state was stepped already (step {self.step}), and its parameters have changed since; "
                "keep the returned one: `state, metrics = step(state, batch)`"
            )

    def _check_replicas_joined(self, caller: str) -> None:
        """Raise ``ConfigError`` while copies of the model train apart: there is no one state of the run then."""
        if self.spec.replica_info is not None:
            raise ConfigError(
                f"{caller}: {self.spec.replica_info.count} copies of the model are training apart at step {self.step}, so there is no "
                "one state of the run; make one of them first: `state = dt.transforms.join_replicas(state)`"
            )

    def _next(self, **changes: Any) -> TrainState:
        """The state after an update, with ``changes``; from now on this one is spent."""
        self.run_context.generation += 1
        return self._replace(generation=self.run_context.generation, **changes)

    def _replace(self, **changes: Any) -> TrainState:
        """This state with other values in some fields. A step does this several times, and ``dataclasses.replace`` is slow."""
        made = object.__new__(TrainState)
        for put, value in zip(_SET_FIELDS, _GET_FIELDS(self), strict=True):
            put(made, value)
        for name, value in changes.items():
            object.__setattr__(made, name, value)
        if made.step_counts is None and made.step_batch is None:
            made._record_as_newest()
        return made

    def _record_as_newest(self) -> None:
        """Make this the state that ``newest`` returns. Mutates: ``shared``."""
        if self.generation == self.run_context.generation:
            self.run_context.newest_fields = _GET_FIELDS(self)[:-1]

    def with_transform_state(self, name: str, content: TransformState) -> TrainState:
        """This state with the slice of one transform replaced."""
        return self._replace(transform_states={**self.transform_states, name: content})

    def __repr__(self) -> str:
        return (
            f"TrainState(step={self.step}, params={len(self.params)}, strategy={self.spec.strategy!r}, "
            f"optimizer={type(self.optimizer).__name__}, slices={sorted(self.transform_states)}, seed={self.seed})"
        )


_INTERRUPTED_MESSAGE = (
    "{where} was interrupted at step {step} after it had begun to write parameters, so they belong to no step; build the state "
    "anew and load the last checkpoint"
)
_FIELD_NAMES = tuple(f.name for f in fields(TrainState))  # ``shared`` is the last one
_GET_FIELDS = attrgetter(*_FIELD_NAMES)
_SET_FIELDS = tuple(getattr(TrainState, name).__set__ for name in _FIELD_NAMES)  # of the slots, past the freeze


def init_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    seed: int = 0,
    run: RunLength | None = None,
    partial: bool = False,
    loader: TrackedLoader | None = None,
) -> TrainState:
    """Make the state at step 0, without slices. Parameters are captured here, so shard and materialize before.

    Args:
        model: as in ``Step.init``.
        optimizer: as in ``Step.init``.
        seed: start of all derived random streams.
        run: length of the run, for intervals that are a share of it (``"0.1dur"``).
        partial: if True, the optimizer may hold only some of the trainable parameters.
        loader: the loader whose epochs the clock counts, if the batches cannot say; as in ``Step.init``.

    Mutates: what SIGTERM does to this process, until the end of ``init_dist``'s block; see ``should_stop``. One attribute of
    the model, which is in no state dict; see ``TrainState.newest``.

    Raises:
        ConfigError: something else in place of the model or the optimizer; no parameters, parameters on the meta device or
            gathered for a forward; an optimizer that holds others than the model's, not all that are trainable, or cannot be
            run by torch on them; a rank of a launcher on which ``init_dist`` was not called.
    """
    check_init_dist_called("init")
    check_model_and_optimizer(model, optimizer)
    spec = get_spec(model)
    params, aliases = parameters_by_fqn(model)
    check_params(params, sharded=[name for name in params if name not in spec.ignored_params] if spec.mesh is not None else [])
    check_optimizer_params(params, optimizer, partial=partial)
    check_fused_foreach(params, optimizer)
    if loader is not None and not hasattr(loader, "last_batch_info"):
        raise ConfigError(f"init: loader must be one that dt.build_loader made, got {loader!r}. Leave it out")
    preemption.install_handlers()
    state = TrainState(
        model=model,
        optimizer=optimizer,
        spec=spec,
        params=params,
        aliases=aliases,
        clock=Clock(run=run),
        seed=seed,
        run_context=RunContext(loader=loader),
    )
    attribute = unwrap_module(model).__dict__.get(_RUNS_ATTRIBUTE)
    runs = attribute if isinstance(attribute, _ModelRuns) else _ModelRuns()
    setattr(unwrap_module(model), _RUNS_ATTRIBUTE, runs)
    runs.add(state.run_context)
    return state._replace()


@contextmanager
def mark_interrupted_write(state: TrainState, caller: str) -> Iterator[None]:
    """A context that writes parameters: if an error ends it, some may have changed, and all states of the run are spent.

    Mutates: ``state.shared``, in case of an error, which gets a note.
    """
    try:
        yield
    except BaseException as error:
        state.run_context.interrupted_write = _INTERRUPTED_MESSAGE.format(where=caller, step=state.step)
        error.add_note(state.run_context.interrupted_write)
        raise


def _live_runs(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[RunContext]:
    """The living runs of ``model``, oldest first, those of ``optimizer`` only if it is given.

    Raises:
        ConfigError: no model; several runs, and the newest does not train all that the others do.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"TrainState.newest: needs the model (an nn.Module), got {type(model).__name__}")
    attribute = unwrap_module(model).__dict__.get(_RUNS_ATTRIBUTE)
    alive = attribute.live() if isinstance(attribute, _ModelRuns) else []
    optimizers: list[torch.optim.Optimizer] = [run.newest_fields[_FIELD_NAMES.index("optimizer")] for run in alive]
    if optimizer is not None:
        return [run for run, own in zip(alive, optimizers, strict=True) if own is optimizer]
    held = [{id(param) for group in own.param_groups for param in group["params"]} for own in optimizers]
    if any(not params <= held[-1] for params in held):
        names = ", ".join(type(own).__name__ for own in optimizers)
        raise ConfigError(
            f"TrainState.newest: {len(alive)} runs train parts of this model (optimizers: {names}); say which: "
            "TrainState.newest(model, optimizer)"
        )
    return alive


def check_state(state: object, caller: str, example: str) -> None:
    """Refuse what is no ``TrainState``, and show the right ``example``.

    Raises:
        ConfigError: a module, or something else, in place of the state.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(state, nn.Module):
        raise ConfigError(
            f"{caller}: the first argument must be a TrainState, got the module {type(state).__name__}; make a state of it "
            f"first: `state = step.init(model, optimizer)`, then `{example}`"
        )
    raise ConfigError(f"{caller}: the first argument must be a TrainState, got {type(state).__name__}; as in `{example}`")
