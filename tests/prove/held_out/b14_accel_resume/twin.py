import argparse
import re
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--out", type=Path, default=Path("checkpoints"))
    return ap.parse_args()


class UNetish(nn.Module):
    """Segment bright squares in 8x8 pictures."""

    def __init__(self, w=8):
        super().__init__()
        self.down = nn.Conv2d(1, w, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(w, w, 3, padding=1)
        self.up = nn.ConvTranspose2d(w, w, 2, stride=2)
        self.out = nn.Conv2d(w + 1, 1, 3, padding=1)

    def forward(self, x):
        h = torch.relu(self.mid(torch.relu(self.down(x))))
        return self.out(torch.cat([self.up(h), x], 1))


def squares(n):
    gen = torch.Generator().manual_seed(5)
    img, mask = 0.5 * torch.randn(n, 1, 8, 8, generator=gen), torch.zeros(n, 1, 8, 8)
    for k, (r, c) in enumerate(torch.randint(0, 5, (n, 2), generator=gen).tolist()):
        mask[k, 0, r : r + 3, c : c + 3] = 1
    return TensorDataset(img + mask, mask)


def newest(folder):
    found = [p for p in folder.glob("step_*") if (p / "complete").exists()]
    return max(found, key=lambda p: int(re.search(r"\d+", p.name)[0]), default=None)


def main():
    args = get_args()
    accelerator = Accelerator(cpu=True)
    set_seed(99)
    model = UNetish()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4) * (1 - s / (2 * args.steps)))
    loader = DataLoader(squares(24 * 8), batch_size=args.batch // accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    accelerator.register_for_checkpointing(sched)

    done = 0
    last = newest(args.out)
    if last is not None:
        accelerator.load_state(str(last))
        done = int(last.name.split("_")[1])
    for img, mask in accelerator.skip_first_batches(loader, done):
        logits = model(img)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, mask)
        accelerator.backward(loss)
        opt.step()
        sched.step()
        opt.zero_grad()
        done += 1
        avg = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"step {done}: bce {avg:.6f}, next lr {opt.param_groups[0]['lr']:.6f}")
        if done % 2 == 0:
            folder = args.out / f"step_{done}"
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (folder / "complete").touch()
        if done >= args.steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
