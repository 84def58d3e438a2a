"""Writes a step of ours that holds weights only, as one rank would."""

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

# Files of others do not say which tensors are buffers. These are the ones of torch's own modules; of others, those that no
# gradient could change.
KNOWN_BUFFER_PATTERNS = ("**.running_mean", "**.running_var", "running_mean", "running_var")


class _ChunkDigester:
    """The digest of each ``CHUNK_BYTES`` of what is put in."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._current, self._room = xxhash.xxh3_128(), CHUNK_BYTES

    def update(self, data: Buffer) -> None:
        """Take the next bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._current.update(part)
            self._room -= len(part)
            if self._room == 0:
                self.end_chunk()

    def end_chunk(self) -> None:
        """End the chunk that has begun."""
        if self._room < CHUNK_BYTES:
            self.digests.append(self._current.hexdigest())
            self._current, self._room = xxhash.xxh3_128(), CHUNK_BYTES


def write_step(folder: Path, given: WeightStream, *, step: int, buffers: Iterable[str]) -> None:
    """Write the folder's files, on the disk when this returns.

    Args:
        folder: there, and empty.
        given: what is written.
        step: that the clock shows.
        buffers: patterns of names of tensors that are buffers of the model, besides the usual ones; all others are parameters.
    """
    keys = _tensor_keys(given, buffers)
    by_key = replace(
        given,
        files=rename_tensors(given.files, {key: name for name, key in keys.items()}),
        dtypes={key: given.dtypes[name] for name, key in keys.items()},
    )
    chunks = _ChunkDigester()
    name = layout.data_name(0)
    size = write_safetensors(folder / name, by_key, by_key.dtypes, chunks.update)
    chunks.end_chunk()
    data = rank_index.encode_index(_build_index(by_key, _shared_values(given, keys, step), tuple(chunks.digests)))
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
        only=("model",),
        ranks=(files,),
    )
    storage.write_file(folder / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(folder)


def _tensor_keys(given: WeightStream, buffers: Iterable[str]) -> dict[str, str]:
    """The key of each tensor by name."""
    is_buffer = compile_patterns([*KNOWN_BUFFER_PATTERNS, *buffers], caller="convert: buffers")

    def section(name: str) -> str:
        trained = DTYPES[given.dtypes[name]].is_floating_point and not is_buffer(name)
        return "params" if trained else "buffers"

    return {name: tree_json.join_key(section(name), name) for name in given.dtypes}


def _shared_values(given: WeightStream, keys: Mapping[str, str], step: int) -> dict[str, Any]:
    """The values of the run."""
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "clock": Clock(step=step).state_dict(), "seed": 0}
    for box in given.slots:
        section = keys[box.key].partition("/")[0]
        tree[section][box.key] = torch.empty((), dtype=DTYPES[box.dtype]).expand(box.size)  # of any shape, with no memory
    return {section: tree_json.encode(part, section)[0] for section, part in tree.items()}


def _build_index(given: WeightStream, shared: dict[str, Any], chunks: tuple[str, ...]) -> RankIndex:
    placed = plan_file_layout(given.slots)
    entries = [
        TensorShardEntry(key=b.key, dtype=b.dtype, shape=b.size, offset=(0,) * len(b.size), size=b.size, begin=begin, end=end)
        for b in placed.slots
        if b.nbytes
        for begin, end in [placed.ranges[b.key]]
    ]
    values = {section: tree_json.encode({}, section)[0] for section in ("buffers", "rng")}
    return RankIndex(rank=0, shards=tuple(entries), per_rank=(), chunks=(chunks,), values=values, shared=shared)
