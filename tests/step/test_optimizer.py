import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients, clip_grad_norm_, optimizer_step, set_lr_, tick
from dtrain.typing import LossSum


def state_with_gradient():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.5))
    net(torch.ones(1, 3)).sum().backward()
    return state


def test_apply_gradients_runs_the_optimizer_once_and_invalidates_the_state():
    state = state_with_gradient()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in state.params.items()}
    after, _ = apply_gradients(state, {})
    for name, param in after.params.items():
        torch.testing.assert_close(param.detach(), expected[name])
        assert param.grad is None
    assert after.step == 0, "the clock ticks in tick"
    with pytest.raises(StaleStateError, match="apply_gradients: this state was stepped already"):
        apply_gradients(state, {})


def test_apply_without_gradients_is_refused():
    state, _ = apply_gradients(state_with_gradient(), {})
    with pytest.raises(StepError, match="no parameter has a gradient"):
        apply_gradients(state, {})


def test_optimizer_step_after_a_backward_by_hand_is_refused_before_the_update():
    state = state_with_gradient()
    before = {name: p.detach().clone() for name, p in state.params.items()}
    with pytest.raises(StepError, match=r"optimizer_step: no step is in progress.* call dt\.apply_gradients"):
        optimizer_step(state, {})
    for name, param in state.params.items():
        assert torch.equal(param, before[name])
    after, _ = apply_gradients(state, {})
    with pytest.raises(StaleStateError, match="optimizer_step: this state was stepped already"):
        optimizer_step(state, {})
    assert after.step == 0


WITHOUT_CLOSURE = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("LBFGS", "Optimizer")
]


@pytest.mark.parametrize("kind", WITHOUT_CLOSURE)
def test_every_torch_optimizer_except_lbfgs_updates_parameters(kind):
    net = nn.Embedding(4, 2, sparse=kind is torch.optim.SparseAdam)
    before = net.weight.detach().clone()
    state = init_state(net, kind(net.parameters(), lr=0.1))
    net(torch.tensor([0, 1])).square().sum().backward()
    after, _ = apply_gradients(state, {})
    assert not full_tensor(after.params["weight"]).equal(before)


def test_tick_needs_a_step_in_progress():
    with pytest.raises(StepError, match="Pass a state of microbatch_step"):
        tick(state_with_gradient())
    with pytest.raises(StepError, match="optimizer_step: no step is in progress"):
        optimizer_step(state_with_gradient(), {})


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clipping_agrees_with_torch(max_norm):
    ours, theirs = state_with_gradient(), state_with_gradient()
    norm = clip_grad_norm_(ours.params, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.params.values(), max_norm)
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours.params.values(), theirs.params.values(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_clipping_refuses_nonpositive_max_norm(max_norm):
    with pytest.raises(ConfigError, match="max_norm must be positive, got"):
        clip_grad_norm_(state_with_gradient().params, max_norm)


def clipped_norm(strategy: str) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    net = shard_model(net, build_mesh(), strategy=strategy)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.5))
    # A weight of 1 over all ranks leaves the sum.
    loss_fn = lambda net, x: LossSum(total=net(x).sum(), weight=1 / get_dist_info().world_size)  # noqa: E731
    microbatch_step(state, torch.ones(2, 5, dtype=torch.float64), loss_fn=loss_fn)
    before = clip_grad_norm_(state.params, 1.0)
    return [before.item(), clip_grad_norm_(state.params, 100.0).item()]


def test_clipping_uses_the_global_norm_on_every_layout(ranks):
    one = ranks(1).run(clipped_norm, "full_shard")[0]
    for strategy in ("full_shard", "replicate"):
        for before, after in ranks(3).run(clipped_norm, strategy):
            assert before == pytest.approx(3 * one[0], rel=1e-12)  # three ranks add three equal gradients
            assert after == pytest.approx(1.0, rel=1e-5)


def test_set_lr_sets_all_groups_to_an_absolute_value():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "lr": 2.0}])
    set_lr_(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def state_with(value: float):
    state = state_with_gradient()
    state.params["bias"].grad[1] = value
    return state


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_raise_and_are_dropped(value):
    state = state_with(value)
    with pytest.raises(StepError, match=r"step 0: a gradient is not finite \(on this rank: bias\). Lower the learning rate"):
        apply_gradients(state, {}, nonfinite="raise")
    assert all(p.grad is None for p in state.params.values())
    state._check_not_stale("here")


def test_nonfinite_gradients_skip_the_update_and_report_skipped():
    state = state_with(float("nan"))
    before = {name: p.detach().clone() for name, p in state.params.items()}
    state, metrics = apply_gradients(state, {}, nonfinite="skip")
    assert all(torch.equal(before[name], p) for name, p in state.params.items())
    assert metrics["skipped"].total == 1.0
    _, metrics = apply_gradients(state_with_gradient(), {}, nonfinite="skip")
    assert metrics["skipped"].total == 0.0


@pytest.mark.parametrize("how", ["skip", "raise"])
def test_finite_gradients_with_overflowing_squares_are_applied(how):
    state = state_with(1e30)
    before = state.params["bias"].detach().clone()
    state, _ = apply_gradients(state, {}, nonfinite=how)
    assert not torch.equal(state.params["bias"], before)


def test_nonfinite_gradients_are_unchecked_by_default():
    state, metrics = apply_gradients(state_with(float("nan")), {})
    assert state.params["bias"].isnan().any()
    assert metrics == {}


def test_unknown_nonfinite_mode_is_refused():
    with pytest.raises(ConfigError, match="nonfinite must be 'allow', 'raise' or 'skip', got 'ignore'"):
        apply_gradients(state_with_gradient(), {}, nonfinite="ignore")


def one_rank_is_nan(how: str) -> list:
    """Rank 1 alone has a shard with NaN."""
    torch.manual_seed(0)
    net = shard_model(nn.Linear(4, 4), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.5))
    net(torch.ones(1, 4)).sum().backward()
    if get_dist_info().rank == 1:
        to_local(state.params["weight"].grad)[0, 0] = float("nan")
    before = full_tensor(state.params["weight"].detach()).clone()
    try:
        state, metrics = apply_gradients(state, {}, nonfinite=how)
    except StepError as error:
        return [str(error).split(" (on")[0]]
    return [float(metrics["skipped"].total), torch.equal(before, full_tensor(state.params["weight"].detach()))]


def test_nonfinite_gradient_on_one_rank_applies_to_all_ranks(ranks):
    assert ranks(2).run(one_rank_is_nan, "skip") == [[1.0, True]] * 2
    assert ranks(2).run(one_rank_is_nan, "raise") == [["apply_gradients: step 0: a gradient is not finite"]] * 2
