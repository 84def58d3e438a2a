"""A forward that writes its own parameters: right where one process is right, else refused by name on all ranks."""

from functools import partial

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import StepError
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
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
            elif self.kind == "flip":
                self.inner.weight.data.copy_(self.inner.weight.data.flip(0))
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


SAME_ON_ALL_RANKS = ("clamp", "data", "new data", "flip", "later", "standardize")
DIFFERENT = ("samples", "samples data", "one rank")


def outcomes() -> dict:
    by_case = {}
    for strategy in strategies():
        for kind in (*SAME_ON_ALL_RANKS, *DIFFERENT, "scalar", "none"):
            for options in ({}, {"blocks": (Writer,)}) if strategy == "full_shard" else ({},):
                by_case[f"{kind}:{strategy} {len(options)}"] = outcome(kind, strategy, **options)
    return by_case


LOST = "step: the forward must not write the parameter '0.inner.weight' in place, because {strategy!r} computes with a copy"
APART = "step: the forward must not write the parameter '0.inner.weight' in place with values that differ between ranks"


@pytest.mark.parametrize("world_size", [1, 2])
def test_write_of_a_forward_is_kept_or_refused_by_name(ranks, world_size):
    results = ranks(world_size).run(outcomes)
    assert all(result == results[0] for result in results)
    for case, line in results[0].items():
        kind, _, layout = case.partition(":")
        strategy = layout.split()[0]
        if kind in ("scalar", "none") or (strategy == "replicate" and (kind in SAME_ON_ALL_RANKS or world_size == 1)):
            assert line == "right", case
        else:
            expected = APART if strategy == "replicate" else LOST.format(strategy=strategy)
            assert expected in line, (case, line)
            assert "\n" not in line


class Momentum(nn.Module):
    """Moves a frozen copy towards the trained layer in each forward, or clamps it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.online, self.target = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.target.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "momentum":
                self.target.weight.lerp_(self.online.weight, 0.1)
            elif self.kind == "clamp":
                self.target.weight.clamp_(-0.1, 0.1)
        return self.online(x) - self.target(x)


LAST = {"even": (4, 4), "one microbatch short": (4, 2), "no microbatch": (4, 0)}


def after_uneven_step(kind: str, sizes: tuple[int, int], options: dict) -> list:
    torch.manual_seed(0)
    model = shard_model(Momentum(kind).double(), mesh_for("replicate"), **options)
    step = compose_step(squares, grad=partial(microbatch_step, microbatch_size=2))
    state = step.init(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.001))
    before, rank = None, get_dist_info().rank
    try:
        for index in range(5):
            before = full_tensor(model.online.weight.detach()).clone()
            state, _ = step(state, whole()[: sizes[rank] if index == 3 else 4])
    except StepError as error:
        return [index, str(error), torch.equal(before, full_tensor(model.online.weight.detach()))]
    return full_tensor(model.target.weight.detach()).flatten().tolist()


def uneven_steps() -> dict:
    layouts = {
        "replicate": {"strategy": "replicate"},
        "full_shard": {"strategy": "full_shard", "ignored_params": ("target.*",)},
    }
    return {
        f"{kind}, {last}, {layout}": after_uneven_step(kind, sizes, options)
        for kind in ("momentum", "clamp", "none")
        for last, sizes in LAST.items()
        for layout, options in layouts.items()
    }


def test_step_with_fewer_forwards_on_a_rank_is_refused_where_a_forward_writes(ranks):
    first, second = ranks(2).run(uneven_steps)
    assert first == second
    for case, outcome in first.items():
        kind, last, _ = case.split(", ")
        if last == "even" or kind == "none" or (kind == "clamp" and last == "one microbatch short"):
            assert len(outcome) == 16, (case, outcome)
            continue
        index, message, unchanged = outcome
        assert (index, unchanged) == (3, True), case
        assert "step: the forward wrote the parameter 'target.weight' in place, and ranks ran different numbers of" in message
        assert "Pass last_batch='drop'" in message
        assert "\n" not in message
