"""A correct loop with Accelerate: accumulation, ``gather_for_metrics`` and its checkpoints, over each kind of its samplers."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

BATCH = 12


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(2)
        for _ in range(24):
            x = torch.randn(8, generator=generator)
            yield x, x[:4].argmax()


def make_data(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


split = "--split-batches" in sys.argv or "--dispatch" in sys.argv
configuration = DataLoaderConfiguration(
    split_batches=split,
    dispatch_batches=True if "--dispatch" in sys.argv else None,
    use_seedable_sampler="--seedable" in sys.argv,
)
accumulation = 2 if "--accumulate" in sys.argv else 1
accelerator = Accelerator(
    cpu=True, dataloader_config=configuration, gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer=False
)
set_seed(42)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
size = BATCH // accumulation // (1 if split else accelerator.num_processes)
data = Stream() if "--dispatch" in sys.argv else make_data(24, 1)
train_loader = DataLoader(data, batch_size=size, shuffle="--dispatch" not in sys.argv)
eval_loader = DataLoader(make_data(30, 3), batch_size=size)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
# Accelerate restores the order of the seedable sampler, and not that of the default one.
first_epoch, saves = 0, "--seedable" in sys.argv or "--dispatch" in sys.argv
if os.path.exists("epoch.txt"):
    with open("epoch.txt") as file:
        first_epoch = int(file.read()) + 1
    accelerator.load_state(f"epoch_{first_epoch - 1}")
for epoch in range(first_epoch, 4):
    model.train()
    if hasattr(train_loader, "set_epoch"):
        train_loader.set_epoch(epoch)
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    correct = total = 0
    for x, y in eval_loader:
        with torch.no_grad():
            predictions = model(x).argmax(-1)
        predictions, references = accelerator.gather_for_metrics((predictions, y))
        correct, total = correct + (predictions == references).sum().item(), total + len(references)
    accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f} of {total}")
    if saves:
        accelerator.save_state(f"epoch_{epoch}")
    if saves and accelerator.is_main_process:
        with open("epoch.txt", "w") as file:
            file.write(str(epoch))
    accelerator.wait_for_everyone()
accelerator.end_training()
