"""Define ``Transform``: a training method as wrappers around the loss, the gradient and the update of a step.

A step is a ``GradFn`` (leaves the gradient in ``.grad``) followed by an ``UpdateFn`` (applies the gradient). A transform wraps
some of these functions and owns a state. Skipping, repeating and retrying are zero, one or k calls of ``inner``.
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
    """Function that computes gradients from a loss: ``microbatch_step``, or a replacement."""

    def __call__(
        self, state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """Clear gradients, then leave the gradient of the global weighted mean loss in ``.grad``. Never step the optimizer."""
        ...


class GradFn(Protocol):
    """``GradStep`` with its loss bound. Idempotent: a transform may call it again for the same state and batch."""

    def __call__(self, state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        """Leave the unscaled gradient in ``.grad``."""
        ...


UpdateFn: TypeAlias = Callable[[TrainState, Metrics], tuple[TrainState, Metrics]]
"""Function that applies the gradient, or skips the update."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepContext:
    """Context of a loss wrapper: the state at the start of the step, and a generator.

    The generator is on the model's device. Its seed depends on the run's seed, the transform's name, the step and the
    data-parallel rank, so no generator state is saved.
    """

    state: TrainState
    generator: torch.Generator


def empty_state(state: TrainState) -> TransformState:
    """Return the state of a transform without state."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Training method, defined by its state and the functions that it wraps.

    Args:
        name: key of the transform's state in ``TrainState`` and in checkpoints.
        init: function that makes the state at the start of a run: plain nested dicts of tensors and numbers.
        loss: wrapper of the loss function, called once a step.
        grad: wrapper of the ``GradFn``.
        grad_step: wrapper of the ``GradStep``, around the loss of all ``loss`` wrappers and inside all ``grad`` wrappers,
            regardless of the order of transforms. For effects that other transforms must not see, such as loss scaling.
        update: wrapper of the ``UpdateFn``.
        uses_grad: if True, ``grad`` or ``update`` reads or changes ``.grad``. ``optimizer_in_backward`` takes only transforms
            with False, because each gradient is freed before the next gradient is computed.
        read_only: if True, the transform only observes and keeps no state. Training and checkpoints do not depend on it, so a
            resumed run may add or drop the transform. Its ``init`` may refuse the state.
        hyperparameters: numbers or schedules that the transform reads in every step. ``Step.init`` evaluates the schedules
            ahead, so that an invalid value raises before the run.

    Example:
        def update(inner):
            def update_fn(state, metrics):
                for param in state.params.values():
                    param.grad.sign_()
                return inner(state, metrics)
            return update_fn

        step = dt.compose_step(loss_fn, [dt.Transform(name="sign_gradient", update=update)])
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
            raise ConfigError(
                f"Transform: name must be letters, digits and underscores, got {self.name!r}. Write it as a Python name."
            )


def make_step_context(state: TrainState, name: str) -> StepContext:
    """Make the ``StepContext`` of the transform ``name`` for the next step of ``state``."""
    return StepContext(state=state, generator=generator(state.device, state.seed, name, state.step, state.spec.data_rank))


def check_transform(value: Any, caller: str, example: str) -> None:
    """Refuse a value that is not a ``Transform``, and show the right code: ``example`` with a transform in place of ``{}``.

    Raises:
        ConfigError: ``value`` is a function that makes a transform and was not called, or another object.
    """
    if isinstance(value, Transform):
        return
    if callable(value) and not isinstance(value, type):
        name = getattr(value, "__name__", type(value).__name__)
        door = "dt.monitors" if getattr(value, "__module__", "").startswith("dtrain.monitors") else "dt.transforms"
        call = example.format(f"{door}.{name}(...)")
        raise ConfigError(f"{caller}: got the function {name} instead of its result. Use {call}.")
    raise ConfigError(f"{caller}: needs a Transform, got {value!r}. Use {example.format('dt.transforms.ema(0.999)')}.")
