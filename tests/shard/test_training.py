"""Training, not only gradients: parameter groups, clipping over shards and whole tensors, an average, any strategy."""

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import global_norm
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.schedules.curves import linear
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params
from dtrain.step.compose import compose_step
from dtrain.step.optimizer import clip_grad_norm_
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.hyperparameters import scale_lr
from dtrain.transforms.weights.averaging import ema
from shard.models import CASES, SAMPLES, WEIGHTS, batch, make

STEPS, CLIP = 4, 0.5
NAMES = ("left out", "tied across blocks", "frozen", "some unused", "everything")
TOLERANCE = 1e-9  # float64; Adam's quotient of moments magnifies rounding in tiny gradients


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)  # its foreach form takes no mix of DTensors and plain ones


def by_hand(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """torch alone, one process, the whole batch at once."""
    net = make(name)
    optimizer = optimizer_of(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / STEPS)
    averages = {key: p.detach().clone() for key, p in net.named_parameters()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = CASES[name].loss(net, batch(name, WEIGHTS))
        (loss.total / loss.weight).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        for key, p in net.named_parameters():
            averages[key].lerp_(p.detach(), 0.1)
    return dict(net.named_parameters()), averages


def trained(name: str, strategy: str) -> list[float]:
    """The largest differences of parameters and of averages."""
    rank, world = get_dist_info().rank, get_dist_info().world_size
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = shard_model(make(name), mesh, strategy=strategy, **CASES[name].options)
    transforms = [scale_lr(linear(1.0, 0.0, STEPS)), clip_by_norm(CLIP), ema(0.9)]
    step = compose_step(CASES[name].loss, transforms)
    state = step.init(net, optimizer_of(net))
    mine = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for _ in range(STEPS):
        state, _ = step(state, {key: value[mine] for key, value in batch(name, WEIGHTS).items()})
    params, averages = by_hand(name)
    return [
        max((tensor - params[key]).abs().max().item() for key, tensor in full_params(state)),
        max(
            (tensor - averages[key]).abs().max().item() for key, tensor in full_params(state.transform_states["ema"]["params"])
        ),
    ]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
@pytest.mark.parametrize("name", NAMES)
def test_sharded_training_matches_plain_torch(ranks, name, strategy):
    for errors in ranks(4).run(trained, name, strategy):
        assert max(errors) <= TOLERANCE


def norms() -> list[float]:
    """Clip two models on different meshes, and whole parameters beside cut parameters, together."""
    two = build_mesh(dp_replicate=2)
    nets = {
        "a": shard_model(make("left out"), build_mesh(), **CASES["left out"].options),
        "b": shard_model(make("frozen"), two, strategy="hybrid_shard", **CASES["frozen"].options),
        "c": make("tied"),
    }
    params = {f"{key}.{name}": p for key, net in nets.items() for name, p in net.named_parameters()}
    for net, plain in ((nets["a"], make("left out")), (nets["b"], make("frozen")), (nets["c"], make("tied"))):
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            p.grad = p.detach().clone()
            assert p.shape == q.shape
    plain = [p for name in ("left out", "frozen", "tied") for p in make(name).parameters()]
    expected = torch.linalg.vector_norm(torch.cat([p.detach().flatten() for p in plain])).item()
    norm = clip_grad_norm_(params, 1.0).item()
    return [norm / expected - 1, global_norm([p.grad for p in params.values()]).item() - 1]


def test_grad_norm_and_clipping_include_several_meshes_and_plain_tensors(ranks):
    for before, after in ranks(4).run(norms):
        assert before == pytest.approx(0, abs=1e-12)
        assert after == pytest.approx(0, abs=1e-6)  # eps of the quotient
