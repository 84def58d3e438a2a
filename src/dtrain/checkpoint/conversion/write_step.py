"""Write a step that holds weights only, as one rank would write the step."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from dtrain import storage
from dtrain.checkpoint import layout, rank_index, tree_json
from dtrain.checkpoint.conversion.weight_stream import WeightStream, rename_tensors, write_safetensors
from dtrain.checkpoint.data_file import plan_file_layout
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES, DataFile, Manifest, MeshLayout, RankFiles
from dtrain.checkpoint.rank_index import RankIndex, TensorShardEntry
from dtrain.clock import Clock
from dtrain.fqn import compile_patterns
from dtrain.storage import Buffer

# Third-party files do not say which tensors are buffers. These patterns match the floating buffers of torch's modules.
KNOWN_BUFFER_PATTERNS = ("**.running_mean", "**.running_var", "running_mean", "running_var")


class _ChunkDigester:
    """Digester of the bytes of a file, with one digest per ``CHUNK_BYTES``."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._current, self._remaining = xxhash.xxh3_128(), CHUNK_BYTES

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            part, rest = rest[: self._remaining], rest[self._remaining :]
            self._current.update(part)
            self._remaining -= len(part)
            if self._remaining == 0:
                self.end_chunk()

    def end_chunk(self) -> None:
        """End the current chunk unless empty."""
        if self._remaining < CHUNK_BYTES:
            self.digests.append(self._current.hexdigest())
            self._current, self._remaining = xxhash.xxh3_128(), CHUNK_BYTES


def write_step(folder: Path, weights: WeightStream, *, step: int, buffers: Iterable[str]) -> None:
    """Write the files of the folder. They are on the disk when the function returns.

    Args:
        folder: existing empty folder.
        weights: weights to write.
        step: step of the clock.
        buffers: patterns of the names of buffers, besides the known patterns; all other floating tensors are parameters.
    """
    keys = _tensor_keys(weights, buffers)
    by_key = replace(
        weights,
        files=rename_tensors(weights.files, {key: name for name, key in keys.items()}),
        dtypes={key: weights.dtypes[name] for name, key in keys.items()},
    )
    chunks = _ChunkDigester()
    name = layout.data_name(0)
    size = write_safetensors(folder / name, by_key, by_key.dtypes, chunks.update)
    chunks.end_chunk()
    data = rank_index.encode_index(_build_index(by_key, _shared_values(weights, keys, step), tuple(chunks.digests)))
    storage.write_file(folder / layout.index_name(0), data)
    files = RankFiles(
        index=layout.index_name(0),
        index_bytes=len(data),
        index_sha256=hashlib.sha256(data).hexdigest(),
        data=(DataFile(name=name, bytes=size),),
    )
    manifest = Manifest(
        run_id=secrets.token_hex(16),
        step=step,
        parent_step=None,
        serial=1,
        layout=MeshLayout(strategy="none", axes=(), shape=()),
        what="weights",
        states=(),
        ranks=(files,),
    )
    storage.write_file(folder / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(folder)


def _tensor_keys(weights: WeightStream, buffers: Iterable[str]) -> dict[str, str]:
    """Return the key of each tensor by name."""
    is_buffer = compile_patterns([*KNOWN_BUFFER_PATTERNS, *buffers], caller="convert: buffers")

    def section(name: str) -> str:
        trained = DTYPES[weights.dtypes[name]].is_floating_point and not is_buffer(name)
        return "params" if trained else "buffers"

    return {name: tree_json.join_key(section(name), name) for name in weights.dtypes}


def _shared_values(weights: WeightStream, keys: Mapping[str, str], step: int) -> dict[str, Any]:
    """Return the encoded values of the run."""
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "clock": Clock(step=step).state_dict(), "seed": 0}
    for slot in weights.slots:
        section = keys[slot.key].partition("/")[0]
        # An expanded scalar has any shape without memory.
        tree[section][slot.key] = torch.empty((), dtype=DTYPES[slot.dtype]).expand(slot.size)
    return {section: tree_json.encode(part, section)[0] for section, part in tree.items()}


def _build_index(weights: WeightStream, shared: dict[str, Any], chunks: tuple[str, ...]) -> RankIndex:
    file_layout = plan_file_layout(weights.slots)
    entries = [
        TensorShardEntry(key=b.key, dtype=b.dtype, shape=b.size, offset=(0,) * len(b.size), size=b.size, begin=begin, end=end)
        for b in file_layout.slots
        if b.nbytes
        for begin, end in [file_layout.ranges[b.key]]
    ]
    values = {section: tree_json.encode({}, section)[0] for section in ("buffers", "rng")}
    return RankIndex(rank=0, shards=tuple(entries), per_rank=(), chunks=(chunks,), values=values, shared=shared)
