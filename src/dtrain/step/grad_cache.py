"""Compute the gradient of a loss that sees the whole batch at once, with the memory of a microbatch.

The model runs in microbatches without activations, the loss runs once, and each microbatch runs again for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dtrain.data.batch import (
    BatchSpec,
    FailedBatch,
    MicrobatchList,
    check_microbatch_size,
    count_samples,
    count_samples_and_tokens,
    list_tensors,
    narrow_batch,
    to_device,
)
from dtrain.dist.incident import is_collective_error
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import is_out_of_memory
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.gradient_run import GradientRun, run_gradient
from dtrain.step.microbatches import BatchWatch, Microbatches
from dtrain.step.normalization import check_loss, declared_weights
from dtrain.step.sanity_checks import check_not_mean
from dtrain.typing import Batch, LossFn, Metrics

_NAME = "grad_cache_step"


def grad_cache_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
) -> tuple[TrainState, Metrics]:
    """Compute gradients of a loss whose samples see each other, as negatives do: the model is split, the loss is not.

    A contrastive loss of a part of the batch is a different loss, with fewer negatives. So ``loss_fn`` is called once, with the
    whole local batch and a proxy for the model. The proxy embeds microbatch by microbatch without keeping activations. The
    backward of the loss stops at these embeddings. Then each microbatch runs again, with the same random numbers, and the
    gradient of its embeddings goes back through the model. With the model ``f`` and the loss ``L`` of all embeddings ``z``,

        dL/dw = sum over microbatches i of (df(x_i)/dw)^T dL/dz_i,    z_i = f(x_i)

    The result is the gradient of the unsplit step, up to rounding, for one further forward. If every rank has one microbatch,
    its activations are kept, and nothing runs twice. The function replaces ``microbatch_step``, also under ``auto_microbatch``,
    and both accept the same ``loss_fn``.

    A rank without samples calls ``loss_fn`` with its empty batch, to take part in the loss's collectives with no rows.
    Its model runs on no rows, too. A rank that runs out of microbatches repeats none for its gradient.

    Args:
        state: the newest state of the run, which stays valid; its parameters do not change.
        batch: this rank's samples, on any device; all of them are moved to the model's device.
        loss_fn: summed loss and weight of the local batch. It calls ``model(...)`` once or several times, on tensors that need
            no gradient. The first axis of these tensors and of the model's outputs is the samples (or several rows per sample).
            The model's outputs are kept for the whole batch, so return embeddings, not hidden states. Parameters that the loss
            reads from the model, such as a learned temperature, get their gradient, too.
        microbatch_size: samples per forward; None uses the whole local batch.
        batch_spec: axes, ``count`` and ``weight`` of the batch, as in ``microbatch_step``; the model's inputs are split, so
            ``split`` has no effect.

    Returns:
        ``state`` with the counts that ranks agreed on, and metrics ``loss``, the terms and ``aux``, as local sums.

    Mutates: as ``microbatch_step``. Buffers change once per microbatch; changes of a forward under ``no_grad`` are undone.
    Collective: as ``microbatch_step``, with the model's gathers once more for each microbatch, and those of ``loss_fn`` once.
    Host sync: none.

    Example:
        def loss_fn(model, batch):
            z = torch.nn.functional.normalize(model(batch), dim=1)
            return my_loss(z, dt.dist.all_gather_with_grad(z))  # a LossSum of this rank's rows against all rows

        step = dt.compose_step(loss_fn, microbatch_size=32, grad=dt.step.grad_cache_step)

    Raises:
        ConfigError: the loss never called ``model(...)``; arguments or outputs of the model without one number of rows;
            arguments that need a gradient; a sharded part of the model that was not called by ``model(...)``.
        Exception: the errors of ``microbatch_step``.

    Source: Gao et al. 2021, arXiv:2101.06983, section 3.2 (called GradCache there).
    """

    def prepare() -> tuple[Microbatches, Mapping[str, Tensor | float]]:
        # The number of gathers depends on the number of microbatches, so traces cannot be replayed.
        if state._guard is not None:
            state._guard.traces.always_check = True
        if isinstance(batch, FailedBatch):
            raise batch.error
        if isinstance(batch, MicrobatchList):
            raise ConfigError(
                f"{_NAME}: batch must be whole, because the loss runs once on it, got {len(batch)} microbatches. "
                "Leave max_tokens out of build_loader."
            )
        samples, tokens = count_samples_and_tokens(batch, batch_spec)
        if microbatch_size is not None:
            check_microbatch_size(microbatch_size)
        # The model's inputs are split later, when the loss calls the model.
        starts = range(0, samples, microbatch_size or max(samples, 1))
        counted = Microbatches(batch=batch, batches=starts, tensors=list_tensors(batch), samples=samples, tokens=tokens)
        return counted, declared_weights(batch_spec, batch)

    return run_gradient(state, batch, _NAME, prepare, partial(_accumulate, loss_fn))


def _accumulate(loss_fn: LossFn, run: GradientRun) -> None:
    """Run the three passes. A probe runs the first two completely, because they need the memory of the whole batch."""
    state, grad_sync, guard, microbatches = run.state, run.grad_sync, run.guard, run.microbatches
    own = len(microbatches.batches)
    # Replicas take part in no forward of the others.
    needed = run.required_microbatches if grad_sync.needs_all_microbatches else max(own, 1)
    records_units = own > 0 and run.is_uneven and grad_sync.needs_all_microbatches
    count = min(needed, run.num_microbatches)
    cache = ForwardCache(state.model, [*microbatches.batches, microbatches.samples], needed)
    with restore_buffers(state.model) if cache.recomputes else nullcontext():
        loss = loss_fn(cast(nn.Module, ModelProxy(cache)), to_device(microbatches.batch, state.device))
    check_loss(loss, caller=_NAME)
    if state.step == 0:
        check_not_mean(loss, _NAME, state=state, batch=microbatches.batch, loss_fn=None)
    param_grads = _compute_output_grads(state, cache, run.normalizer.scaled_loss(loss, loss.total))
    # Forwards without a backward left parameters unsharded.
    if cache.recomputes:
        grad_sync.begin_step(state)
    # Units are recorded in the first microbatch, and called empty in those that this rank does not have.
    if records_units:
        grad_sync.follow_plan(lambda: None, compare=False, uneven=True)
    for index in range(count):
        grad_sync.before_microbatch(last=index == count - 1, params=state._trainable.values())
        if index >= own and (own or not grad_sync.needs_all_microbatches):
            outputs, empty = list[tuple[Tensor, Tensor]](), grad_sync.forward_empty()
        else:
            if guard is not None and index == 0:
                guard.begin_first_forward()
            with nullcontext() if cache.is_own(index) else restore_buffers(state.model):
                outputs = cache.outputs_and_grads(index)
            if guard is not None and index == 0:
                guard.end_first_forward()
            empty = grad_sync.complete_forward(torch.zeros((), device=state.device)) if records_units else None
        pairs = outputs if index else [*outputs, *param_grads]
        if empty is not None and empty.requires_grad:
            pairs.append((empty, torch.ones_like(empty)))
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
    run.sums.add(loss)


def _compute_output_grads(state: TrainState, cache: ForwardCache, objective: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Set the gradients of the model's outputs in ``cache``; return those of parameters that the loss reads from the model.

    In a sharded model these parameters are unsharded ones, because the loss sees the outermost unit after its forward.
    """
    spec = state.spec
    has_units = spec.mesh is not None and not spec.plain_params
    unsplit = [state.params[name] for name in spec.ignored_params] if has_units else list(state._trainable.values())
    params = [param for param in (*unsplit, *grad_sync_of(state.model).unsharded_params()) if param.requires_grad]
    leaves = cache.leaves()
    if not leaves:
        raise ConfigError(
            f"{_NAME}: loss_fn must call model(...) for a gradient, and never did, so nothing can be split into microbatches. "
            "Embed with model(...), not with another method of the model, or use dt.microbatch_step."
        )
    if any(leaf.grad is not None for leaf in leaves):
        raise ConfigError(
            f"{_NAME}: loss_fn must not call backward(), because the step calls backward itself. Return the LossSum alone."
        )
    grads = torch.autograd.grad(objective, [*leaves, *params], allow_unused=True)
    if any(param.grad is not None for param in state._trainable.values()):
        raise ConfigError(
            f"{_NAME}: the loss ran a sharded part of the model without model(...), so its gradient would be lost. Run "
            "the part in the model's forward."
        )
    cache.set_grads(grads[: len(leaves)])
    return [(param, grad) for param, grad in zip(params, grads[len(leaves) :], strict=True) if grad is not None]


