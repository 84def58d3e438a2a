"""A correct loop of iterations over random windows of a file of tokens, with accumulation and a learning rate by a formula."""

import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

MAX_ITERS, WARMUP, EVAL_INTERVAL, BLOCK, MICROBATCHES, ROWS = 12, 3, 2, 8, 6, 2


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        normal = nn.functional.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(normal).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocabulary=17, width=16):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "--checkpoint" in sys.argv else block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch(number):
    """Read the windows of microbatch ``number`` of the whole run."""
    tokens = np.memmap("tokens.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - BLOCK, (ROWS,), generator=torch.Generator().manual_seed(number))
    windows = torch.stack([torch.from_numpy(tokens[start : start + BLOCK + 1].astype(np.int64)) for start in starts])
    return windows[:, :-1], windows[:, 1:]


def get_lr(iteration):
    if iteration < WARMUP:
        return 1e-2 * (iteration + 1) / WARMUP
    return 5e-3 * (1 + math.cos(math.pi * (iteration - WARMUP) / (MAX_ITERS - WARMUP)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0 and not os.path.exists("tokens.bin"):
    np.random.default_rng(0).integers(0, 17, 500, dtype=np.uint16).tofile("tokens.bin")
dist.barrier()
torch.manual_seed(1337)
raw_model, iteration, best_loss = GPT(), 0, float("inf")
decay = [{"params": [p for p in raw_model.parameters() if p.dim() >= 2], "weight_decay": 0.1}]
optimizer = torch.optim.AdamW(decay, lr=1e-2, betas=(0.9, 0.95))
if os.path.exists("ckpt.pt"):
    saved = torch.load("ckpt.pt")
    raw_model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iteration, best_loss = saved["iteration"], saved["best_loss"]
model = DDP(torch.compile(raw_model) if "--compile" in sys.argv else raw_model)
while iteration < MAX_ITERS:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    if iteration % EVAL_INTERVAL == 0 and rank == 0:
        raw_model.eval()
        with torch.no_grad():
            loss = sum(raw_model(*get_batch(10_000 + number)).item() for number in range(3)) / 3
        raw_model.train()
        print(f"step {iteration}: val loss {loss:.4f}")
        best_loss = min(best_loss, loss)
        saved = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved | {"iteration": iteration, "best_loss": best_loss}, "ckpt.pt")
    share = MICROBATCHES // world_size
    for micro_step in range(share):
        model.require_backward_grad_sync = micro_step == share - 1
        tokens, targets = get_batch(iteration * MICROBATCHES + micro_step * world_size + rank)
        (model(tokens, targets) / share).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
dist.destroy_process_group()
