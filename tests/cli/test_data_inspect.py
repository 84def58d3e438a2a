"""``dtrain data inspect``: its description of a dataset, and the problems that ``--verify`` reports."""

import json
import os
import pickle
import re
import shlex

import numpy as np
import pytest

from dtrain import storage
from dtrain.cli.data import format_sample_value
from dtrain.data.stream.write_shards import write_shards
from mutations import flip_bits

ROWS = [{"text": f"row {i}", "tokens": np.arange(12, dtype=np.uint16)} for i in range(20)]
COLUMNS = {"text": "str", "tokens": "ndarray:uint16:12"}


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """A dataset named ``shards`` in the current folder: MDS, compressed, in several files."""
    monkeypatch.chdir(tmp_path)
    write_shards(
        ROWS, "shards", format="mds", columns=COLUMNS, compression="zstd", hashes=("xxh64", "sha1"), max_shard_bytes=500
    )
    return tmp_path / "shards"


def names(folder):
    return sorted(name for name in os.listdir(folder) if name != "index.json")


def test_inspect_prints_index_summary(data, shards):
    code, out, err = data("inspect", "shards")
    lines = out.splitlines()
    count = len(names(shards))
    assert (code, err) == (0, "")
    assert lines[0] == f"{shards}: mds in {count} shards"
    assert re.fullmatch(r"samples  20, \d to \d per shard", lines[1])
    assert re.fullmatch(r"size     [0-9.]+ (B|KiB) \(zstd; [0-9.]+ (B|KiB) raw\)", lines[2])
    assert lines[3:] == ["digests  sha1, xxh64", "", "column  encoding", "text    str", "tokens  ndarray:uint16:12"]


def test_inspect_reads_only_the_index_by_default(data, shards):
    for name in names(shards):
        (shards / name).unlink()
    assert data("inspect", "shards", "--shards")[0] == 0
    code, out, err = data("inspect", "shards", "--head", "1")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("dtrain: data: inspect: ")
    assert "shard.00000.mds.zstd: is missing" in err


def test_head_prints_first_samples(data, shards):
    out = data("inspect", "shards", "--head", "2")[1]
    assert out.endswith(
        "sample 0\n  text: 'row 0'\n  tokens: uint16 [12]: 0 1 2 3 4 5 6 7 ...\n\n"
        "sample 1\n  text: 'row 1'\n  tokens: uint16 [12]: 0 1 2 3 4 5 6 7 ...\n"
    )


def test_json_has_stable_fields(data, shards):
    report = json.loads(data("inspect", "shards", "--json", "--head", "1")[1])
    assert list(report) == [
        *(
            "url",
            "path",
            "indexed",
            "formats",
            "shards",
            "samples",
            "smallest",
            "largest",
            "bytes",
            "raw_bytes",
            "compressions",
        ),
        *("digests", "without_digests", "lengths", "columns", "files", "head", "problems"),
    ]
    assert {"url": "shards", "path": str(shards), "indexed": True, "formats": ["mds"], "samples": 20}.items() <= report.items()
    assert (report["columns"], report["problems"], len(report["files"])) == (COLUMNS, None, report["shards"])
    first = report["files"][0]
    assert list(first) == ["name", "format", "samples", "bytes", "raw_bytes", "compression", "digests"]
    assert (first["name"], first["compression"], first["digests"]) == ("shard.00000.mds.zstd", "zstd", ["sha1", "xxh64"])
    assert report["bytes"] == sum((shards / name).stat().st_size for name in names(shards))


def test_verify_compares_all_digests_and_decodes_all_samples(data, shards):
    code, out, _ = data("inspect", "shards", "--verify")
    assert (code, out.splitlines()[-1]) == (0, "ok: every digest compared, every sample decoded")
    assert json.loads(data("inspect", "shards", "--verify", "--json")[1])["problems"] == []


