"""Small files that would be large in memory or on the disk are refused, for every format and compression."""

import bz2
import gzip
import io
import tarfile

import numpy as np
import pytest

from dtrain.data.stream.formats.compression import compress
from dtrain.data.stream.formats.mds import ENCODINGS
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError

MIB = 2**20


def zeros(name, size):
    """``size`` zeros, compressed."""
    if name == "bz2":
        return bz2.compress(bytes(MIB)) * (size // MIB)
    if name == "gz":
        return gzip.compress(bytes(MIB)) * (size // MIB)
    return compress(name, bytes(size))


def folder_with(tmp_path, name, data):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(data)
    return folder


SUFFIXES = {"gz": "gz", "bz2": "bz2", "zstd": "zst", "br": "br", "snappy": "snappy"}


@pytest.mark.parametrize("name", SUFFIXES)
def test_decompression_of_a_file_without_an_index_stops_at_the_bound(name, tmp_path, opened, monkeypatch):
    from dtrain.data.stream.shard_cache import PartialFile

    written = []
    original = PartialFile.write
    monkeypatch.setattr(PartialFile, "write", lambda file, data: written.append(len(data)) or original(file, data))
    folder = folder_with(tmp_path, f"a.txt.{SUFFIXES[name]}", zeros(name, 32 * MIB))
    with pytest.raises(DataError, match=r"decompresses to more than 1048576 bytes. .*, or is larger than max_shard_bytes$"):
        opened(folder, max_shard_bytes=MIB)
    assert sum(written) <= 2 * MIB  # of two tries


def test_large_shard_in_the_index_is_refused_before_a_read(tmp_path, opened):
    write_shards(({"x": "a" * 1000} for _ in range(100)), str(tmp_path / "data"), format="mds", compression="gz")
    with pytest.raises(ConfigError, match=r"bytes after decompression, more than max_shard_bytes=1000. Raise it"):
        opened(tmp_path / "data", max_shard_bytes=1000)


def archive(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return out.getvalue()


def saved(save, *args, **options):
    out = io.BytesIO()
    save(out, *args, **options)
    return out.getvalue()


def image(kind, size=(1000, 1000)):
    Image = pytest.importorskip("PIL.Image")
    return saved(Image.new("RGB", size).save, format=kind)


def refused(dataset, name):
    """The first sample is fine, the second sample is refused by its size."""
    assert dataset[0]
    expected = rf"{name}: sample 1 cannot be decoded: ValueError: it has \d+ bytes, more than max_sample_bytes=1048576. Raise"
    with pytest.raises(DataError, match=expected):
        dataset[1]
    assert dataset[2]


MEMBERS = {
    "npz": lambda: saved(np.savez_compressed, a=np.zeros(16 * MIB, np.uint8)),
    "bin": lambda: bytes(2 * MIB),
    "npy": lambda: saved(np.save, np.zeros(2 * MIB, np.uint8)),
    "png": lambda: image("PNG"),
    "jpg": lambda: image("JPEG"),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_growing_member_of_an_archive_is_refused(kind, tmp_path, opened):
    folder = folder_with(tmp_path, "a.tar", archive(("0.txt", b"a"), (f"1.{kind}", MEMBERS[kind]()), ("2.txt", b"a")))
    refused(opened(folder, max_sample_bytes=MIB, images=True), "a.tar")
    assert len(opened(folder, images=True)[1]) == 2  # by default there is room


def test_members_of_a_sample_count_together(tmp_path, opened):
    members = [(f"1.{number}.npz", saved(np.savez_compressed, a=np.zeros(MIB // 2, np.uint8))) for number in range(4)]
    folder = folder_with(tmp_path, "a.tar", archive(("0.txt", b"a"), *members, ("2.txt", b"a")))
    refused(opened(folder, max_sample_bytes=MIB), "a.tar")


VALUES = {
    "bytes": lambda side: bytes(3 * side * side),
    "png": lambda side: image("PNG", (side, side)),
    "jpeg": lambda side: image("JPEG", (side, side)),
    "jpeg_array": lambda side: [image("JPEG", (side // 2, side // 2))] * 4,
    "list[png]": lambda side: [image("PNG", (side // 2, side // 2))] * 4,
}


@pytest.mark.parametrize("encoding", VALUES)
def test_growing_value_is_refused(encoding, tmp_path, opened):
    small, large = VALUES[encoding](2), VALUES[encoding](1000)
    rows = [{"x": small}, {"x": large}, {"x": small}]
    write_shards(rows, str(tmp_path / "data"), format="mds", columns={"x": encoding})
    refused(opened(tmp_path / "data", max_sample_bytes=MIB), "shard.00000.mds")


def test_image_size_is_read_from_the_header():
    head = np.array([100_000, 100_000, 3], "<u4").tobytes() + b"RGB"
    assert ENCODINGS["pil"].decoded_bytes(memoryview(head)) == 4 * 10**10
    assert ENCODINGS["list[png]"].decoded_bytes(memoryview(bytes(4) + np.array([0], "<u4").tobytes())) == 0


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_long_line_is_refused(form, tmp_path, opened):
    folder = folder_with(tmp_path, f"a.{form}", b'["a"]\n["' + b"a" * 2 * MIB + b'"]\n["b"]\n')
    refused(opened(folder, max_sample_bytes=MIB), f"a.{form}")


@pytest.mark.costly
@pytest.mark.parametrize("blank", [b"\n", b" \n", b"\t \r\n"])
def test_millions_of_blank_lines_are_skipped_fast(blank, tmp_path, opened, monkeypatch):
    from dtrain.data.stream.formats import json_lines

    looks, original = [], json_lines._is_all_blank
    monkeypatch.setattr(json_lines, "_is_all_blank", lambda data: looks.append(1) or original(data))
    folder = folder_with(tmp_path, "a.jsonl", b'{"a": 1}\n' + blank * (20 * MIB // len(blank)) + b'{"a": 2}')
    dataset = opened(folder)
    assert [dataset[0], dataset[1]] == [{"a": 1}, {"a": 2}]
    assert len(dataset) == 2
    assert len(looks) < 50, "it looks at single lines"


def test_too_many_lines_are_refused(tmp_path, opened, monkeypatch):
    monkeypatch.setattr("dtrain.data.stream.formats.json_lines._MAX_LINES", 1000)
    with pytest.raises(DataError, match=r"a.txt: has more than 1000 lines. Split it into several files"):
        opened(folder_with(tmp_path, "a.txt", b"\n" * 1001))


def table(values):
    """A Parquet file of one row group."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    return saved(lambda out: parquet.write_table(arrow.table({"x": values}), out, row_group_size=len(values)))


REPEATED = {"text": ["a" * 1000] * 5000, "numbers": [1.5] * 200_000, "lists": [["a" * 300] * 3] * 5000}


@pytest.mark.parametrize("kind", REPEATED)
def test_growing_row_group_is_refused_during_the_read(kind, tmp_path, opened):
    data = table(REPEATED[kind])
    assert len(data) < 50_000
    folder = folder_with(tmp_path, "a.parquet", data)
    expected = r"a.parquet: sample 5 cannot be decoded: ValueError: row group 0 has \d+ bytes or more, above group_bytes"
    with pytest.raises(DataError, match=expected):
        opened(folder, group_bytes=MIB)[5]
    assert opened(folder)[5]["x"] == REPEATED[kind][5]


def test_batched_read_equals_a_read_at_once(tmp_path, opened):
    folder = folder_with(tmp_path, "a.parquet", table([f"{row % 7} " * 50 for row in range(5000)]))
    batches, whole = opened(folder, group_bytes=2 * MIB), opened(folder)
    assert [batches[row] for row in range(0, 5000, 37)] == [whole[row] for row in range(0, 5000, 37)]


def test_invalid_bounds_are_refused(tmp_path, opened):
    (tmp_path / "a.jsonl").write_text("1\n")
    for name in ("max_sample_bytes", "max_shard_bytes"):
        with pytest.raises(ConfigError, match=rf"ShardedDataset: {name} must be an integer of at least 1, got 0"):
            opened(tmp_path / "a.jsonl", **{name: 0})
