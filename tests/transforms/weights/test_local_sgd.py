"""Copies that train apart: what each computes, and what is sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients
from dtrain.step.optimizer_in_backward import optimizer_in_backward
from dtrain.testing.collective_counter import count_collectives
from dtrain.testing.host_syncs import count_host_syncs
from dtrain.transforms.gradients.clip_by_norm import clip_by_norm
from dtrain.transforms.weights.local_sgd import local_sgd
from dtrain.transforms.weights.local_training import split_replicas
from dtrain.typing import LossSum
from shard.copies import (
    ADAMW,
    MOMENTUM,
    RAGGED,
    SGD,
    averaging,
    begin,
    expected,
    largest_difference,
    loss,
    net,
    numbers,
    part,
    simulated,
    train,
)

STRATEGIES = ("hybrid_shard", "replicate")
TOLERANCE = 1e-12  # float64, a few steps
EVEN = (4, 4)


# What copies compute.


def trained(transforms: Any, strategy: str, kind: Any, steps: int, sizes: tuple[int, ...] = (), **options: Any) -> Any:
    return numbers(train(*begin(transforms, strategy, kind, **options), steps, sizes))


def every_step(strategy: str) -> float:
    one, other = trained([], strategy, SGD, 4, EVEN), trained([local_sgd(1)], strategy, SGD, 4, EVEN)
    return largest_difference(one, other)


def test_local_sgd_with_one_replica_equals_plain_sgd_exactly():
    def run(transforms: list[Any]) -> list[Any]:
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        step = compose_step(lambda model, x: LossSum(total=model(x).square().sum(), weight=len(x)), transforms)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(5):
            state, _ = step(state, torch.tensor([[1.0, 2.0, 3.0], [0.1, -0.2, 0.3]]))
        return [param.tolist() for param in state.params.values()]

    assert run([local_sgd(2)]) == run([])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaging_after_every_step_of_sgd_equals_data_parallel_training(ranks, strategy):
    assert max(ranks(2).run(every_step, strategy)) <= TOLERANCE


CASES = {
    "sgd-hybrid": ("hybrid_shard", SGD, 7, {}),
    "momentum-replicate": ("replicate", MOMENTUM, 6, {}),
    "adamw-hybrid": ("hybrid_shard", ADAMW, 7, {"accumulate": "sharded"}),
    "left-out-hybrid": ("hybrid_shard", MOMENTUM, 5, {"ignored_params": ["last.weight"]}),
}


def apart(strategy: str, kind: Any, steps: int, options: dict[str, Any]) -> Any:
    return trained([local_sgd(3)], strategy, kind, steps, **options)


@pytest.mark.parametrize(("strategy", "kind", "steps", "options"), CASES.values(), ids=CASES)
def test_two_replicas_with_ragged_batches_match_two_reference_models(ranks, strategy, kind, steps, options):
    nets, optimizers = simulated(steps, 2, kind=kind, sizes=RAGGED[2], end_of_round=averaging(3))
    for place, found in enumerate(ranks(2).run(apart, strategy, kind, steps, options)):
        assert largest_difference(found, expected(nets, optimizers, place)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_two_replicas_of_two_ranks_match_two_reference_models(ranks, kind):
    nets, optimizers = simulated(5, 2, kind=kind, sizes=RAGGED[4], end_of_round=averaging(3))
    for rank, found in enumerate(ranks(4).run(apart, "hybrid_shard", kind, 5, {})):
        assert largest_difference(found, expected(nets, optimizers, rank // 2)) <= TOLERANCE


def tensor_parallel(strategy: str) -> Any:
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    step, state = begin([local_sgd(3)], strategy, MOMENTUM, tp=2, plan=plan)
    while state.step < 5:
        state, _ = step(state, part(state.step, RAGGED[2], get_dist_info().rank // 2, get_dist_info().rank // 2 + 1))
    return numbers(state)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_with_tensor_sharded_layers_match_the_reference(ranks, strategy):
    nets, optimizers = simulated(5, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3))
    for rank, found in enumerate(ranks(4).run(tensor_parallel, strategy)):
        assert largest_difference(found, expected(nets, optimizers, rank // 2)) <= TOLERANCE


def kept() -> tuple[Any, bool]:
    state = train(*begin([local_sgd(3, optimizer_state="keep")], "hybrid_shard", MOMENTUM), 6)
    return numbers(state), state.spec.replica_info is not None


def test_optimizer_state_without_averaging_stays_local_to_each_replica(ranks):
    nets, optimizers = simulated(6, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3, moments=False))
    for place, (found, still) in enumerate(ranks(2).run(kept)):
        assert still
        assert largest_difference(found, expected(nets, optimizers, place)) <= TOLERANCE


def clipped() -> list[float]:
    step, state = begin([local_sgd(9), clip_by_norm(0.01)], "hybrid_shard")
    _, metrics = step(state, part(0, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1))
    return [metrics["grad_norm"].total.item(), reduce_metrics(metrics)["loss"]]


def test_clipping_uses_the_replica_norm_and_metrics_cover_all_replicas(ranks):
    losses, norms = [], []
    for place in range(2):
        model, batch = net(), part(0, RAGGED[2], place, place + 1)
        mean = (model(batch["x"]) - batch["y"]).square().mean()
        mean.backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        losses.append(mean.item() * RAGGED[2][place] / 8)
    found = ranks(2).run(clipped)
    assert [norm for norm, _ in found] == pytest.approx(norms, rel=1e-12)
    assert [value for _, value in found] == pytest.approx([sum(losses)] * 2, rel=1e-12)


def in_backward() -> float:
    step = optimizer_in_backward(loss, [local_sgd(3)], weight_fn=lambda batch: len(batch["x"]))
    _, state = begin([], "hybrid_shard", MOMENTUM)
    state = step.init(state.model, state.optimizer, seed=5)
    return largest_difference(numbers(train(step, state, 4)), trained([local_sgd(3)], "hybrid_shard", MOMENTUM, 4))


def test_step_in_backward_matches_a_separate_step(ranks):
    assert max(ranks(2).run(in_backward)) <= TOLERANCE


def fitted() -> tuple[float, int]:
    failures = []

    def greedy(model: nn.Module, batch: Any) -> Any:
        if get_dist_info().rank == 1 and len(batch["x"]) > 2:
            failures.append(len(batch["x"]))
            raise torch.OutOfMemoryError("made up")
        return loss(model, batch)

    _, state = begin([], "hybrid_shard", MOMENTUM)
    step = compose_step(greedy, [local_sgd(2), auto_microbatch(initial=8)])
    state = train(step, step.init(state.model, state.optimizer), 5)
    found = numbers(state)
    return largest_difference(found, trained([local_sgd(2)], "hybrid_shard", MOMENTUM, 5)), len(failures)


def test_replicas_agree_on_a_microbatch_size_after_out_of_memory(ranks):
    found = ranks(2).run(fitted)
    assert max(difference for difference, _ in found) <= TOLERANCE
    assert [failures > 0 for _, failures in found] == [False, True]


# What a copy without weight, or with a broken gradient, does.


def masked_loss(weights: tuple[float, float]) -> Any:
    def weighted(model: nn.Module, batch: Any) -> Any:
        found = loss(model, batch)
        return replace(
            found, total=found.total * weights[get_dist_info().rank], weight=found.weight * weights[get_dist_info().rank]
        )

    return weighted


def weightless(weights: tuple[float, float], promised: bool) -> list[float]:
    _, state = begin([], "hybrid_shard")
    weigh = (lambda batch: len(batch["x"]) * weights[get_dist_info().rank]) if promised else None
    step = compose_step(masked_loss(weights), [local_sgd(9)], grad=partial(microbatch_step, weight_fn=weigh))
    state = step.init(state.model, state.optimizer)
    before = numbers(state)
    return largest_difference(before, numbers(train(step, state, 1)))


@pytest.mark.parametrize("promised", [False, True], ids=["after", "promised"])
def test_replica_with_zero_weight_does_not_change(ranks, promised):
    moved = ranks(2).run(weightless, (0.0, 1.0), promised)
    assert moved[0] == 0.0
    assert moved[1] > 1e-3


def refused_step(what: str, *args: Any) -> str:
    try:
        {"weightless": weightless, "broken": broken}[what](*args)
    except StepError as error:
        return str(error)
    return ""


def test_zero_weight_in_all_replicas_raises_on_all_ranks(ranks):
    for message in ranks(2).run(refused_step, "weightless", (0.0, 0.0), False):
        assert "the weights of all ranks add up to 0" in message


def broken(what: str) -> list[bool]:
    _, state = begin([], "hybrid_shard")
    step = compose_step(masked_loss((1.0, float("inf"))), [local_sgd(9)], update=partial(apply_gradients, nonfinite=what))
    state = step.init(state.model, state.optimizer)
    before = numbers(state)
    state = train(step, state, 1)
    return [numbers(state) == before]


def test_nonfinite_gradient_in_one_replica_is_refused_by_all(ranks):
    for message in ranks(2).run(refused_step, "broken", "raise"):
        assert "apply_gradients: step 0: a gradient is not finite" in message
    assert ranks(2).run(broken, "skip") == [[True], [True]]


def failing() -> float:
    """A step of copies that fails, and then one of all."""
    step, state = begin([], "hybrid_shard")

    def raising(model: nn.Module, batch: Any) -> Any:
        loss(model, batch).total.backward()
        raise ValueError("made up")

    batch = part(0, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1)
    with pytest.raises(ValueError, match="made up"):
        microbatch_step(split_replicas(state), batch, loss_fn=raising)
    state, _ = step(state, batch)
    return largest_difference(numbers(state), trained([], "hybrid_shard", SGD, 1))


def test_gradient_all_reduce_is_restored_after_a_failed_local_step(ranks):
    assert ranks(2).run(failing) == [0.0, 0.0]


def own_backward() -> float:
    """A user's own, after a step of copies."""
    step, state = begin([local_sgd(9)], "hybrid_shard", accumulate="sharded")
    state = train(step, state, 1)
    batch = part(1, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1)
    loss(state.model, batch).total.backward()
    both = state.params["first.bias"].grad.to_local().clone()
    torch.distributed.all_reduce(both)
    return (both - 2 * state.params["first.bias"].grad.to_local()).abs().max().item()


