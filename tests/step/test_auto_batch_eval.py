"""Evaluation in parts of batches that only the caller can count and cut."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dtrain.data.batch import batch_spec
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.evaluate import auto_batch_eval, evaluate
from dtrain.testing.counters import count_collectives
from dtrain.testing.fault_injection import inject_fault
from dtrain.typing import LossSum

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
LENGTHS = [[3, 1, 2, 5, 1, 4, 1], [2, 2], [6, 1, 1]]  # sequences of each rank


@dataclass
class Sequences:
    """Sequences of different lengths, joined: no axis of any tensor counts them."""

    tokens: Tensor
    lengths: list[int]


def count(batch: Sequences) -> int:
    return len(batch.lengths)


def split(batch: Sequences, size: int) -> list[Sequences]:
    pieces, parts = batch.tokens.split(batch.lengths), []
    for start in range(0, len(pieces), size):
        parts.append(Sequences(torch.cat(pieces[start : start + size]), batch.lengths[start : start + size]))
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
    return sum(total.total.item() for total in sums) / sum(map(len, LENGTHS))


def on_ranks(size: int | str) -> float:
    net = shard_model(model(), build_mesh(), blocks=(nn.Linear,))
    return reduce_metrics(
        evaluate(net, [made(get_dist_info().rank)], loss, batch_spec=batch_spec(count=count, split=split), microbatch_size=size)
    )["loss"]


@pytest.mark.parametrize("size", ["auto", 1, 2, 3, 50])
def test_custom_split_counts_each_sample_once(ranks, size):
    assert ranks(3).run(on_ranks, size) == pytest.approx([expected()] * 3, rel=1e-12)


@pytest.mark.parametrize(("fits", "sizes"), [(7, [7]), (3, [3, 3, 1]), (2, [1, 1, 1, 1, 1, 1, 1])])
def test_microbatch_is_halved_after_out_of_memory(fits, sizes):
    """A size is halved when it does not fit: 7, 3, 1."""

    def forward(net: nn.Module, piece: Sequences) -> Sequences:
        if count(piece) > fits:
            raise OUT_OF_MEMORY
        return piece

    run = auto_batch_eval(forward, batch_spec=batch_spec(count=count, split=split))
    parts = run(model(), made(0))
    assert [count(piece) for piece in parts] == sizes
    assert torch.cat([piece.tokens for piece in parts]).equal(made(0).tokens)
    assert [count(piece) for piece in run(model(), made(1))] == ([2] if fits > 2 else [1, 1]), "the size that fits is kept"


def test_evaluation_in_parts_counts_each_batch_once():
    counted: list[int] = []

    def recorded(batch: Sequences) -> int:
        counted.append(count(batch))
        return counted[-1]

    evaluate(model(), [made(0), made(1)], loss, batch_spec=batch_spec(count=recorded, split=split), microbatch_size="auto")
    assert counted == [7, 2]


def test_batch_that_fits_needs_no_split_function():
    metrics = evaluate(model(), [made(0), made(1)], loss, batch_spec=batch_spec(count=count), microbatch_size="auto")
    assert metrics["loss"].weight == 9


def test_custom_batch_type_without_split_is_refused():
    with pytest.raises(ConfigError, match=r"dt.batch_spec\(count=..., split=...\)"):
        evaluate(model(), [made(0)], loss, batch_spec=batch_spec(count=count), microbatch_size=2)
    rows = torch.ones(6, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"count returns 3 samples for a batch of 6 rows\. Pass split= as well"):
        evaluate(
            model(),
            [rows],
            lambda net, x: LossSum(total=net(x).sum(), weight=3),
            batch_spec=batch_spec(count=lambda x: 3),
            microbatch_size=2,
        )


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
        evaluate(model(), [made(0)], loss, batch_spec=batch_spec(count=count, split=bad), microbatch_size=2)


class Switched(nn.Module):
    """Two sharded layers, which run in the order that is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(2, 5), nn.Linear(5, 2)]).double()
        self.order = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def evaluations(changes_at: int, fails_at: int, message: str) -> list:
    """Exchanges of five calls, and whether the results are right. A call has another order of layers, one fails on rank 1."""
    net = shard_model(Switched(), build_mesh(), blocks=(nn.Linear,))
    run = auto_batch_eval(lambda model, inputs: model(inputs), initial_size=4)
    rows = torch.arange(8.0, dtype=torch.float64).view(4, 2) + get_dist_info().rank
    exchanged, right, raised = [], [], ""
    for call in range(5):
        net.order = [0, 1, 0, 1] if call >= changes_at else [0, 1]
        error = ValueError(message) if message else OUT_OF_MEMORY
        fault = inject_fault("raise", at="forward", call=1, rank=1, error=error)
        with count_collectives() as seen, fault if call == fails_at else nullcontext():
            try:
                parts = run(net, rows)
            except Exception as problem:  # noqa: BLE001
                raised, parts = type(problem).__name__, []
        exchanged.append(seen.count(group="control"))
        whole = Switched()
        whole.order = net.order
        right.append(bool(parts) and torch.allclose(torch.cat(parts), whole(rows), rtol=1e-12))
    return [exchanged, right, raised]


def test_parts_exchange_three_records_once_their_collectives_are_known(ranks):
    # The count of a batch, the size of the next part twice, and the status of a part that compares with a trace.
    for exchanged, right, _ in ranks(2).run(evaluations, 3, 100, ""):
        first, second, third, changed, settled = exchanged
        assert second == third == settled == 4
        assert first == 3 + 3
        assert changed > settled
        assert right == [True] * 5


@pytest.mark.parametrize("fails_at", [0, 2])
def test_part_that_runs_out_of_memory_on_one_rank_is_halved_on_all(ranks, fails_at):
    for _, right, raised in ranks(2).run(evaluations, 100, fails_at, ""):
        assert right == [True] * 5
        assert raised == ""


@pytest.mark.parametrize("fails_at", [0, 2])
def test_error_of_one_rank_is_raised_on_all_ranks(ranks, fails_at):
    mine = [result[1:] for result in ranks(2).run(evaluations, 100, fails_at, "of rank 1")]
    right = [call != fails_at for call in range(5)]
    assert mine == [[right, "PeerError"], [right, "ValueError"]]


def plain_model() -> str:
    """Only rank 1 evaluates a model that is on no mesh, and its function fails."""

    def fails(net: nn.Module, inputs: Tensor) -> Tensor:
        raise ValueError("of rank 1")

    if get_dist_info().rank == 0:
        return "ValueError"
    try:
        auto_batch_eval(fails)(Switched(), torch.ones(2, 2, dtype=torch.float64))
    except Exception as problem:  # noqa: BLE001
        return type(problem).__name__
    return "nothing"


def test_error_of_a_model_on_one_rank_alone_is_its_own(ranks):
    assert ranks(2).run(plain_model) == ["ValueError"] * 2
