"""``collate``: samples to a batch, as a TensorDict where samples are mappings of tensors.

``Reader``: a ticket to a batch, in a loader worker or in the rank itself. What it draws depends on the ticket only."""

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

    Mappings whose values are tensors, arrays, numbers or such mappings become a ``TensorDict`` of batch size ``[n]``; with
    strings in it, a dict in which strings are lists. Everything else goes through torch's ``default_collate``.

    Raises:
        DataError: samples of several types or with several sets of keys, or tensors of several shapes; what differs is named.
    """
    first = samples[0]
    if len(set(map(type, samples))) > 1:
        odd = next(sample for sample in samples if type(sample) is not type(first))
        raise DataError(f"collate: one batch has a {type(first).__name__} and a {type(odd).__name__}; give samples of one type")
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
        raise DataError(f"collate: cannot stack samples of type {type(first).__name__} ({reason}); give collate=") from error


def _collate_mappings(samples: Sequence[Any], path: str) -> Batch:
    keys = samples[0].keys()
    try:
        columns = {key: [sample[key] for sample in samples] for key in keys}
    except KeyError:
        columns = {}
    if len(columns) < len(keys) or len({len(sample.keys()) for sample in samples}) > 1:  # one has less, or more
        odd = next(sample for sample in samples if sample.keys() != keys)
        differ = sorted(str(key) for key in odd.keys() ^ keys)
        raise DataError(f"collate: only some samples of a batch have {path}{differ[0]!r}; give all the same keys")
    stacked = {key: _collate_column(values, f"{path}{key!r}") for key, values in columns.items()}
    if not all(isinstance(column, Tensor) or is_tensordict(column) for column in stacked.values()):
        return stacked
    from tensordict import TensorDict  # takes a second or two to import, and is needed only here

    return TensorDict(stacked, batch_size=[len(samples)])


def _collate_column(values: list[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return _collate_mappings(values, path + ".")
    if isinstance(first, Tensor | np.ndarray):
        try:
            return _stack(values) if isinstance(first, Tensor) else torch.from_numpy(np.stack(values))
        except (RuntimeError, TypeError, ValueError):
            shapes = {tuple(one.shape) if isinstance(one, Tensor | np.ndarray) else type(one).__name__ for one in values}
            if len(shapes) == 1:
                raise
            shown = " and ".join(map(str, sorted(shapes, key=str)[:2]))
            raise DataError(f"collate: {path} is {shown} in one batch; pad or cut to one shape, or give collate=") from None
    return values if isinstance(first, str | bytes) or first is None else default_collate(values)


def _stack(values: list[Tensor]) -> Tensor:
    """In a worker, what is large goes straight into memory that its rank can read, as torch does it: one copy less."""
    if get_worker_info() is None or len(values) * values[0].nbytes <= INLINE_TENSOR_BYTES:
        return torch.stack(values)
    shared: Tensor = default_collate(values)
    return shared


OnError = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """An order for one batch.

    Args:
        epoch: of its samples.
        start: position in the epoch of this rank's first sample; with ``epoch`` it decides what is drawn at random.
        indices: of the dataset.
        repeats: how often the samples are to be in the batch.
    """

    epoch: int
    start: int
    indices: Tensor
    repeats: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes: torch would put so small a tensor into shared memory of its own, which takes longer than all the rest."""
        return _rebuild_request, (self.epoch, self.start, self.indices.numpy().tobytes(), self.repeats)


