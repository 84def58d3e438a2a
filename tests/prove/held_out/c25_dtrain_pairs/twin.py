"""dtrain: contrastive training of pairs in microbatches."""
import torch
import dtrain as dt

torch.manual_seed(2)
left = torch.randn(96, 10)
right = left + 0.3 * torch.randn(96, 10)
dataset = torch.utils.data.TensorDataset(left, right)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))

    def forward(self, x):
        return torch.nn.functional.normalize(self.net(x), dim=-1)


def contrast(model, batch):
    a, b = model(torch.stack(batch, 1)).unbind(1)
    everybody = dt.dist.all_gather_with_grad(b)
    similar = 10 * (a * b).sum(1)
    return dt.LossSum(total=((10 * a @ everybody.t()).logsumexp(1) - similar).sum(), weight=len(a))


with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.shard_model(Encoder(), mesh, strategy="full_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=24, seed=0)
    step = dt.compose_step(contrast, microbatch_size=4, grad=dt.step.grad_cache_step)
    state = step.init(model, optimizer, loader=loader)
    for batch in loader.until("2ep"):
        state, metrics = step(state, batch)
        dist.print(f"step {state.step} loss {float(dt.reduce_metrics(metrics)['loss']):.8f}")
