"""What a batch is: how to count it, cut it into microbatches, and move it to a device.

A batch is a tensor, or mappings, sequences, dataclass-free nests and TensorDicts of them. By default the batch axis is the
first one of every tensor; ``batch_spec`` describes batches where it is not, and lets tokens be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.dist.batch_info import BatchInfo
from dtrain.errors import ConfigError
from dtrain.typing import Batch, is_tensordict

_BATCH_INFO = "_dtrain_batch_info"  # the attribute of a batch's tensors that holds its origin
_SEQUENCE_TYPES = (list, tuple)  # a sequence without tensors holds one entry per sample (ids, file names)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """An einops-like description of the tensors of a batch: key -> axis names. Made by ``batch_spec``.

    The axis called ``batch`` counts samples. A sample's tokens are counted where there is an axis called ``seq``.
    """

    axes: Mapping[str, tuple[str, ...]]

    def axis_sizes(self, batch: Batch) -> dict[str, int]:
        """The size of every named axis.

        Raises:
            ConfigError: a missing key, a wrong number of axes, or two sizes of one axis; naming key and axis.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for key, axes in self.axes.items():
            if not _has_key(batch, key):
                raise ConfigError(f"batch_spec: the batch has no {key!r}; it has {sorted(str(k) for k in _batch_keys(batch))}")
            shape = tuple(batch[key].shape)
            if len(shape) != len(axes):
                raise ConfigError(f"batch_spec: {key!r} should be [{', '.join(axes)}], got shape {shape}")
            for axis, size in zip(axes, shape, strict=True):
                known, where = sizes.setdefault(axis, (size, key))
                if known != size:
                    raise ConfigError(
                        f"batch_spec: axis {axis!r} is {known} in {where!r} but {size} in {key!r} (shape {shape})"
                    )
        return {axis: size for axis, (size, _) in sizes.items()}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Samples and tokens of ``batch``; tokens are 0 without an axis called ``seq``."""
        sizes = self.axis_sizes(batch)
        return sizes["batch"], sizes["batch"] * sizes.get("seq", 0)

    def narrow(self, batch: Batch, start: int, length: int) -> Batch:
        """``length`` samples of ``batch`` from ``start`` on, as views; what the spec does not name is kept whole."""
        return self._map_batch_axis(
            batch, lambda leaf, axis: leaf.narrow(axis, start, length), lambda whole: whole[start : start + length]
        )

    def select(self, batch: Batch, indices: Tensor) -> Batch:
        """The samples at ``indices`` ``[picked]``, in that order, as copies; what the spec does not name is kept whole."""
        return self._map_batch_axis(batch, lambda leaf, axis: leaf.index_select(axis, indices), lambda whole: whole[indices])

    def _map_batch_axis(self, batch: Batch, cut: Callable[[Tensor, int], Tensor], cut_first: Callable[[Any], Any]) -> Batch:
        """``batch`` with each named tensor ``cut`` along its batch axis; ``cut_first`` does it to a TensorDict as a whole."""
        axis = {key: axes.index("batch") for key, axes in self.axes.items() if "batch" in axes}
        if is_tensordict(batch) and batch.batch_dims and not any(axis.values()):
            return cut_first(batch)
        parts = {key: cut(batch[key], at) for key, at in axis.items()}
        if not is_tensordict(batch):
            return {key: parts.get(key, value) for key, value in batch.items()}
        part = batch.copy()
        part.batch_size = []  # the axis of the batch is not the first one everywhere
        return part.update(parts)


def batch_spec(axes: Mapping[str, str]) -> BatchSpec:
    """Describe a batch by the axes of its tensors.

    >>> spec = batch_spec({"input_ids": "batch seq", "label": "batch"})
    >>> spec.count({"input_ids": torch.zeros(4, 16), "label": torch.zeros(4)})
    (4, 64)

    Raises:
        ConfigError: no axis called ``batch``, or an axis twice in one tensor.
    """
    parsed = {key: tuple(pattern.split()) for key, pattern in axes.items()}
    for key, names in parsed.items():
        if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
            raise ConfigError(f"batch_spec: {key!r}: axes must be different names separated by spaces, got {axes[key]!r}")
    if not any("batch" in names for names in parsed.values()):
        raise ConfigError(f"batch_spec: no tensor has an axis called 'batch', got {dict(axes)}")
    return BatchSpec(axes=parsed)


def count_samples(batch: Batch) -> int:
    """How many samples ``batch`` holds: the common size of the first axis of its tensors.

    Raises:
        ConfigError: no tensor, or tensors that disagree; with the shapes.
    """
    sizes = {leaf.shape[0] for leaf in list_tensors(batch) if leaf.ndim > 0}
    if len(sizes) == 1:
        return sizes.pop()
    if not sizes:
        raise ConfigError(
            f"batch: found no tensor to cut in a {type(batch).__name__}; give tensors, mappings or sequences "
            "of them, describe the batch with batch_spec, or pass count= and split="
        )
    shown = ", ".join(f"{path}{list(leaf.shape)}" for path, leaf in _named_tensors(batch, "batch") if leaf.ndim > 0)
    raise ConfigError(
        f"batch: the first axis must be the batch axis in every tensor, got {shown}; describe it with batch_spec, or pass "
        "count= and split="
    )


def count_samples_and_tokens(batch: Batch, batch_spec: BatchSpec | None = None) -> tuple[int, int]:
    """Samples and tokens of a batch; without a spec tokens are not counted (0)."""
    return batch_spec.count(batch) if batch_spec is not None else (count_samples(batch), 0)


def narrow_batch(batch: Batch, start: int, length: int, batch_spec: BatchSpec | None = None) -> Batch:
    """``length`` samples of ``batch`` from ``start`` on; tensors are views."""
    if batch_spec is not None:
        return batch_spec.narrow(batch, start, length)
    total = count_samples(batch)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.narrow(0, start, length) if leaf.ndim > 0 else leaf
        if isinstance(leaf, _SEQUENCE_TYPES) and len(leaf) == total:
            return leaf[start : start + length]
        return leaf

    return _map_leaves(batch, cut, lambda tensors: tensors[start : start + length])


def select_samples(batch: Batch, indices: Tensor, batch_spec: BatchSpec | None = None) -> Batch:
    """The samples of ``batch`` at ``indices`` ``[picked]`` (int64, on the batch's device), in that order; tensors are copies.

    >>> select_samples({"x": torch.tensor([1, 2, 3]), "id": ["a", "b", "c"]}, torch.tensor([2, 0]))
    {'x': tensor([3, 1]), 'id': ['c', 'a']}

    Host sync: none; one for each sequence that has an entry per sample.
    """
    if batch_spec is not None:
        return batch_spec.select(batch, indices)
    total = count_samples(batch)

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.index_select(0, indices) if leaf.ndim > 0 else leaf
        if isinstance(leaf, _SEQUENCE_TYPES) and len(leaf) == total:
            return type(leaf)(leaf[index] for index in indices.tolist())
        return leaf

    return _map_leaves(batch, pick, lambda tensors: tensors[indices])


def split_batch(batch: Batch, microbatch_size: int, *, batch_spec: BatchSpec | None = None) -> list[Batch]:
    """Microbatches of at most ``microbatch_size`` samples, in order, as views; none for an empty batch.

    Tensors are cut along the batch axis, sequences without tensors per sample; everything else goes into each microbatch.

    >>> [part["x"].tolist() for part in split_batch({"x": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]

    Raises:
        ConfigError: ``microbatch_size`` below 1, or a batch whose samples cannot be counted.
    """
    check_microbatch_size(microbatch_size)
    parts, found = (
        split_into_microbatches(batch, microbatch_size, count_samples_and_tokens(batch, batch_spec)[0], batch_spec),
        get_batch_infos(batch),
    )
    return [attach_batch_info(part, found[0]) for part in parts] if len(found) == 1 else parts


def split_into_microbatches(batch: Batch, microbatch_size: int, samples: int, batch_spec: BatchSpec | None) -> list[Batch]:
    """``split_batch`` of a batch that is known to hold ``samples``."""
    if batch_spec is None and samples and type(batch) is dict and _all_splittable(batch.values()):
        # The usual batch, in one call per tensor.
        rows = zip(*[leaf.split(microbatch_size) for leaf in batch.values()], strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]
    starts = range(0, samples, microbatch_size)
    return [narrow_batch(batch, start, min(microbatch_size, samples - start), batch_spec) for start in starts]


def check_microbatch_size(microbatch_size: int) -> None:
    """Raise ``ConfigError`` unless it is a whole number of at least 1."""
    if isinstance(microbatch_size, bool) or not isinstance(microbatch_size, int) or microbatch_size < 1:
        raise ConfigError(f"split_batch: needs a whole number of at least 1, got {microbatch_size=}")


@dataclass(frozen=True, slots=True, eq=False)
class FailedBatch:
    """In place of a batch that could not be made on this rank: ``microbatch_step`` raises ``error`` once all ranks know.

    A loop that looks into it before the step gets the error at once.
    """

    error: Exception
    info: BatchInfo | None = None

    def __getitem__(self, key: Any) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[Any]:
        raise self.error


def _all_splittable(leaves: Iterable[Any]) -> bool:
    return all([isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves])  # noqa: C419  # a list is faster for a few


def to_device(batch: Batch, device: torch.device) -> Batch:
    """``batch`` with every tensor on ``device``; those that are there already are the same objects."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return _map_leaves(batch, move, lambda tensors: tensors.to(device, non_blocking=True))


def pin_memory(batch: Batch) -> Batch:
    """``batch`` with every tensor that is on the host in page-locked memory, from which a device copies without the host."""

    def pin(leaf: Any) -> Any:
        return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf

    return _map_leaves(batch, pin, lambda tensors: tensors.pin_memory())


def attach_batch_info(batch: Batch, info: BatchInfo) -> Batch:
    """Attach ``info`` to ``batch``, and return ``batch``.

    The mark is an attribute of the tensor objects. So it survives other containers around the same tensors, and any number of
    batches; a slice or a copy of a tensor has none. A batch without tensors carries it itself, if it can.

    Mutates: one attribute of each tensor.
    """
    leaves = list_tensors(batch)
    for leaf in leaves:
        setattr(leaf, _BATCH_INFO, info)
    if not leaves and hasattr(batch, "__dict__"):
        object.__setattr__(batch, _BATCH_INFO, info)
    return batch


def get_batch_infos(batch: Batch) -> list[BatchInfo]:
    """The origins that the tensors of ``batch`` carry: none, one, or several if loaders were zipped."""
    if isinstance(batch, FailedBatch):
        return [] if batch.info is None else [batch.info]
    found: list[BatchInfo] = []
    for leaf in list_tensors(batch) or [batch]:
        origin = getattr(leaf, _BATCH_INFO, None)
        if origin is not None and origin not in found:
            found.append(origin)
    return found


def copy_batch_info(source: Batch, target: Batch) -> Batch:
    """``target`` with the origin of ``source``, which it was made from. Mutates: the tensors of ``target``."""
    found = get_batch_infos(source)
    return attach_batch_info(target, found[0]) if len(found) == 1 else target


def make_zero_samples(batch: Batch) -> Batch:
    """A batch of two samples of zeros shaped like those of the (empty) ``batch``. BatchNorm cannot run on one."""

    def fill(leaf: Any) -> Any:
        return leaf.new_zeros((2, *leaf.shape[1:])) if isinstance(leaf, Tensor) and leaf.ndim else leaf

    def fill_all(tensors: Any) -> Any:
        return tensors.apply(fill, batch_size=[]).auto_batch_size_(batch_dims=tensors.batch_dims)

    return _map_leaves(batch, fill, fill_all)


def _map_leaves(value: Any, fn: Callable[[Any], Any], of_tensordict: Callable[[Any], Any]) -> Any:
    """``value`` with ``fn`` applied to tensors and what holds none, and ``of_tensordict`` to whole TensorDicts."""
    if isinstance(value, Tensor):
        return fn(value)
    if is_tensordict(value):
        return of_tensordict(value)
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, fn, of_tensordict) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_leaves(item, fn, of_tensordict) for item in value))
    if isinstance(value, _SEQUENCE_TYPES) and any(True for _ in _named_tensors(value, "")):
        return type(value)(_map_leaves(item, fn, of_tensordict) for item in value)
    return fn(value)


def list_tensors(value: Any) -> list[Tensor]:
    """Every tensor in a batch."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is dict or isinstance(value, Mapping) or is_tensordict(value):
        items = list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = list(value)
    else:
        return []
    if all(isinstance(item, Tensor) for item in items):
        return items
    return [leaf for item in items for leaf in list_tensors(item)]


def _named_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping) or is_tensordict(value):
        for key, item in value.items():
            yield from _named_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{path}[{index}]")


def _has_key(batch: Batch, key: str) -> bool:
    return key in _batch_keys(batch)


def _batch_keys(batch: Batch) -> list[Any]:
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"batch_spec: needs a mapping of tensors, got a {type(batch).__name__}")
    return list(batch.keys())
