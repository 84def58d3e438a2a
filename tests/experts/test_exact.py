"""Statistics, losses and biases of routers: those of one process, however the batch is split, recomputed or retried."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.experts import Experts
from dtrain.step.count_first import count_first_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import memory_budget
from experts.models import Block, data, loss_fn, make, reference_run, weigh

RATE = 0.05
TOLERANCE = 1e-12
SPLITS = {
    "one microbatch": {},
    "microbatches of 3": {"size": 3},
    "microbatches of 1": {"size": 1},
    "recomputed": {"size": 3, "recompute": True},
    "uneven": {"size": 1, "sizes": (5, 3)},
    "rank without samples": {"size": 3, "sizes": (8, 0)},
}


def train(
    strategy: str | None,
    scoring: str = "softmax",
    *,
    current: bool = False,
    size: int | None = None,
    sizes: tuple[int, ...] | None = None,
    recompute: bool = False,
    budget: int | None = None,
    seen: dict[str, int] | None = None,
    rate: float = RATE,
    dropout: float = 0.0,
) -> dict[str, torch.Tensor]:
    """Return parameters, biases and shares after three steps."""
    model, info = make(scoring, dropout), get_dist_info()
    if recompute:
        dt.shard.checkpoint_activations(model, blocks=(Block,))
    if strategy is not None:
        many = strategy == "hybrid_shard"
        mesh = dt.build_mesh(dp_replicate=2 if many else 1)
        model = dt.shard_model(model, mesh, strategy=strategy, blocks=(Experts, Block))
    transforms = [dt.transforms.balance_experts(rate)]
    grad = count_first_step if current else microbatch_step
    if budget is not None and size is None:
        transforms.append(dt.auto_microbatch(headroom=0.0))
    step = dt.compose_step(
        loss_fn,
        transforms,
        grad=grad,
        batch_spec=dt.batch_spec(weight=weigh),
        microbatch_size=size,
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)
    world = info.world_size
    sizes = sizes if sizes is not None and len(sizes) == world else tuple(8 // world for _ in range(world))
    begin = sum(sizes[: info.rank])
    with nullcontext() if budget is None else memory_budget(budget, existing=state.params.values()) as held:
        for tokens in data():
            state, metrics = step(state, tokens[begin : begin + sizes[info.rank]])
    if held is not None:
        seen.update(peak=held.peak, refused=held.refused)
    assert dt.reduce_metrics(metrics)["max_violation"] > 0
    values = {name: full_tensor(param.detach()).clone() for name, param in state.params.items()}
    for index, block in enumerate(model.blocks):
        values[f"blocks.{index}.router.bias"] = block.router.bias.clone()
        values[f"blocks.{index}.router.share"] = block.router.share.clone()
    return values


def worst(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert values.keys() == expected.keys()
    return max((values[name] - expected[name]).abs().max().item() for name in expected)


def errors(scoring: str, current: bool, cases: dict[str | None, list[str]]) -> dict[str, float]:
    expected = reference_run(scoring, rate=RATE, current=current)
    return {
        f"{strategy}, {name}": worst(train(strategy, scoring, current=current, **SPLITS[name]), expected)
        for strategy, names in cases.items()
        for name in names
    }


@pytest.mark.parametrize("current", [False, True], ids=["share of the batch before", "share of the batch"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_one_process_equals_the_formula_row_by_row(scoring, current):
    assert max(errors(scoring, current, {None: ["one microbatch", "recomputed"]}).values()) < TOLERANCE


@pytest.mark.costly
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("current", [False, True], ids=["share of the batch before", "share of the batch"])
def test_ranks_equal_the_formula_row_by_row(ranks, world, current):
    few = ["recomputed", "uneven", "rank without samples"] if world == 2 else ["recomputed"]
    cases = {"full_shard": list(SPLITS), "replicate": few, "hybrid_shard" if world == 4 else "shard_grad_op": few}
    for by_case in ranks(world).run(errors, "softmax", current, cases):
        assert {case: error for case, error in by_case.items() if not error < TOLERANCE} == {}


def test_the_two_shares_give_different_losses():
    """The test above could not fail otherwise."""
    first, second = (reference_run("softmax", rate=RATE, current=current) for current in (False, True))
    assert worst(first, second) > 1e-4


def retried(current: bool) -> dict[str, tuple[float, int]]:
    """Return the error of runs whose microbatches shrink after failures, and the number of failed allocations."""
    expected, results = reference_run("softmax", rate=RATE, current=current), {}
    for strategy in ("full_shard", "replicate"):
        seen: dict[str, int] = {}
        train(strategy, current=current, budget=2**30, seen=seen)
        whole = seen["peak"]
        train(strategy, current=current, size=1, budget=2**30, seen=seen)
        # Less on one rank, so that the other rank follows.
        budget = (seen["peak"] + whole) // 2 if get_dist_info().rank else whole
        values = train(strategy, current=current, budget=budget, seen=seen)
        results[strategy] = worst(values, expected), seen["refused"]
    return results


@pytest.mark.costly
@pytest.mark.parametrize("current", [False, True], ids=["share of the batch before", "share of the batch"])
def test_retries_of_auto_microbatch_count_once(ranks, current):
    results = ranks(2).run(retried, current)
    for strategy in results[0]:
        assert max(result[strategy][0] for result in results) < TOLERANCE, strategy
        assert sum(result[strategy][1] for result in results) > 0, strategy


def with_dropout(current: bool) -> list[dict[str, torch.Tensor]]:
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        results.append(train(None, current=current, size=2, recompute=again, dropout=0.4))
    return results


@pytest.mark.parametrize("current", [False, True])
def test_recomputation_repeats_the_choices_under_dropout(current):
    first, second = with_dropout(current)
    assert worst(first, second) == 0.0


def test_counting_draws_the_numbers_of_the_gradient():
    """With dropout the loads of the first forwards are those of the second: the share that was set is the share at the end."""
    model = make(dropout=0.5)
    seen = []

    def after_count(model, counts):
        seen.append({name: count.clone() for name, count in counts.items()})

    step = dt.compose_step(
        loss_fn,
        [dt.transforms.balance_experts(0)],
        grad=partial(count_first_step, after_count=after_count),
        batch_spec=dt.batch_spec(weight=weigh),
        microbatch_size=3,
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(3)
    state, _ = step(state, data()[0])
    for index, block in enumerate(model.blocks):
        assert torch.equal(seen[0][f"blocks.{index}.router.load"], block.router.load)
        assert block.router.load.sum() == 2 * (data()[0] != 0).sum()
