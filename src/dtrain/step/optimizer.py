"""Apply gradients: clip them, run the optimizer, advance the clock, set the learning rate.

Ctrl-C is delayed while an update runs, so that an interrupt finds the state before the update or after it.

``step_optimizer`` runs an optimizer on the local shards of its parameters, without the dispatch of DTensor, which takes some
20 us for each operation. An optimizer that updates each element by itself computes on a DTensor what it computes on the shard.
"""

from __future__ import annotations

import importlib
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dtrain import spans
from dtrain.arguments import check_choice
from dtrain.dist.context import current_context
from dtrain.dist.dtensor import (
    chunks_per_dim,
    dtensor_dispatcher,
    from_local_like,
    global_norm,
    is_dtensor,
    is_placed_like,
    replicate_like,
    scale_,
    to_local,
)
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, NonFiniteError, StepError
from dtrain.named_optimizers import NamedOptimizers, list_members
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.params import check_dense
from dtrain.shard.replicate import is_reducer_hook
from dtrain.state import TrainState, check_block_open, check_state, mark_interrupted_write
from dtrain.step.normalization import divide_, make_metric
from dtrain.step.optimizer_state import check_update
from dtrain.step.step_clock import find_new_params, next_clock
from dtrain.step.transform import UpdateFn
from dtrain.typing import Metrics, Params, TransformState

# The C functions behind ``signal``. The wrappers in Python look for every handler in an enum, which takes 30 us per step.
_c_signal = importlib.import_module("_signal")
_get_handler: Callable[[int], object] = _c_signal.getsignal
_set_handler: Callable[[int, Callable[[int, FrameType | None], object]], object] = _c_signal.signal
_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_DIVIDE_IF_FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)
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


