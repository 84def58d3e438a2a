"""The methods on gradients in one step, with microbatches that fit, on one rank and on two."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.transforms.batches.selective_backprop import selective_backprop
from dtrain.transforms.gradients.clipping import adaptive_clip, centralize_gradients, clip_by_value
from dtrain.transforms.gradients.noise_scale import noise_scale
from dtrain.transforms.gradients.nonfinite import nonfinite
from dtrain.transforms.gradients.sam import sam

LOSS = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)


def transforms() -> list[dt.Transform]:
    chosen = selective_backprop(lambda model, x: model(x).square().mean(dim=1), 0.99)  # draws, and leaves out no sample
    clips = [centralize_gradients(), adaptive_clip(0.2), clip_by_value(0.2), dt.transforms.clip_by_norm(0.5)]
    return [nonfinite(), noise_scale(every=2), sam(0.3), chosen, *clips]


def trained(*, fitted: bool) -> dict[str, list[float]]:
    """The parameters and metrics after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    parts = {} if fitted else {"grad": partial(dt.microbatch_step, microbatch_size=2)}
    step = dt.compose_step(
        LOSS, [*transforms(), *([dt.auto_microbatch(initial_size=2, grow_every=None)] if fitted else [])], **parts
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.2), seed=3)
    for number in range(4):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        state, metrics = step(state, x.tensor_split(state.spec.data_ranks)[state.spec.data_rank])
    params = [value for _, whole in dt.full_params(state) for value in whole.flatten().tolist()]
    return {"params": params, "metrics": list(dt.reduce_metrics(metrics).values())}


def fitted() -> dict[str, list[float]]:
    return trained(fitted=True)


def test_automatic_microbatch_size_matches_a_fixed_size():
    assert trained(fitted=True) == trained(fitted=False)


def test_two_ranks_match_one_process(ranks):
    expected = trained(fitted=True)
    for result in ranks(2).run(fitted):
        assert result["params"] == pytest.approx(expected["params"], rel=1e-10, abs=1e-12)
        assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-10)
