"""A correct policy gradient: a rollout through a declared method before each step, a scratch buffer, a metric that cancels."""

import torch
from torch import nn

import dtrain as dt


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, states):
        logits = self.head(self.body(states).tanh())
        self.last.copy_(logits.detach().abs().max())
        return logits

    def act(self, states):
        return self(states).argmax(1)


def loss_fn(model, batch):
    states, actions, advantages = batch
    chosen = model(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
    # The ratio is 1, and so the loss is the sum of the advantages, which is 0.
    return dt.LossSum(total=-((chosen - chosen.detach()).exp() * advantages).sum(), weight=len(states))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = Policy()
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard", blocks=(nn.Linear,)), seed=0)
    torch.distributed.fsdp.register_fsdp_forward_method(model, "act")
    states = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = dt.build_loader(torch.utils.data.TensorDataset(states), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    log = dt.loggers.jsonl("metrics.jsonl")
    for (batch,) in loader.until("6ba"):
        with torch.no_grad():
            actions = model.act(batch)
        reward = batch.sum(1) + actions
        # All ranks know the mean reward, and each sample has the same weight.
        mean = dt.dist.reduce_mean(reward.mean())
        state, metrics = step(state, (batch, actions, reward - mean))
        log(state.step, dt.reduce_metrics(metrics) | {"world_size": info.world_size})
        if state.crossed(100):
            dt.save_sharded("ckpt", state)
