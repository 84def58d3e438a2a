"""Names that single pages need beside the stand-ins, and the tests that run code that cannot run on the pages."""

RUN_BY = {
    "README.md": "tests/test_readme.py",
    "docs/collectives.md": "tests/dist/test_docs.py",
    "docs/observing.md": "tests/pages/test_observing.py",
    "docs/parallelism.md": "tests/shard/test_docs.py",
    "docs/schedules.md": "tests/schedules/test_pages.py",
    "docs/testing.md": "tests/testing/test_docs.py",
}
"""Pages whose code another test runs, which also compares what comes out."""

SHOWN_BY = {
    "# on the device\nwith dt.init_dist():\n    dt.planning.measure_device()": "tests/planning/test_device_facts.py",
    "model = dt.shard.convert_to_fp8(": "tests/shard/test_fp8.py",
    "print(dt.launch.explain_hang())": "tests/launch/hang/test_query.py",
}
"""First lines of blocks that need what a page's process has not, and the tests that do the same with it."""

RANKS = {"docs/local_training.md": 2}
"""Pages that need more than one rank."""

WITHOUT_GROUPS = {"docs/planning.md"}
"""Pages whose code is for a process that has no process groups."""

GIVEN = {
    "docs/checkpoints.md": (
        """
for _ in range(100):
    state, metrics = step(state, batch)
g, c = (dt.compose_step(loss_fn).init(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (GPT(config), GPT(config)))
dt.save_sharded("gan", {"generator": g, "critic": c})
""",
        """
import os
from safetensors.torch import save_file

class BertLayer(Block):
    pass

class Bert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.classifier = BertLayer(), torch.nn.Linear(8, 2)

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight), torch.nn.init.zeros_(module.bias)

os.mkdir("bert-base")
save_file({name: value for name, value in Bert().state_dict().items() if "layer" in name}, "bert-base/model.safetensors")
with torch.device("meta"):
    model = Bert()
""",
    ),
    "docs/data.md": ('dt.data.write_shards([{"x": k} for k in range(600)], "shards/train", format="mds")',),
    "docs/hangs.md": ("prompts = ['a', 'b']",),
    "docs/local_training.md": ("from stand_ins import documents; dataset = documents(640)",),
    "docs/memory.md": ("schedule = dt.schedules.constant(1.0); count_tokens = lambda batch: batch['labels'].numel()",),
    "docs/microbatch.md": ("lr = dt.schedules.constant(1.0)",),
    "docs/optimizers.md": (
        """
real = noises = torch.ones(2, 2)
generator = torch.nn.Identity()
checkpoints = "gan"
g, d = (dt.compose_step(loss_fn).init(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (GPT(config), GPT(config)))
generator_step = discriminator_step = lambda state, batch: (state, {})
""",
    ),
    "docs/packing.md": (
        """
import torch.nn.functional as F

documents = [torch.arange(1500 + 10 * k) % 16 for k in range(8)]
lengths = [len(each) for each in documents]
batch = dt.data.PackedTokens(documents, seq=64, lengths=lengths)[0]
batch = {name: value[None] for name, value in batch.items()}
q = k = v = torch.zeros(1, 2, 64, 8)
dataset = images = [torch.rand(3, 4, 4) for _ in range(64)]
flip = lambda sample: sample.flip(-1)
""",
        """
from tensordict import TensorDict

x = torch.rand(256, 4)
dataset = TensorDict({"x": x, "label": (x[:, 0] > 0.5).long(), "index": torch.arange(256)}, batch_size=[256])
model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0), torch.nn.Sigmoid())
loss_fn = dt.mean_loss(lambda model, batch: (model(batch["x"]) - batch["label"]).square().mean(), weight=len)
""",
    ),
    "docs/planning.md": ("GPTConfig = lambda **sizes: {'vocab': 16}",),
    "docs/profiling.md": (
        """
from pathlib import Path

run, batches = Path("run"), [batch] * 5
train_on = lambda batch: loss_fn(model, batch).total.backward()
""",
    ),
    "docs/time.md": (
        """
class Few:
    def until(self, length):
        return [batch] * 3

rollouts, shuffled_slices = loader, lambda rollout: [rollout]
loader = Few()
""",
    ),
}
"""By page, code that runs before its own: for the first namespace, and for each that a block begins ``anew``."""
