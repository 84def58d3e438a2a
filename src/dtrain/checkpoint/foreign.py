"""Safetensors files that others wrote: one alone, or the folder that Hugging Face's ``save_pretrained`` makes.

::

    model.safetensors                      the only file, or
    model-00001-of-00002.safetensors ...   several, and
    model.safetensors.index.json           {"metadata": {...}, "weight_map": {"<tensor>": "<file>", ...}}

They hold no digests, so what can be checked is their form. Nothing in them is believed before it is checked.

Source: the format section of the safetensors README (huggingface/safetensors), which also sets the limit of the header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.checkpoint import closed
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import stored_boxes
from dtrain.checkpoint.rank_index import Entry
from dtrain.checkpoint.stored import Stored
from dtrain.errors import CheckpointError, DamagedCheckpointError
from dtrain.storage import Place

SUFFIX = ".safetensors"
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_ENTRY_FIELDS = ("dtype", "shape", "data_offsets")
_NOT_READ = frozenset({"C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})  # which the format knows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a file says about itself: its tensors, and a digest of the header and the size."""

    entries: tuple[Entry, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _PlainFile:
    """A file without digests."""

    file: storage.FileReader
    name: str
    chunks: None = None

    def read(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)``.

        Raises:
            DamagedCheckpointError: the file ends before.
        """
        out = bytearray(end - begin)
        got = self.file.read_into(begin, memoryview(out))
        if got != len(out):
            raise DamagedCheckpointError(f"{self.name}: ends at byte {begin + got}, {end} or more were promised")
        return bytes(out)


def in_file(path: Place) -> Stored:
    """The tensors of one safetensors file.

    Raises:
        DamagedCheckpointError: its form is wrong.
        OSError: it cannot be read.
    """
    return _stored(path.parent, [path.name], [_read_header(path)])


def is_model_folder(path: Place) -> bool:
    """Whether ``in_folder`` is for this folder."""
    return storage.exists(path / MODEL) or storage.exists(path / INDEX)


def in_folder(folder: Place) -> Stored:
    """The tensors of a folder that holds ``model.safetensors``, or else ``model.safetensors.index.json``.

    Raises:
        DamagedCheckpointError: a file is missing or its form is wrong, or the index does not say what is in the files.
        OSError: a file cannot be read.
    """
    if storage.exists(folder / MODEL):
        return in_file(folder / MODEL)
    file_of = _read_index(folder)
    names = sorted(set(file_of.values()))
    absent = next((name for name in names if storage.file_size(folder / name) is None), None)
    if absent is not None:
        raise DamagedCheckpointError(f"{absent}: {INDEX} names it, but it is missing")
    headers = [_read_header(folder / name) for name in names]
    for name, header in zip(names, headers, strict=True):
        here = {entry.key for entry in header.entries}
        stray = sorted(here ^ {key for key, file in file_of.items() if file == name})
        if stray:
            what = "holds" if stray[0] in here else "does not hold"
            raise DamagedCheckpointError(f"{name}: {what} {stray[0]!r}, {INDEX} says otherwise ({len(stray)} such tensors)")
    return _stored(folder, names, headers)


def _stored(folder: Place, names: Sequence[str], headers: Sequence[_Header]) -> Stored:
    @contextmanager
    def open_file(number: int) -> Iterator[_PlainFile]:
        with storage.FileReader(folder / names[number]) as file:
            yield _PlainFile(file=file, name=names[number])

    entries = [entry for header in headers for entry in header.entries]
    return Stored(
        identity=hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest(),
        refs={e.key: TensorRef(dtype=e.dtype, shape=e.shape, distributed=False) for e in entries},
        boxes=stored_boxes([header.entries for header in headers]),
        open_file=open_file,
    )


def _read_index(folder: Place) -> dict[str, str]:
    """The file of each tensor, by name, all of them in the folder itself."""
    content = closed.parse(storage.read_file(folder / INDEX, limit=closed.MAX_JSON_BYTES), INDEX)
    found = content.get("weight_map") if type(content) is dict else None
    if type(found) is not dict or not found:
        raise DamagedCheckpointError(f"{INDEX}: needs an object with a weight_map, got {closed.kind(content)}")
    for tensor, name in found.items():
        if type(name) is not str or Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
            raise DamagedCheckpointError(
                f"{INDEX}: weight_map: {tensor}: needs the name of a {SUFFIX} file beside it, got {closed.kind(name)}"
            )
    return found


def _read_header(path: Place) -> _Header:
    """The header of a file, which describes all of its bytes."""
    with storage.FileReader(path) as file:
        reader = _PlainFile(file=file, name=path.name)
        if file.size < 8:
            raise DamagedCheckpointError(f"{path.name}: {file.size} bytes are no safetensors file")
        length = int.from_bytes(reader.read(0, 8), "little")
        if length > min(_MAX_HEADER_BYTES, file.size - 8):
            raise DamagedCheckpointError(
                f"{path.name}: its header would have {length} bytes, the file has {file.size}; it is truncated or no "
                "safetensors file"
            )
        text = reader.read(8, 8 + length)
        entries = _entries(closed.parse(text, path.name), path.name, 8 + length)
        _check_cover(entries, path.name, 8 + length, file.size)
        digest = hashlib.sha256(text + str(file.size).encode()).hexdigest()
    return _Header(entries=entries, digest=digest)


def _entries(header: Any, where: str, data_begin: int) -> tuple[Entry, ...]:
    if type(header) is not dict:
        raise DamagedCheckpointError(f"{where}: header: needs an object, got {closed.kind(header)}")
    return tuple(_entry(key, value, f"{where}: {key}", data_begin) for key, value in header.items() if key != "__metadata__")


def _entry(key: str, value: Any, where: str, data_begin: int) -> Entry:
    raw = closed.record(value, where, _ENTRY_FIELDS)
    dtype, shape = closed.text(raw["dtype"], where), closed.wholes(raw["shape"], where)
    offsets = closed.wholes(raw["data_offsets"], where)
    if dtype in _NOT_READ:
        raise CheckpointError(f"{where}: is of dtype {dtype}, which dtrain does not read; convert the file without it")
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    needed = prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise DamagedCheckpointError(f"{where}: data_offsets {list(offsets)} for {needed} bytes of {dtype} {list(shape)}")
    begin, end = (data_begin + offset for offset in offsets)
    return Entry(key=key, dtype=dtype, shape=shape, offset=(0,) * len(shape), size=shape, begin=begin, end=end)


def _check_cover(entries: Sequence[Entry], where: str, data_begin: int, size: int) -> None:
    """Tensors lie one after the other and end with the file, as the format demands: this shows a truncated file."""
    at = data_begin
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            raise DamagedCheckpointError(f"{where}: {entry.key}: begins at byte {entry.begin}, the tensor before ends at {at}")
        at = entry.end
    if at != size:
        raise DamagedCheckpointError(f"{where}: has {size} bytes, its header describes {at}; it is truncated or was altered")
