"""Setup code for the pages: the names that the code of a page assumes, as a folded block that runs in an empty interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LINE = re.compile(r"^\*Assumed here and below: (.*)\*$", re.M)
PARTS = {
    "config": ((), 'config = {"vocab": 16}'),
    "Block": (
        (),
        """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).tanh()
""",
    ),
    "GPT": (
        ("Block",),
        """
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config["vocab"], 8)
        self.block = Block()
        self.head = torch.nn.Linear(8, config["vocab"], bias=False)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))
""",
    ),
    "dataset": (
        (),
        """
tokens = torch.randint(16, (3840, 5), generator=torch.Generator().manual_seed(0))
dataset = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
""",
    ),
    "loss_fn": (
        (),
        """
def loss_fn(model, batch):
    return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])
""",
    ),
    "lr": ((), "lr = dt.schedules.constant(1.0)"),
    "mesh": (
        (),
        """
# in a script: with dt.init_dist():
from contextlib import ExitStack
groups = ExitStack()
groups.enter_context(dt.init_dist())
mesh = dt.build_mesh()
""",
    ),
    "model": (("GPT", "config"), "model = GPT(config)"),
    "optimizer": (("model",), "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)"),
    "loader": (("dataset",), "loader = dt.build_loader(dataset, global_batch_size=64, seed=0)"),
    "batch": (("dataset",), "batch = torch.utils.data.default_collate(dataset[:8])"),
    "step": (("loss_fn",), "step = dt.compose_step(loss_fn)"),
    "state": (
        ("step", "model", "optimizer", "loader"),
        "state = step.init(model, optimizer, loader=loader)",
    ),
}
"""By name: the names that its code needs, and the code. In the order of a loop."""


def code(names: Iterable[str]) -> str:
    """Return code that defines those of ``names`` that a loop has, and the names that these need."""
    needed: set[str] = set()
    waiting = [name for name in names if name in PARTS]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += PARTS[name][0]
    parts = [text.strip() for name, (_, text) in PARTS.items() if name in needed]
    return "\n".join(["import torch, dtrain as dt", *(f"\n{part}\n" if "\n" in part else part for part in parts)]) + "\n"


def fold(markdown: str) -> str:
    """Replace the line about assumed names by a folded block with their code; other names stay in a sentence."""
    return _LINE.sub(_details, markdown, count=1)


def _details(match: re.Match[str]) -> str:
    names = [name for quoted in re.findall(r"`([^`]+)`", match[1]) for name in [quoted] if name.isidentifier()]
    own = [f"`{name}`" for name in names if name not in PARTS]
    lines = ['<details class="setup" markdown="1">', "<summary>Setup of this page</summary>", ""]
    lines += ["```python", re.sub(r"\n{3,}", "\n\n", code(names)).rstrip(), "```", ""]
    lines += [f"Your own: {', '.join(own)}.", ""] if own else []
    return "\n".join([*lines, "</details>"])
