"""A small run with all the state that a failed try could change, and faults at every point of its steps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import seed_all
from dtrain.shard import replicate
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import Step, compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.fault_injection import inject_fault
from dtrain.typing import LossSum

SAMPLES, WIDTH = 8, 6
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")


class Tracer(torch.autograd.Function):
    """The identity; a place for a fault inside of backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        inside_backward()
        return grad


def inside_backward() -> None:
    """Do nothing: a fault replaces this function to fail inside of backward."""


class Block(nn.Module):
    """Draws random numbers, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=False)
        return x + Tracer.apply(self.dropout(self.norm(inner)))

    def _inner(self, x: Tensor) -> Tensor:
        recomputed()
        return torch.tanh(self.linear(x))


def recomputed() -> None:
    """Called in a block's forward, and once more in its backward."""


def loss_fn(model: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=(model(batch["x"]) - batch["y"]).square().sum(), weight=len(batch["x"]))


def start(strategy: str, *transforms, size: int | None = None) -> tuple[Step, TrainState]:
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2))
    if strategy != "none":
        mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
        net = shard_model(net, mesh, strategy=strategy, blocks=(Block,), ignored_params=("3.bias",))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step = compose_step(loss_fn, transforms, grad=partial(microbatch_step, microbatch_size=size))
    seed_all(3, get_dist_info().rank)
    return step, step.init(net, optimizer)


def batches(steps: int) -> list[dict]:
    generator = torch.Generator().manual_seed(11 + get_dist_info().rank)
    return [
        {"x": torch.randn(SAMPLES, WIDTH, generator=generator), "y": torch.randn(SAMPLES, 2, generator=generator)}
        for _ in range(steps)
    ]


def fingerprint(state: TrainState) -> list:
    """Every bit that a step may change, as plain data: parameters, buffers, optimizer state, random generators."""
    tensors = [*state.params.values(), *state.model.buffers()]
    tensors += [value for held in state.optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    bits = [to_local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]
    return [bits, torch.get_rng_state().tolist(), [param.grad is None for param in state.params.values()]]


# Two blocks with a linear layer and a norm, and two further layers.
BUCKETS = 2 * 4 + 1 + 2


def compare(strategy: str, where: str, call: int, rank: int, when: int) -> dict:
    """Compare as ``compare_sizes``; under ``replicate`` each parameter is a bucket."""
    with patch.multiple(replicate, _FIRST_BUCKET_BYTES=1, _BUCKET_BYTES=1):
        return compare_sizes(strategy, where, call, rank, when)


def compare_sizes(strategy: str, where: str, call: int, rank: int, when: int) -> dict:
    """Run with one fault in step ``when``, then again with the sizes that the first run ended up with."""
    auto = auto_microbatch(initial_size=4, min_size=2, divisor=2, grow_every=None)
    step, state = start(strategy, auto)
    updates, sizes = [], []
    state.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    where = f"{__name__}.{where}" if where in globals() else where
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    for index, batch in enumerate(batches(3)):
        with inject_fault("raise", at=where, call=call, rank=rank, error=error) if index == when else nullcontext():
            state, _ = step(state, batch)
        sizes.append(state.transform_states["auto_microbatch"]["size"])
    before = fingerprint(state)
    by_hand = {size: start(strategy, size=size)[0] for size in set(sizes)}
    _, state = start(strategy)
    for size, batch in zip(sizes, batches(3), strict=True):
        state, _ = by_hand[size](state, batch)
    return {"updates": len(updates), "sizes": sizes, "equal": before == fingerprint(state)}
