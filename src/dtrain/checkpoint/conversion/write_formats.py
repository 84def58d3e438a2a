"""Write the weights of a checkpoint as a Hugging Face folder, as a step, or as a folder of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Iterable
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
from dtrain.checkpoint.data_file import BlockDigester, plan_blocks
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


def write_hugging_face(folder: Path, weights: WeightStream, *, max_shard_bytes: int, config: bytes | None) -> None:
    """Write the files of a Hugging Face folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        max_shard_bytes: limit of the tensors of one file in bytes; a larger tensor gets a file of its own.
        config: content of ``config.json``; None writes no such file.
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
    if config is not None:
        storage.write_file(folder / "config.json", config)
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


class _StreamingSavePlanner(DefaultSavePlanner):  # type: ignore[misc,unused-ignore]
    """Save planner that plans with meta tensors, and reads each tensor just before the writer writes the tensor."""

    def __init__(self, weights: WeightStream, names: dict[str, str]) -> None:
        super().__init__()
        self._weights, self._names = weights, names
        refs = weights.files.refs
        sizes = {name: nbytes(refs[name]) for name in weights.dtypes}
        together = [
            {name: full_region(refs[name].shape) for name in group} for group in group_by_size(sizes, limit=BUFFER_BYTES)
        ]
        self._regions = {name: group for group in together for name in group}
        self._batch: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of one item. The tensor of the previous item has been written and is freed."""
        if self._last is not None:
            # The writer keeps a reference to every tensor until the end of its file.
            self._last.untyped_storage().resize_(0)
        name = self._names[write_item.index.fqn]
        if name not in self._batch:
            # Tensors of one chunk are read together, because each read fetches the whole chunk.
            self._batch = read_batch(self._weights.files, self._regions[name], self._weights.dtypes)
        # Memory that NumPy has exported cannot be resized, so the tensor is cloned.
        self._last = self._batch.pop(name).clone()
        self._weights.on_bytes_written(self._last.nbytes)
        return self._last


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
