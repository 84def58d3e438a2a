"""Reads carried out: any boxes, dtypes and chunks into any part of a tensor, every byte verified, none fetched twice."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.stored import index_shards
from dtrain import storage
from dtrain.checkpoint import data_file as digest_module
from dtrain.checkpoint import fetch, layout, plan
from dtrain.checkpoint.data_file import OpenedFile
from dtrain.checkpoint.index import StoredShard, shard_kind
from dtrain.checkpoint.layout import DTYPES, Blocks, TensorRef
from dtrain.checkpoint.plan import Region, plan_tensors
from dtrain.errors import CorruptCheckpointError


class Files:
    """Data files in a folder, with digests or without, and which byte ranges of them were fetched."""

    def __init__(self, folder: Path, contents: list[bytes], *, digests: bool, block: int = 512) -> None:
        self.folder, self.digests, self.fetched = folder, digests, []
        self.blocks = []
        for number, data in enumerate(contents):
            ends = [*range(block, len(data), block), len(data)] if data else []
            hexes = (xxhash.xxh3_128_hexdigest(data[max(0, end - 1) // block * block : end]) for end in ends)
            self.blocks.append(Blocks(ends, "".join(hexes)))
            (folder / str(number)).write_bytes(data)

    @contextmanager
    def open(self, number: int) -> Iterator[OpenedFile]:
        fetched = self.fetched

        class Watched(storage.FileReader):
            def read_into(self, begin: int, out: memoryview) -> int:
                fetched.append((number, begin, begin + len(out)))
                return super().read_into(begin, out)

        with Watched(self.folder / str(number)) as file:
            yield OpenedFile(file=file, name=f"file {number}", blocks=self.blocks[number] if self.digests else None)


@pytest.fixture
def small(monkeypatch):
    """Make chunks and the limit of large tensors so small that small files have several of each."""

    def set_sizes(chunk: int, large: int, read: int, threaded: int) -> None:
        for module in (layout, digest_module):
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(fetch, "_DIRECT_MIN_BYTES", large)
        monkeypatch.setattr(fetch, "_MIN_THREADED_FETCHES", threaded)
        monkeypatch.setattr(plan, "MAX_STRIDED_READ_BYTES", read)

    return set_sizes


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_read_tensors_fills_any_region_from_any_shards(tmp_path_factory, small, data):
    draw = data.draw
    chunk = draw(st.sampled_from([16, 64, 1000, 2**20]))
    small(
        chunk, draw(st.sampled_from([8, 100, 2**16])),
        draw(st.sampled_from([10, 100, 2**20])), draw(st.sampled_from([2, 1000])),
    )  # fmt: skip
    contents = [bytearray(draw(st.binary(max_size=20))) for _ in range(2)]
    tensors, parts = {}, []
    for number in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(["F32", "I64", "U8", "BF16", "BOOL"]))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        count = torch.Size(shape).numel()
        full = (torch.arange(count) + 17 * number).reshape(shape).to(DTYPES[dtype])
        tensors[f"t{number}"] = full
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=1))}) for n in shape]
        for spans in itertools.product(*(list(itertools.pairwise(marks)) for marks in cuts)):
            box = full[tuple(slice(*span) for span in spans)].contiguous()
            if box.numel():
                file = draw(st.integers(0, 1))
                content = contents[file]
                content += bytes(-len(content) % 8) if draw(st.booleans()) else b""  # files of others may lie anyhow
                begin = len(content)
                content += box.reshape(-1).view(torch.uint8).numpy().tobytes()
                offset = tuple(low for low, _ in spans)
                size = tuple(box.shape)
                parts.append({f"t{number}": StoredShard(file, begin, shard_kind(dtype, shape, offset, size))})
    refs = {
        key: TensorRef(dtype=layout.DTYPE_NAMES[t.dtype], shape=tuple(t.shape), distributed=False) for key, t in tensors.items()
    }
    targets = {}
    for key, tensor in tensors.items():
        low = [draw(st.integers(0, n)) for n in tensor.shape]
        size = [draw(st.integers(0, n - first)) for n, first in zip(tensor.shape, low, strict=True)]
        targets[key] = Region(offset=tuple(low), size=tuple(size))
    block = min(chunk, draw(st.sampled_from([8, 40, 512])))
    files = Files(tmp_path_factory.mktemp("files"), list(map(bytes, contents)), digests=draw(st.booleans()), block=block)
    landed = fetch.read_tensors(plan_tensors(lambda _: index_shards(parts), targets, refs), files.open)
    for key, region in targets.items():
        wanted = tensors[key][tuple(slice(first, first + n) for first, n in zip(region.offset, region.size, strict=True))]
        assert landed[key].dtype == wanted.dtype
        assert torch.equal(landed[key], wanted), key
        assert landed[key].untyped_storage().nbytes() == landed[key].nbytes, "each has memory of its own"
    fetched = sorted(files.fetched)
    for (file, _, end), (next_file, begin, _) in itertools.pairwise(fetched):
        assert file != next_file or end <= begin, "no byte is fetched twice"


def two_tensors(tmp_path, *, digests: bool = True) -> tuple[Files, dict, dict]:
    """A small tensor and one of several chunks, behind a header; their boxes and descriptions."""
    tensors = {"small": torch.arange(10), "large": torch.arange(300)}
    data = bytes(24) + b"".join(t.numpy().tobytes() for t in tensors.values())
    shards = {
        "small": StoredShard(file=0, begin=24, kind=shard_kind("I64", (10,), (0,), (10,))),
        "large": StoredShard(file=0, begin=104, kind=shard_kind("I64", (300,), (0,), (300,))),
    }
    refs = {key: TensorRef(dtype="I64", shape=tuple(t.shape), distributed=False) for key, t in tensors.items()}
    return Files(tmp_path, [data], digests=digests), index_shards([shards]), refs


def landed(files: Files, boxes: dict, refs: dict, **targets: Region) -> dict[str, torch.Tensor]:
    return fetch.read_tensors(plan_tensors(lambda _: boxes, targets, refs), files.open)


@pytest.mark.parametrize("share", ["most", "few"])
def test_shareable_tensors_are_views_unless_most_of_a_chunk_would_be_kept_for_nothing(tmp_path, small, share):
    small(2504, 2**16, 2**20, 1000)
    files, boxes, refs = two_tensors(tmp_path)
    regions = {key: Region(offset=(0,), size=(count,)) for key, count in (("small", 10), ("large", 300))}
    read = fetch.read_tensors(
        plan_tensors(lambda _: boxes, regions, refs),
        files.open,
        shareable={"most": ["large"], "few": ["small"]}[share],
    )
    assert torch.equal(read["small"], torch.arange(10))
    assert torch.equal(read["large"], torch.arange(300))
    own = {key for key, tensor in read.items() if tensor.untyped_storage().nbytes() == tensor.nbytes}
    assert own == ({"small"} if share == "most" else {"small", "large"})


@pytest.mark.parametrize("large", [8, 2**16], ids=["direct", "buffered"])
def test_read_tensors_fetches_each_needed_chunk_once(tmp_path, small, large):
    small(512, large, 2**20, 1000)
    files, boxes, refs = two_tensors(tmp_path)
    landed(files, boxes, refs, large=Region(offset=(60,), size=(100,)))  # bytes 584 to 1384: chunks 1 and 2
    assert sorted(files.fetched)[0][1] == 512
    assert sorted(files.fetched)[-1][2] == 1536
    assert sum(end - begin for _, begin, end in files.fetched) == 1024


def test_read_tensors_fetches_exact_bytes_without_digests(tmp_path, small):
    small(512, 2**16, 2**20, 1000)
    files, boxes, refs = two_tensors(tmp_path, digests=False)
    landed(files, boxes, refs, large=Region(offset=(60,), size=(100,)), small=Region(offset=(2,), size=(3,)))
    assert sum(end - begin for _, begin, end in files.fetched) == 800 + 24


@pytest.mark.parametrize("threaded", [1, 1000], ids=["threads", "no threads"])
@pytest.mark.parametrize("large", [8, 2**16], ids=["direct", "buffered"])
def test_changed_bit_in_chunk_is_detected(tmp_path, small, large, threaded):
    small(512, large, 2**20, threaded)
    files, boxes, refs = two_tensors(tmp_path)
    path = tmp_path / "0"
    sound = path.read_bytes()
    for byte in (0, 23, 24, 103, 104, 511, 512, 2503):
        altered = bytearray(sound)
        altered[byte] ^= 1
        path.write_bytes(altered)
        everything = {key: Region(offset=(0,), size=ref.shape) for key, ref in refs.items()}
        with pytest.raises(
            CorruptCheckpointError, match=rf"file 0: bytes from {byte // 512 * 512} on do not match their digest"
        ):
            landed(files, boxes, refs, **everything)


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("size", [2000, 100, 0])
def test_truncated_file_is_reported(tmp_path, small, digests, size):
    small(512, 8, 2**20, 1)
    files, boxes, refs = two_tensors(tmp_path, digests=digests)
    path = tmp_path / "0"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptCheckpointError, match=r"file 0: (must have at least \d+ bytes, ends at byte \d+|bytes from)"):
        landed(files, boxes, refs, large=Region(offset=(0,), size=(300,)))
