"""Choose torch's fused, foreach or plain implementation of an optimizer for a parameter group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.dtensor import tensor_mesh

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def on_same_mesh(params: Sequence[Tensor]) -> bool:
    """Return True if all parameters lie on one mesh or are plain. torch's foreach and fused implementations need this."""
    return len({tensor_mesh(param) for param in params}) <= 1


def can_fuse(params: Sequence[Tensor]) -> bool:
    """Return True if torch's fused Adam supports the parameters together."""
    return on_same_mesh(params) and all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)


def sets_implementation(group: dict[str, Any]) -> bool:
    """Return True if the group sets an implementation, or needs the plain implementation."""
    return any(group.get(form) is not None for form in ("fused", "foreach")) or bool(group.get("differentiable"))


def trainable_in_group(group: dict[str, Any]) -> list[Tensor]:
    """Return the trainable parameters of a group."""
    return [param for param in group["params"] if param.requires_grad]


def record_peak_lr_(group: dict[str, Any], caller: str) -> None:
    """Store the group's learning rate as ``initial_lr``, as torch's schedulers do.

    Mutates: ``group``.

    Raises:
        ConfigError: the learning rate is a tensor, or not a finite number > 0.
    """
    advice = "The decay is relative to this peak. Reduce the learning rate with dt.transforms.scale_lr."
    check_number(caller, "lr", group["lr"], above=0, advice=advice)
    group.setdefault("initial_lr", group["lr"])


def unwrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's ``step`` without torch's wrappers for hooks and grad mode.

    A subclass has its own hooks. torch's grad mode costs as much as the rest of a subclass's overhead (2 of 65 microseconds for
    six tensors), so a subclass sets the grad mode itself.
    """
    inner: Callable[..., Any] = inspect.unwrap(step)
    return inner


def evaluate_closure(closure: Callable[[], float]) -> float:
    """Return the loss of the closure of an optimizer's ``step``, with gradients enabled."""
    with torch.enable_grad():
        return closure()
