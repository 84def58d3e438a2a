"""Planning, compared with a computation by hand on whole arrays."""

import itertools
import sys
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.stored import index_shards
from dtrain.checkpoint import data_file, layout, plan
from dtrain.checkpoint.index import StoredShard, shard_kind
from dtrain.checkpoint.layout import Blocks
from dtrain.checkpoint.plan import ReadItem, Region, assign_writers, plan_fetches, plan_reads
from dtrain.errors import CorruptCheckpointError

HEADER = 24  # the boxes do not begin at the start of the file


def cuts(size: int, draw) -> list[tuple[int, int]]:
    """``[0, size)`` in spans, some of them possibly empty."""
    marks = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return list(itertools.pairwise([0, *marks, size]))


def write(full: torch.Tensor, grid: list[tuple[tuple[int, int], ...]]) -> tuple[list[dict[str, StoredShard]], list[bytes]]:
    """One file per box of the grid."""
    shards, files = [], []
    for file, spans in enumerate(grid):
        box = full[tuple(slice(*span) for span in spans)].contiguous()
        data = box.reshape(-1).view(torch.uint8).numpy().tobytes() if box.numel() else b""
        kind = shard_kind("I32", tuple(full.shape), tuple(a for a, _ in spans), tuple(box.shape))
        shards.append({"w": StoredShard(file=file, begin=HEADER, kind=kind)})
        files.append(bytes(HEADER) + data)
    return shards, files


@given(st.data())
def test_plan_reads_fills_any_region_from_any_grid(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    full = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    grid = list(itertools.product(*(cuts(n, data.draw) for n in shape)))
    shards, files = write(full, data.draw(st.permutations(grid)))
    low = [data.draw(st.integers(0, n)) for n in shape]
    size = [data.draw(st.integers(0, n - begin)) for n, begin in zip(shape, low, strict=True)]
    region = Region(offset=tuple(low), size=tuple(size))
    target = torch.full(size, -1, dtype=torch.int32)
    plan_bytes = plan.MAX_STRIDED_READ_BYTES
    plan.MAX_STRIDED_READ_BYTES = data.draw(st.sampled_from([1, 20, plan_bytes]))
    try:
        reads = plan_reads(index_shards(shards), {"w": region})
    finally:
        plan.MAX_STRIDED_READ_BYTES = plan_bytes
    written = torch.zeros(size, dtype=torch.int32)
    for read in reads:
        assert HEADER <= read.begin < read.end <= len(files[read.file])
        block = torch.frombuffer(bytearray(files[read.file][read.begin : read.end]), dtype=torch.int32).reshape(read.block)
        into = tuple(slice(*span) for span in read.target)
        target[into] = block[tuple(slice(*span) for span in read.source)]
        written[into] += 1
    assert torch.equal(target, full[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))])
    assert bool((written == 1).all()), "no element is read twice"
    assert [(r.file, r.begin) for r in reads] == sorted((r.file, r.begin) for r in reads)


Box = tuple[tuple[int, int], ...]
"""One ``(start, stop)`` per dim."""


def cut(box: Box, draw, depth: int) -> list[Box]:
    """The box cut in two again and again, anywhere."""
    dims = [dim for dim, (low, high) in enumerate(box) if high - low > 1]
    if not depth or not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    border = draw(st.integers(box[dim][0] + 1, box[dim][1] - 1))
    halves = [(*box[:dim], span, *box[dim + 1 :]) for span in ((box[dim][0], border), (border, box[dim][1]))]
    return [piece for half in halves for piece in cut(half, draw, depth - 1)]


PINWHEEL = [((0, 3), (0, 7)), ((0, 7), (7, 10)), ((7, 10), (3, 10)), ((3, 10), (0, 3)), ((3, 7), (3, 7))]


def spoilt(boxes: list[Box], draw) -> list[Box]:
    """Perhaps with a box left out, given twice, or a row longer."""
    index = draw(st.integers(0, len(boxes) - 1))
    (low, high), *rest = boxes[index] or ((0, 1),)
    ways = {"none": boxes, "out": boxes[:index] + boxes[index + 1 :], "twice": [*boxes, boxes[index]]}
    if boxes[index]:
        ways["longer"] = [*boxes[:index], ((low, high + 1), *rest), *boxes[index + 1 :]]
    return ways[draw(st.sampled_from(sorted(ways)))]


def naive(shape: list[int], boxes: list[Box], target: Box) -> str:
    """Every element of the target counted by hand."""
    seen = torch.zeros([n + 1 for n in shape] if shape else [], dtype=torch.int64)
    for box in boxes:
        seen[tuple(slice(*span) for span in box)] += 1
    counts = seen[tuple(slice(*span) for span in target)]
    return "overlap" if bool((counts > 1).any()) else "hold" if bool((counts == 0).any()) else "fits"


