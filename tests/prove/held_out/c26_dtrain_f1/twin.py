"""dtrain: a detector of rare events, judged by F1 on a held-out set."""
import torch
import torch.distributed
import dtrain as dt


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x, (x[:, 0] + x[:, 1] + 0.3 * torch.randn(n, generator=g) > 1.2).float()


torch.manual_seed(3)
dataset = torch.utils.data.TensorDataset(*events(144, 10))
held_x, held_y = events(120, 11)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1))


def loss_fn(model, batch):
    x, y = batch
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="none")
    return dt.LossSum(total=loss.sum(), weight=len(loss))


def group():
    many = torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if many else (0, 1)


def over_ranks(t):
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(t)
    return t


def f1_of(hits, false_alarms, misses):
    return 2 * hits / (2 * hits + false_alarms + misses).clamp(min=1)


def held_out_f1(model):
    rank, world = group()
    x, y = held_x.chunk(world)[rank], held_y.chunk(world)[rank].bool()
    with torch.no_grad():
        found = model(x).squeeze(1) > 0
    counts = torch.stack([(found & y).sum(), (found & ~y).sum(), (~found & y).sum()]).float()
    return f1_of(*over_ranks(counts)).item()


with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.shard_model(model, mesh, strategy="full_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=24, seed=0)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])
    state = step.init(model, optimizer, loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    for batch in loader.until("2ep"):
        state, metrics = step(state, batch)
        loss = float(dt.reduce_metrics(metrics)["loss"])
        text = f"step {state.step} loss {loss:.8f}"
        if state.step % 2 == 0:
            text += f" f1 {held_out_f1(model):.6f}"
            dt.save_sharded("ckpt", state)
        dist.print(text)
