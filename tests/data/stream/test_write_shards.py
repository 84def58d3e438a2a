"""Writing of datasets in every format."""

import json
import os
import string
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtrain.data.stream.formats.mds import infer_encoding
from dtrain.data.stream.shard_index import read_index
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError
from places.opened import samples_of, shards_of

ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
text = st.text(max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)  # JSON has no other
leaves = st.none() | st.booleans() | st.integers() | finite | text
plain = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
halves = arrays.arrays(np.int8, arrays.array_shapes(max_dims=3, max_side=4)).map(lambda array: (array / 8).astype(np.float16))
vectors = arrays.arrays(np.int32, st.integers(1, 40))
keys = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=8).filter(lambda key: not key.startswith("__"))

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a file that is synced costs no time

SAMPLES: dict[str, Any] = {
    "mds": st.fixed_dictionaries(
        {
            "bytes": st.binary(max_size=30),
            "str": text,
            "int": ints,
            "float": floats,
            "flag": st.booleans(),
            "list": st.lists(plain, max_size=3),
            "dict": st.dictionaries(text, plain, max_size=3),
            "digits": st.builds(lambda digits, places: Decimal(digits).scaleb(places), ints, st.integers(-9, 9)),
            "array": halves,
            "scalar": ints.map(np.int64),
        }
    ),
    "parquet": st.fixed_dictionaries(
        {
            "bytes": st.binary(max_size=30),
            "str": text,
            "int": ints,
            "float": floats,
            "flag": st.booleans(),
            "array": vectors,
            "texts": st.lists(text, min_size=1, max_size=3),
            "struct": st.fixed_dictionaries({"a": ints, "b": text}),
        }
    ),
    "jsonl": st.dictionaries(text, plain, min_size=1, max_size=4),
    "text": st.fixed_dictionaries({"text": text.map(lambda line: line.replace("\n", " ").rstrip("\r"))}),
    "tar": st.fixed_dictionaries(
        {
            "txt": text,
            "cls": st.integers(),
            "x.npy": arrays.arrays(
                np.float32, arrays.array_shapes(max_dims=2, max_side=4, min_side=0), elements={"allow_nan": False}
            ),
            "meta.json": plain,
            "bin": st.binary(max_size=600),
        }
    ),
}


def same(ours: Any, given: Any) -> bool:
    if isinstance(given, np.ndarray):
        return type(ours) is np.ndarray and ours.dtype == given.dtype and np.array_equal(ours, given)
    if isinstance(given, dict):
        return sorted(ours) == sorted(given) and all(same(ours[name], given[name]) for name in given)
    return bool(ours == given)


@pytest.mark.parametrize("form", SAMPLES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), limit=st.sampled_from([1, 1000, None]), compression=st.sampled_from([None, "zstd:1", "gz"]))
def test_written_samples_are_read_back(form: str, data: st.DataObject, limit: int | None, compression: str | None) -> None:
    samples = data.draw(st.lists(SAMPLES[form], min_size=1, max_size=5))
    if form == "tar":
        chosen = data.draw(st.lists(keys, min_size=len(samples), max_size=len(samples), unique=True))
        samples = [{"__key__": key, **sample} for key, sample in zip(chosen, samples, strict=True)]
    with TemporaryDirectory(dir=MEMORY) as folder:
        summary = write_shards(samples, folder + "/data", format=form, max_shard_bytes=limit, compression=compression)
        read = samples_of(Path(folder) / "data")
        files = sorted(path.name for path in (Path(folder) / "data").iterdir())
    assert len(read) == len(samples)
    assert all(map(same, read, samples))
    assert (summary.samples, summary.shards) == (len(samples), len(files) - 1)
    assert summary.shards == (len(samples) if limit == 1 else summary.shards if limit else 1)


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("mds", ["shard.00000.mds.zstd", "shard.00001.mds.zstd"]),
        ("jsonl", ["shard.00000.jsonl.zst", "shard.00001.jsonl.zst"]),
        ("text", ["shard.00000.txt.zst", "shard.00001.txt.zst"]),
        ("parquet", ["shard.00000.parquet", "shard.00001.parquet"]),
    ],
)
def test_files_are_numbered_and_the_index_describes_them(form: str, names: list[str], tmp_path: Path) -> None:
    samples = [{"text": "word " * 1000} for _ in range(2)]
    told: list[tuple[int, int]] = []
    summary = write_shards(
        samples, tmp_path, format=form, max_shard_bytes=6000, compression="zstd", on_progress=lambda *done: told.append(done)
    )
    entries = read_index((tmp_path / "index.json").read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "index.json"])
    assert [entry.file.name for entry in entries] == names
    assert [entry.samples for entry in entries] == [1, 1]
    assert all(list(entry.file.digests) == ["xxh64"] for entry in entries)
    assert summary.stored_bytes == sum((tmp_path / name).stat().st_size for name in names)
    assert summary.raw_bytes == sum(entry.file.raw_size or 0 for entry in entries)
    assert [count for count, _ in told] == [1, 2]
    assert told[0][1] < told[1][1]


