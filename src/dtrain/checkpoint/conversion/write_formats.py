"""Write the weights of a checkpoint as a Hugging Face folder, as a step, or as a folder of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dtrain import storage
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.data_file import BlockDigester, as_bytes, plan_blocks
from dtrain.checkpoint.layout import DTYPES, Blocks, Manifest, MeshLayout
from dtrain.checkpoint.plan import full_region, group_by_size
from dtrain.checkpoint.state_dict import CheckpointContents
from dtrain.checkpoint.weights import (
    BUFFER_BYTES,
    INDEX_FILE,
    MODEL_FILE,
    WeightStream,
    nbytes,
    read_batch,
    rename_tensors,
    write_safetensors,
)
from dtrain.checkpoint.write_plan import plan_rank_write, write_rank_index, write_run_index
from dtrain.errors import CheckpointError
from dtrain.fqn import compile_patterns
from dtrain.schedules.clock import Clock


def write_hugging_face(folder: Path, weights: WeightStream, *, max_shard_bytes: int, companions: Mapping[str, bytes]) -> None:
    """Write the files of a Hugging Face folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        max_shard_bytes: limit of the tensors of one file in bytes; a larger tensor gets a file of its own.
        companions: contents of further files, such as ``config.json``, by name.
    """
    files = list(group_by_size(weights.sizes, limit=max_shard_bytes))
    if len(files) == 1:
        write_safetensors(folder / MODEL_FILE, weights, files[0])
    else:
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        for name, group in zip(names, files, strict=True):
            write_safetensors(folder / name, weights, group)
        weight_map = {key: name for name, group in zip(names, files, strict=True) for key in group}
        index = {"metadata": {"total_size": weights.bytes}, "weight_map": weight_map}
        storage.write_file(folder / INDEX_FILE, json.dumps(index, indent=2).encode() + b"\n")
    for name, content in companions.items():
        storage.write_file(folder / name, content)
    storage.sync_folder(folder)


# Third-party files do not say which tensors are buffers. These patterns match the floating buffers of torch's modules.
KNOWN_BUFFER_PATTERNS = ("**.running_mean", "**.running_var", "running_mean", "running_var")


def write_step(folder: Path, weights: WeightStream, *, step: int, buffers: Iterable[str]) -> None:
    """Write the files of the folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        step: step of the clock.
        buffers: patterns of the names of buffers, besides the known patterns; all other floating tensors are parameters.
    """
    is_buffer = compile_patterns([*KNOWN_BUFFER_PATTERNS, *buffers], caller="convert: buffers")
    contents = _step_contents(weights, step, is_buffer)
    write_plan = plan_rank_write(contents, 0, 1, separate_frozen=False)
    names = {key: tree_json.unescape_key(key.partition("/")[2]) for key in contents.tensors}
    files, dtypes = rename_tensors(weights.files, names), {key: weights.dtypes[name] for key, name in names.items()}
    ends = plan_blocks(write_plan.files[layout.data_name(0)])
    digester = BlockDigester(ends)
    by_key = replace(weights, files=files, dtypes=dtypes)
    write_safetensors(folder / layout.data_name(0), by_key, write_plan.shards, digester.update)
    report = write_rank_index(folder, write_plan, [Blocks(ends, "".join(digester.digests))])
    draft = Manifest(
        run_id=secrets.token_hex(16),
        step=step,
        parent_step=None,
        serial=1,
        layout=MeshLayout(strategy="none", axes=(), shape=()),
        scope="weights",
        states=(),
        world_size=1,
        bytes=0,
        index_bytes=0,
        index_sha256="",
    )
    manifest = write_run_index(folder, write_plan, None, [report], draft)
    storage.write_file(folder / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(folder)


def _step_contents(weights: WeightStream, step: int, is_buffer: Callable[[str], bool]) -> CheckpointContents:
    """Return the contents of a step of these weights, with tensors without memory."""
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "modules": {"names": [], "equal": True}}
    tree |= {"clock": Clock(step=step).state_dict(), "seed": 0}
    for slot in weights.slots:
        dtype = DTYPES[slot.dtype]
        section = "params" if dtype.is_floating_point and not is_buffer(slot.key) else "buffers"
        # An expanded scalar has any shape without memory.
        tree[section][slot.key] = torch.empty((), dtype=dtype, device="cpu").expand(slot.size)
    shared: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for section, content in tree.items():
        shared[section], tensors_of_section = tree_json.encode(content, section)
        tensors |= tensors_of_section
    values: dict[str, Any] = {section: {} for section in ("buffers", "modules", "rng", layout.EXTRA, layout.OBJECTS)}
    return CheckpointContents(shared=shared, tensors=tensors, values=values, per_rank={}, frozen=frozenset())


# At least the size of an element of any dtype.
_ALIGNMENT = 16


class _StreamingSavePlanner(DefaultSavePlanner):  # type: ignore[misc,unused-ignore]
    """Save planner that plans with meta tensors, and reads each tensor just before the writer writes the tensor.

    The planner reads all tensors into one memory, because the writer keeps an object of every tensor until the end of its
    file. New memory for each tensor would not return to the system: these small objects come to lie in the gap that a
    freed tensor leaves in the heap, and the next tensor no longer fits there.
    """

    def __init__(self, weights: WeightStream, names: dict[str, str]) -> None:
        super().__init__()
        self._weights, self._names = weights, names
        refs = weights.files.refs
        # Views of any dtype must be aligned.
        self._sizes = {name: -(-nbytes(refs[name]) // _ALIGNMENT) * _ALIGNMENT for name in weights.dtypes}
        groups = list(group_by_size(self._sizes, limit=BUFFER_BYTES))
        self._group_of = {name: group for group in groups for name in group}
        self._stored = _host_memory(max(sum(self._sizes[name] for name in group) for group in groups))
        self._written = as_bytes(_host_memory(max(weights.sizes.values())))
        self._batch: dict[str, Tensor] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of one item, in the memory of the previous item, which has been written."""
        name = self._names[write_item.index.fqn]
        if name not in self._batch:
            # Tensors of one chunk are read together, because each read fetches the whole chunk.
            self._batch = self._read(self._group_of[name])
        tensor, dtype = self._batch.pop(name), DTYPES[self._weights.dtypes[name]]
        if not tensor.numel():
            return tensor.to(dtype)
        # The storage has the size of the tensor, otherwise the writer would copy the tensor.
        written = torch.frombuffer(self._written, dtype=dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)
        self._weights.on_bytes_written(written.nbytes)
        return written

    def _read(self, group: Iterable[str]) -> dict[str, Tensor]:
        """Read a group of tensors into the memory of the previous group."""
        targets, begin, refs = {}, 0, self._weights.files.refs
        for name in group:
            memory = self._stored[begin : begin + nbytes(refs[name])]
            targets[name] = memory.view(DTYPES[refs[name].dtype]).view(refs[name].shape)
            begin += self._sizes[name]
        regions = {name: full_region(refs[name].shape) for name in targets}
        return read_batch(self._weights.files, regions, targets=targets)


def _host_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def write_dcp(folder: Path, weights: WeightStream, *, key: str | None) -> None:
    """Write the files of the folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        key: name of a dict for the tensors, as ``"model"`` for ``load({"model": model.state_dict()})``; None for
            ``load(model.state_dict())``.

    Raises:
        OSError: a failed file operation.
        CheckpointError: an error of torch, or an unreadable tensor.
    """
    tensors: dict[str, Any] = {
        name: torch.empty(weights.files.refs[name].shape, dtype=DTYPES[dtype], device="meta")
        for name, dtype in weights.dtypes.items()
    }
    names = {name if key is None else f"{key}.{name}": name for name in tensors}
    # With one thread and no copies ahead, an item is written before the next item is requested.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(
                tensors if key is None else {key: tensors},
                storage_writer=writer,
                planner=_StreamingSavePlanner(weights, names),
                no_dist=True,
            )
        # CheckpointException is not a subclass of Exception.
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause if isinstance(cause, CheckpointError | OSError) else CheckpointError(f"convert: {cause}") from None
    storage.sync_folder(folder)
