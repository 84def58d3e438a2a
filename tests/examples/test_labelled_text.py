"""Texts with labels: valid tables, one-line errors of invalid tables, and the held-out rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers.docstrings import build_tokenizer
from helpers.labelled_text import HELD_OUT_EVERY, Labelled, Tokenized, read_table

ROWS = [("ham", "see you, at noon"), ("spam", 'win a "car"\nnow'), ("ham", "thanks"), ("spam", "free"), ("ham", "on my way")]


def as_csv(path: Path, rows: list[dict]) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def as_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def as_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS: dict[str, Callable[[Path, list[dict]], None]] = {"csv": as_csv, "jsonl": as_jsonl, "parquet": as_parquet}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_table_format_gives_the_same_rows(tmp_path, kind):
    path = tmp_path / f"mail.{kind}"
    WRITERS[kind](path, [{"id": number, "label": label, "text": text} for number, (label, text) in enumerate(ROWS)])
    rows = read_table(path)
    assert list(rows.texts) == [text for _, text in ROWS]
    assert list(rows.labels) == [0, 1, 0, 1, 0]
    assert list(rows.names) == ["ham", "spam"]


@pytest.mark.parametrize("kind", WRITERS)
def test_numeric_classes_are_sorted_numerically(tmp_path, kind):
    path = tmp_path / f"stars.{kind}"
    WRITERS[kind](path, [{"text": "so so", "label": stars} for stars in (10, 2, -1, 2, 10)])
    rows = read_table(path)
    assert list(rows.names) == ["-1", "2", "10"]
    assert list(rows.labels) == [2, 1, 0, 1, 2]


def bad(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


ROW = '{"text": "a", "label": 1}\n'
WRONG = {
    "column": ("a.csv", "body,label\nx,1\n", r"row 1 has no column 'text'; its columns are body, label: rename one of them"),
    "column of one row": ("a.jsonl", ROW + '{"text": "a"}\n', r"row 2 has no column 'label'; its columns are text"),
    "empty": ("a.csv", "", r"a\.csv: the file is empty"),
    "header alone": ("a.csv", "text,label\n", r"0 rows, of which none would be held out"),
    "few": ("a.jsonl", ROW * 4, r"4 rows, of which none would be held out; 5 are the least"),
    "ending": ("a.txt", "text,label\n", r"the ending '\.txt' says nothing; give a file that ends in \.csv, \.jsonl, \.parquet"),
    "one class": ("a.jsonl", ROW * 5, r"every label is '1'; at least two classes are needed"),
    "no text": ("a.jsonl", '{"text": null, "label": 1}\n', r"row 1: text is None; leave the row out"),
    "blank text": ("a.csv", "text,label\n  ,1\n", r"row 1: text is '  '; leave the row out"),
    "no label": ("a.csv", "text,label\nx\n", r"row 1: label is None; use a word or a whole number"),
    "odd label": ("a.jsonl", '{"text": "a", "label": 0.5}\n', r"row 1: label is 0\.5; use a word"),
    "no JSON": ("a.jsonl", ROW + "{\n", r"line 2 is no JSON: "),
    "no object": ("a.jsonl", "[1]\n", r"line 1 is no JSON object but \[1\]"),
    "no Parquet": ("a.parquet", "PAR?", r"a\.parquet: no Parquet file: "),
}


@pytest.mark.parametrize(("name", "content", "says"), WRONG.values(), ids=WRONG)
def test_invalid_table_raises_a_one_line_error(tmp_path, name, content, says):
    with pytest.raises(SystemExit, match=says) as end:
        read_table(bad(tmp_path / name, content))
    assert len(str(end.value).splitlines()) == 1
    assert str(end.value).startswith(str(tmp_path / name))


def test_missing_table_raises_a_one_line_error(tmp_path):
    with pytest.raises(SystemExit, match=r"none\.csv: there is no such file; check --data"):
        read_table(tmp_path / "none.csv")


def test_every_fifth_row_is_held_out_with_training_majority_baseline():
    rows = Labelled(
        texts=[f"text {number}" for number in range(20)], labels=[0, 0, 0, 1, 1] * 3 + [0, 1, 1, 1, 0], names=["a", "b"]
    )
    train, held_out = rows.parts()
    assert HELD_OUT_EVERY == 5
    assert list(held_out.texts) == ["text 4", "text 9", "text 14", "text 19"]
    assert sorted([*train.texts, *held_out.texts]) == sorted(rows.texts)
    assert list(held_out.labels) == [1, 1, 1, 0]
    assert held_out.majority(train) == 1 / 4  # 0 leads in the training rows, 10 to 6, though not in the held-out rows


def test_samples_are_truncated_and_padded():
    texts = [f"word {'more ' * number}" for number in range(10)]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(texts), pad_token="[PAD]")
    samples = Tokenized(Labelled(texts=texts, labels=range(10), names="abcdefghij"), tokenizer, 6)
    assert len(samples) == 10
    for number, sample in enumerate(samples[number] for number in range(10)):
        assert {name: (tuple(t.shape), t.dtype) for name, t in sample.items()} == {
            "input_ids": ((6,), torch.int64),
            "attention_mask": ((6,), torch.int64),
            "labels": ((), torch.int64),
        }
        assert torch.equal(sample["attention_mask"], (sample["input_ids"] != 0).long())
        assert int(sample["attention_mask"].sum()) == min(6, 3 + number)
        assert int(sample["labels"]) == number


def test_fingerprint_depends_on_texts_labels_and_length():
    def fingerprint(text: str = "a", label: int = 0, seq: int = 8) -> dict:
        return Tokenized(Labelled(texts=[text], labels=[label], names=["x", "y"]), None, seq).fingerprint()

    assert fingerprint() == fingerprint()
    others = [fingerprint(text="b"), fingerprint(label=1), fingerprint(seq=4)]
    assert all(other != fingerprint() for other in others)
