"""Accelerate: an autoencoder that saves every second step and goes on where it stopped."""
import os
import re
import shutil

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, SAMPLES, MAX_STEPS, SAVE_EVERY, FOLDER = 12, 60, 14, 2, "states"


def newest():
    names = os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
    steps = [int(n[5:]) for n in names if re.fullmatch(r"step_\d+", n)]
    return max(steps, default=0)


def save(accelerator, step):
    temporary, final = f"{FOLDER}/unfinished", f"{FOLDER}/step_{step}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(temporary)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(temporary, final)
    accelerator.wait_for_everyone()


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(1)
    basis = torch.randn(3, 14)
    data = TensorDataset((torch.randn(SAMPLES, 3) @ basis).tanh() + 0.05 * torch.randn(SAMPLES, 14))
    model = nn.Sequential(nn.Linear(14, 24), nn.Tanh(), nn.Linear(24, 3), nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 14))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = newest()
    if step:
        accelerator.load_state(f"{FOLDER}/step_{step}")
    per_epoch = len(loader)
    epoch, done = divmod(step, per_epoch)
    while step < MAX_STEPS:
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, done) if done else loader
        done = 0
        for (x,) in batches:
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            shown = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step} loss {shown.item():.8f}", flush=True)
            if step % SAVE_EVERY == 0:
                save(accelerator, step)
            if step == MAX_STEPS:
                break
        epoch += 1
    return accelerator


if __name__ == "__main__":
    main().end_training()
