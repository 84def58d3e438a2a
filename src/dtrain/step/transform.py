"""Define ``Transform``: a training method as wrappers around the loss, the gradient and the update of a step.

A step is a ``GradFn`` (leaves the gradient in ``.grad``) followed by an ``UpdateFn`` (applies the gradient). A transform wraps
some of these functions and owns a state. Skipping, repeating and retrying are zero, one or k calls of ``inner``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from dtrain.arguments import explain_fields
from dtrain.dist.dtensor import from_local_like, shard_box, to_local
from dtrain.dist.rng import derive_seed, generator
from dtrain.errors import ConfigError
from dtrain.lazy_imports import public_paths
from dtrain.schedules.hyperparameters import Hyperparameter
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


StageFn = TypeVar("StageFn")
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


@explain_fields
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
            resumed run may add or drop the transform. Its ``init`` may refuse the state. The gradients that it reads may be
            copies.
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
    # The name and the stages of the construction: ``dataclasses.replace`` carries both over. See ``state_key``.
    _made_as: tuple[object, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("_", "").isalnum():
            raise ConfigError(
                f"Transform: name must be letters, digits and underscores, got {self.name!r}. Write it as a Python name."
            )
        if self._made_as is None:
            object.__setattr__(self, "_made_as", (self.name, *_stages(self)))


def _stages(transform: Transform) -> tuple[object, ...]:
    return transform.loss, transform.grad, transform.grad_step, transform.update


def state_key(transform: Transform) -> str:
    """Return the name under which the functions of ``transform`` read its state.

    The name differs from ``transform.name`` after ``dataclasses.replace(transform, name=...)``, which keeps the functions.
    """
    assert transform._made_as is not None, "set after construction"
    key, *stages = transform._made_as
    same = any(stages) and all(now is before for now, before in zip(_stages(transform), stages, strict=True))
    return str(key) if same else transform.name


def explain_listed_once(transform: Transform) -> str:
    """Return advice for a transform that a step lists only once, under its own name; "" for all other transforms."""
    prefix = transform.name.partition("_")[0]
    if prefix in ("scale", "set") and getattr(transform.update, "__module__", "").startswith("dtrain."):
        return f"Give {transform.name} one schedule, the product of the factors: lambda step: warmup(step) * decay(step)."
    if transform.grad_step is not None or transform.name in ("auto_microbatch", "local_sgd", "diloco"):
        return f"List {transform.name} once, under its own name: it acts on the whole step."
    return ""


@dataclass(frozen=True, slots=True)
class BeforeDivision(Generic[StageFn]):
    """Wrapper of a ``GradFn`` or an ``UpdateFn`` that is right for gradients that ``TrainState._grad_divisor`` still divides.

    A step finds the other wrappers of ``Transform(uses_grad=True)``, and divides before the first of them.
    """

    wrap: Callable[[StageFn], StageFn]

    def __call__(self, inner: StageFn) -> StageFn:
        return self.wrap(inner)


def needs_division(transform: Transform, wrapper: object) -> bool:
    """Return True if ``wrapper``, a stage of ``transform``, may read or change ``.grad`` and does not know of a divisor."""
    return wrapper is not None and transform.uses_grad and not isinstance(wrapper, BeforeDivision)


def make_step_context(state: TrainState, name: str) -> StepContext:
    """Make the ``StepContext`` of the transform ``name`` for the next step of ``state``."""
    return StepContext(state=state, generator=generator(state.device, state.seed, name, state.step, state.spec.data_rank))


# Elements that are drawn at once. A rank draws the rows of its shard, rounded up to a multiple of such blocks.
_BLOCK_NUMEL = 2**16


def random_like(state: TrainState, tensor: Tensor, *names: int | str, sample: Callable[..., Tensor] = torch.randn) -> Tensor:
    """Draw a random tensor placed like ``tensor``, for a ``grad`` or ``update`` wrapper.

    The numbers are those of one draw of the whole tensor, of which each rank keeps its shard. So replicas draw equal numbers,
    and the numbers do not depend on strategy and number of ranks. They depend only on the run's seed, the step and ``names``,
    so no generator state is saved. A second call with the same arguments returns the same numbers. CPU and GPU draw different
    numbers.

    Args:
        state: state of the step.
        tensor: parameter, gradient or other tensor of any shape, plain or DTensor; its values are not read.
        names: names of the random stream, at least one; usually the transform's and the parameter's.
        sample: function that draws, called with (size, generator=, dtype=, device=): ``torch.randn``, ``torch.rand``,
            ``partial(torch.randint, 0, 2)``.

    Returns:
        A new tensor of the shape, dtype, device and placement of ``tensor``.

    Collective: none. Host sync: none.

    Example:
        def update(inner):
            def noisy(state, metrics):
                for name, param in state.params.items():
                    if param.grad is not None:
                        param.grad.add_(dt.step.random_like(state, param.grad, "noise", name), alpha=0.1)
                return inner(state, metrics)
            return noisy

        step = dt.compose_step(loss_fn, [dt.Transform(name="noise", update=update)])

    Raises:
        ConfigError: no ``names``.
    """
    if not names:
        raise ConfigError(
            "random_like: names must have at least one name, got none. Pass the names of the transform and of the parameter."
        )
    local, box = to_local(tensor.detach()), shard_box(tensor)
    shape, (offset, *other_offsets), (rows, *other_sizes) = box.shape or (1,), box.offset or (0,), box.size or (1,)
    drawn = torch.empty((rows, *other_sizes), dtype=local.dtype, device=local.device)
    if drawn.numel() == 0:
        return from_local_like(tensor, drawn.view(local.shape))
    rng = torch.Generator(device=local.device)
    row_numel = math.prod(shape[1:])
    block = max(1, _BLOCK_NUMEL // row_numel)
    columns = tuple(slice(start, start + size) for start, size in zip(other_offsets, other_sizes, strict=True))
    for begin in range(offset - offset % block, offset + rows, block):
        end = min(begin + block, shape[0])
        rng.manual_seed(derive_seed(state.seed, *names, state.step, begin))
        numbers = sample((end - begin, *shape[1:]), generator=rng, dtype=local.dtype, device=local.device)
        first, last = max(begin, offset), min(end, offset + rows)
        drawn[first - offset : last - offset] = numbers[(slice(first - begin, last - begin), *columns)]
    return from_local_like(tensor, drawn.view(local.shape))


def check_transform(value: Any, caller: str, example: str) -> None:
    """Refuse a value that is not a ``Transform``, and show the right code: ``example`` with a transform in place of ``{}``.

    Raises:
        ConfigError: ``value`` is a function that makes a transform and was not called, or another object.
    """
    if isinstance(value, Transform):
        return
    if callable(value) and not isinstance(value, type):
        name = getattr(value, "__name__", type(value).__name__)
        if "Transform" in str(getattr(value, "__annotations__", {}).get("return")):
            paths = [path for paths in public_paths().values() for path in paths if path.endswith(f".{name}")]
            call = example.format(f"{paths[-1] if paths else name}(...)")
            raise ConfigError(f"{caller}: got the function {name} instead of its result. Use {call}.")
        if name in _CLIPPING:
            raise ConfigError(f"{caller}: needs a Transform, got the function {name}. Use {example.format(_CLIPPING[name])}.")
        raise ConfigError(
            f"{caller}: needs a Transform, got the function {name}. Make one with dt.Transform(name={name!r}, update=...), or "
            f"take one of dt.transforms: {example.format('dt.transforms.ema(0.999)')}."
        )
    raise ConfigError(f"{caller}: needs a Transform, got {value!r}. Use {example.format('dt.transforms.ema(0.999)')}.")


_CLIPPING = {
    "clip_grad_norm_": "dt.transforms.clip_by_norm(1.0)",
    "clip_grad_value_": "dt.transforms.clip_by_value(1.0)",
    "clip_grad_adaptive_": "dt.transforms.adaptive_clip(0.01)",
}
