"""Denoise small signals (DAE) with an EMA of the weights; writes the averaged model to model.safetensors."""
import torch
from safetensors.torch import save_file
from torch import nn

import dtrain as dt


class Denoiser(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, ch, 5, padding=2), nn.GELU(), nn.Conv1d(ch, ch, 5, padding=2), nn.GELU(), nn.Conv1d(ch, 1, 1)
        )

    def forward(self, x):
        return x - self.net(x)


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 32)
    f = 1 + 4 * torch.rand(n, 1, generator=g)
    return (6.28 * f * t + 6.28 * torch.rand(n, 1, generator=g)).sin()[:, None]


def corrupt(clean, generator):
    return {"clean": clean, "noisy": clean + 0.5 * torch.randn(clean.shape, generator=generator)}


def loss_fn(model, batch):
    err = (model(batch["noisy"]) - batch["clean"]).square().mean((1, 2))
    return dt.LossSum(total=err.sum(), weight=len(err))


def main(steps=8):
    with dt.init_dist() as dist:
        torch.manual_seed(5)
        mesh = dt.build_mesh()
        model = dt.shard_model(Denoiser(), mesh, strategy="replicate")
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        train = dt.build_loader(signals(192, 0), mesh=mesh, global_batch_size=24, seed=0, transform=corrupt)
        test = dt.build_loader(signals(60, 1), mesh=mesh, global_batch_size=24, seed=1, transform=corrupt, shuffle=False)
        step = dt.compose_step(loss_fn, [dt.transforms.ema(0.8)])
        state = step.init(model, optimizer, loader=train)
        state = dt.load_sharded("dae", state, missing_ok=True)
        for batch in train.until(steps):
            state, metrics = step(state, batch)
            dist.print(f"{state.step}/{steps} mse {dt.reduce_metrics(metrics)['loss']:.6f}")
            if state.crossed(2):
                dt.save_sharded("dae", state, keep_last=2)
        with dt.transforms.use_average(state, "ema"):
            score = dt.reduce_metrics(dt.evaluate(state.model, test, loss_fn))["loss"]
            weights = {k: v.clone() for k, v in dt.full_params(state)}
        dist.print(f"test mse of the averaged model {score:.6f}")
        if dist.is_main:
            save_file(weights, "model.safetensors")
        dt.save_sharded("dae", state, keep_last=2)


if __name__ == "__main__":
    main()
