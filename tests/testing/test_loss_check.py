"""check_loss_fn: totals and weights of sums add up."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.testing import check_loss_fn

BATCH = {"x": torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), "y": torch.tensor([0, 1, 2, 0, -100, 2, 1])}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def summed(model, batch):
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return dt.LossSum(total=total, weight=(batch["y"] != -100).sum())


def test_sum_loss_passes_with_dropout_and_batch_norm():
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    check_loss_fn(summed, model, BATCH)
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_random_loss_passes_with_a_larger_tolerance():
    def noisy(model, batch):
        return dt.LossSum(total=(model(batch["x"]) + 0.1 * torch.randn(len(batch["x"]), 3) + 5.0).sum(), weight=len(batch["x"]))

    check_loss_fn(noisy, net(), BATCH, rtol=0.2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda m, b: dt.LossSum(total=F.cross_entropy(m(b["x"]), b["y"]), weight=(b["y"] != -100).sum()),
            r"check_loss_fn: loss is a mean: the batch has total .* and weight 6, .* wrap a function that returns a mean with",
        ),
        (
            lambda m, b: dt.LossSum(total=m(b["x"]).square().sum(), weight=1.0),
            "weight of loss does not count: the batch has total .* and weight 1, and its parts add up to .* and 2",
        ),
        (
            lambda m, b: dt.LossSum(
                total=F.cross_entropy(m(b["x"]) @ m(b["x"]).T, torch.arange(len(b["x"])), reduction="sum"), weight=len(b["x"])
            ),
            "loss of a sample depends on the samples beside it, or on random numbers: .* dt.step.grad_cache_step",
        ),
        (
            lambda m, b: dt.LossSum(
                total=m(b["x"]).square().sum(), weight=len(b["x"]), aux={"right": (torch.tensor(0.5), len(b["x"]))}
            ),
            "right is a mean",
        ),
    ],
    ids=["mean", "weight", "contrastive", "aux"],
)
def test_non_additive_losses_are_refused(loss, message):
    with pytest.raises(ConfigError, match=message):
        check_loss_fn(loss, net(), BATCH)


def test_single_sample_batch_is_refused():
    with pytest.raises(ConfigError, match="batch must have at least 2 samples, got 1"):
        check_loss_fn(summed, net(), {name: tensor[:1] for name, tensor in BATCH.items()})


def on_ranks(rank_sizes):
    model = dt.shard_model(net().double(), dt.build_mesh(), blocks=(nn.Linear,))
    size = rank_sizes[torch.distributed.get_rank()]
    batch = {"x": torch.randn(size, 4, dtype=torch.float64), "y": torch.zeros(size, dtype=torch.int64)}
    check_loss_fn(summed, model, batch)
    try:
        check_loss_fn(lambda m, b: dt.LossSum(total=summed(m, b).total / len(b["x"]), weight=len(b["x"])), model, batch)
    except ConfigError as error:
        return "is a mean" in str(error)
    return False


def test_check_loss_fn_runs_on_a_sharded_model(ranks):
    assert ranks(2).run(on_ranks, [5, 2]) == [True, True]
