"""Compare two checkpoints by names, shapes, dtypes and values, in batches of limited size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.checkpoint import tree_json
from dtrain.checkpoint.layout import TensorRef
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.weights import BUFFER_BYTES, TensorFiles, batch_regions, nbytes, raw_bytes, read_batch

DifferenceKind = Literal["only in a", "only in b", "shape", "dtype", "values", "plain value"]
# Elements compared at a time, because they are converted to float64.
_RUN_ELEMENTS = 2**21
_MAX_VALUE_CHARS = 60
# The clock before a step is stored with the clock of the step.
_SECONDS = re.compile(r"(?:states/[^/]+/)?clock/(?:previous/)?seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDifference:
    """Difference between two checkpoints.

    Args:
        key: key of the tensor or path of the plain value.
        kind: kind of the difference. A ``dtype`` difference may have equal values; then ``differing`` is 0.
        a: dtype and shape, or value, in the first checkpoint; None without one.
        b: dtype and shape, or value, in the second checkpoint; None without one.
        differing: number of differing elements of tensors of one shape: elements with different bytes if the dtypes are equal,
            elements with different values otherwise. None for all other kinds.
        max_abs: largest absolute difference of two elements; NaN if only one of two elements is a number.
    """

    key: str
    kind: DifferenceKind
    a: str | None
    b: str | None
    differing: int | None = None
    max_abs: float | None = None


def tensors_and_values(reader: CheckpointReader) -> tuple[TensorFiles, dict[str, Any]]:
    """Return all tensors of a step by key, and all plain values by path. Those of one rank are below ``rank-00000``."""
    refs, placed = dict(reader.refs), dict(reader.placed)
    values = dict(_plain_values(reader.shared))
    for rank in range(reader.world_size):
        prefix, rank_values = f"rank-{rank:05d}", reader.values_of(rank)
        refs |= {f"{prefix}/{key}": ref for key, ref in tree_json.tensor_refs(rank_values, "").items()}
        placed |= {f"{prefix}/{key}": shard for key, shard in reader.shards_of_rank(rank).items()}
        values |= {f"{prefix}/{key}": value for key, value in _plain_values(rank_values)}
    reader = replace(reader, refs=refs, placed=placed)
    tensors = TensorFiles(
        content_hash="",
        refs=refs,
        keys={key: key for key in refs},
        find_shards=reader.find_shards,
        open_file=reader.open_data,
    )
    return tensors, values


def _plain_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the plain values of an encoded tree, by path."""
    for name, values in tree.items():
        yield from _iter_values(tree_json.decode(values, name, lambda key, ref: ref), name)


def _iter_values(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _iter_values(item, tree_json.join_key(path, key))
    elif isinstance(tree, list | tuple) and any(isinstance(item, dict | list | tuple | TensorRef) for item in tree):
        for index, item in enumerate(tree):
            yield from _iter_values(item, tree_json.join_key(path, index))
    elif not isinstance(tree, TensorRef):
        yield path, tree


def without_seconds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values without the seconds of the clock, which differ between two runs with equal results."""
    return {path: value for path, value in values.items() if not _SECONDS.fullmatch(path)}


def diff_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[CheckpointDifference]:
    """Compare plain values by path. A pure function."""
    for path in {**a, **b}:
        # The text distinguishes 1 from 1.0, and NaN equals NaN.
        left, right = (repr(values[path]) if path in values else None for values in (a, b))
        if left != right:
            yield CheckpointDifference(key=path, kind="plain value", a=_shorten(left), b=_shorten(right))


def _shorten(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def common_bytes(a: TensorFiles, b: TensorFiles) -> int:
    """Return the number of bytes of ``a`` that ``diff_tensors`` will compare."""
    return sum(nbytes(ref) for name, ref in a.refs.items() if name in b.refs and b.refs[name].shape == ref.shape)


def diff_tensors(a: TensorFiles, b: TensorFiles, *, on_bytes_compared: Callable[[int], None]) -> Iterator[CheckpointDifference]:
    """Compare the tensors of two checkpoints: first missing tensors, then shapes, then all other differences.

    Args:
        a: first checkpoint.
        b: second checkpoint.
        on_bytes_compared: called with the number of further bytes of ``a`` compared.

    Raises:
        CorruptCheckpointError: bytes that were changed, as far as the files can tell.
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
    common = [name for name in both if a.refs[name].shape == b.refs[name].shape]
    counts, largest = dict.fromkeys(common, 0), dict[str, float | None].fromkeys(common)
    for batch in batch_regions(a.refs, common, limit=BUFFER_BYTES // 2):
        left, right = read_batch(a, batch), read_batch(b, batch)
        for name in batch:
            count, max_abs = count_differences(left[name], right[name])
            counts[name] += count
            largest[name] = _largest(largest[name], max_abs)
            on_bytes_compared(left[name].nbytes)
    for name in common:
        ref_a, ref_b = a.refs[name], b.refs[name]
        if ref_a.dtype != ref_b.dtype or counts[name]:
            kind: DifferenceKind = "values" if ref_a.dtype == ref_b.dtype else "dtype"
            difference = CheckpointDifference(key=name, kind=kind, a=str(ref_a), b=str(ref_b))
            yield replace(difference, differing=counts[name], max_abs=largest[name])


def count_differences(a: Tensor, b: Tensor) -> tuple[int, float | None]:
    """Count the differing elements of two tensors of one shape. Return the largest difference as well, None without any."""
    if a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b)):
        return 0, None
    count, max_abs = 0, None
    for run_a, run_b in zip(a.reshape(-1).split(_RUN_ELEMENTS), b.reshape(-1).split(_RUN_ELEMENTS), strict=True):
        double_a, double_b = run_a.double(), run_b.double()
        if a.dtype == b.dtype:
            differ = (raw_bytes(run_a).view(-1, a.itemsize) != raw_bytes(run_b).view(-1, a.itemsize)).any(1)
        else:
            differ = (double_a != double_b) & ~(double_a.isnan() & double_b.isnan())
        count += int(differ.sum())
        if bool(differ.any()):
            # The maximum is NaN if one of the differences is NaN.
            run_max = float((double_a - double_b)[differ].abs().max())
            if run_max == 0 and not a.is_floating_point() and not b.is_floating_point():
                # Two different integers may have one float64 value.
                run_max = 1.0
            max_abs = _largest(max_abs, run_max)
    return count, max_abs


def _largest(a: float | None, b: float | None) -> float | None:
    """Return the larger difference, NaN if one is NaN, None without any."""
    if a is None or b is None:
        return b if a is None else a
    return a if a != a or a >= b else b
