"""SGD and AdamW whose weight decay follows the learning rate schedule but does not scale with the peak learning rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.dist.dtensor import mul_
from dtrain.optim.groups import can_fuse, evaluate_closure, on_same_mesh, sets_implementation, trainable_in_group


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


class _DecoupledDecay:
    """Base class in front of a torch optimizer; makes the decay relative to the group's initial learning rate."""

    _unwrapped_step: Callable[[Any], Any]
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decay and update every parameter with a gradient. Mutates: parameters, state."""
        loss = None if closure is None else evaluate_closure(closure)
        groups = self.param_groups
        decays = [group["weight_decay"] for group in groups]
        grad_mode = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            for group in groups:
                self._apply_decay_(group)
            type(self)._unwrapped_step(self)
            return loss
        finally:
            torch.set_grad_enabled(grad_mode)
            for group, decay in zip(groups, decays, strict=False):
                group["weight_decay"] = decay

    def _apply_decay_(self, group: dict[str, Any]) -> None:
        """Apply the decay. Mutates: the group's ``weight_decay``, which ``step`` restores, or its parameters."""
        raise NotImplementedError


class DecoupledAdamW(_DecoupledDecay, torch.optim.AdamW):  # type: ignore[misc]
    """AdamW whose ``weight_decay`` is the fraction by which a step at the peak learning rate shrinks a parameter.

    ``torch.optim.AdamW`` shrinks by ``lr * weight_decay``, so a different learning rate is a different decay. Here both are
    tuned independently: ``weight_decay=1e-5`` here equals ``1e-5 / lr`` there. The decay follows the learning rate schedule.

    Formula: ``param -= (lr / initial_lr) * weight_decay * param``, then Adam:
        ``m = beta1 * m + (1 - beta1) * grad``, ``v = beta2 * v + (1 - beta2) * grad**2``,
        ``param -= lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)``

    ``initial_lr`` is the learning rate at construction of a group, the peak. ``dt.transforms.scale_lr`` changes ``lr`` only
    during the update. A checkpoint stores both values, and loaded values replace the constructed values, as for every option.
    ``dt.step.set_lr_`` after loading changes ``lr`` alone, so half the learning rate is half the decay. For a new peak with the
    same decay set both: ``group.update(lr=new, initial_lr=new)``.

    A group uses torch's fused kernel if its parameters allow (floating point on a CPU or GPU, all on one mesh or all plain),
    else torch's default. ``fused=`` and ``foreach=`` override the choice.

    Args:
        params: parameters, or parameter groups, for example from ``param_groups``.
        lr: peak learning rate, > 0.
        betas: decay rates of the two averages. The default ``(0.9, 0.95)`` is Composer's; torch's is ``(0.9, 0.999)``.
        eps, amsgrad, options: as in ``torch.optim.AdamW``.
        weight_decay: fraction of a parameter per step at the peak learning rate, >= 0.

    Mutates: in ``step``, parameters and the optimizer's state. Collective: none.

    Example:
        >>> import dtrain as dt
        >>> p = torch.nn.Parameter(torch.tensor([8.0], dtype=torch.float64))
        >>> optimizer = dt.optim.DecoupledAdamW([p], lr=0.5, weight_decay=0.25)
        >>> p.grad = torch.zeros_like(p)
        >>> optimizer.step()
        >>> p.item()  # 8 * (1 - 0.25), for any peak learning rate
        6.0
        >>> optimizer.param_groups[0]["lr"] = 0.25
        >>> optimizer.step()
        >>> p.item()  # 6 * (1 - 0.25 / 2) at half of the peak
        5.25

    Raises:
        ConfigError: ``lr`` is a tensor, or not a finite number > 0.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with schedule multiplier ``lr / initial_lr``; the
        defaults are those of MosaicML's Composer.

    Suggested values:
        MosaicBERT-Base: ``lr=5e-4``, ``betas=(0.9, 0.98)``, ``eps=1e-6``, ``weight_decay=1e-5`` (Portes et al. 2023, the
            authors' configuration)
        MPT-125M: ``lr=6e-4``, ``betas=(0.9, 0.95)``, ``eps=1e-8``, ``weight_decay=0`` (LLM Foundry's configuration)
    When not to use: values come from torch's ``AdamW``: its ``weight_decay`` is multiplied by the rate. Divide by the peak
        rate, or use ``torch.optim.AdamW``.
    """

    updates_elementwise = True
    _unwrapped_step = staticmethod(unwrap_step(torch.optim.AdamW.step))

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        record_peak_lr_(param_group, "DecoupledAdamW")
        if not sets_implementation(param_group) and can_fuse(trainable_in_group(param_group)):
            param_group["fused"] = True

    def _apply_decay_(self, group: dict[str, Any]) -> None:
        # torch multiplies the decay by lr, so the decay needs no separate pass.
        group["weight_decay"] /= group["initial_lr"]


