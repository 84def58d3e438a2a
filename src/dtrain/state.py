"""Hold the state of a training run (``TrainState``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import spans
from dtrain.dist.batch_info import LoaderHistory, StepBatch, TrackedLoader
from dtrain.dist.context import current_context
from dtrain.dist.init import check_init_dist_called
from dtrain.dist.rng import derive_seed
from dtrain.dist.step_sync import StepCounts
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.fqn import parameters_by_fqn, unwrap_module
from dtrain.init_checks import (
    check_fused_foreach,
    check_model_and_optimizer,
    check_no_new_in_optimizer,
    check_optimizer_params,
    check_params,
)
from dtrain.named_optimizers import format_optimizer, list_members, name_optimizers
from dtrain.run_context import ModelRuns, RunContext
from dtrain.run_objects import LOADER, is_tracked_loader, run_objects, unwrap
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from dtrain.shard.spec import ShardSpec, get_spec
from dtrain.typing import TransformState

# Attribute of a model in which Step.init stores the ModelRuns.
_RUNS_ATTRIBUTE = "_dtrain_runs"


# Without slots, because a copy of ``__dict__`` is several times as fast as a copy of slots, and a step copies its state.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TrainState:
    """State of a training run between two steps. ``Step.init`` makes the first state, each step returns the next.

    A stepped state cannot be used again and raises ``StaleStateError``, because its parameters have changed.

    Args:
        model: model, mutated in place by training.
        optimizer: optimizer, mutated in place by training. Several optimizers are one with the groups and the state of all;
            ``state.optimizer["matrices"]`` is one of them.
        spec: layout of the model.
        params: parameters by clean name (sharded parameters are DTensors), captured once; a tied parameter appears once.
        aliases: further names of tied parameters, with the name in ``params``.
        clock: progress of training.
        transform_states: state of each transform, by the transform's name.
        seed: start of all derived random streams.
        restored: ``dt.checkpoint.Restored`` of the last load: step, folder, seconds and ignored names; None without a load.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    spec: ShardSpec
    params: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    transform_states: Mapping[str, TransformState] = field(default_factory=dict)
    seed: int = 0
    # Agreed record of the step in progress; None between steps.
    _step_counts: StepCounts | None = None
    # Batch of the step in progress; None between steps.
    _step_batch: StepBatch | None = None
    # Number by which the gradients are still to be divided, or ``[]``, in a step whose functions before the update either know
    # it or do not read gradients; see ``divide_grads``. None in other steps, and between steps.
    _grad_divisor: Tensor | float | None = None
    # Trainable parameters with their gradients, and ``_grad_divisor``, while a transform observes copies in ``.grad``.
    _lent_grads: tuple[Sequence[tuple[Tensor, Tensor]], Tensor | float] | None = None
    # Out-of-memory guard of the step in progress, a ``StepGuard`` that ``auto_microbatch`` sets; else None.
    _guard: Any = None
    # Loaders of the batches; not in checkpoints.
    _loader_history: LoaderHistory = field(default_factory=LoaderHistory)
    restored: Any = None
    _objects: Mapping[str, Any] = field(default_factory=dict)
    _tracked_loader: TrackedLoader | None = None
    # Function that makes the states of all transforms, to load weights into a new run.
    _init_transform_states: Callable[[TrainState], dict[str, TransformState]] | None = None
    # Trainable parameters by name as of the last gradient, and a digest of the names. A step walks only these parameters,
    # because a model may be frozen except for an adapter.
    _trainable: Mapping[str, Tensor] = field(default_factory=dict)
    _trainable_digest: int = 0
    # Parameters of the optimizer that were trainable at that time.
    _optimized: Sequence[Tensor] | None = None
    _generation: int = 0
    _run_context: RunContext = field(default_factory=RunContext)

    @classmethod
    def newest(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainState:
        """Return the newest state of ``model`` if its variable is out of reach, for example after Ctrl-C in a function.

        The result is the state after the last complete step. The model keeps no state alive, so some state of the run must
        still exist. In an ``except`` block the interrupted function keeps one.

        Args:
            model: model passed to ``Step.init``.
            optimizer: optimizer of the run, needed if several runs train parts of the model.

        Raises:
            ConfigError: no run of ``model`` is alive, or several runs are alive and no run contains the others.
            StaleStateError: an update or a load was interrupted, so the parameters belong to no step.

        Example:
            >>> import dtrain as dt
            >>> model = torch.nn.Linear(1, 1)
            >>> step = dt.compose_step(
            ...     dt.mean_loss(lambda model, batch: model(batch).mean(), weight=len)
            ... )
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
        runs = _find_runs(model, optimizer)
        if not runs:
            raise ConfigError(
                "TrainState.newest: no state of this model is alive. Call newest in the `except` block around the function "
                "that trains, with the model that Step.init was given."
            )
        context = runs[-1]
        if context.interrupted_write is not None:
            raise StaleStateError(f"TrainState.newest: {context.interrupted_write}")
        state = object.__new__(cls)
        state.__dict__.update(context.newest_fields, _run_context=context)
        if state._generation != context.generation:
            raise StaleStateError(
                f"TrainState.newest: step {state.step} was interrupted after the update and before the tick of the clock. "
                "Load the last checkpoint."
            )
        return state

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.clock.step

    @property
    def loader(self) -> Any:
        """Loader of the run as passed to ``Step.init``, without a mark; None without a loader. Saved with the state."""
        return unwrap(self._objects.get(LOADER))

    @property
    def stateful(self) -> dict[str, Any]:
        """Stateful objects of the run by name, without marks, as passed to ``Step.init``. Saved as part of the state."""
        return {key.partition("/")[2]: unwrap(value) for key, value in self._objects.items() if key != LOADER}

    @property
    def device(self) -> torch.device:
        """Device on which the model computes, also if the parameters are offloaded."""
        return self.spec.compute_device or next(iter(self.params.values())).device

    def crossed(self, every: Duration | int | str) -> bool:
        """Return True if the last step crossed a boundary of ``every``: ``"100ba"``, ``"1ep"``, ``"0.1dur"``, ``100``.

        Epochs are the loader's epochs. If a batch takes several steps, all of them return True if the epoch ended with the
        batch. So call once per batch, after its last step.

        Raises:
            ConfigError: not a duration, a share of a run of unknown length, or epochs of batches without a loader.
        """
        return self.clock.crossed(every)

    def reached(self, point: Duration | int | str) -> bool:
        """Return True if training has come to ``point`` or beyond, in any unit. Ends a loop over tokens or hours."""
        return self.clock.reached(point)

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to None. Mutates: the parameters' gradients."""
        for param in self.params.values():
            param.grad = None

    def _drop_trainable_gradients(self) -> None:
        """Set ``.grad`` of the parameters that the last step found trainable to None. Mutates: these gradients."""
        for param in self._trainable.values():
            param.grad = None

    def _with_trainable(self) -> TrainState:
        """Return this state with the parameters that are trainable now.

        The parameters of the optimizer show a change. A parameter that no optimizer holds and that becomes trainable is trained
        by nobody, so it is noticed with the next change.

        Mutates: ``.grad`` of frozen parameters of the optimizer, which is None afterwards.

        Raises:
            StepError: the optimizer got a parameter that is not in this state.
        """
        optimized: list[Tensor] = []
        for group in self.optimizer.param_groups:
            trainable = [param for param in group["params"] if param.requires_grad]
            optimized += trainable
            if len(trainable) < len(group["params"]):
                for param in group["params"]:
                    # An optimizer updates a frozen parameter by a gradient that an earlier backward has left.
                    if not param.requires_grad and param.grad is not None:
                        param.grad = None
        before = self._optimized
        if before is not None and len(optimized) == len(before) and all(map(is_, optimized, before)):
            return self
        params = {name: param for name, param in self.params.items() if param.requires_grad}
        check_no_new_in_optimizer(self.params, self.model, self.optimizer, caller="step")
        return self._replace(_trainable=params, _trainable_digest=derive_seed("trainable", *params), _optimized=optimized)

    def _check_not_stale(self, caller: str) -> None:
        """Raise ``StaleStateError`` if a later state of this run exists, or if an average replaces its parameters."""
        context = self._run_context
        if context.replaced_by is not None:
            raise StaleStateError(f"{caller}: {context.replaced_by}")
        if context.interrupted_write is not None:
            raise StaleStateError(f"{caller}: {context.interrupted_write}")
        if self._generation + 1 == context.load_generation:
            raise StaleStateError(
                f"{caller}: this state was passed to load_sharded, which returned the loaded state. Keep that one: "
                '`state = dt.load_sharded("ckpt", state)`.'
            )
        if self._generation != context.generation:
            raise StaleStateError(
                f"{caller}: this state was stepped already (step {self.step}), and its parameters have changed since. "
                "Keep the returned state: `state, metrics = step(state, batch)`."
            )

    def _check_replicas_joined(self, caller: str) -> None:
        """Raise ``ConfigError`` while replicas train separately, because the run has no single state then."""
        if self.spec.replica_info is not None:
            raise ConfigError(
                f"{caller}: {self.spec.replica_info.count} copies of the model are training apart at step {self.step}, so the "
                "run has no single state. Join the copies first: `state = dt.transforms.join_replicas(state)`."
            )

    def _as_newest(self) -> TrainState:
        """Return a state of this run that a load may replace, although the newest state is out of reach or was interrupted.

        Mutates: ``self._run_context``, which forgets an interrupted update.
        """
        context = self._run_context
        context.interrupted_write = context.replaced_by = None
        return self._replace(**context.newest_fields)._replace(_generation=context.generation)

    def _next(self, **changes: Any) -> TrainState:
        """Return the state after an update, with ``changes``. This state becomes stale."""
        self._run_context.generation += 1
        return self._replace(_generation=self._run_context.generation, **changes)._recorded()

    def _replace(self, **changes: Any) -> TrainState:
        """Return this state with ``changes``. Faster than ``dataclasses.replace``, because a step calls this several times."""
        state = object.__new__(TrainState)
        fields = state.__dict__
        fields |= self.__dict__
        fields |= changes
        return state

    def _recorded(self) -> TrainState:
        """Return this state, after the run has recorded it for ``newest``; between two steps only.

        Mutates: ``self._run_context``.
        """
        context = self._run_context
        in_step = self._step_counts or self._step_batch or self._guard
        if not in_step and self._generation == context.generation:
            context.newest_fields = {**self.__dict__}
            del context.newest_fields["_run_context"]
        return self

    def with_transform_state(self, name: str, content: TransformState) -> TrainState:
        """Return this state with a new state of one transform."""
        return self._replace(transform_states={**self.transform_states, name: content})._recorded()

    def __repr__(self) -> str:
        return (
            f"TrainState(step={self.step}, params={len(self.params)}, strategy={self.spec.strategy!r}, "
            f"optimizer={format_optimizer(self.optimizer)}, transform_states={sorted(self.transform_states)}, seed={self.seed})"
        )


def init_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    *,
    seed: int = 0,
    run_length: RunLength | None = None,
    missing_ok: bool = False,
    loader: Any = None,
    stateful: Mapping[str, Any] | None = None,
) -> TrainState:
    """Make the state at step 0, without transform states. Parameters are captured here, so shard and materialize before.

    Args:
        model: as in ``Step.init``.
        optimizer: as in ``Step.init``.
        seed: start of all derived random streams.
        run_length: length of the run, for intervals that are a share of the run (``"0.1dur"``).
        missing_ok: if True, the optimizer may hold only some of the trainable parameters.
        loader: as in ``Step.init``.
        stateful: as in ``Step.init``.

    Mutates: as ``Step.init``; one attribute of the model, not in the state dict (see ``TrainState.newest``); the loader, which
        then expects a step on each batch.

    Raises:
        ConfigError: not a model or an optimizer; no parameters, or parameters on the meta device or gathered for a forward; an
            optimizer with parameters of another model, without some trainable parameters, or that torch cannot run on the
            parameters; a loader or an object that a checkpoint cannot hold; a rank of a launcher without ``init_dist``.
    """
    check_init_dist_called("init")
    objects = run_objects(loader, stateful or {})
    for member in optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,):
        check_model_and_optimizer(model, member)
    spec = get_spec(model)
    params, aliases = parameters_by_fqn(model)
    if isinstance(optimizer, Mapping):
        optimizer = name_optimizers(params, optimizer)
    has_units = spec.mesh is not None and not spec.plain_params
    check_params(params, sharded=[name for name in params if name not in spec.ignored_params] if has_units else [])
    check_optimizer_params(params, optimizer, missing_ok=missing_ok)
    for member in list_members(optimizer):
        check_fused_foreach(params, member)
    current_context().preemption.install_handlers()
    state = TrainState(
        model=model,
        optimizer=optimizer,
        spec=spec,
        params=params,
        aliases=aliases,
        clock=Clock(run_length=run_length),
        seed=seed,
        _objects=objects,
        _tracked_loader=unwrap(loader) if is_tracked_loader(loader) else None,
    )._with_trainable()
    if state._tracked_loader is not None:
        state._tracked_loader._join_run()
    state._run_context.group_options = tuple(
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    )
    attribute = unwrap_module(model).__dict__.get(_RUNS_ATTRIBUTE)
    runs = attribute if isinstance(attribute, ModelRuns) else ModelRuns()
    setattr(unwrap_module(model), _RUNS_ATTRIBUTE, runs)
    runs.add(state._run_context)
    current_context().runs.add(state._run_context)
    trainable = sum(param.numel() for param in params.values() if param.requires_grad)
    spans.record_event("model", parameters=sum(param.numel() for param in params.values()), trainable=trainable)
    return state._recorded()


