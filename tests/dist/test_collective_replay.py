"""The guard of a step intercepts every collective, and a peer that dies in a guarded step is named."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from dtrain.dist.collective_replay import get_interceptor
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step
from dtrain.typing import LossSum


def ways() -> list[str]:
    seen: list[str] = []

    def listener(operation, args, kwargs, issue):
        seen.append(operation.name())
        return issue()

    x = torch.ones(4)
    with get_interceptor().listen(listener):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
        functional.all_reduce(x, "sum", dist.group.WORLD).sum()
        y = functional.all_gather_tensor_autograd(torch.ones(2, requires_grad=True), 0, dist.group.WORLD)
        y.sum().backward()
        dist.barrier()
    dist.all_reduce(x)
    return [name.removeprefix("c10d::") for name in seen]


def test_interceptor_sees_every_collective_call_path(ranks):
    gathered = ["allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"]
    assert ranks(2).run(ways) == [["allreduce_"] * 4 + gathered + ["barrier"]] * 2


@pytest.mark.parametrize("steps", [0, 2])  # in a checked step, and in a traced one
def test_dead_peer_in_a_guarded_step_is_named(forked, steps):
    def body(rank: int) -> str:
        with init_dist(device="cpu", timeout_s=60):
            calls = [0]

            def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
                calls[0] += 1
                if get_dist_info().rank == 1 and calls[0] > 2 * steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                return LossSum(total=model(batch).square().sum(), weight=len(batch))

            model = shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), build_mesh(), blocks=("0", "1"))
            step = compose_step(loss, [auto_microbatch(initial_size=2, grow_every=None)])
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(steps + 1):
                state, _ = step(state, torch.full((4, 4), 1.0 + rank))
        return "no error"

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith("DistError: "), text
    assert "ranks [1] of 2 did not arrive, connection lost" in text