# Values that a model may return beside tensors.
_PLAIN_TYPES = (bool, int, float, str, type(None))


@dataclass(slots=True, kw_only=True, eq=False)
class _CachedForward:
    """One call of the model by the loss.

    Args:
        inputs: ``[args, kwargs]`` for the whole local batch.
        row_ranges: first row and number of rows of each microbatch; empty on a rank without rows.
        autocast: function that returns a context with the autocast of the call.
        watch: versions of the inputs before the first forward.
        rng_snapshots: state of the random generators before each forward.
        outputs: outputs of a single microbatch, with their graph.
        leaves: floating-point outputs for the whole batch, by their index among the outputs.
        grads: gradients of ``leaves``, except the unused ones.
    """

    inputs: list[Any]
    row_ranges: Sequence[tuple[int, int]]
    autocast: Callable[[], AbstractContextManager[Any]]
    watch: BatchWatch
    rng_snapshots: list[RNGSnapshot] = field(default_factory=list)
    outputs: Sequence[Any] = ()
    leaves: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)

    def row_range(self, index: int) -> tuple[int, int] | None:
        """Return the rows of microbatch ``index``; None for a padding microbatch."""
        rows = self.row_ranges[index] if index < len(self.row_ranges) else (0, 0)
        return rows if rows[1] else None

    def microbatch_inputs(self, index: int) -> list[Any]:
        """Return the inputs of microbatch ``index``; a padding microbatch repeats the first one, or has no rows."""
        rows = self.row_range(index) or next((rows for rows in self.row_ranges if rows[1]), (0, 0))
        return list(narrow_batch(self.inputs, *rows))


