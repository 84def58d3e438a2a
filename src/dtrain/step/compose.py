"""``compose_step``: a loss, a list of transforms, and the two halves of a step, made into one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dtrain import spans
from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.shard.compile import watch_compiling
from dtrain.state import TrainState, new_state
from dtrain.step.microbatch import microbatch_step
from dtrain.step.optimizer import apply_gradients, tick
from dtrain.transform import GradFn, GradStep, Transform, UpdateFn, check_transform, context_for
from dtrain.types import Batch, LossFn, Metrics, Slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Step:
    """A pair of functions: ``init`` makes the first state, calling it makes the next one from a batch.

    Made by ``compose_step``. ``step(state, batch)`` returns the next state and the step's metrics (local sums).
    """

    transforms: tuple[Transform, ...]
    run: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

    def init(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0, run: RunLength | None = None
    ) -> TrainState:
        """The state at step 0.

        Args:
            model: sharded and materialized; a plain module works in one process.
            optimizer: built from this model's parameters, after sharding.
            seed: what the random streams of transforms are derived from.
            run: how long the run is to be, for intervals that are a share of it (``"0.1dur"``): ``loader.run_length("3ep")``.

        Mutates: what SIGTERM does to this process, until the end of ``init_dist``'s block: from now on there is something to
        save, and ``should_stop`` says when.

        Raises:
            ConfigError: parameters on the meta device, or an optimizer that holds others than the model's.
        """
        watch_compiling()
        state = new_state(model, optimizer, seed=seed, run=run)
        state.shared.make_slices = self._slices
        return replace(state, slices=self._slices(state))

    def _slices(self, state: TrainState) -> dict[str, Slice]:
        made = [(t, t.init(state)) for t in self.transforms]
        return {t.name: content for t, content in made if not t.observes}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step over ``batch``: gradients, update, and one tick of the clock. Spends ``state``.

        It leaves no gradient behind, also when a transform skips the update, or when it raises.

        Raises:
            StaleStateError: ``state`` was stepped already.
            ConfigError: the state was made by the ``init`` of another step.
        """
        return self.run(state, batch)

    def __repr__(self) -> str:
        return f"Step({', '.join(t.name for t in self.transforms)})"


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
    check_parts("compose_step", loss_fn, transforms, grad, update)
    compute, apply = wrapped_grad(loss_fn, transforms, grad), wrapped_update(transforms, update)

    def halves(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = compute(state, batch)
        return apply(state, metrics)

    return step_of(transforms, halves)


def step_of(transforms: Sequence[Transform], halves: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]) -> Step:
    """``halves``, which compute gradients and apply them, as a ``Step``: with its checks, and one tick of the clock."""
    names = [t.name for t in transforms if not t.observes]

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state.check_fresh("step")
        missing = [name for name in names if name not in state.slices]
        if missing:
            raise ConfigError(f"step: the state has no slice for {missing}; make it with this step's own init")
        spans.begin("step", 0)
        try:
            state, metrics = halves(state, batch)
        finally:  # those of an update that was skipped, or that raised, go too
            state.drop_gradients()
            spans.end("step")
        return tick(state), metrics

    return Step(transforms=tuple(transforms), run=run)


def wrapped_grad(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    """``grad`` with its loss, in the transforms' wrappers of both; the first one listed is outermost."""
    for transform in reversed(transforms):
        grad = transform.grad_step(grad) if transform.grad_step else grad
    compute = _with_loss(loss_fn, transforms, grad)
    for transform in reversed(transforms):
        compute = transform.grad(compute) if transform.grad else compute
    return compute


def wrapped_update(transforms: Sequence[Transform], update: UpdateFn) -> UpdateFn:
    """``update`` in the transforms' wrappers; the first one listed is outermost."""
    for transform in reversed(transforms):
        update = transform.update(update) if transform.update else update
    return update


def check_parts(where: str, loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep, update: UpdateFn) -> None:
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
                f"{where}: {name} must be a function {shape}, got {function!r}; as in {where}(loss_fn, [dt.ema(0.999)])"
            )
    if isinstance(transforms, Transform) or not isinstance(transforms, Sequence):
        got = f"the Transform {transforms.name!r}" if isinstance(transforms, Transform) else repr(transforms)
        raise ConfigError(f"{where}: transforms is a list, got {got}; as in {where}(loss_fn, [dt.ema(0.999)])")
    for transform in transforms:
        check_transform(transform, where, f"{where}(loss_fn, [{{}}])")
    names = [t.name for t in transforms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: transform names must differ (they key slices and checkpoints), got {twice[0]!r} twice")


def _with_loss(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    wrappers = [(t.name, t.loss) for t in reversed(transforms) if t.loss]

    def compute(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        loss = loss_fn
        for name, wrap in wrappers:
            loss = wrap(loss, context_for(state, name))
        sized = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        return grad(state, batch, loss_fn=loss, **sized)

    return compute
