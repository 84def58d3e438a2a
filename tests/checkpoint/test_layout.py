"""Names, manifest and index: all that is written is read again, and all else is refused."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dtrain.checkpoint import layout
from dtrain.checkpoint.index import (
    PartRun,
    RankIndex,
    RankParts,
    RunIndex,
    TensorKind,
    merge_parts,
    parse_rank_index,
    parse_run_index,
    place_shards,
)
from dtrain.checkpoint.layout import Blocks, TensorRef
from dtrain.checkpoint.tree_json import tensor_refs
from dtrain.errors import CheckpointError, CorruptCheckpointError

RUN = "0123456789abcdef" * 2
FILES = layout.RankFiles(5, "a" * 64, (64,))
KIND = TensorKind(dtype="F32", shape=(4, 3), file=0, runs=(PartRun(0, 0, 1, (2, 0), (0, 0), (2, 3)),))
RUN_INDEX = RunIndex(files=(FILES,), kinds=(KIND,), tensors=(1,), inline=b"", local_buffers=False, shared={"seed": 0})
RUN_DATA = layout.encode_index(RUN_INDEX, layout.INDEX)
MANIFEST = layout.Manifest(
    run_id=RUN,
    step=100,
    parent_step=None,
    serial=1,
    layout=layout.MeshLayout(strategy="full_shard", axes=("dp_replicate", "dp_shard"), shape=(1, 1)),
    scope="all",
    states=(),
    world_size=1,
    bytes=len(RUN_DATA) + 5 + 64,
    index_bytes=len(RUN_DATA),
    index_sha256=hashlib.sha256(RUN_DATA).hexdigest(),
)
INDEX = RankIndex(digest=layout.DIGEST, rank=0, begins=[16], per_rank=[], blocks=(Blocks([40, 64], "b" * 64),), values={"x": 1})


def signed(body: dict) -> bytes:
    body = {key: value for key, value in body.items() if key != "sha256"}
    return json.dumps({**body, "sha256": hashlib.sha256(layout.canonical_json(body)).hexdigest()}, indent=1).encode() + b"\n"


def changed(**changes) -> dict:
    return {**json.loads(layout.encode_manifest(MANIFEST)), **changes}


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, parent_step=3, step=10**9),
        replace(MANIFEST, scope="weights", states=("generator", "critic")),
        replace(MANIFEST, scope="trainable", world_size=2**20, index_bytes=0),
    ],
    ids=["whole", "with a parent", "model of two states", "many ranks"],
)
def test_manifest_round_trips(manifest):
    assert layout.parse_manifest(layout.encode_manifest(manifest)) == manifest


def test_indexes_round_trip():
    run_index = parse_run_index(RUN_DATA, MANIFEST)
    assert layout.encode_index(run_index, layout.INDEX) == RUN_DATA
    of_rank = parse_rank_index(layout.encode_index(INDEX, layout.index_name(0)), 0, FILES)
    assert layout.encode_index(of_rank, layout.index_name(0)) == layout.encode_index(INDEX, layout.index_name(0))
    assert place_shards(of_rank, run_index, {}).begins_of([0]) == [16]


def test_any_changed_bit_of_manifest_is_detected():
    data = layout.encode_manifest(MANIFEST)
    for byte in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[byte] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
                layout.parse_manifest(bytes(altered))
    for cut in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            layout.parse_manifest(data[:cut])


BAD_MANIFESTS = {
    "unknown field": changed(more=1),
    "missing field": {k: v for k, v in changed().items() if k != "serial"},
    "foreign format": changed(format="other"),
    "version of no number": changed(version="1"),
    "version that is true": changed(version=True),
    "run id": changed(run_id="../../etc"),
    "step": changed(step=-1),
    "step of no number": changed(step=1.0),
    "step that is true": changed(step=True),
    "parent": changed(parent_step="3"),
    "layout": changed(layout={"strategy": "full_shard"}),
    "axes": changed(layout={"strategy": "x", "axes": [1], "shape": []}),
    "no ranks": changed(world_size=0),
    "too many ranks": changed(world_size=2**40),
    "ranks of no number": changed(world_size=[1]),
    "digest": changed(index_sha256="A" * 64),
    "size": changed(index_bytes=-1),
    "size of a disk": changed(index_bytes=2**40),
    "bytes": changed(bytes=-1),
    "scope": changed(scope="optimizer"),
    "what of no text": changed(scope=["weights"]),
    "states of no text": changed(states=[1]),
    "a state twice": changed(states=["a", "a"]),
}


@pytest.mark.parametrize("body", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS)
def test_invalid_manifest_is_refused(body):
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: "):
        layout.parse_manifest(signed(body))


@pytest.mark.parametrize("version", [3, 5])
def test_manifest_of_another_version_is_refused_and_not_reported_as_corruption(version):
    message = f"format version must be 4, got {version}. Use the dtrain version that wrote the file."
    with pytest.raises(CheckpointError, match=message) as caught:
        layout.parse_manifest(signed(changed(version=version, unheard_of=[])))
    assert not isinstance(caught.value, CorruptCheckpointError)


def index_with(**changes) -> bytes:
    return json.dumps({**json.loads(layout.encode_index(INDEX, layout.index_name(0))), **changes}).encode()


def blocks_with(**changes) -> bytes:
    return index_with(blocks=[{**json.loads(layout.encode_index(INDEX, layout.index_name(0)))["blocks"][0], **changes}])


BAD_INDEXES = {
    "unknown field": index_with(more=1),
    "rank": index_with(rank=1),
    "no blocks": index_with(blocks=[]),
    "digest of no hex": blocks_with(digests="x" * 64),
    "digest": blocks_with(digests="b" * 63),
    "digests of no file": index_with(blocks=json.loads(layout.encode_index(INDEX, layout.index_name(0)))["blocks"] * 2),
    "blocks beyond the file": blocks_with(ends=[40, 65]),
    "blocks far beyond": blocks_with(ends=[2**70, 64]),
    "blocks backwards": blocks_with(ends=[50, 40, 64], digests="b" * 96),
    "an empty block": blocks_with(ends=[40, 40, 64], digests="b" * 96),
    "no block": blocks_with(ends=[], digests=""),
    "block field": blocks_with(more=1),
    "kind of digest": index_with(digest="crc32"),
    "format": index_with(format=layout.FORMAT),
    "bytes before": index_with(begins=[-8]),
    "bytes outside": index_with(begins=[48]),
    "bytes far outside": index_with(begins=[2**70]),
    "a byte that is true": index_with(begins=[True]),
    "no begin": index_with(begins=[]),
    "a begin that is longer": index_with(begins=[16, 40]),
    "begins of no list": index_with(begins=16),
    "a tensor of no value": index_with(per_rank=[0]),
    "a value without a tensor": index_with(values={"x": "$tensor U8 [3]"}),
    "bytes of two shards": index_with(values={"x": "$tensor U8 [3]"}, per_rank=[39]),
    "a tensor of 2**60 bytes": index_with(values={"x": f"$tensor U8 [{2**40}, {2**40}]"}, per_rank=[0]),
}


def read_rank_index(data: bytes) -> None:
    index = parse_rank_index(data, 0, FILES)
    place_shards(index, RUN_INDEX, tensor_refs(index.values, ""))


@pytest.mark.parametrize("data", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_invalid_index_of_a_rank_is_refused(data):
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.json: |values: x"):
        read_rank_index(data)


def test_block_larger_than_a_chunk_is_refused(monkeypatch):
    monkeypatch.setattr(layout, "CHUNK_BYTES", 32)
    with pytest.raises(CorruptCheckpointError, match="a block must have 1 to 32 bytes, got 24 to 40"):
        parse_rank_index(layout.encode_index(INDEX, layout.index_name(0)), 0, FILES)


def run_with(**changes) -> bytes:
    return json.dumps({**json.loads(RUN_DATA), **changes}).encode()


def kind_with(**changes) -> bytes:
    return run_with(kinds=[{**json.loads(RUN_DATA)["kinds"][0], **changes}])


def parts_with(*runs: list) -> bytes:
    return kind_with(runs=runs)


BAD_RUN_INDEXES = {
    "unknown field": run_with(more=1),
    "format": run_with(format=layout.FORMAT),
    "no shared": run_with(shared=None),
    "shared of no dict": run_with(shared=[]),
    "no files": run_with(files=[]),
    "files of no list": run_with(files={}),
    "another rank": run_with(files=[[5, "a" * 64, [64]]] * 2),
    "file field": run_with(files=[[5, "a" * 64, [64], 1]]),
    "index digest": run_with(files=[[5, "A" * 64, [64]]]),
    "no data file": run_with(files=[[5, "a" * 64, []]]),
    "three data files": run_with(files=[[5, "a" * 64, [64, 0, 0]]]),
    "size": run_with(files=[[5, "a" * 64, [-1]]]),
    "size of a disk": run_with(files=[[5, "a" * 64, [2**63]]]),
    "sum of sizes": run_with(files=[[5, "a" * 64, [65]]]),
    "dtype": kind_with(dtype="C64"),
    "kind field": kind_with(more=1),
    "file of a kind": kind_with(file=1),
    "third file of a kind": kind_with(file=2),
    "dims": kind_with(shape=[4]),
    "part outside": parts_with([0, 0, 1, [3, 0], [0, 0], [2, 3]]),
    "part before": parts_with([0, 0, 1, [-1, 0], [0, 0], [2, 3]]),
    "empty part": parts_with([0, 0, 1, [2, 0], [0, 0], [0, 3]]),
    "parts that leave": parts_with([0, 1, 2, [2, 0], [1, 0], [2, 3]]),
    "parts that go back": parts_with([0, 1, 2, [0, 0], [-1, 0], [2, 3]]),
    "a rank outside": parts_with([1, 0, 1, [2, 0], [0, 0], [2, 3]]),
    "the same rank twice": parts_with(*[[0, 0, 1, [2, 0], [0, 0], [2, 3]]] * 2),
    "one rank many times": parts_with([0, 0, 2, [0, 0], [2, 0], [2, 3]]),
    "very many parts": parts_with([0, 1, 2**19, [0, 0], [0, 0], [2, 3]]),
    "a field of a run": parts_with([0, 0, 1, [2, 0], [0, 0], [2, 3], 1]),
    "no such kind": run_with(tensors=[2]),
    "a kind before the first": run_with(tensors=[-1]),
    "a kind that is true": run_with(tensors=[True]),
    "no base64": run_with(inline="!"),
    "base64 of no ASCII": run_with(inline="é"),
    "base64 of half a surrogate pair": run_with(inline="\ud800"),
    "unknown field of half a surrogate pair": run_with(**{"\ud800": 1}),
    "a flag of no truth": run_with(local_buffers=1),
}


@pytest.mark.parametrize("data", BAD_RUN_INDEXES.values(), ids=BAD_RUN_INDEXES)
def test_invalid_index_of_the_run_is_refused(data):
    total = len(data) + 5 + 64
    with pytest.raises(CorruptCheckpointError, match=r"index.json: "):
        parse_run_index(data, replace(MANIFEST, bytes=total, index_bytes=len(data)))


def test_rank_with_two_parts_of_a_tensor_is_refused():
    two = TensorKind(dtype="F32", shape=(4, 3), file=0, runs=(*KIND.runs, PartRun(0, 0, 1, (0, 0), (0, 0), (2, 3))))
    with pytest.raises(CorruptCheckpointError, match="a rank must have at most one part of a tensor"):
        two.parts_in((0, 0), (4, 3))


def test_later_index_version_is_refused():
    with pytest.raises(CheckpointError, match="format version must be 4, got 7"):
        parse_rank_index(index_with(version=7), 0, FILES)
    with pytest.raises(CheckpointError, match="format version must be 4, got 7"):
        parse_run_index(run_with(version=7), MANIFEST)


@pytest.mark.parametrize("field", json.loads(layout.encode_index(INDEX, layout.index_name(0))))
def test_index_of_a_rank_without_a_field_is_refused(field):
    body = json.loads(layout.encode_index(INDEX, layout.index_name(0)))
    del body[field]
    with pytest.raises(CorruptCheckpointError):
        parse_rank_index(json.dumps(body).encode(), 0, FILES)


def test_oversized_index_is_not_written(monkeypatch):
    monkeypatch.setattr(layout, "MAX_JSON_BYTES", 10)
    for index in (INDEX, RUN_INDEX):
        with pytest.raises(CheckpointError, match=r"must be at most 10 bytes, got .*. Store large plain data as tensors"):
            layout.encode_index(index, "index.json")


@given(st.data())
def test_merged_parts_are_those_that_the_ranks_have_written(data):
    """Any boxes of any ranks: the index has, for each rank and tensor, the box that the rank has written."""
    draw = data.draw
    world, count = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    keys = [f"t{index}" for index in range(count)]
    refs = {key: TensorRef(dtype="F32", shape=(draw(st.sampled_from([8, 64])), 4), distributed=True) for key in keys}
    box = st.tuples(st.just(0), st.tuples(st.integers(0, 6), st.just(0)), st.tuples(st.integers(1, 2), st.just(4)))
    rows = st.integers(0, 3).map(lambda rank_rows: (0, (rank_rows, 0), (1, 4)))
    written = [
        {key: draw(st.one_of(box, rows)) for key in keys if draw(st.booleans())} if draw(st.booleans()) else
        {key: (0, (min(rank, 7), 0), (1, 4)) for key in keys}
        for rank in range(world)
    ]  # fmt: skip
    reports = [RankParts.decode(json.loads(json.dumps(RankParts.of(keys, parts).encode()))) for parts in written]
    kinds, tensors = merge_parts(refs, (), reports)
    for key, number in zip(keys, tensors, strict=True):
        kind = kinds[number - 1]
        assert (kind.dtype, kind.shape) == ("F32", refs[key].shape)
        regions = {rank: region for rank in range(world) if (region := kind.part_of(rank)) is not None}
        assert {rank: (0, region.offset, region.size) for rank, region in regions.items()} == {
            rank: parts[key] for rank, parts in enumerate(written) if key in parts
        }
        assert sorted(kind.parts_in((0, 0), kind.shape)) == sorted(regions.items())


def test_parts_of_many_ranks_are_few_runs():
    refs = {"w": TensorRef(dtype="F32", shape=(11008, 4096), distributed=True)}
    parts = [RankParts.of(["w"], {"w": (0, (22 * rank, 0), (22, 4096))} if rank < 500 else {}) for rank in range(512)]
    kinds, tensors = merge_parts(refs, (), parts)
    assert tensors == (1,)
    assert len(kinds[0].runs) == 1


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 10**12])
def test_step_names_round_trip_and_sort(step):
    assert layout.step_of(layout.step_name(step)) == step
    assert layout.step_name(7) < layout.step_name(10) < layout.step_name(99_999_999)


@pytest.mark.parametrize(
    "name",
    ["step-1", "step-000000001", "step-00000001.tmp-0123abcd-0123abcd", "step-0000000x", "latest", "step-" + "\u0660" * 8],
)
def test_invalid_step_names_are_not_parsed(name):
    assert layout.step_of(name) is None


def test_staging_names_are_recognized():
    for purpose in ("tmp", "old"):
        name = layout.staging_name(100, purpose, RUN, "0123abcd")
        assert layout.step_of(name) is None
        assert layout.is_staging_name(name)
    assert not layout.is_staging_name(layout.step_name(100))
