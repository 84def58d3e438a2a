"""float16 under a loss scale: the decision to skip a step is the same on all ranks, for every optimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt
from battery.optimizers import ROWS, Deep
from battery.run import TASKS, batch_of, differences, snapshot

BROKEN_STEP = 2


def run(name: str) -> list:
    """The scales and skips of a few steps in float16; in one of them a gradient of rank 1 alone is infinite."""
    torch.manual_seed(11)
    model = dt.shard_model(Deep(), dt.build_mesh(), blocks=(nn.Linear,), precision=dt.Precision(param="fp16", reduce="fp32"))
    loss = TASKS["text"].loss
    rank = dist.get_rank()

    def some_infinite(model: nn.Module, batch: dict) -> dt.LossSum:
        finite = loss(model, batch)
        broken = rank == 1 and state.step == BROKEN_STEP
        return dt.LossSum(total=finite.total * (float("inf") if broken else 1.0), weight=finite.weight)

    step = dt.compose_step(some_infinite, [dt.transforms.loss_scale(256.0, grow_every=2)])
    state = step.init(model, ROWS[name].make(model))
    skipped, scales, moved, kept = [], [], [], []
    for _ in range(5):
        before = snapshot(state)
        state, metrics = step(state, batch_of(state.step, "text"))
        after = snapshot(state)
        numbers = dt.reduce_metrics(metrics)
        skipped.append(numbers["skipped"])
        scales.append(numbers["loss_scale"])
        moved.append(bool(differences(before["params"], after["params"])))
        kept.append(not differences(before["optimizer"], after["optimizer"]))
    finite = all(bool(torch.isfinite(p).all()) for p in after["params"].values())
    return [skipped, scales, moved, kept, finite]


@pytest.mark.parametrize("name", ["adamw", "sgdw", "muon"])
def test_nonfinite_gradient_on_one_rank_skips_the_step_everywhere(name, ranks):
    for skipped, scales, moved, kept, finite in ranks(2).run(run, name):
        assert skipped == [0.0, 0.0, 1.0, 0.0, 0.0]
        assert scales == [256.0, 256.0, 512.0, 256.0, 256.0]
        assert moved == [True, True, False, True, True]
        assert kept == [False, False, True, False, False]
        assert finite
