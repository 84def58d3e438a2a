"""FSDP2: a causal language model on sequences of different lengths."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, LENGTH, GLOBAL_BATCH, STEPS = 24, 24, 14, 12, 8
IGNORE = -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (u.view(b, t, 2, -1).transpose(1, 2) for u in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_batch(step):
    g = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCAB, (GLOBAL_BATCH, 1), generator=g)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=g)
    seq = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    lengths = torch.randint(3, LENGTH + 1, (GLOBAL_BATCH, 1), generator=g)
    ids, labels = seq[:, :-1], seq[:, 1:].clone()
    labels[torch.arange(LENGTH) >= lengths] = IGNORE
    return ids, labels


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = LM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        ids, labels = (t.chunk(world)[rank] for t in get_batch(step))
        n_tokens = (labels != IGNORE).sum()
        dist.all_reduce(n_tokens)
        total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = total / n_tokens * world
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        shown = total.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown / n_tokens:.7f} grad_norm {norm:.6f} tokens {n_tokens}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