class ForwardCache:
    """Calls of ``model`` in one step, with their outputs and gradients.

    Args:
        bounds: first sample of each of this rank's microbatches, and the number of samples.
        microbatches: number of forwards of each call, equal on all ranks.
    """

    def __init__(self, model: nn.Module, bounds: Sequence[int], microbatches: int) -> None:
        self.model = model
        # A single microbatch keeps its graph and does not run again.
        self.recomputes = microbatches > 1
        self._bounds, self._microbatches = bounds, microbatches
        self._calls: list[_CachedForward] = []

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the model's outputs for the whole local batch, as leaves of a new graph.

        Mutates: this cache; the random generators, as the forwards do.
        """
        needs_grad, inputs = torch.is_grad_enabled(), [args, dict(kwargs)]
        if any(tensor.requires_grad for tensor in list_tensors(inputs)):
            raise ConfigError(
                f"{_NAME}: arguments of model(...) must not need a gradient, which would stop there. Call the model on data, "
                "and compute everything that is split into microbatches inside the model."
            )
        row_ranges = self._split_rows(inputs)
        kind = list_tensors(inputs)[0].device.type
        # The cache of autocast would hold weights that were cast without a graph.
        autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        call = _CachedForward(inputs=inputs, row_ranges=row_ranges, autocast=autocast, watch=BatchWatch(list_tensors(inputs)))
        own, empty = list[list[Any]](), list[Any]()
        for index in range(self._microbatches):
            if needs_grad and self.recomputes:
                call.rng_snapshots.append(RNGSnapshot())
            with torch.set_grad_enabled(needs_grad and not self.recomputes):
                flat, tree = _forward(self.model, call, index)
            if call.row_range(index):
                own.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat])
            elif not empty:
                empty = [leaf.detach()[:0] if isinstance(leaf, Tensor) else leaf for leaf in flat]
            if not self.recomputes:
                call.outputs = flat
        joined = [
            torch.cat(list(leaves)) if len(leaves) > 1 and isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(own or [empty]), strict=True)
        ]
        if needs_grad:
            call.leaves = {
                index: leaf.requires_grad_()
                for index, leaf in enumerate(joined)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            }
            self._calls.append(call)
        return tree_unflatten(joined, tree)

    def leaves(self) -> list[Tensor]:
        """Return all floating-point outputs of the calls."""
        return [leaf for call in self._calls for leaf in call.leaves.values()]

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Set the gradients of ``leaves()``, None for an unused output. Mutates: this cache, which drops the leaves."""
        remaining = iter(grads)
        for call in self._calls:
            by_index = {index: next(remaining) for index in call.leaves}
            call.grads = {index: grad for index, grad in by_index.items() if grad is not None}
            call.leaves.clear()

    def is_own(self, index: int) -> bool:
        """Return True if microbatch ``index`` belongs to this rank and is no padding."""
        return index < len(self._bounds) - 1

    def outputs_and_grads(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs of microbatch ``index`` with their graph, and their gradients: zeros for a padding microbatch.

        Mutates: buffers, as the forwards do; no random generator.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for call in self._calls:
            outputs = call.outputs
            if self.recomputes:
                # The model writes before its second run, and loss_fn may write after its call of the model.
                if not index:
                    call.watch.check(_NAME, "loss_fn or the model")
                with call.rng_snapshots[index].replay():
                    outputs, _ = _forward(self.model, call, index)
            rows = call.row_range(index)
            for leaf, grad in call.grads.items():
                if outputs[leaf].requires_grad:
                    pairs.append((outputs[leaf], grad.narrow(0, *rows) if rows else torch.zeros_like(outputs[leaf])))
        return pairs

    def _split_rows(self, inputs: list[Any]) -> list[tuple[int, int]]:
        """Return the rows of each microbatch, for inputs with one or several rows per sample."""
        try:
            rows = count_samples(inputs)
        except ConfigError:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in list_tensors(inputs))
            raise ConfigError(
                f"{_NAME}: the tensors of a model(...) call must have one number of rows (first axis), got shapes "
                f"{shapes or 'of no tensor'}. Give each tensor a row per sample."
            ) from None
        samples = self._bounds[-1]
        bounds = [bound * rows // samples for bound in self._bounds] if samples else [0, rows]
        return [(start, end - start) for start, end in pairwise(bounds)]


class ModelProxy:
    """Proxy of the model for the loss: a call runs in microbatches, and attributes are those of the model."""

    __slots__ = ("_dtrain_cache",)

    def __init__(self, cache: ForwardCache) -> None:
        self._dtrain_cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtrain_cache.forward(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dtrain_cache.model, name)

    # isinstance(model, nn.Module) is True for the proxy, as for weakref.proxy.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dtrain_cache.model)


def _forward(model: nn.Module, call: _CachedForward, index: int) -> tuple[list[Any], TreeSpec]:
    args, kwargs = call.microbatch_inputs(index)
    rows = count_samples([args, kwargs])
    try:
        with call.autocast():
            flat, tree = tree_flatten(model(*args, **kwargs))
    except (RuntimeError, ValueError, IndexError) as error:
        if rows or is_collective_error(error) or is_out_of_memory(error):
            raise
        got = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{_NAME}: the model must accept no rows on a rank without samples, got {got}. Give each rank one."
        ) from error
    for leaf in flat:
        if not isinstance(leaf, (Tensor, *_PLAIN_TYPES)) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,)):
            got = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ConfigError(
                f"{_NAME}: the model must return tensors with one row per input row ({rows}), got {got}. Return embeddings, "
                "and compute the loss of them in loss_fn."
            )
    return flat, tree
