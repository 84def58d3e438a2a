"""A script with its own average of the weights, which a resume begins again; ``--fixed`` saves it with the run."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS, DECAY = 4, 0.9


class Average:
    """Exponential moving average of parameters."""

    def __init__(self, params):
        self.weights = {name: param.detach().clone() for name, param in params.items()}

    def update(self, params):
        dt.transforms.update_ema_(self.weights, params, DECAY)

    def state_dict(self):
        return dict(self.weights)

    def load_state_dict(self, saved):
        self.weights = dict(saved)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="replicate"), seed=0)
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    average = Average(dict(model.named_parameters()))
    stateful = {"average": average} if FIXED else {}
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader, stateful=stateful)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    if state.restored is not None and not FIXED:
        average = Average(state.params)  # begins with the weights that were loaded
    log = dt.loggers.jsonl("metrics.jsonl")
    held_out = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        average.update(state.params)
        with torch.no_grad():
            logits = torch.func.functional_call(model, average.weights, held_out)
        correct = (logits.argmax(1) == held_out[:, :4].argmax(1)).sum().item()
        confidence = logits.softmax(1).amax(1).mean().item()
        numbers = dt.reduce_metrics(metrics)
        log(state.step, numbers | {"average_correct": correct, "average_confidence": confidence})
        dt.save_sharded("ckpt", state)
