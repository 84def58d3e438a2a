"""``TrainState``: everything a training step reads and replaces, and ``ShardSpec``: how its model is laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.clock import Clock
from dtrain.dist import stopping
from dtrain.dist.control import Tally
from dtrain.dist.init import current
from dtrain.dist.mesh import Replicas
from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError, StaleStateError
from dtrain.names import clean_parameters, unwrapped
from dtrain.tensors import is_distributed
from dtrain.types import Slice

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate", "none"]
Accumulate = Literal["local", "sharded"]
Buffers = Literal["broadcast", "mean", "local"]
_SPEC = "_dtrain_spec"  # the attribute of a module that shard_model leaves its ShardSpec in


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSpec:
    """How a model is laid out. ``shard_model`` sets it; a plain model in one process has ``strategy="none"``.

    Args:
        strategy: the name that ``shard_model`` was given.
        mesh: the whole mesh, None for a plain model.
        data_rank: this rank's place among those that see different data.
        data_ranks: how many of those there are.
        copies: ranks that work on one batch together, over the mesh's ``cp`` and ``tp``; those of a batch follow each other.
        counts: whether this rank's sums count. Ranks along ``tp`` compute the same ones, so only those of the first do.
        accumulate: whether gradients wait for a step's last microbatch at full size, or as shards.
        buffers: what becomes of persistent buffers that a forward changed.
        left_out: names of the parameters that are whole on every rank.
        computes_on: the device of forward and backward, where parameters are kept on another one; else None.
        apart: the copies of the model while they train apart: gradients are summed within each, and parameters may differ. None
            otherwise, and always in what ``shard_model`` sets; see ``split_replicas``.
    """

    strategy: Strategy = "none"
    mesh: DeviceMesh | None = field(default=None, repr=False)
    data_rank: int = 0
    data_ranks: int = 1
    copies: int = 1
    counts: bool = True
    accumulate: Accumulate = "local"
    buffers: Buffers = "broadcast"
    left_out: tuple[str, ...] = ()
    computes_on: torch.device | None = None
    apart: Replicas | None = field(default=None, repr=False)


def attach_spec(model: nn.Module, spec: ShardSpec) -> None:
    """Remember ``spec`` on ``model``. Mutates: ``model`` (one attribute, in no state dict)."""
    setattr(unwrapped(model), _SPEC, spec)


def spec_of(model: nn.Module) -> ShardSpec:
    """The ``ShardSpec`` of a model, that of a plain one when ``shard_model`` never saw it."""
    spec = unwrapped(model).__dict__.get(_SPEC)  # nn.Module is slow to say that it has no such attribute
    return spec if isinstance(spec, ShardSpec) else ShardSpec()


def device_of(model: nn.Module) -> torch.device:
    """Where ``model`` computes: where its parameters are, unless they are kept elsewhere; a model without any, as this rank."""
    return spec_of(model).computes_on or next((param.device for param in model.parameters()), current().device)


@dataclass(slots=True, eq=False)
class Shared:
    """The one mutable part of a state, shared by all states of a run: what must not be copied to be true.

    ``generation`` is that of the newest state; ``weight`` is the global weight of the last step on its way to the host. The
    rest is the run's place among checkpoints: its identity, the folder that this process resumed from, by root the steps that
    it committed or loaded, in that order, each with what it holds, and by root what keeps other jobs out as long as this lives.
    ``make_slices`` makes the slices of all transforms for a state, as ``Step.init`` did: for weights loaded into a new run.
    ``kept`` is what a transform keeps from step to step outside of checkpoints, by its name. ``stepped_early`` is whether the
    optimizer has run on some parameters already in the step in progress, and their gradients are gone. ``swapped`` names the
    average that is in the place of the parameters just now.
    """

    generation: int = 0
    weight: HostScalar | None = None
    run_id: str | None = None
    resumed_from: str | None = None
    committed: dict[str, dict[int, object]] = field(default_factory=dict)
    locks: dict[str, object] = field(default_factory=dict)
    make_slices: Callable[[TrainState], dict[str, Slice]] | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    stepped_early: bool = False
    swapped: str | None = None


class HostScalar:
    """A device scalar on its way to the host, read without waiting for the device.

    ``post`` starts a copy into a host buffer that was made once; ``peek`` returns the value if it has arrived, on a CPU it
    always has; ``wait`` is for one that should have arrived long ago.
    """

    __slots__ = ("_buffer", "_event", "_posted", "_view")

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._buffer = torch.zeros((), dtype=torch.float64, pin_memory=cuda)
        self._view = self._buffer.numpy()
        self._event = torch.cuda.Event() if cuda else None
        self._posted = False

    def post(self, value: Tensor) -> None:
        """Start copying the scalar ``value`` ``[]``."""
        self._buffer.copy_(value, non_blocking=True)
        self._posted = True
        if self._event is not None:
            self._event.record()

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted = False

    def peek(self) -> float | None:
        """The last posted value, or None when nothing was posted or it is still on its way."""
        if not self._posted or (self._event is not None and not self._event.query()):
            return None
        return float(self._view)

    def wait(self) -> float | None:
        """The last posted value, once it has arrived; None when nothing was posted."""
        if self._event is not None and self._posted:
            self._event.synchronize()
        return self.peek()


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
        slices: each transform's own state, by the transform's name.
        seed: what all derived random streams start from.
        tally: what the ranks agreed for the step in progress; None between steps.

    A state that has been stepped is spent: using it again raises ``StaleStateError``, since its parameters are gone.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    spec: ShardSpec
    params: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    slices: Mapping[str, Slice] = field(default_factory=dict)
    seed: int = 0
    tally: Tally | None = None
    generation: int = 0
    shared: Shared = field(default_factory=Shared)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    @property
    def device(self) -> torch.device:
        """Where the model computes: where its parameters are, unless they are offloaded."""
        return self.spec.computes_on or next(iter(self.params.values())).device

    def crossed(self, interval: Duration | int | str) -> bool:
        """Whether the last step crossed a boundary of ``interval``: ``"100ba"``, ``"1ep"``, ``"0.1dur"``, ``100``."""
        return self.clock.crossed(interval)

    def reached(self, point: Duration | int | str) -> bool:
        """Whether training has come as far as ``point``, in any unit: a loop over tokens or hours ends by it."""
        return self.clock.reached(point)

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to None. Mutates: the parameters' gradients."""
        for param in self.params.values():
            param.grad = None

    def check_fresh(self, where: str) -> None:
        """Raise ``StaleStateError`` if a later state of this run exists, or its parameters are swapped for an average."""
        if self.shared.swapped is not None:
            raise StaleStateError(
                f"{where}: the average {self.shared.swapped!r} is in the place of the parameters; leave "
                f"`with dt.swapped(state, {self.shared.swapped!r}):` first"
            )
        if self.generation != self.shared.generation:
            raise StaleStateError(
                f"{where}: this state was stepped already (step {self.step}), and its parameters have changed since; "
                "keep the returned one: `state, metrics = step(state, batch)`"
            )

    def check_together(self, where: str) -> None:
        """Raise ``ConfigError`` while copies of the model train apart: there is no one state of the run then."""
        if self.spec.apart is not None:
            raise ConfigError(
                f"{where}: {self.spec.apart.count} copies of the model are training apart at step {self.step}, so there is no "
                "one state of the run; make one of them first: `state = dt.join_replicas(state)`"
            )

    def successor(self, **changes: Any) -> TrainState:
        """The state after an update, with ``changes``; from now on this one is spent."""
        self.shared.generation += 1
        return self.but(generation=self.shared.generation, **changes)

    def but(self, **changes: Any) -> TrainState:
        """This state with other values in some fields. A step does this several times, and ``dataclasses.replace`` is slow."""
        made = object.__new__(TrainState)
        for put, value in zip(_PUT, _TAKE(self), strict=True):
            put(made, value)
        for name, value in changes.items():
            object.__setattr__(made, name, value)
        return made

    def with_slice(self, name: str, content: Slice) -> TrainState:
        """This state with the slice of one transform replaced."""
        return self.but(slices={**self.slices, name: content})

    def __repr__(self) -> str:
        return (
            f"TrainState(step={self.step}, params={len(self.params)}, strategy={self.spec.strategy!r}, "
            f"optimizer={type(self.optimizer).__name__}, slices={sorted(self.slices)}, seed={self.seed})"
        )


