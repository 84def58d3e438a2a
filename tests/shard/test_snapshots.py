"""Copies of a model in memory: every bit back in each layout, no collective, saved on other ranks, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.errors import ConfigError, PeerError, StaleStateError, StepError
from dtrain.shard.snapshots import restore_, snapshot, use_snapshot
from dtrain.testing import count_collectives

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Tied(nn.Module):
    """Embedding tied to the head, a batch norm, and a cache outside of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.first = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.inner(self.first(batch)))


LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)


def begun(strategy: str) -> tuple[Any, dt.TrainState]:
    torch.manual_seed(0)
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    model = dt.shard_model(Tied().double(), mesh, strategy=strategy, blocks=(nn.Sequential,))
    step = dt.compose_step(LOSS)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def values(model: nn.Module) -> dict[str, list[float]]:
    return {name: to_local(tensor).flatten().tolist() for name, tensor in snapshot(model).items()}


def gone_and_back(strategy: str, offload: bool) -> None:
    step, state = begun(strategy)
    model, part = state.model, BATCH.chunk(dist.get_world_size())[dist.get_rank()]
    state, _ = step(state, part)
    first = values(model)
    with count_collectives() as calls:
        copy = snapshot(model, offload=offload)
    assert list(copy) == [*state.params, *(name for name, _ in model.named_buffers())]
    assert all(is_dtensor(copy[name]) == is_dtensor(param) for name, param in state.params.items())
    with dt.eval_mode(model):
        expected = model(part)
    state, _ = step(state, part)
    second = values(model)
    assert second != first
    with count_collectives() as more, use_snapshot(model, copy):
        assert values_inside(model) == first
        inside = more.count()
        with dt.eval_mode(model):
            assert torch.equal(model(part), expected)
        model(part)  # changes running statistics
        with pytest.raises(StaleStateError, match="a copy is in the place of the parameters"):
            step(state, part)
    assert values(model) == second
    assert {name: to_local(tensor).flatten().tolist() for name, tensor in copy.items()} == first
    with count_collectives() as last:
        restore_(model, copy)
    assert values(model) == first
    assert calls.count() == inside == last.count() == 0
    with dt.eval_mode(model):
        assert torch.equal(model(part), expected)
    state, _ = step(state, part)
    assert values(model) == second
    assert snapshot(model, into=copy) is copy
    assert {name: to_local(tensor).flatten().tolist() for name, tensor in copy.items()} == second


def values_inside(model: nn.Module) -> dict[str, list[float]]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: to_local(tensor).flatten().tolist() for name, tensor in named.items()}


LAYOUTS = [("full_shard", 2), ("shard_grad_op", 2), ("replicate", 2), ("hybrid_shard", 4)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
def test_every_bit_comes_back(ranks, strategy, world, offload):
    ranks(world).run(gone_and_back, strategy, offload)


def kept(root: str, saves: bool) -> dict[str, list[float]]:
    """A reference in the state of a transform, copied in the second and fourth step: its values, whole."""
    _, state = begun("full_shard")
    step = dt.compose_step(LOSS, [dt.transforms.ema(0.0, every=2)])
    state = step.init(state.model, state.optimizer)
    if saves:
        for _ in range(3):
            state, _ = step(state, BATCH.chunk(dist.get_world_size())[dist.get_rank()])
        dt.save_sharded(root, state)
    else:
        state = dt.load_sharded(root, state)
    return {name: value.flatten().tolist() for name, value in dt.full_params(state.transform_states["ema"]["params"])}


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_a_reference_of_a_transform_is_loaded_on_other_ranks(ranks, tmp_path, before, after):
    saved = ranks(before).run(kept, str(tmp_path), True)[0]
    assert ranks(after).run(kept, str(tmp_path), False) == [saved] * after


def test_refused():
    model, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    copy = snapshot(model)
    with pytest.raises(ConfigError, match=r"restore_: copy must have the names of .* only the model has '0\.weight'"):
        restore_(other, copy)
    with pytest.raises(ConfigError, match="only the copy has 'more'"):
        restore_(model, {**copy, "more": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"into must be placed as the model, got torch\.float64 \[2, 2\] for 'weight'"):
        snapshot(model, into=snapshot(nn.Linear(2, 2).double()))
    with pytest.raises(ConfigError, match="snapshot: into must be a dict of snapshot, got list"):
        snapshot(model, into=[])
    with pytest.raises(ConfigError, match=r"restore_: copy must be a dict of snapshot, got Linear"):
        restore_(model, model)
    with pytest.raises(ConfigError, match=r"snapshot: model must be a torch\.nn\.Module, got dict"):
        snapshot({})
    with pytest.raises(ConfigError, match=r"use_snapshot: the model must have values, got weight on the meta device"):
        use_snapshot(nn.Linear(1, 1, device="meta"), copy).__enter__()


def test_an_average_and_a_copy_do_not_mix():
    step = dt.compose_step(LOSS, [dt.transforms.ema(0.5)])
    model = Tied().double()
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    copy = snapshot(model)
    with (
        dt.transforms.use_average(state),
        pytest.raises(StaleStateError, match="restore_: the average 'ema' is in the place of the parameters"),
    ):
        restore_(model, copy)
    with use_snapshot(model, copy), pytest.raises(StaleStateError, match="use_average: a copy is in the place"):
        dt.transforms.use_average(state).__enter__()


def losses_against_copy(strategy: str, copy_of: str, ragged: bool) -> list[float] | str:
    """Train against a copy that the loss uses. Rank 1 has three times the samples of rank 0 if ``ragged``."""
    torch.manual_seed(0)
    model = dt.shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double(), dt.build_mesh(), strategy=strategy)
    reference, newest = snapshot(model), list[dt.TrainState]()

    def loss_fn(net: nn.Module, batch: Tensor) -> dt.LossSum:
        copy = use_snapshot(net, reference) if copy_of == "snapshot" else dt.transforms.use_average(newest[-1])
        with torch.no_grad(), copy:
            frozen = net(batch)
        return dt.sum_loss((net(batch) - frozen - 1.0).square().flatten())

    step = dt.compose_step(loss_fn, [dt.transforms.ema(0.0, every="100ba")], microbatch_size=2)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05))
    cut, losses = 2 if ragged else 4, list[float]()
    part = BATCH[:cut] if dist.get_rank() == 0 else BATCH[cut:]
    try:
        for _ in range(3):
            newest.append(state)
            state, metrics = step(state, part)
            losses.append(dt.reduce_metrics(metrics)["loss"])
    except (StepError, PeerError) as error:
        return str(error)
    return losses


@pytest.mark.parametrize("copy_of", ["snapshot", "average"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "replicate"])
def test_a_loss_uses_a_copy_only_if_ranks_have_equal_numbers_of_microbatches(ranks, strategy, copy_of):
    even, ragged = (ranks(2).run(losses_against_copy, strategy, copy_of, ragged) for ragged in (False, True))
    if strategy == "replicate":
        assert ragged[0] == pytest.approx(even[0])
    else:
        assert [text[:64] for text in ragged] == ["step: all ranks must run the model itself inside of use_snapshot"] * 2
        assert "Compute the reference before the step as a column of the batch" in ragged[0]
    assert even[0] == even[1]
    assert even[0][-1] < even[0][0]
