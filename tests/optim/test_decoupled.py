"""Decay relative to the peak rate: its strength, which peak wins, and that torch's own forms and hooks are used as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.optim.decoupled import DecoupledAdamW, DecoupledSGDW
from optim.trained import trained

LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
KINDS = {"adamw": DecoupledAdamW, "sgdw": DecoupledSGDW}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def parameter(value: float = 8.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def decayed(optimizer: torch.optim.Optimizer) -> float:
    """Return the fraction of its only parameter that a step of pure decay removes."""
    param = optimizer.param_groups[0]["params"][0]
    before, param.grad = param.item(), torch.zeros_like(param)
    optimizer.step()
    return 1.0 - param.item() / before


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, size, generator=generator, dtype=torch.float64)) for size in (2, 5)]


@each_kind
@pytest.mark.parametrize("peak", [0.5, 0.001])
def test_decay_at_the_peak_does_not_depend_on_lr(kind, peak):
    assert decayed(kind([parameter()], lr=peak, weight_decay=0.1)) == pytest.approx(0.1)


@each_kind
def test_decay_scales_with_the_schedule(kind):
    optimizer = kind([parameter()], lr=0.5, weight_decay=0.1)
    decays = []
    for factor in (1.0, 0.5, 0.0):
        dt.step.set_lr_(optimizer, 0.5 * factor)
        decays.append(decayed(optimizer))
    assert decays == pytest.approx([0.1, 0.05, 0.0], abs=1e-12)


@each_kind
def test_torch_default_decay_differs(kind):
    """So that the tests above could fail."""
    plain = {DecoupledAdamW: torch.optim.AdamW, DecoupledSGDW: torch.optim.SGD}[kind]
    assert decayed(plain([parameter()], lr=0.5, weight_decay=0.1)) == pytest.approx(0.05)


def test_decoupled_adamw_equals_torch_with_decay_divided_by_peak():
    for options in ({}, {"amsgrad": True}, {"foreach": True}, {"maximize": True}, {"foreach": False}):
        ours, theirs = matrices(), matrices()
        got = trained(DecoupledAdamW(ours, lr=0.1, weight_decay=0.02, **options), ours)
        expected = trained(torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, **options), theirs)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0.0)


@each_kind
def test_decoupled_optimizers_without_decay_match_torch(kind):
    plain = {DecoupledAdamW: torch.optim.AdamW, DecoupledSGDW: torch.optim.SGD}[kind]
    ours, theirs = matrices(), matrices()
    got = trained(kind(ours, lr=0.1, weight_decay=0.0, foreach=True), ours)
    betas = {"betas": (0.9, 0.95)} if kind is DecoupledAdamW else {}
    expected = trained(plain(theirs, lr=0.1, weight_decay=0.0, foreach=True, **betas), theirs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@each_kind
def test_options_are_restored_after_a_failed_step(kind):
    optimizer = kind([parameter()], lr=0.5, weight_decay=0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = "broken"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@each_kind
def test_closure_runs_once_with_gradients(kind):
    param = parameter()
    optimizer = kind([param], lr=0.5)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        param.grad = None
        loss = (param * 2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 16.0
    assert calls == [True]


@each_kind
def test_step_hooks_run_once_per_step(kind):
    plain = {DecoupledAdamW: torch.optim.AdamW, DecoupledSGDW: torch.optim.SGD}[kind]
    plain([parameter()])  # after this torch's own step runs hooks, too
    optimizer, seen = kind([parameter()], lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    decayed(optimizer)
    assert seen == ["before", "after"]


def resumed(kind: type, root: str, peak: float, new: float) -> tuple[float, dict, torch.optim.Optimizer]:
    """Save a run with one peak and load it into an optimizer made with another peak."""
    for lr in (peak, new):
        model = nn.Linear(2, 1, bias=False).double()
        step = dt.compose_step(LOSS, [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 4))])
        state = step.init(model, kind(model.parameters(), lr=lr, weight_decay=0.1))
        if lr == new:
            state = dt.load_sharded(root, state)
            break
        for _ in range(2):
            state, _ = step(state, torch.ones(1, 2, dtype=torch.float64))
        dt.save_sharded(root, state)
    return state.optimizer


@each_kind
def test_resume_uses_the_peak_of_the_checkpoint(kind, tmp_path):
    optimizer = resumed(kind, str(tmp_path), 0.5, 0.125)
    assert [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups] == [(0.5, 0.5)]


@each_kind
def test_decay_after_resume_follows_changed_lr_not_changed_peak(kind, tmp_path):
    optimizer = resumed(kind, str(tmp_path), 0.5, 0.125)
    optimizer.state.clear()
    param = parameter()
    group = optimizer.param_groups[0]
    group["params"] = [param]
    dt.step.set_lr_(optimizer, 0.25)
    assert decayed(optimizer) == pytest.approx(0.05)
    group.update(lr=0.25, initial_lr=0.25)
    assert decayed(optimizer) == pytest.approx(0.1)


@each_kind
def test_state_dict_keeps_the_peak_and_may_lack_it(kind):
    optimizer = kind([parameter()], lr=0.5, weight_decay=0.1)
    dt.step.set_lr_(optimizer, 0.25)
    fresh = kind([parameter()], lr=0.75, weight_decay=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["initial_lr"]) == (0.25, 0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["initial_lr"]
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["initial_lr"] == 0.25
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["initial_lr"] == 0.5


@each_kind
def test_torch_scheduler_keeps_the_peak(kind):
    optimizer = kind([parameter()], lr=0.5, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 / (1 + t))
    decays = [decayed(optimizer)]
    schedule.step()
    assert [*decays, decayed(optimizer)] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf"), torch.tensor(0.1)])
@each_kind
def test_invalid_peak_rates_are_refused(kind, lr):
    with pytest.raises((ConfigError, ValueError), match=r"lr must be a finite number above 0, got|Invalid learning rate"):
        kind([parameter()], lr=lr)


def forms(optimizer: torch.optim.Optimizer) -> list[tuple]:
    return [(group["fused"], group["foreach"]) for group in optimizer.param_groups]


def test_fastest_torch_implementation_is_the_default():
    assert forms(DecoupledAdamW([parameter()])) == [(True, None)]
    assert forms(DecoupledAdamW([parameter()], foreach=True)) == [(None, True)]
    assert forms(DecoupledAdamW([parameter()], differentiable=True)) == [(None, None)]
    assert forms(DecoupledAdamW([nn.Parameter(torch.ones(1, dtype=torch.complex64))])) == [(None, None)]
    assert forms(DecoupledSGDW([parameter()])) == [(None, True)]
    assert forms(DecoupledSGDW([parameter()], fused=True)) == [(True, None)]


def test_sgdw_accepts_a_late_first_gradient():
    early, late = parameter(), parameter()
    optimizer = DecoupledSGDW([early, late], lr=0.5, momentum=0.5)
    early.grad = torch.ones_like(early)
    optimizer.step()
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert (early.item(), late.item()) == (8 - 0.5 - 0.75, 7.5)


@each_kind
def test_parameters_without_a_gradient_do_not_decay(kind):
    param = parameter()
    kind([param], lr=0.5, weight_decay=0.1).step()
    assert param.item() == 8.0


def sharded_forms(mixed: bool) -> list:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"ignored_params": ["1.*"]} if mixed else {}
    model = dt.shard_model(model, dt.build_mesh(), blocks=(nn.Linear,), **options)
    every = []
    for kind in (DecoupledAdamW, DecoupledSGDW):
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1)
        step = dt.compose_step(LOSS, [])
        state, _ = step(step.init(model, optimizer), torch.ones(2, 4))
        every += forms(state.optimizer)
    return every


def test_sharded_parameters_get_one_implementation_and_mixed_groups_the_default(ranks):
    assert ranks(2).run(sharded_forms, False) == [[[True, None], [None, True]]] * 2
    assert ranks(2).run(sharded_forms, True) == [[[None, None], [None, None]]] * 2
