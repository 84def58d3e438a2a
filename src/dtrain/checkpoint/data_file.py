"""Writes a rank's tensors as an ordinary safetensors file, in one pass, with its digests.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Boxes lie in order of falling item size, so that each is aligned.

Source: the format section of the safetensors README (huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from dtrain import pulse
from dtrain.checkpoint.digest import DigestThread
from dtrain.checkpoint.layout import DTYPES
from dtrain.storage import Buffer, FileWriter

_PIECE_BYTES = 4 * 2**20  # of one write: small enough to keep the digest thread busy alongside
_SMALL_BYTES = 64 * 2**10  # what is smaller is gathered, to spare a system call for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A tensor of the file: its name there, dtype by its safetensors name, and shape."""

    key: str
    dtype: str
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.size) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A file's plan: the header's bytes, the boxes in the order of the file, and each one's byte range in the file."""

    header: bytes
    boxes: tuple[Box, ...]
    ranges: Mapping[str, tuple[int, int]]


def place(boxes: Iterable[Box]) -> Placed:
    """Lay out a file that holds ``boxes``, a pure function."""
    ordered = tuple(sorted(boxes, key=lambda box: (-DTYPES[box.dtype].itemsize, box.key)))
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for box in ordered:
        offsets[box.key] = (at, at + box.nbytes)
        head[box.key] = {"dtype": box.dtype, "shape": box.size, "data_offsets": offsets[box.key]}
        at += box.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return Placed(
        header=header,
        boxes=ordered,
        ranges={key: (len(header) + begin, len(header) + end) for key, (begin, end) in offsets.items()},
    )


def write_data_file(path: Path, placed: Placed, tensors: Mapping[str, Tensor]) -> tuple[int, tuple[str, ...]]:
    """Write the file, on the disk when this returns.

    Args:
        path: a name that does not exist.
        placed: what goes where.
        tensors: the data by key, each of its box's shape and dtype, on any device; unchanged until this returns.

    Returns:
        Bytes written, and the sha256 of each chunk.

    Host sync: one per tensor that is not on the CPU.
    """
    with FileWriter(path) as file, DigestThread() as digest:
        for piece in _pieces(placed, tensors):
            pulse.beat("save")
            file.write(piece)
            digest.put(piece)
        chunks = digest.finish()
        file.sync()
    return file.written, chunks


def _pieces(placed: Placed, tensors: Mapping[str, Tensor]) -> Iterable[Buffer]:
    """The content of the file in pieces of a handy size."""
    gathered = bytearray(placed.header)
    for box in placed.boxes:
        data = as_bytes(tensors[box.key], box.size)
        if len(data) <= _SMALL_BYTES:
            gathered += data
            if len(gathered) < _PIECE_BYTES:
                continue
            data = memoryview(b"")
        if gathered:
            yield gathered
            gathered = bytearray()  # a new one: the digest thread may still read the old
        for at in range(0, len(data), _PIECE_BYTES):
            yield data[at : at + _PIECE_BYTES]
    if gathered:
        yield gathered


def as_bytes(tensor: Tensor, size: Sequence[int]) -> memoryview:
    """The data of a plain tensor of this shape, row by row; sharing memory where it lies so already."""
    assert tuple(tensor.shape) == tuple(size), f"a box of {tuple(size)} is given data of {tuple(tensor.shape)}"
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return memoryview(flat.view(torch.uint8).numpy().data)
