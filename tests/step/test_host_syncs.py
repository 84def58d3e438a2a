"""A step of ours never makes the host wait for the device: no more than the bare fused optimizer does, which is not at all."""

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.mesh import build_mesh
from dtrain.losses import cross_entropy
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.schedules.curves import linear
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_host_syncs
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.hyperparameters import scale_lr
from dtrain.transforms.weights.averaging import ema
from dtrain.typing import LossSum

VOCAB = 11


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB))


def batch() -> dict:
    ids = torch.randint(VOCAB, (4, 5), generator=torch.Generator().manual_seed(0))
    return {"inputs": ids, "targets": ids.roll(1, 1)}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    loss = cross_entropy(net(batch["inputs"]), batch["targets"])
    return LossSum(
        total=loss.total, weight=loss.weight, terms={"small": (loss.total * 0.1, loss.weight)}, aux={"one": (1.0, 1.0)}
    )


def weigh(whole: dict) -> dict:
    count = (whole["targets"] != -100).sum()
    return {"loss": count, "small": count}


def bare() -> list[str]:
    """The same optimizer on the same gradients, nothing else."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        loss_fn(net, batch()).total.backward()
        with count_host_syncs() as seen:
            optimizer.step()
    return [str(call) for call in seen.calls]


def in_a_step(sharded: bool) -> list[str]:
    net = shard_model(model(), build_mesh(), blocks=(nn.Linear,)) if sharded else model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)

    def grad(state, batch, **options):
        return microbatch_step(state, batch, microbatch_size=2, batch_spec=batch_spec(weight=weigh), **options)

    step = compose_step(loss_fn, [scale_lr(linear(1.0, 0.1, 10)), clip_by_norm(1.0), ema(0.9)], grad=grad)
    state = step.init(net, optimizer, allow_equal_batches=True)
    state, _ = step(state, batch())  # the optimizer makes its state
    with count_host_syncs() as seen:
        state, metrics = step(state, batch())
    reduce_metrics(metrics)
    return [str(call) for call in seen.calls]


def test_step_adds_no_host_syncs_to_the_optimizer():
    assert in_a_step(False) == bare() == []


def test_sharded_step_on_two_ranks_has_no_host_syncs(ranks):
    assert ranks(2).run(in_a_step, True) == [[], []]


def test_host_sync_counter_detects_syncs_on_cpu():
    with count_host_syncs() as seen:
        float(torch.ones(()))
        torch.ones(2).tolist()
    assert seen.count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_step_raises_no_cuda_sync_warning():
    net = model().cuda()
    step = compose_step(
        lambda net, microbatch: cross_entropy(net(microbatch["inputs"]), microbatch["targets"]), [clip_by_norm(1.0), ema(0.9)]
    )
    state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    on_device = {key: value.cuda() for key, value in batch().items()}
    state, _ = step(state, on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state, _ = step(state, on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.step == 2
