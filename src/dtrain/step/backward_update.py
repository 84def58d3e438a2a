"""Run the optimizer on each unit's gradient during backward, so that few gradients are in memory at once.

Backward and update are one call here. Transforms that wrap the update wrap the whole step, and see no gradient before or after.
This is correct for a learning rate or an average of parameters. Transforms that need the whole gradient are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from dtrain.data.batch import BatchSpec
from dtrain.device import use_on_current_stream
from dtrain.dist.context import current_context
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.errors import ConfigError, StepError
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.params import check_no_hooks
from dtrain.state import TrainState
from dtrain.step.compose import Step, check_step_parts, wrap_grad, wrap_update
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients
from dtrain.step.optimizer_state import check_update
from dtrain.step.shard_update import step_optimizer
from dtrain.step.transform import Transform
from dtrain.typing import Batch, LossFn, Metrics

_STATE_LOST = (
    "optimizer_in_backward: the optimizer had already run on some of the parameters, so this step can be neither finished nor "
    "repeated. Build a new state and load the last checkpoint."
)


def optimizer_in_backward(
    loss_fn: LossFn,
    transforms: Sequence[Transform] = (),
    *,
    batch_spec: BatchSpec,
    microbatch_size: int | None = None,
) -> Step:
    """Compose a step like ``compose_step``, with the same result, that keeps the gradients of one unit instead of all.

    In the backward of the last microbatch, a unit's gradient is applied and dropped after its reduction; in a plain model
    this happens per parameter. The step saves the memory of this rank's gradients, and of the optimizer's temporary tensors,
    whose ``foreach`` form needs the size of the gradients once more. Under ``"shard_grad_op"`` the peak is at least the
    gathered parameters, which are freed as gradients arrive. With several microbatches, gradients that wait for the last
    microbatch use memory as usual (``accumulate="local"``: full gradients; ``"sharded"``: shards).

    The optimizer must update every parameter independently, as torch's optimizers do. Its ``step`` and the hooks
    of ``step`` run once per unit. Three kinds are updated after backward: parameters that this rank's samples did not
    reach, ignored parameters, and units with a forward but no backward.

    An error before backward leaves the state unchanged. A later error (in the model's backward, on another rank, or a loss with
    another weight than declared) leaves some parameters updated. The error has a note that says so, and the state is spent.

    Args:
        loss_fn: ``(model, microbatch) -> LossSum``.
        transforms: transforms that do not read the gradient: ``scale_lr``, ``ema``, ``on_batch``, transforms that wrap the
            loss, and any transform with ``uses_grad=False``. They wrap the whole step as its update, without earlier metrics.
        batch_spec: description of the batch. Its ``weight`` is required before the first backward, because the gradient cannot
            be divided afterwards.
        microbatch_size: as in ``microbatch_step``.

    Example:
        spec = dt.batch_spec(weight=lambda batch: len(batch["labels"]))
        step = dt.step.optimizer_in_backward(loss_fn, batch_spec=spec, microbatch_size=8)
        state = step.init(model, optimizer)
        for batch in loader:
            state, metrics = step(state, batch)

    Raises:
        ConfigError: a ``batch_spec`` without ``weight``, a transform that needs the gradient, or arguments that
            ``compose_step`` refuses; in a step, a model with tensor or context parallelism, or a gradient hook of a parameter.
        StepError: in a step, a unit whose gradient arrived in several parts.
    """
    check_step_parts("optimizer_in_backward", loss_fn, transforms, microbatch_step, apply_gradients)
    _check_transforms(transforms, batch_spec)
    grad = partial(microbatch_step, batch_spec=batch_spec, microbatch_size=microbatch_size)
    compute = wrap_grad(loss_fn, transforms, grad)

    def update_all(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            return _compute_and_apply(state, metrics, lambda: compute(state, batch))

        return wrap_update(transforms, update_fn)(state, {})

    return Step(
        transforms=tuple(transforms),
        grad=update_all,
        update=lambda state, metrics: (state, metrics),
        updates_in_backward=True,
    )


def _check_transforms(transforms: Sequence[Transform], batch_spec: BatchSpec) -> None:
    if not isinstance(batch_spec, BatchSpec) or batch_spec.weight is None:
        raise ConfigError(
            f"optimizer_in_backward: batch_spec must have a weight, got {batch_spec!r}. Pass "
            "dt.batch_spec(weight=...), because the gradient is applied before the weight of the losses is known."
        )
    for transform in transforms:
        if transform.grad_step or (transform.uses_grad and (transform.grad or transform.update)):
            raise ConfigError(
                f"optimizer_in_backward: the transform {transform.name!r} may need the gradient, which is never complete here. "
                "Use dt.compose_step, or leave it out. A transform that does not read .grad sets Transform(uses_grad=False)."
            )


def _compute_and_apply(
    state: TrainState, metrics: Metrics, compute: Callable[[], tuple[TrainState, Metrics]]
) -> tuple[TrainState, Metrics]:
    if state.spec.ranks_per_batch > 1:
        raise ConfigError("optimizer_in_backward: tensor and context parallelism are not supported. Use dt.compose_step.")
    check_no_hooks(state.params, "optimizer_in_backward")
    done: set[int] = set()
    with _invalidate_state_on_error(state, done):
        with grad_sync_of(state.model).on_grad_ready(list(state.params.values()), partial(_apply, state, done)):
            state, step_metrics = compute()
        remaining = [param for param in state.params.values() if param.grad is not None]
        # A forward outside of the step left parameters unsharded, as in apply_gradients.
        grad_sync_of(state.model).reshard()
        # The foreach form of an optimizer accepts no mix of DTensors and plain tensors.
        for kind in (True, False):
            _apply(state, done, [param for param in remaining if is_dtensor(param) == kind])
        if not state._run_context.optimizer_checked:
            check_update(state, lambda: None, caller="optimizer_in_backward")
    return state._next(), {**metrics, **step_metrics}


def _apply(state: TrainState, done: set[int], params: Sequence[Tensor]) -> None:
    """Run the optimizer on ``params`` alone, and drop their gradients.

    Mutates: ``params``, their optimizer state and ``.grad``, ``done``.
    """
    if not done.isdisjoint(map(id, params)):
        raise StepError(
            "optimizer_in_backward: a parameter got a second gradient after the optimizer had run on it, because it is used "
            "outside of its unit. Use dt.compose_step."
        )
    if not params:
        return
    done.update(map(id, params))
    if (recorder := current_context().recorder) is not None:
        recorder.update_begins(state, params)
    grads = [to_local(param.grad) for param in params if param.grad is not None]
    with _restrict_optimizer_to(state.optimizer, {id(param) for param in params}) as nonempty:
        if nonempty:
            step_optimizer(state.optimizer)
    if recorder is not None:
        recorder.update_ends()
    for param, grad in zip(params, grads, strict=True):
        # FSDP2 may have allocated the gradient in another stream, which would reuse the memory too early.
        use_on_current_stream(grad)
        param.grad = None


@contextmanager
def _restrict_optimizer_to(optimizer: torch.optim.Optimizer, chosen: set[int]) -> Iterator[bool]:
    """Restrict ``optimizer`` to the ``chosen`` parameters inside a context; yield True if the optimizer has any of them.

    Mutates: ``optimizer.param_groups`` and the ``params`` of each group, inside the context.
    """
    groups = optimizer.param_groups
    all_params = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = params


@contextmanager
def _invalidate_state_on_error(state: TrainState, done: set[int]) -> Iterator[None]:
    """Spend ``state`` if an error ends the context after the optimizer has run on some parameters, ``done``."""
    try:
        yield
    except BaseException as error:
        if done:
            state._run_context.interrupted_write = _STATE_LOST
            error.add_note(_STATE_LOST)
        raise
