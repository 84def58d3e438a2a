"""Run an optimizer on the local shards of its parameters, without the dispatch of DTensor (``step_optimizer``).

An optimizer that updates each element by itself computes on a DTensor what it computes on the shard. The dispatch of DTensor
takes some 20 us for each operation, and AdamW has ten operations per parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dtrain.dist.dtensor import (
    chunks_per_dim,
    dtensor_dispatcher,
    from_local_like,
    is_dtensor,
    is_placed_like,
    replicate_like,
    to_local,
)
from dtrain.shard.replicate import is_reducer_hook

_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Run ``optimizer.step()``, on local shards where that gives the same result.

    Shards are used for torch's elementwise optimizers and for classes with ``updates_elementwise = True``, if each gradient is
    placed as its parameter. A subclass, hooks of ``step``, a replaced ``step`` and ``differentiable`` may look at the
    parameters, so they get the DTensors. The optimizer's state stays made of DTensors.

    A DTensor that the optimizer reads as a Python number (``float(param.norm())``, ``if grad.abs().max() > c``) is reduced to
    the number of the whole tensor, as in one process. torch would return the number of this rank's part.

    Mutates: parameters, and the optimizer's state. Collective: those of the optimizer, and one for each number that it reads;
    none on shards.
    """
    if _can_use_shards(optimizer):
        with torch.no_grad():
            shards = _ShardViews(optimizer)
        with shards.in_place():
            optimizer.step()
        shards.store_new_state()
    else:
        _run_with_whole_numbers(optimizer.step)


_aten = torch.ops.aten
_READ_NUMBER = _aten._local_scalar_dense.default
# The value of an empty shard does not exist, so torch raises on the ranks that have no row of a small parameter.
_UNDEFINED_IF_EMPTY = (
    _aten.max.default,
    _aten.min.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.linalg_vector_norm.default,
)


def _run_with_whole_numbers(function: Callable[[], object]) -> None:
    """Call ``function`` while torch reads a DTensor as a Python number of the whole tensor instead of this rank's part.

    ``item``, ``float``, ``int`` and ``bool`` of a tensor all are one operation. A handler costs other operations nothing.
    """
    handlers: dict[Any, Any] = dtensor_dispatcher()._custom_op_handlers
    before = {**handlers}
    handlers[_READ_NUMBER] = _read_whole_number
    handlers.update(dict.fromkeys(_UNDEFINED_IF_EMPTY, _reduce_whole))
    try:
        function()
    finally:
        handlers.clear()
        handlers.update(before)


def _read_whole_number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return args[0].full_tensor().item()


def _reduce_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a reduction on the whole tensor if a rank has an empty shard, which is a small tensor; else as torch does."""
    tensor, *others = args
    if tensor.numel() and _has_empty_shard(tensor):
        return replicate_like(tensor, operation(tensor.full_tensor(), *others, **kwargs))
    handlers = dtensor_dispatcher()._custom_op_handlers
    handler = handlers.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = handler


def _has_empty_shard(tensor: Tensor) -> bool:
    rows = {dim: -(-tensor.shape[dim] // pieces) for dim, pieces in chunks_per_dim(tensor).items()}
    return any(rows[dim] * (pieces - 1) >= tensor.shape[dim] for dim, pieces in chunks_per_dim(tensor).items())


def _can_use_shards(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and not vars(kind).get("updates_elementwise"):
        return False
    # Schedulers of torch replace ``step`` by a function that only counts calls.
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return False
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if own_hooks or _global_optimizer_post_hooks or not all(map(is_reducer_hook, _global_optimizer_pre_hooks.values())):
        return False
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return any(map(is_dtensor, params)) and all(param.grad is None or is_placed_like(param.grad, param) for param in params)


class _ShardViews:
    """Views of the shards of an optimizer's parameters, with the shards of their gradients and of their state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._shards = [[_view_with_grad(param) for param in params] for params in self._params]
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, shard in self._pairs():
            if param in optimizer.state:
                self._state[shard] = {key: _shard_of(value) for key, value in optimizer.state[param].items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for params, shards in zip(self._params, self._shards, strict=True):
            yield from zip(params, shards, strict=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the shards in the place of the parameters. Mutates: the optimizer, inside the context."""
        optimizer, groups, state = self._optimizer, self._optimizer.param_groups, self._optimizer.state
        # torch runs the plain implementation on DTensors. The foreach implementation would need more memory.
        chosen = [group for group in groups if "foreach" in group and group["foreach"] is None and not group.get("fused")]
        try:
            optimizer.state = self._state
            for group, shards in zip(groups, self._shards, strict=True):
                group["params"] = shards
            for group in chosen:
                group["foreach"] = False
            yield
        finally:
            optimizer.state = state
            for group, params in zip(groups, self._params, strict=True):
                group["params"] = params
            for group in chosen:
                group["foreach"] = None

    def store_new_state(self) -> None:
        """Store what the optimizer has made in this step. Mutates: the optimizer's state."""
        for param, shard in self._pairs():
            if shard not in self._state:
                continue
            state = self._optimizer.state[param]
            for key, value in self._state[shard].items():
                # Most values were updated in place.
                if key in state and (state[key] is value or (is_dtensor(state[key]) and state[key]._local_tensor is value)):
                    continue
                sharded = isinstance(value, Tensor) and value.ndim and value.shape == shard.shape
                state[key] = from_local_like(param, value) if sharded else value


def _shard_of(value: Any) -> Any:
    return to_local(value) if isinstance(value, Tensor) else value


def _view_with_grad(param: Tensor) -> Tensor:
    """Return a view of the parameter's shard, whose gradient is the shard of the gradient; a plain parameter is its own."""
    if not is_dtensor(param):
        return param
    # A view, so that the shard itself never has a gradient.
    view = to_local(param).detach()
    if param.grad is not None:
        view.grad = to_local(param.grad)
    return view