def clip_grad_norm_(params: Params, max_norm: float, *, eps: float = 1e-6) -> Tensor:
    """Scale gradients in place so that their global L2 norm is at most ``max_norm``.

    Args:
        params: parameters by name, plain or DTensor, any shape; parameters without a gradient are skipped.
        max_norm: upper bound of the norm, > 0.
        eps: constant added to the norm before the division.

    Returns:
        Norm before clipping: scalar ``[]``, at least float32, on the gradients' device, the same on every rank.

    Mutates: ``.grad``.
    Collective: one all-reduce of a scalar per mesh axis that gradients are sharded on; every rank must call it.
    Host sync: none.

    Example:
        state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn)
        norm = dt.clip_grad_norm_(state.params, 1.0)
        state, metrics = dt.optimizer_step(state, metrics)

    Raises:
        ConfigError: ``max_norm`` is not positive.
        StepError: a sparse gradient, by the name of its parameter.

    Source: Pascanu et al. 2013, arXiv:1211.5063, section 3.2.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm must be positive, got {max_norm}. Pass 1.0, for example.")
    grads = [grad for param in params.values() if (grad := param.grad) is not None]
    norm = _compute_grad_norm(params, grads)
    scale_(grads, (max_norm / (norm + eps)).clamp(max=1.0))
    return norm


def _compute_grad_norm(params: Params, grads: Sequence[Tensor]) -> Tensor:
    try:
        return global_norm(grads)
    except NotImplementedError:
        for name, param in params.items():
            if param.grad is not None:
                check_dense(name, param.grad, "because torch has no norm of sparse gradients")
        raise


def clip_state(state: TrainState, max_norm: float, *, eps: float) -> tuple[TrainState, Tensor]:
    """Clip the gradients of ``state`` as ``clip_grad_norm_`` does; return the state and the norm before clipping.

    If the gradients wait for their division, their divisor grows instead of a pass over all gradients.
    Mutates: ``.grad``, without a divisor. Collective: as ``clip_grad_norm_``.
    """
    divisor = state._grad_divisor
    if divisor is None or not max_norm > 0:
        return state, clip_grad_norm_(state._trainable, max_norm, eps=eps)
    summed = _compute_grad_norm(
        state._trainable, [grad for param in state._trainable.values() if (grad := param.grad) is not None]
    )
    norm = summed / divisor
    if norm.dtype != summed.dtype:
        norm = norm.to(summed.dtype)
    return state._replace(_grad_divisor=((norm + eps) / max_norm).clamp(min=1.0) * divisor), norm


def apply_gradients(
    state: TrainState, metrics: Metrics, *, nonfinite: Literal["allow", "raise", "skip"] = "allow"
) -> tuple[TrainState, Metrics]:
    """Run the optimizer on the gradients in ``.grad`` and drop them. The clock does not advance; see ``optimizer_step``.

    Args:
        state: state with gradients.
        metrics: metrics of the step, returned unchanged; ``"skip"`` adds ``skipped``, 1 for a step without an update.
        nonfinite: reaction to a gradient that is infinite or NaN on any rank. ``"allow"`` does not check gradients.
            ``"raise"`` raises on all ranks. ``"skip"`` leaves parameters and optimizer unchanged on all ranks; the tenth skip
            in a row raises.

    Mutates: parameters, optimizer state, ``.grad`` (set to None). Spends ``state``, except if an error comes before the
    optimizer runs. An error of the optimizer spends all states of the run, because some parameters may have changed. Ctrl-C
    waits until the optimizer has run.
    Collective: none; ``"raise"`` and ``"skip"`` one all-reduce of float32 ``[]``, on several ranks. In the first update
    of a run, two exchanges on the control channel.
    Host sync: none; ``"raise"`` and ``"skip"`` one. In the first update of a run, one on several ranks.

    Example:
        update = partial(dt.apply_gradients, nonfinite="skip")
        step = dt.compose_step(loss_fn, [dt.transforms.ema(0.999)], update=update)
        state = step.init(model, optimizer)
        state, metrics = step(state, batch)

    Raises:
        StaleStateError: ``state`` was stepped already.
        StepError: no parameter has a gradient, or the model or the optimizer got a parameter after ``step.init``.
        NonFiniteError: a gradient is not finite (``"raise"``), or ten times in a row (``"skip"``); the gradients are dropped.
        ConfigError: another value of ``nonfinite``. In the first update of a run, an optimizer that fails on sharded
            parameters, or whose state a checkpoint cannot hold.
        DesyncError: in the first update of a run, on all ranks, optimizer state or numbers read from tensors that differ
            between ranks.
    """
    # A step written by hand is counted here and in microbatch_step.
    entered = spans.begin_step_once()
    try:
        if not isinstance(state, TrainState):
            check_state(state, "apply_gradients", "state, metrics = dt.apply_gradients(state, metrics)")
        state._check_not_stale("apply_gradients")
        if state._step_batch is None:
            # The gradients are those of a backward by hand.
            check_block_open(state.spec, "apply_gradients")
            find_new_params(state, "apply_gradients")
            state = state._with_trainable()
        grads = [grad for param in state._trainable.values() if (grad := param.grad) is not None]
        if not grads:
            raise StepError("apply_gradients: no parameter has a gradient. Call microbatch_step (or backward) before.")
        # A gradient of dtrain has looked it up before.
        syncs = state._run_context.model_syncs
        grad_sync = grad_sync_of(state.model) if syncs is None else syncs[0]
        if grad_sync.reducer is not None:
            grad_sync.reducer.check_no_local_grads("apply_gradients")
        is_skipped = nonfinite != "allow" and _skips_update(state, grads, nonfinite)
        # A forward outside of the step left parameters unsharded; free them so stale copies are not reused.
        if state.spec.mesh is not None:
            grad_sync.reshard()
        with DelayedInterrupt() as interrupt:
            interrupt.begin()
            if not is_skipped:
                run: Callable[[], object] = state.optimizer.step
                if state.spec.mesh is not None and not state.spec.plain_params:
                    run = partial(step_optimizer, state.optimizer)
                try:
                    if state._grad_divisor is not None:
                        run = _divide_in_update(run, state.optimizer, grads, state._grad_divisor)
                    if state._run_context.optimizer_checked:
                        run()
                    else:
                        check_update(state, run, caller="apply_gradients")
                except BaseException as error:
                    mark_interrupted_write(state, "the update", error)
                    raise
            state._drop_trainable_gradients()
            if nonfinite == "skip":
                metrics = {**metrics, "skipped": make_metric(float(is_skipped), 1.0, state.device)}
            return state._next(), metrics
    finally:
        if entered:
            spans.end("step")


def _divide_in_update(
    run: Callable[[], object], optimizer: torch.optim.Optimizer, grads: Sequence[Tensor], divisor: Tensor | float
) -> Callable[[], object]:
    """Return ``run`` such that the optimizer's kernel divides ``grads``. If it cannot do so, divide them now.

    The kernel also writes the quotient to the gradients. Of several optimizers, each with such a kernel divides its gradients.

    Mutates: ``grads`` that no kernel divides.
    """
    if not isinstance(divisor, Tensor) and divisor == 1.0:
        return run
    # The kernel takes a float32.
    is_exact = not isinstance(divisor, Tensor) and float(np.float32(divisor)) == divisor
    fused: list[Any] = []
    if is_exact or all([grad.dtype != torch.float64 for grad in grads]):  # noqa: C419
        fused = _fused_members(optimizer)
    if not fused:
        divide_(grads, divisor)
        return run
    if len(fused) < len(list_members(optimizer)):
        divided_later = {id(p.grad) for member in fused for group in member.param_groups for p in group["params"]}
        divide_([grad for grad in grads if id(grad) not in divided_later], divisor)

    def run_divided() -> None:
        if isinstance(divisor, Tensor):
            scale = divisor.to(grads[0].device, torch.float32)
        else:
            scale = torch.full((), divisor, dtype=torch.float32, device=grads[0].device)
        for member in fused:
            member.grad_scale = scale
        try:
            run()
        finally:
            for member in fused:
                del member.grad_scale

    return run_divided


def _fused_members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer, or those of several, whose kernel divides gradients, if no hook of several sees the gradients."""
    is_observed = isinstance(optimizer, NamedOptimizers) and _is_observed(optimizer)
    return [] if is_observed else [member for member in list_members(optimizer) if takes_grad_scale(member)]


