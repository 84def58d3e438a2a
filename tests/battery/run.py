"""A small training run that the contracts are held against, and everything about it that a step may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import dtrain as dt
from dtrain.data.order.base import rank_share
from dtrain.dist.control import Post, post_batch
from dtrain.dist.init import current
from dtrain.dist.rng import rng_state, seed_all
from dtrain.tensors import local

STEPS, FIRST = 7, 3  # of a whole run, and before it is interrupted
SAMPLES, FEATURES, EPOCH = 7, 5, 3  # of a global batch, of a sample; steps of an epoch


class Net(nn.Module):
    """Dropout, a buffer that every forward changes, and fewer rows than features."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.last = nn.Linear(6, 2)
        self.dropout = dropout
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.last(nn.functional.dropout(torch.tanh(self.first(x)), self.dropout, self.training))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """This rank's share of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    start, stop = rank_share(0, SAMPLES, current().rank, current().world_size)
    return {"x": x[start:stop], "y": x[start:stop, :2].square()}


LOSS = dt.mean_loss(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), weight=lambda batch: len(batch["x"]))
GRAD = partial(dt.microbatch_step, microbatch_size=2)


def begin(transforms: Sequence[dt.Transform], *, dropout: float = 0.3, **parts: Any) -> tuple[dt.Step, dt.TrainState]:
    """A step and its first state, from one seed; sharded where there are process groups. ``parts`` replace the step's."""
    seed_all(7, current().rank)
    torch.manual_seed(11)
    model = Net(dropout).double()
    torch.manual_seed(12 + current().rank)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(
        [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.last.parameters(), "lr": 0.05}], momentum=0.9
    )
    step = dt.compose_step(parts.pop("loss", LOSS), transforms, **{"grad": GRAD, **parts})
    return step, step.init(model, optimizer, seed=5)


def take(step: dt.Step, state: dt.TrainState) -> tuple[dt.TrainState, dt.Metrics]:
    """One step over the batch that its number stands for; every ``EPOCH`` of them are an epoch."""
    post_batch(Post(epoch_ends=state.step % EPOCH == EPOCH - 1))
    try:
        return step(state, batch_of(state.step))
    finally:
        post_batch()


def train(step: dt.Step, state: dt.TrainState, until: int) -> tuple[dt.TrainState, list[Any]]:
    """The state at step ``until``, and the metrics on the way."""
    trace = []
    while state.step < until:
        state, metrics = take(step, state)
        trace.append({name: [part.item() for part in metric] for name, metric in metrics.items()})
    return state, trace


def snapshot(state: dt.TrainState) -> dict[str, Any]:
    """All of a run that training reads; tensors are copies of this rank's part."""
    model, optimizer = state.model, state.optimizer
    names = {id(param): name for name, param in state.params.items()}
    return {
        "params": _copied(dict(state.params)),
        "grads": _copied({name: param.grad for name, param in state.params.items()}),
        "buffers": _copied(dict(model.named_buffers())),
        "groups": [{**group, "params": [names[id(param)] for param in group["params"]]} for group in optimizer.param_groups],
        "optimizer": _copied({names[id(param)]: content for param, content in optimizer.state.items()}),
        "slices": _copied(dict(state.slices)),
        "clock": {name: count for name, count in state.clock.state_dict().items() if name != "seconds"},
        "seed": state.seed,
        "rng": _copied(rng_state()),
    }


def traces(state: dt.TrainState) -> dict[str, Any]:
    """What a method may leave on the objects of a run: comparable within one run only, as hooks are numbered."""
    return {
        "optimizer": _traces(state.optimizer),
        "modules": {name: _traces(module) for name, module in state.model.named_modules()},
        "params": {name: {**_traces(p), "requires_grad": p.requires_grad} for name, p in state.params.items()},
        "grad_enabled": torch.is_grad_enabled(),
    }


def _traces(thing: Any) -> dict[str, Any]:
    """Hooks by place, flags, and the names of all attributes (a replaced method is one more)."""
    own = {key: getattr(thing, key, None) for key in {*vars(thing), "_backward_hooks", "_post_accumulate_grad_hooks"}}
    hooks = {key: list(value) for key, value in own.items() if key.endswith("_hooks") and value}
    return {"hooks": hooks, "flags": {k: v for k, v in own.items() if isinstance(v, bool)}, "attributes": sorted(vars(thing))}


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return local(tree).detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_copied(value) for value in tree]
    return tree


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two trees differ in any bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            found
            for key in {**a, **b}
            for found in (differences(a[key], b[key], f"{path}/{key}") if key in a and key in b else [f"{path}/{key}"])
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [found for at, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{path}/{at}")]
    return [] if type(a) is type(b) and a == b else [path]


class Fault:
    """A point in a step that can be made to raise: in the n-th call of the loss, or around either half."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.armed = False
        self.fired = False
        self.calls = 0

    @contextmanager
    def arming(self) -> Iterator[None]:
        self.armed, self.calls = True, 0
        try:
            yield
        finally:
            self.armed = False

    def _at(self, where: str) -> None:
        if self.armed and where == self.where:
            self.fired = True
            raise InjectedError(where)

    def parts(self) -> dict[str, Callable[..., Any]]:
        """The parts of a step with the fault in them."""

        def loss(model: nn.Module, batch: Any) -> dt.LossSum:
            self.calls += 1
            self._at(f"loss {self.calls}")
            return LOSS(model, batch)

        def grad(*given: Any, **options: Any) -> Any:
            self._at("before grad")
            result = GRAD(*given, **options)
            self._at("after grad")
            return result

        def update(*given: Any) -> Any:
            self._at("before update")
            return dt.apply_gradients(*given)

        return {"loss": loss, "grad": grad, "update": update}


class InjectedError(Exception):
    """What a ``Fault`` raises."""
