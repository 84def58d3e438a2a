"""Tiny causal LM on variable-length "sentences" (padded), gradients averaged by hand."""
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist

PAD = 0
VOCAB = 20


class TinyGPT(nn.Module):
    def __init__(self, d=32, heads=4, layers=2, ctx=16):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.wpe = nn.Embedding(ctx, d)
        layer = lambda: nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, activation="gelu",
                                                   batch_first=True, norm_first=True)
        self.h = nn.ModuleList([layer() for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCAB, bias=False)

    def forward(self, idx):
        t = idx.shape[1]
        mask = torch.triu(torch.full((t, t), float("-inf")), 1)
        x = self.wte(idx) + self.wpe(torch.arange(t))
        for blk in self.h:
            x = blk(x, src_mask=mask)
        return self.head(self.ln_f(x))


def sentences(step, n, maxlen=16):
    g = torch.Generator().manual_seed(77 + step)
    out = torch.full((n, maxlen + 1), PAD)
    for i in range(n):
        ln = int(torch.randint(3, maxlen + 2, (1,), generator=g))
        start = int(torch.randint(1, VOCAB, (1,), generator=g))
        stride = int(torch.randint(1, 4, (1,), generator=g))
        out[i, :ln] = (start - 1 + stride * torch.arange(ln)) % (VOCAB - 1) + 1
    return out[:, :-1], out[:, 1:]


def train(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = TinyGPT()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 3))

    for step in range(args.steps):
        x, y = sentences(step, args.batch)
        n = args.batch // world
        x, y = x[rank * n:(rank + 1) * n], y[rank * n:(rank + 1) * n]
        chunks = list(zip(x.split(args.micro), y.split(args.micro)))

        tokens = (y != PAD).sum()
        dist.all_reduce(tokens)

        opt.zero_grad()
        running = torch.zeros(())
        for xb, yb in chunks:
            logits = model(xb)
            loss = F.cross_entropy(logits.flatten(0, 1), yb.flatten(), ignore_index=PAD, reduction="sum")
            loss = loss / tokens
            loss.backward()
            running += loss.detach()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(running)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        warm.step()
        if rank == 0:
            print(f"step={step} tokens={tokens.item()} loss={running.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=24, help="sentences per step over all ranks")
    ap.add_argument("--micro", type=int, default=12, help="sentences per forward")
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=5)
    train(ap.parse_args())