_FIELDS = tuple(f.name for f in fields(TrainState))
_TAKE = attrgetter(*_FIELDS)
_PUT = tuple(getattr(TrainState, name).__set__ for name in _FIELDS)  # of the slots, past the freeze


def new_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0, run: RunLength | None = None) -> TrainState:
    """The state at step 0, without slices. Parameters are captured here, so shard and materialize before.

    ``run`` is how long the run is to be, for what is given as a share of it (``"0.1dur"``).

    Mutates: what SIGTERM does to this process, until the end of ``init_dist``'s block; see ``should_stop``.

    Raises:
        ConfigError: no parameters, parameters on the meta device or gathered for a forward, or an optimizer that holds others
            than the model's, or has a form that torch does not have for them.
    """
    spec = spec_of(model)
    params, aliases = clean_parameters(model)
    if not params:
        raise ConfigError("init: the model has no parameters")
    meta = [name for name, p in params.items() if p.is_meta]
    if meta:
        raise ConfigError(
            f"init: {len(meta)} of {len(params)} parameters are on the meta device (first: {meta[0]}); "
            "call dt.materialize first"
        )
    cut = [name for name in params if name not in spec.left_out] if spec.mesh is not None else []
    gathered = [name for name in cut if not is_distributed(params[name])]
    if gathered:
        raise ConfigError(
            f"init: {len(gathered)} of {len(params)} parameters are gathered copies, left by a forward outside of a step "
            f"(first: {gathered[0]}); run that forward under dt.evaluating(model), and build the optimizer from what it leaves"
        )
    known = {id(p) for p in params.values()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stray = [p for p in held if id(p) not in known]
    if stray:
        raise ConfigError(
            f"init: {len(stray)} of {len(held)} optimizer parameters are not in the model (first: shape "
            f"{tuple(stray[0].shape)}); shard_model, materialize and edits of the model make new Parameter objects, so "
            "build the optimizer after them"
        )
    for index, group in enumerate(optimizer.param_groups):
        _check_form(index, group, optimizer, {id(p): name for name, p in params.items()})
    stopping.watch()
    return TrainState(
        model=model, optimizer=optimizer, spec=spec, params=params, aliases=aliases, clock=Clock(run=run), seed=seed
    )


def _check_form(index: int, group: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse a ``fused`` or ``foreach`` form that would fail in the first step."""
    form = next((form for form in ("fused", "foreach") if group.get(form)), None)
    trained = [p for p in group["params"] if p.requires_grad]
    whole = [names[id(p)] for p in trained if not is_distributed(p)]
    if form is None or len(whole) == len(trained):
        return
    what = f"init: group {index} of {type(optimizer).__name__}({form}=True) holds"
    if whole:
        raise ConfigError(
            f"{what} {len(trained) - len(whole)} cut parameters and {len(whole)} whole ones (first: {whole[0]}), which that "
            "form does not take together; give the whole ones a group of their own"
        )
    if form == "fused" and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        raise ConfigError(f"{what} cut parameters, for which torch has a fused Adam and AdamW only; use foreach=True instead")
