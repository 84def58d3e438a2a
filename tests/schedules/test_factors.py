"""Rates given as factors are noticed; factors never are."""

import warnings

import pytest
import torch
from torch import nn

import dtrain as dt


def init(factors, lr=3e-4, rates=None):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [
        {"params": list(layer.parameters()), "name": name, "lr": rate}
        for layer, name, rate in zip(model, ("body", "head"), rates or (lr, lr), strict=True)
    ]
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [dt.transforms.scale_lr(factors)])
    return step.init(model, torch.optim.SGD(groups))


@pytest.mark.parametrize(
    ("factors", "lr"),
    [
        (dt.schedules.cosine(3e-4, 0.0, 1_000), 3e-4),
        (dt.schedules.warmup(dt.schedules.cosine(3e-4, 3e-5, 10_000), 500), 3e-4),
        (dt.schedules.inverse_sqrt(1e-3, 4_000), 1e-3),
        (dt.schedules.with_unit("tok", dt.schedules.cosine(6e-4, 0.0, 10**9)), 6e-4),
        (3e-4, 3e-4),
        (dt.schedules.cosine(0.1, 0.0, 1_000), 0.1),
        (dt.schedules.warmup(dt.schedules.cosine(0.1, 0.0, 1_000), 50), 0.1),
        ({"head": dt.schedules.cosine(3e-4, 0.0, 1_000)}, 3e-4),
        ({"head": dt.schedules.cosine(3e-4, 0.0, 1_000), "body": dt.schedules.cosine(3e-5, 0.0, 1_000)}, 3e-4),
        ({"head": dt.schedules.constant(1.0), "body": dt.schedules.cosine(3e-4, 0.0, 1_000)}, 3e-4),
    ],
    ids=[
        "cosine",
        "warm-up",
        "inverse sqrt",
        "tokens",
        "number",
        "sgd",
        "sgd warm-up",
        "one group",
        "two groups",
        "one of two",
    ],
)
def test_warn_if_absolute_lr_finds_absolute_rates(factors, lr):
    with pytest.warns(UserWarning, match=r"scale_lr: the largest factor is .* Give factors of .* with lr=1.0"):
        init(factors, lr)


@pytest.mark.parametrize(
    ("factors", "lr"),
    [
        (dt.schedules.cosine(1.0, 0.0, 1_000), 3e-4),
        (dt.schedules.warmup(dt.schedules.cosine(1.0, 0.0, 1_000_000), 100_000), 3e-4),
        (dt.schedules.linear(0.0, 1.0, 10**6), 3e-4),
        (dt.schedules.exponential(1e-4, 10.0, 100, end=1.0), 3e-4),
        (dt.schedules.warmup_stable_decay(1.0, warmup=10_000), 3e-4),
        (dt.schedules.multiply(dt.schedules.cosine(1.0, 0.0, 1_000), 0.1), 3e-4),
        (dt.schedules.cosine(3e-4, 0.0, 1_000), 1.0),
        ({"body": 0.65**24, "head": 1.0}, 3e-4),
        (
            {
                "body": dt.schedules.multiply(dt.schedules.cosine(1.0, 0.0, 1_000), 0.65**24),
                "head": dt.schedules.cosine(1.0, 0.0, 1_000),
            },
            3e-4,
        ),
        (
            {
                "body": dt.schedules.multiply(dt.schedules.cosine(1.0, 0.0, 1_000), 0.1),
                "head": dt.schedules.cosine(1.0, 0.0, 1_000),
            },
            0.1,
        ),
        ({"body": 0.0}, 3e-4),
        ({"body": 0.001}, 3e-4),
        (lambda step: [1.0, 0.5, 0.25][step], 3e-4),
    ],
    ids=[
        "decay to 0",
        "long warm-up",
        "growth",
        "range test",
        "stable",
        "a tenth",
        "absolute",
        "by layer",
        "scheduled by layer",
        "a tenth of sgd's",
        "frozen",
        "nearly frozen",
        "table",
    ],
)
def test_warn_if_absolute_lr_accepts_factors(factors, lr):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(factors, lr)


def test_to_lambda_lr_warns_about_absolute_rates():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    with pytest.warns(UserWarning, match="to_lambda_lr: the largest factor is 0.0003 .* the run trains at 9e-08"):
        dt.schedules.to_lambda_lr(dt.schedules.cosine(3e-4, 0.0, 100), optimizer)
