"""A step of rank 0 on fake tensors: the code that will run, without its memory, its arithmetic, or the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from dtrain.errors import ConfigError
from dtrain.planning.kernels import cuda_kernels
from dtrain.planning.ledger import Ledger, Page
from dtrain.planning.stand_in import Answers, Unread
from dtrain.planning.traffic import Traffic, continued, summed
from dtrain.planning.workload import Workload, on_meta
from dtrain.planning.world import pretended_world
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2 import around_collectives, gradients_of, mark_root, param_groups, whole_params
from dtrain.shard.materialize import give_storage
from dtrain.shard.memory import checkpoint_activations
from dtrain.shard.precision import Precision
from dtrain.state import Accumulate, TrainState
from dtrain.step.compose import Step, compose_step
from dtrain.step.finite import set_loss_watch
from dtrain.step.microbatch import microbatch_step
from dtrain.step.optimizer import apply_gradients
from dtrain.types import Batch, LossSum, Metrics

Kind: TypeAlias = Literal["cuda", "cpu"]
Keep: TypeAlias = Literal["nothing", "matmuls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a workload is laid out over ranks; the arguments of ``shard_model`` and ``build_mesh`` with the same names.

    Args:
        checkpoint: None for no activation checkpointing, or ``keep`` of ``checkpoint_activations``.
        device: the type of device that is planned for: optimizers take their ``foreach`` form on ``"cuda"``, as in torch, and
            some kernels keep less for backward.
    """

    world_size: int
    dp_replicate: int = 1
    strategy: str = "full_shard"
    precision: Precision | None = None
    accumulate: Accumulate = "local"
    checkpoint: Keep | None = None
    device: Kind = "cuda"

    def __post_init__(self) -> None:
        for name, allowed in (("checkpoint", (None, "nothing", "matmuls")), ("device", ("cuda", "cpu"))):
            if getattr(self, name) not in allowed:
                shown = ", ".join(map(repr, allowed))
                raise ConfigError(f"plan: {name} must be one of {shown}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one step would hold and send."""

    page: Page
    traffic: tuple[Traffic, ...]


class Rehearsal:
    """A sharded model on fake tensors, with its optimizer, that can be stepped with batches of any size.

    Made by ``rehearsing``. The first step is not measured: there optimizer state is made, and torch finds out shapes.
    """

    def __init__(self, workload: Workload, model: nn.Module, device: Kind, answers: Answers) -> None:
        self._workload, self._model, self._answers = workload, model, answers
        self._ledger = Ledger()
        optimizer = workload.optimizer(model.parameters())
        if device == "cuda":
            _as_on_cuda(optimizer)
        self._state = self._compose(1).init(model, optimizer)
        self._state.shared.weight = Unread()
        set_loss_watch(self._state, None)  # a fake loss cannot be read on the host
        self._warm = False
        self._traffic_of_two: tuple[Traffic, ...] | None = None

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones once, over all ranks."""
        return sum(param.numel() for param in self._state.params.values())

    def step(self, microbatch_size: int, microbatches: int) -> Trace:
        """Run a step, and return what it held and sent; of many equal microbatches only three are run.

        Raises:
            ConfigError: sizes that are no whole numbers from 1 on.
        """
        for name, value in (("microbatch_size", microbatch_size), ("microbatches", microbatches)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"plan: {name} must be a whole number of at least 1, got {value!r}")
        if not self._warm:
            self._run(1, min(microbatches, 2))
            self._watch()
            self._warm = True
        if microbatches <= 3:
            return self._measured(microbatch_size, microbatches)
        three = self._measured(microbatch_size, 3)
        if self._traffic_of_two is None:  # it is of parameters and gradients: the same for every size
            self._traffic_of_two = self._measured(microbatch_size, 2).traffic
        return Trace(page=three.page, traffic=continued(self._traffic_of_two, three.traffic, microbatches))

    def _measured(self, microbatch_size: int, microbatches: int) -> Trace:
        ledger, state = self._ledger, self._state
        self._answers.collectives.clear()
        with ledger.live:
            ledger.assign("parameters", state.params.values())
            ledger.assign("parameters", self._model.buffers())
            ledger.assign("optimizer", _tensors(state.optimizer.state))
            ledger.assign("transforms", _tensors(state.slices))
            ledger.begin()
            self._run(microbatch_size, microbatches)
        return Trace(page=ledger.page(), traffic=summed(self._answers.collectives))

    def _run(self, microbatch_size: int, microbatches: int) -> None:
        batch = self._workload.batch(microbatch_size * microbatches)
        self._state, _ = self._compose(microbatch_size)(self._state, batch)

    def _compose(self, microbatch_size: int) -> Step:
        ledger, loss_fn = self._ledger, self._workload.loss_fn

        def loss(model: nn.Module, batch: Batch) -> LossSum:
            ledger.phase = "forward"
            found = loss_fn(model, batch)
            ledger.phase = "backward"
            return found

        def update(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            ledger.phase = "update"
            with ledger.during("optimizer"):
                return apply_gradients(state, metrics)

        grad = partial(microbatch_step, microbatch_size=microbatch_size, **self._workload.step)
        return compose_step(loss, self._workload.transforms, grad=grad, update=update)

    def _watch(self) -> None:
        """Tell the ledger what FSDP2's memory and the gradients are for. Mutates: hooks of parameters and of FSDP2's units."""
        for group in param_groups(self._model):
            around_collectives(group, partial(self._of_group, group))
            for param in whole_params(group):
                self._mark_gradient(param)
        for name in self._state.spec.left_out:
            self._mark_gradient(self._state.params[name])

    def _mark_gradient(self, param: Tensor) -> None:
        def mark(owner: Tensor) -> None:
            if owner.grad is not None:
                self._ledger.assign("gradients", [owner.grad])

        if param.requires_grad:
            param.register_post_accumulate_grad_hook(mark)

    @contextmanager
    def _of_group(self, group: Any, what: Literal["gathered", "communication"]) -> Iterator[None]:
        with self._ledger.during(what):
            yield
        self._ledger.assign("gradients", gradients_of(group))


@contextmanager
def rehearsing(workload: Workload, setting: Setting) -> Iterator[Rehearsal]:
    """A rehearsal in a world of its own, while the block runs.

    Mutates: this process's process groups, of which there are none before and after.

    Raises:
        ConfigError: a setting that ``build_mesh`` or ``shard_model`` refuses, or process groups that are open.
    """
    with pretended_world(setting.world_size, dp_replicate=setting.dp_replicate) as mesh:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # Sharded on the meta device, and not on fake tensors: those take 4 ms for each parameter that is cut 1,000 times.
        model = _sharded(workload, setting, mesh, on_meta(workload, fake))
        with fake, Answers() as answers, cuda_kernels() if setting.device == "cuda" else nullcontext():
            give_storage(model, torch.device("cpu"))
            mark_root(model)
            yield Rehearsal(workload, model, setting.device, answers)


def _sharded(workload: Workload, setting: Setting, mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    if setting.checkpoint is not None:
        checkpoint_activations(model, blocks=workload.blocks, keep=setting.checkpoint)
    options: dict[str, Any] = {
        "strategy": setting.strategy,
        "precision": setting.precision,
        "accumulate": setting.accumulate,
        "blocks": workload.blocks,
        **workload.shard,
    }
    return shard_model(model, mesh, **options)


def _as_on_cuda(optimizer: torch.optim.Optimizer) -> None:
    """Have ``optimizer`` work on many tensors at once, as it does on CUDA unless it is told otherwise. Mutates: its groups."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
