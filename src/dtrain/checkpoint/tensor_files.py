"""Named tensors in files, whoever wrote them: what they are, where they lie, and how to read them.

Safetensors files that others wrote: one alone, or the folder that Hugging Face's ``save_pretrained`` makes.

::

    model.safetensors                      the only file, or
    model-00001-of-00002.safetensors ...   several, and
    model.safetensors.index.json           {"metadata": {...}, "weight_map": {"<tensor>": "<file>", ...}}

They hold no digests, so what can be checked is their form. Nothing in them is believed before it is checked.

Source: the format section of the safetensors README (huggingface/safetensors), which also sets the limit of the header."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.checkpoint import strict_json, tree_json
from dtrain.checkpoint.checkpoint_info import read_manifest_bytes
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.rank_index import TensorShardEntry
from dtrain.checkpoint.read_tensors import FileOpener
from dtrain.checkpoint.reader import open_checkpoint, with_buffers_of
from dtrain.checkpoint.reshard import StoredShard, index_shards
from dtrain.checkpoint.tree_json import TensorRef
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.storage import AnyPath

_SECTIONS = ("params", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TensorFiles:
    """Tensors by name, and the files that hold them.

    Args:
        content_hash: a digest that is equal for equal files; ranks compare it.
        refs: dtype and shape by name.
        shards: by name, the parts that each tensor is stored in; none for an empty one.
        open_file: opens a file by its number.
    """

    content_hash: str
    refs: Mapping[str, TensorRef]
    shards: Mapping[str, Sequence[StoredShard]]
    open_file: FileOpener


def open_step(folder: AnyPath, rank: int, *, state: str | None = None) -> TensorFiles:
    """The parameters and buffers of a step of ours, by their names in the model.

    Args:
        folder: of the step.
        rank: whose buffers to take where each rank saved its own: those of ``rank % saved world size``.
        state: which one, of a step that holds several.

    Raises:
        CheckpointMismatchError: it holds no state of this name.
        CorruptCheckpointError: it fails verification.
    """
    opened = open_checkpoint(folder)
    opened = opened if state is None else opened.select_state(state)
    opened = with_buffers_of(opened, rank % opened.world_size)
    keys = {tree_json.unescape_key(key.split("/")[1]): key for key in opened.refs if key.split("/")[0] in _SECTIONS}
    return TensorFiles(
        content_hash=hashlib.sha256(read_manifest_bytes(folder)).hexdigest(),
        refs={name: opened.refs[key] for name, key in keys.items()},
        shards={name: [_rename_shard(box, name) for box in opened.shards.get(key, ())] for name, key in keys.items()},
        open_file=opened.open_data,
    )


def _rename_shard(box: StoredShard, name: str) -> StoredShard:
    return box._replace(entry=box.entry._replace(key=name))


SUFFIX = ".safetensors"
MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_ENTRY_FIELDS = ("dtype", "shape", "data_offsets")
_UNSUPPORTED_DTYPES = frozenset(
    {"C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
)  # which the format knows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a file says about itself: its tensors, and a digest of the header and the size."""

    entries: tuple[TensorShardEntry, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _UndigestedFile:
    """A file without digests."""

    file: storage.FileReader
    name: str
    chunks: None = None

    def read(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)``.

        Raises:
            CorruptCheckpointError: the file ends before.
        """
        out = bytearray(end - begin)
        got = self.file.read_into(begin, memoryview(out))
        if got != len(out):
            raise CorruptCheckpointError(f"{self.name}: ends at byte {begin + got}, {end} or more were promised")
        return bytes(out)


def open_safetensors_file(path: AnyPath) -> TensorFiles:
    """The tensors of one safetensors file.

    Raises:
        CorruptCheckpointError: its form is wrong.
        OSError: it cannot be read.
    """
    return _tensor_files(path.parent, [path.name], [_read_header(path)])


def is_model_folder(path: AnyPath) -> bool:
    """Whether ``open_safetensors_folder`` is for this folder."""
    return storage.exists(path / MODEL_FILE) or storage.exists(path / INDEX_FILE)


def open_safetensors_folder(folder: AnyPath) -> TensorFiles:
    """The tensors of a folder that holds ``model.safetensors``, or else ``model.safetensors.index.json``.

    Raises:
        CorruptCheckpointError: a file is missing or its form is wrong, or the index does not say what is in the files.
        OSError: a file cannot be read.
    """
    if storage.exists(folder / MODEL_FILE):
        return open_safetensors_file(folder / MODEL_FILE)
    file_of = _read_weight_map(folder)
    names = sorted(set(file_of.values()))
    absent = next((name for name in names if storage.file_size(folder / name) is None), None)
    if absent is not None:
        raise CorruptCheckpointError(f"{absent}: {INDEX_FILE} names it, but it is missing")
    headers = [_read_header(folder / name) for name in names]
    for name, header in zip(names, headers, strict=True):
        here = {entry.key for entry in header.entries}
        stray = sorted(here ^ {key for key, file in file_of.items() if file == name})
        if stray:
            what = "holds" if stray[0] in here else "does not hold"
            raise CorruptCheckpointError(
                f"{name}: {what} {stray[0]!r}, {INDEX_FILE} says otherwise ({len(stray)} such tensors)"
            )
    return _tensor_files(folder, names, headers)


def _tensor_files(folder: AnyPath, names: Sequence[str], headers: Sequence[_Header]) -> TensorFiles:
    @contextmanager
    def open_file(number: int) -> Iterator[_UndigestedFile]:
        with storage.FileReader(folder / names[number]) as file:
            yield _UndigestedFile(file=file, name=names[number])

    entries = [entry for header in headers for entry in header.entries]
    return TensorFiles(
        content_hash=hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest(),
        refs={e.key: TensorRef(dtype=e.dtype, shape=e.shape, distributed=False) for e in entries},
        shards=index_shards([header.entries for header in headers]),
        open_file=open_file,
    )


def _read_weight_map(folder: AnyPath) -> dict[str, str]:
    """The file of each tensor, by name, all of them in the folder itself."""
    content = strict_json.parse_json(storage.read_file(folder / INDEX_FILE, limit=strict_json.MAX_JSON_BYTES), INDEX_FILE)
    found = content.get("weight_map") if type(content) is dict else None
    if type(found) is not dict or not found:
        raise CorruptCheckpointError(
            f"{INDEX_FILE}: needs an object with a weight_map, got {strict_json.describe_value(content)}"
        )
    for tensor, name in found.items():
        if type(name) is not str or Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
            raise CorruptCheckpointError(
                f"{INDEX_FILE}: weight_map: {tensor}: needs the name of a {SUFFIX} file beside it, got {strict_json.describe_value(name)}"
            )
    return found


def _read_header(path: AnyPath) -> _Header:
    """The header of a file, which describes all of its bytes."""
    with storage.FileReader(path) as file:
        reader = _UndigestedFile(file=file, name=path.name)
        if file.size < 8:
            raise CorruptCheckpointError(f"{path.name}: {file.size} bytes are no safetensors file")
        length = int.from_bytes(reader.read(0, 8), "little")
        if length > min(_MAX_HEADER_BYTES, file.size - 8):
            raise CorruptCheckpointError(
                f"{path.name}: its header would have {length} bytes, the file has {file.size}; it is truncated or no "
                "safetensors file"
            )
        text = reader.read(8, 8 + length)
        entries = _parse_entries(strict_json.parse_json(text, path.name), path.name, 8 + length)
        _check_cover(entries, path.name, 8 + length, file.size)
        digest = hashlib.sha256(text + str(file.size).encode()).hexdigest()
    return _Header(entries=entries, digest=digest)


def _parse_entries(header: Any, where: str, data_begin: int) -> tuple[TensorShardEntry, ...]:
    if type(header) is not dict:
        raise CorruptCheckpointError(f"{where}: header: needs an object, got {strict_json.describe_value(header)}")
    return tuple(
        _parse_entry(key, value, f"{where}: {key}", data_begin) for key, value in header.items() if key != "__metadata__"
    )


def _parse_entry(key: str, value: Any, where: str, data_begin: int) -> TensorShardEntry:
    raw = strict_json.read_object(value, where, _ENTRY_FIELDS)
    dtype, shape = strict_json.read_str(raw["dtype"], where), strict_json.read_ints(raw["shape"], where)
    offsets = strict_json.read_ints(raw["data_offsets"], where)
    if dtype in _UNSUPPORTED_DTYPES:
        raise CheckpointError(f"{where}: is of dtype {dtype}, which dtrain does not read; convert the file without it")
    if dtype not in DTYPES:
        raise CorruptCheckpointError(f"{where}: unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    needed = prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise CorruptCheckpointError(f"{where}: data_offsets {list(offsets)} for {needed} bytes of {dtype} {list(shape)}")
    begin, end = (data_begin + offset for offset in offsets)
    return TensorShardEntry(key=key, dtype=dtype, shape=shape, offset=(0,) * len(shape), size=shape, begin=begin, end=end)


def _check_cover(entries: Sequence[TensorShardEntry], where: str, data_begin: int, size: int) -> None:
    """Tensors lie one after the other and end with the file, as the format demands: this shows a truncated file."""
    at = data_begin
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at:
            raise CorruptCheckpointError(f"{where}: {entry.key}: begins at byte {entry.begin}, the tensor before ends at {at}")
        at = entry.end
    if at != size:
        raise CorruptCheckpointError(f"{where}: has {size} bytes, its header describes {at}; it is truncated or was altered")
