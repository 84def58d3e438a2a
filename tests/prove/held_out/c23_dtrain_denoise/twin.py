"""dtrain: a denoising autoencoder."""
import torch
import dtrain as dt

SAMPLES, WIDTH, SIGMA = 96, 12, 0.5

torch.manual_seed(0)
clean = (torch.randn(SAMPLES, 3) @ torch.randn(3, WIDTH)).tanh()
noise_bank = torch.randn(SAMPLES, WIDTH)
dataset = torch.utils.data.TensorDataset(clean, torch.arange(SAMPLES))
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, 48), torch.nn.GELU(), torch.nn.Linear(48, 48), torch.nn.GELU(), torch.nn.Linear(48, WIDTH)
)


def loss_fn(model, batch):
    x, index = batch
    noise = noise_bank[index]
    error = (model(x + SIGMA * noise) - x).pow(2).mean(1)
    return dt.LossSum(total=error.sum(), weight=len(error))


with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.shard_model(model, mesh, strategy="full_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=24, seed=0)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()])
    state = step.init(model, optimizer, loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    for batch in loader.until("3ep"):
        state, metrics = step(state, batch)
        dist.print(f"step {state.step} loss {float(dt.reduce_metrics(metrics)['loss']):.8f}")
        if state.step % 2 == 0:
            dt.save_sharded("ckpt", state)
