"""Copies of what is to be saved, in host memory that is used again and again: training may go on when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.checkpoint.data_file import Box, Image, Placed, joined, runs
from dtrain.checkpoint.layout import DTYPES

PAGE_BYTES = 4096


@dataclass(slots=True, eq=False, repr=False)
class Buffer:
    """Memory for one file at a time, pinned where tensors come from a GPU; and its views, kept while the layout stays."""

    memory: Tensor
    header: bytes = b""
    views: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # by the first and last key of a run

    def fill(self, placed: Placed, tensors: Mapping[str, Tensor]) -> Image:
        """The file's image, copied. From a GPU the copy is asked for, in the order of its stream, and not waited for.

        To be called where no gradients are recorded.

        Mutates: the memory.
        """
        if self.header != placed.header:
            self.header, self.views = placed.header, {}
            self.memory[: len(placed.header)] = torch.frombuffer(bytearray(placed.header), dtype=torch.uint8)
        for run in runs(placed, tensors):
            _copy([tensors[box.key] for box in run], self._view(placed, run))
        return Image.of([memoryview(self.memory[: placed.size].numpy().data)])

    def _view(self, placed: Placed, run: Sequence[Box]) -> Tensor:
        ends = run[0].key, run[-1].key  # tensors that have moved to another device make other runs
        view = self.views.get(ends)
        if view is None:
            begin, end = placed.ranges[run[0].key][0], placed.ranges[run[-1].key][1]
            view = self.memory[begin:end].view(DTYPES[run[0].dtype])
            self.views[ends] = view
        return view


def _copy(tensors: Sequence[Tensor], into: Tensor) -> None:
    if len(tensors) > 1 and tensors[0].device == into.device:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=into)
    else:
        into.copy_(joined(tensors), non_blocking=True)


def _aligned(size: int, pinned: bool) -> Tensor:
    """Memory that begins at a page: the chunks of a file whose image it is go to the disk without another copy."""
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + size]


class Staging:
    """The buffers of a process: as many as there were saves in flight at a time, each as large as was ever needed."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, size: int, *, pinned: bool) -> Buffer:
        """A buffer of at least ``size`` bytes that nobody uses; ``give`` it back. The first time costs an allocation."""
        fitting = [b for b in self._free if b.memory.numel() >= size and b.memory.is_pinned() == pinned]
        if fitting:
            found = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(found)
            return found
        if self._free:
            self._free.pop()  # too small for this run: do not keep both
        return Buffer(_aligned(size, pinned))

    def give(self, buffer: Buffer) -> None:
        """Take back a buffer."""
        self._free.append(buffer)
