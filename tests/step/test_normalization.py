"""Declared weights and losses of several terms: each term is divided by its own global weight."""

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from step.states import state_of

TOLERANCE = 1e-12  # float64, relative norm over all parameters
SAMPLES = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch() -> dict:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"x": x, "fit": torch.tensor([1.0, 0, 2, 0, 0, 3, 0.5]), "flat": torch.tensor([0.0, 0, 0, 1, 0, 0, 0])}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    out = net(batch["x"])
    return LossSum(
        total=(out[:, 0].square() * batch["fit"]).sum(),
        weight=batch["fit"].sum(),
        terms={"flat": ((out[:, 1].abs() * batch["flat"]).sum(), batch["flat"].sum())},
        aux={"largest": (out.detach().amax(), 1.0)},
    )


def weigh(whole: dict) -> dict:
    return {"loss": whole["fit"].sum(), "flat": whole["flat"].sum()}


def reference() -> torch.Tensor:
    net, whole = model(), batch()
    out = net(whole["x"])
    fit = (out[:, 0].square() * whole["fit"]).sum() / whole["fit"].sum()
    flat = (out[:, 1].abs() * whole["flat"]).sum() / whole["flat"].sum()
    (fit + flat).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def several_terms(counts: list, size: int | None) -> list:
    state = state_of(shard_model(model(), build_mesh(), blocks=(nn.Linear,)))
    first = sum(counts[: get_dist_info().rank])
    own = {key: value[first : first + counts[get_dist_info().rank]] for key, value in batch().items()}
    _, metrics = microbatch_step(state, own, loss_fn=loss_fn, microbatch_size=size, batch_spec=batch_spec(weight=weigh))
    computed = torch.cat([full_tensor(p.grad).flatten() for p in state.params.values()])
    numbers = reduce_metrics(metrics)
    return [((computed - reference()).norm() / reference().norm()).item(), sorted(numbers), numbers["flat"]]


@pytest.mark.parametrize("size", [1, 3, None])
@pytest.mark.parametrize("counts", [[7], [4, 3], [0, 7], [3, 3, 1]])
def test_each_loss_term_has_its_own_denominator(ranks, counts, size):
    net, whole = model(), batch()
    flat = (net(whole["x"])[:, 1].abs() * whole["flat"]).sum() / whole["flat"].sum()
    for error, names, mean in ranks(len(counts)).run(several_terms, counts, size):
        assert error <= TOLERANCE
        assert names == ["flat", "largest", "loss"]
        assert mean == pytest.approx(flat.item(), rel=1e-12)


def plain(**options) -> TrainState:
    state = state_of(model())
    microbatch_step(
        state, batch(), microbatch_size=2, **{"loss_fn": loss_fn, "batch_spec": batch_spec(weight=weigh), **options}
    )
    return state


def test_zero_weight_term_does_not_affect_other_terms():
    def without(whole: dict) -> dict:
        return {**whole, "flat": torch.zeros(SAMPLES)}

    state, alone = state_of(model()), state_of(model())
    microbatch_step(state, without(batch()), loss_fn=loss_fn, batch_spec=batch_spec(weight=weigh))

    def main_only(net, batch):
        return LossSum(total=(net(batch["x"])[:, 0].square() * batch["fit"]).sum(), weight=batch["fit"].sum())

    microbatch_step(alone, without(batch()), loss_fn=main_only)
    for a, b in zip(state.params.values(), alone.params.values(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"batch_spec": None},
            ConfigError,
            r"further terms \(flat\) with their own weights. Pass batch_spec=dt.batch_spec\(weight=",
        ),
        (
            {"batch_spec": batch_spec(weight=lambda whole: 3.0)},
            ConfigError,
            r"batch_spec.weight must return a weight per loss term, got \['loss'\] for \['flat', 'loss'\]",
        ),
        (
            {"batch_spec": batch_spec(weight=lambda whole: {"flat": 1.0})},
            ConfigError,
            r"must return a weight for 'loss', the main term, got \['flat'\]",
        ),
        (
            {"batch_spec": batch_spec(weight=lambda whole: {"loss": 7.0, "flat": 1.0})},
            StepError,
            "on rank 0 the weights of the losses do not add up to what batch_spec.weight said",
        ),
    ],
    ids=["none", "too few", "no main", "others"],
)
def test_weights_that_do_not_match_the_loss_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        plain(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(3), r"batch_spec.weight must return one number for 'loss', got shape \(3,\). Sum the weight"),
        (None, "batch_spec.weight must return one number for 'loss', got None"),
        ("seven", "batch_spec.weight must return one number for 'loss', got 'seven'"),
        ({"loss": 7.0, "flat": None}, "batch_spec.weight must return one number for 'flat', got None"),
    ],
    ids=["vector", "none", "text", "term"],
)
def test_non_numeric_weight_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        plain(batch_spec=batch_spec(weight=lambda whole: given))


def test_a_weight_may_be_a_tensor_of_one_element():
    state = plain(batch_spec=batch_spec(weight=lambda whole: {name: weight[None] for name, weight in weigh(whole).items()}))
    computed = torch.cat([p.grad.flatten() for p in state.params.values()])
    assert ((computed - reference()).norm() / reference().norm()).item() <= TOLERANCE


def other_terms_on_rank_1(case: str) -> str:
    state = state_of(shard_model(model(), build_mesh()))
    mine = (
        {"loss": 1.0, "flat": 1.0}
        if get_dist_info().rank == 0
        else {"other": {"loss": 1.0, "round": 1.0}, "fewer": {"loss": 1.0}}.get(case)
    )
    weights = (lambda whole: mine) if mine else None
    try:
        microbatch_step(state, batch(), loss_fn=loss_fn, batch_spec=batch_spec(weight=weights))
    except StepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["other", "fewer", "none"])
def test_mismatched_terms_across_ranks_raise_before_reduction(ranks, case):
    first, second = ranks(2).run(other_terms_on_rank_1, case, timeout_s=30)
    assert "step: batch_spec.weight of rank 1 gives weights of other terms than that of rank 0" in first
    assert first == second


def test_declared_total_of_zero_is_refused():
    masked = {**batch(), "fit": torch.zeros(SAMPLES)}
    state = state_of(model())
    with pytest.raises(StepError, match="the weights of all ranks add up to 0"):
        microbatch_step(state, masked, loss_fn=loss_fn, batch_spec=batch_spec(weight=weigh))
    assert all(p.grad is None for p in state.params.values())


def broken_promise_on_rank_1() -> str:
    state = state_of(shard_model(model(), build_mesh()))
    off = float(get_dist_info().rank)
    try:
        microbatch_step(
            state,
            batch(),
            loss_fn=loss_fn,
            batch_spec=batch_spec(weight=lambda whole: {"loss": whole["fit"].sum() + off, "flat": whole["flat"].sum()}),
        )
    except StepError as error:
        return f"{error} left: {sum(p.grad is not None for p in state.params.values())}"
    return "no error"


def test_mismatch_with_the_declared_weight_on_one_rank_raises_on_all_ranks(ranks):
    first, second = ranks(2).run(broken_promise_on_rank_1)
    assert "on rank 1 the weights of the losses do not add up" in first
    assert first == second
    assert first.endswith("left: 0")
