"""Models of every awkward kind, each with a batch and a plain reference: one process, no dtrain."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import full_tensor
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.typing import LossSum

SAMPLES, DIM = 8, 6
WEIGHTS = [1.0, 0.0, 2.0, 0.5, 0.0, 3.0, 1.0, 0.25]


@contextmanager
def as_in_a_step(model: nn.Module) -> Iterator[None]:
    """Run forwards and one backward of a sharded model as a step does: its gradients are sums over all ranks."""
    sync = grad_sync_of(model)
    sync.begin_step()
    sync.before_microbatch(last=True)
    try:
        yield
    finally:
        sync.end_step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 9), nn.Linear(9, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks in a row, the first of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], *self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Coder(nn.Module):
    """Never calls ``forward`` of the whole: an encoder and a decoder behind methods, one of them a block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, DIM)
        self.block = Block()
        self.tools = Tools()
        self.out = nn.Linear(DIM, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(self.into(x)))

    def decode(self, z: Tensor) -> Tensor:
        return self.out(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.tools.twice(self.encode(x)))


class Tools(nn.Module):
    """A block with a method of its own, which its forward uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)

    def once(self, z: Tensor) -> Tensor:
        return torch.tanh(self.mix(z))

    def twice(self, z: Tensor) -> Tensor:
        return self.once(self.once(z))

    def forward(self, z: Tensor) -> Tensor:
        return self.twice(z) + self.mix(z)


class Tied(nn.Module):
    """An embedding in one block is the head's weight in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Embedding(10, DIM), Block())
        self.last = nn.Sequential(Block(), nn.Linear(DIM, 10))
        self.last[1].weight = self.first[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(ids))


class Masked(nn.Module):
    """As in a masked language model: the head's weight is the embedding, its bias belongs to the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(10, DIM), Block())
        self.cls = nn.Sequential(nn.Linear(DIM, DIM), Head())
        self.cls[1].decoder.weight = self.embed[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.cls(self.embed(ids))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.decoder = nn.Linear(DIM, 10)
        self.bias = nn.Parameter(torch.linspace(0, 1, 10))
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.mix(x)))


class Scaled(nn.Module):
    """A scalar parameter and a bias that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(DIM, 4)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x)) * self.temperature.exp()


class Forked(nn.Module):
    """Block with two branches chosen per sample, and a third branch that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fork(x))


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        is_high = x[:, :1] > 0
        for branch, chosen in ((self.low, ~is_high), (self.high, is_high)):
            if chosen.any():
                x = x + torch.where(chosen, branch(x), torch.zeros_like(x))
        return x


class Everything(nn.Module):
    """All at once: tied across blocks, frozen, called twice, methods beside forward, a scalar and a bias that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, DIM), nn.Linear(DIM, 10)
        self.head.weight = self.embed.weight
        self.block, self.still, self.tools = Block(), Block().requires_grad_(False), Tools()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def encode(self, ids: Tensor) -> Tensor:
        return self.still(self.block(self.embed(ids)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tools.twice(self.block(self.encode(ids)))) * self.temperature.exp()


def frozen_stack() -> nn.Module:
    net = Stack()
    net.blocks[1].requires_grad_(False)
    net.head.bias.requires_grad_(False)
    return net


def inputs() -> Tensor:
    """Samples whose first feature grows, so that ranks that take contiguous shares see different branches."""
    x = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 0] = torch.linspace(-1, 1, SAMPLES)
    return x


def squared(net: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    out = net(batch["x"])
    return LossSum(total=(out.square() * batch["weight"][:, None]).sum(), weight=batch["weight"].sum())


def coded(net: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    out = net.decode(net.tools.twice(net.encode(batch["x"]))) + net.decode(net.tools(batch["x"]))
    return LossSum(total=(out.square() * batch["weight"][:, None]).sum(), weight=batch["weight"].sum())


def everything(net: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    per_sample = net(batch["x"]).square().sum(1) + net.encode(batch["x"]).square().sum(1)
    return LossSum(total=(per_sample * batch["weight"]).sum(), weight=batch["weight"].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how it is cut, and its loss."""

    make: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[nn.Module, Any], LossSum] = squared
    ids: bool = False
    units: int = 0


CASES = {
    "called twice": Case(make=Stack, options={"blocks": (Block,)}, units=4),
    "by name": Case(make=Stack, options={"blocks": ("blocks.*", "head")}, units=4),
    "by predicate": Case(make=Stack, options={"blocks": lambda name, module: name.endswith("up")}, units=4),
    "nested": Case(make=Stack, options={"blocks": (Block, nn.Linear)}, units=7),
    "methods": Case(
        make=Coder,
        options={"blocks": (Block, Tools), "forward_methods": ("encode", "decode", "tools.twice")},
        loss=coded,
        units=3,
    ),
    "tied": Case(make=Tied, options={"blocks": (Block,)}, ids=True, units=3),
    "tied across blocks": Case(make=Tied, options={"blocks": ("first", "last")}, ids=True, units=3),
    "tied blocks": Case(make=Tied, options={"blocks": (nn.Embedding, nn.Linear)}, ids=True, units=5),
    "tied inside each other": Case(make=Masked, options={"blocks": ("embed", "cls")}, ids=True, units=3),
    "frozen": Case(make=frozen_stack, options={"blocks": (Block,)}, units=4),
    "left out": Case(make=Scaled, options={"blocks": (Block,), "ignored_params": ("head.bias", "block.up.*")}, units=2),
    "some unused": Case(make=Forked, options={"blocks": (Fork,)}, units=2),
    "everything": Case(
        make=Everything,
        options={
            "blocks": (Block, Tools, nn.Embedding),
            "forward_methods": ("encode", "tools.twice"),
            "ignored_params": ("block.down.bias",),
        },
        loss=everything,
        ids=True,
        units=4,  # the model itself holds the scalar only
    ),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().to(dtype)


def batch(name: str, weights: list[float]) -> dict[str, Tensor]:
    x = inputs()
    if CASES[name].ids:
        x = torch.arange(SAMPLES) % 10
    return {"x": x, "weight": torch.tensor(weights, dtype=torch.float64)}


def reference(name: str, weights: list[float]) -> dict[str, Tensor | None]:
    """Gradients by parameter name, None where a parameter is not used: the mean over the whole batch, in one process."""
    net = make(name)
    loss = CASES[name].loss(net, batch(name, weights))
    (loss.total / loss.weight).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def difference(name: str, params: Mapping[str, Tensor]) -> float:
    """Norm of the gradient's error over norm of the gradient, over all parameters that have one here and in the reference."""
    expected = reference(name, WEIGHTS)
    pairs = [
        (full_tensor(p.grad), expected[key]) for key, p in params.items() if p.grad is not None and expected[key] is not None
    ]
    error = torch.cat([(a - b).flatten() for a, b in pairs]).norm()
    return (error / torch.cat([b.flatten() for _, b in pairs]).norm()).item()
