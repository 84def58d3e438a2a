"""The situations that need two ranks, each a function that returns its outcome on this rank."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import dtrain as dt
from dtrain.testing import memory_budget
from errors.said import raised

LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
ROWS = 256


def linear() -> nn.Linear:
    return nn.Linear(4, 4, bias=False)


def everything(folder: str) -> dict[str, Any]:
    """Return the messages by section of the page."""
    with torch.random.fork_rng():
        return {
            "resuming": resuming(folder),
            "memory": memory(),
            "gradients": gradients(),
            "losses": losses(folder),
            "orders": orders(),
            "hang": hang(),
            "objects": raised(lambda: dt.dist.all_gather_json({"warmup": lambda t: t})),
            "batches": batches(),
        }


def resuming(folder: str) -> list[float]:
    """Save two halves: by hand each rank's own half, here as one checkpoint. Return the whole weight."""
    by_hand = linear()
    fully_shard(by_hand)
    mine = {name: value.to_local() for name, value in by_hand.state_dict().items()}
    torch.save(mine, f"{folder}/rank-{dist.get_rank()}.pt")
    model = dt.shard_model(linear(), dt.build_mesh(), strategy="full_shard")
    state = dt.compose_step(LOSS).init(model, torch.optim.AdamW(model.parameters()))
    state, _ = dt.compose_step(LOSS)(state, torch.ones(2, 4))
    dt.save_sharded(f"{folder}/ckpt", state)
    return dict(dt.full_params(state))["weight"].flatten().tolist()


def memory() -> dict[str, Any]:
    """Try a batch that is too large for a rank: whole, in microbatches that fit, and with too little for a single sample."""
    mesh = dt.build_mesh()
    enough = 200_000

    def by_hand() -> None:
        with memory_budget(enough):
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            fully_shard(model)
            model(torch.ones(ROWS, 64)).square().mean().backward()

    def here(limit: int) -> int:
        with memory_budget(limit):
            model = dt.shard_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), mesh, strategy="full_shard")
            step = dt.compose_step(LOSS, [dt.auto_microbatch()])
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            state, _ = step(state, torch.ones(ROWS, 64))
        return state.transform_states["auto_microbatch"]["size"]

    return {"by_hand": raised(by_hand), "found": here(enough), "here": raised(lambda: here(enough * 3 // 5))}


def gradients() -> dict[str, Any]:
    """An optimizer that was built before sharding."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard(model)
    before = model.weight.full_tensor().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    held = optimizer.param_groups[0]["params"][0]
    moved = not torch.equal(before, model.weight.full_tensor())
    model = linear()
    stale = torch.optim.SGD(model.parameters(), lr=1.0)
    dt.shard_model(model, dt.build_mesh(), strategy="full_shard")
    return {"held": held.grad is None, "moved": moved, "here": raised(lambda: dt.compose_step(LOSS).init(model, stale))}


def losses(folder: str) -> dict[str, Any]:
    """Run one step on another batch for each rank; return the losses that each rank would log, and the loss logged here."""
    model = dt.shard_model(linear(), dt.build_mesh(), strategy="replicate")
    step = dt.compose_step(LOSS)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = torch.full((3 - 2 * dist.get_rank(), 4), 1.0 + dist.get_rank())  # three samples on rank 0, one on rank 1
    alone = LOSS(model, batch)
    mine = (alone.total / alone.weight).item()
    state, metrics = step(state, batch)
    mean = dt.reduce_metrics(metrics)["loss"]
    with open(f"{folder}/by-hand.log", "a") as out:
        out.write(f"{mine}\n")
    log = dt.loggers.jsonl(Path(folder) / "here.jsonl")
    log(state.step, {"loss": mean})
    dt.loggers.close(log)
    return {"mine": mine, "mean": mean, "weight": len(batch)}


def orders() -> dict[str, Any]:
    """The samples of two epochs, without ``set_epoch``, and here; seven samples, which two ranks cannot share alike."""
    eight = torch.arange(8.0)
    sampler = DistributedSampler(eight, seed=0)
    by_hand = [[x for batch in DataLoader(eight, batch_size=2, sampler=sampler) for x in batch.tolist()] for _ in range(2)]
    loader = dt.build_loader(eight, mesh=dt.build_mesh(), global_batch_size=4, seed=0)
    here = [[x for batch in loader.until(end) for x in batch.tolist()] for end in ("1ep", "2ep")]
    return {"by_hand": by_hand, "here": here}


def hang() -> dict[str, Any]:
    """Three batches on rank 0, two on rank 1; and how many steps a loader gives for seven samples."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)

    def by_hand() -> None:
        for _ in range(3 - dist.get_rank()):
            ddp(torch.ones(1, 1)).sum().backward()

    said = raised(by_hand)
    model = dt.shard_model(nn.Linear(1, 1), dt.build_mesh(), strategy="replicate")
    step = dt.compose_step(LOSS)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = dt.build_loader(torch.ones(7, 1), mesh=dt.build_mesh(), global_batch_size=2, seed=0)
    for batch in loader.until("2ep"):
        state, _ = step(state, batch)
    return {"by_hand": said, "steps": state.step}


def batches() -> dict[str, int]:
    """Samples of a step over all ranks, of ``batch_size=4`` and of ``global_batch_size=4``."""
    eight = torch.arange(8.0)
    theirs = len(next(iter(DataLoader(eight, batch_size=4, sampler=DistributedSampler(eight)))))
    ours = len(next(iter(dt.build_loader(eight, mesh=dt.build_mesh(), global_batch_size=4, seed=0).until("1ep"))))
    return {"by_hand": int(dt.dist.reduce_sum(theirs)), "here": int(dt.dist.reduce_sum(ours))}


def unequal(rank: int) -> str:
    """A loop of one's own that is a step longer on rank 0."""
    os.environ["OMP_NUM_THREADS"] = "1"

    def train() -> None:
        with dt.init_dist(device="cpu", timeout_s=2.0):
            model = dt.shard_model(nn.Linear(1, 1), dt.build_mesh(), strategy="replicate")
            step = dt.compose_step(LOSS)
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in [torch.ones(2, 1)] * (3 - rank):
                state, _ = step(state, batch)

    return raised(train)
