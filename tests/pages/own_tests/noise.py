"""Tests of noise.py of docs/own.md, which test_own.py writes beside it."""

import pytest
import torch
from noise import gradient_noise
from torch import nn

import dtrain as dt

DATA = torch.arange(32.0, dtype=torch.float64).reshape(8, 4) / 32


def loss_fn(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def trained(strategy: str | None) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double()
    batch = DATA
    if strategy is not None:
        rank = torch.distributed.get_rank()
        model = dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(nn.Linear,))
        batch = DATA[rank * 4 : rank * 4 + 4]
    step = dt.compose_step(loss_fn, [gradient_noise(1.0)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=7)
    for _ in range(3):
        state, _ = step(state, batch)
    return [value for _, whole in dt.full_params(state) for value in whole.flatten().tolist()]


@pytest.mark.parametrize("strategy", ["replicate", "full_shard"])
def test_noise_is_that_of_one_process(two_ranks, strategy):
    for params in two_ranks.run(trained, strategy):
        assert params == pytest.approx(trained(None), rel=1e-12)
