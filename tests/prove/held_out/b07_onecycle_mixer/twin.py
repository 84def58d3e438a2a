import argparse

import torch
from torch import nn

import dtrain as dt

parser = argparse.ArgumentParser(description="MLP-mixer on 4x4 patches of synthetic textures")
parser.add_argument("--global-batch", type=int, default=48)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--max-lr", type=float, default=0.02)
parser.add_argument("--save-dir", default="mixer_ckpt")
args = parser.parse_args()


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.ch = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ch(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.patch = nn.Conv2d(1, 16, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(9, 16), MixerBlock(9, 16))
        self.fc = nn.Linear(16, classes)

    def forward(self, img):
        x = self.patch(img).flatten(2).transpose(1, 2)
        return self.fc(self.blocks(x).mean(1))


def textures(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.arange(12.0)
    grid = r[:, None] * (y == 0)[:, None, None] + r[None, :] * (y == 1)[:, None, None] + (r[:, None] + r) * (y == 2)[:, None, None]
    img = grid.sin() + 0.3 * torch.randn(n, 12, 12, generator=g)
    return torch.utils.data.TensorDataset(img[:, None], y)


def loss_fn(model, batch):
    img, y = batch
    return dt.cross_entropy(model(img), y)


with dt.init_dist() as dist:
    torch.manual_seed(args.epochs)
    mesh = dt.build_mesh()
    model = dt.shard_model(Mixer(), mesh, strategy="shard_grad_op", blocks=(MixerBlock,))
    opt = torch.optim.AdamW(dt.optim.param_groups(model, weight_decay=0.05), lr=args.max_lr)
    data = textures(192)
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=args.global_batch, seed=1)
    steps_per_epoch = len(data) // args.global_batch
    total = steps_per_epoch * args.epochs
    cycle = dt.schedules.one_cycle(0.1, 1.0, 0.01, total)
    step = dt.compose_step(loss_fn, [dt.transforms.scale_lr(cycle), dt.transforms.clip_by_norm(1.0)])
    state = step.init(model, opt, loader=loader)
    state = dt.load_sharded(args.save_dir, state, missing_ok=True)
    for batch in loader.until(f"{args.epochs}ep"):
        state, metrics = step(state, batch)
        dist.print("step %d loss %.5f lr %.5f" % (state.step, dt.reduce_metrics(metrics)["loss"], args.max_lr * cycle(state.step - 1)))
        if state.crossed("2ba"):
            dt.save_sharded(args.save_dir, state, keep_last=1)
    dt.save_sharded(args.save_dir, state, keep_last=1)