def takes_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the kernel of ``optimizer.step`` divides gradients, and no other code sees them in ``step``."""
    if isinstance(optimizer, NamedOptimizers):
        return len(_fused_members(optimizer)) == len(optimizer.members)
    # A scaler of torch uses these attributes.
    attributes = optimizer.__dict__
    if type(optimizer) not in _DIVIDE_IF_FUSED or "grad_scale" in attributes or "found_inf" in attributes:
        return False
    for group in optimizer.param_groups:
        # Not every kernel of the other devices reads the scale. The parameters of a fused group are on one device.
        if not group["fused"] or (group["params"] and group["params"][0].device.type not in ("cpu", "cuda")):
            return False
    return not _is_observed(optimizer)


def _skips_update(state: TrainState, grads: Sequence[Tensor], nonfinite: str) -> bool:
    """Return True if a gradient is not finite and the update is skipped. Mutates: the count of skipped updates in a row.

    Raises:
        NonFiniteError: a gradient is not finite, and ``nonfinite`` is "raise", or the last updates were skipped, too.
    """
    check_choice("apply_gradients", "nonfinite", nonfinite, ("allow", "raise", "skip"))
    is_broken = not all_finite(grads, state.device, caller="apply_gradients")
    counter = state._run_context.monitor.nonfinite_losses
    if nonfinite == "skip":
        counter.skipped_updates = counter.skipped_updates + 1 if is_broken else 0
    limit_reached = counter.limit is not None and counter.skipped_updates >= counter.limit
    if not is_broken or (nonfinite == "skip" and not limit_reached):
        return is_broken
    names, skipped = nonfinite_param_names(state.params), counter.skipped_updates
    state.drop_gradients()
    if nonfinite == "raise":
        raise NonFiniteError(
            f"apply_gradients: step {state.step}: a gradient is not finite (on this rank: {names}). Lower the learning "
            "rate, clip, or pass nonfinite='skip'."
        )
    counter.reset()
    raise NonFiniteError(
        f"apply_gradients: step {state.step}: a gradient is not finite, {skipped} steps in a row (on this rank: {names}). The "
        "updates were skipped, so the parameters are intact. Lower the learning rate, clip, or look at the batches."
    )


def all_finite(tensors: Iterable[Tensor], device: torch.device, *, caller: str = "all_finite") -> Tensor:
    """Return True (bool ``[]``, equal on every rank) if no element of any tensor is infinite or NaN on any rank.

    Args:
        tensors: plain tensors and DTensors, of any dtype.
        device: device of the result, which is the device of the training group.
        caller: function named in the error if ranks are missing.

    Collective: one all-reduce of float32 ``[]`` over all ranks. Host sync: none, except for tensors on another device.
    """
    shards_by_kind = defaultdict(list)
    for tensor in tensors:
        shard = to_local(tensor)
        # torch._foreach_norm fails on empty tensors.
        if shard.numel():
            shards_by_kind[shard.dtype, shard.device].append(shard)
    broken = torch.zeros((), device=device)
    for shards in shards_by_kind.values():
        largest = torch.stack(torch._foreach_norm(shards, math.inf))
        broken += (~torch.isfinite(largest)).sum().to(device)
    if get_dist_info().world_size > 1:
        with report_missing_ranks(caller):
            dist.all_reduce(broken)
    return broken == 0


def nonfinite_param_names(params: Params) -> str:
    """Return the names of parameters whose gradient is infinite or NaN on this rank: the first three, or ``none``.

    Host sync: one for each parameter.
    """
    grads = {name: to_local(param.grad) for name, param in params.items() if param.grad is not None}
    names = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
    return f"{', '.join(names[:3]) or 'none'}{', ...' if len(names) > 3 else ''}"


def update_if_finite(
    update: UpdateFn, state: TrainState, metrics: Metrics, *, name: str, next_state: Callable[[bool], TransformState]
) -> tuple[TrainState, Metrics]:
    """Run ``update`` if all gradients are finite on all ranks, else skip the update. All transforms that skip updates use this.

    Args:
        update: function that applies the gradients.
        state: state with gradients.
        metrics: metrics of the step; ``skipped`` is added, 1 for a skipped update.
        name: name of the transform.
        next_state: function of ``skipped`` that returns the next state of the transform, or raises.

    Collective: as ``all_finite``. Host sync: one, because the host decides.
    """
    grads = [param.grad for param in state._trainable.values() if param.grad is not None]
    broken = not bool(all_finite(grads, state.device, caller=name))
    content = next_state(broken)
    if not broken:
        state, metrics = update(state, metrics)
    skipped = make_metric(float(broken), 1.0, state.device)
    return state.with_transform_state(name, content), {"skipped": skipped, **metrics}


def tick(state: TrainState) -> TrainState:
    """Advance the clock by one step, with the counts that ranks agreed on in ``microbatch_step``. Spends ``state``.

    Raises:
        StepError: no step is in progress, because ``microbatch_step`` did not run on this state.
    """
    state._check_not_stale("tick")
    clock = next_clock(state)
    spans.record_step(clock.step, samples=clock.samples, tokens=clock.tokens)
    statuses = () if state._step_batch is None else state._step_batch.statuses
    for status in statuses:
        status.consumed = True
    context, history = current_context(), state._loader_history
    if not statuses:
        context.untracked_steps += 1
        history = history.after_untracked_step(context.issuing_loader)
    context.issuing_loader = None
    return state._next(clock=clock, _step_counts=None, _step_batch=None, _grad_divisor=None, _loader_history=history)


def optimizer_step(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Run ``apply_gradients`` and advance the clock: the second half of a step written by hand.

    Mutates: parameters, optimizer state, ``.grad`` (set to None); spends ``state``.
    Collective: none.

    Example:
        for batch in loader:
            state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=8)
            dt.clip_grad_norm_(state.params, 1.0)
            state, metrics = dt.optimizer_step(state, metrics)

    Raises:
        StepError: no step is in progress, because the gradients are those of a backward by hand; before the update.
        Exception: as ``apply_gradients``.
    """
    if isinstance(state, TrainState) and state._step_counts is None:
        state._check_not_stale("optimizer_step")
        raise StepError(
            "optimizer_step: no step is in progress, so the clock has no counts of a batch. Call dt.microbatch_step before. "
            "After a backward by hand call dt.apply_gradients, which leaves the clock as it is."
        )
    with DelayedInterrupt() as interrupt:
        interrupt.begin()
        state, metrics = apply_gradients(state, metrics)
        return tick(state), metrics


