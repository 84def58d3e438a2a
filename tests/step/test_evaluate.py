import pytest
import torch
from torch import nn

from dtrain.data.loader import build_loader
from dtrain.dist.init import current
from dtrain.dist.mesh import build_mesh
from dtrain.errors import StepError
from dtrain.losses import mean_loss
from dtrain.observe.metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.evaluate import evaluate

DATA = torch.arange(26.0, dtype=torch.float64).reshape(13, 2)
LOSS = mean_loss(lambda model, x: model(x).mean(), weight=len)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


def expected() -> float:
    return model().eval()(DATA).mean().item()


def with_loader(global_batch_size: int) -> float:
    mesh = build_mesh()
    net = shard_model(model(), mesh, blocks=(nn.Linear,))
    loader = build_loader(DATA, mesh=mesh, global_batch_size=global_batch_size, seed=0, collate=torch.stack)
    first = reduce_metrics(evaluate(net, loader, LOSS))["loss"]
    assert reduce_metrics(evaluate(net, loader, LOSS))["loss"] == first, "one pass leaves the position"
    assert loader.position.batches == 0
    assert net.training
    return first


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_sample_counts_once_on_any_number_of_ranks(ranks, world_size):
    for size in (1, 4, 13, 50):
        assert ranks(world_size).run(with_loader, size) == pytest.approx([expected()] * world_size, rel=1e-12)


def with_ragged_batches() -> float:
    net = shard_model(model(), build_mesh())
    mine = [DATA[:9].split(2), DATA[9:].split(4), [DATA[:0]]][current().rank]
    return reduce_metrics(evaluate(net, mine, LOSS))["loss"]


def test_ranks_may_have_different_numbers_of_batches(ranks):
    assert ranks(3).run(with_ragged_batches) == pytest.approx([expected()] * 3, rel=1e-12)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(StepError, match="the loader gave no batch on any rank"):
        evaluate(model(), [], LOSS)


def test_the_mode_comes_back_after_an_error():
    net = model()

    def broken(net, batch):
        raise KeyError("x")

    with pytest.raises(KeyError):
        evaluate(net, [DATA], broken)
    assert net.training
