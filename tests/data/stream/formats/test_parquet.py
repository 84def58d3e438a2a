"""Parquet: values, columns, and the bytes that are read and cached."""

import io
import multiprocessing
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtrain.data.stream.formats.shard_format import Shard, ShardEntry, ShardFile, get_format
from dtrain.data.stream.open_shards import ByteLRU
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.errors import ConfigError, DataError
from places.opened import Held, entry_for, opened, rows


def file_of(table: pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def numbers(count: int, **options: Any) -> bytes:
    return file_of(pa.table({"n": list(range(count)), "pad": [bytes(100)] * count}), **options)


VALUES = {
    "int": (pa.array([1, None, -(2**63)]), [1, None, -(2**63)]),
    "float32": (pa.array([0.5, -1.0], pa.float32()), [0.5, -1.0]),
    "bool": (pa.array([True, False]), [True, False]),
    "text": (pa.array(["a\u2028b", ""]), ["a\u2028b", ""]),
    "bytes": (pa.array([b"\x00", b""]), [b"\x00", b""]),
    "date": (pa.array([date(2020, 1, 2)]), [date(2020, 1, 2)]),
    "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    "struct": (pa.array([{"a": 1, "b": ["x"]}]), [{"a": 1, "b": ["x"]}]),
    "texts": (pa.array([["a", None], []]), [["a", None], []]),
    "nested": (pa.array([[[1], [2, 3]]]), [[[1], [2, 3]]]),
    "with a hole": (pa.array([[1, None, 2], None]), [[1, None, 2], None]),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_plain_python_objects(name: str) -> None:
    array, expected = VALUES[name]
    values = [sample["x"] for sample in rows(opened(file_of(pa.table({"x": array})), "parquet"))]
    assert values == expected
    assert [type(value) for value in values] == [type(value) for value in expected]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 3)], ids=str)
def test_list_of_numbers_is_a_writable_array(kind: pa.DataType) -> None:
    data = file_of(pa.table({"x": pa.array([[1, 2, 3], [4, 5, 6]], kind)}))
    shard = opened(data, "parquet")
    array = shard[1]["x"]
    assert (type(array), array.dtype, array.tolist()) == (np.ndarray, np.int32, [4, 5, 6])
    array += 1
    assert shard[1]["x"].tolist() == [4, 5, 6]


def test_every_column_compression_is_read() -> None:
    expected = rows(opened(numbers(50), "parquet"))
    for compression in ("none", "snappy", "gzip", "zstd", "brotli"):
        assert rows(opened(numbers(50, compression=compression), "parquet")) == expected


def test_excluded_columns_are_omitted_and_unknown_columns_refused() -> None:
    assert opened(numbers(5), "parquet", columns=["n"])[3] == {"n": 3}
    with pytest.raises(ConfigError, match="no column 'm'; the columns are n, pad"):
        opened(numbers(5), "parquet", columns=["m"])


def test_count_reads_the_footer_and_a_sample_its_row_group() -> None:
    data = numbers(10_000, row_group_size=100, use_dictionary=False, compression="none")
    source = Held(data)
    samples, details = get_format("parquet").count(source)
    assert (samples, details) == (10_000, {})
    shard = get_format("parquet").open(source, entry_for(data, "parquet"), {})
    source.reads = source.most = 0
    assert shard[5555]["n"] == 5555
    assert source.most < len(data) // 50
    reads = source.reads
    assert [shard[row]["n"] for row in range(5500, 5600)] == list(range(5500, 5600))
    assert source.reads == reads  # of a row group that is kept
    shard.close()


def opened_with(decoded: ByteLRU, data: bytes, **options: Any) -> Shard:
    return get_format("parquet").open(Held(data), entry_for(data, "parquet"), options, decoded=decoded)


def test_row_group_cache_of_all_shards_has_one_bound() -> None:
    decoded = ByteLRU()
    shards = [opened_with(decoded, numbers(1000, row_group_size=100), row_group_cache_bytes=25_000) for _ in range(3)]
    for row in range(0, 1000, 50):
        for shard in shards:
            assert shard[row]["n"] == row
            assert 0 < decoded.size <= 25_000
    assert 1 <= len(decoded._values) <= 2
    for shard in shards:
        shard.close()
    assert decoded.size == 0
    assert not decoded._values