def test_equal_samples_give_equal_files(tmp_path: Path) -> None:
    rows = [{"text": "a", "cls": number} for number in range(5)]
    for form in ("mds", "parquet", "jsonl", "tar"):
        samples = [{"txt": row["text"], "cls": row["cls"]} for row in rows] if form == "tar" else rows
        for who in ("one", "other"):
            write_shards(samples, tmp_path / form / who, format=form, compression=None if form == "parquet" else "gz")
        one, other = ({path.name: path.read_bytes() for path in (tmp_path / form / who).iterdir()} for who in ("one", "other"))
        assert one == other


def test_tensors_are_written_as_arrays(tmp_path: Path) -> None:
    sample = {"tokens": torch.arange(5), "weight": torch.tensor(0.5)}
    write_shards([sample], tmp_path, format="mds")
    (read,) = samples_of(tmp_path)
    assert (read["tokens"].tolist(), float(read["weight"])) == ([0, 1, 2, 3, 4], 0.5)
    assert (read["tokens"].dtype, read["weight"].dtype) == (np.int64, np.float32)


def test_archive_without_keys_is_numbered(tmp_path: Path) -> None:
    write_shards([{"txt": "a"}, {"txt": "b"}], tmp_path, format="tar")
    assert [sample["__key__"] for sample in samples_of(tmp_path)] == ["000000000", "000000001"]


def test_lone_surrogate_is_written_as_json(tmp_path: Path) -> None:
    write_shards([{"a": "\ud800", "b": "é"}], tmp_path, format="jsonl")
    assert samples_of(tmp_path) == [{"a": "\ud800", "b": "é"}]


def test_parquet_has_row_groups_of_a_few_megabytes_and_takes_types(tmp_path: Path) -> None:
    samples = [{"x": np.arange(2**16, dtype=np.int32), "n": number, "f": None if number else 1.0} for number in range(40)]
    write_shards(samples, tmp_path, format="parquet", columns={"x": "list<int32>", "n": "int16", "f": "float"})
    (shard,) = shards_of(tmp_path)
    assert [shard[row]["n"] for row in range(40)] == list(range(40))
    assert [shard[row]["f"] for row in range(2)] == [1.0, None]
    assert 2 <= len(shard._starts) - 1 <= 4  # of 10 MB
    shard.close()


LISTS: dict[str, tuple[list[Any], list[list[Any]]]] = {
    "numbers": ([[1], (2,), range(3), {4}, np.arange(2), torch.tensor(5)[None]], [[1], [2], [0, 1, 2], [4], [0, 1], [5]]),
    "0-d": ([[1], [torch.tensor(2), np.array(3), np.int8(4), pa.scalar(5)]], [[1], [2, 3, 4, 5]]),
    "whole numbers as floats": ([[0.5], [1], np.arange(2)], [[0.5], [1.0], [0.0, 1.0]]),
    "flags": ([[True], np.zeros(1, bool), [np.True_]], [[True], [False], [True]]),
    "texts": ([["a"], np.array(["b"]), ["c", None]], [["a"], ["b"], ["c", None]]),
    "nothing": ([[1], [], np.array([]), [None]], [[1], [], [], [None]]),
    "arrow": ([[1], pa.array([2, 3])], [[1], [2, 3]]),
}


