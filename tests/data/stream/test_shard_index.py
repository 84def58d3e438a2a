"""Reading and writing of ``index.json``."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.data.stream.formats.compression import COMPRESSIONS, HASHES, compute_digests, new_hash
from dtrain.data.stream.formats.shard_format import FORMAT_NAMES, ShardEntry, ShardFile, get_format
from dtrain.data.stream.shard_index import guess_format, read_index, write_index
from dtrain.data.stream.shard_table import ShardTable
from dtrain.errors import ConfigError, DataError


def file_info(name: Any = "shard.00000.mds", size: Any = 10) -> dict[str, Any]:
    return {"basename": name, "bytes": size, "hashes": {}}


def shard(**changes: Any) -> dict[str, Any]:
    raw = {"raw_data": file_info(), "zip_data": None, "compression": None}
    return {"version": 2, "format": "mds", "samples": 3, "column_names": ["a"], **raw, **changes}


def text_of(*shards: Any, **changes: Any) -> bytes:
    return json.dumps({"version": 2, "shards": list(shards), **changes}).encode()


names = st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?\.x", fullmatch=True)
digests = st.dictionaries(st.sampled_from(HASHES), st.text("0123456789abcdef", min_size=8, max_size=8), max_size=2)
sizes = st.integers(0, 2**40)


@st.composite
def entries(draw: st.DrawFn) -> ShardEntry:
    kept: dict[str, Any] = {"name": draw(names), "size": draw(sizes), "digests": draw(digests)}
    if draw(st.booleans()):
        kept |= {"compression": draw(st.sampled_from(COMPRESSIONS)), "raw_size": draw(sizes), "raw_digests": draw(digests)}
        kept["raw_name"] = kept["name"].removesuffix(".x")
    else:
        kept |= {"raw_size": kept["size"], "raw_digests": kept["digests"], "raw_name": kept["name"]}
    details = {"hashes": ["sha1"], "compression": kept.get("compression"), "size_limit": None, "column_names": ["a", "b"]}
    form = draw(st.sampled_from(sorted(FORMAT_NAMES)))
    return ShardEntry(file=ShardFile(**kept), samples=draw(sizes), format=form, details=details)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(entries(), max_size=4, unique_by=lambda entry: entry.file.name))
def test_written_index_is_read_back(shards: list[ShardEntry]) -> None:
    assert list(read_index(write_index(shards))) == shards


def test_equal_details_are_stored_once() -> None:
    first, second = read_index(text_of(shard(), shard(raw_data=file_info("b"))))
    assert first.details is second.details
    assert first.details == {"column_names": ["a"], "compression": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x00\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"version": 2', "is not JSON"),
        (b"[]", "has no list of shards"),
        (b'{"version": 2, "shards": {}}', "has no list of shards"),
        (text_of(version=3), "version must be 2, got 3"),
        (b'{"shards": []}', "version must be 2, got None"),
        (text_of(shard(version=1)), "shard 0: version must be 2, got 1"),
        (text_of(shard(), 7), "shard 1: must be an object, got int"),
        (text_of(shard(format="csv")), "shard 0: format 'csv' is unknown. Use one of mds, parquet, jsonl, text, tar"),
        (text_of(shard(format=["mds"])), "format .* is unknown"),
        (text_of(shard(samples=-1)), "shard 0: samples must be a count, got -1"),
        (text_of(shard(samples=True)), "samples must be a count, got True"),
        (text_of(shard(samples=2.0)), "samples must be a count, got 2.0"),
        (text_of(shard(raw_data=file_info(size=-5))), "bytes must be a count, got -5"),
        (text_of(shard(raw_data=None)), "raw_data must have a file's name"),
        (text_of(shard(raw_data=file_info() | {"hashes": {"sha1": 3}})), "must be digests by algorithm"),
        (text_of(shard(), shard()), "shard 1: file 'shard.00000.mds' occurs twice"),
        (text_of(shard(zip_data=file_info("a.x"))), "compression must be a name, got None"),
        (text_of(shard(zip_data=file_info("a.x"), compression="lz4")), "compression 'lz4' is unknown"),
        (text_of(shard(zip_data=file_info("../a"), compression="gz")), "file '../a' is not in the dataset's folder"),
    ],
)
def test_invalid_index_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_index(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "a//x", "./x", "a/.", "", "..", "a\\..\\x", "a\0b", 3, None]
)
def test_file_outside_of_the_folder_is_refused(name: Any) -> None:
    with pytest.raises(DataError, match="is not in the dataset's folder"):
        read_index(text_of(shard(raw_data=file_info(name))))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.mds", ("mds", None)),
        ("a.mds.zstd", ("mds", "zstd")),
        ("train-0001.PARQUET", ("parquet", None)),
        ("x/y.jsonl.zst", ("jsonl", "zstd")),
        ("a.ndjson", ("jsonl", None)),
        ("a.txt.gz", ("text", "gz")),
        ("a.tar", ("tar", None)),
        ("a.tar.gz", ("tar", "gz")),
        ("a.tgz", ("tar", "gz")),
        ("index.json", None),
        ("README.md", None),
        (".gz", None),
        ("a.gz", None),
    ],
)
def test_format_is_guessed_from_the_name(name: str, expected: tuple[str, str | None] | None) -> None:
    assert guess_format(name) == expected


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"format 'csv' is unknown\. Use one of mds, parquet, jsonl, text, tar"):
        get_format("csv")
    assert [get_format(name).name for name in FORMAT_NAMES] == list(FORMAT_NAMES)


def test_digests_equal_reference_values() -> None:
    digests = compute_digests(b"abc", ["sha1", "md5", "xxh64", "sha3_256"])
    assert digests["sha1"] == "a9993e364706816aba3e25717850c26c9cd0d89d"
    assert digests["md5"] == "900150983cd24fb0d6963f7d28e17f72"
    assert digests["xxh64"] == "44bc2cf5ad770999"
    assert digests["sha3_256"] == "3a985da74fe225b2045c172d6bd390bd855f086e3e9d525b46bfe24511431532"


def test_unknown_hash_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hash 'crc32' is unknown\. Use one of xxh32, xxh64"):
        new_hash("crc32")


def test_table_in_a_file_is_the_same_and_damage_is_seen() -> None:
    whole = read_index(text_of(*runs("mds", 20), *compressed(runs("tar", 20))))
    out = whole.to_bytes()
    mapped = ShardTable.from_memory(memoryview(out))
    assert mapped is not None
    assert same_tables(mapped, whole)
    for end in range(0, len(out), 97):
        table = ShardTable.from_memory(memoryview(out[:end]))
        assert table is None or (end > len(out) - 64 and same_tables(table, whole))  # only padding is missing
    for byte in range(16, len(out), 61):
        damaged = out[:byte] + bytes([out[byte] ^ 4]) + out[byte + 1 :]
        assert (table := ShardTable.from_memory(memoryview(damaged))) is None or same_tables(table, whole)


def same_tables(one: ShardTable, other: ShardTable) -> bool:
    return list(one) == list(other) and (one.fingerprint, one.bytes_total) == (other.fingerprint, other.bytes_total)


def runs(form: str, count: int, **changes: Any) -> list[dict[str, Any]]:
    """Entries as writers make them: only names, numbers and digests differ."""
    shards = []
    for number in range(count):
        digests = compute_digests(b"%d" % number, ["sha1", "xxh64"])
        info = {"basename": f"{form}/shard.{number:05}.x", "bytes": 10 + 7 * number, "hashes": digests}
        shards.append(shard(format=form, raw_data=info, samples=3 + number % 5, hashes=["sha1", "xxh64"], **changes))
    return shards


def compressed(shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for shard in shards:
        raw = shard["raw_data"]
        packed = {"basename": raw["basename"] + ".zstd", "bytes": raw["bytes"] // 2, "hashes": compute_digests(b"z", ["md5"])}
        made.append(shard | {"compression": "zstd:3", "zip_data": packed})
    return made


@pytest.mark.parametrize(
    ("shards", "fingerprint"),
    [
        (runs("mds", 40), "2b9174d4a5c970a36c0604b7b8190281"),
        (compressed(runs("tar", 40)), "8c1a9717705195ceb0e4b31ca644f6bc"),
        (runs("mds", 20) + compressed(runs("mds", 40))[20:], "7d6dec6d3a9f8a68e7237839ac484d7b"),
        ([shard(raw_data=file_info(name)) for name in ("a", "ä", "x/y", "a'b")], "edd7d0502bde1ea7f23bec6db666443c"),
        ([shard(raw_data=file_info(f"s{n}", 10**18 - 1 - n)) for n in range(20)], "b47da854937d9a2d43851e42d859a29a"),
        (
            [shard(raw_data=file_info(f"s{n}") | {"hashes": {"sha1": f"AB{n}"}}, part=[n // 2]) for n in range(8)],
            "75c4ca4a30b638bf44ef7a48cea11a00",
        ),
        ([], "84f100e5817bc88aac104fa28cc7f5b2"),
    ],
    ids=["equal", "compressed", "mixed", "names", "large", "many kinds", "empty"],
)
def test_fingerprint_of_an_index_never_changes(shards: list[dict[str, Any]], fingerprint: str) -> None:
    """Checkpoints contain the fingerprint, so a resume with another release needs the same fingerprint."""
    assert read_index(text_of(*shards)).fingerprint == fingerprint