def test_verify_reports_shards_without_digests(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards(ROWS[:3], "shards", format="mds", columns=COLUMNS, hashes=())
    out = data("inspect", "shards", "--verify")[1]
    assert "digests  none\n" in out
    assert out.endswith("ok: no digests of 1 shard, every sample decoded\n")


DAMAGE = {
    "a flipped bit": (
        lambda path: flip_bits(path, 0.5, 4),
        r"(xxh64|sha1) is [0-9a-f]+, the index has [0-9a-f]+|zstd: cannot be unpacked: .*",
    ),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes, the index has \d+"),
    "gone": (lambda path: path.unlink(), r"is missing, but the index has it\. .*"),
}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(("harm", "expected"), DAMAGE.values(), ids=DAMAGE)
def test_verify_names_every_damaged_shard(data, tmp_path, monkeypatch, compression, harm, expected):
    monkeypatch.chdir(tmp_path)
    write_shards(ROWS, "shards", format="mds", columns=COLUMNS, compression=compression, max_shard_bytes=500)
    files = names("shards")
    for name in (files[0], files[2]):
        harm(tmp_path / "shards" / name)
    code, out, err = data("inspect", "shards", "--verify")
    first, second, verdict = out.splitlines()[-3:]
    assert (code, err) == (1, "")
    assert re.fullmatch(rf"{re.escape(files[0])}: ({expected})", first)
    assert re.fullmatch(rf"{re.escape(files[2])}: ({expected})", second)
    assert verdict == f"2 shards of {len(files)} damaged"
    assert [problem["file"] for problem in json.loads(data("inspect", "shards", "--verify", "--json")[1])["problems"]] == files[
        0:3:2
    ]


def test_verify_finds_undecodable_sample(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards([{"text": "aaaa"}, {"text": "bbbb"}], "shards", format="mds", hashes=())
    path = tmp_path / "shards" / "shard.00000.mds"
    path.write_bytes(path.read_bytes().replace(b"bbbb", b"b\xffbb"))
    code, out, _ = data("inspect", "shards", "--verify")
    assert code == 1
    assert "shard.00000.mds: sample 1 cannot be decoded: UnicodeDecodeError: " in out


def test_pickled_column_is_refused_unless_allowed(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards([{"x": {1, 2}}], "shards", format="mds", columns={"x": "pkl"})
    assert pickle.dumps({1, 2})  # the content of the file
    code, out, err = data("inspect", "shards", "--verify")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "column 'x' is pickled" in err
    assert data("inspect", "shards", "--verify", "--head", "1", "--allow-pickle")[:2][0] == 0


def test_folder_without_index_is_counted(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n{"a": 2}\n')
    code, out, err = data("inspect", ".")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{tmp_path}: jsonl in 2 shards, without an index"
    assert out.splitlines()[1].startswith("samples  4, ")
    assert data("inspect", "a.jsonl")[1].startswith(f"{tmp_path / 'a.jsonl'}: jsonl in 1 shard")


def test_remote_dataset_is_inspected_and_verified(data):
    root = "memory://data-inspect/shards"
    write_shards(ROWS, root, format="mds", columns=COLUMNS, max_shard_bytes=500)
    try:
        code, out, _ = data("inspect", root, "--head", "1", "--verify")
        assert (code, out.splitlines()[-1]) == (0, "ok: every digest compared, every sample decoded")
        storage.remove_file(storage.resolve_path(root) / "shard.00001.mds")
        code, out, _ = data("inspect", root, "--verify")
        assert (code, out.splitlines()[-2]) == (
            1,
            "shard.00001.mds: is missing, but the index has it. Restore the file, or write the dataset again.",
        )
    finally:
        storage.remove_folder(storage.resolve_path(root))


def test_inspect_changes_no_files(data, shards):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in shards.rglob("*")}
    data("inspect", "shards", "--verify", "--head", "3")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in shards.rglob("*")} == before


MISTAKES = {
    "an empty URL": ("''", "URL must not be empty. Name the folder of shards."),
    "no folder": ("nope", ""),
    "nothing there": ("empty", ""),
    "an unknown format": ("shards --format hdf5", "--format must be 'mds', 'parquet', 'jsonl', 'text' or 'tar', got 'hdf5'"),
    "another format": ("shards --format tar", ""),
    "a number": ("shards --head few", "--head must be an integer of at least 0, got 'few'"),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(data, shards, args, expected):
    (shards.parent / "empty").mkdir()
    code, out, err = data("inspect", *shlex.split(args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dtrain: data: inspect: {expected}")


VALUES = {
    "text with a line end": ("a\nb\x1b[2J", r"'a\nb\x1b[2J'"),
    "long text": ("x" * 1000, "'" + "x" * 95 + " ..."),
    "bytes": (b"\x00ab", r"3 bytes: b'\x00ab'"),
    "a number": (7, "7"),
    "a scalar array": (np.float32(0.5), "float32 []: 0.5"),
    "an array": (np.zeros((2, 2), np.int8), "int8 [2, 2]: 0 0 0 0"),
    "a list": ([1, {"a": None}], "[1, {'a': None}]"),
}


@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES)
def test_sample_value_is_formatted_as_short_line(value, expected):
    assert format_sample_value(value) == expected


def test_closed_stdout_is_no_error(data, shards, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)  # as Python has it then
    code, _, err = data("inspect", "shards", "--shards", "--head", "1")
    assert (code, err) == (0, "")
