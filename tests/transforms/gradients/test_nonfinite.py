"""Gradients that are not finite: one decision on all ranks, its counts, and its limit."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.transforms.gradients.nonfinite import nonfinite

LOSS = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
FINE = 1.0


def begin(guard, *others, rows=2):
    model = nn.Linear(1, rows).double()
    nn.init.ones_(model.weight)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=())
    step = dt.compose_step(LOSS, [guard, *others])
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))


def run(step, state, values):
    """The mean samples of some steps, and how each step ended."""
    skipped = []
    for value in values:
        state, metrics = step(state, torch.full((2, 1), value, dtype=torch.float64))
        skipped.append(metrics["skipped"].total.item())
    return state, skipped


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_skip_changes_no_parameters_optimizer_or_inner_transform(bad):
    step, state = begin(nonfinite(), dt.transforms.ema(0.5))
    state, _ = run(step, state, [FINE])
    before = {name: param.detach().clone() for name, param in state.params.items()}
    moments = [content["momentum_buffer"].clone() for content in state.optimizer.state.values()]
    averages = {name: average.clone() for name, average in state.transform_states["ema"]["params"].items()}
    state, skipped = run(step, state, [bad])
    assert skipped == [1.0]
    assert all(torch.equal(param, before[name]) for name, param in state.params.items())
    assert all(torch.equal(a["momentum_buffer"], b) for a, b in zip(state.optimizer.state.values(), moments, strict=True))
    assert all(torch.equal(average, averages[name]) for name, average in state.transform_states["ema"]["params"].items())
    assert all(param.grad is None for param in state.params.values())
    assert state.step == 2  # the clock advances


def test_skip_counts_total_and_consecutive_steps():
    step, state = begin(nonfinite())
    bad = float("nan")
    state, skipped = run(step, state, [bad, FINE, bad, bad])
    assert skipped == [1.0, 0.0, 1.0, 1.0]
    assert state.transform_states["nonfinite"] == {"skipped": 3, "in_a_row": 2}


def test_too_many_consecutive_skips_raise():
    step, state = begin(nonfinite(in_a_row=2))
    state, _ = run(step, state, [float("nan"), FINE, float("nan")])
    with pytest.raises(
        StepError, match=r"nonfinite: step 3: a gradient is not finite, 2 steps in a row \(on this rank: weight"
    ):
        run(step, state, [float("nan")])


def test_raise_names_the_step_and_the_parameters():
    step, state = begin(nonfinite("raise"))
    state, skipped = run(step, state, [FINE])
    assert skipped == [0.0]
    with pytest.raises(
        StepError, match=r"nonfinite: step 1: a gradient is not finite \(on this rank: weight\)\. The update was skipped"
    ):
        run(step, state, [float("inf")])


def test_overflow_of_the_squared_norm_is_not_a_nonfinite_gradient():
    step, state = begin(nonfinite("raise"))
    large = 1e200  # its square is infinite
    state, skipped = run(step, state, [large])
    assert skipped == [0.0]


def test_nonfinite_listed_before_loss_scale_is_refused():
    """The scale is too large for the gradient, and no transform lowers it."""
    step, state = begin(nonfinite(), dt.transforms.loss_scale(initial_scale=2.0**127, grow_every=1))
    state, skipped = run(step, state, [FINE])
    assert skipped == [0.0]
    with pytest.raises(
        ConfigError, match=r"nonfinite must not be listed before loss_scale, .* Remove nonfinite or list it after loss_scale"
    ):
        run(step, state, [float("inf")])


def test_nonfinite_listed_after_loss_scale_sees_finite_gradients():
    step, state = begin(dt.transforms.loss_scale(), nonfinite("raise"))
    state, skipped = run(step, state, [float("inf"), FINE])
    assert skipped == [1.0, 0.0]
    assert state.transform_states["loss_scale"]["scale"] == 2.0**15


def on_ranks(action):
    """One row of the weight is on each rank, and a hook spoils only the gradient of the last row."""

    def update(inner):
        def spoiled(state, metrics):
            if state.step == 1 and get_dist_info().rank == 1:
                to_local(state.params["weight"].grad).fill_(float("nan"))
            return inner(state, metrics)

        return spoiled

    step, state = begin(nonfinite(action))
    step, state = dt.compose_step(LOSS, [dt.Transform(name="spoil", update=update), nonfinite(action)]), state
    state = step.init(state.model, state.optimizer)
    try:
        state, skipped = run(step, state, [FINE, FINE, FINE])
    except StepError as error:
        return str(error)
    return [skipped, state.transform_states["nonfinite"], to_local(state.params["weight"]).detach().isfinite().all().item()]


def test_nonfinite_gradient_on_one_rank_skips_on_all_ranks(ranks):
    assert ranks(2).run(on_ranks, "skip") == [[[0.0, 1.0, 0.0], {"skipped": 1, "in_a_row": 0}, True]] * 2


def test_all_ranks_raise_and_name_the_rank(ranks):
    first, second = ranks(2).run(on_ranks, "raise")
    assert "step 1: a gradient is not finite (on this rank: none)" in first
    assert "step 1: a gradient is not finite (on this rank: weight)" in second


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"action": "stop"}, "action must be 'skip', 'raise' or 'allow', got 'stop'"),
        ({"in_a_row": 0}, "in_a_row must be an integer of at least 1, and omitted with 'raise', got in_a_row=0, action='skip'"),
        ({"in_a_row": 2.0}, "in_a_row must be an integer of at least 1"),
        ({"action": "raise", "in_a_row": 2}, "omitted with 'raise', got in_a_row=2, action='raise'"),
    ],
    ids=["action", "none in a row", "fraction", "raise in a row"],
)
def test_nonfinite_refuses_invalid_arguments(given, message):
    with pytest.raises(ConfigError, match=f"nonfinite: .*{message}"):
        nonfinite(**given)
