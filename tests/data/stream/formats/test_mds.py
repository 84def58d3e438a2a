"""MDS compared with mosaicml-streaming, including all names in its registries."""

import json
import tempfile
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

from dtrain.data.stream.formats.compression import HASHES, parse_compression
from dtrain.data.stream.formats.mds import ENCODINGS, parse_encoding
from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError
from places import mosaicml
from places.opened import Held, entry_for, opened, samples_of


def picture(number: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (5 + number, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def jpeg_bytes(number: int) -> bytes:
    out = BytesIO()
    picture(number).save(out, format="JPEG")
    return out.getvalue()


def scalars(name: str) -> list[Any]:
    dtype = np.dtype(name)
    if dtype.kind == "f":
        return [0.0, -1.5, float(np.finfo(dtype).max), float("inf")]
    return [0, 1, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]


def arrays(dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    return [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in shapes]


DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]
WIDE = [(1,), (300,), (2, 3), (1, 70000), (1, 1, 1, 2)]  # sizes kept in 1, 2 and 4 bytes

VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"a", bytes(range(256))],
    "str": ["", "plain", "zwölf Boxkämpfer 🥊", "line\u2028end\x00"],
    "int": [0, -1, 2**63 - 1, -(2**63)],
    "str_int": [0, -(10**40), 7],
    "str_float": [0.0, 1e-300, float("-inf"), 0.1],
    "str_decimal": [Decimal("0"), Decimal("1.000000000000000000000000000001"), Decimal("-3E+9")],
    "json": [None, True, 3, "text", [1, {"a": [2.5]}], {}],
    "pkl": [{"any": (1, 2)}, {3}, None],
    "pil": [picture(1), picture(2, "L"), picture(3, "RGBA")],
    "jpeg": [picture(1), picture(2, "L")],
    "png": [picture(1), picture(2, "RGBA"), picture(3, "P")],
    "list[pil]": [[], [picture(1), picture(2)]],
    "list[jpeg]": [[], [picture(1), picture(2)]],
    "list[png]": [[picture(1)], [picture(2), picture(3, "L")]],
    "jpeg_array": [[jpeg_bytes(1)], [jpeg_bytes(2), jpeg_bytes(3)]],
    "jpegarray": [[jpeg_bytes(1), jpeg_bytes(4)]],
    "ndarray": [array for dtype in DTYPES for array in arrays(dtype, (3,), (2, 2))] + arrays("int32", *WIDE),
    **{name: scalars(name) for name in mosaicml.get_mds_encodings() if name in DTYPES},
    **{f"ndarray:{dtype}": arrays(dtype, (1,), (2, 3)) for dtype in DTYPES},
    **{f"ndarray:{dtype}:2,3": arrays(dtype, (2, 3), (2, 3)) for dtype in DTYPES},
    "ndarray:": arrays("float32", (2,)),
}


def same(ours: Any, theirs: Any) -> bool:
    """Equal, and of one type; images by their pixels."""
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], Image.Image):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, Image.Image):
        return (
            type(ours) is type(theirs)
            and (ours.mode, ours.size) == (theirs.mode, theirs.size)
            and not ImageChops.difference(ours.convert("RGBA"), theirs.convert("RGBA")).getbbox(alpha_only=False)
        )
    if isinstance(theirs, np.ndarray):
        return (
            type(ours) is np.ndarray
            and ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and bool((ours == theirs).all())
        )
    return type(ours) is type(theirs) and bool(ours == theirs)


