"""Carries out a plan of reads: byte ranges of files into tensors that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import Read
from dtrain.tensors import local


class RangeReader(Protocol):
    """An open file that gives byte ranges, whole or not at all."""

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes ``[begin, end)``."""


OpenFile: TypeAlias = Callable[[int], AbstractContextManager[RangeReader]]
"""Opens the file of this number."""


def fill_(tensors: Mapping[str, Tensor], reads: Iterable[Read], refs: Mapping[str, TensorRef], open_file: OpenFile) -> None:
    """Copy what is read into the local shards of ``tensors``, cast to their dtypes.

    Args:
        tensors: by key; those that no read names stay as they are.
        reads: in the order of the files.
        refs: the stored dtypes by key.
        open_file: gives the files.

    Mutates: ``tensors``.
    """
    for number, of_file in groupby(reads, key=lambda read: read.file):
        with torch.no_grad(), open_file(number) as file:
            for read in of_file:
                block = as_tensor(file.read(read.begin, read.end), refs[read.key].dtype, read.block)
                _copy_box(local(tensors[read.key]), read, block)


def as_tensor(data: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor whose rows these bytes are, sharing their memory."""
    if not data:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]).reshape(tuple(shape))


def _copy_box(target: Tensor, read: Read, block: Tensor) -> None:
    into = target[tuple(slice(*span) for span in read.target)]
    into.copy_(block[tuple(slice(*span) for span in read.source)])
