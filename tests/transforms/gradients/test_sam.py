"""SAM compared with the paper's formulas; values restored bit for bit, and the state after the second pass."""

import math

import pytest
import torch
from torch import nn

import dtrain as dt
from battery.layouts import largest_differences, params
from battery.rows.gradients import bowl
from dtrain.errors import ConfigError
from dtrain.transforms.gradients.sam import perturb_params_, restore_params_, sam

ROUNDING = 1e-14  # of float64 numbers up to ten
THROUGH_NORM = 1e-11  # the same, amplified by the BatchNorm of six samples; seen: 2e-12
LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def begin(*transforms, model=None, lr=0.1, loss=LOSS, **parts):
    step = dt.compose_step(loss, transforms, **parts)
    model = model or net()
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=lr))


def test_step_matches_a_reference_loop():
    step, state = begin(sam(0.3))
    state, metrics = step(state, batch())
    theirs = net()
    torch.autograd.backward(first := theirs(batch()).square().mean())
    before = [p.detach().clone() for p in theirs.parameters()]
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in theirs.parameters()))
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.3 * p.grad / norm
            p.grad = None
    theirs(batch()).square().mean().backward()
    for ours, p, start in zip(state.params.values(), theirs.parameters(), before, strict=True):
        torch.testing.assert_close(ours.detach(), start - 0.1 * p.grad, rtol=THROUGH_NORM, atol=THROUGH_NORM)
    assert (metrics["loss"].total / metrics["loss"].weight).item() == pytest.approx(first.item(), rel=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_perturb_has_norm_rho_and_restore_is_bit_exact(adaptive):
    given, perturbed = params(), params()
    kept = perturb_params_(perturbed, 0.7, adaptive=adaptive, eta=0.01)
    names = [name for name, param in perturbed.items() if param.grad is not None]
    moved = {name: (perturbed[name] - given[name]).detach() for name in names}
    size = {name: given[name].detach().abs() + 0.01 if adaptive else torch.ones(()) for name in names}
    # The way is the longest one for the gradient within the ball of moved / size, so that has the norm rho ...
    assert math.sqrt(sum((moved[n] / size[n]).square().sum().item() for n in names)) == pytest.approx(0.7, rel=1e-9)
    # ... and the loss rises by rho * norm(size * gradient), to first order.
    rise = sum((moved[n] * given[n].grad).sum().item() for n in names)
    steepest = math.sqrt(sum((size[n] * given[n].grad).square().sum().item() for n in names))
    assert rise == pytest.approx(0.7 * steepest, rel=1e-9)
    assert torch.equal(perturbed["without"], given["without"])
    restore_params_(perturbed, kept)
    assert all(torch.equal(perturbed[name], given[name]) for name in given)


def perturb(named_params):
    perturb_params_(named_params, 0.7)


def perturb_adaptively(named_params):
    perturb_params_(named_params, 0.7, adaptive=True)


def in_layouts(world_size):
    return [largest_differences(act, world_size) for act in (perturb, perturb_adaptively)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_perturbation_is_equal_in_every_sharding_layout(ranks, world_size):
    for plain, adaptive in ranks(world_size).run(in_layouts, world_size):
        assert max(*plain.values(), *adaptive.values()) <= ROUNDING, (plain, adaptive)


@pytest.mark.parametrize("adaptive", [False, True])
def test_zero_loss_still_runs_the_optimizer(adaptive):
    zero = dt.mean_loss(lambda model, x: 0.0 * model(x).mean(), weight=len)
    model = nn.Linear(3, 1).double()
    step = dt.compose_step(zero, [sam(0.05, adaptive=adaptive)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1.0))
    before = model.weight.detach().clone()
    state, metrics = step(state, batch())
    assert state.step == 1
    assert metrics["loss"].total.item() == 0.0
    torch.testing.assert_close(model.weight.detach(), 0.5 * before)  # weight decay has acted, so the optimizer has run


def test_zero_gradient_does_not_perturb_parameters():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    w.grad = torch.zeros(2)
    perturb_params_({"w": w}, 0.05)
    assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_low_precision_gradient_perturbs_by_rho(dtype, adaptive):
    """In float16 1 over its norm is more than the dtype holds."""
    w = torch.ones(2, dtype=dtype, requires_grad=True)
    w.grad = torch.tensor([2e-7, 0.0], dtype=dtype)
    perturb_params_({"w": w}, 0.5, adaptive=adaptive, eta=0.0)
    assert w.tolist() == [1.5, 1.0]


def test_sam_acts_in_the_first_step_of_each_interval():
    passes = []

    def counting(model, x):
        passes.append(1)
        return LOSS(model, x)

    step, state = begin(sam(0.3, every=3), loss=counting)
    seen = []
    for number in range(7):
        passes.clear()
        state, _ = step(state, batch(number))
        seen.append(len(passes))
    assert seen == [2, 1, 1, 2, 1, 1, 2]


def test_batch_norm_statistics_come_from_the_first_pass():
    with_sam, without = begin(sam(0.3)), begin()
    for step, state in (with_sam, without):
        step(state, batch())
    ours, theirs = (dict(state.model.named_buffers()) for _, state in (with_sam, without))
    assert ours["1.num_batches_tracked"].item() == 1
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_error_in_the_second_pass_restores_parameters_and_buffers():
    calls = []

    def failing(model, x):
        calls.append({name: p.detach().clone() for name, p in model.named_parameters()})
        made = LOSS(model, x)
        if len(calls) == 2:
            raise RuntimeError("second pass")
        return made

    step, state = begin(sam(0.3), loss=failing)
    before = {name: param.detach().clone() for name, param in state.params.items()}
    with pytest.raises(RuntimeError, match="second pass"):
        step(state, batch())
    assert any(not torch.equal(calls[1][name], before[name]) for name in before)  # it did run elsewhere
    assert all(torch.equal(param, before[name]) for name, param in state.params.items())
    assert state.model[1].num_batches_tracked.item() == 1  # of the first pass


def test_infinite_first_gradient_restores_the_parameters():
    infinite = dt.mean_loss(lambda model, x: model(x).mean() * float("inf"), weight=len)
    step, state = begin(dt.transforms.loss_scale(4.0, grow_every=9), sam(0.3), loss=infinite)
    before = {name: param.detach().clone() for name, param in state.params.items()}
    state, metrics = step(state, batch())
    assert metrics["skipped"].total.item() == 1.0
    assert all(torch.equal(param, before[name]) for name, param in state.params.items())


def sharded(strategy: str) -> list[float]:
    """Two steps of a sharded model on this rank's half of the batch; all parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if torch.distributed.is_initialized():
        degrees = {"dp_replicate": 2} if strategy == "hybrid_shard" else {}
        model = dt.shard_model(model, dt.build_mesh(**degrees), strategy=strategy, blocks=(nn.Linear,))
    step, state = begin(sam(0.3), model=model)
    for number in range(2):
        mine = batch(number).tensor_split(state.spec.data_ranks)[state.spec.data_rank]
        state, _ = step(state, mine)
    return [value for _, whole in dt.full_params(state) for value in whole.flatten().tolist()]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "replicate"])
def test_ranks_with_each_sharding_strategy_match_one_process(ranks, strategy):
    expected = sharded("none")
    for trained in ranks(2).run(sharded, strategy):
        assert trained == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.slow
def test_hybrid_sharded_ranks_match_one_process(ranks):
    expected = sharded("none")
    for trained in ranks(4).run(sharded, "hybrid_shard"):
        assert trained == pytest.approx(expected, rel=1e-11, abs=1e-13)


def looking(name: str, seen: list[float]) -> dt.Transform:
    """Runs the model once after the gradient, as a report may."""

    def wrap(inner):
        def look(state, batch, **options):
            state, metrics = inner(state, batch, **options)
            with torch.no_grad():
                seen.append(state.model(torch.ones(1, 3, dtype=torch.float64)).sum().item())
            return state, metrics

        return look

    return dt.Transform(name=name, grad=wrap)


def looked_at() -> list[float]:
    """Return the sums of the outputs after the first gradient, after the second, and after both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="shard_grad_op", blocks=(nn.Linear,))
    seen: list[float] = []
    step, state = begin(looking("outside", seen), sam(0.3), looking("inside", seen), model=model)
    step(state, batch().tensor_split(state.spec.data_ranks)[state.spec.data_rank])
    return seen


def test_parameter_reads_see_the_perturbation_only_while_it_applies(ranks):
    first, moved, last = expected = looked_at()
    assert first == last
    assert first != moved
    for read in ranks(2).run(looked_at):
        assert read == pytest.approx(expected, rel=1e-12)


def test_rho_schedule_is_read_at_the_current_step():
    assert bowl(sam(lambda step: 0.5), [3.0, 4.0]).tolist() == pytest.approx([-0.3, -0.4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rho": 0.0}, "rho must be in"),
        ({"eta": -1.0}, "eta must be a finite number at least 0"),
        ({"every": "2 epochs"}, "duration"),
    ],
    ids=["rho", "eta", "interval"],
)
def test_sam_refuses_invalid_arguments(given, message):
    with pytest.raises(ConfigError, match=message):
        sam(**given)


@pytest.mark.parametrize(
    ("rho", "eta", "message"),
    [(-1.0, 0.01, "rho must be positive"), (0.1, float("inf"), "eta must be a finite number at least 0")],
)
def test_perturb_refuses_invalid_arguments(rho, eta, message):
    with pytest.raises(ConfigError, match=f"perturb_params_: {message}"):
        perturb_params_({}, rho, eta=eta)


def test_sam_refuses_an_invalid_scheduled_rho_before_the_step():
    step, state = begin(sam(lambda step: 0.0), loss=lambda model, x: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=r"sam: rho must be in \(0, inf\], got 0\.0 from its schedule"):
        step(state, batch())
