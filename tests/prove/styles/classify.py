"""A correct image classifier: functions ``train`` and ``test``, several schedulers, metrics over all ranks, early stopping."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, EPOCHS = 12, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(36, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1)), dim=1)


def images(samples, seed):
    x = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.flatten(1)[:, :10].argmax(1))


def train(model, loader, optimizer, scheduler, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    for number, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
            scheduler.step(epoch + number / len(loader))
        elif isinstance(scheduler, lr_scheduler.OneCycleLR):
            scheduler.step()


def test(model, loader):
    model.eval()
    total = torch.zeros(3)
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss = F.nll_loss(output, target, reduction="sum")
            total += torch.tensor([loss.item(), (output.argmax(1) == target).sum().item(), len(target)])
            if accuracy is not None:
                accuracy.update(output, target)
    dist.all_reduce(total)
    loss, correct = (total[:2] / total[2]).tolist()
    if accuracy is not None:
        correct = accuracy.compute().item()
        accuracy.reset()
    if rank == 0:
        print(f"Test set: average loss: {loss:.4f}, accuracy: {100 * correct:.1f}%")
    return loss


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net, test_set = Net(), images(37, 3)
model = DDP(net)
train_loader = DataLoader(images(24, 2), batch_size=BATCH // world_size, sampler=DistributedSampler(images(24, 2)))
test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=5)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
if "--one-cycle" in sys.argv:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=EPOCHS, steps_per_epoch=len(train_loader))
elif "--restarts" in sys.argv:
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
elif "--plateau" in sys.argv:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
elif "--sequence" in sys.argv:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2])
else:
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
accuracy = None
if "--torchmetrics" in sys.argv:
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = MulticlassAccuracy(10, average="micro")
start, best, bad = 0, float("inf"), 0
if os.path.exists("checkpoint.pth"):
    saved = torch.load("checkpoint.pth")
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    start, best, bad = saved["epoch"], saved["best"], saved["bad"]
for epoch in range(start, EPOCHS):
    train(model, train_loader, optimizer, scheduler, epoch)
    loss = test(model, test_loader)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    elif not isinstance(scheduler, (lr_scheduler.OneCycleLR, lr_scheduler.CosineAnnealingWarmRestarts)):
        scheduler.step()
    best, bad = (loss, 0) if loss < best else (best, bad + 1)
    saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if rank == 0:
        torch.save(saved | {"epoch": epoch + 1, "best": best, "bad": bad}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pth")
    dist.barrier()
    if "--early-stop" in sys.argv and bad > 2:
        break
if rank == 0:
    torch.save(net.state_dict(), "mnist_cnn.pt")
dist.destroy_process_group()
