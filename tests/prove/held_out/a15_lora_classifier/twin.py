"""LoRA fine-tuning of a frozen "pretrained" encoder with a fresh classification head."""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4, alpha: int = 8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features ** 0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Classifier(nn.Module):
    def __init__(self, vocab=30, d=24, n_labels=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.att = nn.ModuleList([Attention(d), Attention(d)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, n_labels)

    def forward(self, ids):
        x = self.embed(ids)
        for a in self.att:
            x = x + a(x)
        return self.head(self.norm(x.mean(1)))


def build():
    torch.manual_seed(0)
    model = Classifier()
    model.requires_grad_(False)
    for a in model.att:
        a.q, a.v = LoRALinear(a.q), LoRALinear(a.v)
    model.head.requires_grad_(True)
    return model


def adapter_state(model):
    keep = {n for n, p in model.named_parameters() if p.requires_grad}
    return {k: v for k, v in model.state_dict().items() if k in keep}


def data(step, n):
    g = torch.Generator().manual_seed(40 + step)
    ids = torch.randint(0, 30, (n, 10), generator=g)
    return ids, (ids < 10).sum(1).sub(2).div(2, rounding_mode="floor").clamp(0, 2)


def main(out_dir, batch, steps):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=1e-2)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
    start = 0
    marker = os.path.join(out_dir, "latest.json")
    if os.path.exists(marker):
        start = json.load(open(marker))["step"]
        blob = torch.load(os.path.join(out_dir, f"adapter-{start}.pt"))
        model.load_state_dict(blob["adapter"], strict=False)
        opt.load_state_dict(blob["opt"])
        sched.load_state_dict(blob["sched"])

    for step in range(start, steps):
        ids, y = data(step, batch)
        ids, y = ids[rank::world], y[rank::world]
        loss = F.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        for p in trainable:
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        opt.step()
        sched.step()
        dist.all_reduce(avg := loss.detach() / world)
        if rank == 0:
            print({"step": step, "loss": round(avg.item(), 6), "lr": round(sched.get_last_lr()[0], 6)}, flush=True)
            os.makedirs(out_dir, exist_ok=True)
            blob = {"adapter": adapter_state(model), "opt": opt.state_dict(), "sched": sched.state_dict()}
            torch.save(blob, os.path.join(out_dir, "tmp.bin"))
            os.replace(os.path.join(out_dir, "tmp.bin"), os.path.join(out_dir, f"adapter-{step + 1}.pt"))
            with open(marker + ".tmp", "w") as f:
                json.dump({"step": step + 1}, f)
            os.replace(marker + ".tmp", marker)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="lora_out")
    ap.add_argument("--batch", type=int, default=30)
    ap.add_argument("--steps", type=int, default=8)
    a = ap.parse_args()
    main(a.out, a.batch, a.steps)
