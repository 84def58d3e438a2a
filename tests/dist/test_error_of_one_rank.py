"""The loss raises on one rank alone: its error has a note, and the other ranks name it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import init_dist


def errors_of(rank: int, strategy: str) -> list[str]:
    """Return the error of a step in which the loss of rank 1 raises, and its notes."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        if rank == 1:
            raise ValueError("bad sample")
        return dt.LossSum(total=model(x).square().sum(), weight=len(x))

    try:
        with init_dist(device="cpu"):
            model = dt.shard_model(nn.Linear(4, 2), dt.build_mesh(), strategy=strategy)
            step = dt.compose_step(loss_fn)
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)
            step(state, torch.ones(2, 4))
    except Exception as error:  # noqa: BLE001 - compared by the test
        return [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return []


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_rank_that_ends_with_the_error_ends_the_others_at_once(forked, strategy):
    others, own = forked.run(lambda rank: errors_of(rank, strategy), 2, results_of=[0, 1]).values()
    assert own[0] == "ValueError: bad sample"
    assert own[1].startswith("microbatch_step: if ranks other than 1 did not raise this error, they wait in this step until ")
    assert others[0].startswith("DistError: microbatch_step: ranks [1] of 2 did not arrive, connection lost after ")
    assert "Rank 1 left with ValueError: bad sample." in others[0]