def written(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> None:
    """Write by their writer."""
    with mosaicml.MDSWriter(columns=columns, out=str(folder), **options) as writer:
        for sample in samples:
            writer.write(sample)


def theirs(folder: Path) -> list[dict[str, Any]]:
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [mosaicml.MDSReader.from_json(str(folder), None, shard) for shard in shards]
    return [reader[row] for reader in readers for row in range(len(reader))]


def test_every_mosaicml_encoding_has_test_values() -> None:
    assert mosaicml.get_mds_encodings() == set(ENCODINGS)
    assert set(ENCODINGS) <= set(VALUES)


@pytest.mark.parametrize("encoding", sorted(VALUES), ids=str)
def test_values_of_mosaicml_streaming_are_read(encoding: str, tmp_path: Path) -> None:
    samples = [{"value": value, "a": "before", "z": 3} for value in VALUES[encoding]]
    written(tmp_path, {"value": encoding, "a": "str", "z": "int"}, samples)
    expected = theirs(tmp_path)
    read = samples_of(tmp_path, **({"allow_pickle": True} if encoding == "pkl" else {}))
    assert len(read) == len(expected) == len(samples)
    assert all(list(ours) == list(their) for ours, their in zip(read, expected, strict=True))
    assert all(same(ours[name], their[name]) for ours, their in zip(read, expected, strict=True) for name in their)


@pytest.mark.parametrize("encoding", sorted(VALUES), ids=str)
def test_written_files_equal_those_of_mosaicml_streaming(encoding: str, tmp_path: Path) -> None:
    samples = [{"value": value, "a": b"before"} for value in VALUES[encoding]]
    columns = {"value": encoding, "a": "bytes"}
    written(tmp_path / "theirs", columns, samples, hashes=["sha1", "xxh64"], size_limit=2000)
    write_shards(samples, tmp_path / "ours", format="mds", columns=columns, hashes=["xxh64", "sha1"], max_shard_bytes=2000)
    ours, theirs = ({path.name: path.read_bytes() for path in (tmp_path / who).iterdir()} for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert json.loads(ours.pop("index.json")) == json.loads(theirs.pop("index.json"))
    assert ours == theirs


ROWS = [{"n": number, "text": "word " * (number % 50)} for number in range(200)]
ROW_COLUMNS = {"n": "int", "text": "str"}


@pytest.mark.parametrize("compression", [None, *sorted(mosaicml.get_compressions())], ids=str)
def test_mosaicml_compression_is_read(compression: str | None, tmp_path: Path) -> None:
    written(tmp_path, ROW_COLUMNS, ROWS[:60], compression=compression, hashes=["sha1"])
    assert samples_of(tmp_path) == ROWS[:60]


def test_mosaicml_shards_with_an_empty_shard_are_read(tmp_path: Path) -> None:
    written(tmp_path, ROW_COLUMNS, ROWS, size_limit=100)
    counts = [shard["samples"] for shard in json.loads((tmp_path / "index.json").read_text())["shards"]]
    assert counts == [0] + [1] * len(ROWS)
    assert samples_of(tmp_path) == ROWS


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # it leaves the index open
@pytest.mark.parametrize("compression", sorted({name.partition(":")[0] for name in mosaicml.get_compressions()}))
def test_mosaicml_reads_our_compression(compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for its locks, which stay
    write_shards(ROWS, tmp_path / "data", format="mds", compression=compression, max_shard_bytes=4000)
    with mosaicml.released():
        dataset = mosaicml.StreamingDataset(local=str(tmp_path / "data"), shuffle=False, batch_size=1)
        rows = [dataset[number] for number in range(len(dataset))]
        del dataset
    assert rows == ROWS
    assert samples_of(tmp_path / "data") == ROWS


def test_every_mosaicml_compression_is_supported() -> None:
    assert {parse_compression(name)[0] for name in mosaicml.get_compressions()} == {"br", "bz2", "gz", "snappy", "zstd"}


def test_every_mosaicml_hash_is_supported(tmp_path: Path) -> None:
    assert mosaicml.get_hashes() == set(HASHES)
    written(tmp_path, ROW_COLUMNS, ROWS, compression="gz:1", hashes=sorted(mosaicml.get_hashes()))
    assert samples_of(tmp_path) == ROWS  # the digests of both files are checked by it
    entry = json.loads((tmp_path / "index.json").read_text())["shards"][0]
    assert set(entry["zip_data"]["hashes"]) == set(entry["raw_data"]["hashes"]) == set(HASHES)


def test_mosaicml_json_lines_are_read(tmp_path: Path) -> None:
    with mosaicml.JSONWriter(
        columns={"n": "int", "text": "str"}, out=str(tmp_path), compression="zstd", size_limit=4000
    ) as writer:
        for row in ROWS:
            writer.write(row)
    assert samples_of(tmp_path) == ROWS


def shard_of(tmp_path: Path, samples: list[dict[str, Any]], columns: dict[str, str]) -> bytes:
    write_shards(samples, tmp_path / "data", format="mds", columns=columns)
    return (tmp_path / "data" / "shard.00000.mds").read_bytes()


def test_pickled_column_is_refused_unless_trusted_or_excluded(tmp_path: Path) -> None:
    data = shard_of(tmp_path, [{"evil": {"a": 1}, "n": 2}], {"evil": "pkl", "n": "int"})
    with pytest.raises(ConfigError, match="column 'evil' is pickled"):
        opened(data, "mds")
    with pytest.raises(ConfigError, match="column 'evil' is pickled"):
        opened(data, "mds", allow_pickle="yes")  # only True itself is consent
    assert opened(data, "mds", columns=["n"])[0] == {"n": 2}
    assert opened(data, "mds", allow_pickle=True)[0] == {"evil": {"a": 1}, "n": 2}


def test_excluded_columns_are_omitted_and_unknown_columns_refused(tmp_path: Path) -> None:
    data = shard_of(tmp_path, ROWS[:3], ROW_COLUMNS)
    assert [opened(data, "mds", columns=("text",))[row] for row in range(3)] == [{"text": row["text"]} for row in ROWS[:3]]
    with pytest.raises(ConfigError, match="no column 'txt'; the columns are n, text"):
        opened(data, "mds", columns=("txt",))
    with pytest.raises(ConfigError, match=r"mds has no option 'column'\. Use one of columns, allow_pickle"):
        opened(data, "mds", column="n")


def test_arrays_are_writable_and_do_not_keep_the_file_open(tmp_path: Path) -> None:
    data = shard_of(tmp_path, [{"x": np.arange(4)}], {"x": "ndarray"})
    source = Held(data)
    shard = get_format("mds").open(source, entry_for(data, "mds"), {})
    array = shard[0]["x"]
    array += 1
    shard.close()
    source.data.release()  # BufferError if a view of it is alive
    assert array.tolist() == [1, 2, 3, 4]


def test_sample_read_requests_only_its_own_bytes(tmp_path: Path) -> None:
    data = shard_of(tmp_path, [{"x": bytes(1000)} for _ in range(100)], {"x": "bytes"})
    source = Held(data)
    shard = get_format("mds").open(source, entry_for(data, "mds"), {})
    source.reads = source.most = 0
    assert len(shard[57]["x"]) == 1000
    assert (source.reads, source.most) == (1, 1004)


@pytest.mark.parametrize("row", [-1, 3])
def test_row_out_of_range_is_refused(row: int, tmp_path: Path) -> None:
    shard = opened(shard_of(tmp_path, ROWS[:3], ROW_COLUMNS), "mds")
    with pytest.raises(IndexError, match=f"row {row} of 3"):
        shard[row]


def test_truncated_shard_is_refused_at_every_length(tmp_path: Path) -> None:
    data = shard_of(tmp_path, ROWS[:5], ROW_COLUMNS)
    entry = entry_for(data, "mds")
    for length in range(len(data)):
        with pytest.raises(DataError, match=r"truncated|damaged"):
            get_format("mds").open(Held(data[:length]), entry, {})


def test_sample_count_that_differs_from_the_index_is_refused(tmp_path: Path) -> None:
    data = shard_of(tmp_path, ROWS[:5], ROW_COLUMNS)
    entry = entry_for(data, "mds")
    with pytest.raises(DataError, match="has 5 samples, but the index has 6"):
        get_format("mds").open(Held(data), ShardEntry(file=entry.file, samples=6, format="mds", details=entry.details), {})


def test_column_sizes_that_exceed_the_sample_raise(tmp_path: Path) -> None:
    data = bytearray(shard_of(tmp_path, [{"t": "abcd"}, {"t": "efgh"}], {"t": "str"}))
    first = int.from_bytes(data[4:8], "little")
    data[first : first + 4] = (3).to_bytes(4, "little")
    shard = opened(bytes(data), "mds")
    with pytest.raises(ValueError, match="it has 8 bytes, but its values have 7"):
        shard[0]
    assert shard[1] == {"t": "efgh"}


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({}, "must have column names, sizes and encodings"),
        ({"column_names": ["a"], "column_encodings": ["int"], "column_sizes": []}, "lists of one length"),
        ({"column_names": ["a"], "column_encodings": ["intt"], "column_sizes": [8]}, "encoding 'intt' is unknown"),
        ({"column_names": ["a"], "column_encodings": ["int"], "column_sizes": [4]}, "has 4 bytes, but int has 8"),
        ({"column_names": ["a"], "column_encodings": ["ndarray:bool"], "column_sizes": [None]}, "dtype 'bool' is unknown"),
    ],
    ids=["none", "lengths", "unknown", "size", "dtype"],
)
def test_invalid_details_are_refused(details: dict[str, Any], message: str) -> None:
    entry = ShardEntry(file=ShardFile(name="s.mds", size=0), samples=0, format="mds", details=details)
    with pytest.raises(DataError, match=message):
        get_format("mds").check(entry, {})


@pytest.mark.parametrize(
    "encoding", ["ndarray:int32:", "ndarray::2", "ndarray:int32:0", "ndarray:int32:2,x", "int:8", "list[str]"]
)
def test_encoding_spelling_is_accepted_exactly_when_mosaicml_accepts_it(encoding: str) -> None:
    try:
        mosaicml.mds_encode(encoding, np.zeros(1, "int32"))
    except (AssertionError, ValueError, AttributeError):
        with pytest.raises(ConfigError, match="encoding"):
            parse_encoding(encoding)
    else:
        assert parse_encoding(encoding).size is None


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_damaged_image_raises_when_the_sample_is_read(kind: str, tmp_path: Path) -> None:
    out = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(out, format=kind)
    data = shard_of(tmp_path, [{"x": out.getvalue()[:-2000]}, {"x": out.getvalue()}], {"x": kind})
    shard = opened(data, "mds")
    with pytest.raises(OSError, match=r"truncated|broken"):
        shard[0]
    assert shard[1]["x"].size == (64, 64)