class DecoupledSGDW(_DecoupledDecay, torch.optim.SGD):  # type: ignore[misc]
    """SGD whose ``weight_decay`` is the fraction by which a step at the peak learning rate shrinks a parameter.

    ``torch.optim.SGD`` adds the decay to the gradient, and thus to the momentum, and scales the decay by the learning rate.

    Formula: ``param -= (lr / initial_lr) * weight_decay * param``, then SGD:
        ``buffer = momentum * buffer + (1 - dampening) * grad`` (the first time ``grad``),
        ``param -= lr * buffer``, or with ``nesterov`` ``param -= lr * (grad + momentum * buffer)``

    ``initial_lr`` is the peak learning rate; ``DecoupledAdamW`` describes its value after loading.

    A group uses torch's foreach implementation if all its parameters lie on one mesh or are plain. The fused implementation is
    used only with ``fused=True``: it fails in the step in which a parameter gets its first gradient later than other
    parameters, and does not support sharded parameters.

    Args:
        params: parameters, or parameter groups, for example from ``param_groups``.
        lr: peak learning rate, > 0.
        momentum, dampening, nesterov, options: as in ``torch.optim.SGD``.
        weight_decay: fraction of a parameter per step at the peak learning rate, >= 0.

    Mutates: in ``step``, parameters and the optimizer's state. Collective: none.

    Example:
        >>> import dtrain as dt
        >>> p = torch.nn.Parameter(torch.tensor([8.0], dtype=torch.float64))
        >>> optimizer = dt.optim.DecoupledSGDW([p], lr=0.5, weight_decay=0.25)
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step()
        >>> p.item()  # 8 * (1 - 0.25) - 0.5
        5.5

    Raises:
        ConfigError: ``lr`` is a tensor, or not a finite number > 0.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1, with schedule multiplier ``lr / initial_lr``; as in
    torch,
        the learning rate multiplies the momentum buffer, not the gradient that enters the buffer.

    Suggested values:
        ImageNet, ResNet-50, batch 2048: ``lr=2.0``, ``momentum=0.875``, ``weight_decay=5e-4`` (MosaicML's ResNet benchmark, its
            configuration)
        digits, ResNet-8, batch 64: ``lr=0.1``, ``momentum=0.9``, ``nesterov=True`` (dtrain, ``examples/train_resnet.py``)
    When not to use: values come from torch's ``SGD``: its ``weight_decay`` is added to the gradient and multiplied by the rate.
    """

    updates_elementwise = True
    _unwrapped_step = staticmethod(unwrap_step(torch.optim.SGD.step))

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        record_peak_lr_(param_group, "DecoupledSGDW")
        if not sets_implementation(param_group) and on_same_mesh(trainable_in_group(param_group)):
            param_group["foreach"] = True

    @torch.no_grad()
    def _apply_decay_(self, group: dict[str, Any]) -> None:
        decay, group["weight_decay"] = group["lr"] / group["initial_lr"] * group["weight_decay"], 0.0
        params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
        if decay:
            mul_(params, 1.0 - decay)
