"""``Fetcher``: read, transform and collate the samples of a batch request; ``collate``; ``SampleTransform``.

The random numbers that a fetcher draws depend on the request only, so they are the same in a loader worker and in the rank.
A transform draws from a generator whose seed comes from the seed of the run, the epoch and the sample's index. So augmentation
is the same on any number of ranks and workers, with any batch size, and after a resume.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from operator import methodcaller
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from dtrain.arguments import single_line
from dtrain.data.batch import MicrobatchList
from dtrain.data.dataset import ColumnDataset, read_samples
from dtrain.data.dataset_changes import differing_names, read_attributes
from dtrain.data.workers import INLINE_TENSOR_BYTES, Payload, WorkerBatch, describe_shared_memory_error
from dtrain.dist.rng import SeedOnDraw, derive_seed, fork_rng, generator, reseed
from dtrain.errors import ConfigError, DataError, ShardError
from dtrain.typing import Batch, is_tensordict


def collate(samples: Sequence[Any]) -> Batch:
    """Stack ``samples`` along a new first axis.

    Mappings of tensors, arrays, numbers or such mappings become a ``TensorDict`` of batch size ``[n]``. If a value is a string,
    the result is a dict with lists of strings. Other samples go through torch's ``default_collate``.

    Example:
        >>> import dtrain as dt
        >>> batch = dt.data.collate(
        ...     [{"x": torch.zeros(3), "label": 0}, {"x": torch.ones(3), "label": 1}]
        ... )
        >>> batch["x"].shape, batch["label"]
        (torch.Size([2, 3]), tensor([0, 1]))

    Raises:
        DataError: the samples differ in type, keys or shape; the message names the difference.
    """
    first, kinds = samples[0], set(map(type, samples))
    if len(kinds) > 1:
        odd = next(sample for sample in samples if type(sample) is not type(first))
        raise DataError(
            f"collate: samples must have one type, got {type(first).__name__} and {type(odd).__name__} in one batch. "
            "Return one type from the dataset's __getitem__, or pass collate=."
        )
    try:
        if isinstance(first, Tensor):
            return _stack(list(samples))
        # Checks of abstract classes are slow.
        if type(first) is dict or isinstance(first, Mapping):
            return _collate_mappings(samples, kinds, "")
        return default_collate(list(samples))
    except DataError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        reason = single_line(error)
        raise DataError(f"collate: cannot stack samples of type {type(first).__name__} ({reason}). Pass collate=.") from error


def _collate_mappings(samples: Sequence[Any], kinds: set[type], path: str) -> Batch:
    keys = samples[0].keys()
    try:
        columns = {key: [sample[key] for sample in samples] for key in keys}
    except KeyError:
        columns = {}
    # The length of a TensorDict is not the number of its keys.
    key_counts = map(len, samples) if kinds == {dict} else map(len, map(methodcaller("keys"), samples))
    if len(columns) < len(keys) or len(set(key_counts)) > 1:
        odd = next(sample for sample in samples if sample.keys() != keys)
        differ = sorted(str(key) for key in odd.keys() ^ keys)
        raise DataError(f"collate: only some samples of a batch have {path}{differ[0]!r}. Give all samples the same keys.")
    stacked = {key: _collate_column(values, key, path) for key, values in columns.items()}
    for column in stacked.values():
        if not (type(column) is Tensor or isinstance(column, Tensor) or is_tensordict(column)):
            return stacked
    # The first import takes a second or two. Later, ``from`` would take longer than the import itself.
    import tensordict

    return tensordict.TensorDict(stacked, batch_size=[len(samples)])


# A union of types would be made again for each column of each batch.
_ARRAY_TYPES = (Tensor, np.ndarray)


def _collate_column(values: list[Any], key: Any, path: str) -> Any:
    first = values[0]
    if isinstance(first, _ARRAY_TYPES):
        try:
            return _stack(values) if isinstance(first, Tensor) else torch.from_numpy(np.stack(values))
        except (RuntimeError, TypeError, ValueError):
            shapes = {
                tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else type(value).__name__ for value in values
            }
            if len(shapes) == 1:
                raise
            differing = " and ".join(map(str, sorted(shapes, key=str)[:2]))
            raise DataError(
                f"collate: {path}{key!r} is {differing} in one batch. Pad or cut to one shape, or pass collate=."
            ) from None
    if isinstance(first, Mapping):
        return _collate_mappings(values, set(map(type, values)), f"{path}{key!r}.")
    return values if isinstance(first, str | bytes) or first is None else default_collate(values)


def _stack(values: list[Tensor]) -> Tensor:
    """Stack tensors. In a worker, ``default_collate`` stacks large tensors in shared memory, which saves a copy."""
    if get_worker_info() is None or len(values) * values[0].nbytes <= INLINE_TENSOR_BYTES:
        return torch.stack(values)
    shared: Tensor = default_collate(values)
    return shared


SampleTransform: TypeAlias = Callable[[Any, torch.Generator], Any]
"""``(sample, generator) -> sample``, a pure function; the generator is on the CPU.

