"""Planning, against what one would do by hand with whole arrays."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint import plan
from dtrain.checkpoint.fill import as_tensor
from dtrain.checkpoint.layout import Entry
from dtrain.checkpoint.plan import Region, choose_writers, plan_reads, stored_boxes
from dtrain.errors import DamagedCheckpointError

HEADER = 24  # the boxes do not begin at the start of the file


def cuts(size: int, draw) -> list[tuple[int, int]]:
    """``[0, size)`` in spans, some of them possibly empty."""
    marks = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(itertools.pairwise([0, *marks, size]))


def write(full: torch.Tensor, grid: list[tuple[tuple[int, int], ...]]) -> tuple[list[list[Entry]], list[bytes]]:
    """One file per box of the grid."""
    entries, files = [], []
    for spans in grid:
        box = full[tuple(slice(*span) for span in spans)].contiguous()
        data = box.reshape(-1).view(torch.uint8).numpy().tobytes() if box.numel() else b""
        entry = Entry(
            key="w", dtype="I32", shape=tuple(full.shape), offset=tuple(a for a, _ in spans), size=tuple(box.shape),
            begin=HEADER, end=HEADER + len(data),
        )  # fmt: skip
        entries.append([entry])
        files.append(bytes(HEADER) + data)
    return entries, files


@given(st.data())
def test_reads_fill_any_target_from_any_grid(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    full = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    grid = list(itertools.product(*(cuts(n, data.draw) for n in shape)))
    entries, files = write(full, data.draw(st.permutations(grid)))
    low = [data.draw(st.integers(0, n)) for n in shape]
    size = [data.draw(st.integers(0, n - at)) for n, at in zip(shape, low, strict=True)]
    region = Region(offset=tuple(low), size=tuple(size))
    target = torch.full(size, -1, dtype=torch.int32)
    plan_bytes = plan.READ_BYTES
    plan.READ_BYTES = data.draw(st.sampled_from([1, 20, plan_bytes]))
    try:
        reads = plan_reads(stored_boxes(entries), {"w": region})
    finally:
        plan.READ_BYTES = plan_bytes
    written = torch.zeros(size, dtype=torch.int32)
    for read in reads:
        assert HEADER <= read.begin < read.end <= len(files[read.file])
        block = as_tensor(bytearray(files[read.file][read.begin : read.end]), "I32", read.block)
        into = tuple(slice(*span) for span in read.target)
        target[into] = block[tuple(slice(*span) for span in read.source)]
        written[into] += 1
    assert torch.equal(target, full[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))])
    assert bool((written == 1).all()), "no element is read twice"
    assert [(r.file, r.begin) for r in reads] == sorted((r.file, r.begin) for r in reads)


def grid_of_rows(*spans: tuple[int, int]) -> dict[str, list[plan.StoredBox]]:
    full = torch.arange(30, dtype=torch.int32).reshape(10, 3)
    return stored_boxes(write(full, [(span, (0, 3)) for span in spans])[0])


def test_only_the_rows_needed_are_read():
    reads = plan_reads(grid_of_rows((0, 5), (5, 10)), {"w": Region(offset=(4, 1), size=(3, 1))})
    assert [(r.file, r.begin - HEADER, r.end - HEADER) for r in reads] == [(0, 48, 60), (1, 0, 24)]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (((0, 5),), "w: stored boxes hold 15 of the 30 elements needed"),
        (((0, 4), (5, 10)), "w: stored boxes hold 27 of the 30 elements needed"),
        (((0, 6), (5, 10)), "w: two stored boxes overlap at"),
        (((0, 5), (0, 5)), "w: two stored boxes overlap at"),
        ((), "w: stored boxes hold 0 of the 30 elements needed"),
    ],
)
def test_boxes_that_do_not_cover_a_target_once_are_damage(spans, message):
    with pytest.raises(DamagedCheckpointError, match=message):
        plan_reads(grid_of_rows(*spans), {"w": Region(offset=(0, 0), size=(10, 3))})


def test_two_boxes_of_a_scalar_are_damage():
    entry = Entry(key="w", dtype="F32", shape=(), offset=(), size=(), begin=0, end=4)
    with pytest.raises(DamagedCheckpointError, match="hold 2 of the 1"):
        plan_reads(stored_boxes([[entry], [entry]]), {"w": Region(offset=(), size=())})


def test_an_empty_target_needs_no_box():
    assert plan_reads({}, {"w": Region(offset=(10, 0), size=(0, 3))}) == []


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 4)), max_size=30))
def test_writers_share_the_load(tensors):
    rows = [(f"t{at}", nbytes, copies) for at, (nbytes, copies) in enumerate(tensors)]
    chosen = choose_writers(rows)
    assert chosen == choose_writers(rows)
    for copies in {c for _, _, c in rows}:
        loads = [0] * copies
        for key, nbytes, c in rows:
            if c == copies:
                assert 0 <= chosen[key] < copies
                loads[chosen[key]] += nbytes
        assert max(loads) - min(loads) <= max((n for _, n, c in rows if c == copies), default=0)
