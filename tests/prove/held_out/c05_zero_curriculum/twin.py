"""ZeRO-1 optimizer with a curriculum over sequence length."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(1)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

BATCH = 24
STEPS = 10
MIN_LEN, MAX_LEN = 4, 20
FULL_LENGTH_AFTER = 180  # samples


class Counter(nn.Module):
    """Says whether a bit string has an odd number of ones, at each position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 8)
        self.rnn = nn.GRU(8, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, bits):
        return self.out(self.rnn(self.embed(bits))[0]).squeeze(-1)


class Curriculum:
    def __init__(self):
        self.seen = 0

    def length(self):
        share = min(1.0, self.seen / FULL_LENGTH_AFTER)
        return MIN_LEN + int(share * (MAX_LEN - MIN_LEN))

    def update(self, n):
        self.seen += n


model = DistributedDataParallel(Counter())
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=5e-3, weight_decay=0.01)
curriculum = Curriculum()
pool = torch.randint(0, 2, (BATCH * STEPS, MAX_LEN), generator=torch.Generator().manual_seed(2))

for step in range(STEPS):
    length = curriculum.length()
    bits = pool[step * BATCH : (step + 1) * BATCH][rank::world, :length]
    target = (bits.cumsum(1) % 2).float()
    logits = model(bits)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    curriculum.update(len(bits) * world)

    stats = torch.stack([loss.detach(), ((logits > 0) == (target > 0)).float().mean()])
    dist.all_reduce(stats)
    stats /= world
    if rank == 0:
        print(f"step {step} length {length} loss {stats[0]:.8f} accuracy {stats[1]:.6f}", flush=True)
