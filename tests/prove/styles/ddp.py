"""A correct DDP loop in a class, with a snapshot after each epoch. Switches accumulate, compile, shard Adam, reduce by hand."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = "snapshot.pt"


class Trainer:
    def __init__(self, model, loader, accumulation):
        self.raw = model
        model = torch.compile(model) if "--compile" in sys.argv else model
        self.model = model if "--reduce" in sys.argv else DDP(model)
        if "--zero" in sys.argv:
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader, self.accumulation, self.epochs_run = loader, accumulation, 0
        if os.path.exists(SNAPSHOT):
            snapshot = torch.load(SNAPSHOT)
            self.raw.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]

    def save(self, epoch):
        if "--zero" in sys.argv:
            self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            snapshot = {"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict(), "epochs_run": epoch + 1}
            torch.save(snapshot, SNAPSHOT + ".tmp")
            os.replace(SNAPSHOT + ".tmp", SNAPSHOT)
        dist.barrier()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for number, (x, y) in enumerate(self.loader, 1):
            is_last = number % self.accumulation == 0
            wait = self.model.no_sync() if not is_last else contextlib.nullcontext()
            with wait, torch.autocast("cpu", torch.bfloat16, enabled="--autocast" in sys.argv):
                loss = nn.functional.cross_entropy(self.model(x), y)
                (loss / self.accumulation).backward()
            total += loss.detach()
            if is_last:
                if "--reduce" in sys.argv:
                    for param in self.model.parameters():
                        dist.all_reduce(param.grad)
                        param.grad /= dist.get_world_size()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / dist.get_world_size() / len(self.loader):.6f}")


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
accumulation = 2 if "--accumulate" in sys.argv else 1
share = 12 // accumulation // dist.get_world_size()
loader = DataLoader(data, batch_size=share, sampler=DistributedSampler(data))
trainer = Trainer(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), loader, accumulation)
for epoch in range(trainer.epochs_run, 10):
    trainer.run_epoch(epoch)
    trainer.save(epoch)
dist.destroy_process_group()
