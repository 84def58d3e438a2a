"""Compare two checkpoints by names, shapes, dtypes and values, in batches of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dtrain.checkpoint import tree_json
from dtrain.checkpoint.conversion.weight_stream import BUFFER_BYTES, batch_regions, nbytes, raw_bytes, read_batch
from dtrain.checkpoint.layout import TensorRef
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.tensor_files import TensorFiles

DifferenceKind = Literal["only in a", "only in b", "shape", "dtype", "values", "plain value"]
# Elements compared at a time, because they are converted to float64.
_RUN_ELEMENTS = 2**21
_MAX_VALUE_CHARS = 60


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
    refs, own = dict(reader.refs), dict(reader.own)
    values = dict(_plain_values(reader.shared))
    for rank in range(reader.world_size):
        prefix, rank_values = f"rank-{rank:05d}", reader.values_of(rank)
        refs |= {f"{prefix}/{key}": ref for key, ref in tree_json.tensor_refs(rank_values, "").items()}
        own |= {f"{prefix}/{key}": shard for key, shard in reader.shards_of_rank(rank).items()}
        values |= {f"{prefix}/{key}": value for key, value in _plain_values(rank_values)}
    reader = replace(reader, refs=refs, own=own)
    return TensorFiles(content_hash="", refs=refs, find_shards=reader.find_shards, open_file=reader.open_data), values


def _plain_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over the plain values of an encoded tree, by path."""
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
    """Compare plain values by path. A pure function."""
    for path in {**a, **b}:
        left, right = (_text(values[path]) if path in values else None for values in (a, b))
        if left != right:
            yield CheckpointDifference(key=path, kind="plain value", a=_shorten(left), b=_shorten(right))


def _text(value: Any) -> str:
    # The text distinguishes 1 from 1.0, and NaN equals NaN.
    return repr(value)


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
    yield from _diff_common_tensors(
        a, b, [name for name in both if a.refs[name].shape == b.refs[name].shape], on_bytes_compared
    )


def _diff_common_tensors(
    a: TensorFiles, b: TensorFiles, names: list[str], on_bytes_compared: Callable[[int], None]
) -> Iterator[CheckpointDifference]:
    found: dict[str, tuple[int, float | None]] = {}
    for batch in batch_regions(a.refs, names, limit=BUFFER_BYTES // 2):
        left, right = read_batch(a, batch), read_batch(b, batch)
        for name in batch:
            count, max_abs = count_differences(left[name], right[name])
            old_count, old_max = found.get(name, (0, None))
            found[name] = (
                old_count + count,
                max_abs if old_max is None else old_max if max_abs is None else _max_or_nan(old_max, max_abs),
            )
            on_bytes_compared(left[name].nbytes)
    for name in names:
        count, max_abs = found[name]
        ref_a, ref_b = a.refs[name], b.refs[name]
        if ref_a.dtype != ref_b.dtype or count:
            kind: DifferenceKind = "values" if ref_a.dtype == ref_b.dtype else "dtype"
            yield CheckpointDifference(key=name, kind=kind, a=str(ref_a), b=str(ref_b), differing=count, max_abs=max_abs)


def count_differences(a: Tensor, b: Tensor) -> tuple[int, float | None]:
    """Count the differing elements of two tensors of one shape. Return the largest difference as well, None without any."""
    if a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b)):
        return 0, None
    count, max_abs = 0, None
    for run_a, run_b in zip(a.reshape(-1).split(_RUN_ELEMENTS), b.reshape(-1).split(_RUN_ELEMENTS), strict=True):
        differ = _differing_elements(run_a, run_b)
        count += int(differ.sum())
        if bool(differ.any()):
            # The maximum is NaN if one of the differences is NaN.
            run_max = float((run_a.double() - run_b.double())[differ].abs().max())
            if run_max == 0 and not a.is_floating_point() and not b.is_floating_point():
                # Two different integers may have one float64 value.
                run_max = 1.0
            max_abs = run_max if max_abs is None else _max_or_nan(max_abs, run_max)
    return count, max_abs


def _differing_elements(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype:
        return (raw_bytes(a).view(-1, a.itemsize) != raw_bytes(b).view(-1, a.itemsize)).any(1)
    double_a, double_b = a.double(), b.double()
    return (double_a != double_b) & ~(double_a.isnan() & double_b.isnan())


def _max_or_nan(a: float, b: float) -> float:
    return a if a != a or a >= b else b