def test_backward_outside_a_step_reduces_over_all_ranks(ranks):
    assert max(ranks(2).run(own_backward)) <= TOLERANCE


# What is sent.


def sent(interval: int) -> list[dict[str, int]]:
    step, state = begin([local_sgd(interval)], "hybrid_shard", MOMENTUM)
    found = []
    for at in range(2 * interval):
        with count_collectives() as seen:
            state = train(step, state, at + 1)
        across = [r for r in seen.records if r.op == "all_reduce" and r.group in ("training", "dp_replicate")]
        found.append({"count": len(across), "bytes": sum(record.bytes for record in across)})
    return found


def test_replicas_communicate_only_at_round_end(ranks):
    weights = 2 * 8  # one number of each copy
    params = sum(p.numel() for p in net().parameters()) * 8
    local = {"count": 1, "bytes": weights}
    rounds = {"count": 3, "bytes": weights + 2 * params}  # parameters, momenta
    for found in ranks(2).run(sent, 3):
        assert found == [local, local, rounds] * 2


def waits() -> list[int]:
    found = []
    for transforms in ([], [local_sgd(2)]):
        step, state = begin(transforms, "hybrid_shard", MOMENTUM)
        state = train(step, state, 2)
        with count_host_syncs() as seen:
            train(step, state, 4)
        found.append(seen.count)
    return found


def test_local_step_adds_no_host_sync(ranks):
    for plain, local in ranks(2).run(waits):
        assert local == plain


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"interval": "3 cats"}, "duration: unknown unit 'cats'"),
        ({"interval": 0}, "duration: needs at least 1 ba, got 0"),
        ({"interval": 2, "optimizer_state": "reset"}, "local_sgd: optimizer_state must be 'average' or 'keep', got 'reset'"),
    ],
    ids=["interval", "no-interval", "optimizer-state"],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        local_sgd(**arguments)
