"""Inputs that sources name, and their samples, of every kind."""

import bz2
import csv
import gzip
import json
import os

import pytest

from dtrain.cli.data import select_columns
from dtrain.cli.data_inputs import find_inputs, read_samples
from dtrain.errors import ConfigError, DataError

ROWS = [{"text": "eins", "label": 1}, {"text": "zw\u2028ei \u00e9", "label": 2}]
LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*sources, kind=None, **options):
    seen = []
    samples = [dict(sample) for given in find_inputs(sources, kind) for sample in read_samples(given, seen.append, **options)]
    assert all(count >= 0 for count in seen)
    return samples


def zstd(content):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


COMPRESSED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_json_lines_are_read_with_any_compression(here, suffix):
    (here / f"a.jsonl{suffix}").write_bytes(COMPRESSED[suffix](LINES))
    assert read(f"a.jsonl{suffix}") == ROWS


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_truncated_compressed_file_raises_one_line_error(here, suffix):
    content = COMPRESSED[suffix](LINES * 1000)
    (here / f"a.jsonl{suffix}").write_bytes(content[:-9])
    with pytest.raises(DataError, match=rf"^a\.jsonl{suffix}: \S.*$"):
        read(f"a.jsonl{suffix}")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_uncompressed_file_with_compressed_suffix_raises_error(here, suffix):
    (here / f"a.jsonl{suffix}").write_bytes(LINES)
    with pytest.raises(DataError, match=rf"^a\.jsonl{suffix}: \S.*$"):
        read(f"a.jsonl{suffix}")


def test_concatenated_compressed_frames_are_read_as_one_file(here):
    for suffix in (".gz", ".bz2", ".zst"):
        whole = COMPRESSED[suffix](LINES) + COMPRESSED[suffix](LINES)
        (here / f"a.jsonl{suffix}").write_bytes(whole)
        assert read(f"a.jsonl{suffix}") == ROWS * 2, suffix


