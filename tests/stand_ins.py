"""Names that the code of a page needs: a small model, its data and its loss, and the parts of a loop made of them.

``namespace()`` is the namespace of a page's code. A page that makes a part of its own (``model = ...``) hides the stand-in of
that name, and the parts that are made afterwards are made of the page's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

import dtrain as dt

VOCAB = 16
ROWS = 3840  # 60 batches of 64


class Block(nn.Module):
    """Part of the model that is sharded as one unit."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class GPT(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocab]``; no attention, which no page needs."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config["vocab"], 8)
        self.block = Block()
        self.head = nn.Linear(8, config["vocab"], bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.block(self.embedding(tokens)))
        return logits


def documents(rows: int, *, seed: int = 0) -> TensorDict:
    """``rows`` samples of four tokens and the four behind them: ``input_ids`` and ``labels``, each ``[rows, 4]``."""
    tokens = torch.randint(VOCAB, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return TensorDict({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}, batch_size=[rows])


def loss_fn(model: nn.Module, batch: TensorDict) -> dt.LossSum:
    """Cross entropy of the next token."""
    return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])


class Namespace(dict[str, Any]):
    """Names that are made at their first use, from the current values of the other names."""

    def __missing__(self, name: str) -> Any:
        if name not in LAZY:
            raise KeyError(name)  # which the interpreter takes for: look among the builtins, then NameError
        self[name] = LAZY[name](self)
        return self[name]


LAZY: dict[str, Callable[[Namespace], Any]] = {
    "dataset": lambda names: documents(ROWS),
    "held_out": lambda names: [documents(64, seed=1), documents(32, seed=2)],
    "batch": lambda names: documents(8),
    "mesh": lambda names: dt.build_mesh(),
    "model": lambda names: names["GPT"](names["config"]),
    "optimizer": lambda names: torch.optim.AdamW(names["model"].parameters(), lr=3e-4),
    "loader": lambda names: dt.build_loader(names["dataset"], mesh=names["mesh"], global_batch_size=64, seed=0),
    "step": lambda names: dt.compose_step(names["loss_fn"], [dt.transforms.clip_by_norm(1.0)]),
    "state": lambda names: names["step"].init(names["model"], names["optimizer"], loader=names["loader"]),
}


def namespace(**others: Any) -> Namespace:
    """A fresh one for each page; ``others`` stand beside the stand-ins, or instead of them."""
    settings = {"lr": 3e-4}
    given = {"torch": torch, "dt": dt, "GPT": GPT, "Block": Block, "config": {"vocab": VOCAB}, "settings": settings}
    return Namespace(__name__="page", **{**given, "loss_fn": loss_fn, **others})