def _rebuild_request(epoch: int, start: int, indices: bytes, times: int) -> BatchRequest:
    return BatchRequest(epoch, start, torch.frombuffer(bytearray(indices), dtype=torch.int64), times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Reads tickets; torch's ``DataLoader`` takes it for a dataset whose samples are batches.

    Args:
        dataset: indexed.
        seed: of what is drawn at random while samples are read.
        collate: samples to a batch; None for ``collate``, or for nothing where the dataset is indexed by a tensor.
        transform: of each sample, with a generator of its own.
        on_error: what becomes of a sample that cannot be read.
    """

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Batch] | None = None
    transform: SampleTransform | None = None
    on_error: OnError = "raise"

    def __getitem__(self, ticket: BatchRequest) -> WorkerBatch:
        if get_worker_info() is None:
            if self.is_indexed_by_tensor:  # nobody's code to draw anything
                return WorkerBatch(self._fetch(ticket))
            with fork_rng(self._seed_for(ticket)):
                return WorkerBatch(self._fetch(ticket))
        reseed(self._seed_for(ticket))  # nobody else draws in this process
        return WorkerBatch(self._fetch(ticket)).pickle_batch()

    @property
    def is_indexed_by_tensor(self) -> bool:
        """Whether a batch is ``dataset[indices]``, with nothing else to do."""
        whole = isinstance(self.dataset, Tensor) or is_tensordict(self.dataset)
        return whole and self.collate is None and self.transform is None

    def _seed_for(self, ticket: BatchRequest) -> int:
        return derive_seed(self.seed, "batch", ticket.epoch, ticket.start)

    def _fetch(self, ticket: BatchRequest) -> Payload:
        try:
            if self.is_indexed_by_tensor:
                indices = ticket.indices if ticket.repeats == 1 else ticket.indices.repeat(ticket.repeats)
                return Payload(batch=self.dataset[indices])
            samples, unreadable = self._fetch_samples(ticket)
            return Payload(
                batch=collate_samples(self.collate, samples * ticket.repeats) if samples else None, skipped=unreadable
            )
        except Exception as error:  # noqa: BLE001  # the dataset, the transform and collate are the user's
            return Payload(failure=describe_error(error), trace=traceback.format_exc())

    def _fetch_samples(self, ticket: BatchRequest) -> tuple[list[Any], list[tuple[int, str]]]:
        """The samples that can be read, and those that cannot."""
        indices = ticket.indices.tolist()
        try:
            many = getattr(self.dataset, "__getitems__", None)
            samples = [self.dataset[index] for index in indices] if many is None else list(many(indices))
            if self.transform is None:
                return samples, []
            return [self._transform_sample(sample, ticket, index) for sample, index in zip(samples, indices, strict=True)], []
        except ShardError:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the next line meets it again
            # A batch with a bad sample is read again, one by one: to leave it out, or to say which one it is.
            return self._fetch_one_by_one(ticket, indices)

    def _fetch_one_by_one(self, ticket: BatchRequest, indices: list[int]) -> tuple[list[Any], list[tuple[int, str]]]:
        samples, unreadable = [], []
        for index in indices:
            try:
                samples.append(self._transform_sample(self.dataset[index], ticket, index))
            except Exception as error:
                if self.on_error == "raise" or isinstance(error, ShardError):  # a server that is down is no bad sample
                    error.add_note(f"sample {index}")
                    raise
                unreadable.append((index, describe_error(error)))
        return samples, unreadable

    def _transform_sample(self, sample: Any, ticket: BatchRequest, index: int) -> Any:
        if self.transform is None:
            return sample
        return apply_transform(self.transform, sample, seed=self.seed, epoch=ticket.epoch, index=index)


def collate_samples(fn: Callable[[list[Any]], Batch] | None, samples: list[Any]) -> Batch:
    """The batch that ``fn``, or ``collate``, makes of ``samples``.

    Raises:
        DataError: it makes none; the samples would be lost without a word.
    """
    batch = (fn or collate)(samples)
    if batch is None:
        raise DataError("collate returned None; it must return the batch that it makes")
    return batch


def describe_error(error: BaseException) -> str:
    """An error in one line, with the sample that it came from where that is known."""
    notes = ", ".join(" ".join(str(note).split()) for note in getattr(error, "__notes__", ()))
    return f"{notes}: {type(error).__name__}: {' '.join(str(error).split())}".removeprefix(": ")
