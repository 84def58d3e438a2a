"""``dtrain data write``: the output equals the input, whole or not at all, and mistakes are one line."""

import json
import os
import shlex
from contextlib import closing

import numpy as np
import pytest

from dtrain import storage
from dtrain.arguments import format_bytes
from dtrain.cli.data import parse_columns
from dtrain.data.loader import build_loader
from dtrain.data.stream.sharded_dataset import ShardedDataset

ROWS = [{"text": f"row {i} \u00e9", "label": i} for i in range(40)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def samples(url, **options):
    dataset = ShardedDataset(str(url), **options)
    try:
        return [dataset[i] for i in range(len(dataset))]
    finally:
        dataset.close()


@pytest.mark.parametrize("form", ["mds", "jsonl", "parquet"])
@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
def test_written_samples_equal_input(data, here, form, compression):
    more = [] if compression is None else ["--compression", compression]
    code, out, err = data("write", "rows.jsonl", "out", "--format", form, "--max-shard-size", "300", *more)
    assert (code, err) == (0, "")
    assert out.startswith(f"{here / 'out'}: 40 samples in ")
    assert samples("out") == ROWS
    assert len([name for name in os.listdir("out") if name != "index.json"]) > 1


def test_text_lines_are_written_as_text_and_tar(data, here):
    (here / "lines.txt").write_text("eins\nzwei\n")
    assert data("write", "lines.txt", "out", "--format", "text")[0] == 0
    assert samples("out") == [{"text": "eins"}, {"text": "zwei"}]
    (here / "rows.jsonl").write_text('{"txt": "eins", "cls": 1}\n{"txt": "zwei", "cls": 2}\n')
    assert data("write", "rows.jsonl", "tar", "--format", "tar")[0] == 0
    assert [(sample["txt"], sample["cls"]) for sample in samples("tar")] == [("eins", 1), ("zwei", 2)]


def test_sharded_dataset_is_accepted_as_source(data, here):
    assert data("write", "rows.jsonl", "first", "--max-shard-size", "300")[0] == 0
    assert data("write", "first", "second", "--format", "jsonl", "--compression", "gz")[0] == 0
    assert samples("second") == ROWS


def test_table_columns_are_selected_with_encodings(data, here):
    (here / "table.csv").write_text("a,b,c\n1,0.5,x\n2,0.25,y\n")
    assert data("write", "table.csv", "out", "--columns", "c,a:uint8,b:float32")[0] == 0
    assert samples("out") == [{"c": "x", "a": 1, "b": 0.5}, {"c": "y", "a": 2, "b": 0.25}]
    (shard,) = json.loads((here / "out" / "index.json").read_text())["shards"]
    assert dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) == {
        "a": "uint8",
        "b": "float32",
        "c": "str",
    }


def test_hash_option_selects_digests(data, here):
    for name, asked in (("usual", None), ("two", "xxh64,sha256"), ("none", "none")):
        assert data("write", "rows.jsonl", name, *([] if asked is None else ["--hash", asked]))[0] == 0
        (shard,) = json.loads((here / name / "index.json").read_text())["shards"]
        assert sorted(shard["raw_data"]["hashes"]) == {"usual": ["xxh64"], "two": ["sha256", "xxh64"], "none": []}[name]


def test_documents_are_packed_into_token_windows(data, here):
    (here / "a.py").write_bytes(b"abcdef\xff")
    (here / "b.py").write_bytes(b"gh")
    tokens = ["--tokenizer", "bytes", "--concat", "4", "--from", "documents", "--end", "\n"]
    code, out, _ = data("write", "*.py", "out", *tokens)
    windows = samples("out")
    assert code == 0
    assert out == (
        f"{here / 'out'}: 2 samples in 1 shard, {found_bytes('out')}; of 2 documents, 11 tokens, the last 3 are in no window\n"
    )
    assert b"".join(sample["tokens"].tobytes() for sample in windows) == b"abcdef\xff\n"
    assert {(sample["tokens"].dtype, sample["tokens"].shape) for sample in windows} == {(np.dtype("uint8"), (4,))}


def found_bytes(folder):
    return format_bytes(sum(os.path.getsize(f"{folder}/{name}") for name in os.listdir(folder) if name != "index.json"))


