"""``optimizer_in_backward``: the optimizer runs on each unit as soon as its gradient is there, so few gradients are there at once.

The two halves of a step are one here: backward applies what it computes. So the transforms that wrap the update are around
it, and see no gradient before or after. That is right for a learning rate or an average of parameters; what needs the whole
gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from dtrain.batch import BatchSpec
from dtrain.dtensor import is_dtensor, to_local
from dtrain.errors import ConfigError, StepError
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.compose import Step, check_step_parts, make_step, wrap_grad, wrap_update
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.microbatches import CountFn, SplitFn
from dtrain.step.optimizer import DelayedInterrupt, apply_gradients
from dtrain.transform import Transform
from dtrain.typing import Batch, LossFn, Metrics, WeightFn

_STATE_LOST = (
    "optimizer_in_backward: the optimizer had already run on a part of the parameters, so this step can be neither finished nor "
    "tried again; build the state anew and load the last checkpoint"
)


def optimizer_in_backward(
    loss_fn: LossFn,
    transforms: Sequence[Transform] = (),
    *,
    weight_fn: WeightFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    split: SplitFn | None = None,
    count: CountFn | None = None,
) -> Step:
    """A step like ``compose_step``'s, with the same result, that holds the gradients of one unit instead of all.

    In the backward of the last microbatch, a unit's gradient is applied and dropped as soon as it is reduced; in a plain model
    that goes parameter by parameter. It saves this rank's gradients, and what the optimizer makes of all of them at once: its
    ``foreach`` form takes their size once more. Under ``"replicate"`` and ``"shard_grad_op"`` a step takes no less than the
    gathered parameters, which make room for gradients as they go. With several microbatches, gradients that wait for the
    last one take their memory as ever (``accumulate="local"``: whole ones; ``"sharded"``: shards).

    Args:
        loss_fn: ``(model, microbatch) -> LossSum``.
        transforms: those that do without the gradient: ``scale_lr``, ``ema``, ``on_batch``, what wraps the loss, and any other
            that says ``sees_gradient=False``. The update that they wrap is the whole step, so they get no metrics before it.
        weight_fn: this rank's weight of a whole batch, known before its first backward: after it the gradient could not be
            divided any more. As in ``microbatch_step``, which also explains the other arguments.

    The optimizer must treat every parameter on its own, as torch's do (not LBFGS); its ``step``, and what is hooked to that,
    runs once per unit. Only when backward is over come parameters that this rank's samples did not reach, those left out of
    sharding, and units of which a forward was not followed by a backward.

    An error before backward leaves the state as it was. One that comes later (in a model's backward, in a peer, losses with
    another weight than was promised) leaves parameters of which some have changed: it says so in a note, and spends the state.

    Raises:
        ConfigError: no ``weight_fn``, a transform that needs the gradient, or what ``compose_step`` refuses; in a step, a model
            with tensor or context parallelism, or LBFGS.
        StepError: in a step, a unit whose gradient came in parts that could not be told apart.
    """
    check_step_parts("optimizer_in_backward", loss_fn, transforms, microbatch_step, apply_gradients)
    _check_transforms(transforms, weight_fn)
    grad = partial(microbatch_step, weight_fn=weight_fn, batch_spec=batch_spec, split=split, count=count)
    compute = wrap_grad(loss_fn, transforms, partial(grad, microbatch_size=microbatch_size))

    def whole(state: TrainState, batch: Batch, held: DelayedInterrupt) -> tuple[TrainState, Metrics]:
        held.begin()

        def update(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            return _compute_and_apply(state, metrics, lambda: compute(state, batch))

        return wrap_update(transforms, update)(state, {})

    return make_step(transforms, whole)


def _check_transforms(transforms: Sequence[Transform], weight_fn: WeightFn) -> None:
    if not callable(weight_fn):
        raise ConfigError(
            f"optimizer_in_backward: weight_fn must be a function (batch) -> weight, got {weight_fn!r}; the gradient is applied "
            "before the weight of the losses is known"
        )
    for transform in transforms:
        if transform.grad_step or (transform.uses_grad and (transform.grad or transform.update)):
            raise ConfigError(
                f"optimizer_in_backward: the transform {transform.name!r} may need the gradient, which is never whole here; use "
                "dt.compose_step, or leave it out (one that does without .grad says so: Transform(sees_gradient=False))"
            )


def _compute_and_apply(
    state: TrainState, metrics: Metrics, compute: Callable[[], tuple[TrainState, Metrics]]
) -> tuple[TrainState, Metrics]:
    if state.spec.ranks_per_batch > 1:
        raise ConfigError("optimizer_in_backward: not with tensor or context parallelism; use dt.compose_step")
    if isinstance(state.optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer_in_backward: LBFGS looks at all parameters together; use another optimizer")
    done: set[int] = set()
    with _invalidate_state_on_error(state):
        with grad_sync_of(state.model).on_grad_ready(list(state.params.values()), partial(_apply, state, done)):
            state, found = compute()
        left = [param for param in state.params.values() if param.grad is not None]
        grad_sync_of(state.model).reshard()  # as apply_gradients does
        for kind in (True, False):  # an optimizer's foreach form takes no mix
            _apply(state, done, [param for param in left if is_dtensor(param) == kind])
    return state._next(), {**metrics, **found}


def _apply(state: TrainState, done: set[int], params: Sequence[Tensor]) -> None:
    """Run the optimizer on ``params`` alone, and drop their gradients.

    Mutates: ``params``, their optimizer state and ``.grad``, ``done``.
    """
    if not done.isdisjoint(map(id, params)):
        raise StepError(
            "optimizer_in_backward: a parameter got a further gradient after the optimizer had run on it: it is used outside of the "
            "unit that holds it; use dt.compose_step"
        )
    if not params:
        return
    done.update(map(id, params))
    state.run_context.partially_stepped = True
    grads = [to_local(param.grad) for param in params if param.grad is not None]
    with _restrict_optimizer_to(state.optimizer, {id(param) for param in params}) as some:
        if some:
            state.optimizer.step()
    for param, grad in zip(params, grads, strict=True):
        if grad.is_cuda:  # FSDP2 may have made it in another stream, which would use its memory again too early
            grad.record_stream(torch.cuda.current_stream(grad.device))
        param.grad = None


@contextmanager
def _restrict_optimizer_to(optimizer: torch.optim.Optimizer, chosen: set[int]) -> Iterator[bool]:
    """A context in which ``optimizer`` has the ``chosen`` parameters only; whether these are any.

    Mutates: ``optimizer.param_groups`` and the ``params`` of each, while it lasts.
    """
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


@contextmanager
def _invalidate_state_on_error(state: TrainState) -> Iterator[None]:
    """A context of one step: when an error ends it after the optimizer has run, nobody shall go on with ``state``."""
    state.run_context.partially_stepped = False
    try:
        yield
    except BaseException as error:
        if state.run_context.partially_stepped:
            state.run_context.interrupted_write = _STATE_LOST
            error.add_note(_STATE_LOST)
        raise
    finally:
        state.run_context.partially_stepped = False
