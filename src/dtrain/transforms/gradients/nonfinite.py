"""Skip, refuse or allow updates whose gradient is infinite or NaN."""

from __future__ import annotations

from typing import Literal

from dtrain.errors import ConfigError, NonFiniteError
from dtrain.state import TrainState
from dtrain.step.finite import MAX_NONFINITE_STEPS, all_finite, nonfinite_param_names, set_nonfinite_limit
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metrics, TransformState, make_metric

_NAME = "nonfinite"
_LISTED_BEFORE_LOSS_SCALE = (
    "nonfinite: a gradient is not finite, and loss_scale, listed after it, would never learn that its scale is too large; "
    "leave nonfinite out, or list it after loss_scale"
)


def nonfinite(action: Literal["skip", "raise", "allow"] = "skip", *, in_a_row: int | None = MAX_NONFINITE_STEPS) -> Transform:
    """Leave out, refuse or allow an update for which any rank's gradient is infinite or NaN; on all ranks alike.

    Without this transform every update is made, and a run stops after ten steps in a row whose loss was infinite or NaN on some
    rank. ``"allow"`` changes that number and nothing else. ``"skip"`` and ``"raise"`` take the place of that check.

    With ``"skip"``, what is listed after this transform is left out together with the update (an average of the parameters does
    not move on), what is listed before it is not. With ``loss_scale``, which leaves such updates out too, ``"skip"`` is not
    needed, and not to be listed before it.

    The slice is ``{"skipped": int, "in_a_row": int}``: the updates left out in all, and since the last one that was made. Adds
    the metric ``skipped``, 1 for a step without an update, whose mean is their share. ``"allow"`` has neither.

    Formula: ``param = update(param) if all(isfinite(grad)) else param``, over all gradients of all ranks

    Args:
        action: ``"skip"`` goes on without the update, ``"raise"`` raises at the first one, ``"allow"`` makes the update, too.
        in_a_row: the number of such steps one after another that is too many. With ``"skip"`` the last of them raises. With
            ``"allow"`` the number is of losses, and a later step raises. None goes on for ever.

    Collective: one all-reduce of float32 ``[]`` a step, on several ranks; none for ``"allow"``.
    Host sync: one a step: whether the gradient is finite decides what the host does next; none for ``"allow"``.

    Raises:
        ConfigError: another ``action``, or ``in_a_row`` is no whole number >= 1, or given with ``"raise"``; in a step, a
            gradient is not finite that ``loss_scale``, listed after it, should have seen.
        NonFiniteError: in a step, on all ranks, a gradient is not finite (``"raise"``), or as often as ``in_a_row`` says.

    Source: the behaviour of ``torch.amp.GradScaler``, Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, without a scale.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss = mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = compose_step(loss, [nonfinite("skip")])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> state, metrics = step(state, torch.tensor([[float("inf")]]))
        >>> model.weight.item(), metrics["skipped"].total.item(), state.slices["nonfinite"]
        (2.0, 1.0, {'skipped': 1, 'in_a_row': 1})
        >>> state, metrics = step(state, torch.tensor([[0.5]]))
        >>> model.weight.item(), metrics["skipped"].total.item(), state.slices["nonfinite"]
        (1.5, 0.0, {'skipped': 1, 'in_a_row': 0})
    """
    if action not in ("skip", "raise", "allow"):
        raise ConfigError(f"nonfinite: action must be 'skip', 'raise' or 'allow', got {action!r}")
    if in_a_row is not None and (
        type(in_a_row) is not int or in_a_row < 1 or (action == "raise" and in_a_row != MAX_NONFINITE_STEPS)
    ):
        raise ConfigError(f"nonfinite: in_a_row is a whole number >= 1, and not for 'raise', got {in_a_row=}, {action=}")
    if action == "allow":
        return Transform(name=_NAME, init=lambda state: _init_loss_watch(state, in_a_row), read_only=True, uses_grad=False)
    most = 1 if action == "raise" else in_a_row

    def update(inner: UpdateFn) -> UpdateFn:
        def guarded(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            grads = [param.grad for param in state.params.values() if param.grad is not None]
            broken = not bool(all_finite(grads, state.device, caller=_NAME))  # note: the one wait for the device
            if broken and "loss_scale" in state.transform_states:  # which would have kept it away, had it been asked first
                raise ConfigError(_LISTED_BEFORE_LOSS_SCALE)
            now = _update_counts(state.transform_states[_NAME], broken=broken)
            if most is not None and now["in_a_row"] >= most:
                raise NonFiniteError(_nonfinite_message(state, now["in_a_row"]))
            if not broken:
                state, metrics = inner(state, metrics)
            skipped = make_metric(float(broken), 1.0, state.device)
            return state.with_transform_state(_NAME, now), {"skipped": skipped, **metrics}

        return guarded

    def init(state: TrainState) -> TransformState:
        return {**_init_loss_watch(state, None), "skipped": 0, "in_a_row": 0}

    return Transform(name=_NAME, init=init, update=update)


def _init_loss_watch(state: TrainState, limit: int | None) -> TransformState:
    set_nonfinite_limit(state, limit)
    return {}


def _update_counts(before: TransformState, *, broken: bool) -> TransformState:
    return {"skipped": before["skipped"] + broken, "in_a_row": before["in_a_row"] + 1 if broken else 0}


def _nonfinite_message(state: TrainState, in_a_row: int) -> str:
    often = f", {in_a_row} steps in a row" if in_a_row > 1 else ""
    return (
        f"nonfinite: step {state.step}: a gradient is not finite{often} (on this rank: {nonfinite_param_names(state.params)}); no such "
        "update was made: lower the learning rate, clip, or look for a loss that is infinite or NaN by itself"
    )
