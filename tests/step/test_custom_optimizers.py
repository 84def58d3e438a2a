"""Optimizers of users: each trains every layout as it trains one process, or is refused in one line that names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import ConfigError

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
# Replicas of shards need two ranks, and are cut on four.
LAYOUTS = [(strategy, world) for strategy in STRATEGIES for world in (1, 2) if (strategy, world) != ("hybrid_shard", 1)]
LAYOUTS.append(("hybrid_shard", 4))
each_layout = pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
ROUNDING = 1e-10  # float64; quotients of norms and moments magnify it
BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LOSS = dt.mean_loss(lambda model, batch: (model(batch) - batch.sum(-1, keepdim=True)).square().mean(), weight=len)
STEP = dt.compose_step(LOSS)


def net() -> nn.Module:
    """Five rows are not even on two ranks, and one row leaves a rank without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def laid_out(strategy: str | None) -> nn.Module:
    """The model in a layout; without a strategy, plain in one process."""
    if strategy is None:
        return net()
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    return dt.shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,))


def own_batch(strategy: str | None) -> Tensor:
    return BATCH if strategy is None else BATCH.chunk(dist.get_world_size())[dist.get_rank()]


def trained(make: Callable[[Any], torch.optim.Optimizer], strategy: str | None, steps: int = 4) -> list[float]:
    """All parameters after a few steps."""
    model = laid_out(strategy)
    state = STEP.init(model, make(model.parameters()))
    for _ in range(steps):
        state, _ = STEP(state, own_batch(strategy))
    return [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    here, there = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return ((here - there).norm() / there.norm()).item()


class Numbers(torch.optim.Optimizer):
    """SGD whose rate is a number that Python reads from each parameter and gradient."""

    def __init__(self, params: Any, rate: Callable[[Tensor, Tensor], float]) -> None:
        self.rate = rate
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * (group["lr"] * self.rate(param, param.grad)))


class Adapted(torch.optim.Optimizer):
    """The distance of D-Adaptation: a number of the group, from sums over all of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = 0.0
            for param in group["params"]:
                total = self.state[param].setdefault("s", torch.zeros_like(param))
                group["numerator"] += group["lr"] * group["d"] * (param.grad * total).sum().item()
                total.add_(param.grad, alpha=group["lr"] * group["d"])
                norm += total.abs().sum().item()
            group["d"] = max(group["d"], group["numerator"] / norm)
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


READS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "lars": lambda p, g: p.norm().item() / (g.norm().item() + 1e-9),
    "lamb": lambda p, g: min(10.0, float(p.data.norm()) / float(torch.linalg.vector_norm(g) + 1e-9)),
    "largest": lambda p, g: 2.0 if p.abs().max() > 0.5 else p.abs().max().item(),
    "sum": lambda p, g: abs(p.sum().item()),
    "integer": lambda p, g: int(p.square().sum() * 1000) / 1000,
    "all": lambda p, g: 2.0 if bool((p < 0.4).all()) else 1.0,
    "spread": lambda p, g: float(p.square().mean() + p.min()),
}


def found_in(strategy: str) -> dict[str, list[float]]:
    found = {name: trained(lambda params, rate=rate: Numbers(params, rate), strategy) for name, rate in READS.items()}
    return {**found, "adapted": trained(Adapted, strategy)}


@each_layout
def test_a_number_read_in_a_step_is_that_of_the_whole_parameter(ranks, strategy, world):
    expected = {name: trained(lambda params, rate=rate: Numbers(params, rate), None) for name, rate in READS.items()}
    expected["adapted"] = trained(Adapted, None)
    for found in ranks(world).run(found_in, strategy):
        apart = {name: distance(found[name], expected[name]) for name in expected}
        assert {name: error for name, error in apart.items() if error > ROUNDING} == {}


def numbers_after_a_step() -> list[float]:
    """A number outside of the step is torch's again: a read on one rank alone must not wait for the others."""
    model = laid_out("full_shard")
    state = STEP.init(model, Numbers(model.parameters(), READS["lars"]))
    STEP(state, own_batch("full_shard"))
    weight = model[0].weight.detach()
    return [weight.norm().item() if dist.get_rank() == 0 else 0.0, weight.to_local().norm().item()]


def test_numbers_outside_of_a_step_need_no_other_rank(ranks):
    (found, own), _ = ranks(2).run(numbers_after_a_step)
    assert found == own


class Ahead(torch.optim.Optimizer):
    """Lookahead, as it is usually written: around another optimizer, with its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Ascent(torch.optim.SGD):
    """A step that cannot be taken without the loss."""

    def step(self, closure: Any) -> None:
        closure()
        super().step()


def postponed(params: Any) -> torch.optim.Optimizer:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=1, process_group=dist.group.WORLD)
    return PostLocalSGDOptimizer(torch.optim.SGD(params, lr=0.1), averager)


def zero(params: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(params), torch.optim.AdamW, lr=0.1)


REFUSED_AT_INIT: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "lbfgs": (torch.optim.LBFGS, "init: optimizer must step without arguments, got LBFGS, whose step needs 'closure'. Use an"),
    "ascent": (Ascent, "init: optimizer must step without arguments, got Ascent, whose step needs 'closure'. Use an"),
    "ahead": (
        lambda params: Ahead(torch.optim.AdamW(params)),
        "init: optimizer must keep its state in its own .state, got Ahead, which wraps AdamW with a state of its own.",
    ),
    "zero": (zero, "init: optimizer must keep its whole state on every rank, got ZeroRedundancyOptimizer, whose state"),
    "postponed": (postponed, "init: optimizer must keep its whole state on every rank, got PostLocalSGDOptimizer, whose state"),
}
NEEDS_RANKS = {"zero", "postponed"}


def refusals_at_init(strategy: str | None) -> dict[str, str]:
    found = {}
    for name, (make, _) in REFUSED_AT_INIT.items():
        if strategy is None and name in NEEDS_RANKS:
            continue
        # torch's wrappers for ranks take no DTensors.
        model = laid_out("replicate" if name in NEEDS_RANKS else strategy)
        with pytest.raises(ConfigError) as refused:
            STEP.init(model, make(model.parameters()))
        found[name] = str(refused.value)
    return found


def refused_as_told(found: dict[str, str], cases: dict[str, tuple[Any, str]]) -> bool:
    assert {name: line for name, line in found.items() if not line.startswith(cases[name][1]) or "\n" in line} == {}
    return len(found) > 0


@each_layout
def test_optimizers_with_a_closure_or_a_hidden_state_are_refused_at_init(ranks, strategy, world):
    assert all(refused_as_told(found, REFUSED_AT_INIT) for found in ranks(world).run(refusals_at_init, strategy))


def test_optimizers_with_a_closure_or_a_hidden_state_are_refused_at_init_of_a_plain_model():
    assert refused_as_told(refusals_at_init(None), REFUSED_AT_INIT)


def shares_state() -> float:
    """An outer optimizer that shares the state of the inner one is taken, and its checkpoints hold the state."""
    model = net()
    outer = Ahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    outer.inner.state = outer.state
    state = STEP.init(model, outer)
    state, _ = STEP(state, BATCH)
    return len(state.optimizer.state)


def test_an_outer_optimizer_that_shares_the_inner_state_is_taken():
    assert shares_state() == 4
