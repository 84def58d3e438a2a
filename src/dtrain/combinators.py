"""Transforms made from transforms: when one acts, and on which parameters; and a transform made from a batch function.

All of them are ordinary functions. The name of the transform stays, so its slice, its entry in a checkpoint and its random
stream are those of the bare one, and a run may be resumed with or without the wrapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtrain.batch import FailedBatch, copy_batch_info, to_device
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns
from dtrain.state import TrainState
from dtrain.transform import GradFn, StepContext, Transform, check_transform, make_step_context
from dtrain.typing import Batch, LossFn, Metrics, Params, TransformState

ParamFilter: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool]
"""Which parameters: patterns of clean names (``*`` any text without a dot, ``**`` any text), or a predicate (name, param).

A tied parameter fits a pattern under any of its names; a predicate is asked for the first."""

StepFn: TypeAlias = Callable[..., tuple[TrainState, Metrics]]
"""Either half of a step, a ``GradFn`` or an ``UpdateFn``: both take a state first and return the next one."""

LossWrapper: TypeAlias = Callable[[LossFn, StepContext], LossFn]

BatchFn: TypeAlias = Callable[[Batch, torch.Generator], Batch]
"""A batch method: a pure function of a batch and a generator."""


def every(interval: Duration | int | str, transform: Transform) -> Transform:
    """``transform`` in the first step of every interval, nothing in the others.

    With ``every(10, t)`` the steps 0, 10, 20, ... are wrapped (counted from 0: the value of ``state.step`` that the step starts
    from), with ``every("2ep", t)`` the first steps of the epochs 0, 2, 4, ..., with ``every("1e9tok", t)`` the first step after
    each billion tokens; ``every(1, t)`` is ``t``. Those are the steps after ``state.crossed(interval)``, and the first one.

    Args:
        interval: any duration: ``10``, ``"10ba"``, ``"1ep"``, ``"1e9tok"``, ``"10m"`` (rank 0's clock, so all ranks agree),
            ``"0.1dur"`` (which needs ``step.init(..., run=...)``).
        transform: what is wrapped; its slice is made at the start of the run all the same.

    Raises:
        ConfigError: no transform, or no duration; from ``Step.init`` on, ``dur`` in a run whose length is not known.
    """
    check_transform(transform, "every", "dt.transforms.every(10, {})")
    each = Duration.parse(interval)
    return _run_when(lambda clock: clock.step == 0 or clock.crossed(each), transform, of=(each,))


def between(start: Duration | int | str, end: Duration | int | str, transform: Transform) -> Transform:
    """``transform`` while ``start <= now < end``, nothing before and after; ``now`` is the clock that the step starts from.

    Args:
        start: a number of steps, from 0 on, or a duration in any unit (``"1ep"``, ``"1e9tok"``, ``"0.2dur"``).
        end: likewise, in the same unit or another one.
        transform: what is wrapped; its slice is made at the start of the run all the same.

    Raises:
        ConfigError: no transform, a bound that is no duration, or in one unit an ``end`` that is not after ``start``; from
            ``Step.init`` on, ``dur`` in a run whose length is not known.
    """
    check_transform(transform, "between", "dt.transforms.between(0, 100, {})")
    first, last = Duration.parse(start, allow_zero=True), Duration.parse(end)
    if first.unit == last.unit and first.value >= last.value:
        raise ConfigError(f"between: needs start < end, got start={str(first)!r}, end={str(last)!r}")
    return _run_when(lambda clock: clock.reached(first) and not clock.reached(last), transform, of=(first, last))


def masked(transform: Transform, where: ParamFilter) -> Transform:
    """``transform`` on a part of the parameters: the state that it sees has no others in ``state.params``.

    So ``masked(clip_by_norm(1.0), "head.**")`` takes the norm of the head's gradient and scales the head's alone, and
    ``masked(ema(0.999), "encoder.**")`` averages the encoder only. What ``transform`` wraps sees the whole state. What does
    not go by ``state.params`` is not narrowed: ``scale_lr`` works on the optimizer's groups.

    Args:
        transform: what is wrapped.
        where: a pattern of names, several, or a predicate ``(name, param) -> bool``; it is asked once for each seam of a step.

    Raises:
        ConfigError: no transform, or one that acts on the whole (``loss_scale``); from ``Step.init`` on, a pattern or predicate
            that fits none of the parameters.
    """
    check_transform(transform, "masked", 'dt.transforms.masked({}, "head.**")')
    if transform.grad_step is not None:
        raise ConfigError(f"masked: {transform.name!r} acts on the whole gradient, not on a part of it; list it unmasked")
    select = _make_selector(where)

    def narrowed(state: TrainState) -> TrainState:
        return replace(state, params=_ParamSubset(select(state), state.params))

    def masked_loss(wrap: LossWrapper) -> LossWrapper:
        return lambda inner, context: wrap(inner, replace(context, state=narrowed(context.state)))

    def masked_half(wrap: Callable[[StepFn], StepFn]) -> Callable[[StepFn], StepFn]:
        def mask(inner: StepFn) -> StepFn:
            def on_whole(state: TrainState, *given: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = inner(_restore_all_params(state), *given, **options)
                return replace(after, params=state.params), metrics

            wrapped = wrap(on_whole)

            def on_part(state: TrainState, *given: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = wrapped(narrowed(state), *given, **options)
                return _restore_all_params(after), metrics

            return on_part

        return mask

    return replace(_wrap_stages(transform, masked_loss, masked_half), init=lambda state: transform.init(narrowed(state)))


def on_batch(fn: BatchFn, *, name: str) -> Transform:
    """``fn`` on this rank's whole batch, before it is split: the result does not depend on the microbatch size.

    Args:
        fn: ``(batch, generator) -> batch``, a pure function. It gets the batch on the model's device and a generator there
            that is seeded by the run's seed, ``name``, the step and the data-parallel rank; a gradient that is computed again
            for the same step draws alike. The batch may be empty on a rank that has run out of samples.
        name: of the transform, and of its random stream.

    Raises:
        ConfigError: ``fn`` is no function; in a step, it returns None.
        Exception: in a step, whatever ``fn`` raises; on the other ranks ``PeerError``.
    """
    if not callable(fn):
        raise ConfigError(f"on_batch: needs a function (batch, generator) -> batch, got {fn!r}")

    def grad(inner: GradFn) -> GradFn:
        def changed(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            # A rank without samples runs the spare one in place of its batch, so it must look like the others' batches.
            inside = state if state.padding_sample is None else state.with_padding_sample(made(state, state.padding_sample))
            after, metrics = inner(inside, made(state, batch), microbatch_size=microbatch_size)
            return (after if inside is state else after._replace(step_batch=state.step_batch)), metrics

        return changed

    def made(state: TrainState, batch: Batch) -> Batch:
        if isinstance(batch, FailedBatch):
            return batch
        try:
            after = fn(to_device(batch, state.device), make_step_context(state, name).generator)
        except Exception as error:  # noqa: BLE001  # of any kind, it is the user's; raised in the step, by all ranks
            return FailedBatch(error)
        if after is None:
            return FailedBatch(
                ConfigError(f"on_batch: the function of {name!r} returned None; it must return the batch it makes")
            )
        return after if state.step_batch is not None else copy_batch_info(batch, after)  # a step has found the origin already

    return Transform(name=name, grad=grad, uses_grad=False)


# When a transform acts.


def _run_when(active: Callable[[Clock], bool], transform: Transform, *, of: Sequence[Duration]) -> Transform:
    """``transform`` with its seams open in the steps that start from an ``active`` clock. The clock moves after all of them.

    Durations that ``active`` goes by are in ``of``: ``init`` refuses those that cannot be told of the run.
    """

    def gated_loss(wrap: LossWrapper) -> LossWrapper:
        return lambda inner, context: wrap(inner, context) if active(context.state.clock) else inner

    def gated(wrap: Callable[[StepFn], StepFn]) -> Callable[[StepFn], StepFn]:
        def gate(inner: StepFn) -> StepFn:
            wrapped = wrap(inner)
            return lambda state, *given, **options: (wrapped if active(state.clock) else inner)(state, *given, **options)

        return gate

    def init(state: TrainState) -> TransformState:
        for duration in of:
            state.clock.reached(duration)
        return transform.init(state)

    # In which steps a schedule is read depends on the clock, so nothing is known of them ahead.
    return replace(_wrap_stages(transform, gated_loss, gated), init=init, hyperparameters=())


def _wrap_stages(
    transform: Transform,
    of_loss: Callable[[LossWrapper], LossWrapper],
    of_half: Callable[[Callable[[StepFn], StepFn]], Callable[[StepFn], StepFn]],
) -> Transform:
    """``transform`` with those seams replaced that it has."""
    return replace(
        transform,
        loss=transform.loss and of_loss(transform.loss),
        grad=transform.grad and of_half(transform.grad),
        grad_step=transform.grad_step and of_half(transform.grad_step),
        update=transform.update and of_half(transform.update),
    )


# Which parameters it sees.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _ParamSubset(Mapping[str, Tensor]):
    """Some of the parameters, which remember the whole: so a narrowed state can be widened for what is wrapped."""

    subset: dict[str, Tensor]
    all_params: Params

    def __getitem__(self, name: str) -> Tensor:
        return self.subset[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.subset)

    def __len__(self) -> int:
        return len(self.subset)


def _make_selector(where: ParamFilter) -> Callable[[TrainState], dict[str, Tensor]]:
    """``where`` as a function from a state to those of its parameters that are meant, which refuses to mean none."""
    if callable(where):
        predicate = where
        return lambda state: _check_nonempty(
            {n: p for n, p in state.params.items() if predicate(n, p)}, state.params, "the predicate"
        )
    patterns = [where] if isinstance(where, str) else where
    if not isinstance(patterns, Sequence):
        raise ConfigError(f"masked: where is a pattern of names, several, or a function (name, param) -> bool, got {where!r}")
    fits = {pattern: compile_patterns([pattern], caller="masked") for pattern in patterns}

    def by_name(state: TrainState) -> dict[str, Tensor]:
        params = state.params
        chosen: dict[str, Tensor] = {}
        for pattern, fit in fits.items():
            tied = {first for alias, first in state.aliases.items() if fit(alias)}
            chosen.update(
                _check_nonempty({n: p for n, p in params.items() if fit(n) or n in tied}, params, f"the pattern {pattern!r}")
            )
        return _check_nonempty(chosen, params, "an empty list of patterns")

    return by_name


def _check_nonempty(chosen: dict[str, Tensor], params: Params, what: str) -> dict[str, Tensor]:
    if not chosen:
        raise ConfigError(f"masked: {what} fits none of {len(params)} parameters (first: {next(iter(params))!r})")
    return chosen


def _restore_all_params(state: TrainState) -> TrainState:
    assert isinstance(state.params, _ParamSubset), "a masked transform passes on the state that it was given"
    return replace(state, params=state.params.all_params)
