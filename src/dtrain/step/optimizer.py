"""Applying gradients: clipping, the optimizer's step, the tick of the clock, the learning rate.

Hold Ctrl-C back while an update runs, so that an interrupt finds the state before it or the state after it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Literal

import torch
from torch import Tensor

from dtrain import spans
from dtrain.dist.batch_info import UNTRACKED_BATCHES
from dtrain.dtensor import global_norm, scale_
from dtrain.errors import ConfigError, NonFiniteError, StepError
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState, check_state, mark_interrupted_write
from dtrain.step.finite import all_finite, nonfinite_loss_counter, nonfinite_param_names
from dtrain.step.step_clock import next_clock
from dtrain.typing import Metrics, Params, make_metric


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
        nonfinite: what to do when a gradient is infinite or NaN on any rank. ``"allow"`` does not look. ``"raise"`` raises on
            all ranks. ``"skip"`` leaves parameters and optimizer as they are, on all ranks; the tenth skip in a row raises.
            ``compose_step(..., update=partial(dt.apply_gradients, nonfinite="skip"))``.

    Mutates: parameters, optimizer state, ``.grad`` (set to None); spends ``state``, but not if it raises before the optimizer
    runs. An error of the optimizer itself spends all states of the run, since some parameters may have changed. Ctrl-C waits
    until the optimizer has run.
    Collective: none; ``"raise"`` and ``"skip"`` one all-reduce of float32 ``[]``, on several ranks.
    Host sync: none; ``"raise"`` and ``"skip"`` one.

    Raises:
        StaleStateError: ``state`` was stepped already.
        StepError: no parameter has a gradient.
        NonFiniteError: a gradient is not finite (``"raise"``), or ten times in a row (``"skip"``); the gradients are dropped.
        ConfigError: another value of ``nonfinite``; LBFGS, whose step needs a closure.
    """
    spans.begin("step", 0)  # a step written by hand is counted here and in ``microbatch_step``
    try:
        check_state(state, "apply_gradients", "state, metrics = dt.apply_gradients(state, metrics)")
        state._check_not_stale("apply_gradients")
        grads = [param.grad for param in state.params.values() if param.grad is not None]
        if not grads:
            raise StepError("apply_gradients: no parameter has a gradient; call microbatch_step (or backward) before")
        if nonfinite not in ("allow", "raise", "skip"):
            raise ConfigError(f"apply_gradients: nonfinite must be 'allow', 'raise' or 'skip', got {nonfinite!r}")
        if isinstance(state.optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "apply_gradients: the optimizer must step without a closure, got LBFGS. Use one that takes one gradient a step."
            )
        broken = nonfinite != "allow" and not all_finite(grads, state.device, caller="apply_gradients")
        if broken and nonfinite == "raise":
            here = nonfinite_param_names(state.params)
            state.drop_gradients()
            raise NonFiniteError(
                f"apply_gradients: step {state.step}: a gradient is not finite (on this rank: {here}); lower the learning "
                "rate, clip, or pass nonfinite='skip'"
            )
        if nonfinite == "skip":
            _count_skipped_update(state, broken=broken)
        grad_sync_of(state.model).reshard()  # a look at the model since the gradient has left copies, which would be used again
        with DelayedInterrupt() as held:
            held.begin()
            if not broken:
                with mark_interrupted_write(state, "the update"):
                    state.optimizer.step()
            state.drop_gradients()
            if nonfinite == "skip":
                metrics = {**metrics, "skipped": make_metric(float(broken), 1.0, state.device)}
            return state._next(), metrics
    finally:
        spans.end("step")


def _count_skipped_update(state: TrainState, *, broken: bool) -> None:
    watch = nonfinite_loss_counter(state)
    watch.skipped_updates = watch.skipped_updates + 1 if broken else 0
    if watch.limit is None or watch.skipped_updates < watch.limit:
        return
    here, often = nonfinite_param_names(state.params), watch.skipped_updates
    watch.reset()
    state.drop_gradients()
    raise NonFiniteError(
        f"apply_gradients: step {state.step}: a gradient is not finite, {often} steps in a row (on this rank: {here}); the "
        "updates were left out, so the parameters are sound: lower the learning rate, clip, or look at the batches"
    )


def tick(state: TrainState) -> TrainState:
    """The state with its clock moved by one step, by what the ranks agreed in ``microbatch_step``. Spends ``state``.

    Raises:
        StepError: no step is in progress: ``microbatch_step`` did not run on this state.
    """
    state._check_not_stale("tick")
    clock = next_clock(state)
    spans.record_step(clock.step, samples=clock.samples, tokens=clock.tokens)
    agreements = () if state.step_batch is None else state.step_batch.statuses
    for agreement in agreements:
        agreement.consumed = True
    UNTRACKED_BATCHES.steps += not agreements
    return state._next(clock=clock, step_counts=None, step_batch=None)


def optimizer_step(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """``apply_gradients``, then the tick: the second half of a step written by hand.

    Mutates: parameters, optimizer state, ``.grad`` (set to None); spends ``state``.
    """
    with DelayedInterrupt() as held:
        held.begin()
        state, metrics = apply_gradients(state, metrics)
        return tick(state), metrics


def set_lr_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the absolute learning rate ``lr``. Mutates: ``optimizer.param_groups``."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class DelayedInterrupt:
    """A context that holds SIGINT back from ``begin`` on, and raises ``KeyboardInterrupt`` at its end if one came.

    A second SIGINT interrupts at once. A handler of the user's own is left alone, and so are threads, which get no signals.
    """

    __slots__ = ("_begun", "_came")

    def __init__(self) -> None:
        self._begun = False
        self._came = False

    def begin(self) -> None:
        """Hold SIGINT back from now on. Mutates: this process's handler of SIGINT, until the end of the context."""
        main = threading.get_ident() == threading.main_thread().ident
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._begun = True
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True

    def __enter__(self) -> DelayedInterrupt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._begun:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._came and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt
