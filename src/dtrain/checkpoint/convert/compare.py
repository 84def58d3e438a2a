"""What differs between two checkpoints: names, shapes, dtypes, values; read side by side, a piece of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.checkpoint import plain
from dtrain.checkpoint.convert.pieces import BUFFER_BYTES, cut, nbytes, read
from dtrain.checkpoint.convert.weights import bits
from dtrain.checkpoint.opened import Opened
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.stored import Stored

Kind = Literal["only in a", "only in b", "shape", "dtype", "values", "plain value"]
_RUN = 2**21  # elements compared at a time: they are made float64
_SHOWN = 60  # characters of a plain value


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two checkpoints differ.

    Args:
        key: of the tensor or value.
        kind: how. A ``dtype`` may come with equal values; then ``differing`` is 0.
        a: what the first has: dtype and shape, or the value; None for nothing.
        b: what the second has.
        differing: elements that differ, where both have the same shape: in one dtype those whose bytes do, in two dtypes
            those whose values do. None for everything else.
        max_abs: the largest absolute difference of two elements; NaN where only one of two is a number.
    """

    key: str
    kind: Kind
    a: str | None
    b: str | None
    differing: int | None = None
    max_abs: float | None = None


def everything_of(opened: Opened) -> tuple[Stored, dict[str, Any]]:
    """All tensors of a step by key, and all plain values by path; what a rank has for itself is below ``rank-00000``."""
    refs, boxes = dict(opened.refs), dict(opened.boxes)
    values = dict(_plain(opened.shared))
    for rank, (own, of_rank) in enumerate(zip(opened.own, opened.values, strict=True)):
        prefix = f"rank-{rank:05d}"
        for key, ref in plain.refs(of_rank, "").items():
            refs[f"{prefix}/{key}"] = ref
            boxes[f"{prefix}/{key}"] = [own[key]._replace(entry=own[key].entry._replace(key=f"{prefix}/{key}"))]
        values |= {f"{prefix}/{key}": value for key, value in _plain(of_rank)}
    return _stored(opened, refs, boxes), values


def _stored(opened: Opened, refs: Mapping[str, TensorRef], boxes: Mapping[str, Any]) -> Stored:
    return Stored(identity="", refs=refs, boxes=boxes, open_file=opened.data)


def _plain(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The plain values of an encoded tree, by path."""
    for name, part in tree.items():
        yield from _leaves(plain.decode(part, name, lambda key, ref: ref), name)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _leaves(item, plain.join(path, key))
    elif isinstance(tree, list | tuple) and any(isinstance(item, dict | list | tuple | TensorRef) for item in tree):
        for at, item in enumerate(tree):
            yield from _leaves(item, plain.join(path, at))
    elif not isinstance(tree, TensorRef):
        yield path, tree


def plain_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """The plain values that differ, by path. A pure function."""
    for path in {**a, **b}:
        left, right = (_text(values[path]) if path in values else None for values in (a, b))
        if left != right:
            yield Difference(key=path, kind="plain value", a=_short(left), b=_short(right))


def _text(value: Any) -> str:
    return repr(value)  # NaN equals itself, and 1 is not 1.0


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def common_bytes(a: Stored, b: Stored) -> int:
    """How much of ``a`` will be compared."""
    return sum(nbytes(ref) for name, ref in a.refs.items() if name in b.refs and b.refs[name].shape == ref.shape)


def differences(a: Stored, b: Stored, *, compared: Callable[[int], None]) -> Iterator[Difference]:
    """The tensors in which two checkpoints differ: those that one lacks, then those of another shape, then the rest.

    Args:
        a: the first.
        b: the second.
        compared: is told how many more bytes of ``a`` have been compared.

    Raises:
        DamagedCheckpointError: bytes that are not as they were written, as far as the files can tell.
    """
    for name, ref in a.refs.items():
        if name not in b.refs:
            yield Difference(key=name, kind="only in a", a=str(ref), b=None)
    for name, ref in b.refs.items():
        if name not in a.refs:
            yield Difference(key=name, kind="only in b", a=None, b=str(ref))
    both = [name for name in a.refs if name in b.refs]
    for name in both:
        if a.refs[name].shape != b.refs[name].shape:
            yield Difference(key=name, kind="shape", a=str(a.refs[name]), b=str(b.refs[name]))
    yield from _compared(a, b, [name for name in both if a.refs[name].shape == b.refs[name].shape], compared)


def _compared(a: Stored, b: Stored, names: list[str], compared: Callable[[int], None]) -> Iterator[Difference]:
    found: dict[str, tuple[int, float | None]] = {}
    for batch in cut(a.refs, names, limit=BUFFER_BYTES // 2):
        left, right = read(a, batch), read(b, batch)
        for name in batch:
            count, largest = difference(left[name], right[name])
            before, so_far = found.get(name, (0, None))
            found[name] = before + count, largest if so_far is None else so_far if largest is None else _larger(so_far, largest)
            compared(left[name].nbytes)
    for name in names:
        count, largest = found[name]
        one, other = a.refs[name], b.refs[name]
        if one.dtype != other.dtype or count:
            kind: Kind = "values" if one.dtype == other.dtype else "dtype"
            yield Difference(key=name, kind=kind, a=str(one), b=str(other), differing=count, max_abs=largest)


def difference(a: Tensor, b: Tensor) -> tuple[int, float | None]:
    """How many elements of two tensors of one shape differ, and by how much at most; None where none does."""
    if a.dtype == b.dtype and torch.equal(bits(a), bits(b)):
        return 0, None
    count, largest = 0, None
    for one, other in zip(a.reshape(-1).split(_RUN), b.reshape(-1).split(_RUN), strict=True):
        differ = _differ(one, other)
        count += int(differ.sum())
        if bool(differ.any()):
            apart = (one.double() - other.double())[differ].abs()
            most = float(apart.max())  # NaN where there is one
            if most == 0 and not a.is_floating_point() and not b.is_floating_point():
                most = 1.0  # two integers that float64 does not tell apart
            largest = most if largest is None else _larger(largest, most)
    return count, largest


def _differ(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype:
        return (bits(a).view(-1, a.itemsize) != bits(b).view(-1, a.itemsize)).any(1)
    one, other = a.double(), b.double()
    return (one != other) & ~(one.isnan() & other.isnan())


def _larger(a: float, b: float) -> float:
    return a if a != a or a >= b else b
