"""Balance the load of experts by a bias of the router, without a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.experts import share_from_load_
from dtrain.fqn import modules_by_fqn
from dtrain.shard.buffers import module_choice
from dtrain.state import TrainState
from dtrain.step.normalization import make_metric
from dtrain.step.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics

_NAME = "balance_experts"


def move_bias_(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move the bias of each expert by ``rate`` towards a balanced load.

    Formula: ``bias = bias + rate * sign(mean(load) - load)``

    Args:
        bias: ``[experts]``, float.
        load: ``[experts]``, the choices of each expert in a global batch, whole numbers or float.
        rate: size of the change, >= 0.

    Mutates: ``bias``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> bias = torch.zeros(3, dtype=torch.float64)
        >>> dt.transforms.move_bias_(bias, torch.tensor([5, 3, 1]), 0.5)
        >>> bias.tolist()
        [-0.5, 0.0, 0.5]

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    # The comparison of sums is exact for whole numbers, and a rounded mean is not.
    bias.add_((load.sum() - len(load) * load).sign().to(bias.dtype), alpha=rate)


def balance_experts(rate: float = 0.001, *, bias: str = "bias", load: str = "load", share: str = "share") -> Transform:
    """Balance experts without a loss: after each update, the bias of an overloaded expert falls, and that of another rises.

    A router is a module with a buffer ``load``, the number of choices of each expert. ``dt.experts.Router`` is one; so is any
    module with buffers of these names, which adds its choices to ``load`` in forward, and its bias to the scores for the choice
    alone. The load is that of the global batch. So the biases do not depend on microbatches, ranks, recomputed forwards or
    retries, and a checkpoint resumes them on any number of ranks.

    A step that skips the update moves no bias, if the transform that skips is listed before this one (``nonfinite``).

    Formula: ``bias = bias + rate * sign(mean(load) - load)``, ``share = load / sum(load)``

    Args:
        rate: change of a bias in a step, >= 0. 0 only counts, for a load-balancing loss without a bias.
        bias: name of the buffer with the bias of a router; needed unless ``rate`` is 0.
        load: name of the buffer with the choices of the step; set to zero before each gradient.
        share: name of a buffer that gets the shares of the load, if the router has it.

    Returns:
        A transform that adds the metric ``max_violation``, the mean over the routers of ``max(load) / mean(load) - 1``.

    Mutates: the three buffers. Collective: none of its own; the step sums ``load``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.router = dt.experts.Router(2, 4, top_k=1)
        ...         self.experts = dt.experts.Experts(2, 4, 4)
        ...
        ...     def forward(self, x):
        ...         return self.experts(x, self.router(x))
        >>> model = Net()
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.balance_experts(0.5)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, torch.ones(8, 2))  # equal rows choose one expert
        >>> sorted(model.router.bias.tolist())
        [-0.5, 0.5, 0.5, 0.5]
        >>> metrics["max_violation"].total.item()
        3.0

    Raises:
        ConfigError: ``rate`` is negative. From ``Step.init`` on: the model has no router; a bias is a parameter, has another
            length than the load, or fewer bits than float32; a ``load`` is not summed over ranks.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.

    Suggested values:
        Pre-training, sigmoid scores: ``rate=0.001`` (Wang et al. 2024, section 4.3), 0 for the last 500B of 14.8T tokens
            (DeepSeek-V3, section 4.2)
        Beside it, against extreme sequences: ``router_terms(sequence=0.0001)`` (DeepSeek-V3, section 4.2)
    When not to use: the batch is so small that its load says little about the next one; then the bias follows the noise. With
        dropped rows or experts on other devices, balance within a microbatch counts, which this method does not see.
    """
    check_number(_NAME, "rate", rate, minimum=0)
    names = _Names(bias=bias, load=load, share=share)

    def init(state: TrainState) -> dict[str, object]:
        names.check(state, needs_bias=rate > 0)
        return {}

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            # Not after the update: an update may be skipped, and a second gradient of a step counts anew.
            for router in names.routers(state.model):
                router.load.zero_()
            return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    def update(inner: UpdateFn) -> UpdateFn:
        @torch.no_grad()
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            routers = names.routers(state.model)
            for router in routers:
                if rate and router.bias is not None:
                    move_bias_(router.bias, router.load, rate)
                if router.share is not None:
                    share_from_load_(router.share, router.load)
            violation = torch.stack([router.violation() for router in routers])
            return state, {**metrics, "max_violation": make_metric(violation.sum(), len(routers))}

        return update_fn

    return Transform(name=_NAME, init=init, grad=grad, update=update, uses_grad=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Router:
    """Buffers of one router."""

    load: Tensor
    bias: Tensor | None
    share: Tensor | None

    def violation(self) -> Tensor:
        """Return the largest load over the mean load, minus 1: float64 ``[]``."""
        load = self.load.double()
        return load.max() / load.mean().clamp(min=1e-30) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Names of the buffers of a router."""

    bias: str
    load: str
    share: str

    def routers(self, model: nn.Module) -> list[_Router]:
        """Return the buffers of all routers of a model."""
        buffers = [module._buffers for module in model.modules()]
        return [
            _Router(load, own.get(self.bias), own.get(self.share))
            for own in buffers
            if (load := own.get(self.load)) is not None
        ]

    def check(self, state: TrainState, *, needs_bias: bool) -> None:
        """Raise ``ConfigError`` for a model whose routers cannot be balanced; see ``balance_experts``."""
        routers = [(name, module) for name, module in modules_by_fqn(state.model) if module._buffers.get(self.load) is not None]
        if not routers:
            raise ConfigError(
                f"{_NAME}: the model must have a module with a buffer {self.load!r}, got none. Route with dt.experts.Router, "
                f"or count the choices of each expert in a buffer, and name it: {_NAME}(load=...)."
            )
        for name, module in routers:
            prefix = f"{name}." if name else ""
            if needs_bias:
                self._check_bias(prefix, module)
            choice = module_choice(state.spec, f"{prefix}{self.load}", module, self.load)
            if choice != "sum" and state.spec.mesh is not None and state.spec.mesh.size() > 1:
                pattern = f"**.{self.load}" if name else self.load
                raise ConfigError(
                    f"{_NAME}: ranks must sum the buffer {prefix + self.load!r}, got buffers={choice!r}, so the load would be "
                    f"that of one rank. Pass shard_model(buffers={{{pattern!r}: 'sum'}})."
                )

    def _check_bias(self, prefix: str, module: nn.Module) -> None:
        bias, load, name = module._buffers.get(self.bias), module._buffers[self.load], prefix + self.bias
        assert load is not None
        if module._parameters.get(self.bias) is not None:
            raise ConfigError(
                f"{_NAME}: the bias {name!r} must be a buffer, got a parameter, which is sharded and decays. Register it with "
                f"register_buffer({self.bias!r}, torch.zeros(experts))."
            )
        if bias is None:
            raise ConfigError(
                f"{_NAME}: the router {prefix.removesuffix('.')!r} must have a buffer {self.bias!r}, got none. Register one, "
                f"name it ({_NAME}(bias=...)), or pass rate=0 to count only."
            )
        if bias.shape != load.shape:
            raise ConfigError(
                f"{_NAME}: the bias {name!r} must have one number per expert, {tuple(load.shape)}, got {tuple(bias.shape)}. "
                "Make it as long as the load."
            )
        if not bias.is_floating_point() or bias.dtype.itemsize < 4:
            raise ConfigError(
                f"{_NAME}: the bias {name!r} must be float32 or float64, got {bias.dtype}, which loses small changes. Keep it: "
                "leave Precision(buffer=) out, and cast the model by Precision(param='bf16')."
            )
