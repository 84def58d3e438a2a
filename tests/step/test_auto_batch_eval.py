"""Evaluation in parts of batches that only the caller can count and cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.evaluate import auto_batch_eval, evaluate
from dtrain.typing import LossSum

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
LENGTHS = [[3, 1, 2, 5, 1, 4, 1], [2, 2], [6, 1, 1]]  # sequences of each rank


@dataclass
class Sequences:
    """Sequences of different lengths one after the other: no axis of any tensor counts them."""

    tokens: Tensor
    lengths: list[int]


def count(batch: Sequences) -> int:
    return len(batch.lengths)


def split(batch: Sequences, size: int) -> list[Sequences]:
    pieces, parts = batch.tokens.split(batch.lengths), []
    for at in range(0, len(pieces), size):
        parts.append(Sequences(torch.cat(pieces[at : at + size]), batch.lengths[at : at + size]))
    return parts


def made(rank: int) -> Sequences:
    lengths = LENGTHS[rank]
    return Sequences(torch.arange(sum(lengths) * 2.0, dtype=torch.float64).view(-1, 2) * (rank + 1), lengths)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 1)).double()


def loss(net: nn.Module, batch: Sequences) -> LossSum:
    return LossSum(total=net(batch.tokens).sum(), weight=len(batch.lengths))


def expected() -> float:
    net = model()
    sums = [loss(net, made(rank)) for rank in range(3)]
    return sum(each.total.item() for each in sums) / sum(map(len, LENGTHS))


def on_ranks(size: int | str) -> float:
    net = shard_model(model(), build_mesh(), blocks=(nn.Linear,))
    return reduce_metrics(evaluate(net, [made(get_dist_info().rank)], loss, count=count, split=split, microbatch_size=size))[
        "loss"
    ]


@pytest.mark.parametrize("size", ["auto", 1, 2, 3, 50])
def test_custom_split_counts_each_sample_once(ranks, size):
    assert ranks(3).run(on_ranks, size) == pytest.approx([expected()] * 3, rel=1e-12)


@pytest.mark.parametrize(("fits", "sizes"), [(7, [7]), (3, [3, 3, 1]), (2, [1, 1, 1, 1, 1, 1, 1])])
def test_microbatch_is_halved_after_out_of_memory(fits, sizes):
    """A size is halved when it does not fit: 7, 3, 1."""

    def forward(net: nn.Module, part: Sequences) -> Sequences:
        if count(part) > fits:
            raise OUT_OF_MEMORY
        return part

    run = auto_batch_eval(forward, count=count, split=split)
    parts = run(model(), made(0))
    assert [count(part) for part in parts] == sizes
    assert torch.cat([part.tokens for part in parts]).equal(made(0).tokens)
    assert [count(part) for part in run(model(), made(1))] == ([2] if fits > 2 else [1, 1]), "the size that fits is kept"


def test_batch_that_fits_needs_no_split_function():
    metrics = evaluate(model(), [made(0), made(1)], loss, count=count, microbatch_size="auto")
    assert metrics["loss"].weight == 9


def test_custom_batch_type_without_split_is_refused():
    with pytest.raises(ConfigError, match="pass count= and split="):
        evaluate(model(), [made(0)], loss, count=count, microbatch_size=2)
    rows = torch.ones(6, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"count returns 3 samples for a batch of 6 rows\. Pass split= as well"):
        evaluate(model(), [rows], lambda net, x: LossSum(total=net(x).sum(), weight=3), count=lambda x: 3, microbatch_size=2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda batch, size: split(batch, size)[:-1], r"parts of at most 2 samples, 7 in all, got \[2, 2, 2\]"),
        (lambda batch, size: [batch], r"parts of at most 2 samples, 7 in all, got \[7\]"),
        (lambda batch, size: [], "split must return at least one microbatch for 7 samples"),
    ],
    ids=["loses samples", "cuts nothing", "gives nothing"],
)
def test_split_that_drops_samples_or_does_not_split_is_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(model(), [made(0)], loss, count=count, split=bad, microbatch_size=2)