def mark_interrupted_write(state: TrainState, caller: str, error: BaseException) -> None:
    """Mark the run as interrupted by ``error`` while it wrote parameters. All its states become stale.

    Mutates: ``state._run_context``, and ``error``, which gets a note.
    """
    message = (
        f"{caller} was interrupted at step {state.step} after it had begun to write parameters, so they belong to no step. "
        "Build the state anew and load the last checkpoint."
    )
    state._run_context.interrupted_write = message
    error.add_note(message)


def live_runs(model: nn.Module) -> list[RunContext]:
    """Return the runs that train ``model`` or parts of it and are alive, oldest first."""
    attribute = unwrap_module(model).__dict__.get(_RUNS_ATTRIBUTE)
    return attribute.live() if isinstance(attribute, ModelRuns) else []


def _find_runs(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[RunContext]:
    """Return the runs of ``model`` that are alive, oldest first; only runs of ``optimizer`` if given.

    Raises:
        ConfigError: not a model; or several runs, and the newest does not train all parameters of the other runs.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"TrainState.newest: model must be an nn.Module, got {type(model).__name__}. Pass the trained model.")
    alive = live_runs(model)
    optimizers: list[torch.optim.Optimizer] = [run.newest_fields["optimizer"] for run in alive]
    if optimizer is not None:
        return [run for run, own in zip(alive, optimizers, strict=True) if optimizer in (own, *list_members(own))]
    trained = [{id(param) for group in own.param_groups for param in group["params"]} for own in optimizers]
    if any(not params <= trained[-1] for params in trained):
        names = ", ".join(map(format_optimizer, optimizers))
        raise ConfigError(
            f"TrainState.newest: {len(alive)} runs train parts of this model (optimizers: {names}). Name the optimizer: "
            "TrainState.newest(model, optimizer)."
        )
    return alive


def check_block_open(spec: ShardSpec, caller: str) -> None:
    """Refuse a model of several ranks after the end of ``init_dist``'s block, where each rank would go on alone.

    Raises:
        StepError: the ranks of the model's mesh are not connected any more.
    """
    if current_context().info is None and spec.mesh is not None and (ranks := spec.mesh.size()) > 1:
        raise StepError(
            f"{caller}: the init_dist block in which the model was sharded on {ranks} ranks has ended, so this rank would go "
            "on alone. Put the line into the block: indent the loop, the saves and the evaluation under `with dt.init_dist():`."
        )


def check_state(state: object, caller: str, example: str) -> None:
    """Refuse an argument that is not a ``TrainState``, and show the right ``example``.

    Raises:
        ConfigError: a module or another object instead of the state.
    """
    if isinstance(state, TrainState):
        return
    if isinstance(state, nn.Module):
        got = f"the module {type(state).__name__}"
        advice = f"Make a state first: `state = step.init(model, optimizer)`, then `{example}`."
    else:
        got, advice = type(state).__name__, f"Use `{example}`."
    raise ConfigError(f"{caller}: the first argument must be a TrainState, got {got}. {advice}")
