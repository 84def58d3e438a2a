"""Statistics of batch normalisation: those of torch's ``update_bn`` in one process, and the same on any number of ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import StepError
from dtrain.transforms.weights.averaging import ema, use_average
from dtrain.transforms.weights.batch_norm import update_batch_norm_
from falling import LOSS

SIZES = [5, 7, 4]


def make(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm1d(6, affine=False)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), norms[0], nn.Flatten(), nn.Linear(48, 6), nn.Dropout(dropout), norms[1], nn.Tanh())
    for param in net.parameters():
        nn.init.normal_(param)
    return net.double()


def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [100.0 + torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64) for size in SIZES]


def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def statistics(model: nn.Module) -> list[float]:
    return [value for buffer in model.buffers() for value in buffer.flatten().tolist()]


def test_statistics_match_torch_update_bn():
    model, peer = make(), make()
    model[5].eval()
    assert update_batch_norm_(model, images(), forward) == 3
    update_bn(images(), peer)
    assert statistics(model) == pytest.approx(statistics(peer), rel=1e-9)  # values of 100 with a variance of 1
    assert [module.training for module in model] == [True] * 5 + [False, True]
    assert (model[1].momentum, model[1]._forward_pre_hooks) == (0.3, {})


def test_update_batch_norm_runs_without_dropout_and_gradients():
    model = make(dropout=0.5)
    before = torch.get_rng_state()
    update_batch_norm_(model, images(), forward)
    plain = make()
    update_batch_norm_(plain, images(), forward)
    assert torch.equal(torch.get_rng_state()[:8], before[:8])
    assert statistics(model) == statistics(plain)
    assert all(not buffer.requires_grad for buffer in model.buffers())


def test_model_without_running_statistics_reads_no_batch():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert update_batch_norm_(model, iter(lambda: pytest.fail("a batch was taken"), None), forward) == 0


def test_unused_batch_norm_keeps_its_statistics():
    model = nn.ModuleList([nn.BatchNorm1d(1), nn.BatchNorm1d(1)])
    assert update_batch_norm_(model, [torch.tensor([[1.0], [3.0]])], lambda model, x: model[0](x)) == 1
    assert [(norm.running_mean.item(), norm.running_var.item()) for norm in model] == [(2.0, 2.0), (0.0, 1.0)]


def test_empty_batch_does_not_change_statistics():
    model = nn.BatchNorm1d(1)
    batches = [torch.tensor([[1.0], [3.0]]), torch.zeros(0, 1), torch.tensor([[4.0], [8.0]])]
    update_batch_norm_(model, batches, forward)
    assert (model.running_mean.item(), model.running_var.item(), model.num_batches_tracked.item()) == (4.0, 5.0, 2)


def test_statistics_are_restored_after_an_exception():
    def broken(model: nn.Module, batch: torch.Tensor) -> None:
        model(batch)
        if len(batch) == 7:
            raise RuntimeError("in the second batch")

    model = make()
    before = statistics(model)
    with pytest.raises(RuntimeError, match="in the second batch"):
        update_batch_norm_(model, images(), broken)
    assert statistics(model) == before
    assert model[1]._forward_pre_hooks == {}
    with pytest.raises(StepError, match="update_batch_norm_: batches must not be empty on all ranks"):
        update_batch_norm_(model, [], forward)
    assert statistics(model) == before


def test_use_average_restores_batch_norm_statistics_on_exit():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    step = dt.compose_step(LOSS, [ema(0.5)])
    state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.tensor([[1.0], [2.0]]))
    before = statistics(model)
    with use_average(state):
        update_batch_norm_(model, [torch.tensor([[1.0], [3.0]])], forward)
        assert model[1].running_mean.item() == pytest.approx(2 * model[0].weight.item() + model[0].bias.item())
    assert statistics(model) == before


@pytest.mark.slow  # compiles
def test_compiled_model_runs_uncompiled_in_update_batch_norm():
    model, plain = make(), make()
    model.compile(backend="eager")
    model.eval()
    with torch.no_grad():
        model(images()[0])
    update_batch_norm_(model, images(), forward)
    update_batch_norm_(plain, images(), forward)
    assert statistics(model) == statistics(plain)


# ---- on several ranks -------------------------------------------------------------------------------------------------------


def shared(cuts: list[int]) -> list[float]:
    """This rank's part of each batch is the rows before the cut, or after it; an empty part is left out."""
    model = dt.shard_model(copy.deepcopy(make()), dt.build_mesh(), strategy="full_shard", blocks=(nn.Conv2d, nn.Linear))
    parts = [(image[:cut], image[cut:])[get_dist_info().rank] for image, cut in zip(images(), cuts, strict=True)]
    assert update_batch_norm_(model, [batch for batch in parts if len(batch)], forward) == len(SIZES)
    return statistics(model)


@pytest.mark.parametrize("cuts", [[2, 4, 3], [1, 6, 4]], ids=["shared", "unevenly"])
def test_statistics_do_not_depend_on_the_batch_split(ranks, cuts):
    model = make()
    update_batch_norm_(model, images(), forward)
    first, second = ranks(2).run(shared, cuts)
    assert first == second == pytest.approx(statistics(model), rel=1e-9)