def test_text_column_is_packed_into_token_windows_in_any_format(data, here):
    (here / "rows.csv").write_text("id,body\n1,abcd\n2,efgh\n")
    for form, column in (("jsonl", "tokens"), ("parquet", "tokens"), ("tar", "tokens.npy")):
        tokens = ["--tokenizer", "bytes", "--concat", "3", "--text", "body", "--format", form]
        assert data("write", "rows.csv", form, *tokens)[0] == 0
        assert [bytes(list(sample[column])) for sample in samples(form)] == [b"abc", b"def"]


def test_json_output_describes_written_dataset(data, here):
    (here / "a.txt").write_text("abcdef")
    done = json.loads(data("write", "rows.jsonl", "out", "--json")[1])
    assert {"path": str(here / "out"), "format": "mds", "samples": 40, "shards": 1}.items() <= done.items()
    assert list(done) == ["path", "format", "samples", "shards", "bytes", "raw_bytes"]
    done = json.loads(data("write", "a.txt", "tokens", "--tokenizer", "bytes", "--concat", "4", "--json")[1])
    assert {"samples": 1, "documents": 1, "tokens": 6, "left_out": 2}.items() <= done.items()


def test_dataset_is_written_to_and_read_from_server(data, here):
    storage_root = "memory://data-write/rows"
    try:
        assert data("write", "rows.jsonl", f"{storage_root}/source", "--format", "jsonl")[0] == 0
        assert data("write", f"{storage_root}/source", f"{storage_root}/out", "--max-shard-size", "300")[0] == 0
        assert samples(f"{storage_root}/out", cache=str(here / "cache")) == ROWS
    finally:
        storage.remove_folder(storage.resolve_path(storage_root))


def test_loader_balances_by_stored_lengths_without_reading_shards(data, here):
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    (here / "rows.jsonl").write_text("".join(json.dumps({"ids": [7] * n, "n": n}) + "\n" for n in lengths))
    for name, column in (("lists", "ids"), ("numbers", "n")):
        assert data("write", "rows.jsonl", name, "--lengths", column)[0] == 0
        assert "\nlengths  1 to 9, 31 in all\n" in data("inspect", name)[1]
        assert json.loads(data("inspect", name, "--json")[1])["lengths"] == {"smallest": 1, "largest": 9, "total": 31}
        for shard in here.glob(f"{name}/shard.*"):
            shard.unlink()
        with closing(ShardedDataset(name)) as dataset:
            build_loader(dataset, global_batch_size=8, seed=0, balance="tokens", max_tokens=9)
            assert dataset.sample_lengths().parts.tolist() == lengths


def test_missing_column_of_lengths_leaves_no_dataset(data, here):
    code, out, err = data("write", "rows.jsonl", "out", "--lengths", "ids")
    assert (code, out) == (2, "")
    assert err == (
        "dtrain: data: write: write_shards: lengths must name a column of each sample, but sample 0 has no 'ids', only "
        "['label', 'text']. Name a column with tokens or with their number.\n"
    )
    assert os.listdir("out") == []


def test_existing_dataset_is_refused_and_unchanged(data, here):
    assert data("write", "rows.jsonl", "out")[0] == 0
    before = {name: (here / "out" / name).read_bytes() for name in os.listdir("out")}
    code, out, err = data("write", "rows.jsonl", "out")
    assert (code, out) == (2, "")
    assert err == "dtrain: data: write: OUT 'out' has a dataset already. Name another folder, or remove the dataset first.\n"
    assert {name: (here / "out" / name).read_bytes() for name in os.listdir("out")} == before


def test_nonempty_folder_is_refused(data, here):
    code, out, err = data("write", "rows.jsonl", ".")
    assert (code, out) == (2, "")
    assert err.startswith(f"dtrain: data: write: {here}: is not empty (there is 'rows.jsonl'). ")
    assert os.listdir(here) == ["rows.jsonl"]


def test_invalid_source_line_leaves_no_index(data, here):
    with open("rows.jsonl", "a") as file:
        file.write('{"text": \n')
    code, out, err = data("write", "rows.jsonl", "out", "--max-shard-size", "300")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("dtrain: data: write: rows.jsonl, line 41: is not JSON: ")
    assert not (here / "out" / "index.json").exists()