A transform may mix the sample with a second sample of the dataset. Mixing within a batch (``on_batch``) is cheaper, but a rank
mixes only its own share of the batch, so the result depends on the number of ranks.
"""


def apply_transform(fn: SampleTransform, sample: Any, *, seed: int, epoch: int, index: int) -> Any:
    """Apply ``fn`` to a sample, with the generator of the sample in this epoch. The overhead is a few microseconds.

    Args:
        fn: the transform.
        sample: a sample of the dataset.
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in the dataset; position in the epoch if the dataset is iterable.

    Raises:
        ConfigError: ``fn`` returns None.
    Example:
        >>> noisy = lambda x, generator: x + torch.rand((), generator=generator)
        >>> first, again, later = (
        ...     apply_transform(noisy, 0.0, seed=0, epoch=epoch, index=7) for epoch in (0, 0, 1)
        ... )
        >>> bool(first == again), bool(first == later)
        (True, False)
    """
    transformed = fn(sample, generator("cpu", seed, "transform", epoch, index))
    if transformed is None:
        raise ConfigError(f"transform: the transform returned None for sample {index}. Return the sample.")
    return transformed


def seed_per_sample(fn: Callable[[Any], Any]) -> SampleTransform:
    """Convert a function without a generator argument, such as a torchvision transform, to a sample transform.

    While ``fn`` runs, the global generators of Python, NumPy and torch (CPU) have a seed of the sample. Afterwards they have
    their former states again. The overhead is about 20 microseconds per sample.

    Args:
        fn: ``sample -> sample``.

    Example:
        >>> import dtrain as dt
        >>> flip = dt.data.seed_per_sample(lambda x: x.flip(0) if torch.rand(()) < 0.5 else x)
        >>> loader = dt.build_loader(
        ...     torch.arange(12).view(4, 3), global_batch_size=2, seed=0, transform=flip
        ... )
        >>> next(loader.until("1ep")).shape
        torch.Size([2, 3])

    Raises:
        ConfigError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise ConfigError(
            f"seed_per_sample: fn must be a function of a sample, got {fn!r}. Pass the function itself, not its result."
        )
    return _SeededTransform(fn)


@dataclass(frozen=True, slots=True)
class _SeededTransform:
    """Callable class, because spawned workers cannot unpickle a closure."""

    fn: Callable[[Any], Any]

    def __call__(self, sample: Any, generator: torch.Generator) -> Any:
        with fork_rng(int(torch.randint(2**62, (), generator=generator, device="cpu"))):
            return self.fn(sample)


