"""A loss over the rows of all ranks has the gradient that one process with all rows would have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dist.ragged import all_gather_with_grad
from dtrain.errors import ConfigError

FLOAT64_REORDERING = 1e-12  # relative: sums over ranks are taken in another order than in one process
DIM = 5


def contrastive_loss(mine: Tensor, start: int, everybody: Tensor) -> Tensor:
    """The summed cross entropy of telling each of ``mine`` from everybody's: rows ``start`` and on are its own."""
    logits = mine @ everybody.t() / 0.1
    return torch.nn.functional.cross_entropy(logits, torch.arange(start, start + len(mine)), reduction="sum")


def inputs(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randn(3, DIM, generator=g, dtype=torch.float64)


def gradient(counts: list[int]) -> list:
    """This rank's share of the gradient of the weights, and the gradient of its own rows."""
    rank, (x, weights) = get_dist_info().rank, inputs(sum(counts))
    start = sum(counts[:rank])
    weights.requires_grad_()
    rows = (x[start : start + counts[rank]] @ weights).requires_grad_()
    rows.retain_grad()
    everybody = all_gather_with_grad(torch.nn.functional.normalize(rows, dim=1))
    contrastive_loss(torch.nn.functional.normalize(rows, dim=1), start, everybody).backward()
    return [list(everybody.shape), weights.grad.tolist(), rows.grad.tolist()]


def relative_error(actual: list, expected: Tensor) -> float:
    return float((torch.tensor(actual, dtype=torch.float64).reshape(expected.shape) - expected).norm() / expected.norm())


@pytest.mark.parametrize("counts", [[2, 2], [3, 1, 2], [0, 4, 1], [0, 0, 3]], ids=str)
def test_gradient_equals_the_gradient_of_one_process(ranks, counts):
    n = sum(counts)
    x, weights = inputs(n)
    weights.requires_grad_()
    rows = x @ weights
    rows.retain_grad()
    normal = torch.nn.functional.normalize(rows, dim=1)
    contrastive_loss(normal, 0, normal).backward()

    shapes, shares, pieces = zip(*ranks(len(counts)).run(gradient, counts), strict=True)
    assert list(shapes) == [[n, DIM]] * len(counts)
    total = torch.tensor(shares, dtype=torch.float64).sum(0)
    assert relative_error(total.tolist(), weights.grad) <= FLOAT64_REORDERING
    assert relative_error([row for piece in pieces for row in piece], rows.grad) <= FLOAT64_REORDERING


def gather(counts: list[int], shape: list[int]) -> list:
    rank = get_dist_info().rank
    return all_gather_with_grad(torch.full((counts[rank], *shape), float(rank))).tolist()


@pytest.mark.parametrize(("counts", "shape"), [([2, 0, 1], []), ([1, 2, 0], [2, 1]), ([0, 0, 0], [3])])
def test_gathered_rows_are_in_rank_order(ranks, counts, shape):
    expected = torch.cat([torch.full((n, *shape), float(rank)) for rank, n in enumerate(counts)]).tolist()
    assert ranks(3).run(gather, counts, shape) == [expected] * 3


def test_one_process_needs_no_groups():
    x = torch.ones(2, 3, requires_grad=True)
    y = all_gather_with_grad(x)
    assert y.equal(x)
    (y * 2).sum().backward()
    assert x.grad.equal(torch.full((2, 3), 2.0))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, dtype=torch.int64), "x must be a floating tensor with rows, got torch.int64 of shape .2,."),
        (torch.ones(()), "x must be a floating tensor with rows, got torch.float32 of shape .."),
        ([1.0], "x must be a tensor, got list"),
    ],
)
def test_tensors_without_a_row_dimension_are_refused(x, message):
    with pytest.raises(ConfigError, match=f"all_gather_with_grad: {message}"):
        all_gather_with_grad(x)


def gather_unequal(case: str) -> str:
    rank = get_dist_info().rank
    x = torch.ones(2, 3, requires_grad=True)
    if rank == 1:
        x = {
            "dtype": torch.ones(2, 3, dtype=torch.float64, requires_grad=True),
            "shape": torch.ones(2, 4, requires_grad=True),
            "grad": torch.ones(2, 3),
            "bad": torch.ones(()),
        }[case]
    try:
        all_gather_with_grad(x)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        (
            "dtype",
            "dtype or shape after the first dimension must be equal on all ranks, got torch.float32, (2, 3), requires_grad",
            "",
        ),
        ("shape", "dtype or shape after the first dimension must be equal on all ranks", "got torch.float32, (2, 4)"),
        ("grad", "requires_grad must be equal on all ranks", "on this rank. Rank 0 differs."),
        (
            "bad",
            "rank 1 has a tensor that cannot be gathered. See the error of rank 1.",
            "x must be a floating tensor with rows",
        ),
    ],
)
def test_input_mismatch_between_ranks_raises_on_all_ranks(ranks, case, first, second):
    texts = ranks(2).run(gather_unequal, case)
    assert all(text.startswith("all_gather_with_grad: ") for text in texts)
    assert first in texts[0]
    assert second in texts[1]


def gather_a_dtensor() -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    from dtrain.dist.mesh import build_mesh

    try:
        all_gather_with_grad(distribute_tensor(torch.ones(4, 1), build_mesh(), [Shard(0), Shard(0)]))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_dtensor_is_refused(ranks):
    assert (
        ranks(2).run(gather_a_dtensor)
        == ["all_gather_with_grad: x must be a plain tensor, got a DTensor. Pass this rank's own rows."] * 2
    )


def gather_without_grad() -> list:
    x = torch.ones(1, requires_grad=get_dist_info().rank == 0)
    with torch.no_grad():
        y = all_gather_with_grad(x)
    return [y.requires_grad, y.tolist()]


def test_requires_grad_may_differ_between_ranks_under_no_grad(ranks):
    assert ranks(2).run(gather_without_grad) == [[False, [1.0, 1.0]]] * 2
