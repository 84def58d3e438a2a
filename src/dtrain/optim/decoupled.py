"""SGD and AdamW whose weight decay follows the schedule of the rate, but not its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtrain.dtensor import mul_
from dtrain.optim.foreach import (
    can_fuse,
    evaluate_closure,
    on_same_mesh,
    record_peak_lr_,
    sets_implementation,
    trainable_in_group,
    unwrap_step,
)


class _DecoupledDecay:
    """Before an optimizer of torch among the bases of a class: its decay is relative to the rate that a group was made with."""

    _unwrapped_step: Callable[[Any], Any]
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decay, then torch's update, of every parameter with a gradient. Mutates: parameters, state."""
        loss = None if closure is None else evaluate_closure(closure)
        groups = self.param_groups
        decays = [group["weight_decay"] for group in groups]
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            for group in groups:
                self._apply_decay_(group)
            type(self)._unwrapped_step(self)
            return loss
        finally:
            torch.set_grad_enabled(before)
            for group, decay in zip(groups, decays, strict=False):
                group["weight_decay"] = decay

    def _apply_decay_(self, group: dict[str, Any]) -> None:
        """Mutates: the group's decay, which is put back after the update, as torch's own is to see it; or its parameters."""
        raise NotImplementedError


class DecoupledAdamW(_DecoupledDecay, torch.optim.AdamW):  # type: ignore[misc]
    """AdamW whose ``weight_decay`` is the share of a parameter that a step at the peak rate takes away, whatever that rate is.

    ``torch.optim.AdamW`` takes away ``lr * weight_decay``, so that another rate is another decay. Here the two are tuned apart:
    ``weight_decay=1e-5`` here is ``1e-5 / lr`` there, and the decay follows the schedule of the rate down.

    Formula: ``param -= (lr / initial_lr) * weight_decay * param``, then Adam:
        ``m = beta1 * m + (1 - beta1) * grad``, ``v = beta2 * v + (1 - beta2) * grad**2``,
        ``param -= lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)``

    ``initial_lr`` of a group is the rate it was made with, the peak. ``dt.transforms.scale_lr`` changes ``lr`` for the time of the update,
    so between steps the two are equal. Both are in a checkpoint, and what was saved wins over what a resumed run was built
    with, as for every option. ``dt.set_lr_`` after that changes ``lr`` alone: the peak that the run began with still wins, and
    half the rate is half the decay. To begin a new peak with the old decay, set both: ``group.update(lr=new, initial_lr=new)``.

    Torch's fused kernel runs where there is one for the parameters of a group (floating point on a CPU or GPU; all on one mesh
    or none on any), else torch's choice; ``fused=`` and ``foreach=`` say otherwise.

    Args:
        params: parameters, or groups of them as from ``param_groups``.
        lr: the peak rate, a number > 0.
        betas: decay rates of the two averages. The default is Composer's, ``(0.9, 0.95)``; torch's is ``(0.9, 0.999)``.
        eps, amsgrad, options: as those of ``torch.optim.AdamW``.
        weight_decay: share of a parameter per step at the peak rate, >= 0.

    Mutates: in ``step``, parameters and the optimizer's state. Collective: none.

    Raises:
        ConfigError: ``lr`` is a tensor, or no finite number > 0.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, where the multiplier of the schedule is ``lr /
        initial_lr``; the defaults are those of MosaicML's Composer.

    Example:
        >>> from dtrain.step.optimizer import set_lr_
        >>> p = torch.nn.Parameter(torch.tensor([8.0], dtype=torch.float64))
        >>> optimizer = DecoupledAdamW([p], lr=0.5, weight_decay=0.25)
        >>> p.grad = torch.zeros_like(p)
        >>> optimizer.step()
        >>> p.item()  # 8 * (1 - 0.25): at the peak, whatever it is
        6.0
        >>> set_lr_(optimizer, 0.25)
        >>> optimizer.step()
        >>> p.item()  # 6 * (1 - 0.25 / 2): at half of the peak
        5.25
    """

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
        group["weight_decay"] /= group["initial_lr"]  # torch multiplies it by lr: so the decay costs no pass of its own


class DecoupledSGDW(_DecoupledDecay, torch.optim.SGD):  # type: ignore[misc]
    """SGD whose ``weight_decay`` is the share of a parameter that a step at the peak rate takes away, beside the momentum.

    ``torch.optim.SGD`` adds the decay to the gradient, and so to the momentum, and multiplies it by the rate.

    Formula: ``param -= (lr / initial_lr) * weight_decay * param``, then SGD:
        ``buffer = momentum * buffer + (1 - dampening) * grad`` (the first time ``grad``),
        ``param -= lr * buffer``, or with ``nesterov`` ``param -= lr * (grad + momentum * buffer)``

    ``initial_lr`` is the peak rate, and which one wins after a resume is told under ``DecoupledAdamW``.

    Torch's foreach form runs where all parameters of a group lie on one mesh, or none on any. Not the fused one, unless
    ``fused=True`` asks for it: it fails in the step in which a parameter gets its first gradient after others, and takes no cut
    parameters.

    Args:
        params: parameters, or groups of them as from ``param_groups``.
        lr: the peak rate, a number > 0.
        momentum, dampening, nesterov, options: as those of ``torch.optim.SGD``.
        weight_decay: share of a parameter per step at the peak rate, >= 0.

    Mutates: in ``step``, parameters and the optimizer's state. Collective: none.

    Raises:
        ConfigError: ``lr`` is a tensor, or no finite number > 0.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1, where the multiplier of the schedule is ``lr /
        initial_lr``; the momentum is torch's, which multiplies by the rate what the buffer holds, and not what goes into it.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([8.0], dtype=torch.float64))
        >>> optimizer = DecoupledSGDW([p], lr=0.5, weight_decay=0.25)
        >>> p.grad = torch.ones_like(p)
        >>> optimizer.step()
        >>> p.item()  # 8 * (1 - 0.25) - 0.5
        5.5
    """

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
