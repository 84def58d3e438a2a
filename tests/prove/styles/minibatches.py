"""A correct loop over rollouts, each in minibatches, which ends only after steps that a short proof does not have."""

import torch

import dtrain as dt


def loss_fn(model, batch):
    errors = model(batch["x"])[:, 0] - batch["reward"]
    return dt.LossSum(total=errors.square().sum(), weight=len(errors))


with dt.init_dist() as info:
    dt.seed_all(0, info.rank)
    mesh = dt.build_mesh()
    torch.manual_seed(0)
    model = dt.shard_model(torch.nn.Linear(4, 1), mesh, strategy="replicate")
    buffer = dt.data.RolloutBuffer(mesh=mesh, global_batch_size=6, seed=0, epochs=2)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=buffer)
    while state.step < 10**6:
        if buffer.is_finished:
            x = torch.randn(12, 4, generator=torch.Generator().manual_seed(buffer.rollouts))
            numbers = torch.arange(12)[info.rank :: info.world_size]
            buffer.fill({"x": x[numbers], "reward": x[numbers].sin().sum(1)}, order=numbers)
        for minibatch in buffer:
            state, metrics = step(state, minibatch)