@pytest.mark.parametrize("name", LISTS)
def test_parquet_lists_of_one_type_are_kept(name: str, tmp_path: Path) -> None:
    values, expected = LISTS[name]
    write_shards([{"a": value} for value in values], tmp_path / "out", format="parquet")
    assert [list(sample["a"]) for sample in samples_of(tmp_path / "out")] == expected


REFUSED: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "no samples": ("mds", [], {}, "samples must not be empty"),
    "no mapping": ("mds", [3], {}, "sample 0: must be a mapping of names to values, got int: '3'"),
    "empty mapping": ("jsonl", [{}], {}, "sample 0: must be a mapping of names"),
    "unknown format": ("csv", [{"a": 1}], {}, "format 'csv' is unknown"),
    "unknown hash": ("mds", [{"a": 1}], {"hashes": ["crc"]}, "hash 'crc' is unknown"),
    "unknown compression": ("mds", [{"a": 1}], {"compression": "lz4"}, "compression 'lz4' is unknown"),
    "no limit": ("mds", [{"a": 1}], {"max_shard_bytes": 0}, "max_shard_bytes=0 must be at least 1 and below 4 GiB"),
    "great limit": ("mds", [{"a": 1}], {"max_shard_bytes": 2**32}, "must be at least 1 and below 4 GiB"),
    "no columns": ("mds", [{"a": 1}], {"columns": {}}, "leaves nothing to write"),
    "typed lines": ("jsonl", [{"a": 1}], {"columns": {"a": "int"}}, "format jsonl has no typed columns"),
    "unknown encoding": ("mds", [{"a": 1}], {"columns": {"a": "intt"}}, "column 'a': encoding 'intt' is unknown"),
    "other columns": ("mds", [{"a": 1}, {"b": 1}], {}, "sample 1: columns must be a, got b"),
    "other type": ("mds", [{"a": 1}, {"a": "x"}], {}, "sample 1, column 'a': 'str' object cannot be interpreted"),
    "too large an int": ("mds", [{"a": 1}, {"a": 2**63}], {}, "sample 1, column 'a': int too big"),
    "a fraction": ("mds", [{"a": 1.5}], {"columns": {"a": "int8"}}, "must be of type int8, got 1.5"),
    "other dtype": ("mds", [{"a": np.zeros(1)}, {"a": np.zeros(1, "f4")}], {}, "dtype must be float64, got float32"),
    "other shape": ("mds", [{"a": np.zeros(2)}], {"columns": {"a": "ndarray:float64:3"}}, r"shape must be \(3,\), got"),
    "empty array": ("mds", [{"a": np.zeros(0)}], {}, "and at least one element, got"),
    "strange dtype": ("mds", [{"a": np.zeros(2, "c16")}], {}, "type ndarray has no default encoding. Pass columns"),
    "no encoding": ("mds", [{"a": {1}}], {}, "type set has no default encoding"),
    "no json": ("mds", [{"a": [object()]}], {}, "sample 0, column 'a': Object of type object is not JSON"),
    "no jpegs": ("mds", [{"a": []}], {"columns": {"a": "jpeg_array"}}, "jpeg_array must have an image"),
    "no image": ("mds", [{"a": 3}], {"columns": {"a": "png"}}, "must be an image or the bytes of an image, got int"),
    "nan line": ("jsonl", [{"a": float("nan")}], {}, "sample 0: JSON cannot store it: Out of range"),
    "object line": ("jsonl", [{"a": b""}], {}, "sample 0: JSON cannot store it: .*bytes"),
    "two texts": ("text", [{"text": "a", "b": 1}], {}, "text must have one column 'text'"),
    "no text": ("text", [{"text": 3}], {}, "text must have one column 'text'"),
    "two lines": ("text", [{"text": "a\nb"}], {}, "the text contains a line end. Use jsonl"),
    "carriage return": ("text", [{"text": "a\r"}], {}, "the text contains a line end"),
    "half a pair": ("text", [{"text": "\ud800"}], {}, "column 'text': 'utf-8' codec can't encode"),
    "untyped": ("parquet", [{"a": None}], {}, "column 'a': None has no definite type. Pass columns"),
    "unknown type": ("parquet", [{"a": 1}], {"columns": {"a": "intt"}}, "column 'a': No type alias for intt"),
    "struct with more": ("parquet", [{"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}], {}, "must be a mapping of b"),
    "text as bytes": ("parquet", [{"a": b"x"}, {"a": "x"}], {}, "sample 1, column 'a': must be of type binary, got str"),
    "flag as number": ("parquet", [{"a": 1}, {"a": True}], {}, "must be of type int64, got bool"),
    "strange list": ("parquet", [{"a": [1]}, {"a": ["x"]}], {}, "sample 1, column 'a': must be a list of int64, got str in it"),
    "fraction in a list": ("parquet", [{"a": [1]}, {"a": [2, 3.5]}], {}, "must be a list of int64, got float in it"),
    "fraction in an array": ("parquet", [{"a": np.arange(2)}, {"a": np.array([0.5])}], {}, "list of int64, got float64 in it"),
    "fraction in a tensor": ("parquet", [{"a": torch.arange(2)}, {"a": torch.ones(1)}], {}, "list of int64, got float32 in it"),
    "list of 0-d tensors": ("parquet", [{"a": [1]}, {"a": [torch.tensor(0.5)]}], {}, "list of int64, got float32 in it"),
    "typed list": ("parquet", [{"a": [0.25]}], {"columns": {"a": "list<int32>"}}, "must be a list of int32, got float in it"),
    "list of lists": ("parquet", [{"a": [[1]]}, {"a": [[2], [0.5]]}], {}, "must be a list of int64, got float in it"),
    "list in a struct": ("parquet", [{"a": {"b": [1]}}, {"a": {"b": [0.5]}}], {}, "must be a list of int64, got float in it"),
    "decimals in a list": ("parquet", [{"a": [1]}, {"a": [Decimal("0.5")]}], {}, "must be a list of int64, got Decimal in it"),
    "flags in an array": ("parquet", [{"a": [1]}, {"a": np.ones(1, bool)}], {}, "must be a list of int64, got bool in it"),
    "letters of a text": ("parquet", [{"a": ["x"]}, {"a": "yz"}], {}, "must be a list of string, got str"),
    "number for a list": ("parquet", [{"a": [1]}, {"a": 2}], {}, "must be a list of int64, got int"),
    "matrix": ("parquet", [{"a": np.zeros((2, 2))}], {}, "1-dimensional"),
    "bz2 parts": ("parquet", [{"a": 1}], {"compression": "bz2"}, "Parquet does not support bz2"),
    "no ending": (
        "tar",
        [{"a": 1}],
        {},
        "column 'a': int has no encoding of that name. Pass bytes, or use json, txt",
    ),
    "wrong ending": ("tar", [{"a.json": {1}}], {}, "sample 0, column 'a.json': Object of type set"),
    "pickle": ("tar", [{"a.pkl": b""}], {}, "a reader would unpickle it"),
    "capital": ("tar", [{"TXT": "a"}], {}, "must be a file suffix in lower case"),
    "only a key": ("tar", [{"__key__": "a"}], {}, "must have a column besides __key__"),
    "dot in key": ("tar", [{"__key__": "a.b", "txt": ""}], {}, "without a dot in its last part, got 'a.b'"),
    "key outside": ("tar", [{"__key__": "../a", "txt": ""}], {}, "without a dot in its last part, got '../a'"),
    "key twice": ("tar", [{"__key__": "a", "txt": ""}] * 2, {}, "sample 1: __key__='a' must differ from the previous sample"),
    "no array": ("tar", [{"a.npy": [1]}], {}, "must be an array, got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_sample_is_refused_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    form, samples, options, message = REFUSED[name]
    good = [{"a": 1}] if name == "other" else []
    with pytest.raises(ConfigError, match=message) as caught:
        write_shards([*good, *samples], tmp_path / "out", format=form, **{"max_shard_bytes": 1, **options})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_folder_with_content_is_refused_and_unchanged(tmp_path: Path) -> None:
    write_shards([{"text": "a"}], tmp_path / "data", format="text")
    with pytest.raises(ConfigError, match="has a dataset already"):
        write_shards([{"text": "b"}], tmp_path / "data", format="text")
    assert samples_of(tmp_path / "data") == [{"text": "a"}]
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        write_shards([{"text": "b"}], tmp_path, format="text")
    assert (tmp_path / "note").read_text() == "mine"


def test_error_of_the_samples_propagates_and_leaves_no_shard(tmp_path: Path) -> None:
    class BrokenError(Exception):
        pass

    def samples() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        yield {"a": 2}
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "_unfinished",
            "shard.00000.mds",
        ]  # a full shard is written at once
        raise BrokenError

    with pytest.raises(BrokenError):
        write_shards(samples(), tmp_path, format="mds", max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_second_writer_in_one_folder_is_refused(tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        with pytest.raises(ConfigError, match="has a dataset that is incomplete, because its writer still runs or was killed"):
            write_shards([{"a": 10}], tmp_path, format="mds")  # the other one
        yield {"a": 2}

    write_shards(samples(), tmp_path, format="mds")
    assert samples_of(tmp_path) == [{"a": 1}, {"a": 2}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shard.00000.mds"]


def test_leftover_of_a_killed_writer_is_no_dataset(tmp_path: Path) -> None:
    """Killed between two shards: the process that writes is a fork, and does not come back."""
    pid = os.fork()
    if pid == 0:
        write_shards(
            ({"a": number} if number < 2 else os._exit(9) for number in range(3)), tmp_path, format="mds", max_shard_bytes=1
        )
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert (tmp_path / "shard.00000.mds").exists()
    with pytest.raises(ConfigError, match=r"is incomplete\. If its writer was killed"):
        ShardedDataset(tmp_path)


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_failing_disk_is_named_and_leaves_no_dataset(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    from dtrain.storage import local

    calls = 0

    class Failing:
        def __getattr__(self, name: str) -> Any:
            if name not in {"write": ("write", "pwritev"), "fsync": ("fsync",)}[failing]:
                return getattr(os, name)

            def fail(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls >= 3:
                    raise OSError(28, "No space left on device")
                return getattr(os, name)(*args)

            return fail

    monkeypatch.setattr(local, "os", Failing())
    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device"):
        write_shards([{"a": number} for number in range(10)], tmp_path / "out", format="mds", max_shard_bytes=1)
    monkeypatch.undo()
    assert calls >= 3
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        ("x", "str"),
        (b"x", "bytes"),
        (1, "int"),
        (1.0, "float64"),
        (True, "json"),
        (None, "json"),
        ([1], "json"),
        ({"a": 1}, "json"),
        (Decimal(1), "str_decimal"),
        (np.float16(1), "float16"),
        (np.zeros((), "uint8"), "uint8"),
        (np.zeros((1, 2), "int16"), "ndarray:int16"),
    ],
    ids=lambda value: repr(value) if not isinstance(value, str) else value,
)
def test_encoding_is_inferred_from_the_value(value: Any, encoding: str) -> None:
    assert infer_encoding(value) == encoding


def test_index_equals_the_index_of_mosaicml_streaming(tmp_path: Path) -> None:
    write_shards([{"a": 1}], tmp_path, format="mds", compression="zstd:7", hashes=["xxh64", "sha1"], max_shard_bytes=None)
    (shard,) = json.loads((tmp_path / "index.json").read_text())["shards"]
    assert (shard["compression"], shard["hashes"], shard["size_limit"]) == ("zstd:7", ["sha1", "xxh64"], None)
    assert (shard["column_names"], shard["column_encodings"], shard["column_sizes"]) == (["a"], ["int"], [8])
