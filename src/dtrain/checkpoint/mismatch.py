"""Refuse a load before its first write: the checkpoint differs from the state, or a tensor of the state cannot be written.

A load must find out nothing after it has begun to write, because a state with tensors of two steps is lost.
"""

from __future__ import annotations

import difflib
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from dtrain.checkpoint.layout import DTYPES, TensorRef
from dtrain.checkpoint.tree_json import ref_of
from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import CheckpointMismatchError, ConfigError

MAX_ROWS = 10
_MEMORY_MAP = "/proc/self/maps"
MismatchKind = Literal["shape", "dtype", "unexpected", "missing", "other"]
_KIND_LABELS: dict[MismatchKind, str] = {
    "shape": "of another shape",
    "dtype": "of another dtype",
    "unexpected": "unexpected",
    "missing": "missing",
    "other": "other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchRow:
    """Row of the table.

    Args:
        name: name of the entry.
        kind: ``"missing"`` is not stored, ``"unexpected"`` is stored and not in the model.
        stored: description of the stored entry; None without one.
        here: description of the entry in the model; None without one.
        label: text to show instead of the name.
    """

    name: str
    kind: MismatchKind
    stored: str | None
    here: str | None
    label: str = ""


def missing_row(name: str, here: str) -> MismatchRow:
    """Return a row for an entry that is not stored."""
    return MismatchRow(name=name, kind="missing", stored=None, here=here)


def unexpected_row(name: str, stored: str, *, label: str = "") -> MismatchRow:
    """Return a row for an entry that is stored and not in the model."""
    return MismatchRow(name=name, kind="unexpected", stored=stored, here=None, label=label)


def compare_tensor(name: str, stored: TensorRef, here: Tensor, *, allow_cast: bool, label: str = "") -> MismatchRow | None:
    """Return a row for a tensor that is stored in another shape, or else in another dtype; None if the tensor fits.

    With ``allow_cast``, floating-point dtypes may differ.
    """
    dtype = DTYPES[stored.dtype]
    castable = allow_cast and dtype.is_floating_point and here.dtype.is_floating_point
    if stored.shape == tuple(here.shape) and (dtype == here.dtype or castable):
        return None
    kind: MismatchKind = "dtype" if stored.shape == tuple(here.shape) else "shape"
    return MismatchRow(name=name, kind=kind, stored=str(stored), here=str(ref_of(here)), label=label)


def other_row(name: str, stored: str, here: str) -> MismatchRow:
    """Return a row for an entry that is not a tensor."""
    return MismatchRow(name=name, kind="other", stored=stored, here=here)


def mismatch_error(caller: str, rows: Sequence[MismatchRow], *, source: str, advice: str) -> CheckpointMismatchError:
    """Return the error with the number of differences of each kind, and at most ten of them in a table.

    A name that only one side has is shown with the most similar name that only the other side has, because the entry may have
    been renamed.

    Args:
        caller: prefix of the message: the function and its argument.
        rows: differences, at least one.
        source: name of the stored side, such as ``"checkpoint"``.
        advice: sentences of advice.
    """
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in _KIND_LABELS}
    counts = ", ".join(f"{len(of_kind)} {_KIND_LABELS[kind]}" for kind, of_kind in kinds.items() if of_kind)
    # Kinds take turns, so that hundreds of rows of one kind do not hide the other kinds.
    turns = (row for turn in zip_longest(*kinds.values()) for row in turn if row is not None)
    shown = {id(row) for row, _ in zip(turns, range(MAX_ROWS), strict=False)}
    only_one_side = {"missing": [row.name for row in kinds["unexpected"]], "unexpected": [row.name for row in kinds["missing"]]}
    lines = [
        f"  {row.label or row.name}: {source} {row.stored or 'nothing'}, here {row.here or 'nothing'}"
        + "".join(f" (nearest: {other})" for other in difflib.get_close_matches(row.name, only_one_side.get(kind, ()), n=1))
        for kind, of_kind in kinds.items()
        for row in of_kind
        if id(row) in shown
    ]
    if len(rows) > len(lines):
        lines.append(f"  and {len(rows) - len(lines)} more")
    table = "\n".join(lines)
    differ = "entry differs" if len(rows) == 1 else "entries differ"
    return CheckpointMismatchError(f"{caller} does not fit. {len(rows)} {differ} ({counts}). {advice}\n{table}")


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

    def __contains__(self, tensor: Tensor) -> bool:
        # Memory that torch has allocated can be resized, and written.
        if tensor.untyped_storage().resizable():
            return False
        address = tensor.data_ptr()
        index = bisect_right(self._spans, (address, sys.maxsize)) - 1
        return index >= 0 and address < self._spans[index][1]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """First address of each read-only part of the memory, and the address after the part, in order."""
        spans = []
        if sys.platform == "linux":
            with suppress(OSError), open(_MEMORY_MAP, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    span, access = line.split(maxsplit=2)[:2]
                    if access[1] != "w":
                        begin, _, end = span.partition("-")
                        spans.append((int(begin, 16), int(end, 16)))
        return spans
