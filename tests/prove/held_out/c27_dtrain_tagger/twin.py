"""dtrain: a tagger of sequences of different lengths."""
import torch
import dtrain as dt

VOCAB, LENGTH, TAGS = 20, 12, 4

torch.manual_seed(4)
ids = torch.randint(0, VOCAB, (96, LENGTH))
tags = (ids + ids.roll(1, 1)) % TAGS
lengths = torch.randint(2, LENGTH + 1, (96, 1))
mask = torch.arange(LENGTH) < lengths
dataset = torch.utils.data.TensorDataset(ids, tags, mask)


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 16)
        self.mix = torch.nn.Conv1d(16, 32, 3, padding=1)
        self.out = torch.nn.Linear(32, TAGS)

    def forward(self, ids):
        h = self.mix(self.embed(ids).transpose(1, 2)).relu()
        return self.out(h.transpose(1, 2))


def loss_fn(model, batch):
    ids, tags, mask = batch
    each = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), tags, reduction="none")
    return dt.LossSum(total=(each * mask).sum(), weight=mask.sum())


with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.shard_model(Tagger(), mesh, strategy="full_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(5.0), dt.auto_microbatch()])
    state = step.init(model, optimizer, loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    for batch in loader.until("1ep"):
        state, metrics = step(state, batch)
        dist.print(f"step {state.step} loss {float(dt.reduce_metrics(metrics)['loss']):.8f}")
        if state.step % 2 == 0:
            dt.save_sharded("ckpt", state)
