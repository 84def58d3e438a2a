"""Which of torch's forms of an optimizer a group of parameters is given: one kernel for all of them where there is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.dtensor import tensor_mesh
from dtrain.errors import ConfigError

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def on_same_mesh(params: Sequence[Tensor]) -> bool:
    """Whether all lie on one mesh, or none on any: torch's foreach and fused forms take no others together."""
    return len({tensor_mesh(param) for param in params}) <= 1


def can_fuse(params: Sequence[Tensor]) -> bool:
    """Whether torch's fused Adam takes them together."""
    return on_same_mesh(params) and all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)


def sets_implementation(group: dict[str, Any]) -> bool:
    """Whether the user has said which form a group is to take, or asks for what only the plain one can do."""
    return any(group.get(form) is not None for form in ("fused", "foreach")) or bool(group.get("differentiable"))


def trainable_in_group(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that get gradients."""
    return [param for param in group["params"] if param.requires_grad]


def record_peak_lr_(group: dict[str, Any], caller: str) -> None:
    """Keep the rate that a group was made with under ``initial_lr``, as torch's schedulers do.

    Mutates: ``group``.

    Raises:
        ConfigError: a rate that is a tensor, zero or not a finite number.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) or not 0.0 < lr < float("inf"):
        raise ConfigError(
            f"{caller}: needs a finite number lr > 0, got {lr!r}: it is the peak that the decay is relative to; make rates "
            "smaller by dt.transforms.scale_lr"
        )
    group.setdefault("initial_lr", lr)


def unwrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ``step`` without what torch puts around it: hooks, which a subclass's own step has, and the grad mode.

    The grad mode costs as much as all that a subclass adds here (2 of 65 microseconds for six tensors), so a subclass sets it
    itself.
    """
    inner: Callable[..., Any] = inspect.unwrap(step)
    return inner


def evaluate_closure(closure: Callable[[], float]) -> float:
    """What the function that an optimizer's ``step`` was given returns."""
    with torch.enable_grad():
        return closure()
