"""A file of any place as Python's file objects have it, so that readers of other packages take it; bytes read are reported.

What the sources on the command line stand for: files, in a fixed order, and how each is read.

Samples of an input, one after the other, whatever it is. Memory does not grow with the input."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dtrain import storage
from dtrain.errors import ConfigError, DataError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.storage import AnyPath

_LOCAL_READ_BYTES = 2**18  # bytes of one read of a local file
_REMOTE_READ_BYTES = 2**23  # on a server a request costs more than the bytes
_CHUNK_BYTES = 2**18  # of what is unpacked


class _StorageRawIO(io.RawIOBase):
    def __init__(self, place: AnyPath, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._file = storage.FileReader(place, quiet=True)
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

    def tell(self) -> int:
        return self._at

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(out), max(0, self._file.size - self._at))
        got = self._file.read_into(self._at, memoryview(out).cast("B")[:wanted])
        self._at += got
        self._advance(got)
        return got

    def close(self) -> None:
        if not self.closed:
            self._file.__exit__(None, None, None)
        super().close()


def open_binary(place: AnyPath, advance: Callable[[int], None]) -> io.BufferedReader:
    """The file, buffered. ``advance`` is told about bytes as they are read."""
    raw = _StorageRawIO(place, advance)
    return io.BufferedReader(raw, raw.piece)


class _ChunkRawIO(io.RawIOBase):
    """Pieces of bytes as one file, read from its beginning."""

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
        taken = min(len(out), len(self._rest))
        out[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken


@contextmanager
def open_decompressed(place: AnyPath, advance: Callable[[int], None]) -> Iterator[io.BufferedReader]:
    """The file's content after decompression, if the end of its name tells one."""
    with open_binary(place, advance) as file:
        if (compression := infer_compression(place.name)) is None:
            yield file
            return
        from dtrain.data.stream.formats.compression import decompress

        yield io.BufferedReader(_ChunkRawIO(decompress(compression, iter(lambda: file.read(_CHUNK_BYTES), b""))), _CHUNK_BYTES)


def infer_compression(name: str) -> str | None:
    """The compression that the end of a file's name tells."""
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
_KIND_ADVICE = f"say how with --from, one of {', '.join(INPUT_KINDS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInput:
    """One file, or a folder that is read as a whole.

    Args:
        place: where it is.
        kind: how it is read.
        name: what it is called in messages and in the column ``name``: of a folder's files, from that folder on.
        bytes: its size; of a folder, that of all files in it.
    """

    place: AnyPath
    kind: InputKind
    name: str
    bytes: int = 0


def find_inputs(sources: Sequence[str], kind: str | None) -> list[DataInput]:
    """What is to be read, in order: sources as given, files of a folder or pattern by their names.

    Args:
        sources: files, folders, URLs, patterns.
        kind: how to read them; None: as their names say.

    Raises:
        ConfigError: one does not exist, matches nothing, or its kind cannot be told.
    """
    chosen = cast("InputKind | None", kind)
    return [found for source in sources for found in _find_source_inputs(source, chosen)]


def _find_source_inputs(source: str, kind: InputKind | None) -> list[DataInput]:
    if not source:
        raise ConfigError("a source is empty; name a file, a folder or a pattern")
    if "://" not in source and glob.has_magic(source) and not os.path.lexists(source):
        paths = [Path(path) for path in sorted(glob.glob(source, recursive=True))]
        found = [_file_input(storage.resolve_path(path), str(path), kind) for path in paths if path.is_file()]
        if not found:
            raise ConfigError(f"no file matches {source!r}; ** crosses folders")
        return found
    place = storage.resolve_path(source)
    if (size := storage.file_size(place)) is not None:
        return [_file_input(place, source, kind, size)]
    if not storage.is_folder(place):
        raise ConfigError(f"no such file or folder: {source!r}; check the path")
    return _folder_inputs(place, source, kind)


def _file_input(place: AnyPath, name: str, kind: InputKind | None, size: int | None = None) -> DataInput:
    kind = kind or _infer_kind(place.name)
    if kind is None:
        raise ConfigError(f"{name!r}: its name does not tell how to read it; {_KIND_ADVICE}")
    if kind in _WHOLE_FOLDERS:
        raise ConfigError(f"{name!r} is a file, and --from {kind} reads folders; {_KIND_ADVICE}")
    return DataInput(place=place, kind=kind, name=name, bytes=(storage.file_size(place) or 0) if size is None else size)


def _infer_kind(name: str) -> InputKind | None:
    plain = name if infer_compression(name) is None else name.rpartition(".")[0]
    return next((kind for suffix, kind in _KIND_BY_SUFFIX.items() if plain.lower().endswith(suffix)), None)