def set_lr_(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group to ``lr``. Mutates: ``optimizer.param_groups``.

    Example:
        schedule = dt.schedules.warmup(dt.schedules.cosine(3e-4, 0.0, 1000), 100)
        for batch in loader:
            dt.step.set_lr_(optimizer, schedule(state.clock.step))
            state, metrics = step(state, batch)
    """
    for group in optimizer.param_groups:
        group["lr"] = lr


class DelayedInterrupt:
    """Context that delays SIGINT from ``begin`` on, and raises ``KeyboardInterrupt`` at its end if a SIGINT arrived.

    A second SIGINT interrupts at once. A custom signal handler stays in place. Threads receive no signals, so the context does
    nothing in a thread.
    """

    _active = False
    _received = False

    def begin(self) -> None:
        """Delay SIGINT from now on. Mutates: this process's handler of SIGINT, until the end of the context."""
        # Inside of another such context the handler is that of the other.
        if _get_handler(signal.SIGINT) is not signal.default_int_handler:
            return
        self._active = True
        try:
            _set_handler(signal.SIGINT, self._on_signal)
        # Python refuses a handler that a thread sets.
        except ValueError:
            self._active = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            signal.default_int_handler(number, frame)
        self._received = True

    def __enter__(self) -> DelayedInterrupt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._active:
            _set_handler(signal.SIGINT, signal.default_int_handler)
        if self._received and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt


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
    if isinstance(optimizer, NamedOptimizers):
        optimizer.step(run=step_optimizer)
        return
    if _can_use_shards(optimizer):
        with torch.no_grad():
            shards = _ShardViews(optimizer)
        with shards.in_place():
            optimizer.step()
        shards.store_new_state()
        return
    # ``item``, ``float``, ``int`` and ``bool`` of a tensor all are one operation. A handler costs other operations nothing.
    handlers: dict[Any, Any] = dtensor_dispatcher()._custom_op_handlers
    before = {**handlers}
    handlers[_READ_NUMBER] = lambda operation, args, kwargs: args[0].detach().full_tensor().item()
    handlers.update(dict.fromkeys(_UNDEFINED_IF_EMPTY, _reduce_whole))
    try:
        optimizer.step()
    finally:
        handlers.clear()
        handlers.update(before)


def _reduce_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a reduction on the whole tensor if a rank has an empty shard, which is a small tensor; else as torch does."""
    tensor, *others = args
    rows = {dim: -(-tensor.shape[dim] // pieces) for dim, pieces in chunks_per_dim(tensor).items()}
    has_empty_shard = any(rows[dim] * (pieces - 1) >= tensor.shape[dim] for dim, pieces in chunks_per_dim(tensor).items())
    if tensor.numel() and has_empty_shard:
        return replicate_like(tensor, operation(tensor.full_tensor(), *others, **kwargs))
    handlers = dtensor_dispatcher()._custom_op_handlers
    handler = handlers.pop(operation)
    try:
        return operation(*args, **kwargs)
    finally:
        handlers[operation] = handler


def _can_use_shards(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and not vars(kind).get("updates_elementwise"):
        return False
    if _is_observed(optimizer) or any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return any(map(is_dtensor, params)) and all(param.grad is None or is_placed_like(param.grad, param) for param in params)


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``step`` was replaced or has hooks, which may look at parameters and gradients."""
    # Schedulers of torch replace ``step`` by a function that only counts calls.
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        return True
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if own_hooks or _global_optimizer_post_hooks:
        return True
    return bool(_global_optimizer_pre_hooks) and not all(map(is_reducer_hook, _global_optimizer_pre_hooks.values()))


class _ShardViews:
    """Views of the shards of an optimizer's parameters, with the shards of their gradients and of their state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._shards = [[_view_with_grad(param) for param in params] for params in self._params]
        self._state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, shard in self._pairs():
            if param in optimizer.state:
                self._state[shard] = {
                    key: to_local(value) if isinstance(value, Tensor) else value
                    for key, value in optimizer.state[param].items()
                }

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


def _view_with_grad(param: Tensor) -> Tensor:
    """Return a view of the parameter's shard, whose gradient is the shard of the gradient; a plain parameter is its own."""
    if not is_dtensor(param):
        return param
    # A view, so that the shard itself never has a gradient.
    view = to_local(param).detach()
    if param.grad is not None:
        view.grad = to_local(param.grad)
    return view