OnError = Literal["raise", "skip"]
ON_ERROR_MODES: tuple[OnError, ...] = ("raise", "skip")


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True)
class BatchRequest:
    """Request for one batch.

    Args:
        epoch: epoch of the samples.
        start: position of this rank's first sample in the epoch; ``epoch`` and ``start`` seed the random numbers.
        indices: indices of the samples in the dataset.
        repeats: number of times that the batch repeats the samples.
        parts: of each microbatch, collated apart, the tokens of a part of 1, 2, ... samples; empty for a batch that is
            collated as a whole.
    """

    epoch: int
    start: int
    indices: Tensor
    repeats: int = 1
    parts: tuple[Sequence[int], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the indices as bytes, since torch would pickle a tensor through shared memory, which is slower."""
        return _rebuild_request, (self.epoch, self.start, self.indices.numpy().tobytes(), self.repeats, self.parts)


def _rebuild_request(epoch: int, start: int, indices: bytes, repeats: int, parts: tuple[Sequence[int], ...]) -> BatchRequest:
    return BatchRequest(epoch, start, torch.frombuffer(bytearray(indices), dtype=torch.int64), repeats, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Reader of samples. torch's ``DataLoader`` uses a fetcher of an indexed dataset as a dataset whose samples are batches.

    Args:
        dataset: an indexed or iterable dataset.
        seed: seed of the random numbers that are drawn while samples are read.
        collate: function from samples to a batch; None uses ``collate``, or no function if ``reads_rows``.
        transform: transform of each sample, with a generator per sample.
        on_error: treatment of a sample that cannot be read.
        reads_rows: True if a batch is read from tensors and arrays at once, without collate and transform.
        seeding: seeds the global generators for a batch of an indexed dataset, once a sample has drawn from them.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Batch] | None = None
    transform: SampleTransform | None = None
    on_error: OnError = "raise"
    reads_rows: bool = field(init=False)
    seeding: SeedOnDraw = field(default_factory=SeedOnDraw, init=False, compare=False)

    def __post_init__(self) -> None:
        has_rows = isinstance(self.dataset, ColumnDataset) or is_tensordict(self.dataset)
        object.__setattr__(self, "reads_rows", has_rows and self.collate is None and self.transform is None)

    def __getitem__(self, request: BatchRequest) -> WorkerBatch:
        in_worker = get_worker_info() is not None
        try:
            if self.reads_rows:
                # No code of the user runs that could draw random numbers.
                payload = Payload(batch=self._read_rows(request))
            elif not in_worker:
                payload = self.seeding.run(lambda: self._fetch(request), lambda: self._batch_seed(request.epoch, request.start))
            else:
                before = self.watched_attributes()
                with self.seed_rng(request.epoch, request.start):
                    payload = self._fetch(request)
                payload.changed_by_reading = self.changed_since(before)
        # The dataset, the transform and collate are user code, so any exception can occur.
        except Exception as error:  # noqa: BLE001
            payload = failed_payload(error)
        return WorkerBatch.pack(payload) if in_worker else WorkerBatch(payload)

    def _read_rows(self, request: BatchRequest) -> Batch:
        indices = request.indices if request.repeats == 1 else request.indices.repeat(request.repeats)
        read = self.dataset.read if isinstance(self.dataset, ColumnDataset) else self.dataset.__getitem__
        if not request.parts:
            return read(indices)
        return MicrobatchList(map(read, indices.split(list(map(len, request.parts)))), part_tokens=request.parts)

    def watched_attributes(self) -> dict[str, Any]:
        """Return facts of the attributes of the dataset, the transform and collate that the training loop may change."""
        return read_attributes(self.dataset, self.transform, self.collate)

    def changed_since(self, before: dict[str, Any]) -> frozenset[str]:
        """Return the names of watched attributes that differ from ``before``."""
        return differing_names(before, self.watched_attributes())

    def seed_rng(self, *position: int) -> AbstractContextManager[None]:
        """Seed the global generators for ``position``; in the rank itself, restore their states after the context."""
        seed = self._batch_seed(*position)
        if get_worker_info() is None:
            return fork_rng(seed)
        # No other code draws random numbers in a worker, so no state needs to be restored.
        reseed(seed)
        return nullcontext()

    def _batch_seed(self, *position: int) -> int:
        return derive_seed(self.seed, "batch", *position)

    def _fetch(self, request: BatchRequest) -> Payload:
        indices: list[int] = request.indices.tolist()
        sizes = [len(part) for part in request.parts] or [len(indices)]
        skipped: list[tuple[int, str]] = []
        try:
            samples = read_samples(self.dataset, indices)
            if self.transform is not None:
                samples = [
                    self._transform(sample, index, request.epoch) for index, sample in zip(indices, samples, strict=True)
                ]
            groups = cut_sequence(samples, sizes)
        except ShardError:
            raise
        except Exception:  # noqa: BLE001
            # Read the samples of the batch one by one, to skip the unreadable sample, or to name its index in the error.
            groups = []
            for part in cut_sequence(indices, sizes):
                samples, skipped_in_part = self.read_each(request.epoch, part, self.dataset.__getitem__)
                groups.append(samples)
                skipped += skipped_in_part
        batch = self.collate_groups([group * request.repeats for group in groups], request.parts)
        return Payload(batch=batch, skipped=skipped)

    def read_each(
        self, epoch: int, indices: Iterable[int], read: Callable[[int], Any]
    ) -> tuple[list[Any], list[tuple[int, str]]]:
        """Read and transform samples one by one.

        Returns:
            the readable samples, and the index and error of each unreadable sample.
        """
        samples, skipped = [], []
        for index in indices:
            try:
                samples.append(self._transform(read(index), index, epoch))
            except Exception as error:
                # A ShardError means that the storage fails, not that a sample is bad.
                if self.on_error == "raise" or isinstance(error, ShardError):
                    error.add_note(f"sample {index}")
                    raise
                skipped.append((index, describe_error(error)))
        return samples, skipped

    def _transform(self, sample: Any, index: int, epoch: int) -> Any:
        if self.transform is None:
            return sample
        return apply_transform(self.transform, sample, seed=self.seed, epoch=epoch, index=index)

    def collate_groups(self, groups: Sequence[list[Any]], parts: Sequence[Sequence[int]]) -> Batch | None:
        """Collate each group of samples; None without a sample. With ``parts``, each group is a microbatch."""
        batches = [self.collate_samples(group) for group in groups if group]
        if not batches:
            return None
        if not parts:
            return batches[0]
        # A skipped sample leaves the others, which have no more tokens than the longest samples.
        kept = [part for group, part in zip(groups, parts, strict=True) if group]
        return MicrobatchList(batches, part_tokens=kept)

    def collate_samples(self, samples: list[Any]) -> Batch:
        """Collate ``samples``.

        Raises:
            DataError: the collate function returned None.
        """
        batch = (self.collate or collate)(samples)
        if batch is None:
            raise DataError("collate: the function returned None. Return the batch.")
        return batch


def cut_sequence(values: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """Cut ``values`` into parts of ``sizes``.

    >>> cut_sequence([1, 2, 3], [2, 1])
    [[1, 2], [3]]
    """
    return [values[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def failed_payload(error: Exception) -> Payload:
    """Return the payload of a batch that could not be made."""
    shortage = describe_shared_memory_error(error)
    if shortage is not None:
        # Neither the samples nor the collate function are wrong, so a traceback would mislead.
        return Payload(failure=shortage)
    return Payload(failure=describe_error(error), trace="".join(traceback.format_exception(error)))


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the sample if the error's notes name the sample."""
    notes = ", ".join(single_line(note) for note in getattr(error, "__notes__", ()))
    return f"{notes}: {type(error).__name__}: {single_line(error)}".removeprefix(": ")
