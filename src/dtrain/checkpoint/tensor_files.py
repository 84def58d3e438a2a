"""Find named tensors in checkpoints and in safetensors files of other programs, and open these files for reading.

Safetensors files may be a single file, or a folder that Hugging Face's ``save_pretrained`` writes::

    model.safetensors                      the only file, or
    model-00001-of-00002.safetensors ...   several, and
    model.safetensors.index.json           {"metadata": {...}, "weight_map": {"<tensor>": "<file>", ...}}

Safetensors files have no digests, so only their structure is verified.

Source: the format section of the safetensors README (huggingface/safetensors), which also sets the limit of the header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from dtrain import storage
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.checkpoint_info import read_manifest_bytes
from dtrain.checkpoint.data_file import FileOpener
from dtrain.checkpoint.index import StoredShard, shard_kind
from dtrain.checkpoint.layout import DTYPES, Count, TensorRef
from dtrain.checkpoint.reader import open_checkpoint, with_own_buffers
from dtrain.checkpoint.reshard import Region, ShardFinder
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.storage import AnyPath

_SECTIONS = ("params", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TensorFiles:
    """Tensors by name, and their files.

    Args:
        content_hash: hash that is equal for equal files, for comparison between ranks.
        refs: dtype and shape by name.
        find_shards: function that returns the stored shards of regions by name; an empty tensor has none.
        open_file: function that opens the file of a number.
    """

    content_hash: str
    refs: Mapping[str, TensorRef]
    find_shards: ShardFinder
    open_file: FileOpener


def open_step(
    folder: AnyPath, rank: int, *, own_buffers: Collection[str] = (), state: str | None = None, check_files: bool = True
) -> TensorFiles:
    """Open the parameters and buffers of a step, by their names in the model.

    Args:
        folder: folder of the step.
        rank: rank whose ``own_buffers`` are read if each rank saved its own: ``rank % saved world size``.
        own_buffers: names of these buffers; all others are read from rank 0.
        state: name of the state if the step holds several.
        check_files: if True, compare the names and sizes of all files with the index.

    Raises:
        CheckpointMismatchError: the step has no state of this name.
        CorruptCheckpointError: the step fails verification.
    """
    reader = open_checkpoint(folder, check_files=check_files)
    reader = reader if state is None else reader.select_state(state)
    reader = with_own_buffers(reader, rank, own_buffers)
    keys = {tree_json.unescape_key(key.split("/")[1]): key for key in reader.refs if key.split("/")[0] in _SECTIONS}
    return TensorFiles(
        content_hash=hashlib.sha256(read_manifest_bytes(folder)).hexdigest(),
        refs={name: reader.refs[key] for name, key in keys.items()},
        find_shards=rename_shards(reader.find_shards, keys),
        open_file=reader.open_data,
    )


def rename_shards(find_shards: ShardFinder, names: Mapping[str, str]) -> ShardFinder:
    """Return ``find_shards`` for new names: new name -> stored name. A stored name may have several new names."""

    def find(regions: Mapping[str, Region]) -> dict[str, Sequence[StoredShard]]:
        found: dict[str, Sequence[StoredShard]] = {}
        left = dict(regions)
        while left:
            # Two new names of one tensor are looked up one after the other.
            once = {names[name]: name for name in reversed(left)}
            shards = find_shards({stored: left[name] for stored, name in once.items()})
            found.update((name, shards.get(stored, ())) for stored, name in once.items())
            left = {name: region for name, region in left.items() if name not in found}
        return found

    return find


SUFFIX = ".safetensors"
MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
# Dtypes of the format that torch or this reader does not support.
_UNSUPPORTED_DTYPES = frozenset({"C64", "F4", "F6_E2M3", "F6_E3M2"})


@layout.compile_schema
class _HeaderEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of a tensor in the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """Header of a file: its tensors by name, and a digest of the header and the file size."""

    tensors: Mapping[str, StoredShard]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _UndigestedFile:
    """File without digests."""

    file: storage.FileReader
    name: str
    blocks: None = None

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)``.

        Raises:
            CorruptCheckpointError: the file is too short.
        """
        out = bytearray(end - begin)
        count = self.file.read_into(begin, memoryview(out))
        if count != len(out):
            raise CorruptCheckpointError(f"{self.name}: must have at least {end} bytes, ends at byte {begin + count}")
        return bytes(out)


def open_safetensors_file(path: AnyPath) -> TensorFiles:
    """Open one safetensors file.

    Raises:
        CorruptCheckpointError: an invalid file.
        OSError: an unreadable file.
    """
    return _tensor_files(path.parent, [path.name], [_read_header(path, 0)])


def is_model_folder(path: AnyPath) -> bool:
    """Return True if the folder has ``model.safetensors`` or its index."""
    return storage.exists(path / MODEL_FILE) or storage.exists(path / INDEX_FILE)


