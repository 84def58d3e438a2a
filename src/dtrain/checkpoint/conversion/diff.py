"""What differs between two checkpoints: names, shapes, dtypes, values; read side by side, a piece of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.checkpoint import tree_json
from dtrain.checkpoint.conversion.weight_stream import BUFFER_BYTES, batch_regions, nbytes, raw_bytes, read_batch
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.tensor_files import TensorFiles
from dtrain.checkpoint.tree_json import TensorRef

DifferenceKind = Literal["only in a", "only in b", "shape", "dtype", "values", "plain value"]
_RUN_ELEMENTS = 2**21  # elements compared at a time: they are made float64
_MAX_VALUE_CHARS = 60  # characters of a plain value


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
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
    kind: DifferenceKind
    a: str | None
    b: str | None
    differing: int | None = None
    max_abs: float | None = None


def tensors_and_values(opened: CheckpointReader) -> tuple[TensorFiles, dict[str, Any]]:
    """All tensors of a step by key, and all plain values by path; what a rank has for itself is below ``rank-00000``."""
    refs, boxes = dict(opened.refs), dict(opened.shards)
    values = dict(_plain_values(opened.shared))
    for rank, (own, of_rank) in enumerate(zip(opened.per_rank, opened.values, strict=True)):
        prefix = f"rank-{rank:05d}"
        for key, ref in tree_json.tensor_refs(of_rank, "").items():
            refs[f"{prefix}/{key}"] = ref
            boxes[f"{prefix}/{key}"] = [own[key]._replace(entry=own[key].entry._replace(key=f"{prefix}/{key}"))]
        values |= {f"{prefix}/{key}": value for key, value in _plain_values(of_rank)}
    return _tensor_files(opened, refs, boxes), values


def _tensor_files(opened: CheckpointReader, refs: Mapping[str, TensorRef], boxes: Mapping[str, Any]) -> TensorFiles:
    return TensorFiles(content_hash="", refs=refs, shards=boxes, open_file=opened.open_data)


def _plain_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The plain values of an encoded tree, by path."""
    for name, part in tree.items():
        yield from _iter_values(tree_json.decode(part, name, lambda key, ref: ref), name)


def _iter_values(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _iter_values(item, tree_json.join_key(path, key))
    elif isinstance(tree, list | tuple) and any(isinstance(item, dict | list | tuple | TensorRef) for item in tree):
        for at, item in enumerate(tree):
            yield from _iter_values(item, tree_json.join_key(path, at))
    elif not isinstance(tree, TensorRef):
        yield path, tree


def diff_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[CheckpointDifference]:
    """The plain values that differ, by path. A pure function."""
    for path in {**a, **b}:
        left, right = (_text(values[path]) if path in values else None for values in (a, b))
        if left != right:
            yield CheckpointDifference(key=path, kind="plain value", a=_shorten(left), b=_shorten(right))


def _text(value: Any) -> str:
    return repr(value)  # NaN equals itself, and 1 is not 1.0


def _shorten(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def common_bytes(a: TensorFiles, b: TensorFiles) -> int:
    """How much of ``a`` will be compared."""
    return sum(nbytes(ref) for name, ref in a.refs.items() if name in b.refs and b.refs[name].shape == ref.shape)


def diff_tensors(a: TensorFiles, b: TensorFiles, *, on_bytes_compared: Callable[[int], None]) -> Iterator[CheckpointDifference]:
    """The tensors in which two checkpoints differ: those that one lacks, then those of another shape, then the rest.

    Args:
        a: the first.
        b: the second.
        on_bytes_compared: is told how many more bytes of ``a`` have been compared.

    Raises:
        CorruptCheckpointError: bytes that are not as they were written, as far as the files can tell.
    """
    for name, ref in a.refs.items():
        if name not in b.refs:
            yield CheckpointDifference(key=name, kind="only in a", a=str(ref), b=None)
    for name, ref in b.refs.items():
        if name not in a.refs:
            yield CheckpointDifference(key=name, kind="only in b", a=None, b=str(ref))
    both = [name for name in a.refs if name in b.refs]
    for name in both:
        if a.refs[name].shape != b.refs[name].shape:
            yield CheckpointDifference(key=name, kind="shape", a=str(a.refs[name]), b=str(b.refs[name]))
    yield from _diff_common_tensors(
        a, b, [name for name in both if a.refs[name].shape == b.refs[name].shape], on_bytes_compared
    )


def _diff_common_tensors(
    a: TensorFiles, b: TensorFiles, names: list[str], compared: Callable[[int], None]
) -> Iterator[CheckpointDifference]:
    found: dict[str, tuple[int, float | None]] = {}
    for batch in batch_regions(a.refs, names, limit=BUFFER_BYTES // 2):
        left, right = read_batch(a, batch), read_batch(b, batch)
        for name in batch:
            count, largest = count_differences(left[name], right[name])
            before, so_far = found.get(name, (0, None))
            found[name] = (
                before + count,
                largest if so_far is None else so_far if largest is None else _max_or_nan(so_far, largest),
            )
            compared(left[name].nbytes)
    for name in names:
        count, largest = found[name]
        one, other = a.refs[name], b.refs[name]
        if one.dtype != other.dtype or count:
            kind: DifferenceKind = "values" if one.dtype == other.dtype else "dtype"
            yield CheckpointDifference(key=name, kind=kind, a=str(one), b=str(other), differing=count, max_abs=largest)


def count_differences(a: Tensor, b: Tensor) -> tuple[int, float | None]:
    """How many elements of two tensors of one shape differ, and by how much at most; None where none does."""
    if a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b)):
        return 0, None
    count, largest = 0, None
    for one, other in zip(a.reshape(-1).split(_RUN_ELEMENTS), b.reshape(-1).split(_RUN_ELEMENTS), strict=True):
        differ = _differing_elements(one, other)
        count += int(differ.sum())
        if bool(differ.any()):
            apart = (one.double() - other.double())[differ].abs()
            most = float(apart.max())  # NaN where there is one
            if most == 0 and not a.is_floating_point() and not b.is_floating_point():
                most = 1.0  # two integers that float64 does not tell apart
            largest = most if largest is None else _max_or_nan(largest, most)
    return count, largest


def _differing_elements(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype:
        return (raw_bytes(a).view(-1, a.itemsize) != raw_bytes(b).view(-1, a.itemsize)).any(1)
    one, other = a.double(), b.double()
    return (one != other) & ~(one.isnan() & other.isnan())


def _max_or_nan(a: float, b: float) -> float:
    return a if a != a or a >= b else b
