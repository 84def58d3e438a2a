"""Samples of an input, one after the other, whatever it is. Memory does not grow with the input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from dtrain import storage
from dtrain.cli.data.opened import open_binary, open_plain
from dtrain.cli.data.sources import Input
from dtrain.errors import ConfigError, DataError
from dtrain.extras import missing

Sample = Mapping[str, Any]
Advance = Callable[[int], None]

_LARGEST_DOCUMENT = 2**31  # bytes: a document is read whole
_LARGEST_STATE = 2**26
_MARK = b"\xef\xbb\xbf"  # some programs put it before UTF-8


def samples_of(given: Input, advance: Advance, *, as_bytes: bool = False) -> Iterator[Sample]:
    """The samples of an input.

    Args:
        given: the file or folder.
        advance: told about bytes as they are read.
        as_bytes: lines and documents stay bytes, which need not be UTF-8.

    Raises:
        ConfigError: a package that is not installed, or a folder of another kind.
        DataError: a sample that cannot be read: which file, where in it, and why.
    """
    reader = _READERS[given.kind]
    samples = reader(given, advance, as_bytes) if reader in (_lines, _documents) else reader(given, advance)
    try:
        yield from samples
    except DataError as error:
        raise error if str(error).startswith(given.name) else DataError(f"{given.name}: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{given.name}: {' '.join(str(error).split())}") from error


def _numbered_lines(given: Input, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, and their numbers from 1. Only a line feed ends a line, after a carriage return or not."""
    with open_plain(given.place, advance) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_MARK) if number == 1 else line
            if text := line.rstrip(b"\r\n"):
                yield number, text


def _jsonl(given: Input, advance: Advance) -> Iterator[Sample]:
    for number, line in _numbered_lines(given, advance):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{given.name}, line {number}: is no JSON: {' '.join(str(error).split())}") from error
        if not isinstance(sample, dict):
            raise DataError(f"{given.name}, line {number}: is a JSON {type(sample).__name__}, not an object with columns")
        yield sample


def _lines(given: Input, advance: Advance, as_bytes: bool) -> Iterator[Sample]:
    for number, line in _numbered_lines(given, advance):
        yield {"text": line if as_bytes else _text(line, f"{given.name}, line {number}")}


def _documents(given: Input, advance: Advance, as_bytes: bool) -> Iterator[Sample]:
    with open_plain(given.place, advance) as file:
        content = file.read(_LARGEST_DOCUMENT + 1)
    if len(content) > _LARGEST_DOCUMENT:
        raise DataError(f"{given.name}: is larger than {_LARGEST_DOCUMENT} bytes, which are read at once; use --from lines")
    yield {"text": content if as_bytes else _text(content, given.name)}


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8: {error.reason} at byte {error.start}") from error


def _files(given: Input, advance: Advance) -> Iterator[Sample]:
    with open_binary(given.place, advance) as file:
        yield {"name": given.name, "data": file.read()}


def _separated(given: Input, advance: Advance) -> Iterator[Sample]:
    before = csv.field_size_limit(_LARGEST_DOCUMENT)  # of the whole process; 128 KiB is less than many a document has
    try:
        yield from _rows(given, advance)
    finally:
        csv.field_size_limit(before)


def _rows(given: Input, advance: Advance) -> Iterator[Sample]:
    with open_plain(given.place, advance) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.reader(text, dialect="excel-tab" if given.kind == "tsv" else "excel", strict=True)
        head = next(rows, None)
        if not head or "" in head or len(set(head)) < len(head):
            raise DataError(f"{given.name}: its first line must name each column once, got {head}")
        for row in rows:
            if row and len(row) != len(head):
                raise DataError(f"{given.name}, line {rows.line_num}: has {len(row)} values for {len(head)} columns")
            if row:
                yield dict(zip(head, row, strict=True))


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing("Parquet and Arrow files need the package pyarrow", "parquet") from None
    return pyarrow


def _parquet(given: Input, advance: Advance) -> Iterator[Sample]:
    arrow = _arrow()
    import pyarrow.parquet

    with open_binary(given.place, advance) as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        except arrow.ArrowException as error:
            raise DataError(f"{given.name}: {' '.join(str(error).split())}") from error


def _hugging_face(given: Input, advance: Advance) -> Iterator[Sample]:
    """What ``Dataset.save_to_disk`` wrote: a list of files, each a stream of Arrow's."""
    arrow = _arrow()
    try:
        state = json.loads(storage.read_file(given.place / "state.json", limit=_LARGEST_STATE))
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{given.name!r} is no folder that Dataset.save_to_disk wrote: {error!r}") from error
    for name in names:
        with open_binary(given.place / name, advance) as file:
            try:
                for batch in arrow.ipc.open_stream(file):
                    yield from batch.to_pylist()
            except arrow.ArrowException as error:
                raise DataError(f"{given.name}: {name}: {' '.join(str(error).split())}") from error


def _shards(given: Input, advance: Advance) -> Iterator[Sample]:
    from dtrain.data.stream.dataset import ShardedDataset

    dataset = ShardedDataset(str(given.place))
    with closing(dataset):
        begin = 0
        for entry in dataset.entries:
            for index in range(begin, begin + entry.samples):
                yield dataset[index]
            begin += entry.samples
            advance(entry.file.size)


_READERS: dict[str, Callable[..., Iterator[Sample]]] = {
    "jsonl": _jsonl,
    "csv": _separated,
    "tsv": _separated,
    "parquet": _parquet,
    "lines": _lines,
    "documents": _documents,
    "files": _files,
    "hf": _hugging_face,
    "shards": _shards,
}
