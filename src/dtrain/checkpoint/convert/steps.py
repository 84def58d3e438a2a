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
from dtrain.checkpoint import layout, plain, rank_index
from dtrain.checkpoint.convert.weights import Weights, renamed, write_safetensors
from dtrain.checkpoint.data_file import place
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES, DataFile, Layout, Manifest, RankFiles
from dtrain.checkpoint.rank_index import Entry, RankIndex
from dtrain.clock import Clock
from dtrain.names import matcher
from dtrain.storage import Buffer

# Files of others do not say which tensors are buffers. These are the ones of torch's own modules; of others, those that no
# gradient could change.
USUAL_BUFFERS = ("**.running_mean", "**.running_var", "running_mean", "running_var")


class _Chunks:
    """The digest of each ``CHUNK_BYTES`` of what is put in."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._open, self._room = xxhash.xxh3_128(), CHUNK_BYTES

    def put(self, data: Buffer) -> None:
        """Take the next bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._open.update(part)
            self._room -= len(part)
            if self._room == 0:
                self.close()

    def close(self) -> None:
        """End the chunk that has begun."""
        if self._room < CHUNK_BYTES:
            self.done.append(self._open.hexdigest())
            self._open, self._room = xxhash.xxh3_128(), CHUNK_BYTES


def write_step(folder: Path, given: Weights, *, step: int, buffers: Iterable[str]) -> None:
    """Write the folder's files, on the disk when this returns.

    Args:
        folder: there, and empty.
        given: what is written.
        step: that the clock shows.
        buffers: patterns of names of tensors that are buffers of the model, besides the usual ones; all others are parameters.
    """
    keys = _keys(given, buffers)
    by_key = replace(
        given,
        stored=renamed(given.stored, {key: name for name, key in keys.items()}),
        dtypes={key: given.dtypes[name] for name, key in keys.items()},
    )
    chunks = _Chunks()
    name = layout.data_name(0)
    size = write_safetensors(folder / name, by_key, by_key.dtypes, chunks.put)
    chunks.close()
    data = rank_index.encode_index(_index(by_key, _shared(given, keys, step), tuple(chunks.done)))
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
        layout=Layout(strategy="none", axes=(), shape=()),
        only=("model",),
        ranks=(files,),
    )
    storage.write_file(folder / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(folder)


def _keys(given: Weights, buffers: Iterable[str]) -> dict[str, str]:
    """The key of each tensor by name."""
    is_buffer = matcher([*USUAL_BUFFERS, *buffers], where="convert: buffers")

    def section(name: str) -> str:
        trained = DTYPES[given.dtypes[name]].is_floating_point and not is_buffer(name)
        return "params" if trained else "buffers"

    return {name: plain.join(section(name), name) for name in given.dtypes}


def _shared(given: Weights, keys: Mapping[str, str], step: int) -> dict[str, Any]:
    """The values of the run."""
    tree: dict[str, Any] = {"params": {}, "buffers": {}, "clock": Clock(step=step).state_dict(), "seed": 0}
    for box in given.boxes:
        section = keys[box.key].partition("/")[0]
        tree[section][box.key] = torch.empty((), dtype=DTYPES[box.dtype]).expand(box.size)  # of any shape, with no memory
    return {section: plain.encode(part, section)[0] for section, part in tree.items()}


def _index(given: Weights, shared: dict[str, Any], chunks: tuple[str, ...]) -> RankIndex:
    placed = place(given.boxes)
    entries = [
        Entry(key=b.key, dtype=b.dtype, shape=b.size, offset=(0,) * len(b.size), size=b.size, begin=begin, end=end)
        for b in placed.boxes
        if b.nbytes
        for begin, end in [placed.ranges[b.key]]
    ]
    values = {section: plain.encode({}, section)[0] for section in ("buffers", "rng")}
    return RankIndex(rank=0, boxes=tuple(entries), own=(), chunks=(chunks,), values=values, shared=shared)
