"""MLP-mixer on tiny patches, torch.compile + DDP, restartable."""
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn

CKPT = pathlib.Path("runs/mixer")
GLOBAL_BATCH = 36
TOTAL_STEPS = 8


class MixerBlock(nn.Module):
    def __init__(self, tokens, ch):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(ch), nn.LayerNorm(ch)
        self.tok = nn.Sequential(nn.Linear(tokens, 24), nn.GELU(), nn.Linear(24, tokens))
        self.chn = nn.Sequential(nn.Linear(ch, 32), nn.GELU(), nn.Linear(32, ch))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.chn(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, tokens=9, ch=16, classes=3):
        super().__init__()
        self.stem = nn.Linear(12, ch)
        self.body = nn.Sequential(MixerBlock(tokens, ch), MixerBlock(tokens, ch))
        self.cls = nn.Linear(ch, classes)

    def forward(self, x):
        return self.cls(self.body(self.stem(x)).mean(1))


def fetch(step):
    rng = torch.Generator().manual_seed(9000 + step)
    y = torch.randint(0, 3, (GLOBAL_BATCH,), generator=rng)
    x = torch.randn(GLOBAL_BATCH, 9, 12, generator=rng)
    x[torch.arange(GLOBAL_BATCH), y] += 0.8
    return x, y


def save(net, opt, step):
    CKPT.mkdir(parents=True, exist_ok=True)
    tmp = CKPT / "last.tmp"
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next_step": step + 1}, tmp)
    os.replace(tmp, CKPT / "last.pt")


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)

    net = Mixer()
    start, ckpt = 0, None
    if (CKPT / "last.pt").exists():
        ckpt = torch.load(CKPT / "last.pt")
        net.load_state_dict(ckpt["net"], strict=False)
        start = ckpt["next_step"]
    compiled = torch.compile(net, backend="eager")
    model = nn.parallel.DistributedDataParallel(compiled)
    opt = torch.optim.NAdam(model.parameters(), lr=4e-3)
    if ckpt is not None:
        opt.load_state_dict(ckpt["opt"])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    for step in range(start, TOTAL_STEPS):
        x, y = fetch(step)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        opt.zero_grad(set_to_none=True)
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.6f}", flush=True)
            save(net, opt, step)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
