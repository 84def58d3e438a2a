"""Buffers that a forward changes: rank 0's, the mean, or each rank's own."""

import pytest
import torch
from torch import nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum


class Odd(nn.Module):
    """A buffer that is replaced, not written into, one that is never touched, and one that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        self.seen = self.seen + x.mean()
        self.scratch += x.mean()
        return self.norm(x) * self.table


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) + rank


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=net(batch["x"]).square().sum(), weight=len(batch["x"]))


def values(net: nn.Module) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in net.named_buffers()}


def trained(buffers: str, samples: list, size: int) -> dict[str, list]:
    net = shard_model(Odd(), build_mesh(), buffers=buffers)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = {"x": data(get_dist_info().rank)[: samples[get_dist_info().rank]]}
    microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=size)
    return values(net)


def alone(rank: int, size: int = 4, samples: int = 4) -> dict[str, list]:
    net = Odd()
    for part in data(rank)[:samples].split(size) if samples else ():
        net(part)
    return values(net)


SAMPLES = [4, 4]


def test_broadcast_uses_the_buffers_of_rank_0(ranks):
    first, second = ranks(2).run(trained, "broadcast", SAMPLES, 4)
    expected = alone(0)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "table"):
        assert first[name] == second[name] == expected[name], name
    assert second["scratch"] != first["scratch"], "no state dict holds it, so nothing needs it equal"


def test_mean_averages_floating_point_buffers(ranks):
    first, second = ranks(2).run(trained, "mean", SAMPLES, 4)
    a, b = alone(0), alone(1)
    for name in ("norm.running_mean", "norm.running_var", "seen"):
        assert first[name] == second[name]
        torch.testing.assert_close(torch.tensor(first[name]), (torch.tensor(a[name]) + torch.tensor(b[name])) / 2)
    assert first["norm.num_batches_tracked"] == second["norm.num_batches_tracked"] == 1


def test_local_mode_keeps_per_rank_buffers(ranks):
    first, second = ranks(2).run(trained, "local", SAMPLES, 4)
    assert first["norm.running_mean"] == alone(0)["norm.running_mean"]
    assert second["norm.running_mean"] == alone(1)["norm.running_mean"]


@pytest.mark.parametrize("samples", [[4, 2], [4, 0]])
def test_padding_microbatches_do_not_update_buffers(ranks, samples):
    second = ranks(2).run(trained, "local", samples, 2)[1]
    assert second == alone(1, 2, samples[1])
    assert second["norm.num_batches_tracked"] == samples[1] // 2


def traffic(model: str) -> list:
    net = shard_model(Odd() if model == "odd" else nn.Linear(3, 3), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with count_collectives() as seen:
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
    return [[r.op, r.bytes] for r in seen.select(op="broadcast")]


def test_only_changed_modules_are_sent_in_one_collective(ranks):
    # running_mean, running_var: 12 bytes each, num_batches_tracked: 8; seen: 8, table: 12, flags: 3 of the same module
    assert ranks(2).run(traffic, "odd")[0] == [["broadcast", 12 + 12 + 8 + 8 + 12 + 3]]
    assert ranks(2).run(traffic, "linear")[0] == []


class Sometimes(nn.Module):
    """Changes its buffer on rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        if get_dist_info().rank == 1:
            self.count += 1
        return self.linear(x)


def changed_on_one_rank() -> list:
    net = shard_model(Sometimes(), build_mesh(), buffers="mean")
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
    return net.count.tolist()


def test_buffer_changed_on_one_rank_is_synchronized(ranks):
    assert ranks(2).run(changed_on_one_rank) == [[0.5], [0.5]]


class Twice(nn.Module):
    """Replaces its buffer twice in one forward: the last tensor may lie where the first one was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        for _ in range(2):
            self.seen = self.seen + (get_dist_info().rank + 1)
        return self.linear(x)


def replaced_twice() -> list:
    net = shard_model(Twice(), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for _ in range(3):
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
        found.append(net.seen[0].item())
    return found


def test_repeatedly_replaced_buffer_is_detected_as_changed(ranks):
    assert ranks(2).run(replaced_twice) == [[2.0, 4.0, 6.0]] * 2


class Table(nn.Module):
    """A constant that no forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.rand(1000, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.linear(x)


def constant_beside_a_filler() -> bool:
    net = shard_model(Table(), build_mesh(), buffers="mean")
    before = net.table.clone()
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with count_collectives() as seen:
        microbatch_step(state, {"x": data(0)[: 4 if get_dist_info().rank < 2 else 0]}, loss_fn=loss_fn, microbatch_size=2)
    return torch.equal(net.table, before) and all(record.bytes < before.nbytes for record in seen.records)


def test_constant_buffer_is_not_sent_for_empty_rank_batches(ranks):
    assert ranks(3).run(constant_beside_a_filler) == [True] * 3


def sync_batch_norm() -> str:
    try:
        shard_model(nn.SyncBatchNorm.convert_sync_batchnorm(Odd()), build_mesh())
    except ConfigError as error:
        return str(error)
    return "no error"


def test_sync_batch_norm_is_refused_on_cpu(ranks):
    assert "SyncBatchNorm runs on GPUs only. On the CPU use BatchNorm with buffers='mean'." in ranks(2).run(sync_batch_norm)[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sync_batch_norm_trains_on_a_gpu(ranks):
    from dtrain.dist.init import init_dist

    with init_dist(device="cuda"):
        net = shard_model(nn.SyncBatchNorm.convert_sync_batchnorm(Odd()).cuda(), build_mesh())
        state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
        microbatch_step(state, {"x": data(0)}, loss_fn=loss_fn)
        assert int(net.norm.num_batches_tracked) == 1
