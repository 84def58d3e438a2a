"""Find the input files of ``dtrain data``, open them, and read their samples one by one. Memory does not grow with an input."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dtrain import storage
from dtrain.arguments import format_count, single_line
from dtrain.errors import ConfigError, DataError
from dtrain.packages import missing_extra_error
from dtrain.storage import AnyPath

_LOCAL_READ_BYTES = 2**18  # bytes
# On a server, a request costs more than its bytes.
_REMOTE_READ_BYTES = 2**23  # bytes
_CHUNK_BYTES = 2**18  # decompressed bytes


class _StorageRawIO(io.RawIOBase):
    def __init__(self, path: AnyPath, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._file = storage.FileReader(path, quiet=True)
        self._advance = advance
        self._at = 0
        self.piece = _REMOTE_READ_BYTES if self._file.is_remote else _LOCAL_READ_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence] + offset)
        return self._at

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]
        count = min(len(out), max(0, self._file.size - self._at))
        read = self._file.read_into(self._at, memoryview(out).cast("B")[:count])
        self._at += read
        self._advance(read)
        return read

    def close(self) -> None:
        if not self.closed:
            self._file.__exit__(None, None, None)
        super().close()


def open_binary(path: AnyPath, advance: Callable[[int], None]) -> io.BufferedReader:
    """Open a file as a buffered binary file. ``advance`` is called with the number of bytes of each read."""
    raw = _StorageRawIO(path, advance)
    return io.BufferedReader(raw, raw.piece)


class _ChunkRawIO(io.RawIOBase):
    """Binary file of chunks, read from the beginning."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(out), len(self._rest))
        out[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


@contextmanager
def open_decompressed(path: AnyPath, advance: Callable[[int], None]) -> Iterator[io.BufferedReader]:
    """Open a file, and decompress its content if the suffix of its name is a compression."""
    with open_binary(path, advance) as file:
        if (compression := infer_compression(path.name)) is None:
            yield file
            return
        from dtrain.data.stream.formats.compression import decompress

        yield io.BufferedReader(_ChunkRawIO(decompress(compression, iter(lambda: file.read(_CHUNK_BYTES), b""))), _CHUNK_BYTES)


def infer_compression(name: str) -> str | None:
    """Return the compression of a file's suffix, None without one."""
    from dtrain.data.stream.formats.compression import COMPRESSION_SUFFIXES

    return next((compression for suffix, compression in COMPRESSION_SUFFIXES.items() if name.lower().endswith(suffix)), None)


InputKind = Literal["jsonl", "csv", "tsv", "parquet", "lines", "documents", "files", "hf", "shards"]
INPUT_KINDS = get_args(InputKind)

_KIND_BY_SUFFIX: dict[str, InputKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "lines",
    ".text": "lines",
}
_WHOLE_FOLDERS = ("hf", "shards")
_KIND_ADVICE = f"Pass --from, one of {', '.join(INPUT_KINDS)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInput:
    """File, or folder that is read as a whole.

    Args:
        place: path of the file or folder.
        kind: format.
        name: name in messages and in the column ``name``; relative to the source for files of a folder.
        bytes: size of the file, or of all files in the folder.
    """

    place: AnyPath
    kind: InputKind
    name: str
    bytes: int = 0


def find_inputs(sources: Sequence[str], kind: str | None) -> list[DataInput]:
    """Find the inputs of ``sources``, in order: sources in the given order, files of a folder or pattern by name.

    Args:
        sources: files, folders, URLs, patterns.
        kind: format; None infers the format from names.

    Raises:
        ConfigError: a source does not exist, matches no file, or has an unknown format.
    """
    input_kind = cast("InputKind | None", kind)
    inputs: list[DataInput] = []
    for source in sources:
        if not source:
            raise ConfigError("a source must not be empty. Name a file, a folder or a pattern.")
        if "://" not in source and glob.has_magic(source) and not os.path.lexists(source):
            paths = [Path(path) for path in sorted(glob.glob(source, recursive=True))]
            if not (files := [path for path in paths if path.is_file()]):
                raise ConfigError(f"no file matches {source!r}. Use ** to match across folders.")
            inputs += [_file_input(storage.resolve_path(path), str(path), input_kind) for path in files]
            continue
        place = storage.resolve_path(source)
        if (size := storage.file_size(place)) is not None:
            inputs.append(_file_input(place, source, input_kind, size))
        elif storage.is_folder(place):
            inputs += _folder_inputs(place, source, input_kind)
        else:
            raise ConfigError(f"no such file or folder: {source!r}. Check the path.")
    return inputs


def _file_input(place: AnyPath, name: str, kind: InputKind | None, size: int | None = None) -> DataInput:
    kind = kind or _infer_kind(place.name)
    if kind is None:
        raise ConfigError(f"{name!r}: the format cannot be inferred from the name. {_KIND_ADVICE}")
    if kind in _WHOLE_FOLDERS:
        raise ConfigError(f"{name!r} is a file, but --from {kind} reads folders. {_KIND_ADVICE}")
    return DataInput(place=place, kind=kind, name=name, bytes=(storage.file_size(place) or 0) if size is None else size)


def _infer_kind(name: str) -> InputKind | None:
    plain = name if infer_compression(name) is None else name.rpartition(".")[0]
    return next((kind for suffix, kind in _KIND_BY_SUFFIX.items() if plain.lower().endswith(suffix)), None)


def _folder_inputs(folder: AnyPath, source: str, kind: InputKind | None) -> list[DataInput]:
    names = [] if kind is not None else storage.list_names(folder)
    if "dataset_dict.json" in names:
        splits = [name for name in names if storage.exists(folder / name / "state.json")]
        example = splits[0] if splits else "train"
        raise ConfigError(f"{source!r} has the splits {', '.join(splits)}. Name one, as in {source.rstrip('/')}/{example}.")
    if {"state.json", "dataset_info.json"} <= set(names):
        kind = "hf"
    elif "index.json" in names or any(name.endswith(".tar") for name in names):
        kind = "shards"
    if kind in _WHOLE_FOLDERS:
        return [DataInput(place=folder, kind=kind, name=source, bytes=sum(size for _, size in storage.walk_files(folder)))]
    files = [
        file for file in sorted(storage.walk_files(folder)) if not any(part.startswith(".") for part in file[0].split("/"))
    ]
    inputs = [
        _file_input(folder / name, name, kind, size)
        for name, size in files
        if kind is not None or _infer_kind(name) is not None
    ]
    if not inputs:
        problem = "none of its files has a name with a known format" if files else "it has no files"
        raise ConfigError(f"{source!r}: {problem}. {_KIND_ADVICE}")
    return inputs


InputSample = Mapping[str, Any]
ReportBytes = Callable[[int], None]

# A document is read as a whole.
_MAX_DOCUMENT_BYTES = 2**31  # bytes
_MAX_STATE_BYTES = 2**26
# Some programs write this mark before UTF-8 text.
_UTF8_BOM = b"\xef\xbb\xbf"


def read_samples(data_input: DataInput, advance: ReportBytes, *, as_bytes: bool = False) -> Iterator[InputSample]:
    """Yield the samples of an input.

    Args:
        data_input: the file or folder.
        advance: function that is called with the number of bytes of each read.
        as_bytes: if True, lines and documents stay bytes, which need not be UTF-8.

    Raises:
        ConfigError: a package is not installed, or the folder has another format.
        DataError: a sample cannot be read; the message has the file, the position and the reason.
    """
    reader = _READERS[data_input.kind]
    samples = reader(data_input, advance, as_bytes) if reader in (read_lines, read_document) else reader(data_input, advance)
    try:
        yield from samples
    except DataError as error:
        raise error if str(error).startswith(data_input.name) else DataError(f"{data_input.name}: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{data_input.name}: {single_line(error)}") from error


def _iter_lines(data_input: DataInput, advance: ReportBytes) -> Iterator[tuple[int, bytes]]:
    """Yield non-empty lines with their numbers from 1. A line ends with a line feed, after an optional carriage return."""
    with open_decompressed(data_input.place, advance) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_UTF8_BOM) if number == 1 else line
            if text := line.rstrip(b"\r\n"):
                yield number, text