def test_byte_order_mark_is_skipped(here):
    (here / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    (here / "a.txt").write_bytes(b"\xef\xbb\xbfeins\n")
    assert read("a.jsonl", "a.txt") == [*ROWS, {"text": "eins"}]


def test_crlf_and_empty_lines_are_skipped(here):
    (here / "a.jsonl").write_bytes(b'{"a": 1}\r\n\r\n\n  \n{"a": 2}')
    (here / "a.txt").write_bytes(b"eins\r\n\nzwei")
    assert read("a.jsonl") == [{"a": 1}, {"a": 2}]
    assert read("a.txt") == [{"text": "eins"}, {"text": "zwei"}]


def test_csv_and_tsv_values_are_text(here):
    with open("a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], ['with "quotes", and\na line', "1"], ["", "2"]])
    (here / "a.tsv").write_text("\ufefftext\tlabel\n'x\t1\n\n")
    assert read("a.csv") == [{"text": 'with "quotes", and\na line', "label": "1"}, {"text": "", "label": "2"}]
    assert read("a.tsv") == [{"text": "'x", "label": "1"}]


def test_csv_field_size_is_unlimited(here):
    before = csv.field_size_limit()
    with open("long.csv", "w") as file:
        file.write("text,label\n" + "x" * 200_000 + ",1\n")
    assert read("long.csv") == [{"text": "x" * 200_000, "label": "1"}]
    assert csv.field_size_limit() == before


def test_parquet_rows_are_read_as_samples(here):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(ROWS), "a.parquet", row_group_size=1)
    assert read("a.parquet") == ROWS


def test_save_to_disk_folder_is_read_in_its_stored_order(here):
    arrow = pytest.importorskip("pyarrow")
    folder = here / "set" / "train"
    folder.mkdir(parents=True)
    for name, row in zip(("b.arrow", "a.arrow"), ROWS, strict=True):
        table = arrow.Table.from_pylist([row])
        with arrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    (here / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert read("set/train") == ROWS
    with pytest.raises(ConfigError, match=r"'set' has the splits train\. Name one, as in set/train\.$"):
        read("set")
    (folder / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"'set/train' is not a folder that Dataset.save_to_disk wrote"):
        read("set/train")


def test_documents_kind_reads_each_file_as_one_sample(here):
    (here / "a.txt").write_bytes(b"eins\nzwei\n")
    (here / "b.py").write_bytes(b"\xff")
    assert read("a.txt", kind="documents") == [{"text": "eins\nzwei\n"}]
    assert read("b.py", kind="documents", as_bytes=True) == [{"text": b"\xff"}]
    with pytest.raises(DataError, match=r"^b.py: is not UTF-8: invalid start byte at byte 0. Convert"):
        read("b.py", kind="documents")


def test_folder_files_are_sorted_by_name(here):
    for name in ("b/1.png", "a/2.png", "a/10.png", ".hidden/x.png", ".x.png"):
        (here / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "set" / name).write_bytes(name.encode())
    names = ["a/10.png", "a/2.png", "b/1.png"]
    assert read("set", kind="files") == [{"name": name, "data": name.encode()} for name in names]


def test_folder_selects_files_by_suffix(here):
    os.makedirs("set/below")
    (here / "set" / "README.md").write_text("no data")
    (here / "set" / "below" / "a.jsonl").write_bytes(LINES)
    (here / "set" / "z.txt").write_text("drei")
    assert read("set") == [*ROWS, {"text": "drei"}]


def test_recursive_glob_matches_and_literal_file_name_takes_precedence(here):
    os.makedirs("x/y")
    (here / "x/y/a.txt").write_text("eins")
    (here / "x/b.txt").write_text("zwei")
    assert read("x/**/*.txt") == [{"text": "zwei"}, {"text": "eins"}]
    (here / "[ab].txt").write_text("drei")
    assert read("[ab].txt") == [{"text": "drei"}]


WRONG_SOURCES = {
    "nothing": ([""], None, "a source must not be empty. Name a file, a folder or a pattern."),
    "no file": (["nope.jsonl"], None, "no such file or folder: 'nope.jsonl'. Check the path."),
    "no match": (["*.jsonl"], None, r"no file matches '\*.jsonl'. Use \*\* to match across folders"),
    "a name that says nothing": (["data.bin"], None, "'data.bin': the format cannot be inferred from the name. Pass --from"),
    "an empty folder": (["empty"], None, "'empty': it has no files. Pass --from"),
    "a folder of others": (["others"], None, "'others': none of its files has a name with a known format. Pass --from"),
    "a file for a folder": (["data.bin"], "hf", "'data.bin' is a file, but --from hf reads folders. Pass --from"),
    "an unknown server": (["gopher://x/y"], None, "protocol must be one of .*, got gopher://"),
}


@pytest.mark.parametrize(("sources", "kind", "expected"), WRONG_SOURCES.values(), ids=WRONG_SOURCES)
def test_invalid_source_is_refused(here, sources, kind, expected):
    os.mkdir("empty")
    os.mkdir("others")
    (here / "others" / "x.bin").write_bytes(b"")
    (here / "data.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"^{expected}"):
        find_inputs(sources, kind)


BAD_CONTENT = {
    "no JSON": ("a.jsonl", b'{"a": 1}\n{"a": ', "a.jsonl, line 2: is not JSON: "),
    "no object": ("a.jsonl", b"\n[1]\n", "a.jsonl, line 2: is a JSON list, not an object with columns"),
    "too deep": ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: is not JSON: "),
    "no UTF-8": ("a.txt", b"eins\n\xe9\n", "a.txt, line 2: is not UTF-8: unexpected end of data at byte 0"),
    "no UTF-8 in a table": ("a.csv", b"a,b\n\xe9,1\n", "a.csv: 'utf-8' codec can't decode byte 0xe9"),
    "a row that is short": ("a.csv", b"a,b\n1,2\n3\n", "a.csv, line 3: has 1 value for 2 columns"),
    "no head": ("a.csv", b"", "a.csv: the first line must name each column once, got None"),
    "one column twice": ("a.csv", b"a,a\n", r"a.csv: the first line must name each column once, got \['a', 'a'\]"),
    "an open quote": ("a.csv", b'a,b\n"1,2\n', "a.csv: unexpected end of data"),
    "no Parquet": ("a.parquet", b"no parquet here", "a.parquet: "),
}


@pytest.mark.parametrize(("name", "content", "expected"), BAD_CONTENT.values(), ids=BAD_CONTENT)
def test_unreadable_content_raises_one_line_error_with_location(here, name, content, expected):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (here / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^{expected}[^\n]*$"):
        read(name)


def test_select_columns_converts_text_to_numbers():
    rows = [{"a": "1", "b": "0.5", "c": "x"}]
    assert list(select_columns(rows, {"b": "float32", "a": "int", "c": "str"})) == [{"b": 0.5, "a": 1, "c": "x"}]
    assert list(select_columns(rows, {"a": None})) == [{"a": "1"}]
    assert list(select_columns(rows, {})) == rows


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        pytest.param({"d": None}, "sample 0 has no column 'd'. Its columns are a", id="missing"),
        pytest.param({"a": "uint8"}, "sample 0: column 'a' holds 'x', which is not int", id="no number"),
    ],
)
def test_sample_without_selected_column_raises_error(chosen, expected):
    with pytest.raises(DataError, match=expected):
        list(select_columns([{"a": "x"}], chosen))
