"""A rank's tensors as an ordinary safetensors file: how it is laid out, its content, and writing it with its digests.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Boxes lie in order of falling item size, so that each is aligned.

Source: the format section of the safetensors README (huggingface/safetensors).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint.digest import digest_of
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES
from dtrain.storage import Buffer, Place

_SMALL_BYTES = 64 * 2**10  # what is smaller is gathered, to spare a call for each
_RUN_BYTES = 32 * 2**20  # gathered at once: it is a copy


class Box(NamedTuple):
    """A tensor of the file: its name there, dtype by its safetensors name, shape, and bytes of data."""

    key: str
    dtype: str
    size: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, key: str, dtype: str, size: tuple[int, ...]) -> Box:
        """The box with its size in bytes."""
        return cls(key, dtype, size, prod(size) * DTYPES[dtype].itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A file's plan: the header's bytes, the boxes in the order of the file, each one's byte range in it, its size."""

    header: bytes
    boxes: tuple[Box, ...]
    ranges: Mapping[str, tuple[int, int]]
    size: int


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
        size=len(header) + at,
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Image:
    """The content of a file that is to be written: pieces of host memory in a row, which nobody changes meanwhile."""

    pieces: Sequence[Buffer]
    starts: Sequence[int]
    size: int

    @classmethod
    def of(cls, pieces: Iterable[Buffer]) -> Image:
        """The image of these pieces; empty ones are left out."""
        kept = [piece for piece in pieces if len(piece)]
        ends = list(accumulate(map(len, kept)))
        return cls(kept, [0, *ends[:-1]], ends[-1] if ends else 0)

    def part(self, begin: int, end: int) -> list[memoryview]:
        """The bytes ``[begin, end)``, as views."""
        found, at = [], bisect_right(self.starts, begin) - 1
        while begin < end:
            low = begin - self.starts[at]
            view = memoryview(self.pieces[at])[low : low + end - begin]
            found.append(view)
            begin, at = begin + len(view), at + 1
        return found


def _nothing() -> None:
    """For callers who do not watch."""


def write_data_file(path: Place, image: Image, *, threads: int = 1, on_part: Callable[[], None] = _nothing) -> tuple[str, ...]:
    """Write a new file in chunks, on the disk when this returns.

    Args:
        path: a name that does not exist.
        image: its content.
        threads: how many write and digest at a time.
        on_part: called for every chunk, by the thread that writes it.

    Returns:
        The digest of each chunk.
    """
    chunks = chunk_bytes(image.size)
    digests = [""] * len(chunks)

    def part_of(number: int) -> list[memoryview]:
        on_part()
        part = image.part(number * CHUNK_BYTES, number * CHUNK_BYTES + chunks[number])
        digests[number] = digest_of(part)
        return part

    storage.write_parts(path, chunks, part_of, threads=threads)
    return tuple(digests)


def digests_of(image: Image) -> tuple[str, ...]:
    """What ``write_data_file`` would return, with nothing written."""
    chunks = chunk_bytes(image.size)
    return tuple(digest_of(image.part(at * CHUNK_BYTES, at * CHUNK_BYTES + size)) for at, size in enumerate(chunks))


def chunk_bytes(size: int) -> list[int]:
    """The sizes of the chunks of a file of ``size`` bytes."""
    whole, rest = divmod(size, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * (rest > 0)


def runs(placed: Placed, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Box, ...]]:
    """The boxes of a file in stretches handled at once: a large one alone, small ones of a dtype and device together."""
    run: list[Box] = []
    held, kind = 0, None
    for box in placed.boxes:
        kind_here = (box.dtype, tensors[box.key].device)
        large = box.nbytes > _SMALL_BYTES
        if run and (large or kind_here != kind or held >= _RUN_BYTES):
            yield tuple(run)
            run, held = [], 0
        if large:
            yield (box,)
            continue
        run.append(box)
        held, kind = held + box.nbytes, kind_here
    if run:
        yield tuple(run)


def image_in_place(placed: Placed, tensors: Mapping[str, Tensor]) -> Image:
    """The image of a file, made of the memory of the tensors where they lie on the CPU row by row, and of copies else.

    Host sync: one for each run of tensors that is not on the CPU.
    """
    return Image.of([placed.header, *(_bytes_of(joined([tensors[box.key] for box in run])) for run in runs(placed, tensors))])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The data of tensors of one dtype and device as one flat tensor, sharing memory where it is a single contiguous one."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def as_bytes(tensor: Tensor) -> memoryview:
    """The data of a plain tensor, row by row; sharing memory where it lies so already."""
    return _bytes_of(joined([tensor]))


def _bytes_of(flat: Tensor) -> memoryview:
    return memoryview(flat.cpu().resolve_neg().view(torch.uint8).numpy().data)
