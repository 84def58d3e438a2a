"""A correct student of a frozen teacher or of an average (``--momentum``); ``--phases`` unfreezes, ``--clip`` contrasts."""

import itertools
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 12, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(8, 4), nn.Embedding(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x, labels):
        return normalize(self.image(x), dim=1), normalize(self.text(labels), dim=1), self.scale.exp()


def contrast(x, labels):
    image, text, scale = model(x, labels)
    images, texts = (torch.cat(torch.distributed.nn.all_gather(part)) for part in (image, text))
    own = torch.arange(len(x)) + len(x) * rank
    return (cross_entropy(scale * image @ texts.T, own) + cross_entropy(scale * text @ images.T, own)) / 2


def loss_fn(x, labels):
    if "--clip" in sys.argv:
        return contrast(x, labels)
    if "--momentum" in sys.argv:
        with torch.no_grad():
            target = normalize(teacher(x + 0.1), dim=1)
        (unlabeled,) = next(more)
        return mse_loss(normalize(model(x), dim=1), target) + 0.1 * model(unlabeled).square().mean()
    if "--phases" in sys.argv:
        return cross_entropy(model(x), labels)
    with torch.no_grad():
        target = (teacher(x) / 2).softmax(1)
    logits = model(x)
    return cross_entropy(logits, labels) + 4 * kl_div((logits / 2).log_softmax(1), target, reduction="batchmean")


def repeat(data):
    """Yield batches of the second loader for ever."""
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
    for epoch in itertools.count(start):
        sampler.set_epoch(epoch)
        yield from loader


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
teacher = Net().requires_grad_(False).eval()
module, start = Clip() if "--clip" in sys.argv else Net(), 0
x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x[:24], x[:24, :4].argmax(1))
loader = DataLoader(data, batch_size=BATCH // world_size, sampler=DistributedSampler(data))
saved = torch.load("last.pt") if os.path.exists("last.pt") else None
if saved is not None:
    start = saved["epoch"]
    module.load_state_dict(saved["model"])
    teacher.load_state_dict(saved["teacher"])
model, more = DDP(module), repeat(TensorDataset(x[24:]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(start, EPOCHS):
    if "--phases" in sys.argv and epoch in (start, 1):
        # The head trains alone in the first epoch, then all layers with a smaller rate.
        module.body.requires_grad_(epoch > 0)
        model = DDP(module)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3 if epoch else 1e-2)
    if saved is not None and epoch == start and not ("--phases" in sys.argv and epoch == 1):
        optimizer.load_state_dict(saved["optimizer"])
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss_fn(*batch).backward()
        optimizer.step()
        if "--momentum" in sys.argv:
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), module.parameters(), strict=True):
                    old.lerp_(new, 0.1)
    if rank == 0:
        state = {"model": module.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"epoch": epoch + 1}, "last.tmp")
        os.replace("last.tmp", "last.pt")
    dist.barrier()
dist.destroy_process_group()
