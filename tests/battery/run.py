"""A small training run for the contracts, and all values of it that a step may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import dtrain as dt
from dtrain.data.sample_order import rank_share
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import rng_state, seed_all
from origins import of_epochs

STEPS, FIRST = 7, 3  # of a whole run, and before it is interrupted
SAMPLES, EPOCH = 7, 3  # of a global batch; steps of an epoch
GRAD = partial(dt.microbatch_step, microbatch_size=2)
LENGTH = dt.schedules.RunLength(total=STEPS, steps_per_epoch=EPOCH, samples_per_step=SAMPLES)


class Net(nn.Module):
    """The common model: dropout, a buffer that every forward changes, and two layers with rates of their own."""

    def __init__(self, first: nn.Module, last: nn.Module, dropout: float) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.dropout = dropout
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), self.dropout, self.training)
        return self.last(hidden if hidden.ndim < 4 else hidden.mean((2, 3)))  # an image's features are means over its area


class Mixture(nn.Module):
    """Experts between the two layers, whose router counts in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = dt.experts.Router(6, 4, top_k=2), dt.experts.Experts(6, 5, 4)
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.experts(x, self.router(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: both layers, the global batch of a step, and the loss."""

    first: Callable[[], nn.Module]
    last: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: dt.typing.LossFn


def _vectors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x[:, :2].square()}


def _images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    x = torch.rand(SAMPLES, 2, 6, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.arange(SAMPLES) % 3}


def _texts(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 11, (SAMPLES, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1).masked_fill(torch.arange(8) == 7, -100)}


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> dt.LossSum:
    """Cross entropy of indices or probabilities, written out; the weight is the mass of the targets."""
    if not targets.is_floating_point():
        targets = targets.unsqueeze(-1) == torch.arange(logits.shape[-1])  # one_hot would look at the values
    targets = targets.to(logits.dtype)
    return dt.LossSum(total=-(targets * logits.log_softmax(-1)).sum(), weight=targets.sum())


_squares = dt.mean_loss(
    lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), weight=lambda batch: len(batch["x"])
)
TASKS: dict[str, Task] = {
    "vector": Task(  # fewer rows than features
        first=lambda: nn.Linear(5, 6),
        last=lambda: nn.Linear(6, 2),
        draw=_vectors,
        loss=_squares,
    ),
    "experts": Task(first=lambda: nn.Linear(5, 6), last=Mixture, draw=_vectors, loss=_squares),
    "image": Task(
        first=lambda: nn.Conv2d(2, 6, 3, padding=1),
        last=lambda: nn.Linear(6, 3),
        draw=_images,
        loss=lambda model, batch: _cross_entropy(model(batch["x"]), batch["y"]),
    ),
    "text": Task(
        first=lambda: nn.Embedding(11, 6),
        last=lambda: nn.Linear(6, 11),
        draw=_texts,
        loss=lambda model, batch: _cross_entropy(model(batch["input_ids"]), batch["labels"]),
    ),
}


def batch_of(step: int, task: str = "vector") -> dict[str, torch.Tensor]:
    """This rank's share of the global batch of a step."""
    whole = TASKS[task].draw(torch.Generator().manual_seed(step))
    start, stop = rank_share(0, SAMPLES, get_dist_info().rank, get_dist_info().world_size)
    return {key: value[start:stop] for key, value in whole.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A step over one task, and its batches."""

    step: dt.step.Step
    task: str

    def take(self, state: dt.TrainState) -> tuple[dt.TrainState, dt.typing.Metrics]:
        """One step over the batch that its number stands for; every ``EPOCH`` of them are an epoch."""
        return self.step(state, of_epochs(batch_of(state.step, self.task), state.step, EPOCH))


def begin(
    transforms: Sequence[dt.Transform], *, task: str = "vector", dropout: float = 0.3, **parts: Any
) -> tuple[Run, dt.TrainState]:
    """A run and its first state, from one seed; sharded where there are process groups. ``parts`` replace the step's."""
    seed_all(7, get_dist_info().rank)
    torch.manual_seed(11)
    what = TASKS[task]
    model = Net(what.first(), what.last(), dropout).double()
    torch.manual_seed(12 + get_dist_info().rank)
    if torch.distributed.is_initialized():
        blocks = (type(model.first), type(model.last))
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=blocks)
    groups = [{"name": n, "params": getattr(model, n).parameters(), "lr": lr} for n, lr in (("first", 0.1), ("last", 0.05))]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    step = dt.compose_step(parts.pop("loss", what.loss), transforms, **{"grad": GRAD, **parts})
    return Run(step=step, task=task), step.init(model, optimizer, seed=5, run_length=LENGTH)


def train(run: Run, state: dt.TrainState, until: int) -> tuple[dt.TrainState, list[Any]]:
    """The state at step ``until``, and the metrics on the way."""
    trace = []
    while state.step < until:
        state, metrics = run.take(state)
        trace.append({name: [number.item() for number in metric] for name, metric in metrics.items()})
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
        "slices": _copied(dict(state.transform_states)),
        "clock": _without_seconds(state.clock.state_dict()),
        "seed": state.seed,
        "rng": _copied(rng_state()),
    }


def _without_seconds(clock: dict[str, Any]) -> dict[str, Any]:
    before = clock["previous"] and {name: count for name, count in clock["previous"].items() if name != "seconds"}
    return {**{name: count for name, count in clock.items() if name != "seconds"}, "previous": before}


def traces(state: dt.TrainState) -> dict[str, Any]:
    """List the traces of a method on the objects of a run; comparable within one run only, as hooks are numbered."""
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
        return to_local(tree).detach().clone()
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
            path_of_change
            for key in {**a, **b}
            for path_of_change in (differences(a[key], b[key], f"{path}/{key}") if key in a and key in b else [f"{path}/{key}"])
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            path_of_change
            for index, (x, y) in enumerate(zip(a, b, strict=True))
            for path_of_change in differences(x, y, f"{path}/{index}")
        ]
    return [] if type(a) is type(b) and a == b else [path]


class Fault:
    """A point in a step that can be made to raise: in the n-th call of the loss, or around either half."""

    def __init__(self, where: str, task: str = "vector") -> None:
        self.where, self.task = where, task
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
            return TASKS[self.task].loss(model, batch)

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
    """The error of a ``Fault``."""
