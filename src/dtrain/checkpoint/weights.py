"""Open named tensors of a checkpoint or of another format, read them in batches of limited size, and write them to a file.

Safetensors files may be a single file, or a folder that Hugging Face's ``save_pretrained`` writes::

    model.safetensors                      the only file, or
    model-00001-of-00002.safetensors ...   several, and
    model.safetensors.index.json           {"metadata": {...}, "weight_map": {"<tensor>": "<file>", ...}}

Safetensors files have no digests, so only their structure is verified.

Source: the format section of the safetensors README (huggingface/safetensors), which also sets the limit of the header.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import torch
from msgspec import Struct
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.checkpoint_info import choose_step, has_manifest, notice_removal, read_manifest
from dtrain.checkpoint.data_file import FileOpener, OpenedFile, TensorSlot, as_bytes, plan_file_layout, read_exactly
from dtrain.checkpoint.fetch import read_tensors
from dtrain.checkpoint.index import StoredShard, shard_kind
from dtrain.checkpoint.layout import DTYPES, Count, TensorRef
from dtrain.checkpoint.plan import Region, ShardFinder, full_region, group_by_size, plan_tensors
from dtrain.checkpoint.reader import open_checkpoint, with_own_buffers
from dtrain.errors import CheckpointError, ConfigError, CorruptCheckpointError
from dtrain.storage import AnyPath, Buffer, FileWriter

SUFFIX = ".safetensors"
MODEL_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
# Dtypes of the format that torch or this reader does not support.
_UNSUPPORTED_DTYPES = frozenset({"C64", "F4", "F6_E2M3", "F6_E3M2"})
# Limit of the tensors in memory. Larger batches read less twice: a chunk that two batches need is fetched for each of them.
BUFFER_BYTES = 128 * 2**20
SourceFormat = Literal["dtrain", "hf", "dcp", "pt"]
SOURCE_FORMATS: tuple[SourceFormat, ...] = get_args(SourceFormat)
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# File in a folder of torch.distributed.checkpoint.
_DCP_METADATA_FILE = ".metadata"
_PROGRAM = "dtrain.checkpoint.conversion.unpickle_subprocess"
_SECTIONS = ("params", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TensorFiles:
    """Tensors by name, and their files.

    Args:
        content_hash: hash that is equal for equal files, for comparison between ranks.
        refs: dtype and shape by name.
        keys: key of each tensor in the files, by name. A tied tensor has several names.
        find_shards: function that returns the stored shards of regions by key; an empty tensor has none.
        open_file: function that opens the file of a number.
    """

    content_hash: str
    refs: Mapping[str, TensorRef]
    keys: Mapping[str, str]
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
        content_hash=hashlib.sha256(layout.encode_manifest(reader.manifest)).hexdigest(),
        refs={name: reader.refs[key] for name, key in keys.items()},
        keys=keys,
        find_shards=reader.find_shards,
        open_file=reader.open_data,
    )


@layout.compile_schema
class _HeaderEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of a tensor in the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def is_model_folder(path: AnyPath) -> bool:
    """Return True if the folder has ``model.safetensors`` or its index."""
    return storage.exists(path / MODEL_FILE) or storage.exists(path / INDEX_FILE)


def open_safetensors(path: AnyPath) -> TensorFiles:
    """Open a safetensors file, or a folder with ``model.safetensors`` or else with ``model.safetensors.index.json``.

    Raises:
        CorruptCheckpointError: a missing or invalid file, or an index that does not match the files.
        OSError: an unreadable file.
    """
    if not storage.is_folder(path):
        return _tensor_files(path.parent, [path.name], [_read_header(path, 0)])
    if storage.exists(path / MODEL_FILE):
        return _tensor_files(path, [MODEL_FILE], [_read_header(path / MODEL_FILE, 0)])
    content = layout.parse_json(storage.read_file(path / INDEX_FILE, limit=layout.MAX_JSON_BYTES), INDEX_FILE)
    file_of = content.get("weight_map") if type(content) is dict else None
    if type(file_of) is not dict or not file_of:
        raise CorruptCheckpointError(f"{INDEX_FILE}: must be an object with a weight_map, got {layout.describe_value(content)}")
    for tensor, name in file_of.items():
        # All files must be in the folder itself.
        if type(name) is not str or Path(name).name != name or not name.endswith(SUFFIX) or not name.isprintable():
            raise CorruptCheckpointError(
                f"{INDEX_FILE}: weight_map: {tensor}: must be the name of a {SUFFIX} file in the folder, "
                f"got {layout.describe_value(name)}"
            )
    names = sorted(set(file_of.values()))
    absent = next((name for name in names if storage.file_size(path / name) is None), None)
    if absent is not None:
        raise CorruptCheckpointError(f"{absent}: file of {INDEX_FILE} is missing")
    headers = [_read_header(path / name, number) for number, name in enumerate(names)]
    for name, (tensors, _) in zip(names, headers, strict=True):
        stored = tensors.keys()
        wrong = sorted(stored ^ {key for key, file in file_of.items() if file == name})
        if wrong:
            difference = "has" if wrong[0] in stored else "lacks"
            raise CorruptCheckpointError(
                f"{name}: must have the tensors of {INDEX_FILE}, but {difference} {wrong[0]!r} ({len(wrong)} such tensors)"
            )
    return _tensor_files(path, names, headers)


def _tensor_files(
    folder: AnyPath, names: Sequence[str], headers: Sequence[tuple[Mapping[str, StoredShard], str]]
) -> TensorFiles:
    @contextmanager
    def open_file(number: int) -> Iterator[OpenedFile]:
        with storage.FileReader(folder / names[number]) as file:
            yield OpenedFile(file=file, name=names[number], blocks=None)

    tensors = {name: shard for of_file, _ in headers for name, shard in of_file.items()}
    return TensorFiles(
        content_hash=hashlib.sha256("".join(digest for _, digest in headers).encode()).hexdigest(),
        refs={name: TensorRef(dtype=kind.dtype, shape=kind.shape, distributed=False) for name, (_, _, kind) in tensors.items()},
        keys={name: name for name in tensors},
        find_shards=lambda regions: {name: [tensors[name]] for name in regions},
        open_file=open_file,
    )


def _read_header(path: AnyPath, number: int) -> tuple[dict[str, StoredShard], str]:
    """Read the header of the file of this number.

    Returns:
        The tensors of the file by name, and a digest of the header and the file size.
    """
    with storage.FileReader(path) as file:
        size, prefix = file.size, bytearray(8)
        if size < 8:
            raise CorruptCheckpointError(f"{path.name}: must be a safetensors file, got {size} bytes")
        read_exactly(file, path.name, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpointError(
                f"{path.name}: header must fit into the file of {size} bytes, got {length} bytes. "
                "The file is truncated or not a safetensors file."
            )
        text = bytearray(length)
        read_exactly(file, path.name, 8, memoryview(text))
    header = layout.parse_json(bytes(text), path.name)
    if type(header) is not dict:
        raise CorruptCheckpointError(f"{path.name}: header: must be an object, got {layout.describe_value(header)}")
    entries = {name: value for name, value in header.items() if name != "__metadata__"}
    tensors = {name: _parse_entry(value, f"{path.name}: {name}", number, 8 + length) for name, value in entries.items()}
    # The format demands that tensors are adjacent and end with the file. This detects a truncated file.
    end = 8 + length
    for name, shard in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if shard.begin != end:
            raise CorruptCheckpointError(
                f"{path.name}: {name}: must begin at byte {end}, the end of the tensor before, got {shard.begin}"
            )
        end = shard.end
    if end != size:
        raise CorruptCheckpointError(
            f"{path.name}: header must describe {size} bytes, got {end}. The file is truncated or was changed."
        )
    return tensors, hashlib.sha256(text + str(size).encode()).hexdigest()


def _parse_entry(value: Any, location: str, number: int, data_begin: int) -> StoredShard:
    entry = layout.convert(value, _HeaderEntry, location)
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
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


def nbytes(ref: TensorRef) -> int:
    """Return the size of a tensor's data in bytes."""
    return prod(ref.shape) * DTYPES[ref.dtype].itemsize


