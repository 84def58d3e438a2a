"""A forward that writes its own parameters: right where one process is right, else refused by name on all ranks."""

import pytest
import torch
from torch import nn

from dtrain.dist.init import get_dist_info
from dtrain.dtensor import full_tensor
from dtrain.errors import StepError
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.typing import LossSum
from shard.test_param_objects import mesh_for, strategies


class Writer(nn.Module):
    """Writes its own weight, or a scalar, in forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            if self.kind == "clamp":
                self.inner.weight.clamp_(-0.1, 0.1)
            elif self.kind == "data":
                self.inner.weight.data.clamp_(-0.1, 0.1)
            elif self.kind == "new data":
                self.inner.weight.data = self.inner.weight.data.clamp(-0.1, 0.1)
            elif self.kind == "later" and self.calls == 3:
                self.inner.weight.clamp_(-0.1, 0.1)
            elif self.kind == "standardize":
                self.inner.weight.sub_(self.inner.weight.mean())
            elif self.kind == "samples":
                self.inner.weight[0] += x.mean()
            elif self.kind == "samples data":
                self.inner.weight.data[0] += x.mean()
            elif self.kind == "one rank" and x[0, 0] == 1:
                self.inner.weight.mul_(0.5)
            elif self.kind == "scalar":
                self.scale.clamp_(max=1.0)
        return self.out(self.inner(x)) * self.scale


def squares(model: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=model(x).square().sum(), weight=len(x))


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Writer(kind)).double()


def whole() -> torch.Tensor:
    return torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)


STEPS = 3


def one_process(kind: str) -> dict:
    model = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(STEPS):
        loss = squares(model, whole())
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def outcome(kind: str, strategy: str, **options) -> str:
    """Return the message of the refusal, or ``right`` or ``wrong``."""
    expected, info = one_process(kind), get_dist_info()
    model = shard_model(make(kind), mesh_for(strategy), strategy=strategy, **options)
    step = compose_step(squares)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.001))
    share = whole()[info.rank * 4 // info.world_size :][: 4 // info.world_size]
    try:
        for _ in range(STEPS):
            state, _ = step(state, share)
    except StepError as error:
        return str(error)
    error = max((full_tensor(p.detach()) - expected[name]).abs().max().item() for name, p in state.params.items())
    return "right" if error < 1e-12 else "wrong"


SAME_ON_ALL_RANKS = ("clamp", "data", "new data", "later", "standardize")
DIFFERENT = ("samples", "samples data", "one rank")


def outcomes() -> dict:
    found = {}
    for strategy in strategies():
        for kind in (*SAME_ON_ALL_RANKS, *DIFFERENT, "scalar", "none"):
            for options in ({}, {"blocks": (Writer,)}) if strategy == "full_shard" else ({},):
                found[f"{kind}:{strategy} {len(options)}"] = outcome(kind, strategy, **options)
    return found


LOST = "step: the forward must not write the parameter '0.inner.weight' in place, because {strategy!r} computes with a copy"
APART = "step: the forward must not write the parameter '0.inner.weight' in place with values that differ between ranks"


@pytest.mark.parametrize("world_size", [1, 2])
def test_write_of_a_forward_is_kept_or_refused_by_name(ranks, world_size):
    results = ranks(world_size).run(outcomes)
    assert all(found == results[0] for found in results)
    for case, line in results[0].items():
        kind, _, layout = case.partition(":")
        strategy = layout.split()[0]
        if kind in ("scalar", "none") or (strategy == "replicate" and (kind in SAME_ON_ALL_RANKS or world_size == 1)):
            assert line == "right", case
        else:
            expected = APART if strategy == "replicate" else LOST.format(strategy=strategy)
            assert expected in line, (case, line)
            assert "\n" not in line
