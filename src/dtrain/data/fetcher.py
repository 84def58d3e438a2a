"""``collate``: stack samples to a batch; ``Fetcher``: read, transform and collate the samples of a batch request.

The random numbers that a fetcher draws depend on the request only, so they are the same in a loader worker and in the rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from dtrain.data.sample_transform import SampleTransform, apply_transform
from dtrain.data.worker_batch import INLINE_TENSOR_BYTES, Payload, WorkerBatch
from dtrain.dist.rng import derive_seed, fork_rng, reseed
from dtrain.errors import DataError, ShardError
from dtrain.typing import Batch, is_tensordict


def collate(samples: Sequence[Any]) -> Batch:
    """Stack ``samples`` along a new first axis.

    Mappings of tensors, arrays, numbers or such mappings become a ``TensorDict`` of batch size ``[n]``. If a value is a string,
    the result is a dict with lists of strings. Other samples go through torch's ``default_collate``.

    Example:
        >>> import dtrain as dt
        >>> batch = dt.data.collate([{"x": torch.zeros(3), "label": 0}, {"x": torch.ones(3), "label": 1}])
        >>> batch["x"].shape, batch["label"]
        (torch.Size([2, 3]), tensor([0, 1]))

    Raises:
        DataError: the samples differ in type, keys or shape; the message names the difference.
    """
    first = samples[0]
    if len(set(map(type, samples))) > 1:
        odd = next(sample for sample in samples if type(sample) is not type(first))
        raise DataError(
            f"collate: samples must have one type, got {type(first).__name__} and {type(odd).__name__} in one batch"
        )
    try:
        if isinstance(first, Tensor):
            return _stack(list(samples))
        if isinstance(first, Mapping):
            return _collate_mappings(samples, "")
        return default_collate(list(samples))
    except DataError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"collate: cannot stack samples of type {type(first).__name__} ({reason}). Pass collate=") from error


def _collate_mappings(samples: Sequence[Any], path: str) -> Batch:
    keys = samples[0].keys()
    try:
        columns = {key: [sample[key] for sample in samples] for key in keys}
    except KeyError:
        columns = {}
    if len(columns) < len(keys) or len({len(sample.keys()) for sample in samples}) > 1:
        odd = next(sample for sample in samples if sample.keys() != keys)
        differ = sorted(str(key) for key in odd.keys() ^ keys)
        raise DataError(f"collate: only some samples of a batch have {path}{differ[0]!r}. Give all samples the same keys")
    stacked = {key: _collate_column(values, f"{path}{key!r}") for key, values in columns.items()}
    if not all(isinstance(column, Tensor) or is_tensordict(column) for column in stacked.values()):
        return stacked
    # The import takes a second or two.
    from tensordict import TensorDict

    return TensorDict(stacked, batch_size=[len(samples)])


def _collate_column(values: list[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return _collate_mappings(values, path + ".")
    if isinstance(first, Tensor | np.ndarray):
        try:
            return _stack(values) if isinstance(first, Tensor) else torch.from_numpy(np.stack(values))
        except (RuntimeError, TypeError, ValueError):
            shapes = {
                tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else type(value).__name__ for value in values
            }
            if len(shapes) == 1:
                raise
            differing = " and ".join(map(str, sorted(shapes, key=str)[:2]))
            raise DataError(f"collate: {path} is {differing} in one batch. Pad or cut to one shape, or pass collate=") from None
    return values if isinstance(first, str | bytes) or first is None else default_collate(values)


def _stack(values: list[Tensor]) -> Tensor:
    """Stack tensors. In a worker, ``default_collate`` stacks large tensors in shared memory, which saves a copy."""
    if get_worker_info() is None or len(values) * values[0].nbytes <= INLINE_TENSOR_BYTES:
        return torch.stack(values)
    shared: Tensor = default_collate(values)
    return shared


OnError = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request for one batch.

    Args:
        epoch: epoch of the samples.
        start: position of this rank's first sample in the epoch; ``epoch`` and ``start`` seed the random numbers.
        indices: indices of the samples in the dataset.
        repeats: number of times that the batch repeats the samples.
    """

    epoch: int
    start: int
    indices: Tensor
    repeats: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the indices as bytes, since torch would pickle a tensor through shared memory, which is slower."""
        return _rebuild_request, (self.epoch, self.start, self.indices.numpy().tobytes(), self.repeats)


def _rebuild_request(epoch: int, start: int, indices: bytes, repeats: int) -> BatchRequest:
    return BatchRequest(epoch, start, torch.frombuffer(bytearray(indices), dtype=torch.int64), repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Reader of batch requests. torch's ``DataLoader`` uses a fetcher as a dataset whose samples are batches.

    Args:
        dataset: an indexed dataset.
        seed: seed of the random numbers that are drawn while samples are read.
        collate: function from samples to a batch; None uses ``collate``, or no function if a tensor indexes the dataset.
        transform: transform of each sample, with a generator per sample.
        on_error: treatment of a sample that cannot be read.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Batch] | None = None
    transform: SampleTransform | None = None
    on_error: OnError = "raise"

    def __getitem__(self, request: BatchRequest) -> WorkerBatch:
        if get_worker_info() is None:
            # Indexing a tensor runs no user code that could draw random numbers.
            if self.is_indexed_by_tensor:
                return WorkerBatch(self._fetch(request))
            with fork_rng(self._seed_for(request)):
                return WorkerBatch(self._fetch(request))
        # No other code draws random numbers in a worker, so no state needs to be restored.
        reseed(self._seed_for(request))
        return WorkerBatch(self._fetch(request)).pickle_batch()

    @property
    def is_indexed_by_tensor(self) -> bool:
        """True if a batch is ``dataset[indices]``, without collate and transform."""
        is_tensor = isinstance(self.dataset, Tensor) or is_tensordict(self.dataset)
        return is_tensor and self.collate is None and self.transform is None

    def _seed_for(self, request: BatchRequest) -> int:
        return derive_seed(self.seed, "batch", request.epoch, request.start)

    def _fetch(self, request: BatchRequest) -> Payload:
        try:
            if self.is_indexed_by_tensor:
                indices = request.indices if request.repeats == 1 else request.indices.repeat(request.repeats)
                return Payload(batch=self.dataset[indices])
            samples, skipped = self._fetch_samples(request)
            return Payload(batch=collate_samples(self.collate, samples * request.repeats) if samples else None, skipped=skipped)
        except Exception as error:  # noqa: BLE001
            # The dataset, the transform and collate are user code, so any exception can occur.
            return Payload(failure=describe_error(error), trace=traceback.format_exc())

    def _fetch_samples(self, request: BatchRequest) -> tuple[list[Any], list[tuple[int, str]]]:
        """Return the readable samples, and the index and error of each unreadable sample."""
        indices = request.indices.tolist()
        try:
            many = getattr(self.dataset, "__getitems__", None)
            samples = [self.dataset[index] for index in indices] if many is None else list(many(indices))
            if self.transform is None:
                return samples, []
            return [self._transform_sample(sample, request, index) for sample, index in zip(samples, indices, strict=True)], []
        except ShardError:
            raise
        except Exception:  # noqa: BLE001
            # Read the samples of the batch one by one, to skip the unreadable sample, or to name its index in the error.
            return self._fetch_one_by_one(request, indices)

    def _fetch_one_by_one(self, request: BatchRequest, indices: list[int]) -> tuple[list[Any], list[tuple[int, str]]]:
        samples, skipped = [], []
        for index in indices:
            try:
                samples.append(self._transform_sample(self.dataset[index], request, index))
            except Exception as error:
                # A ShardError means that the storage fails, not that a sample is bad.
                if self.on_error == "raise" or isinstance(error, ShardError):
                    error.add_note(f"sample {index}")
                    raise
                skipped.append((index, describe_error(error)))
        return samples, skipped

    def _transform_sample(self, sample: Any, request: BatchRequest, index: int) -> Any:
        if self.transform is None:
            return sample
        return apply_transform(self.transform, sample, seed=self.seed, epoch=request.epoch, index=index)


def collate_samples(fn: Callable[[list[Any]], Batch] | None, samples: list[Any]) -> Batch:
    """Collate ``samples`` with ``fn``, or with ``collate`` if ``fn`` is None.

    Raises:
        DataError: the function returned None.
    """
    batch = (fn or collate)(samples)
    if batch is None:
        raise DataError("collate returned None. Return the batch")
    return batch


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the sample if the error's notes name the sample."""
    notes = ", ".join(" ".join(str(note).split()) for note in getattr(error, "__notes__", ()))
    return f"{notes}: {type(error).__name__}: {' '.join(str(error).split())}".removeprefix(": ")
