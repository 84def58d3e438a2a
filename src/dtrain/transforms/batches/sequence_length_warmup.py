"""Short sequences first: batches cut to a length that grows with training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Hyperparameter, hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import batch_transform
from dtrain.typing import Batch, Schedule, is_tensordict


def shorten_batch(
    batch: Batch,
    length: int,
    *,
    truncate: bool = True,
    keep_end: bool = False,
    input_key: str = "input_ids",
    mask_key: str = "attention_mask",
    axes: Mapping[str, Sequence[int]] | None = None,
) -> Batch:
    """A batch whose sequences have at most ``length`` tokens; one that is no longer than that comes back as it is.

    Formula: with sequences of ``s`` tokens, ``truncate`` makes ``[batch, s]`` to ``[batch, length]``, the first tokens of each;
    otherwise it makes ``[batch * (s // length), length]``, the pieces of each sequence one after another. The ``s % length``
    tokens at the end are dropped then.

    Args:
        batch: a mapping of tensors, or a TensorDict.
        length: tokens that are kept of a sequence, at least 1.
        truncate: whether the rest of a sequence is dropped; else it is cut into samples of their own.
        keep_end: the last token that is there comes last in a truncated sequence, in place of the one that would: an end of
            sequence stays. Its label, mask and all else that is cut come with it.
        input_key: the key of the tensor ``[batch, seq, ...]`` that says how long sequences are.
        mask_key: the key of a tensor ``[batch, seq]`` that is not 0 where there is a token; without it sequences are full.
        axes: by key, the axes along the sequence, ``{"scores": (2,)}``; an empty tuple leaves a tensor as it is. By default
            axis 1 of every tensor whose axis 1 is as long as that of ``input_key``, the last axis of a mask of keys
            ``[batch, 1, 1, seq]``, and both last axes of a mask of pairs ``[batch, heads, seq, seq]``, or, of bools,
            ``[batch, seq, seq]``. Of that, pieces get the squares on the diagonal: a token sees none in another piece.

    Returns:
        A new mapping (a TensorDict for one); tensors that were cut are contiguous. What is not along the sequence is kept.

    Host sync: none.

    Raises:
        ConfigError: ``length`` is no whole number of at least 1, ``batch`` is no mapping or has no such ``input_key``, an axis
            that is not as long, ``keep_end`` without ``truncate`` or with a mask of another shape; pieces are to be
            made of a batch that has something by sample (a label), or for all samples, which belongs to none of them.

    Source: Li et al. 2021, arXiv:2108.06084, section 4 (truncation).

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "weight": torch.ones(1)}
        >>> shorten_batch(batch, 3)["input_ids"].tolist(), shorten_batch(batch, 3, keep_end=True)["input_ids"].tolist()
        ([[5, 6, 7]], [[5, 6, 9]])
        >>> shorten_batch({"input_ids": batch["input_ids"]}, 2, truncate=False)["input_ids"].tolist()
        [[5, 6], [7, 8]]
    """
    _check_length(length)
    _check_keep_end(keep_end, truncate=truncate, caller="shorten_batch")
    if not isinstance(batch, Mapping) and not is_tensordict(batch):
        raise ConfigError(f"shorten_batch: needs a mapping of tensors, got a {type(batch).__name__}")
    along = _sequence_axes(batch, input_key, axes)
    full = batch[input_key].shape[along[input_key][0]]
    if length >= full:
        return batch
    if not truncate:
        return _with_tensors(batch, _split_into_pieces(batch, along, full, length))
    if not keep_end:
        return _with_tensors(batch, {key: _narrow(batch[key], found, length) for key, found in along.items()})
    places = _kept_positions(batch, batch[input_key], mask_key, full, length)
    return _with_tensors(batch, {key: _take_positions(batch[key], found, places) for key, found in along.items()})


def sequence_length_warmup(
    length: Schedule | None = None,
    *,
    duration: Duration | int | str = "0.3dur",
    min_length: int = 8,
    max_length: int = 1024,
    step_size: int = 8,
    truncate: bool = True,
    keep_end: bool = False,
    input_key: str = "input_ids",
    mask_key: str = "attention_mask",
    axes: Mapping[str, Sequence[int]] | None = None,
) -> Transform:
    """Train on short sequences first, and on longer ones step by step until they have their full length.

    It cuts this rank's whole batch before it is split into microbatches, with ``shorten_batch``. The length depends on the
    clock alone, so all ranks agree. The clock counts what was trained on: the tokens that are left (given a ``batch_spec``),
    and of pieces (``truncate=False``) each as a sample. Later steps take more memory than the first ones: ``auto_microbatch``
    follows, and ``microbatch_size`` must be one that fits at full length.

    Formula: ``length = min_length + (max_length - min_length) * min(1, now / duration)``, rounded down to a multiple of
    ``step_size``, but never below ``min_length``, and ``max_length`` from ``duration`` on. ``now`` is the clock that the step
    starts from, in the unit of ``duration``; of epochs their steps, too, where the run knows them.

    Args:
        length: a schedule of lengths in place of the formula, rounded down to a whole number; ``with_unit`` works.
        duration: how long it takes until sequences are not cut any more.
        min_length: tokens of a sequence in the first step.
        max_length: tokens of a sequence from ``duration`` on. Shorter sequences of a batch are left as they are.
        step_size: lengths are multiples of it: 8 is what matrix units like.
        truncate: as in ``shorten_batch``, like the following ones.
        keep_end: the end of a sequence stays when it is truncated.
        input_key: the key of the tensor that says how long sequences are.
        mask_key: the key of the mask of tokens, for ``keep_end``.
        axes: which axes of which tensors are along the sequence.

    Raises:
        ConfigError: lengths that are not whole numbers with ``1 <= min_length <= max_length``, a ``step_size`` below 1, no
            duration, ``keep_end`` without ``truncate``; in a step, ``dur`` in a run of unknown length, a schedule that gives
            less than 1, and what ``shorten_batch`` refuses (``PeerError`` on the other ranks).

    Source: Li et al. 2021, arXiv:2108.06084, section 4; lengths and duration as in MosaicML Composer where it leaves them open.

    Example:
        >>> from dtrain.clock import Clock
        >>> at = Ramp(duration=Duration.parse(100), min_length=8, max_length=72, step_size=8)
        >>> [at(Clock(step=step)) for step in (0, 12, 13, 50, 99, 100)]
        [8, 8, 16, 40, 64, 72]
        >>> sequence_length_warmup(duration="0.5dur", max_length=512).name
        'sequence_length_warmup'
    """
    _check_keep_end(keep_end, truncate=truncate, caller=_NAME)
    ramp = LengthRamp(duration=Duration.parse(duration), min_length=min_length, max_length=max_length, step_size=step_size)
    scheduled = None if length is None else _length_hyperparameter(length)

    def cut(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = ramp(state.clock) if scheduled is None else math.floor(scheduled(state.clock))
        return shorten_batch(
            batch, now, truncate=truncate, keep_end=keep_end, input_key=input_key, mask_key=mask_key, axes=axes
        )

    return batch_transform(cut, name=_NAME, hyperparameters=() if scheduled is None else (scheduled,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRamp:
    """Lengths that grow from ``min_length`` to ``max_length`` during ``duration``; see ``sequence_length_warmup``."""

    duration: Duration
    min_length: int
    max_length: int
    step_size: int

    def __post_init__(self) -> None:
        sizes = (self.min_length, self.max_length, self.step_size)
        if not all(type(size) is int for size in sizes) or not 1 <= self.min_length <= self.max_length or self.step_size < 1:
            raise ConfigError(
                f"{_NAME}: needs whole numbers with 1 <= min_length <= max_length and step_size >= 1, got "
                f"min_length={self.min_length!r}, max_length={self.max_length!r}, step_size={self.step_size!r}"
            )

    def __call__(self, clock: Clock) -> int:
        """The length in the step that starts from ``clock``."""
        if clock.reached(self.duration):
            return self.max_length
        exact = self.min_length + (self.max_length - self.min_length) * min(1.0, self._elapsed_fraction(clock))
        return max(self.min_length, math.floor(exact) // self.step_size * self.step_size)

    def _elapsed_fraction(self, clock: Clock) -> float:
        """How much of the duration has passed."""
        steps = clock.run.steps_per_epoch if clock.run is not None else None
        if self.duration.unit == "ep" and steps is not None:
            return (clock.epoch + min(clock.step_in_epoch, steps) / steps) / self.duration.value
        return clock.count(self.duration.unit) / self.duration.value


_NAME = "sequence_length_warmup"


def _length_hyperparameter(length: Schedule) -> Hyperparameter:
    if not callable(length):
        raise ConfigError(f"{_NAME}: length is a schedule (a function of the step), got {length!r}; one length is max_length=")
    return hyperparameter(length, f"{_NAME}: length", "[1, inf)")


def _check_length(length: int) -> None:
    if type(length) is not int or length < 1:
        raise ConfigError(f"shorten_batch: needs a length that is a whole number of at least 1, got {length!r}")


def _check_keep_end(keep_end: bool, *, truncate: bool, caller: str) -> None:
    if keep_end and not truncate:
        raise ConfigError(
            f"{caller}: keep_end goes with truncate=True; where sequences are cut into pieces their ends are there"
        )


def _sequence_axes(batch: Any, input_key: str, given: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """Which tensors are along the sequence, and along which of their axes."""
    keys = list(batch.keys())
    if input_key not in keys or not isinstance(batch[input_key], Tensor) or batch[input_key].ndim < 2:
        raise ConfigError(
            f"shorten_batch: needs a tensor [batch, seq] under inputs={input_key!r}; the batch has {sorted(map(str, keys))}"
        )
    given = given or {}
    strange = [key for key in given if key not in keys]
    if strange:
        raise ConfigError(
            f"shorten_batch: axes names {strange[0]!r}, which is not in the batch; it has {sorted(map(str, keys))}"
        )
    own = given.get(input_key, (1,))
    full = batch[input_key].shape[own[0]] if own and _is_valid_axes(own, batch[input_key]) else None
    for key, along in {input_key: own, **given}.items():
        value = batch[key]
        if full is None or not _is_valid_axes(along, value) or any(value.shape[axis] != full for axis in along):
            what = list(value.shape) if isinstance(value, Tensor) else f"(a {type(value).__name__})"
            wrong = "has no sequence" if full is None else f"is not {full} long"
            raise ConfigError(
                f"shorten_batch: {key!r} {what} {wrong} along the axes {along!r}; axes= takes one or two of them, counted from "
                "0, the batch's, as in (1,)"
            )
    assert full is not None
    found = {
        input_key: own,
        **{key: given[key] if key in given else _default_axes(batch[key], full) for key in keys if key != input_key},
    }
    return {key: tuple(along) for key, along in found.items() if along}


def _is_valid_axes(along: object, value: object) -> bool:
    """Whether these are none, one or two axes of ``value`` behind the first."""
    if not isinstance(along, Sequence) or len(along) > 2 or not all(type(axis) is int for axis in along):
        return False
    last = value.ndim - 1 if isinstance(value, Tensor) else 0
    return len(set(along)) == len(along) and all(1 <= axis <= last for axis in along)


def _default_axes(value: Any, full: int) -> tuple[int, ...]:
    """The axes of a tensor that is laid out as usual: ``[batch, seq, ...]``, or a mask ``[.., .., 1 or seq, seq]``."""
    # Of three axes, floats may be features that are as many as tokens by chance.
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if len(shape) == 4 and shape[3] == full and shape[2] in (1, full):
        return (2, 3) if shape[2] == full else (3,)
    if len(shape) == 3 and shape[1] == shape[2] == full and value.dtype == torch.bool:
        return (1, 2)
    return (1,) if len(shape) >= 2 and shape[1] == full else ()


def _narrow(tensor: Tensor, along: tuple[int, ...], length: int) -> Tensor:
    for axis in along:
        tensor = tensor.narrow(axis, 0, length)
    return tensor.contiguous()


def _kept_positions(batch: Any, like: Tensor, mask_key: str, full: int, length: int) -> Tensor:
    """Which tokens stay ``[batch, length]``: the first ones, and as the last one the end if it lies behind the cut."""
    places = torch.arange(length, device=like.device).repeat(like.shape[0], 1)
    if mask_key in batch.keys():  # noqa: SIM118  # a TensorDict has no "in"
        there = batch[mask_key] != 0
        if tuple(there.shape) != (len(like), full):
            raise ConfigError(
                f"shorten_batch: keep_end needs a mask [batch, seq] under mask={mask_key!r}, got {list(there.shape)}; name another "
                "one, or one that is not in the batch: then the last place is the end"
            )
        end = torch.where(there, torch.arange(full, device=like.device), 0).amax(1)
    else:
        end = torch.full_like(places[:, 0], full - 1)
    places[:, -1] = end.clamp(min=length - 1)
    return places


def _take_positions(tensor: Tensor, along: tuple[int, ...], places: Tensor) -> Tensor:
    for axis in along:
        shape = [1] * tensor.ndim
        shape[0], shape[axis] = places.shape
        tensor = torch.take_along_dim(tensor, places.view(shape), dim=axis)
    return tensor.contiguous()


def _split_into_pieces(batch: Any, along: dict[str, tuple[int, ...]], full: int, length: int) -> dict[str, Tensor]:
    """Every tensor with its sequences cut into samples of their own."""
    samples = len(batch[next(iter(along))])
    for key in batch.keys():  # noqa: SIM118
        value, kept = batch[key], key not in along
        shape = list(value.shape) if isinstance(value, Tensor) else [len(value)] if isinstance(value, list | tuple) else []
        if shape and (kept or shape[0] != samples):
            raise ConfigError(
                f"shorten_batch: {key!r} {shape} is not {'along the sequence' if kept else f'of {samples} samples'}, so it "
                "belongs to no piece of one; use truncate=True, or leave it out of the batch"
            )
    many = full // length
    found = {}
    for key, axes in along.items():
        tensor = batch[key]
        for axis in sorted(axes, reverse=True):
            tensor = tensor.narrow(axis, 0, many * length).unflatten(axis, (many, length))
        first, *second = sorted(axes)
        # Of a mask of pairs, the pairs within one piece.
        tensor = torch.diagonal(tensor, dim1=first, dim2=second[0] + 1).movedim(-1, 1) if second else tensor.movedim(first, 1)
        found[key] = tensor.flatten(0, 1).contiguous()
    return found


def _with_tensors(batch: Any, cut: dict[str, Tensor]) -> Batch:
    """The batch with those tensors in place of its own."""
    made = {**dict(batch.items()), **cut}
    if not is_tensordict(batch):
        return made
    return type(batch)(made, batch_size=[next(iter(cut.values())).shape[0]])