def _folder_inputs(folder: AnyPath, source: str, kind: InputKind | None) -> list[DataInput]:
    kind = kind or _infer_folder_kind(folder, source)
    if kind in _WHOLE_FOLDERS:
        return [DataInput(place=folder, kind=kind, name=source, bytes=sum(size for _, size in storage.walk_files(folder)))]
    below = [
        found for found in sorted(storage.walk_files(folder)) if not any(part.startswith(".") for part in found[0].split("/"))
    ]
    found = [
        _file_input(folder / name, name, kind, size)
        for name, size in below
        if kind is not None or _infer_kind(name) is not None
    ]
    if not found:
        what = f"none of its {len(below)} files has a name that tells how to read it" if below else "it has no files"
        raise ConfigError(f"{source!r}: {what}; {_KIND_ADVICE}")
    return found


def _infer_folder_kind(folder: AnyPath, source: str) -> InputKind | None:
    names = storage.list_names(folder)
    if "dataset_dict.json" in names:
        splits = [name for name in names if storage.exists(folder / name / "state.json")]
        example = splits[0] if splits else "train"
        raise ConfigError(f"{source!r} has the splits {', '.join(splits)}; name one, as in {source.rstrip('/')}/{example}")
    if {"state.json", "dataset_info.json"} <= set(names):
        return "hf"
    return "shards" if "index.json" in names or any(name.endswith(".tar") for name in names) else None


InputSample = Mapping[str, Any]
ReportBytes = Callable[[int], None]

_MAX_DOCUMENT_BYTES = 2**31  # bytes: a document is read whole
_MAX_STATE_BYTES = 2**26
_UTF8_BOM = b"\xef\xbb\xbf"  # some programs put it before UTF-8


def read_samples(given: DataInput, advance: ReportBytes, *, as_bytes: bool = False) -> Iterator[InputSample]:
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
    samples = reader(given, advance, as_bytes) if reader in (_read_lines, _read_document) else reader(given, advance)
    try:
        yield from samples
    except DataError as error:
        raise error if str(error).startswith(given.name) else DataError(f"{given.name}: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{given.name}: {' '.join(str(error).split())}") from error


def _iter_lines(given: DataInput, advance: ReportBytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, and their numbers from 1. Only a line feed ends a line, after a carriage return or not."""
    with open_decompressed(given.place, advance) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_UTF8_BOM) if number == 1 else line
            if text := line.rstrip(b"\r\n"):
                yield number, text


def _read_jsonl(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    for number, line in _iter_lines(given, advance):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{given.name}, line {number}: is no JSON: {' '.join(str(error).split())}") from error
        if not isinstance(sample, dict):
            raise DataError(f"{given.name}, line {number}: is a JSON {type(sample).__name__}, not an object with columns")
        yield sample


def _read_lines(given: DataInput, advance: ReportBytes, as_bytes: bool) -> Iterator[InputSample]:
    for number, line in _iter_lines(given, advance):
        yield {"text": line if as_bytes else _decode_text(line, f"{given.name}, line {number}")}


def _read_document(given: DataInput, advance: ReportBytes, as_bytes: bool) -> Iterator[InputSample]:
    with open_decompressed(given.place, advance) as file:
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        raise DataError(f"{given.name}: is larger than {_MAX_DOCUMENT_BYTES} bytes, which are read at once; use --from lines")
    yield {"text": content if as_bytes else _decode_text(content, given.name)}


def _decode_text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_file(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    with open_binary(given.place, advance) as file:
        yield {"name": given.name, "data": file.read()}


def _read_csv(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    before = csv.field_size_limit(_MAX_DOCUMENT_BYTES)  # of the whole process; 128 KiB is less than many a document has
    try:
        yield from _read_csv_rows(given, advance)
    finally:
        csv.field_size_limit(before)


def _read_csv_rows(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    with open_decompressed(given.place, advance) as file:
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


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_extra_error("Parquet and Arrow files need the package pyarrow", "parquet") from None
    return pyarrow


def _read_parquet(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    arrow = _import_pyarrow()
    import pyarrow.parquet

    with open_binary(given.place, advance) as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        except arrow.ArrowException as error:
            raise DataError(f"{given.name}: {' '.join(str(error).split())}") from error


def _read_hugging_face(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    """What ``Dataset.save_to_disk`` wrote: a list of files, each a stream of Arrow's."""
    arrow = _import_pyarrow()
    try:
        state = json.loads(storage.read_file(given.place / "state.json", limit=_MAX_STATE_BYTES))
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


def _read_shards(given: DataInput, advance: ReportBytes) -> Iterator[InputSample]:
    from dtrain.data.stream.sharded_dataset import ShardedDataset

    dataset = ShardedDataset(str(given.place))
    with closing(dataset):
        begin = 0
        for entry in dataset.entries:
            for index in range(begin, begin + entry.samples):
                yield dataset[index]
            begin += entry.samples
            advance(entry.file.size)


_READERS: dict[str, Callable[..., Iterator[InputSample]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "lines": _read_lines,
    "documents": _read_document,
    "files": _read_file,
    "hf": _read_hugging_face,
    "shards": _read_shards,
}