@pytest.mark.costly
@settings(max_examples=300)
@given(st.data())
def test_coverage_check_agrees_with_element_counting(data):
    shape = data.draw(st.lists(st.integers(1, 9), max_size=3))
    boxes = cut(tuple((0, n) for n in shape), data.draw, data.draw(st.integers(0, 5)))
    if data.draw(st.booleans()) and shape == [10, 10]:
        boxes = PINWHEEL
    boxes = data.draw(st.permutations(spoilt(boxes, data.draw)))
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    target = tuple((begin, data.draw(st.integers(begin + 1, n))) for begin, n in zip(low, shape, strict=True))
    region = Region(offset=tuple(low), size=tuple(b - a for a, b in target))
    full = torch.zeros([n + 1 for n in shape] if shape else [], dtype=torch.int32)
    try:
        reads = plan_reads(index_shards(write(full, boxes)[0]), {"w": region})
        verdict = "fits"
    except CorruptCheckpointError as error:
        verdict = next(word for word in ("overlap", "hold") if word in str(error))
    assert verdict == naive(shape, boxes, target)
    if verdict == "fits":
        assert sum(prod(b - a for a, b in read.target) for read in reads) == prod(region.size)


@pytest.mark.parametrize("moved", [0, 1], ids=["whole", "overlapping"])
def test_pinwheel_shards_are_checked_for_overlap(moved):
    boxes = [((0, 3), (0, 7 + moved)), *PINWHEEL[1:]]
    index = index_shards(write(torch.zeros(10, 10, dtype=torch.int32), boxes)[0])
    target = {"w": Region(offset=(0, 0), size=(10, 10))}
    if moved:
        with pytest.raises(CorruptCheckpointError, match=r"two stored shards overlap at \(0, 7\)"):
            plan_reads(index, target)
    else:
        assert len(plan_reads(index, target)) == 5


