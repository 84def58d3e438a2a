"""``Weights``: named tensors on their way from files of one format into files of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.convert.pieces import cut, read
from dtrain.checkpoint.data_file import Box, place
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.stored import Stored
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.storage import Buffer, FileWriter

CASTS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WHERE = "convert"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Weights:
    """Tensors by name, and what they become.

    Args:
        stored: where they are.
        dtypes: that they are written in, by name.
        wrote: is told how many bytes have been written since it was told last.
    """

    stored: Stored
    dtypes: Mapping[str, str]
    wrote: Callable[[int], None]

    @property
    def boxes(self) -> list[Box]:
        """What is written."""
        return [Box.of(name, dtype, self.stored.refs[name].shape) for name, dtype in self.dtypes.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of what is written, by name."""
        return {box.key: box.nbytes for box in self.boxes}

    @property
    def bytes(self) -> int:
        """Size of what is written."""
        return sum(self.sizes.values())

    def pieces(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The data of these tensors, one after the other, row by row, in tensors of a handy size."""
        for batch in cut(self.stored.refs, names):
            yield from read(self.stored, batch, self.dtypes).values()


def weights(stored: Stored, *, cast: str | None, wrote: Callable[[int], None]) -> Weights:
    """All tensors of ``stored``, floating ones cast when ``cast`` is given: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: another cast.
    """
    if cast is not None and cast not in CASTS:
        raise ConfigError(f"{_WHERE}: cast must be one of {', '.join(CASTS)}, got {cast!r}; leave it out to keep the dtypes")
    dtypes = {
        name: CASTS[cast] if cast is not None and DTYPES[ref.dtype].is_floating_point else ref.dtype
        for name, ref in stored.refs.items()
    }
    return Weights(stored=stored, dtypes=dtypes, wrote=wrote)


def write_safetensors(path: Path, given: Weights, names: Iterable[str], also: Callable[[Buffer], Any] | None = None) -> int:
    """Write these tensors as one safetensors file, on the disk when this returns.

    Args:
        path: a name that does not exist.
        given: what they are taken from.
        names: which of them.
        also: gets every byte of the file, in order.

    Returns:
        Bytes of the file.
    """
    chosen = set(names)
    placed = place(box for box in given.boxes if box.key in chosen)

    with FileWriter(path) as file:
        for data in _buffers(placed.header, given.pieces(box.key for box in placed.boxes)):
            file.write(data)
            if also is not None:
                also(data)
            given.wrote(len(data))
        file.sync()
    return file.written


def _buffers(header: bytes, pieces: Iterable[Tensor]) -> Iterator[Buffer]:
    yield header
    for piece in pieces:
        yield as_bytes(piece)


def as_bytes(tensor: Tensor) -> memoryview:
    """The data of a tensor on the CPU, row by row; sharing memory where it lies so already."""
    return memoryview(bits(tensor).numpy().data)


def renamed(stored: Stored, names: Mapping[str, str]) -> Stored:
    """``stored`` under new names: each new name -> the stored one. What no new name stands for is left out."""

    def boxes(new: str, old: str) -> list[Any]:
        return [box._replace(entry=box.entry._replace(key=new)) for box in stored.boxes.get(old, ())]

    return replace(
        stored,
        refs={new: stored.refs[old] for new, old in names.items()},
        boxes={new: boxes(new, old) for new, old in names.items()},
    )


def tied(stored: Stored, tie: Mapping[str, str], *, once: bool) -> Stored:
    """``stored`` with what ``tie`` says is one tensor (a further name -> the first) under both names, or ``once``.

    Raises:
        ConfigError: neither of two names is stored.
        CheckpointMismatchError: both are, and differ.
    """
    names = {name: name for name in stored.refs}
    for alias, first in tie.items():
        there = next((name for name in (first, alias) if name in stored.refs), None)
        if there is None or alias == first:
            raise ConfigError(f"{_WHERE}: tie: {alias!r} and {first!r} must be two names of which one is stored, and are not")
        if alias in stored.refs and first in stored.refs and not _equal(stored, alias, first):
            raise CheckpointMismatchError(f"{_WHERE}: tie: {alias!r} and {first!r} are both stored, and differ; leave out tie")
        names |= {alias: there, first: there}
        if once:
            del names[alias]
    return renamed(stored, names)


def _equal(stored: Stored, a: str, b: str) -> bool:
    if stored.refs[a].shape != stored.refs[b].shape or stored.refs[a].dtype != stored.refs[b].dtype:
        return False
    return all(
        torch.equal(bits(read(stored, batch)[a]), bits(read(stored, {b: batch[a]})[b])) for batch in cut(stored.refs, [a])
    )


def bits(tensor: Tensor) -> Tensor:
    """The data of a tensor as flat bytes, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
