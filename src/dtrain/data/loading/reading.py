"""``Reader``: a ticket to a batch, in a loader worker or in the rank itself. What it draws depends on the ticket only."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.loading.collate import collate
from dtrain.data.loading.parcel import Content, Parcel
from dtrain.data.transforms import SampleTransform, apply_transform
from dtrain.dist.rng import derive_seed, drawing_from, reseed
from dtrain.errors import DataError, ShardError
from dtrain.types import Batch, is_tensordict

OnError = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """An order for one batch.

    Args:
        epoch: of its samples.
        start: position in the epoch of this rank's first sample; with ``epoch`` it decides what is drawn at random.
        indices: of the dataset.
        times: how often the samples are to be in the batch.
    """

    epoch: int
    start: int
    indices: Tensor
    times: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes: torch would put so small a tensor into shared memory of its own, which takes longer than all the rest."""
        return _ticket, (self.epoch, self.start, self.indices.numpy().tobytes(), self.times)


def _ticket(epoch: int, start: int, indices: bytes, times: int) -> Ticket:
    return Ticket(epoch, start, torch.frombuffer(bytearray(indices), dtype=torch.int64), times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
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

    def __getitem__(self, ticket: Ticket) -> Parcel:
        if get_worker_info() is None:
            if self.is_indexed_by_tensor:  # nobody's code to draw anything
                return Parcel(self._read(ticket))
            with drawing_from(self._seed_of(ticket)):
                return Parcel(self._read(ticket))
        reseed(self._seed_of(ticket))  # nobody else draws in this process
        return Parcel(self._read(ticket)).packed()

    @property
    def is_indexed_by_tensor(self) -> bool:
        """Whether a batch is ``dataset[indices]``, with nothing else to do."""
        whole = isinstance(self.dataset, Tensor) or is_tensordict(self.dataset)
        return whole and self.collate is None and self.transform is None

    def _seed_of(self, ticket: Ticket) -> int:
        return derive_seed(self.seed, "batch", ticket.epoch, ticket.start)

    def _read(self, ticket: Ticket) -> Content:
        try:
            if self.is_indexed_by_tensor:
                indices = ticket.indices if ticket.times == 1 else ticket.indices.repeat(ticket.times)
                return Content(batch=self.dataset[indices])
            samples, unreadable = self._samples(ticket)
            return Content(batch=collated(self.collate, samples * ticket.times) if samples else None, unreadable=unreadable)
        except Exception as error:  # noqa: BLE001  # the dataset, the transform and collate are the user's
            return Content(failure=described(error), trace=traceback.format_exc())

    def _samples(self, ticket: Ticket) -> tuple[list[Any], list[tuple[int, str]]]:
        """The samples that can be read, and those that cannot."""
        indices = ticket.indices.tolist()
        try:
            many = getattr(self.dataset, "__getitems__", None)
            samples = [self.dataset[index] for index in indices] if many is None else list(many(indices))
            if self.transform is None:
                return samples, []
            return [self._transformed(sample, ticket, index) for sample, index in zip(samples, indices, strict=True)], []
        except ShardError:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the next line meets it again
            # A batch with a bad sample is read again, one by one: to leave it out, or to say which one it is.
            return self._one_by_one(ticket, indices)

    def _one_by_one(self, ticket: Ticket, indices: list[int]) -> tuple[list[Any], list[tuple[int, str]]]:
        samples, unreadable = [], []
        for index in indices:
            try:
                samples.append(self._transformed(self.dataset[index], ticket, index))
            except Exception as error:
                if self.on_error == "raise" or isinstance(error, ShardError):  # a server that is down is no bad sample
                    error.add_note(f"sample {index}")
                    raise
                unreadable.append((index, described(error)))
        return samples, unreadable

    def _transformed(self, sample: Any, ticket: Ticket, index: int) -> Any:
        if self.transform is None:
            return sample
        return apply_transform(self.transform, sample, seed=self.seed, epoch=ticket.epoch, index=index)


def collated(fn: Callable[[list[Any]], Batch] | None, samples: list[Any]) -> Batch:
    """The batch that ``fn``, or ``collate``, makes of ``samples``.

    Raises:
        DataError: it makes none; the samples would be lost without a word.
    """
    batch = (fn or collate)(samples)
    if batch is None:
        raise DataError("collate returned None; it must return the batch that it makes")
    return batch


def described(error: BaseException) -> str:
    """An error in one line, with the sample that it came from where that is known."""
    notes = ", ".join(" ".join(str(note).split()) for note in getattr(error, "__notes__", ()))
    return f"{notes}: {type(error).__name__}: {' '.join(str(error).split())}".removeprefix(": ")
