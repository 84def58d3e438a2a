"""Context parallel toy: every rank owns a slice of each sequence, keys/values are gathered for attention."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SEQ, DIM, VOCAB, BATCH = 24, 24, 11, 12


class GatherSeq(torch.autograd.Function):
    """Concatenate the ranks' slices along dim 1."""

    @staticmethod
    def forward(ctx, t):
        ctx.n = t.shape[1]
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        r = dist.get_rank()
        return grad[:, r * ctx.n:(r + 1) * ctx.n]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, offset):
        q, k, v = self.qkv(self.ln_a(x)).chunk(3, -1)
        k, v = GatherSeq.apply(k), GatherSeq.apply(v)
        rows = offset + torch.arange(x.shape[1])
        allowed = rows[:, None] >= torch.arange(k.shape[1])[None, :]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))
        return x + self.mlp(self.ln_b(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.ln = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, offset):
        x = self.emb(ids) + self.pos(offset + torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, offset)
        return self.head(self.ln(x))


def sample(step):
    g = torch.Generator().manual_seed(31 * step + 1)
    a = torch.randint(0, VOCAB, (BATCH, 1), generator=g)
    pos = torch.arange(SEQ + 1)
    ids = (a + pos * pos // 3) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    n = SEQ // world
    lo = rank * n
    for step in range(7):
        ids, labels = sample(step)
        logits = model(ids[:, lo:lo + n], lo)
        # sum over own tokens, divided by all tokens, so plain sums of gradients are right
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, lo:lo + n].reshape(-1), reduction="sum") / (BATCH * SEQ)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{step:3d}  loss {total.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
