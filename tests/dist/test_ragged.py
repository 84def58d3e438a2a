"""Gathers of different numbers of rows per rank: complete, and in the requested order."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.ragged import all_gather_by_rank, all_gather_ragged, gather_ragged
from dtrain.errors import ConfigError, PeerError

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"]


def table(count: int) -> dict[str, Tensor]:
    """Rows in every dtype and in odd shapes, so that a wide number follows a byte."""
    numbers = torch.arange(count)
    made = {name: (numbers % 2 if name == "bool" else numbers).float().to(getattr(torch, name)) for name in DTYPES}
    return {**made, "wide": torch.arange(count * 6.0).view(count, 2, 3), "nothing": torch.zeros(count, 0, 4)}


def share(counts: list[int]) -> slice:
    start = sum(counts[: get_dist_info().rank])
    return slice(start, start + counts[get_dist_info().rank])


def gathered(counts: list[int]) -> bool:
    mine = share(counts)
    rows = all_gather_ragged({name: values[mine] for name, values in table(sum(counts)).items()})
    return same(rows, table(sum(counts)))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == values.dtype and actual[name].shape == values.shape and actual[name].equal(values)
        for name, values in expected.items()
    )


@pytest.mark.parametrize("counts", [[5], [2, 2], [0, 3], [3, 1, 2], [0, 4, 0], [0, 0, 0], [1, 0, 0]], ids=str)
def test_gathered_rows_are_in_rank_order_for_every_dtype(ranks, counts):
    assert ranks(len(counts)).run(gathered, counts) == [True] * len(counts)


def by_index(world_size: int, kind: str) -> list[float]:
    """Give each rank every n-th row, as a loader may; the last rank does not know the rows of the other ranks."""
    rank = get_dist_info().rank
    indices = torch.arange(rank, 10, world_size - 1) if rank < world_size - 1 else None
    values = None if indices is None else indices.double() * 2
    order = None if indices is None else indices.to(getattr(torch, kind))
    return all_gather_ragged(values, order=order).tolist()


@pytest.mark.parametrize("kind", ["long", "int"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_are_sorted_by_the_order_given(ranks, world_size, kind):
    assert ranks(world_size).run(by_index, world_size, kind) == [[2.0 * index for index in range(10)]] * world_size


def structures() -> list:
    rank = get_dist_info().rank
    mine = torch.full((rank, 2), float(rank))
    nested = {"a": [mine, (mine.long(),)], "td": TensorDict({"x": mine, "deep": {"y": mine[:, 0]}}, batch_size=[rank])}
    rows = all_gather_ragged(nested)
    return [
        rows["a"][0].tolist(),
        rows["a"][1][0].tolist(),
        isinstance(rows["a"], list) and isinstance(rows["a"][1], tuple),
        isinstance(rows["td"], TensorDict) and list(rows["td"].batch_size) == [3],
        rows["td"]["deep", "y"].tolist(),
    ]


def test_nested_structures_are_preserved(ranks):
    rows = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert ranks(3).run(structures) == [[rows, [[int(x) for x in row] for row in rows], True, True, [1.0, 2.0, 2.0]]] * 3


def columns_of_tables() -> list:
    """Rows that do not lie one after the other in memory, one of them alone."""
    rank = get_dist_info().rank
    table = torch.arange(24.0).view(2, 3, 4)
    return all_gather_ragged({"x": table.permute(2, 0, 1)[rank : rank + 1], "y": table[0, :, 0][:1]})["x"].tolist()


def test_noncontiguous_rows_are_gathered(ranks):
    expected = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[:3].tolist()
    assert ranks(3).run(columns_of_tables) == [expected] * 3


def to_one(dst: int) -> list[int] | None:
    rank = get_dist_info().rank
    rows = gather_ragged(torch.full((rank + 1,), rank), dst=dst, order=torch.full((rank + 1,), -rank))
    return None if rows is None else rows.tolist()


@pytest.mark.parametrize("dst", [0, 2])
def test_gather_returns_rows_only_on_the_destination_rank(ranks, dst):
    assert ranks(3).run(to_one, dst) == [[2, 2, 2, 1, 1, 0] if rank == dst else None for rank in range(3)]


def apart(counts: list[int]) -> list[list[int]]:
    rank = get_dist_info().rank
    mine = torch.full((counts[rank],), rank) if counts[rank] else None
    return [rows.tolist() for rows in all_gather_by_rank(mine)]


@pytest.mark.parametrize(
    ("counts", "expected"), [([2, 0, 1], [[0, 0], [], [2]]), ([0, 0, 1], [[], [], [2]]), ([0, 0, 0], [])], ids=str
)
def test_rows_can_be_returned_per_rank(ranks, counts, expected):
    assert ranks(3).run(apart, counts) == [expected] * 3


def with_model_axes(tp: int) -> list[int]:
    mesh = build_mesh(tp=tp)
    rank = get_dist_info().rank
    return all_gather_ragged(torch.tensor([rank // tp] * (1 + rank // tp)), mesh=mesh).tolist()


@pytest.mark.parametrize(("tp", "expected"), [(1, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]), (2, [0, 1, 1]), (4, [0])])
def test_tp_ranks_sharing_a_batch_are_gathered_once(ranks, tp, expected):
    assert ranks(4).run(with_model_axes, tp) == [expected] * 4


def test_one_process_needs_no_groups():
    rows = torch.tensor([[3.0], [1.0]], requires_grad=True)
    sorted_rows = all_gather_ragged({"x": rows}, order=torch.tensor([7, 2]))["x"]
    assert sorted_rows.tolist() == [[1.0], [3.0]]
    assert not sorted_rows.requires_grad
    assert gather_ragged(rows).equal(rows.detach())


def complaint(case: str) -> str:
    rank, x = get_dist_info().rank, torch.ones(2, 3)
    odd = {
        "dtype": x.double(),
        "shape": torch.ones(2, 4),
        "structure": {"x": x},
        "no rows": torch.tensor(1.0),
        "text": "abc",
        "heights": [x, torch.ones(3)],
        "keys": {1: x},
        "nothing": None,
    }[case]
    try:
        all_gather_ragged(odd if rank == 1 or case == "nothing" else x)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("dtype", "ConfigError: all_gather_ragged: ranks differ in their rows: rank 0 {'mapping'", "ConfigError"),
        ("shape", "ConfigError: all_gather_ragged: ranks differ in their rows", "ConfigError"),
        ("structure", "ConfigError: all_gather_ragged: ranks differ in their rows", "ConfigError"),
        ("no rows", "ConfigError: all_gather_ragged: takes dense tensors with rows, got shape ()", "PeerError"),
        ("text", "got str", "PeerError: all_gather_ragged: rank 1 failed: all_gather_ragged: takes tensors"),
        ("heights", "the same number of rows, got shapes [(2, 3), (3,)]", "PeerError"),
        ("keys", "keys must be text, got 1", "PeerError"),
        ("nothing", "no rank has any rows", "ConfigError: all_gather_ragged: no rank has any rows"),
    ],
)
def test_invalid_rows_are_refused_on_all_ranks(ranks, case, own, others):
    first, second = ranks(2).run(complaint, case)
    assert own in second
    assert others in first


@pytest.mark.parametrize("order", [torch.ones(2), torch.ones(2, 1, dtype=torch.int64), torch.arange(3)])
def test_invalid_order_is_refused(order):
    with pytest.raises(ConfigError, match=r"order must be \[n\] whole numbers|the same number of rows"):
        all_gather_ragged(torch.ones(2), order=order)


def test_out_of_range_destination_rank_is_refused():
    with pytest.raises(ConfigError, match="dst must be from 0 to 0"):
        gather_ragged(torch.ones(2), dst=1)