def open_safetensors_folder(folder: AnyPath) -> TensorFiles:
    """Open a folder with ``model.safetensors``, or else with ``model.safetensors.index.json``.

    Raises:
        CorruptCheckpointError: a missing or invalid file, or an index that does not match the files.
        OSError: an unreadable file.
    """
    if storage.exists(folder / MODEL_FILE):
        return open_safetensors_file(folder / MODEL_FILE)
    file_of = _read_weight_map(folder)
    names = sorted(set(file_of.values()))
    absent = next((name for name in names if storage.file_size(folder / name) is None), None)
    if absent is not None:
        raise CorruptCheckpointError(f"{absent}: file of {INDEX_FILE} is missing")
    headers = [_read_header(folder / name, number) for number, name in enumerate(names)]
    for name, header in zip(names, headers, strict=True):
        stored = header.tensors.keys()
        wrong = sorted(stored ^ {key for key, file in file_of.items() if file == name})
        if wrong:
            difference = "has" if wrong[0] in stored else "lacks"
            raise CorruptCheckpointError(
                f"{name}: must have the tensors of {INDEX_FILE}, but {difference} {wrong[0]!r} ({len(wrong)} such tensors)"
            )
    return _tensor_files(folder, names, headers)


def _tensor_files(folder: AnyPath, names: Sequence[str], headers: Sequence[_Header]) -> TensorFiles:
    @contextmanager
    def open_file(number: int) -> Iterator[_UndigestedFile]:
        with storage.FileReader(folder / names[number]) as file:
            yield _UndigestedFile(file=file, name=names[number])

    tensors = {name: shard for header in headers for name, shard in header.tensors.items()}
    return TensorFiles(
        content_hash=hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest(),
        refs={name: TensorRef(dtype=kind.dtype, shape=kind.shape, distributed=False) for name, (_, _, kind) in tensors.items()},
        find_shards=lambda regions: {name: [tensors[name]] for name in regions},
        open_file=open_file,
    )


def _read_weight_map(folder: AnyPath) -> dict[str, str]:
    """Read the file name of each tensor. All files must be in the folder itself."""
    content = layout.parse_json(storage.read_file(folder / INDEX_FILE, limit=layout.MAX_JSON_BYTES), INDEX_FILE)
    file_of = content.get("weight_map") if type(content) is dict else None
    if type(file_of) is not dict or not file_of:
        raise CorruptCheckpointError(f"{INDEX_FILE}: must be an object with a weight_map, got {layout.describe_value(content)}")
    for tensor, name in file_of.items():
        if type(name) is not str or Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
            raise CorruptCheckpointError(
                f"{INDEX_FILE}: weight_map: {tensor}: must be the name of a {SUFFIX} file in the folder, "
                f"got {layout.describe_value(name)}"
            )
    return file_of


def _read_header(path: AnyPath, number: int) -> _Header:
    """Read the header of the file of this number, and check that its tensors cover the file."""
    with storage.FileReader(path) as file:
        reader = _UndigestedFile(file=file, name=path.name)
        if file.size < 8:
            raise CorruptCheckpointError(f"{path.name}: must be a safetensors file, got {file.size} bytes")
        length = int.from_bytes(reader.read(0, 8), "little")
        if length > min(_MAX_HEADER_BYTES, file.size - 8):
            raise CorruptCheckpointError(
                f"{path.name}: header must fit into the file of {file.size} bytes, got {length} bytes. "
                "The file is truncated or not a safetensors file."
            )
        text = reader.read(8, 8 + length)
        tensors = _parse_entries(layout.parse_json(text, path.name), path.name, number, 8 + length)
        _check_cover(tensors, path.name, 8 + length, file.size)
        digest = hashlib.sha256(text + str(file.size).encode()).hexdigest()
    return _Header(tensors=tensors, digest=digest)


def _parse_entries(header: Any, location: str, number: int, data_begin: int) -> dict[str, StoredShard]:
    if type(header) is not dict:
        raise CorruptCheckpointError(f"{location}: header: must be an object, got {layout.describe_value(header)}")
    return {
        key: _parse_entry(value, f"{location}: {key}", number, data_begin)
        for key, value in header.items()
        if key != "__metadata__"
    }


def _parse_entry(value: Any, location: str, number: int, data_begin: int) -> StoredShard:
    raw = layout.convert(value, _HeaderEntry, location)
    dtype, shape, offsets = raw.dtype, raw.shape, raw.data_offsets
    if dtype in _UNSUPPORTED_DTYPES:
        raise CheckpointError(f"{location}: dtrain does not support dtype {dtype}. Convert the tensor to another dtype.")
    if dtype not in DTYPES:
        raise CorruptCheckpointError(f"{location}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = shard_kind(dtype, shape, (0,) * len(shape), shape)
    if offsets[1] - offsets[0] != kind.nbytes:
        raise CorruptCheckpointError(
            f"{location}: data_offsets must span {kind.nbytes} bytes of {dtype} {list(shape)}, got {list(offsets)}"
        )
    return StoredShard(file=number, begin=data_begin + offsets[0], kind=kind)


def _check_cover(tensors: Mapping[str, StoredShard], location: str, data_begin: int, size: int) -> None:
    """Check that tensors are adjacent and end with the file, as the format demands. This detects a truncated file."""
    at = data_begin
    for name, shard in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if shard.begin != at:
            raise CorruptCheckpointError(
                f"{location}: {name}: must begin at byte {at}, the end of the tensor before, got {shard.begin}"
            )
        at = shard.end
    if at != size:
        raise CorruptCheckpointError(
            f"{location}: header must describe {size} bytes, got {at}. The file is truncated or was changed."
        )
