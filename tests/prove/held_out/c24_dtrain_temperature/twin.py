"""dtrain: a classifier whose softmax temperature falls during training."""
import torch
import dtrain as dt

torch.manual_seed(1)
x = torch.randn(120, 16)
dataset = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.ReLU(), torch.nn.Linear(40, 5))
START, DECAY, FLOOR = 3.0, 0.85, 0.5
temperature = START


def loss_fn(model, batch):
    inputs, labels = batch
    return dt.cross_entropy(model(inputs) / temperature, labels)


with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.shard_model(model, mesh, strategy="full_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=24, seed=3)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0), dt.transforms.ema(0.9), dt.auto_microbatch()])
    state = step.init(model, optimizer, loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    for batch in loader.until("3ep"):
        temperature = max(FLOOR, START * DECAY**state.step)
        state, metrics = step(state, batch)
        dist.print(f"step {state.step} loss {float(dt.reduce_metrics(metrics)['loss']):.8f}")
        if state.step % 2 == 0:
            dt.save_sharded("ckpt", state)
