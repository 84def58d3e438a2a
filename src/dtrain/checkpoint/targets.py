"""Check that a load can write the tensors of a state, before the first write.

A load must find out nothing after it has begun to write, because a state with tensors of two steps is lost.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import ConfigError

_MEMORY_MAP = "/proc/self/maps"


def check_targets(targets: Mapping[str, Tensor], caller: str) -> None:
    """Raise if a tensor of the state cannot be filled.

    Raises:
        ConfigError: the key of the first such tensor, the reason, and advice.
    """
    read_only = ReadOnlyMemory()
    for key, tensor in targets.items():
        problem = write_problem(tensor, read_only)
        if problem is not None:
            raise ConfigError(f"{caller}: {key} must {problem}. Materialize the model, or replace it by tensor.clone().")


def check_own_memory(tensors: Mapping[str, Tensor], caller: str) -> None:
    """Raise if no load could fill a tensor, because its elements share memory, as those of ``expand``.

    Raises:
        ConfigError: the key of the first such tensor.
    """
    for key, tensor in tensors.items():
        if _shares_elements(tensor):
            raise ConfigError(f"{caller}: {key} must {write_problem(tensor)}. Replace it by tensor.clone().")


def write_problem(tensor: Tensor, read_only: ReadOnlyMemory | None = None) -> str | None:
    """Return what a tensor must do to be filled, and what it is instead; None if it can be filled."""
    if tensor.is_meta:
        return "have data, got a tensor on the meta device"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "be writable, got a tensor that was made in inference mode"
    if _shares_elements(tensor):
        return f"have memory for each element, got an expanded tensor with strides {tuple(tensor.stride())}"
    if tensor.is_cpu and not is_dtensor(tensor) and tensor.numel() and tensor in (read_only or ReadOnlyMemory()):
        return "be writable, got a tensor in read-only memory, as of a mapped file"
    return None


def _shares_elements(tensor: Tensor) -> bool:
    # Other layouts have no strides.
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class ReadOnlyMemory:
    """Memory of this process that a write would end with a signal, read on first use. Empty except on Linux."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] | None = None

    def __contains__(self, tensor: Tensor) -> bool:
        # Memory that torch has allocated can be resized, and written.
        if tensor.untyped_storage().resizable():
            return False
        if self._spans is None:
            self._spans = _read_only_spans()
        address = tensor.data_ptr()
        at = bisect_right(self._spans, (address, sys.maxsize)) - 1
        return at >= 0 and address < self._spans[at][1]


def _read_only_spans() -> list[tuple[int, int]]:
    """Return the first address of each read-only part of the memory, and the address after the part, in order."""
    spans = []
    if sys.platform == "linux":
        with suppress(OSError), open(_MEMORY_MAP, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                span, access = line.split(maxsplit=2)[:2]
                if access[1] != "w":
                    begin, _, end = span.partition("-")
                    spans.append((int(begin, 16), int(end, 16)))
    return spans
