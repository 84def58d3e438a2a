"""Applying gradients: clipping, the optimizer's step, the tick of the clock, the learning rate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dtrain import spans
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError, StepError
from dtrain.shard.reduction import reduction_of
from dtrain.state import TrainState
from dtrain.step.finite import all_finite, broken_here
from dtrain.tensors import global_norm, scale_
from dtrain.types import Metrics, Params, as_metric


def clip_grad_norm_(params: Params, max_norm: float, *, eps: float = 1e-6) -> Tensor:
    """Scale gradients in place so that their global L2 norm is at most ``max_norm``.

    Args:
        params: parameters by name, plain or DTensor, any shape; those with ``grad is None`` are left out.
        max_norm: largest norm kept, > 0.
        eps: added to the norm in the quotient.

    Returns:
        Norm before clipping: scalar ``[]``, at least float32, on the gradients' device, the same on every rank.

    Mutates: ``.grad``.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on; every rank must call it.
    Host sync: none.

    Raises:
        ConfigError: ``max_norm`` is not positive.

    Source: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: needs a positive max_norm, got {max_norm=}")
    grads = [param.grad for param in params.values() if param.grad is not None]
    norm = global_norm(grads)
    scale_(grads, (max_norm / (norm + eps)).clamp(max=1.0))
    return norm


def apply_gradients(
    state: TrainState, metrics: Metrics, *, nonfinite: Literal["allow", "raise", "skip"] = "allow"
) -> tuple[TrainState, Metrics]:
    """Run the optimizer on the gradients in ``.grad`` and drop them. The clock does not move; see ``optimizer_step``.

    Args:
        state: with gradients.
        metrics: passed on; ``"skip"`` adds ``skipped``, 1 for a step without an update.
        nonfinite: what to do when a gradient is infinite or NaN on any rank. ``"allow"`` does not look; ``"raise"`` raises on
            all ranks; ``"skip"`` leaves parameters and optimizer as they are, on all ranks.
            ``compose_step(..., update=partial(dt.apply_gradients, nonfinite="skip"))``.

    Mutates: parameters, optimizer state, ``.grad`` (set to None); spends ``state`` (not if it raises).
    Collective: none; ``"raise"`` and ``"skip"`` one all-reduce of float32 ``[]``, on several ranks.
    Host sync: none; ``"raise"`` and ``"skip"`` one.

    Raises:
        StaleStateError: ``state`` was stepped already.
        StepError: no parameter has a gradient, or one that is not finite (``"raise"``); the gradients are dropped then.
        ConfigError: another value of ``nonfinite``.
    """
    spans.begin("step", 0)  # a step written by hand is counted here and in ``microbatch_step``
    try:
        state.check_fresh("apply_gradients")
        grads = [param.grad for param in state.params.values() if param.grad is not None]
        if not grads:
            raise StepError("apply_gradients: no parameter has a gradient; call microbatch_step (or backward) before")
        if nonfinite not in ("allow", "raise", "skip"):
            raise ConfigError(f"apply_gradients: nonfinite must be 'allow', 'raise' or 'skip', got {nonfinite!r}")
        broken = nonfinite != "allow" and not all_finite(grads, state.device, where="apply_gradients")
        if broken and nonfinite == "raise":
            here = broken_here(state.params)
            state.drop_gradients()
            raise StepError(
                f"apply_gradients: step {state.step}: a gradient is not finite (on this rank: {here}); lower the learning "
                "rate, clip, or pass nonfinite='skip'"
            )
        reduction_of(state.model).free()  # a look at the model since the gradient has left copies, which would be used again
        if not broken:
            state.optimizer.step()
        state.drop_gradients()
        if nonfinite == "skip":
            metrics = {**metrics, "skipped": as_metric(float(broken), 1.0, state.device)}
        return state.successor(), metrics
    finally:
        spans.end("step")


def tick(state: TrainState) -> TrainState:
    """The state with its clock moved by one step, by what the ranks agreed in ``microbatch_step``. Spends ``state``.

    Raises:
        StepError: no step is in progress: ``microbatch_step`` did not run on this state.
    """
    state.check_fresh("tick")
    clock = next_clock(state)
    spans.stepped(clock.step, samples=clock.samples, tokens=clock.tokens)
    return state.successor(clock=clock, tally=None)


def next_clock(state: TrainState) -> Clock:
    """The clock after the step in progress: what a transform goes by that has something to do at the end of an interval.

    Raises:
        StepError: no step is in progress.
    """
    tally = state.tally
    if tally is None:
        raise StepError("tick: no step is in progress; the state must come from microbatch_step, which counts the batch")
    return state.clock.tick(samples=tally.samples, tokens=tally.tokens, seconds=tally.seconds, end_of_epoch=tally.end_of_epoch)


def optimizer_step(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """``apply_gradients``, then the tick: the second half of a step written by hand.

    Mutates: parameters, optimizer state, ``.grad`` (set to None); spends ``state``.
    """
    state, metrics = apply_gradients(state, metrics)
    return tick(state), metrics


def ends_interval(state: TrainState, interval: Duration) -> bool:
    """Whether the step in progress ends an ``interval``: what ``state.crossed`` will say after it.

    Raises:
        StepError: no step is in progress, where the interval is not one of steps.
    """
    if interval.unit == "ba":  # most are, and the clock of the next step takes longer to make
        return state.clock.step // int(interval.value) < (state.clock.step + 1) // int(interval.value)
    return next_clock(state).crossed(interval)


def set_lr_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the absolute learning rate ``lr``. Mutates: ``optimizer.param_groups``."""
    for group in optimizer.param_groups:
        group["lr"] = lr
