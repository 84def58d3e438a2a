"""Sequence length warm-up: truncate batches to a length that grows during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import BatchKey, batch_transform, get_inputs
from dtrain.typing import Batch, Schedule, is_tensordict

_NAME = "sequence_length_warmup"


def shorten_batch(
    batch: Batch,
    length: int,
    *,
    truncate: bool = True,
    keep_end: bool = False,
    input_key: BatchKey | None = None,
    mask_key: str = "attention_mask",
    axes: Mapping[str, Sequence[int]] | None = None,
) -> Batch:
    """Return a batch whose sequences have at most ``length`` tokens. A batch of shorter sequences is returned unchanged.

    Formula: with sequences of ``s`` tokens, ``truncate`` turns ``[batch, s]`` into ``[batch, length]``, the first tokens of
    each sequence. Otherwise the result is ``[batch * (s // length), length]``, the pieces of each sequence one after another;
    the last ``s % length`` tokens are dropped.

    Args:
        batch: mapping of tensors, or a TensorDict.
        length: tokens per sequence, at least 1.
        truncate: if True, drop the rest of a sequence; if False, split a sequence into several samples.
        keep_end: if True, the last token of the sequence (the end-of-sequence token) replaces the last token of the truncated
            sequence, together with its label, mask and all other truncated tensors.
        input_key: key of the tensor ``[batch, seq, ...]`` that defines the sequence length; None takes ``"x"`` or
            ``"input_ids"``.
        mask_key: key of a tensor ``[batch, seq]`` that is nonzero at tokens; without this key sequences are full.
        axes: sequence axes by key, ``{"scores": (2,)}``; an empty tuple leaves a tensor unchanged. By default axis 1 of every
            tensor whose axis 1 is as long as that of ``input_key``, the last axis of a mask of keys ``[batch, 1, 1, seq]``, and
            both last axes of a mask of pairs ``[batch, heads, seq, seq]`` or, for bools, ``[batch, seq, seq]``. Pieces take the
            diagonal blocks of a mask of pairs, so a token attends to its own piece only.

    Returns:
        A new mapping (or TensorDict). Truncated tensors are contiguous. Other entries are kept.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "weight": torch.ones(1)}
        >>> dt.transforms.shorten_batch(batch, 3)["input_ids"].tolist()
        [[5, 6, 7]]
        >>> dt.transforms.shorten_batch(batch, 3, keep_end=True)["input_ids"].tolist()
        [[5, 6, 9]]
        >>> dt.transforms.shorten_batch({"input_ids": batch["input_ids"]}, 2, truncate=False)[
        ...     "input_ids"
        ... ].tolist()
        [[5, 6], [7, 8]]

    Raises:
        ConfigError: ``length`` is not an int of at least 1, ``batch`` is not a mapping or lacks ``input_key``, an axis has
            another length, or ``keep_end`` is given without ``truncate`` or with a mask of another shape. Also if ``truncate``
            is False and an entry of the batch has no sequence axis (a label), because the entry belongs to no piece.

    Source: Li et al. 2021, arXiv:2108.06084, section 4 (truncation).
    """
    check_int(_NAME, "length", length)
    _check_keep_end(keep_end, truncate=truncate)
    if not isinstance(batch, Mapping) and not is_tensordict(batch):
        raise ConfigError(
            f"{_NAME}: batch must be a mapping of tensors, got a {type(batch).__name__}. "
            "Return a dict from the collate function."
        )
    key, inputs = get_inputs(batch, input_key, _NAME)
    along = _sequence_axes(batch, str(key), inputs, axes or {})
    full = inputs.shape[along[str(key)][0]]
    if length >= full:
        return batch
    if not truncate:
        return _with_tensors(batch, _split_into_pieces(batch, along, full, length))
    if not keep_end:
        return _with_tensors(batch, {key: _narrow(batch[key], dims, length) for key, dims in along.items()})
    positions = _kept_positions(batch, inputs, mask_key, full, length)
    return _with_tensors(batch, {key: _take_positions(batch[key], dims, positions) for key, dims in along.items()})


def sequence_length_warmup(
    length: Schedule | None = None,
    *,
    end: Duration | int | str = "0.3dur",
    initial_length: int = 8,
    max_length: int = 1024,
    step_size: int = 8,
    truncate: bool = True,
    keep_end: bool = False,
    input_key: BatchKey | None = None,
    mask_key: str = "attention_mask",
    axes: Mapping[str, Sequence[int]] | None = None,
) -> Transform:
    """Train on short sequences first, and increase the length step by step to the full length.

    The transform applies ``shorten_batch`` to this rank's whole batch before the split into microbatches. The length depends on
    the clock alone, so all ranks agree. The clock counts the tokens after truncation (with a ``batch_spec``), and with
    ``truncate=False`` each piece as a sample. Later steps need more memory than the first steps. ``auto_microbatch`` adapts,
    but a fixed ``microbatch_size`` must fit at full length.

    Formula: ``length = initial_length + (max_length - initial_length) * min(1, now / end)``, rounded down to a multiple of
    ``step_size``, but never below ``initial_length``, and ``max_length`` from ``end`` on. ``now`` is the clock before the
    step, in the unit of ``end``. For epochs it includes the fraction of the epoch if the run knows the steps per epoch.

    Args:
        length: schedule of lengths instead of the formula, rounded down to an integer; ``with_unit`` works.
        end: end of the warm-up, which begins with the run.
        initial_length: tokens per sequence in the first step.
        max_length: tokens per sequence from ``end`` on; shorter sequences are unchanged.
        step_size: lengths are multiples of this number; 8 suits matrix units.
        truncate: as in ``shorten_batch``, and so are the following arguments.
        keep_end: if True, keep the last token of a truncated sequence.
        input_key: key of the tensor that defines the sequence length; None takes ``"x"`` or ``"input_ids"``.
        mask_key: key of the token mask, for ``keep_end``.
        axes: sequence axes by key.

    Example:
        >>> import dtrain as dt
        >>> lengths = []
        >>> def loss_fn(model, batch):
        ...     lengths.append(batch["input_ids"].shape[1])
        ...     return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])
        >>> warmup = dt.transforms.sequence_length_warmup(
        ...     end=4, initial_length=8, max_length=32
        ... )
        >>> step = dt.compose_step(loss_fn, [warmup])
        >>> model = torch.nn.Embedding(10, 10)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for _ in range(5):
        ...     tokens = torch.randint(10, (2, 33))
        ...     state, _ = step(state, {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
        >>> lengths
        [8, 8, 16, 24, 32]

    Raises:
        ConfigError: lengths are not ints with ``1 <= initial_length <= max_length``, ``step_size`` is below 1, ``end`` is not
            a duration, or ``keep_end`` is given without ``truncate``. In a step: ``dur`` in a run of unknown length, a schedule
            value below 1, or an error of ``shorten_batch`` (``PeerError`` on the other ranks).

    Source: Li et al. 2021, arXiv:2108.06084, section 4; lengths and duration as in MosaicML Composer if the paper gives none.

    Suggested values:
        GPT-2 of 125M, length 1024: ``end="0.3dur"``, ``initial_length=8``, ``step_size=8`` (MosaicML Composer, method card of
            sequence length warmup)
        BERT, length 128, short run: ``end="0.3dur"``, ``initial_length=32`` (dtrain, ``examples/pretrain_bert.py``)
    When not to use: steps are short: fewer tokens then save no time, as the measured effect below shows. Truncated tokens are
        lost for this epoch, and a compiled model compiles anew for each length.
    """
    _check_keep_end(keep_end, truncate=truncate)
    ramp = length_ramp(Duration.parse(end), initial_length, max_length, step_size)
    if length is not None and not callable(length):
        raise ConfigError(
            f"{_NAME}: length must be a function of the step, got {length!r}. For a fixed length use max_length=."
        )
    length_at = ramp if length is None else hyperparameter(length, f"{_NAME}: length", "[1, inf)")

    def shorten(batch: Batch, *, length: float, generator: torch.Generator) -> Batch:
        return shorten_batch(
            batch,
            math.floor(length),
            truncate=truncate,
            keep_end=keep_end,
            input_key=input_key,
            mask_key=mask_key,
            axes=axes,
        )

    return batch_transform(shorten, name=_NAME, at_clock={"length": length_at})


def length_ramp(end: Duration, initial_length: int, max_length: int, step_size: int) -> Callable[[Clock], float]:
    """Return the length as a function of the clock: from ``initial_length`` to ``max_length`` at ``end``.

    Example:
        >>> length = length_ramp(Duration.parse(100), 8, 72, 8)
        >>> [length(Clock(step=step)) for step in (0, 12, 13, 50, 99, 100)]
        [8, 8, 16, 40, 64, 72]

    Raises:
        ConfigError: a length is not an int of at least 1, or ``max_length`` is below ``initial_length``.
    """
    check_int(_NAME, "initial_length", initial_length)
    check_int(_NAME, "max_length", max_length, minimum=initial_length)
    check_int(_NAME, "step_size", step_size)

    def length(clock: Clock) -> float:
        if clock.reached(end):
            return max_length
        elapsed, steps = clock.count(end.unit), clock.run_length.steps_per_epoch if clock.run_length is not None else None
        if end.unit == "ep" and steps is not None:
            elapsed += min(clock.step_in_epoch, steps) / steps
        exact = initial_length + (max_length - initial_length) * min(1.0, elapsed / end.value)
        return max(initial_length, math.floor(exact) // step_size * step_size)

    return length


def _check_keep_end(keep_end: bool, *, truncate: bool) -> None:
    if keep_end and not truncate:
        raise ConfigError(
            f"{_NAME}: keep_end must be False with truncate=False, got True. Pieces include the end of the sequence."
        )


def _sequence_axes(batch: Any, input_key: str, inputs: Tensor, axes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the sequence axes of each tensor that has a sequence, by key."""
    keys = list(batch.keys())
    unknown = [key for key in axes if key not in keys]
    if unknown:
        raise ConfigError(
            f"{_NAME}: keys of axes must be in the batch {sorted(map(str, keys))}, got {unknown[0]!r}. Name keys of the batch."
        )
    own = axes.get(input_key, (1,))
    full = inputs.shape[own[0]] if own and _is_valid_axes(own, inputs) else None
    for key, along in {input_key: own, **axes}.items():
        value = batch[key]
        if full is None or not _is_valid_axes(along, value) or any(value.shape[axis] != full for axis in along):
            shape = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            expected = "be sequence axes" if full is None else f"have the length {full}"
            raise ConfigError(
                f"{_NAME}: the axes of {key!r} must {expected}, got {along!r} of {shape}. Give one or two axes after the "
                "batch axis 0, as in (1,)."
            )
    assert full is not None
    others = {key: axes[key] if key in axes else _default_axes(batch[key], full) for key in keys if key != input_key}
    return {key: tuple(along) for key, along in {input_key: own, **others}.items() if along}


def _is_valid_axes(along: object, value: object) -> bool:
    """Return True if ``along`` is at most two distinct axes of ``value`` after the first axis."""
    if not isinstance(along, Sequence) or len(along) > 2 or not all(type(axis) is int for axis in along):
        return False
    last = value.ndim - 1 if isinstance(value, Tensor) else 0
    return len(set(along)) == len(along) and all(1 <= axis <= last for axis in along)


def _default_axes(value: Any, full: int) -> tuple[int, ...]:
    """Return the sequence axes in the usual layout: ``[batch, seq, ...]``, or a mask ``[.., .., 1 or seq, seq]``."""
    # The last axis of a float tensor with three axes may be features that are as many as tokens by chance.
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


def _kept_positions(batch: Any, inputs: Tensor, mask_key: str, full: int, length: int) -> Tensor:
    """Return the kept positions ``[batch, length]``: the first positions; the last position may move to the end."""
    positions = torch.arange(length, device=inputs.device).repeat(len(inputs), 1)
    # A TensorDict does not support `in`.
    if mask_key in batch.keys():  # noqa: SIM118
        is_token = batch[mask_key] != 0
        if tuple(is_token.shape) != (len(inputs), full):
            raise ConfigError(
                f"{_NAME}: the mask at mask_key={mask_key!r} must be [batch, seq] with keep_end, "
                f"got {list(is_token.shape)}. Give another mask_key, or a key that is not in the batch for full sequences."
            )
        end = torch.where(is_token, torch.arange(full, device=inputs.device), 0).amax(1)
    else:
        end = torch.full_like(positions[:, 0], full - 1)
    positions[:, -1] = end.clamp(min=length - 1)
    return positions


def _take_positions(tensor: Tensor, along: tuple[int, ...], positions: Tensor) -> Tensor:
    for axis in along:
        shape = [1] * tensor.ndim
        shape[0], shape[axis] = positions.shape
        tensor = torch.take_along_dim(tensor, positions.view(shape), dim=axis)
    return tensor.contiguous()


def _split_into_pieces(batch: Any, along: dict[str, tuple[int, ...]], full: int, length: int) -> dict[str, Tensor]:
    """Split every sequence into samples of ``length`` tokens, by key."""
    samples = len(batch[next(iter(along))])
    for key in batch.keys():  # noqa: SIM118
        value, has_no_axis = batch[key], key not in along
        shape = list(value.shape) if isinstance(value, Tensor) else [len(value)] if isinstance(value, list | tuple) else []
        if shape and (has_no_axis or shape[0] != samples):
            expected = "have a sequence axis" if has_no_axis else f"have {samples} samples"
            raise ConfigError(
                f"{_NAME}: {key!r} must {expected} with truncate=False, got {shape}. Use truncate=True, or remove the "
                "entry from the batch."
            )
    count = full // length
    return {key: _pieces(_narrow(batch[key], axes, count * length), axes, length).contiguous() for key, axes in along.items()}


def _pieces(tensor: Tensor, axes: tuple[int, ...], length: int) -> Tensor:
    names = [f"a{axis}" for axis in range(tensor.ndim)]
    split = list(names)
    for axis in axes:
        split[axis] = f"(p{axis} {names[axis]})"
    sizes = {names[axis]: length for axis in axes}
    first, *second = sorted(axes)
    if not second:
        return rearrange(tensor, f"{' '.join(split)} -> (a0 p{first}) {' '.join(names[1:])}", **sizes)
    # Keep the diagonal blocks of a mask of pairs: the pairs within one piece.
    blocks = rearrange(tensor, f"{' '.join(split)} -> a0 {' '.join(names[1:])} p{first} p{second[0]}", **sizes)
    return rearrange(blocks.diagonal(dim1=-2, dim2=-1), f"{' '.join(names)} pieces -> (a0 pieces) {' '.join(names[1:])}")


def _with_tensors(batch: Any, tensors: dict[str, Tensor]) -> Batch:
    """Return the batch with ``tensors`` at their keys."""
    values = {**dict(batch.items()), **tensors}
    if not is_tensordict(batch):
        return values
    return type(batch)(values, batch_size=[next(iter(tensors.values())).shape[0]])
