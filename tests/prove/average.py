"""A loop by hand that begins with weights of a file, counts its steps, and exports an average of the weights."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

STEPS = 30


def evaluate(model, inputs, labels):
    with torch.no_grad():
        print(f"loss {cross_entropy(model(inputs), labels):.5f}")


with dt.init_dist() as info:
    model = nn.Linear(8, 4)
    model.load_state_dict(torch.load("pretrained.pt"))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    labels = x[:, :4].argmax(1)
    sampler = DistributedSampler(TensorDataset(x, labels), seed=0)
    loader = DataLoader(sampler.dataset, batch_size=8 // info.world_size, sampler=sampler)
    steps = 0
    if os.path.exists("last.pt"):
        saved = torch.load("last.pt")
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        steps = saved["steps"]
    start, skipped = divmod(steps, len(loader))
    while steps < STEPS:
        for epoch in range(STEPS // len(loader) - start):
            sampler.set_epoch(start + epoch)
            for number, batch in enumerate(loader):
                if epoch == 0 and number < skipped:
                    continue
                optimizer.zero_grad()
                cross_entropy(ddp(batch[0]), batch[1]).backward()
                optimizer.step()
                average.update_parameters(model)
                steps += 1
                if info.rank == 0 and steps % 2 == 0:
                    evaluate(average.module, x, labels)
                    torch.save(average.module.state_dict(), "average.pt")
                    torch.save({"model": model.state_dict(), "average": average.state_dict(), "steps": steps}, "last.pt")
                torch.distributed.barrier()
