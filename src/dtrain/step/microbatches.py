"""A rank's batch as microbatches: how it is counted and cut, and what a rank runs that has none left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, TypeAlias

import torch

from dtrain.batch import (
    BatchSpec,
    FailedBatch,
    check_microbatch_size,
    count_samples_and_tokens,
    list_tensors,
    make_zero_samples,
    split_into_microbatches,
)
from dtrain.errors import ConfigError
from dtrain.typing import Batch

SplitFn: TypeAlias = Callable[[Batch, int], Sequence[Batch]]
"""``(batch, microbatch_size) -> microbatches`` of at most that many samples, in order."""

CountFn: TypeAlias = "Callable[[Batch], int | tuple[int, int]]"
"""Samples of a batch, or samples and tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Microbatches:
    """The microbatches of this rank's batch, and what they count."""

    batch: Batch
    batches: Sequence[Batch] = ()
    samples: int = 0
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    def is_on(self, device: torch.device) -> bool:
        """Whether every tensor of the batch, and so of its parts, is on ``device``."""
        return all(leaf.device == device for leaf in list_tensors(self.batch))

    def padding_microbatch(self, padding_sample: Batch | None) -> Batch:
        """A microbatch to run at weight zero: this batch's first, else ``padding_sample`` (``state.spare``), else one of zeros.

        It depends on the position in the data alone, not on what this process ran before: dropout draws from the global
        generator for it too, and a resumed run must draw alike.
        """
        if self.batches:
            return self.batches[0]
        return make_zero_samples(self.batch) if padding_sample is None else padding_sample


def count_batch(batch: Batch, *, batch_spec: BatchSpec | None, count: CountFn | None) -> tuple[int, int]:
    """What ``batch`` counts: as ``count`` says, else by the description, else by its tensors (0 tokens).

    Raises:
        ConfigError: a batch that cannot be counted, or a ``count`` that gives no whole numbers.
    """
    if count is None:
        return count_samples_and_tokens(batch, batch_spec)
    counted = count(batch)
    numbers = [_to_int(number) for number in (counted if isinstance(counted, tuple | list) else (counted, 0))]
    if len(numbers) != 2 or min(numbers) < 0:
        raise ConfigError(f"batch: count must give samples, or (samples, tokens), as whole numbers, got {counted!r}")
    return numbers[0], numbers[1]


def _to_int(value: object) -> int:
    """``value``, an integer of whatever library, as one of Python's; -1 for anything else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return -1
    try:
        return index(value)
    except TypeError:  # a tensor of something else
        return -1


def split_microbatches(
    batch: Batch, microbatch_size: int | None, *, batch_spec: BatchSpec | None, split: SplitFn | None, count: CountFn | None
) -> Microbatches:
    """Count ``batch`` and cut it; without a size it is one microbatch.

    Raises:
        ConfigError: a batch that cannot be counted or cut, or a ``split`` that gives no microbatch for some samples.
    """
    if isinstance(batch, FailedBatch):
        raise batch.error
    samples, tokens = count_batch(batch, batch_spec=batch_spec, count=count)
    if samples == 0:
        return Microbatches(batch=batch, tokens=tokens)
    if microbatch_size is None:
        return Microbatches(batch=batch, batches=[batch], samples=samples, tokens=tokens)
    check_microbatch_size(microbatch_size)
    if split is None:
        parts: Sequence[Batch] = split_into_microbatches(batch, microbatch_size, samples, batch_spec)
    else:
        given = split(batch, microbatch_size)
        if not isinstance(given, Iterable) or isinstance(given, str | Mapping | torch.Tensor):
            raise ConfigError(f"microbatch_step: split must give a list of microbatches, got {type(given).__name__}")
        parts = list(given)
        if not parts:
            raise ConfigError(f"microbatch_step: split gave no microbatch for a batch of {samples} samples")
    return Microbatches(batch=batch, batches=parts, samples=samples, tokens=tokens)
