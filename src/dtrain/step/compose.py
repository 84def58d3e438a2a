"""``compose_step``: a loss, a list of transforms, and the two halves of a step, made into one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dtrain.errors import ConfigError
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

    def init(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int = 0) -> TrainState:
        """The state at step 0.

        Args:
            model: sharded and materialized; a plain module works in one process.
            optimizer: built from this model's parameters, after sharding.
            seed: what the random streams of transforms are derived from.

        Mutates: what SIGTERM does to this process, until the end of ``init_dist``'s block: from now on there is something to
        save, and ``should_stop`` says when.

        Raises:
            ConfigError: parameters on the meta device, or an optimizer that holds others than the model's.
        """
        state = new_state(model, optimizer, seed=seed)
        state.shared.make_slices = self._slices
        return replace(state, slices=self._slices(state))

    def _slices(self, state: TrainState) -> dict[str, Slice]:
        return {t.name: t.init(state) for t in self.transforms}

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
    _check_parts(loss_fn, transforms, grad, update)
    names = [t.name for t in transforms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"compose_step: transform names must differ (they key slices and checkpoints), got {twice[0]!r} twice"
        )
    compute: GradFn = _with_loss(loss_fn, transforms, grad)
    apply: UpdateFn = update
    for transform in reversed(transforms):
        compute = transform.grad(compute) if transform.grad else compute
        apply = transform.update(apply) if transform.update else apply

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state.check_fresh("step")
        missing = [name for name in names if name not in state.slices]
        if missing:
            raise ConfigError(f"step: the state has no slice for {missing}; make it with this step's own init")
        try:
            state, metrics = compute(state, batch)
            state, metrics = apply(state, metrics)
        finally:  # those of an update that was skipped, or that raised, go too
            state.drop_gradients()
        return tick(state), metrics

    return Step(transforms=tuple(transforms), run=run)


def _check_parts(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep, update: UpdateFn) -> None:
    for name, function, shape in (
        ("loss_fn", loss_fn, "(model, batch) -> LossSum"),
        ("grad", grad, "(state, batch, *, loss_fn, microbatch_size) -> (state, metrics)"),
        ("update", update, "(state, metrics) -> (state, metrics)"),
    ):
        if not callable(function):
            raise ConfigError(
                f"compose_step: {name} must be a function {shape}, got {function!r}; "
                "as in compose_step(loss_fn, [dt.ema(0.999)])"
            )
    if isinstance(transforms, Transform) or not isinstance(transforms, Sequence):
        got = f"the Transform {transforms.name!r}" if isinstance(transforms, Transform) else repr(transforms)
        raise ConfigError(f"compose_step: transforms is a list, got {got}; as in compose_step(loss_fn, [dt.ema(0.999)])")
    for transform in transforms:
        check_transform(transform, "compose_step", "compose_step(loss_fn, [{}])")


def _with_loss(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    wrappers = [(t.name, t.loss) for t in reversed(transforms) if t.loss]

    def compute(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        loss = loss_fn
        for name, wrap in wrappers:
            loss = wrap(loss, context_for(state, name))
        sized = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        return grad(state, batch, loss_fn=loss, **sized)

    return compute
