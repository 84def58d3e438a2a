"""Every schedule that torch has, too, over many steps."""

import pytest
import torch
from torch.optim import lr_scheduler as peers

from dtrain.schedules import composer
from dtrain.schedules.curves import (
    constant,
    cosine,
    cosine_restarts,
    exponential,
    linear,
    multi_step,
    one_cycle,
    polynomial,
    sequential,
    step_decay,
    warmup,
)
from dtrain.schedules.durations import RunLength

RUN = RunLength(total="6ep", steps_per_epoch=10)


def rates(make, steps):
    """The rates of torch's scheduler for each step about to run, of a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, values = make(optimizer), []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def one_cycle_lr(**options):
    return lambda o: peers.OneCycleLR(o, max_lr=1.0, total_steps=101, cycle_momentum=False, **options)


# Torch's peak is at pct_start * total_steps - 1 and its end at total_steps - 1.
RISE = (0.3 * 101 - 1) / 100

PEERS = {
    "LambdaLR": (lambda o: peers.LambdaLR(o, linear(1.0, 0.0, 50)), linear(1.0, 0.0, 50), 60),
    "ConstantLR": (lambda o: peers.ConstantLR(o, factor=0.3, total_iters=10**6), constant(0.3), 60),
    "LinearLR": (lambda o: peers.LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=50), linear(1.0, 0.25, 50), 80),
    "LinearLR, as a warm-up": (
        lambda o: peers.LinearLR(o, start_factor=0.1, total_iters=20),
        warmup(constant(1.0), 20, start=0.1),
        40,
    ),
    "CosineAnnealingLR": (lambda o: peers.CosineAnnealingLR(o, T_max=80, eta_min=0.1), cosine(1.0, 0.1, 80), 81),
    "CosineAnnealingWarmRestarts": (
        lambda o: peers.CosineAnnealingWarmRestarts(o, T_0=7, eta_min=0.1),
        cosine_restarts(1.0, 0.1, 7),
        200,
    ),
    "CosineAnnealingWarmRestarts, longer each time": (
        lambda o: peers.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=3, eta_min=0.1),
        cosine_restarts(1.0, 0.1, 5, multiplier=3),
        650,
    ),
    "PolynomialLR": (lambda o: peers.PolynomialLR(o, total_iters=50, power=2.0), polynomial(1.0, 0.0, 50, power=2.0), 60),
    "ExponentialLR": (lambda o: peers.ExponentialLR(o, gamma=0.97), exponential(1.0, 0.97), 200),
    "StepLR": (lambda o: peers.StepLR(o, step_size=9, gamma=0.3), step_decay(1.0, 0.3, 9), 100),
    "MultiStepLR": (lambda o: peers.MultiStepLR(o, milestones=[5, 6, 40], gamma=0.3), multi_step(1.0, 0.3, [5, 6, 40]), 100),
    "OneCycleLR": (one_cycle_lr(), one_cycle(1 / 25, 1.0, 1 / 25e4, 100, rise=RISE), 101),
    "OneCycleLR, three straight lines": (
        one_cycle_lr(three_phase=True, anneal_strategy="linear"),
        one_cycle(1 / 25, 1.0, 1 / 25e4, 100, rise=RISE, shape="linear", three_phase=True),
        101,
    ),
    "Composer's linear": (lambda o: peers.LinearLR(o, 1.0, 0.25, 60), composer.linear(RUN, 1.0, 0.25), 70),
    "Composer's cosine": (lambda o: peers.CosineAnnealingLR(o, 60, 0.1), composer.cosine(RUN, alpha_f=0.1), 61),
    "Composer's warm restarts": (
        lambda o: peers.CosineAnnealingWarmRestarts(o, 10, 2, 0.1),
        composer.cosine_warm_restarts(RUN, "1ep", 2.0, 0.1),
        100,
    ),
    "Composer's polynomial": (lambda o: peers.PolynomialLR(o, 60, 2.0), composer.polynomial(RUN, 2.0), 70),
    "Composer's exponential": (lambda o: peers.ExponentialLR(o, 0.5**0.1), composer.exponential(RUN, 0.5), 70),
    "Composer's step": (lambda o: peers.StepLR(o, 20, 0.3), composer.step(RUN, "2ep", 0.3), 70),
    "Composer's multi-step": (
        lambda o: peers.MultiStepLR(o, [20, 30], 0.3),
        composer.multi_step(RUN, ["2ep", "0.5dur"], 0.3),
        70,
    ),
}


@pytest.mark.parametrize(("make", "ours", "steps"), PEERS.values(), ids=PEERS)
def test_values_match_torch_at_every_step(make, ours, steps):
    # Torch multiplies step by step, so its values carry the roundings of all steps before.
    assert [ours(t) for t in range(steps)] == pytest.approx(rates(make, steps), rel=1e-11, abs=1e-12)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # which SequentialLR itself gives
def test_sequential_matches_torch():
    def sequence(o):
        parts = [peers.LinearLR(o, 0.1, 1.0, 10), peers.ConstantLR(o, 1.0, 1), peers.ExponentialLR(o, 0.9)]
        return peers.SequentialLR(o, parts, milestones=[10, 30])

    ours = sequential([linear(0.1, 1.0, 10), constant(1.0), exponential(1.0, 0.9)], [10, 30])
    assert [ours(t) for t in range(60)] == pytest.approx(rates(sequence, 60), rel=1e-11)


def test_comparison_detects_a_schedule_delayed_by_one_step():
    expected = rates(lambda o: peers.LinearLR(o, 1.0, 0.25, 50), 60)
    assert [linear(1.0, 0.25, 50)(max(t - 1, 0)) for t in range(60)] != pytest.approx(expected, rel=1e-11)
