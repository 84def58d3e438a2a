"""Optimizers of torch: each trains a sharded model as torch trains the whole one, or ``Step.init`` refuses it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.shard.unshard import full_params
from old_torch import torch_before

OURS = vars(torch.optim).values()
ALL = {
    optimizer.__name__: optimizer
    for optimizer in OURS
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
}
NOT_FOR_CUT = {"Adafactor", "Rprop"}
# Before torch 2.13, an operator that DTensor lacks is named in other words.
REASONS = ("placement", "sharding strategy") if torch_before("2.13") else ("placement",)
OTHERS = {"Optimizer", "LBFGS", "SparseAdam"}  # the base; the optimizer with a closure; the optimizer for sparse gradients
TRAIN = sorted(ALL.keys() - NOT_FOR_CUT - OTHERS)
TOLERANCE = {"Muon": 1e-3}  # it multiplies in bfloat16, in steps of 0.01 * 2**-8
ROUNDING = 1e-9  # float64; quotients of moments magnify it
BATCHES = torch.randn(3, 64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)).double()


def squared(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def sharded(strategy: str = "full_shard") -> nn.Module:
    return dt.shard_model(net(), dt.build_mesh(), strategy=strategy, blocks=(nn.Linear,))


def by_torch(name: str) -> list[torch.Tensor]:
    model = net()
    optimizer = ALL[name](model.parameters(), lr=0.01)
    for batch in BATCHES:
        optimizer.zero_grad()
        (model(batch).square().sum() / len(batch)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def errors(strategy: str) -> dict[str, float]:
    largest = {}
    for name in TRAIN:
        model, step = sharded(strategy), dt.compose_step(squared)
        state = step.init(model, ALL[name](model.parameters(), lr=0.01), allow_equal_batches=True)
        for batch in BATCHES:
            state, _ = step(state, batch)
        whole = [param for _, param in full_params(state)]
        largest[name] = max((one - other).abs().max().item() for one, other in zip(whole, by_torch(name), strict=True))
    return largest


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_torch_optimizers_match_unsharded_training_on_a_sharded_model(ranks, strategy):
    for largest in ranks(2).run(errors, strategy):
        assert len(largest) >= 10
        assert {name: error for name, error in largest.items() if error > TOLERANCE.get(name, ROUNDING)} == {}


def refusals() -> dict[str, tuple[str, str]]:
    """Return the error of ``Step.init``, and the error of torch without the check."""
    messages = {}
    for name in sorted(NOT_FOR_CUT):
        model = sharded()
        optimizer = ALL[name](model.parameters(), lr=0.01)
        with pytest.raises(ConfigError) as refused:
            dt.compose_step(squared).init(model, optimizer)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError) as torchs:  # when torch can, our refusal may go
            optimizer.step()
        messages[name] = (str(refused.value), str(torchs.value))
    return messages


def test_optimizers_without_dtensor_support_are_refused_at_init(ranks):
    for messages in ranks(2).run(refusals):
        for name, (said, torchs) in messages.items():
            assert said == (
                f"init: optimizer must be one that torch can run on sharded parameters, got {name}. Use torch.optim.AdamW, "
                "or keep the parameters whole with ignored_params."
            )
            assert any(reason in torchs for reason in REASONS)


@pytest.mark.parametrize("name", sorted(NOT_FOR_CUT))
def test_optimizers_without_dtensor_support_train_an_unsharded_model(name):
    model, step = net(), dt.compose_step(squared)
    state = step.init(model, ALL[name](model.parameters(), lr=0.01))
    for batch in BATCHES:
        state, _ = step(state, batch)
    for param, expected in zip(model.parameters(), by_torch(name), strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=0, atol=ROUNDING)
