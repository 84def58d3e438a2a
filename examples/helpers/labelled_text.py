"""Texts with labels: read from a table, and as the samples of a classifier.

A table is a CSV, JSONL or Parquet file with the columns ``text`` and ``label``; other columns are ignored. Labels are
words or whole numbers, and their classes are numbered in sorted order.
"""

import csv
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_EVERY = 5  # the fifth of every five texts is held out
COLUMNS = ("text", "label")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Texts, the number of the class of each, and the names of the classes."""

    texts: Sequence[str]
    labels: Sequence[int]
    names: Sequence[str]

    def parts(self) -> tuple["Labelled", "Labelled"]:
        """Split into training and held-out samples."""
        rows = list(zip(self.texts, self.labels, strict=True))
        held_out = rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [row for number, row in enumerate(rows, 1) if number % HELD_OUT_EVERY]
        return tuple(  # type: ignore[return-value]
            Labelled(texts=[text for text, _ in split], labels=[label for _, label in split], names=self.names)
            for split in (train, held_out)
        )

    def majority(self, train: "Labelled") -> float:
        """Return the accuracy of a constant answer: the most frequent class of ``train``."""
        (most, _), *_ = Counter(train.labels).most_common(1)
        return sum(label == most for label in self.labels) / len(self.labels)


def read_table(path: Path) -> Labelled:
    """Read the rows of a file.

    Raises:
        SystemExit: a file that is missing, of another kind, without the columns, with a row that lacks text or label, or
            with fewer than two classes or too few rows to hold any out; in one line.
    """
    readers = {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise SystemExit(f"{path}: the ending {path.suffix!r} says nothing; give a file that ends in {', '.join(readers)}")
    if not path.is_file():
        raise SystemExit(f"{path}: there is no such file; check --data")
    if path.stat().st_size == 0:
        raise SystemExit(f"{path}: the file is empty; it needs rows with {' and '.join(COLUMNS)}")
    rows = [_checked(path, index, row) for index, row in enumerate(readers[path.suffix](path), 1)]
    if len(rows) < HELD_OUT_EVERY:
        raise SystemExit(f"{path}: {len(rows)} rows, of which none would be held out; {HELD_OUT_EVERY} are the least")
    labels = {label for _, label in rows}
    if len(labels) < 2:
        raise SystemExit(f"{path}: every label is {labels.pop()!r}; at least two classes are needed")
    names = sorted(labels, key=lambda label: (not _whole(label), int(label) if _whole(label) else 0, label))
    number = {name: index for index, name in enumerate(names)}
    return Labelled(texts=[text for text, _ in rows], labels=[number[label] for _, label in rows], names=names)


def _whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _checked(path: Path, number: int, row: dict[str, Any]) -> tuple[str, str]:
    """Return the text and label of row ``number``, counted from 1."""
    absent = [name for name in COLUMNS if name not in row]
    if absent:
        has = ", ".join(map(str, row)) or "none"
        raise SystemExit(f"{path}: row {number} has no column {absent[0]!r}; its columns are {has}: rename one of them")
    text, label = row["text"], row["label"]
    if not isinstance(text, str) or not text.strip():
        raise SystemExit(f"{path}: row {number}: text is {text!r}; leave the row out")
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise SystemExit(f"{path}: row {number}: label is {label!r}; use a word or a whole number")
    return text, str(label)


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        content = file.read()
    # The file is closed also if a row is refused.
    yield from csv.DictReader(io.StringIO(content, newline=""))


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SystemExit(f"{path}: line {number} is no JSON: {error}; one object stands on each line") from None
        if not isinstance(row, dict):
            raise SystemExit(f"{path}: line {number} is no JSON object but {line.strip()[:40]}; one object stands on each line")
        yield row


def _parquet(path: Path) -> Iterable[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise SystemExit(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        schema = parquet.read_schema(path)
        wanted = [name for name in schema.names if name in COLUMNS]
        return parquet.read_table(path, columns=wanted if len(wanted) == len(COLUMNS) else None).to_pylist()
    except ArrowException as error:
        raise SystemExit(f"{path}: no Parquet file: {str(error).splitlines()[0]}") from None


class Tokenized(Dataset):
    """Samples ``{"input_ids": int64 [seq], "attention_mask": int64 [seq], "labels": int64 []}``, made when they are read.

    Texts are cut and padded to ``seq`` tokens; the attention mask is 0 on padding. ``tokenizer`` is one of transformers.
    """

    def __init__(self, rows: Labelled, tokenizer: Callable[..., Any], seq: int) -> None:
        self.rows, self.tokenizer, self.seq = rows, tokenizer, seq

    def __len__(self) -> int:
        return len(self.rows.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = self.tokenizer(self.rows.texts[index], truncation=True, padding="max_length", max_length=self.seq)
        return {
            "input_ids": torch.tensor(made["input_ids"]),
            "attention_mask": torch.tensor(made["attention_mask"]),
            "labels": torch.tensor(self.rows.labels[index]),
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that a resumed run must find again: other texts, labels or lengths are other data."""
        content = json.dumps([list(self.rows.texts), list(self.rows.labels), list(self.rows.names)])
        return {"count": len(self), "seq": self.seq, "content": zlib.crc32(content.encode())}
