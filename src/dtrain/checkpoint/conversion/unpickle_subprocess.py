"""Copy the tensors of a pickle, or of a folder of ``torch.distributed.checkpoint``, to a safetensors file; run as a program.

Reading a pickle runs its code. Only this module of the package does so, in a subprocess, and only for files that the user
trusts. No module imports this module::

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

from dtrain.arguments import single_line
from dtrain.checkpoint.data_file import TensorSlot, as_bytes, plan_file_layout
from dtrain.checkpoint.layout import DTYPE_NAMES
from dtrain.checkpoint.plan import group_by_size
from dtrain.checkpoint.weights import BUFFER_BYTES
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import FileWriter

# Path to a tensor through nested dicts.
KeyPath = tuple[str, ...]
_MAX_DICTS_SHOWN = 6


def _open_pickle(source: str, key: str | None) -> tuple[list[TensorSlot], Callable[[Sequence[TensorSlot]], Iterator[Tensor]]]:
    """Open the tensors of a file that ``torch.save`` wrote. Files of the current format are mapped, not read."""
    try:
        tree = torch.load(source, map_location="cpu", weights_only=False, mmap=True)
    # Files of the format before torch 1.6 cannot be mapped.
    except RuntimeError:
        tree = torch.load(source, map_location="cpu", weights_only=False)
    by_path = dict(_flatten(tree, ()))
    names = select_dict(list(by_path), key, source)
    tensors = {name: by_path[path].detach().to_dense() for path, name in names.items()}
    slots = [_tensor_slot(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    return slots, lambda ordered: (tensors[slot.key] for slot in ordered)


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
    """Open the tensors of a folder that ``torch.distributed.checkpoint.save`` wrote."""
    metadata = FileSystemReader(source).read_metadata()
    paths: Mapping[str, Sequence[Any]] = metadata.planner_data or {}
    stored = {name: entry for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    stored_as = {tuple(map(str, paths.get(name, (name,)))): name for name in stored}
    names = select_dict(list(stored_as), key, source)
    stored_names = {name: stored_as[path] for path, name in names.items()}
    slots = [_tensor_slot(name, stored[old].properties.dtype, stored[old].size) for name, old in stored_names.items()]

    def tensors(ordered: Sequence[TensorSlot]) -> Iterator[Tensor]:
        for group in group_by_size({slot.key: slot.nbytes for slot in ordered}, limit=BUFFER_BYTES):
            entries = {stored_names[name]: stored[stored_names[name]] for name in group}
            batch = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for name, entry in entries.items()
            }
            load(batch, storage_reader=FileSystemReader(source), no_dist=True)
            yield from batch.values()

    return slots, tensors


def _tensor_slot(name: str, dtype: torch.dtype, shape: Sequence[int]) -> TensorSlot:
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{name}: dtype must be one of safetensors files, got {dtype}. Select a dict without this tensor with key."
        )
    return TensorSlot.of(name, DTYPE_NAMES[dtype], tuple(shape))


def select_dict(paths: Sequence[KeyPath], key: str | None, source: str) -> dict[KeyPath, str]:
    """Return the names of the tensors in the dict at ``key`` (``"state/model"``), or in the only dict if ``key`` is None.

    Raises:
        ConfigError: there is no such dict, or there are several and ``key`` is None.
    """
    counts = Counter("/".join(path[:-1]) for path in paths)
    if not counts:
        raise ConfigError(
            f"convert: path must hold tensors, got {source}. Pass the file that torch.save wrote from model.state_dict()."
        )
    if key is None and len(counts) == 1:
        key = next(iter(counts))
    if key is None or key not in counts:
        shown = [f"{count} in {name!r}" for name, count in counts.most_common(_MAX_DICTS_SHOWN)]
        more = f", and in {len(counts) - _MAX_DICTS_SHOWN} more" if len(counts) > _MAX_DICTS_SHOWN else ""
        problem = "there are several dicts of tensors" if key is None else f"there are no tensors in {key!r}"
        raise ConfigError(
            f"convert: {source}: {problem} ({', '.join(shown)}{more}). Name the dict of the weights with key (--key)."
        )
    return {path: path[-1] for path in paths if "/".join(path[:-1]) == key}


def main(kind: str, source: str, out: str, key: str | None = None) -> int:
    """Run the program and return its exit code."""
    try:
        slots, read = (_open_pickle if kind == "pt" else _open_dcp_folder)(source, key)
        layout = plan_file_layout(slots)
        with FileWriter(Path(out)) as file:
            file.write(layout.header)
            for tensor in read(layout.slots):
                file.write(as_bytes(tensor))
    except (CheckpointError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # the code of a pickle can raise any exception
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        print(f"CheckpointError: convert: {source}: {type(cause).__name__}: {single_line(cause)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
