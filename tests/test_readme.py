"""The README's own code runs, and what it names exists."""

import re
from pathlib import Path

import torch
from torch import nn

import dtrain as dt
from dtrain import testing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).tanh()


class GPT(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config["vocab"], 8)
        self.block = Block()
        self.head = nn.Linear(8, config["vocab"], bias=False)

    def forward(self, x):
        return self.head(self.block(self.embedding(x)))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.token_cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def names() -> dict:
    dataset = torch.randint(16, (30_000, 5), generator=torch.Generator().manual_seed(0))
    return {"GPT": GPT, "Block": Block, "config": {"vocab": 16}, "dataset": dataset, "loss_fn": loss_fn}


def test_the_loop_of_the_readme_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = BLOCKS[0]
    assert 'loader.until("3ep")' in loop
    exec(loop.replace('until("3ep")', 'until("1ep")'), names())
    assert [found.step for found in dt.list_checkpoints("ckpt")] == [118]
    exec(loop, names())
    assert [found.step for found in dt.list_checkpoints("ckpt")] == [118, 236, 354]
    assert list(dt.read_jsonl("run.jsonl")) == [100, 200, 300]


def test_the_step_by_hand_trains():
    model = GPT({"vocab": 16})
    state = dt.compose_step(loss_fn).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scope = {"dt": dt, "state": state, "batch": names()["dataset"][:8], "loss_fn": loss_fn}
    exec(BLOCKS[1], scope)
    assert scope["state"].step == 1


STRATEGIES = {"full_shard", "shard_grad_op", "hybrid_shard", "replicate"}


def test_every_name_in_the_table_exists():
    table = README.split("## What is here")[1].split("\n\n[`examples")[0]
    found = set(re.findall(r"`([A-Za-z_]+)`", table))
    assert len(found) > 60
    assert {name for name in found - STRATEGIES if not (hasattr(dt, name) or hasattr(testing, name))} == set()


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"`[^`\n]+`", "", page.read_text()))  # code may look like a link
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert broken == []
