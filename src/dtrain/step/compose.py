"""``compose_step``: a loss, a list of transforms, and the two halves of a step, made into one function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dtrain import spans
from dtrain.dist.batch_info import TrackedLoader
from dtrain.dist.init import get_dist_info
from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.lookahead import check_over_run
from dtrain.shard.compile import time_compilation
from dtrain.state import TrainState, check_state, init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import DelayedInterrupt, apply_gradients, tick
from dtrain.step.step_clock import begin_step
from dtrain.transform import GradFn, GradStep, Transform, UpdateFn, check_transform, make_step_context
from dtrain.typing import Batch, LossFn, Metrics, TransformState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Step:
    """A pair of functions: ``init`` makes the first state, calling it makes the next one from a batch.

    Made by ``compose_step``. ``step(state, batch)`` returns the next state and the step's metrics (local sums).
    """

    transforms: tuple[Transform, ...]
    run: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

    def init(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int = 0,
        run_length: RunLength | None = None,
        partial: bool = False,
        allow_equal_batches: bool = False,
        loader: TrackedLoader | None = None,
    ) -> TrainState:
        """Make the state at step 0.

        Args:
            model: sharded and materialized; a plain module works in one process.
            optimizer: built from this model's parameters, after sharding.
            seed: start of the random streams of transforms.
            run_length: length of the run, for intervals that are a share of it (``"0.1dur"``): ``loader.run_length("3ep")``.
            partial: if True, the optimizer may hold only some of the trainable parameters, because another state trains the
                rest. Parameters that nobody trains are frozen with ``requires_grad_(False)`` instead.
            allow_equal_batches: if True, data-parallel ranks may train on equal batches; if False, a warning says that they do.
            loader: the loader whose epochs the clock counts. Batches of a loader know their place themselves; name the loader
                if they cannot: a step on slices or copies of a batch (minibatches of a rollout), or on batches of two loaders.
                The place is then that of the batch that the loader handed out last. It is in no checkpoint.

        Mutates: what SIGTERM does to this process, until the end of ``init_dist``'s block: from now on there is something to
        save, and ``should_stop`` says when.

        Raises:
            ConfigError: something else in place of the model or the optimizer; parameters on the meta device; an optimizer that
                holds others than the model's, or not all that are trainable; a rank of a launcher without ``init_dist``. With
                ``run_length``, a schedule of a transform whose value is not allowed in some step of the run; or a ``loader``
                of another library.

        Warns: UserWarning, on rank 0, without ``run_length``: a schedule whose value is not allowed once a run is long enough.
        """
        time_compilation()
        state = init_state(model, optimizer, seed=seed, run=run_length, partial=partial, loader=loader)
        _check_schedules(self.transforms, run_length)
        state.run_context.init_transform_states = self._init_transform_states
        if allow_equal_batches:
            state.run_context.equal_batch_check.steps_left = 0
        return state._replace(transform_states=self._init_transform_states(state))

    def _init_transform_states(self, state: TrainState) -> dict[str, TransformState]:
        made = [(t, t.init(state)) for t in self.transforms]
        return {t.name: content for t, content in made if not t.read_only}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step over ``batch``: gradients, update, and one tick of the clock. Spends ``state``.

        It leaves no gradient behind, also when a transform skips the update, or when it raises.

        Ctrl-C waits for the end of an update that has begun; see ``TrainState.newest``.

        Raises:
            StaleStateError: ``state`` was stepped already.
            ConfigError: the state was made by the ``init`` of another step, or is none.
        """
        return self.run(state, batch)

    def __repr__(self) -> str:
        return f"Step({', '.join(t.name for t in self.transforms)})"


def _check_schedules(transforms: Sequence[Transform], run_length: RunLength | None) -> None:
    for hyper in (hyper for transform in transforms for hyper in transform.hyperparameters):
        warning = check_over_run(hyper, run_length)
        if warning is not None and get_dist_info().rank == 0:
            warnings.warn(warning, stacklevel=3)


