"""``Transform``: an algorithm as a pair of wrappers around the two halves of a step.

A step is a ``GradFn`` (leaves the gradient in ``.grad``) followed by an ``UpdateFn`` (applies it). A transform wraps either,
or the loss, and owns one slice of the state. Skipping, repeating and retrying are calling ``inner`` zero, one or k times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from dtrain.dist.rng import generator
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Hyperparameter
from dtrain.state import TrainState
from dtrain.typing import Batch, LossFn, Metrics, TransformState


class GradStep(Protocol):
    """Computes gradients from a loss: ``microbatch_step`` and whatever takes its place."""

    def __call__(
        self, state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """Clear gradients, then leave that of the global weighted mean loss in ``.grad``; never step the optimizer."""
        ...


class GradFn(Protocol):
    """A ``GradStep`` with its loss bound. Idempotent: it may be called again for the same state and batch."""

    def __call__(self, state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        """Leave the unscaled gradient in ``.grad``."""
        ...


UpdateFn: TypeAlias = Callable[[TrainState, Metrics], tuple[TrainState, Metrics]]
"""Applies the gradient, or decides not to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepContext:
    """What a loss wrapper may know: the state about to be stepped, and a generator of its own.

    The generator is on the model's device and seeded by the run's seed, the transform's name, the step, and the
    data-parallel rank, so there is no generator state to save.
    """

    state: TrainState
    generator: torch.Generator


def empty_state(state: TrainState) -> TransformState:
    """The slice of a transform that keeps nothing."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """An algorithm: what it keeps, and what it wraps.

    Args:
        name: the key of its slice in the state and in checkpoints.
        init: the slice at the start of a run, plain nested dicts of tensors and numbers.
        loss: wraps the loss function; called once a step.
        grad: wraps the computation of gradients.
        grad_step: wraps the ``GradStep`` itself, around the loss that all ``loss`` wrappers have made and inside all ``grad``
            wrappers, wherever the transform is listed: for what nobody else is to see, such as the scale of a loss.
        update: wraps their application.
        uses_grad: whether ``grad`` or ``update`` reads or changes ``.grad``. False for one that works without it:
            ``optimizer_in_backward`` takes no other, since there a gradient is gone before the next one is there.
        read_only: it only looks: training is the same without it, and a checkpoint knows nothing of it, so that it may be there
            in one start of a run and not in the next. Its ``init`` may refuse the state, and keeps nothing.
        hyperparameters: numbers or schedules that it reads in every step. ``Step.init`` looks ahead along their schedules, so
            that a value which is not allowed is an error before the run and not in the middle of it.
    """

    name: str
    init: Callable[[TrainState], TransformState] = empty_state
    loss: Callable[[LossFn, StepContext], LossFn] | None = None
    grad: Callable[[GradFn], GradFn] | None = None
    grad_step: Callable[[GradStep], GradStep] | None = None
    update: Callable[[UpdateFn], UpdateFn] | None = None
    uses_grad: bool = True
    read_only: bool = False
    hyperparameters: tuple[Hyperparameter, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("_", "").isalnum():
            raise ConfigError(f"Transform: name must be letters, digits and underscores, got {self.name!r}")


def make_step_context(state: TrainState, name: str) -> StepContext:
    """The ``StepContext`` of the transform ``name`` for the step that ``state`` is about to make."""
    return StepContext(state=state, generator=generator(state.device, state.seed, name, state.step, state.spec.data_rank))


def check_transform(value: Any, caller: str, example: str) -> None:
    """Refuse what is no ``Transform``, and show the right code: ``example`` with a transform in place of ``{}``.

    Raises:
        ConfigError: ``value`` is a function that makes a transform and was not called, or something else.
    """
    if isinstance(value, Transform):
        return
    if callable(value) and not isinstance(value, type):
        name = getattr(value, "__name__", type(value).__name__)
        raise ConfigError(f"{caller}: got the function {name}, not what it makes; call it: {example.format(f'dt.{name}(...)')}")
    raise ConfigError(f"{caller}: needs a Transform, got {value!r}; as in {example.format('dt.transforms.ema(0.999)')}")