def lines_run(call) -> int:
    """Return the number of Python lines that a call runs, which does not depend on the load of the machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def grid(rows: int, columns: int) -> dict[str, list[StoredShard]]:
    """A tensor of ``rows * columns`` boxes, each in a file of its own."""
    offsets = [(row, column) for row in range(rows) for column in range(columns)]
    kinds = [shard_kind("U8", (rows, columns), offset, (1, 1)) for offset in offsets]
    return index_shards({"w": StoredShard(file=file, begin=0, kind=kind)} for file, kind in enumerate(kinds))


@pytest.mark.parametrize(
    ("small", "large"), [((500, 1), (2000, 1)), ((1, 500), (1, 2000)), ((20, 25), (40, 50))], ids=["rows", "columns", "grid"]
)
def test_plan_reads_cost_is_linear_in_shards(small, large):
    """Four times as many boxes are at most five times as much work, to read all of them; pairs would be sixteen times."""
    work = []
    for shape in (small, large):
        index = grid(*shape)
        everything = {"w": Region(offset=(0, 0), size=shape)}
        work.append(lines_run(lambda i=index, t=everything: plan_reads(i, t)))
    assert work[1] < 5 * work[0]


def test_plan_reads_reuses_plan_of_equal_tensors():
    def work(count: int) -> int:
        kind = shard_kind("F32", (8, 8), (0, 0), (8, 8))
        index = index_shards([{f"t{number}": StoredShard(file=0, begin=256 * number, kind=kind) for number in range(count)}])
        targets = {f"t{number}": Region(offset=(4, 0), size=(4, 8)) for number in range(count)}
        return lines_run(lambda: plan_reads(index, targets))

    for_the_first = work(1)
    assert (work(2000) - work(1000)) / 1000 < for_the_first / 4


def grid_of_rows(*spans: tuple[int, int]) -> dict[str, list[StoredShard]]:
    full = torch.arange(30, dtype=torch.int32).reshape(10, 3)
    return index_shards(write(full, [(span, (0, 3)) for span in spans])[0])


def test_plan_reads_covers_only_needed_rows():
    reads = plan_reads(grid_of_rows((0, 5), (5, 10)), {"w": Region(offset=(4, 1), size=(3, 1))})
    assert [(r.file, r.begin - HEADER, r.end - HEADER) for r in reads] == [(0, 48, 60), (1, 0, 24)]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (((0, 5),), "w: stored shards hold 15 of the 30 elements needed"),
        (((0, 4), (5, 10)), "w: stored shards hold 27 of the 30 elements needed"),
        (((0, 6), (5, 10)), "w: two stored shards overlap at"),
        (((0, 5), (0, 5)), "w: two stored shards overlap at"),
        ((), "w: stored shards hold 0 of the 30 elements needed"),
    ],
)
def test_gaps_and_overlaps_of_shards_are_refused(spans, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        plan_reads(grid_of_rows(*spans), {"w": Region(offset=(0, 0), size=(10, 3))})


def test_duplicate_scalar_shards_are_refused():
    shard = StoredShard(file=0, begin=0, kind=shard_kind("F32", (), (), ()))
    with pytest.raises(CorruptCheckpointError, match="two stored shards overlap"):
        plan_reads(index_shards([{"w": shard}, {"w": shard}]), {"w": Region(offset=(), size=())})


def read_of(begin: int, end: int) -> ReadItem:
    return ReadItem(0, begin, end, f"{begin}", (), (), (), 0)


# The drawn example of ``plan_fetches``: blocks of 8 bytes, and a limit of two blocks.
READS = [read_of(3, 5), read_of(10, 22), read_of(35, 37)]


def test_plan_fetches_reads_needed_blocks_once(monkeypatch):
    monkeypatch.setattr(data_file, "CHUNK_BYTES", 16)
    fetches = plan_fetches(Blocks([8, 16, 24, 32, 40], b""), READS, is_remote=False)
    assert [(fetch.begin, fetch.end, fetch.blocks) for fetch in fetches] == [
        (0, 16, range(2)), (16, 24, range(2, 3)), (32, 40, range(4, 5)),
    ]  # fmt: skip
    assert [[segment[:2] for segment in fetch.segments] for fetch in fetches] == [[(3, 5), (10, 16)], [(16, 22)], [(35, 37)]]


def test_plan_fetches_reads_small_gaps_from_a_server_and_blocks_to_verify():
    blocks = Blocks([8, 16, 24, 32, 40], b"")
    assert [fetch[:2] for fetch in plan_fetches(blocks, READS, is_remote=True)] == [(0, 40)]
    assert [fetch[:2] for fetch in plan_fetches(blocks, [], [(9, 10), (33, 34)], is_remote=False)] == [(8, 16), (32, 40)]


def test_plan_fetches_of_a_file_without_digests_are_chunks(monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_BYTES", 16)
    fetches = plan_fetches(None, READS, is_remote=False)
    assert [fetch[:3] for fetch in fetches] == [(0, 16, range(0)), (16, 32, range(0)), (32, 48, range(0))]
    assert [[segment[:2] for segment in fetch.segments] for fetch in fetches] == [[(3, 5), (10, 16)], [(16, 22)], [(35, 37)]]


def test_empty_region_needs_no_shards():
    assert plan_reads({}, {"w": Region(offset=(10, 0), size=(0, 3))}) == []


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([1, 2, 3, 4, 64])), max_size=30))
def test_assign_writers_balances_bytes(tensors):
    named = {f"t{replica}": tensor for replica, tensor in enumerate(tensors)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_WRITER_BYTES", 1)
        chosen = assign_writers(named)
        assert chosen == assign_writers(named)
    for copies in {c for _, c in tensors}:
        loads = dict.fromkeys(range(copies), 0)
        for key, (nbytes, c) in named.items():
            if c == copies:
                loads[chosen[key]] += nbytes
        assert set(loads) == set(range(copies)), "no number beyond the replicas"
        writers = {replica for replica in loads if replica % (copies // min(copies, plan.MAX_WRITERS)) == 0}
        assert all(load == 0 for replica, load in loads.items() if replica not in writers)
        if sum(loads.values()) >= plan.MAX_WRITERS:
            used = [loads[replica] for replica in writers]
            assert max(used) - min(used) <= 2 * max(n for n, c in tensors if c == copies)


def test_assign_writers_gives_small_tensors_to_few_replicas():
    tensors = {f"norm{number}": (256, 64) for number in range(100)} | {f"weight{number}": (2**22, 64) for number in range(64)}
    chosen = assign_writers(tensors)
    assert {chosen[f"norm{number}"] for number in range(100)} == {0}
    loads = [sum(tensors[key][0] for key in tensors if chosen[key] == replica) for replica in range(64)]
    assert [number for number, load in enumerate(loads) if load] == list(range(0, 64, 8)), "eight of 64, far apart"
    assert max(loads) - min(load for load in loads if load) <= 2**23


def test_assign_writers_leaves_a_small_state_to_one_replica():
    assert set(assign_writers({f"norm{number}": (1024, 512) for number in range(100)}).values()) == {0}
