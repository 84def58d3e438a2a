"""A loss that is not finite, or a spike, is found two steps later, on all ranks, also after a resume."""

import math
import warnings

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.monitors.loss_spikes import is_spike, watch_loss
from dtrain.step.compose import optimizer_in_backward
from dtrain.testing import count_host_syncs
from dtrain.transforms.gradients.nonfinite import nonfinite

USUAL = 1.0


def begin(*transforms, lr=0.0, make=dt.compose_step, through=False, **options):
    """A run whose loss is the value that the batch holds; it reaches the gradient with ``through`` only."""
    model = nn.Linear(1, 4, bias=False).double()
    nn.init.ones_(model.weight)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=())
    one = torch.ones(1, dtype=torch.float64)
    loss = dt.mean_loss(lambda m, x: m(x).mean() if through else m(one).mean() * 0.0 + x.mean(), weight=len)
    step = make(loss, transforms, **options)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=lr))


def run(step, state, values):
    """The state after steps with these losses."""
    for value in values:
        state, _ = step(state, torch.full((2, 1), value, dtype=torch.float64))
    return state


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_raises_two_steps_later(bad, events):
    step, state = begin(watch_loss())
    state = run(step, state, [USUAL, bad, USUAL])
    before = state.model.weight.detach().clone()
    with pytest.raises(StepError, match=rf"watch_loss: the loss of step 1 was {bad}\. Check the batch and the learning rate"):
        run(step, state, [USUAL])
    assert torch.equal(
        state.model.weight,
        before,
    ), "the step that raises must not be made"
    (event,) = events
    assert (event["name"], event["step"], event["value"]) == ("loss", 1, str(bad))


def test_warn_mode_continues_training(events):
    step, state = begin(watch_loss("warn"))
    with pytest.warns(RuntimeWarning, match="watch_loss: the loss of step 1 was nan"):
        state = run(step, state, [USUAL, math.nan, USUAL, USUAL, USUAL, USUAL])
    assert state.step == 6
    assert len(events) == 1


def test_spike_raises_and_usual_loss_does_not():
    step, state = begin(watch_loss(factor=3.0))
    state = run(step, state, [100.0, *[1.0, 1.2] * 6, 2.9, 3.7, 1.0])
    with pytest.raises(
        StepError, match=r"the loss of step 14 was 3.7\. The median of the 14 losses before is 1.2, and factor=3.0"
    ):
        run(step, state, [1.0])


def test_window_follows_recent_losses():
    step, state = begin(watch_loss(factor=3.0, window=10))
    state = run(step, state, [1.0] * 12 + [2.5] * 12 + [7.0] * 4)  # 7 is 2.8 times the usual loss by then
    assert list(state.transform_states["watch_loss"]["usual"].values()) == [2.5] * 8 + [7.0] * 2


@pytest.mark.parametrize(
    ("loss", "before", "factor", "spike"),
    [
        (3.1, [1.0] * 10, 3.0, True),
        (3.0, [1.0] * 10, 3.0, False),
        (99.0, [1.0] * 9, 3.0, False),  # too few
        (-0.4, [-1.0] * 10, 1.5, True),  # half of the magnitude above
        (-0.5, [-1.0] * 10, 1.5, False),
        (2.0, [1e9] * 4 + [1.0] * 6, 3.0, False),  # spikes do not move the median
        (1.0, [0.0] * 10, 3.0, True),
    ],
)
def test_is_spike_compares_with_median_of_previous_losses(loss, before, factor, spike):
    assert is_spike(loss, before, factor) == spike


def test_resumed_run_checks_losses_pending_at_save(tmp_path):
    step, state = begin(watch_loss())
    state = run(step, state, [USUAL, math.nan])
    save_sharded(tmp_path, state)
    step, state = begin(watch_loss())
    state = run(step, load_sharded(tmp_path, state), [USUAL])
    with pytest.raises(StepError, match="the loss of step 1 was nan"):
        run(step, state, [USUAL])


def test_retried_step_keeps_pending_loss():
    step, state = begin(watch_loss())
    state = run(step, state, [math.nan, USUAL])
    for _ in range(3):
        with pytest.raises(StepError, match="the loss of step 0 was nan"):
            run(step, state, [USUAL])


def test_watch_loss_needs_no_device_sync():
    step, state = begin(watch_loss(factor=2.0))
    state = run(step, state, [USUAL])
    with count_host_syncs() as seen:
        run(step, state, [USUAL] * 20)
    assert seen.count == 0


@pytest.mark.parametrize(
    ("first", "second", "detected"), [(watch_loss(), nonfinite(), True), (nonfinite(), watch_loss(), False)]
)
def test_order_with_nonfinite_decides_whether_skipped_steps_are_checked(first, second, detected):
    step, state = begin(first, second, through=True)
    state = run(step, state, [USUAL, math.nan, USUAL])
    if detected:
        with pytest.raises(StepError, match="the loss of step 1 was nan"):
            run(step, state, [USUAL])
    else:
        assert run(step, state, [USUAL] * 3).step == 6


def test_watch_loss_supports_optimizer_in_backward():
    step, state = begin(watch_loss(), make=optimizer_in_backward, batch_spec=dt.batch_spec(weight=len))
    state = run(step, state, [math.nan, USUAL])
    with pytest.raises(StepError, match="the loss of step 0 was nan"):
        run(step, state, [USUAL])


def on_ranks():
    """Only rank 1 has a bad sample."""
    step, state = begin(watch_loss())
    values = [USUAL, math.nan if get_dist_info().rank == 1 else USUAL, USUAL, USUAL]
    try:
        for value in values:
            state = run(step, state, [value])
    except StepError as error:
        return f"{state.step}: {error}"
    return "no error"


def test_all_ranks_raise_at_same_step(ranks):
    for message in ranks(2).run(on_ranks):
        assert message.startswith("3: watch_loss: the loss of step 1 was nan")


def warned():
    step, state = begin(watch_loss("warn"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(step, state, [math.inf, USUAL, USUAL])
    said = [str(warning.message)[:10] for warning in seen]
    return [
        warning for warning in said if warning == "watch_loss"
    ]  # both ranks have the same batches, which is warned of as well


def test_only_rank_0_warns(ranks):
    assert ranks(2).run(warned) == [["watch_loss"], []]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"action": "skip"}, "watch_loss: action must be 'raise' or 'warn', got 'skip'"),
        ({"factor": 1.0}, "watch_loss: factor must be a finite number above 1, got 1.0"),
        ({"factor": "2"}, "watch_loss: factor must be a finite number above 1, got '2'"),
        ({"window": 9}, "watch_loss: window must be an integer of at least 10, got 9"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        watch_loss(**given)


def test_unknown_metric_is_refused():
    step, state = begin(watch_loss(metric="lm"))
    with pytest.raises(ConfigError, match="watch_loss: metric must be one of loss, got 'lm'"):
        run(step, state, [USUAL])