def test_row_groups_of_a_deleted_shard_are_evicted_first() -> None:
    decoded = ByteLRU()
    gone = opened_with(decoded, numbers(100))
    gone[0]
    before, (owner, _) = decoded.size, next(iter(decoded._values))
    del gone
    shard = opened_with(decoded, numbers(200, row_group_size=100), row_group_cache_bytes=before * 5 // 2)
    assert (shard[0]["n"], shard[100]["n"]) == (0, 100)
    assert [number for _, number in decoded._values] == [0, 1]
    assert all(key[0] is not owner for key in decoded._values)
    shard.close()
    assert decoded.size == 0


def test_row_group_larger_than_the_bound_is_kept_alone() -> None:
    source, decoded = Held(data := numbers(1000)), ByteLRU()
    shard = get_format("parquet").open(source, entry_for(data, "parquet"), {"row_group_cache_bytes": 1}, decoded=decoded)
    shard[0]
    reads = source.reads
    assert [shard[row]["n"] for row in range(1000)] == list(range(1000))
    assert source.reads == reads
    shard.close()
    assert decoded.size == 0


def test_dataset_is_readable_after_fork_with_a_locked_cache(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.parquet").write_bytes(numbers(300, row_group_size=100))
    dataset = ShardedDataset(tmp_path / "data", cache=tmp_path / "cache")
    assert dataset[0]["n"] == 0
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sender.send([dataset[row]["n"] for row in (0, 150, 299)])
    )
    # Another thread may hold the locks at the moment of the fork.
    with dataset._decoded._lock, dataset._opened._lock:
        child.start()
    assert receiver.poll(90)
    assert receiver.recv() == [0, 150, 299]
    child.join(90)
    assert child.exitcode == 0
    dataset.close()


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all", b"PAR1" + bytes(100) + b"PAR1"], ids=repr)
def test_non_parquet_bytes_are_refused(data: bytes) -> None:
    entry = ShardEntry(file=ShardFile(name="s.parquet", size=len(data)), samples=0, format="parquet")
    with pytest.raises(DataError, match="is not a Parquet file, or truncated") as caught:
        get_format("parquet").open(Held(data), entry, {})
    assert "\n" not in str(caught.value)


def test_truncated_file_is_refused_at_every_tenth_length() -> None:
    data = numbers(20)
    entry = entry_for(data, "parquet")
    for length in range(0, len(data), 10):
        with pytest.raises(DataError, match="is not a Parquet file, or truncated"):
            get_format("parquet").open(Held(data[:length]), entry, {})


def test_damaged_page_fails_only_its_own_samples() -> None:
    data = bytearray(numbers(300, row_group_size=100, compression="zstd", use_dictionary=False))
    data[4:60] = bytes(56)
    shard = opened(bytes(data), "parquet")
    with pytest.raises((OSError, pa.ArrowException)):
        shard[0]
    assert shard[200]["n"] == 200
    shard.close()


def test_row_count_that_differs_from_the_index_is_refused() -> None:
    data = numbers(5)
    with pytest.raises(DataError, match="has 5 rows, but the index has 6"):
        get_format("parquet").open(Held(data), ShardEntry(file=ShardFile(name="s", size=1), samples=6, format="parquet"), {})


def test_duplicate_column_names_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataError, match="column names must be unique"):
        opened(file_of(table), "parquet")


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    entry = ShardEntry(file=ShardFile(name="s", size=1), samples=1, format="parquet")
    with pytest.raises(ConfigError, match=r'pip install "dtrain\[parquet\]"'):
        get_format("parquet").check(entry, {})


@pytest.mark.parametrize("row", [-1, 5])
def test_row_out_of_range_and_closed_shard_are_refused(row: int) -> None:
    shard = opened(numbers(5), "parquet")
    with pytest.raises(IndexError, match=f"row {row} of 5, open"):
        shard[row]
    shard.close()
    with pytest.raises(IndexError, match="row 0 of 5, closed"):
        shard[0]
