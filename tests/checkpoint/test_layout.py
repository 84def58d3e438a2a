"""Names, manifest and index: everything written is read again, and everything else is refused."""

import hashlib
import json

import pytest
from msgspec.structs import replace

from dtrain.checkpoint import layout, strict_json
from dtrain.checkpoint.rank_index import RankIndex, StoredShard, encode_index, parse_index, shard_kind
from dtrain.errors import CheckpointError, CorruptCheckpointError

RUN = "0123456789abcdef" * 2
FILES = layout.RankFiles(
    index="rank-00000.json",
    index_bytes=5,
    index_sha256="a" * 64,
    data=(layout.DataFile(name="rank-00000.safetensors", bytes=64),),
)
MANIFEST = layout.Manifest(
    run_id=RUN,
    step=100,
    parent_step=None,
    serial=1,
    layout=layout.MeshLayout(strategy="full_shard", axes=("dp_replicate", "dp_shard"), shape=(1, 1)),
    what="all",
    states=(),
    ranks=(FILES,),
)
SHARD = StoredShard(file=0, begin=16, kind=shard_kind("F32", (4, 3), (2, 0), (2, 3)))
INDEX = RankIndex(rank=0, shards={"params/w": SHARD}, per_rank={}, chunks=(("b" * 32,),), values={"x": 1}, shared={"seed": 0})


def signed(body: dict) -> bytes:
    body = {key: value for key, value in body.items() if key != "sha256"}
    return (
        json.dumps({**body, "sha256": hashlib.sha256(strict_json.canonical_json(body)).hexdigest()}, indent=1).encode() + b"\n"
    )


def changed(**changes) -> dict:
    return {**json.loads(layout.encode_manifest(MANIFEST)), **changes}


def rank_files(**changes) -> list:
    return [{**changed()["ranks"][0], **changes}]


def data_file(**changes) -> list:
    return [{**changed()["ranks"][0]["data"][0], **changes}]


FROZEN = layout.DataFile(name="rank-00000-frozen.safetensors", bytes=0)


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, parent_step=3, step=10**9),
        replace(MANIFEST, what="weights", states=("generator", "critic")),
        replace(MANIFEST, what="trainable", ranks=(replace(FILES, data=(*FILES.data, FROZEN)),)),
    ],
    ids=["whole", "with a parent", "model of two states", "two files"],
)
def test_manifest_round_trips(manifest):
    assert layout.parse_manifest(layout.encode_manifest(manifest)) == manifest


def test_index_round_trips():
    assert parse_index(encode_index(INDEX), 0, [64]) == INDEX


def test_any_changed_bit_of_manifest_is_detected():
    data = layout.encode_manifest(MANIFEST)
    for at in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[at] ^= 1 << bit
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
    "no ranks": changed(ranks=[]),
    "ranks of no list": changed(ranks={}),
    "path upwards": changed(ranks=rank_files(data=data_file(name="../rank-00000.safetensors"))),
    "absolute path": changed(ranks=rank_files(index="/etc/passwd")),
    "file of another rank": changed(ranks=rank_files(data=data_file(name="rank-00001.safetensors"))),
    "digest": changed(ranks=rank_files(index_sha256="A" * 64)),
    "size": changed(ranks=rank_files(data=data_file(bytes=-1))),
    "file field": changed(ranks=rank_files(more=1)),
    "data file field": changed(ranks=rank_files(data=data_file(more=1))),
    "no data file": changed(ranks=rank_files(data=[])),
    "a data file twice": changed(ranks=rank_files(data=data_file() * 2)),
    "a third data file": changed(
        ranks=rank_files(data=[*data_file(), *data_file(name="rank-00000-frozen.safetensors"), *data_file()])
    ),
    "what": changed(what="optimizer"),
    "what of no text": changed(what=["weights"]),
    "states of no text": changed(states=[1]),
    "a state twice": changed(states=["a", "a"]),
}


@pytest.mark.parametrize("body", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS)
def test_invalid_manifest_is_refused(body):
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json: "):
        layout.parse_manifest(signed(body))


def test_later_manifest_version_is_not_reported_as_corruption():
    with pytest.raises(CheckpointError, match="format version must be 1, got 2") as caught:
        layout.parse_manifest(signed(changed(version=2, unheard_of=[])))
    assert not isinstance(caught.value, CorruptCheckpointError)


def index_with(**changes) -> bytes:
    return json.dumps({**json.loads(encode_index(INDEX)), **changes}).encode()


def kind_with(**changes) -> bytes:
    kind = json.loads(encode_index(INDEX))["kinds"][0]
    return index_with(kinds=[{**kind, **changes}])


def columns_with(**changes) -> bytes:
    return index_with(shards={**json.loads(encode_index(INDEX))["shards"], **changes})


BAD_INDEXES = {
    "unknown field": index_with(more=1),
    "rank": index_with(rank=1),
    "chunk size": index_with(chunk_bytes=1),
    "number of chunks": index_with(chunks=[]),
    "chunk digest": index_with(chunks=[["b" * 31]]),
    "digests of no file": index_with(chunks=[["b" * 32], []]),
    "kind of digest": index_with(digest="crc32"),
    "file of a kind": kind_with(file=1),
    "no shared": index_with(shared=None),
    "shared of no dict": index_with(shared=[]),
    "format": index_with(format=layout.FORMAT),
    "kind field": kind_with(more=1),
    "dtype": kind_with(dtype="C64"),
    "box outside": kind_with(offset=[3, 0]),
    "dims": kind_with(offset=[0]),
    "negative": kind_with(offset=[-1, 0]),
    "more bytes than the file": kind_with(shape=[2**70, 3], offset=[0, 0], size=[2**70, 3]),
    "bytes before": columns_with(begins=[-8]),
    "bytes outside": columns_with(begins=[48]),
    "bytes far outside": columns_with(begins=[2**70]),
    "a byte that is true": columns_with(begins=[True]),
    "no such kind": columns_with(kinds=[9]),
    "a kind before the first": columns_with(kinds=[-1]),
    "key": columns_with(keys=[3]),
    "a key twice": columns_with(keys=["params/w"] * 2, kinds=[0, 0], begins=[0, 24]),
    "a column that is longer": columns_with(begins=[16, 40]),
    "a column of no list": columns_with(keys="params/w"),
    "another column": columns_with(more=[0]),
    "bytes of two shards": columns_with(keys=["params/w", "params/v"], kinds=[0, 0], begins=[16, 39]),
    "shards of no object": index_with(shards=[]),
}


@pytest.mark.parametrize("data", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_invalid_index_is_refused(data):
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.json: "):
        parse_index(data, 0, [64])


def test_later_index_version_is_refused():
    with pytest.raises(CheckpointError, match="format version must be 1, got 7"):
        parse_index(index_with(version=7), 0, [64])


def test_oversized_index_is_not_written(monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"must be at most 10 bytes, got .*. Store large plain data as tensors"):
        encode_index(INDEX)


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
