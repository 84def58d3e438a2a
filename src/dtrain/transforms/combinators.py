"""Combine transforms: limit steps (``every``, ``between``) or parameters (``masked``), wrap a batch function (``on_batch``).

A combined transform keeps the name of the inner transform. So its state, its entry in a checkpoint and its random stream stay
the same. A run may be resumed with or without the combinator. ``named`` alone changes the name, to use a transform twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtrain.data.batch import FailedBatch, copy_batch_info, map_microbatches, to_device
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, parse_window
from dtrain.state import TrainState
from dtrain.step.transform import (
    BeforeDivision,
    GradFn,
    StepContext,
    Transform,
    check_transform,
    explain_listed_once,
    make_step_context,
    state_key,
)
from dtrain.typing import Batch, LossFn, Metrics, Params, TransformState

ParamFilter: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool]
"""Selection of parameters: patterns of clean names (``*`` text without a dot, ``**`` any text), or a predicate (name, param).

A pattern matches a tied parameter under any of its names. A predicate is called with the first name."""

StepFn: TypeAlias = Callable[..., tuple[TrainState, Metrics]]
"""A ``GradFn`` or an ``UpdateFn``. Both take a state first and return the next state."""

LossWrapper: TypeAlias = Callable[[LossFn, StepContext], LossFn]

BatchFn: TypeAlias = Callable[[Batch, torch.Generator], Batch]
"""Pure function of a batch and a generator."""


def every(every: Duration | int | str, transform: Transform) -> Transform:
    """Apply ``transform`` in the first step of every interval.

    With ``every(10, t)`` the transform acts in steps 0, 10, 20, ... (``state.step`` at the start of the step). With
    ``every("2ep", t)`` it acts in the first steps of epochs 0, 2, 4, .... With ``every("1e9tok", t)`` it acts in the first step
    after each billion tokens. These are the first step and the steps after ``state.crossed(every)``.

    Args:
        every: duration such as ``10``, ``"10ba"``, ``"1ep"``, ``"1e9tok"``, ``"10m"`` (rank 0's clock, so all ranks agree)
            or ``"0.1dur"`` (needs ``step.init(..., run_length=...)``).
        transform: transform to apply. Its state is made at the start of the run.

    Example:
        sam = dt.transforms.every(10, dt.transforms.sam(0.05))
        step = dt.compose_step(loss_fn, [sam, dt.transforms.clip_by_norm(1.0)])

    Raises:
        ConfigError: not a transform, or not a duration; from ``Step.init``, ``dur`` in a run of unknown length.
    """
    check_transform(transform, "every", "dt.transforms.every(10, {})")
    interval = Duration.parse(every)
    return _run_when(lambda clock: clock.step == 0 or clock.crossed(interval), transform, of=(interval,))


def between(start: Duration | int | str, end: Duration | int | str, transform: Transform) -> Transform:
    """Apply ``transform`` while ``start <= now < end``, with the clock at the start of the step.

    Args:
        start: number of steps from 0, or a duration in any unit (``"1ep"``, ``"1e9tok"``, ``"0.2dur"``).
        end: like ``start``, in any unit.
        transform: transform to apply. Its state is made at the start of the run.

    Example:
        early = dt.transforms.between("0.1dur", "0.5dur", dt.transforms.ema(0.999))
        step = dt.compose_step(loss_fn, [early])
        state = step.init(model, optimizer, run_length=loader.run_length("3ep"))

    Raises:
        ConfigError: not a transform, a bound that is not a duration, or ``end <= start`` in one unit; from ``Step.init``,
            ``dur`` in a run of unknown length.
    """
    check_transform(transform, "between", "dt.transforms.between(0, 100, {})")
    first, last = parse_window("between", start, end)
    return _run_when(lambda clock: clock.reached(first) and not clock.reached(last), transform, of=(first, last))


def masked(transform: Transform, select: ParamFilter) -> Transform:
    """Apply ``transform`` to a subset of the parameters: ``state.params`` contains only the selected parameters.

    For example, ``masked(clip_by_norm(1.0), "head.**")`` clips only the head's gradient by the norm of the head's gradient. The
    functions inside of ``transform`` see the whole state. Transforms that do not use ``state.params`` are not limited:
    ``scale_lr`` changes all groups of the optimizer.

    Args:
        transform: transform to apply.
        select: a pattern of names, several patterns, or a predicate ``(name, param) -> bool``, called once for each stage of a
            step.

    Example:
        clip_head = dt.transforms.masked(dt.transforms.clip_by_norm(1.0), "head.**")
        average = dt.transforms.masked(dt.transforms.ema(0.999), "encoder.**")
        step = dt.compose_step(loss_fn, [clip_head, average])

    Raises:
        ConfigError: not a transform, or a transform of the whole gradient (``loss_scale``); from ``Step.init``, a pattern or
            predicate that selects no parameter.
    """
    check_transform(transform, "masked", 'dt.transforms.masked({}, "head.**")')
    if transform.grad_step is not None:
        raise ConfigError(f"masked: {transform.name!r} acts on the whole gradient, not on a part. List the transform unmasked.")
    selector = _make_selector(select)

    def with_subset(state: TrainState) -> TrainState:
        return _restrict(state, selector(state))

    def mask_loss(wrap: LossWrapper) -> LossWrapper:
        return lambda inner, context: wrap(inner, replace(context, state=with_subset(context.state)))

    def mask_stage(wrap: Callable[[StepFn], StepFn]) -> Callable[[StepFn], StepFn]:
        def masked_wrap(inner: StepFn) -> StepFn:
            def inner_fn(state: TrainState, *args: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = inner(_restore_all_params(state), *args, **options)
                return _restrict(after, state.params), metrics

            wrapped = wrap(inner_fn)

            def step_fn(state: TrainState, *args: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = wrapped(with_subset(state), *args, **options)
                return _restore_all_params(after), metrics

            return step_fn

        return masked_wrap

    return replace(_wrap_stages(transform, mask_loss, mask_stage), init=lambda state: transform.init(with_subset(state)))


def named(name: str, transform: Transform) -> Transform:
    """Return ``transform`` with its state under ``name``, so that one step may list a transform twice.

    The name is the key of the state in ``state.transform_states`` and in checkpoints, and part of the seed of the random
    numbers. So two named transforms draw different numbers. Metrics keep their names: if two transforms add the same metric,
    one of the values remains.

    Args:
        name: letters, digits and underscores, different from the names of the other transforms of the step.
        transform: transform to rename, also inside of ``every``, ``between`` or ``masked``, or around them.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> slow = dt.transforms.named("slow", dt.transforms.ema(0.75))
        >>> step = dt.compose_step(loss_fn, [dt.transforms.ema(0.5), slow])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> state, _ = step(state, torch.ones(2, 1))  # the weight goes to 3.5
        >>> for name in ("ema", "slow"):
        ...     with dt.transforms.use_average(state, name):
        ...         model.weight.item()
        3.75
        3.875

    Raises:
        ConfigError: not a transform, a ``name`` that is no name, or a transform that a step lists only once
            (``auto_microbatch``, ``loss_scale``, ``scale_lr`` and the like).
    """
    check_transform(transform, "named", 'dt.transforms.named("slow", {})')
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise ConfigError(
            f"named: name must be letters, digits and underscores, got {name!r}. Write it first, as in "
            "dt.transforms.named('slow', dt.transforms.ema(0.999))."
        )
    if advice := explain_listed_once(transform):
        raise ConfigError(f"named: transform must be one that a step may list twice, got {transform.name!r}. {advice}")
    key, own_stream = state_key(transform), derive_seed("named", name)
    other_names = {key: name, name: key}

    def rename(state: TrainState) -> TrainState:
        """Exchange the states of ``key`` and ``name``, and the seeds. A second call restores the state."""
        states = {other_names.get(each, each): content for each, content in state.transform_states.items()}
        return state._replace(transform_states=states, seed=state.seed ^ own_stream)

    def rename_loss(wrap: LossWrapper) -> LossWrapper:
        return lambda inner, context: wrap(inner, replace(context, state=rename(context.state)))

    def rename_stage(wrap: Callable[[StepFn], StepFn]) -> Callable[[StepFn], StepFn]:
        def renamed_wrap(inner: StepFn) -> StepFn:
            def inner_fn(state: TrainState, *args: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = inner(rename(state), *args, **options)
                return rename(after), metrics

            wrapped = wrap(inner_fn)

            def step_fn(state: TrainState, *args: Any, **options: Any) -> tuple[TrainState, Metrics]:
                after, metrics = wrapped(rename(state), *args, **options)
                return rename(after), metrics

            return step_fn

        return BeforeDivision(renamed_wrap) if isinstance(wrap, BeforeDivision) else renamed_wrap

    renamed = _wrap_stages(transform, rename_loss, rename_stage)
    return replace(renamed, name=name, init=lambda state: transform.init(rename(state)), _made_as=None)


def on_batch(fn: BatchFn, *, name: str) -> Transform:
    """Apply ``fn`` to this rank's whole batch before the batch is split, so the result does not depend on the microbatch size.

    Args:
        fn: pure function ``(batch, generator) -> batch``. The batch and the generator are on the model's device. The generator
            is seeded by the run's seed, ``name``, the step and the data-parallel rank. A repeated gradient of a step draws the
            same numbers. The batch may be empty on a rank without samples. Microbatches of the loader (``max_tokens``) are
            passed one by one.
        name: name of the transform and of its random stream.

    Example:
        def add_noise(batch, generator):
            noise = torch.randn(batch["x"].shape, generator=generator, device=batch["x"].device)
            return {**batch, "x": batch["x"] + 0.1 * noise}

        step = dt.compose_step(loss_fn, [dt.transforms.on_batch(add_noise, name="noise")])

    Raises:
        ConfigError: ``fn`` is not a function; in a step, ``fn`` returns None.
        Exception: in a step, any exception of ``fn``; on the other ranks ``PeerError``.
    """
    if not callable(fn):
        raise ConfigError(
            f"on_batch: fn must be a function (batch, generator) -> batch, got {fn!r}. "
            "Pass a function of the batch and a torch.Generator."
        )

    def apply(state: TrainState, batch: Batch) -> Batch:
        generator = make_step_context(state, name).generator
        return map_microbatches(batch, lambda microbatch: fn(microbatch, generator))

    return Transform(name=name, grad=partial(change_batch, apply, name), uses_grad=False)


def change_batch(fn: Callable[[TrainState, Batch], Batch], name: str, inner: GradFn) -> GradFn:
    """Return ``inner`` with the batch of ``fn``, a function of the state and the batch on the model's device."""

    def apply(state: TrainState, batch: Batch) -> Batch:
        if isinstance(batch, FailedBatch):
            return batch
        try:
            after = fn(state, to_device(batch, state.device))
        except Exception as error:  # noqa: BLE001  # an error of the user's function; the step raises it on all ranks
            return FailedBatch(error)
        if after is None:
            return FailedBatch(ConfigError(f"on_batch: the function of {name!r} returned None. Return the new batch."))
        # Inside of a step the batch info was read already.
        return after if state._step_batch is not None else copy_batch_info(batch, after)

    def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        return inner(state, apply(state, batch), microbatch_size=microbatch_size)

    return grad_fn


# every, between


def _run_when(active: Callable[[Clock], bool], transform: Transform, *, of: Sequence[Duration]) -> Transform:
    """Apply ``transform`` only in steps that start from an ``active`` clock. The clock ticks after all transforms.

    ``of`` contains the durations that ``active`` uses. ``init`` refuses durations that the run cannot measure.
    """

    def gate_loss(wrap: LossWrapper) -> LossWrapper:
        return lambda inner, context: wrap(inner, context) if active(context.state.clock) else inner

    def gate_stage(wrap: Callable[[StepFn], StepFn]) -> Callable[[StepFn], StepFn]:
        def gated_wrap(inner: StepFn) -> StepFn:
            wrapped = wrap(inner)
            return lambda state, *args, **options: (wrapped if active(state.clock) else inner)(state, *args, **options)

        return gated_wrap

    def init(state: TrainState) -> TransformState:
        for duration in of:
            state.clock.reached(duration)
        return transform.init(state)

    # The clock decides in which steps a schedule is read, so schedules cannot be checked ahead.
    return replace(_wrap_stages(transform, gate_loss, gate_stage), init=init, hyperparameters=())


def _wrap_stages(
    transform: Transform,
    wrap_loss: Callable[[LossWrapper], LossWrapper],
    wrap_stage: Callable[[Callable[[StepFn], StepFn]], Callable[[StepFn], StepFn]],
) -> Transform:
    """Wrap the stages that ``transform`` has."""
    wrapped = replace(
        transform,
        loss=transform.loss and wrap_loss(transform.loss),
        grad=transform.grad and wrap_stage(transform.grad),
        grad_step=transform.grad_step and wrap_stage(transform.grad_step),
        update=transform.update and wrap_stage(transform.update),
    )
    stages = wrapped.loss, wrapped.grad, wrapped.grad_step, wrapped.update
    return replace(wrapped, _made_as=(state_key(transform), *stages))


# masked


class _ParamSubset(dict[str, Tensor]):
    """Subset of the parameters, with references to all parameters for the functions inside of the transform."""

    def __init__(self, subset: Params, whole: TrainState) -> None:
        super().__init__(subset)
        self.all_params, self.all_trainable = whole.params, whole._trainable


def _restrict(state: TrainState, subset: Params) -> TrainState:
    """Return ``state`` with ``subset`` in the place of all parameters."""
    trainable = {name: param for name, param in state._trainable.items() if name in subset}
    return replace(state, params=_ParamSubset(subset, state), _trainable=trainable)


def _make_selector(select: ParamFilter) -> Callable[[TrainState], dict[str, Tensor]]:
    """Make a function that returns the selected parameters of a state, and refuses an empty selection."""
    if callable(select):
        predicate = select
        return lambda state: _check_nonempty(
            {n: p for n, p in state.params.items() if predicate(n, p)}, state.params, "the predicate"
        )
    patterns = [select] if isinstance(select, str) else select
    if not isinstance(patterns, Sequence):
        raise ConfigError(
            "masked: select must be a pattern of names, a list of patterns, or a function (name, param) -> bool, "
            f"got {select!r}. "
            "Pass select='*.bias', for example."
        )
    matchers = {pattern: compile_patterns([pattern], caller="masked") for pattern in patterns}

    def select_by_name(state: TrainState) -> dict[str, Tensor]:
        params = state.params
        selected: dict[str, Tensor] = {}
        for pattern, matches in matchers.items():
            tied = {first for alias, first in state.aliases.items() if matches(alias)}
            by_pattern = {n: p for n, p in params.items() if matches(n) or n in tied}
            selected.update(_check_nonempty(by_pattern, params, f"the pattern {pattern!r}"))
        return _check_nonempty(selected, params, "an empty list of patterns")

    return select_by_name


def _check_nonempty(selected: dict[str, Tensor], params: Params, selector: str) -> dict[str, Tensor]:
    if not selected:
        raise ConfigError(
            f"masked: {selector} fits none of {len(params)} parameters (first: {next(iter(params))!r}). "
            "Print the names with model.named_parameters()."
        )
    return selected


def _restore_all_params(state: TrainState) -> TrainState:
    assert isinstance(state.params, _ParamSubset), "a masked transform must pass on the state of its argument"
    return replace(state, params=state.params.all_params, _trainable=state.params.all_trainable)