def batch_regions(
    refs: Mapping[str, TensorRef], names: Iterable[str], *, limit: int = BUFFER_BYTES
) -> Iterator[dict[str, Region]]:
    """Split the tensors in order into batches of at most ``limit`` bytes: whole tensors, or rows of a larger tensor.

    One row may be larger than ``limit``. The data of all regions in order are the data of all tensors in row-major order.
    """
    for group in group_by_size({name: nbytes(refs[name]) for name in names}, limit=limit):
        shape = refs[group[0]].shape
        # A scalar has no rows.
        if nbytes(refs[group[0]]) <= limit or not shape:
            yield {name: full_region(refs[name].shape) for name in group}
            continue
        rows, *inner = shape
        run = max(1, limit * rows // nbytes(refs[group[0]]))
        for row in range(0, rows, run):
            yield {group[0]: Region(offset=(row, *(0 for _ in inner)), size=(min(run, rows - row), *inner))}


def read_batch(
    files: TensorFiles,
    batch: Mapping[str, Region],
    dtypes: Mapping[str, str] | None = None,
    *,
    targets: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Read regions as tensors of the stored dtypes, or cast to ``dtypes``. The names of a tied tensor share its memory.

    Args:
        files: files of the tensors.
        batch: regions by name, equal for all names of a tied tensor.
        dtypes: names of dtypes by name.
        targets: contiguous CPU tensors of the stored dtypes to read into, by name; None reads into new tensors.

    Mutates: ``targets``.

    Raises:
        CorruptCheckpointError: bytes that were changed, as far as the files can tell.
    """
    keys = {name: files.keys[name] for name in batch}
    regions = {key: batch[name] for name, key in keys.items()}
    refs = {key: files.refs[name] for name, key in keys.items()}
    by_key = {keys[name]: target for name, target in (targets or {}).items()}
    tensors = read_tensors(plan_tensors(files.find_shards, regions, refs), files.open_file, targets=by_key)
    return {name: tensors[key].to(DTYPES[(dtypes or {}).get(name, refs[key].dtype)]) for name, key in keys.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WeightStream:
    """Stream of tensors from files, with the dtypes to write.

    Args:
        files: files of the tensors.
        dtypes: dtypes to write, by name.
        on_bytes_written: called with the number of bytes written since the last call.
    """

    files: TensorFiles
    dtypes: Mapping[str, str]
    on_bytes_written: Callable[[int], None]

    @property
    def slots(self) -> list[TensorSlot]:
        """Slots of the tensors to write."""
        return [TensorSlot.of(name, dtype, self.files.refs[name].shape) for name, dtype in self.dtypes.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each tensor to write in bytes, by name."""
        return {slot.key: slot.nbytes for slot in self.slots}

    @property
    def bytes(self) -> int:
        """Total size of the tensors to write in bytes."""
        return sum(self.sizes.values())

    def iter_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Iterate over the data of these tensors in row-major order, in tensors of limited size."""
        for batch in batch_regions(self.files.refs, names):
            yield from read_batch(self.files, batch, self.dtypes).values()


def write_safetensors(
    path: Path, weights: WeightStream, names: Iterable[str], on_data: Callable[[Buffer], Any] | None = None
) -> int:
    """Write tensors as one safetensors file, which is on the disk when the function returns.

    Args:
        path: a name that does not exist.
        weights: stream of the tensors.
        names: names of the tensors to write.
        on_data: called with every part of the file, in order.

    Returns:
        The size of the file in bytes.
    """
    selected = set(names)
    layout = plan_file_layout(slot for slot in weights.slots if slot.key in selected)
    tensors = weights.iter_tensors(slot.key for slot in layout.slots)
    with FileWriter(path) as file:
        parts: Iterable[Buffer] = chain([layout.header], map(as_bytes, tensors))
        for data in parts:
            file.write(data)
            if on_data is not None:
                on_data(data)
            weights.on_bytes_written(len(data))
        file.sync()
    return file.written


def rename_tensors(files: TensorFiles, names: Mapping[str, str]) -> TensorFiles:
    """Return ``files`` with new names: new name -> stored name. Stored names without new name are left out."""
    refs = {new: files.refs[old] for new, old in names.items()}
    return replace(files, refs=refs, keys={new: files.keys[old] for new, old in names.items()})


def are_equal(files: TensorFiles, a: str, b: str, regions: Iterable[Region]) -> bool:
    """Return True if two tensors have equal dtypes and shapes, and equal bytes in the regions."""
    if files.refs[a].shape != files.refs[b].shape or files.refs[a].dtype != files.refs[b].dtype:
        return False
    return all(torch.equal(*(raw_bytes(read_batch(files, {name: region})[name]) for name in (a, b))) for region in regions)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the data of a tensor as flat bytes in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def detect_format(path: AnyPath, caller: str) -> SourceFormat:
    """Detect the format of a path from file names.

    Raises:
        CheckpointError: an unknown format.
    """
    if storage.file_size(path) is not None:
        suffix = PurePath(path.name).suffix
        if suffix == SUFFIX:
            return "hf"
        if suffix in PICKLE_SUFFIXES:
            return "pt"
    elif storage.is_folder(path):
        if has_manifest(path):
            return "dtrain"
        if is_model_folder(path):
            return "hf"
        if storage.exists(path / _DCP_METADATA_FILE):
            return "dcp"
        names = storage.list_names(path)
        if any(layout.step_of(name) is not None for name in (path.name, *names)):
            return "dtrain"
        pickle = next((name for name in names if PurePath(name).suffix in PICKLE_SUFFIXES), None)
        if pickle is not None:
            raise CheckpointError(
                f"{caller}: path must be a file, got the folder {path} of pickles. Name one, such as {pickle}, and trust "
                "it (--trust)."
            )
    else:
        raise ConfigError(f"{caller}: path must exist, got {path}. Check the path.")
    raise CheckpointError(
        f"{caller}: path must be a checkpoint of dtrain, a folder with {MODEL_FILE} or "
        f"{INDEX_FILE}, a {SUFFIX} file, a folder of torch.distributed.checkpoint or a "
        f"{PICKLE_SUFFIXES[0]} file, got {path}. Name its format."
    )


def open_weights(
    path: AnyPath,
    kind: SourceFormat,
    *,
    caller: str,
    state: str | None = None,
    key: str | None = None,
    scratch: Path | None = None,
) -> TensorFiles:
    """Open the tensors of a model by their names.

    Args:
        path: source of the format ``kind``.
        kind: format of the source.
        caller: prefix of messages.
        state: name of the state if a step holds several.
        key: path to the dict of the tensors, for formats that run code.
        scratch: new file for formats that run code, into which a subprocess copies the tensors.

    Raises:
        CheckpointError: an unreadable source.
        CorruptCheckpointError: a source that was changed, as far as its format can tell.
    """
    if kind == "dtrain":
        step = choose_step(path, caller)
        if step is None:
            raise CheckpointError(
                f"{caller}: no checkpoint found in {path}. Pass a folder that `dtrain checkpoints list` shows."
            )
        with notice_removal(step):
            states = read_manifest(step).states
            if states and state is None:
                named = ", ".join(map(repr, states))
                raise ConfigError(f"{caller}: {step} holds the states {named}. Name one with state (--state).")
            return open_step(step, 0, state=state)
    if kind == "hf":
        return open_safetensors(path)
    assert scratch is not None, "a format that runs code needs a scratch file"
    # The key "" is the top-level dict.
    dict_path = [] if key is None else [key]
    command = [sys.executable, "-W", "ignore", "-m", _PROGRAM, kind, str(path), str(scratch), *dict_path]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"the reader ended with code {done.returncode}"]
        name, _, message = lines[-1].partition(": ")
        raise ConfigError(message) if name == ConfigError.__name__ else CheckpointError(message or lines[-1])
    return open_safetensors(scratch)