def compose_step(
    loss_fn: LossFn,
    transforms: Sequence[Transform] = (),
    *,
    grad: GradStep = microbatch_step,
    update: UpdateFn = apply_gradients,
) -> Step:
    """One training step from its parts. The first transform listed is outermost.

    Args:
        loss_fn: ``(model, microbatch) -> LossSum``.
        transforms: algorithms, each name once.
        grad: computes gradients; a fixed size is ``partial(microbatch_step, microbatch_size=8)``.
        update: applies them.

    The clock ticks exactly once per call, however often a transform calls what it wraps.

    Raises:
        ConfigError: something else in place of a function or a transform, or two transforms with one name.
    """
    check_step_parts("compose_step", loss_fn, transforms, grad, update)
    compute, apply = wrap_grad(loss_fn, transforms, grad), wrap_update(transforms, update)

    def halves(state: TrainState, batch: Batch, held: DelayedInterrupt) -> tuple[TrainState, Metrics]:
        state, metrics = compute(state, batch)
        held.begin()
        return apply(state, metrics)

    return make_step(transforms, halves)


class StepBody(Protocol):
    """Compute gradients and apply them."""

    def __call__(self, state: TrainState, batch: Batch, held: DelayedInterrupt) -> tuple[TrainState, Metrics]:
        """Return the state before its tick, and call ``held.begin`` before parameters change."""
        ...


def make_step(transforms: Sequence[Transform], body: StepBody) -> Step:
    """``body``, which compute gradients and apply them, as a ``Step``: with its checks, and one tick of the clock."""
    names = [t.name for t in transforms if not t.read_only]

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _check_call(state, batch)
        state._check_not_stale("step")
        missing = [name for name in names if name not in state.transform_states]
        if missing:
            raise ConfigError(f"step: the state has no slice for {missing}; make it with this step's own init")
        with DelayedInterrupt() as held:
            spans.begin("step", 0)
            try:
                state, metrics = body(begin_step(state, batch), batch, held)
            finally:  # those of an update that was skipped, or that raised, go too
                state.drop_gradients()
                spans.end("step")
            return tick(state), metrics

    return Step(transforms=tuple(transforms), run=run)


def _check_call(state: object, batch: object) -> None:
    if not isinstance(state, TrainState) and isinstance(batch, TrainState):
        raise ConfigError(
            f"step: got ({type(state).__name__}, TrainState), the batch before the state; swap them: "
            "`state, metrics = step(state, batch)`"
        )
    check_state(state, "step", "state, metrics = step(state, batch)")


def wrap_grad(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    """``grad`` with its loss, in the transforms' wrappers of both; the first one listed is outermost."""
    for transform in reversed(transforms):
        grad = transform.grad_step(grad) if transform.grad_step else grad
    compute = _bind_loss(loss_fn, transforms, grad)
    for transform in reversed(transforms):
        compute = transform.grad(compute) if transform.grad else compute
    return compute


def wrap_update(transforms: Sequence[Transform], update: UpdateFn) -> UpdateFn:
    """``update`` in the transforms' wrappers; the first one listed is outermost."""
    for transform in reversed(transforms):
        update = transform.update(update) if transform.update else update
    return update


def check_step_parts(caller: str, loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep, update: UpdateFn) -> None:
    """Refuse what is no part of a step.

    Raises:
        ConfigError: something else in place of a function or a transform, or two transforms with one name.
    """
    for name, function, shape in (
        ("loss_fn", loss_fn, "(model, batch) -> LossSum"),
        ("grad", grad, "(state, batch, *, loss_fn, microbatch_size) -> (state, metrics)"),
        ("update", update, "(state, metrics) -> (state, metrics)"),
    ):
        if not callable(function):
            raise ConfigError(
                f"{caller}: {name} must be a function {shape}, got {function!r}; as in {caller}(loss_fn, [dt.transforms.ema(0.999)])"
            )
    if isinstance(transforms, Transform) or not isinstance(transforms, Sequence):
        got = f"the Transform {transforms.name!r}" if isinstance(transforms, Transform) else repr(transforms)
        raise ConfigError(f"{caller}: transforms is a list, got {got}; as in {caller}(loss_fn, [dt.transforms.ema(0.999)])")
    for transform in transforms:
        check_transform(transform, caller, f"{caller}(loss_fn, [{{}}])")
    names = [t.name for t in transforms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{caller}: transform names must differ (they key slices and checkpoints), got {twice[0]!r} twice")


def _bind_loss(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    wrappers = [(t.name, t.loss) for t in reversed(transforms) if t.loss]

    def compute(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        loss = loss_fn
        for name, wrap in wrappers:
            loss = wrap(loss, make_step_context(state, name))
        sized = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        return grad(state, batch, loss_fn=loss, **sized)

    return compute