def read_jsonl(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the JSON objects of a file with one object per line."""
    for number, line in _iter_lines(data_input, advance):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = single_line(error)
            raise DataError(
                f"{data_input.name}, line {number}: is not JSON: {reason}. Correct this line; each line is one JSON object."
            ) from error
        if not isinstance(sample, dict):
            raise DataError(
                f"{data_input.name}, line {number}: is a JSON {type(sample).__name__}, not an object with columns. "
                f'Write one JSON object per line, such as {{"text": "..."}}.'
            )
        yield sample


def read_lines(data_input: DataInput, advance: ReportBytes, as_bytes: bool) -> Iterator[InputSample]:
    """Yield the non-empty lines of a file."""
    for number, line in _iter_lines(data_input, advance):
        yield {"text": line if as_bytes else _decode_text(line, f"{data_input.name}, line {number}")}


def read_document(data_input: DataInput, advance: ReportBytes, as_bytes: bool) -> Iterator[InputSample]:
    """Yield the whole text of a file."""
    with open_decompressed(data_input.place, advance) as file:
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{data_input.name}: is larger than {_MAX_DOCUMENT_BYTES} bytes, which are read at once. Use --from lines."
        )
    yield {"text": content if as_bytes else _decode_text(content, data_input.name)}


def _decode_text(content: bytes, location: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{location}: is not UTF-8: {error.reason} at byte {error.start}. "
            "Convert the file to UTF-8, with iconv for example."
        ) from error


def read_file(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the bytes of a file with its name."""
    with open_binary(data_input.place, advance) as file:
        yield {"name": data_input.name, "data": file.read()}


def read_csv(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the rows of a table by column. All values are text."""
    # The limit is global. Its default of 128 KiB is less than many documents have.
    before = csv.field_size_limit(_MAX_DOCUMENT_BYTES)
    try:
        with open_decompressed(data_input.place, advance) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = csv.reader(text, dialect="excel-tab" if data_input.kind == "tsv" else "excel", strict=True)
            columns = next(rows, None)
            if not columns or "" in columns or len(set(columns)) < len(columns):
                raise DataError(
                    f"{data_input.name}: the first line must name each column once, got {columns}. "
                    "Write a header line with different names."
                )
            for row in filter(None, rows):
                if len(row) != len(columns):
                    raise DataError(
                        f"{data_input.name}, line {rows.line_num}: has {format_count(len(row), 'value')} "
                        f"for {len(columns)} columns. Quote values that contain commas or line ends."
                    )
                yield dict(zip(columns, row, strict=True))
    finally:
        csv.field_size_limit(before)


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_extra_error("Parquet and Arrow files need the package pyarrow", "parquet") from None
    return pyarrow


def read_parquet(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the rows of a Parquet file."""
    arrow = _import_pyarrow()
    import pyarrow.parquet

    with open_binary(data_input.place, advance) as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        except arrow.ArrowException as error:
            raise DataError(f"{data_input.name}: {single_line(error)}") from error


def read_hugging_face(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the samples of a folder of ``Dataset.save_to_disk``: a list of files, each an Arrow stream."""
    arrow = _import_pyarrow()
    try:
        state = json.loads(storage.read_file(data_input.place / "state.json", limit=_MAX_STATE_BYTES))
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{data_input.name!r} is not a folder that Dataset.save_to_disk wrote: {error!r}. "
            "Pass the folder that save_to_disk wrote, or a .jsonl, .csv or .parquet file."
        ) from error
    for name in names:
        with open_binary(data_input.place / name, advance) as file:
            try:
                for batch in arrow.ipc.open_stream(file):
                    yield from batch.to_pylist()
            except arrow.ArrowException as error:
                raise DataError(f"{data_input.name}: {name}: {single_line(error)}") from error


def read_shards(data_input: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """Yield the samples of a dataset of shards."""
    from dtrain.data.stream.sharded_dataset import ShardedDataset

    dataset = ShardedDataset(str(data_input.place))
    with closing(dataset):
        indexes = iter(range(len(dataset)))
        for entry in dataset.entries:
            yield from map(dataset.__getitem__, islice(indexes, entry.samples))
            advance(entry.file.size)


_READERS: dict[str, Callable[..., Iterator[InputSample]]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": read_csv,
    "parquet": read_parquet,
    "lines": read_lines,
    "documents": read_document,
    "files": read_file,
    "hf": read_hugging_face,
    "shards": read_shards,
}
