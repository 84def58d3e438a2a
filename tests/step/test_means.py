"""A mean in a LossSum is noticed in the first step, and a sum never is."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
COUNT = MASK.sum()


def cross_entropy(model, **options):
    return F.cross_entropy(model(X), Y, **options)


def squares(model):
    return model(X).square()


MEANS = {
    "cross entropy": lambda m: (cross_entropy(m), 6),
    "of the model": lambda m: (cross_entropy(m).to(torch.float64), torch.tensor(6)),
    "smoothed weights": lambda m: (cross_entropy(m, weight=torch.ones(3)), 6.0),
    "mse": lambda m: (F.mse_loss(m(X), torch.zeros(6, 3)), 6),
    "binary": lambda m: (F.binary_cross_entropy_with_logits(m(X), torch.zeros(6, 3)), 18),
    "huber": lambda m: (F.huber_loss(m(X), torch.zeros(6, 3)), 6),
    "l1": lambda m: (F.l1_loss(m(X), torch.zeros(6, 3)), 6),
    "mean": lambda m: (squares(m).mean(), 6),
    "over both axes": lambda m: (squares(m).mean((0, 1)), 6),
    "per sample": lambda m: (squares(m).sum(1).mul(MASK).mean(), 6),
    "negative": lambda m: (-m(X).log_softmax(-1)[torch.arange(6), Y].mean(), 6),
    "two means": lambda m: (cross_entropy(m) + squares(m).mean(), 6),
    "divided by the count": lambda m: (-(squares(m).sum(1) * MASK).sum() / COUNT, COUNT),
}
SUMS = {
    "cross entropy": lambda m: (cross_entropy(m, reduction="sum"), 6),
    "sum": lambda m: (squares(m).sum(), 6),
    "times the count": lambda m: (cross_entropy(m) * 6, 6),
    "times a tensor": lambda m: (cross_entropy(m) * MASK.sum(), MASK.sum()),
    "means of features": lambda m: (squares(m).mean(1).sum(), 6),
    "features of sums": lambda m: (squares(m).sum(0).mean(), 6),
    "weight of one": lambda m: (cross_entropy(m), 1),
    "a temperature": lambda m: (squares(m).sum() / 2.0, 6),
    "with a mean beside": lambda m: (cross_entropy(m, reduction="sum") + 0.01 * squares(m).mean(), 6),
    "per sample": lambda m: (F.cross_entropy(m(X), Y, reduction="none").mul(MASK).sum(), MASK.sum()),
}


def step_with(loss):
    def loss_fn(model, batch):
        total, weight = loss(model)
        return dt.LossSum(total=total, weight=weight)

    step = dt.compose_step(loss_fn)
    model = nn.Linear(4, 3)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return step(state, X)


@pytest.mark.parametrize("name", MEANS)
def test_mean_total_in_a_loss_sum_warns(name):
    with pytest.warns(UserWarning, match="microbatch_step: total of the LossSum must be a sum, got a mean with the weight"):
        step_with(MEANS[name])


@pytest.mark.parametrize("name", SUMS)
def test_sum_total_in_a_loss_sum_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_with(SUMS[name])


def test_mean_loss_warning_appears_only_in_the_first_step():
    with pytest.warns(UserWarning, match="must be a sum, got a mean"):
        state, _ = step_with(MEANS["mean"])
    step = dt.compose_step(lambda model, batch: dt.LossSum(total=squares(model).mean(), weight=6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, X)


def test_mean_loss_and_dtrain_losses_do_not_warn():
    for loss in (
        dt.mean_loss(lambda m, x: m(x).square().mean(), weight=len),
        lambda m, x: dt.soft_cross_entropy(m(x), Y, smoothing=0.1),
        lambda m, x: dt.token_cross_entropy(m(x)[None], Y[None]),
        lambda m, x: dt.transforms.jensen_shannon([m(x), m(-x)]),
    ):
        step = dt.compose_step(loss)
        model = nn.Linear(4, 3)
        step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), X)