def test_ctrl_c_leaves_no_dataset_and_command_can_be_repeated(data, here, monkeypatch):
    from dtrain.storage import local

    open_file, begun = local.os.open, []

    def interrupted(path, flags, *mode):
        if flags & os.O_CREAT and "shard." in str(path):
            begun.append(path)
            if len(begun) == 3:
                raise KeyboardInterrupt
        return open_file(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(local.os, "open", interrupted)
        assert data("write", "rows.jsonl", "out", "--max-shard-size", "300")[:2] == (130, "")
    assert len(begun) == 3
    assert os.listdir("out") == []
    assert not (here / "out" / "index.json").exists()
    assert data("write", "rows.jsonl", "out", "--max-shard-size", "300")[0] == 0
    assert samples("out") == ROWS


MISTAKES = {
    "no source": ("nope.jsonl out", "no such file or folder: 'nope.jsonl'. Check the path."),
    "an empty out": ("rows.jsonl ''", "OUT must not be empty. Name the new folder or URL."),
    "out is a file": ("rows.jsonl rows.jsonl", "OUT 'rows.jsonl' is a file. Name a new folder or URL."),
    "kind": ("rows.jsonl out --from xml", "--from must be 'jsonl', 'csv', 'tsv', 'parquet', 'lines', 'documents', "),
    "format": ("rows.jsonl out --format hdf5", "--format must be 'mds', 'parquet', 'jsonl', 'text' or 'tar', got 'hdf5'"),
    "compression": ("rows.jsonl out --compression rar", "compression 'rar' is unknown. Use one of "),
    "level": ("rows.jsonl out --compression zstd:99", "compression 'zstd:99': the level of zstd must be 1 to 22"),
    "hash": ("rows.jsonl out --hash crc", "hash 'crc' is unknown. Use one of "),
    "hashes": ("rows.jsonl out --hash md5,,", "--hash must be different names with commas between, or none, got 'md5,,'"),
    "size": ("rows.jsonl out --max-shard-size big", "--max-shard-size must be a size such as 512MiB or 5GB, got 'big'"),
    "columns": ("rows.jsonl out --columns a,,b", "--columns must be NAME or NAME:ENCODING with commas between, got"),
    "encoding": ("rows.jsonl out --columns text:utf9", "column 'text': encoding 'utf9' is unknown. Use one of "),
    "a tokenizer alone": ("rows.jsonl out --tokenizer bytes", "--tokenizer needs --concat N, too. "),
    "windows alone": ("rows.jsonl out --concat 8", "--concat needs --tokenizer NAME, too. "),
    "an end alone": ("rows.jsonl out --end x", "--end and --text need a tokenizer. Pass --tokenizer NAME"),
    "a window": ("rows.jsonl out --tokenizer bytes --concat 1", "--concat must be an integer of at least 2, got 1"),
    "windows of text": (
        "rows.jsonl out --tokenizer bytes --concat 8 --format text",
        "--format text has lines of text, but no tokens. Use mds, parquet, jsonl or tar.",
    ),
    "columns of windows": (
        "rows.jsonl out --tokenizer bytes --concat 8 --columns text",
        "--columns and --tokenizer exclude each other, because windows have one column, tokens. Use --text.",
    ),
    "lengths of windows": (
        "rows.jsonl out --tokenizer bytes --concat 8 --lengths text",
        "--lengths and --tokenizer exclude each other, because all windows have N tokens. Leave --lengths out.",
    ),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line_and_write_nothing(data, here, args, expected):
    code, out, err = data("write", *shlex.split(args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dtrain: data: write: {expected}")
    assert os.listdir(here) == ["rows.jsonl"]


WRONG_SAMPLES = {
    "a column is missing": ('{"text": "x"}\n{"label": 1}\n', ["--columns", "text"], "sample 1 has no column 'text'. Its "),
    "no number": ('{"label": "x"}\n', ["--columns", "label:int"], "sample 0: column 'label' holds 'x', which is not int"),
    "no text": ('{"text": 1}\n', ["--tokenizer", "bytes", "--concat", "4"], "sample 0: column 'text' must hold text, got int"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "args", "expected"), WRONG_SAMPLES.values(), ids=WRONG_SAMPLES)
def test_invalid_sample_prints_one_line(data, here, content, args, expected):
    (here / "rows.jsonl").write_text(content)
    code, out, err = data("write", "rows.jsonl", "out", *args)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"dtrain: data: write: {expected}")
    assert not (here / "out" / "index.json").exists()


def test_column_shape_can_contain_commas():
    assert parse_columns(["x:ndarray:uint8:2,3,y:int", "z"]) == {"x": "ndarray:uint8:2,3", "y": "int", "z": None}
