"""Skip, refuse or allow updates whose gradient is infinite or NaN."""

from __future__ import annotations

from typing import Literal

from dtrain.errors import ConfigError, NonFiniteError
from dtrain.run_context import MAX_NONFINITE_STEPS, NonfiniteLossCounter
from dtrain.state import TrainState
from dtrain.step.optimizer import nonfinite_param_names, update_if_finite
from dtrain.step.transform import BeforeDivision, Transform, UpdateFn
from dtrain.typing import Metrics, TransformState

_NAME = "nonfinite"
_LISTED_BEFORE_LOSS_SCALE = (
    "nonfinite: nonfinite must not be listed before loss_scale, because loss_scale then misses the non-finite gradient of this "
    "step. Remove nonfinite or list it after loss_scale."
)


def nonfinite(action: Literal["skip", "raise", "allow"] = "skip", *, in_a_row: int | None = MAX_NONFINITE_STEPS) -> Transform:
    """Skip, refuse or allow updates if the gradient of any rank is infinite or NaN; all ranks act alike.

    Without this transform every update is made. The run stops after ten steps in a row with an infinite or NaN loss on some
    rank. ``"allow"`` only changes the number ten. ``"skip"`` and ``"raise"`` replace the check of the loss.

    With ``"skip"``, the transforms listed after ``nonfinite`` are skipped together with the update (a parameter average does
    not change). The transforms listed before it are not skipped. ``loss_scale`` also skips such updates, so ``"skip"`` is not
    needed with ``loss_scale`` and must not be listed before it.

    The transform state is ``{"skipped": int, "in_a_row": int}``: all skipped updates, and skipped updates since the last
    update. Adds the metric ``skipped``, 1 for a step without an update; its mean is the fraction of skipped steps. ``"allow"``
    has neither.

    Formula: ``param = update(param) if all(isfinite(grad)) else param``, over all gradients of all ranks

    Args:
        action: ``"skip"`` continues without the update, ``"raise"`` raises at the first such gradient, ``"allow"`` makes the
            update.
        in_a_row: number of consecutive such steps that raises; None never raises. With ``"allow"`` the number counts non-finite
            losses, and a later step raises.

    Collective: one all-reduce of float32 ``[]`` per step, on several ranks; none for ``"allow"``.
    Host sync: one per step: the host reads if the gradient is finite; none for ``"allow"``.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.nonfinite("skip")])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, metrics = step(state, torch.tensor([[float("inf")]]))
        >>> (
        ...     model.weight.item(),
        ...     metrics["skipped"].total.item(),
        ...     state.transform_states["nonfinite"],
        ... )
        (2.0, 1.0, {'skipped': 1, 'in_a_row': 1})
        >>> state, metrics = step(state, torch.tensor([[0.5]]))
        >>> (
        ...     model.weight.item(),
        ...     metrics["skipped"].total.item(),
        ...     state.transform_states["nonfinite"],
        ... )
        (1.5, 0.0, {'skipped': 1, 'in_a_row': 0})

    Raises:
        ConfigError: ``action`` is unknown, ``in_a_row`` is not an int >= 1, or is given with ``"raise"``. In a step: a gradient
            is not finite and ``loss_scale`` is listed after ``nonfinite``.
        NonFiniteError: on all ranks, a gradient is not finite (``"raise"``), or ``in_a_row`` consecutive steps are not finite.

    Source: the behavior of ``torch.amp.GradScaler``, Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, without a scale.

    Suggested values:
        bf16 or float32: ``action="skip"``, ``in_a_row=10`` (dtrain's defaults)
        search for the cause of a NaN: ``action="raise"`` (dtrain, ``docs/errors.md``)
    When not to use: gradients are fp16: ``loss_scale`` skips such updates itself. Skipped steps also hide a diverging run, so
        watch the metric ``skipped``.
    """
    if action not in ("skip", "raise", "allow"):
        raise ConfigError(
            f"nonfinite: action must be 'skip', 'raise' or 'allow', got {action!r}. Pass 'skip' to leave out such updates."
        )
    if in_a_row is not None and (
        type(in_a_row) is not int or in_a_row < 1 or (action == "raise" and in_a_row != MAX_NONFINITE_STEPS)
    ):
        raise ConfigError(
            f"nonfinite: in_a_row must be an integer of at least 1, and omitted with 'raise', got {in_a_row=}, {action=}. "
            "Remove in_a_row, or pass action='skip'."
        )
    if action == "allow":
        return Transform(name=_NAME, init=lambda state: _init_loss_watch(state, in_a_row), read_only=True, uses_grad=False)
    limit = 1 if action == "raise" else in_a_row

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            def next_state(broken: bool) -> TransformState:
                # A loss_scale listed first would have skipped this update.
                if broken and "loss_scale" in state.transform_states:
                    raise ConfigError(_LISTED_BEFORE_LOSS_SCALE)
                before = state.transform_states[_NAME]
                skipped, in_a_row = before["skipped"] + broken, before["in_a_row"] + 1 if broken else 0
                if limit is not None and in_a_row >= limit:
                    raise NonFiniteError(_nonfinite_message(state, in_a_row))
                return {"skipped": skipped, "in_a_row": in_a_row}

            return update_if_finite(inner, state, metrics, name=_NAME, next_state=next_state)

        return update_fn

    def init(state: TrainState) -> TransformState:
        return {**_init_loss_watch(state, None), "skipped": 0, "in_a_row": 0}

    return Transform(name=_NAME, init=init, update=BeforeDivision(update))


def _init_loss_watch(state: TrainState, limit: int | None) -> TransformState:
    state._run_context.monitor.nonfinite_losses = NonfiniteLossCounter(limit=limit)
    return {}


def _nonfinite_message(state: TrainState, in_a_row: int) -> str:
    repeats = f", {in_a_row} steps in a row" if in_a_row > 1 else ""
    return (
        f"nonfinite: step {state.step}: a gradient is not finite{repeats} "
        f"(on this rank: {nonfinite_param_names(state.params)}). The update was skipped. "
        "Lower the learning rate, clip the gradient, or look for an infinite or NaN loss."
    )
