"""A small model whose copies train apart, and the same in one process, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.losses import mean_loss
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params
from dtrain.state import TrainState
from dtrain.step.compose import Step, compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.transform import Transform

RAGGED = {2: (3, 5), 4: (3, 1, 2, 2)}  # samples of each rank
SGD = ("sgd", 0.1, 0.0)
MOMENTUM = ("sgd", 0.1, 0.9)
ADAMW = ("adamw", 0.05, 0.0)


class Net(nn.Module):
    """Two units, of which two ranks cut one unevenly, and a scalar, which no strategy cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.temperature


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def optimizer_of(kind: tuple[str, float, float], module: nn.Module) -> torch.optim.Optimizer:
    name, lr, momentum = kind
    if name == "adamw":  # its foreach form takes no mix of cut and whole parameters
        return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1, foreach=False)
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum, foreach=False)


def whole_batch(step: int) -> dict[str, torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"x": x, "y": x[:, :3].square()}


def part(step: int, sizes: Sequence[int], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the part of a batch that belongs to the ranks from ``start`` to ``stop``."""
    return {key: value[sum(sizes[:start]) : sum(sizes[:stop])] for key, value in whole_batch(step).items()}


loss = mean_loss(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), weight=lambda batch: len(batch["x"]))


def small(state: Any, batch: Any, *, loss_fn: Any, microbatch_size: int | None = None) -> Any:
    return microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=microbatch_size or 2)


def begin(
    transforms: Sequence[Transform], strategy: str, kind: tuple[str, float, float] = SGD, tp: int = 1, **options: Any
) -> tuple[Step, TrainState]:
    """A run on all ranks, in two copies with ``hybrid_shard``, in one for each rank with ``replicate``."""
    world = get_dist_info().world_size
    mesh = build_mesh(dp_replicate=2 if strategy == "hybrid_shard" and world > 1 else 1, tp=tp)
    strategy = "full_shard" if world == 1 and strategy == "hybrid_shard" else strategy
    model = shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,), **options)
    step = compose_step(loss, transforms, grad=small)
    return step, step.init(model, optimizer_of(kind, model), seed=5)


def train(step: Step, state: TrainState, until: int, sizes: Sequence[int] = ()) -> TrainState:
    """The state at step ``until``; each rank with its share of every batch."""
    info = get_dist_info()
    sizes = sizes or RAGGED.get(info.world_size, (8,))
    while state.step < until:
        state, _ = step(state, part(state.step, sizes, info.rank, info.rank + 1))
    return state


def numbers(state: TrainState) -> dict[str, list[float]]:
    """The parameters, and the optimizer's moments of each, as this rank's copy has them."""
    values = {name: tensor.flatten().tolist() for name, tensor in full_params(state)}
    for name, param in state.params.items():
        for key, value in state.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and key != "step":
                whole = dict(full_params({"it": value}))["it"]
                values[f"{name} {key}"] = whole.flatten().tolist()
    return values


def bits(state: TrainState) -> dict[str, Any]:
    """All that may differ between copies, as this rank holds it."""
    names = {id(param): name for name, param in state.params.items()}
    optimizer = {names[id(param)]: content for param, content in state.optimizer.state.items()}
    return {"step": state.step, "all": _plain([dict(state.params), optimizer, dict(state.transform_states)])}


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return to_local(tree).detach().tolist() if isinstance(tree, torch.Tensor) else tree


def simulated(
    steps: int,
    copies: int,
    *,
    kind: tuple[str, float, float],
    sizes: Sequence[int],
    end_of_round: Callable[[int, list[Net], list[torch.optim.Optimizer]], None],
) -> tuple[list[Net], list[torch.optim.Optimizer]]:
    """Copies of the model in this process, each with its ranks' samples; torch alone."""
    nets = [net() for _ in range(copies)]
    optimizers = [optimizer_of(kind, model) for model in nets]
    wide = len(sizes) // copies
    for number in range(steps):
        for place, (model, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            batch = part(number, sizes, place * wide, (place + 1) * wide)
            optimizer.zero_grad()
            (model(batch["x"]) - batch["y"]).square().mean().backward()
            optimizer.step()
        end_of_round(number + 1, nets, optimizers)
    return nets, optimizers


def mean_of(nets: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [torch.stack([p.detach() for p in same]).mean(0) for same in zip(*(n.parameters() for n in nets), strict=True)]


def put(nets: Sequence[nn.Module], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for net in nets:
            for param, value in zip(net.parameters(), values, strict=True):
                param.copy_(value)


def average_moments(nets: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for params in zip(*(net.parameters() for net in nets), strict=True):
        contents = [optimizer.state[p] for optimizer, p in zip(optimizers, params, strict=True)]
        for key in (key for key, value in contents[0].items() if isinstance(value, torch.Tensor) and key != "step"):
            mean = torch.stack([content[key] for content in contents]).mean(0)
            for content in contents:
                content[key].copy_(mean)


def averaging(interval: int, *, moments: bool = True) -> Callable[[int, list[Net], list[torch.optim.Optimizer]], None]:
    """The end of a round of local SGD, for ``simulated``."""

    def end(step: int, nets: list, optimizers: list) -> None:
        if step % interval == 0:
            put(nets, mean_of(nets))
            if moments:
                average_moments(nets, optimizers)

    return end


def expected(nets: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], place: int) -> dict[str, list[float]]:
    """``numbers`` of one copy of a simulation."""
    names = {id(param): name for name, param in nets[place].named_parameters()}
    values = {name: param.flatten().tolist() for name, param in nets[place].named_parameters()}
    for param, content in optimizers[place].state.items():
        for key, value in content.items():
            if isinstance(value, torch.Tensor) and key != "step":
                values[f"{names[id(param)]} {key}"] = value.flatten().tolist()
    return copy.deepcopy(values)


def largest_difference(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    assert a.keys() == b.keys()
    return max(abs(x - y) for name in a for x, y in zip(a[name], b[name], strict=True))
