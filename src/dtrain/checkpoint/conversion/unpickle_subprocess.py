"""A program: the tensors of a pickle, or of a folder of ``torch.distributed.checkpoint``, as one safetensors file.

Reading those runs what is in them. It is done in a process of its own, only for files that the user has said are to be
trusted, and this module is the only one of the package that does it. Nothing imports it::

    python -m dtrain.checkpoint.conversion.unpickle_subprocess <pt|dcp> <source> <new safetensors file> [<key>]

A failure is the last line on stderr, and exit code 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dtrain.checkpoint.conversion.weight_stream import BUFFER_BYTES, cpu_bytes, group_by_size
from dtrain.checkpoint.data_file import TensorSlot, plan_file_layout
from dtrain.checkpoint.layout import DTYPE_NAMES
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import FileWriter

KeyPath = tuple[str, ...]  # to a tensor, through nested dicts
_MAX_DICTS_SHOWN = 6


def _open_pickle(source: str, key: str | None) -> tuple[list[TensorSlot], Callable[[Sequence[TensorSlot]], Iterator[Tensor]]]:
    """The tensors of what ``torch.save`` wrote; those of a file of today's format are mapped, not read."""
    try:
        tree = torch.load(source, map_location="cpu", weights_only=False, mmap=True)
    except RuntimeError:  # of the format before torch 1.6, which cannot be mapped
        tree = torch.load(source, map_location="cpu", weights_only=False)
    found = dict(_flatten(tree, ()))
    names = select_dict(list(found), key, source)
    tensors = {name: found[path].detach().to_dense() for path, name in names.items()}
    boxes = [_tensor_slot(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    return boxes, lambda wanted: (tensors[box.key] for box in wanted)


def _flatten(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from _flatten(item, (*path, str(name)))
    elif isinstance(tree, torch.nn.Module):
        yield from _flatten(tree.state_dict(), path)


def _open_dcp_folder(
    source: str, key: str | None
) -> tuple[list[TensorSlot], Callable[[Sequence[TensorSlot]], Iterator[Tensor]]]:
    """The tensors of a folder that ``torch.distributed.checkpoint.save`` wrote."""
    metadata = FileSystemReader(source).read_metadata()
    paths: Mapping[str, Sequence[Any]] = metadata.planner_data or {}
    stored = {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    stored_as = {tuple(map(str, paths.get(name, (name,)))): name for name in stored}
    names = select_dict(list(stored_as), key, source)
    of = {name: stored_as[path] for path, name in names.items()}
    boxes = [_tensor_slot(name, stored[old].properties.dtype, stored[old].size) for name, old in of.items()]

    def tensors(wanted: Sequence[TensorSlot]) -> Iterator[Tensor]:
        for group in group_by_size({box.key: box.nbytes for box in wanted}, limit=BUFFER_BYTES):
            made = {of[name]: torch.empty(stored[of[name]].size, dtype=stored[of[name]].properties.dtype) for name in group}
            load(made, storage_reader=FileSystemReader(source), no_dist=True)
            yield from made.values()

    return boxes, tensors


def _tensor_slot(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSlot:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name}: is of dtype {dtype}, which safetensors files do not have; leave it out with key")
    return TensorSlot.of(name, DTYPE_NAMES[dtype], tuple(shape))


def select_dict(paths: Sequence[KeyPath], key: str | None, source: str) -> dict[KeyPath, str]:
    """The names of the tensors in the dict that ``key`` leads to (``"state/model"``); without one, in the only dict there is.

    Raises:
        ConfigError: there is no such dict, or it is not clear which one is meant.
    """
    counts = Counter("/".join(path[:-1]) for path in paths)
    if not counts:
        raise ConfigError(f"convert: {source} holds no tensors")
    if key is None and len(counts) == 1:
        key = next(iter(counts))
    if key is None or key not in counts:
        shown = [f"{count} in {name!r}" for name, count in counts.most_common(_MAX_DICTS_SHOWN)]
        more = f", and in {len(counts) - _MAX_DICTS_SHOWN} more" if len(counts) > _MAX_DICTS_SHOWN else ""
        what = "tensors are in several dicts" if key is None else f"there are no tensors in {key!r}"
        raise ConfigError(f"convert: {source}: {what} ({', '.join(shown)}{more}); name the one of the weights with key (--key)")
    return {path: path[-1] for path in paths if "/".join(path[:-1]) == key}


def _write(out: Path, boxes: Sequence[TensorSlot], tensors: Callable[[Sequence[TensorSlot]], Iterator[Tensor]]) -> None:
    placed = plan_file_layout(boxes)
    with FileWriter(out) as file:
        file.write(placed.header)
        for tensor in tensors(placed.slots):
            file.write(cpu_bytes(tensor))


def main(kind: str, source: str, out: str, key: str | None = None) -> int:
    """Run the program. Returns its exit code."""
    try:
        _write(Path(out), *(_open_pickle if kind == "pt" else _open_dcp_folder)(source, key))
    except (CheckpointError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # what is in a pickle can raise whatever it likes
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        print(f"CheckpointError: convert: {source}: {type(cause).__name__}: {' '.join(str(cause).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
