"""A correct FSDP2 loop, checkpoints of DCP or own files: ``--accumulate``, ``--broadcast`` weights, ``--tensor-parallel``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

OWN, FULL = "--own-checkpoint" in sys.argv, StateDictOptions(full_state_dict=True, cpu_offload=True)
ALL_RANKS = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
is_broadcast = "--broadcast" in sys.argv
with torch.device("meta" if is_broadcast and rank else "cpu"):
    model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 4))
if "--tensor-parallel" in sys.argv:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    for block in model[:2]:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
else:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("data", "tensor"))
    weights = model.state_dict()
    for module in (*model[:2], model):
        fully_shard(module, mesh=mesh["data"])
    if is_broadcast:
        model.to_empty(device="cpu")
        set_model_state_dict(model, weights, options=ALL_RANKS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
accumulation = 2 if "--accumulate" in sys.argv else 1
sampler = DistributedSampler(data, num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank(), seed=3)
loader = DataLoader(data, batch_size=12 // accumulation // mesh["data"].size(), sampler=sampler)
first_epoch = 0
if OWN and os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=ALL_RANKS
    )  # fmt: skip
    first_epoch = saved["epoch"] + 1
elif not OWN and os.path.exists("latest"):
    names = "model", "optimizer"
    state = dict(zip(names, get_state_dict(model, optimizer), strict=True)) | {"epoch": 0}
    dcp.load(state, checkpoint_id=Path("latest").read_text())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first_epoch = state["epoch"] + 1
for epoch in range(first_epoch, 10):
    sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(loader, 1):
        if accumulation > 1:
            model.set_requires_gradient_sync(number % accumulation == 0)
        (nn.functional.cross_entropy(model(inputs), labels) / accumulation).backward()
        if number % accumulation == 0:
            if "--tensor-parallel" not in sys.argv:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer, options=FULL if OWN else None)
    state = {"model": weights, "optimizer": moments, "epoch": epoch}
    if not OWN:
        dcp.save(state, checkpoint_id=f"step-{epoch}")
    if rank == 0:
        if OWN:
            torch.save(state, "last.pt.tmp")
            os.replace("last.pt.tmp", "last.pt")
        else:
            Path("latest.tmp").write_text(f"step-{epoch}")
            os.replace("latest.tmp", "latest")
    dist.barrier()
dist.destroy_process_group()
