"""``grad_cache_step``: the gradient of a loss that sees the whole batch at once, for the memory of a microbatch.

``Calls``: what a loss asked of its model, cut into microbatches, and how each of them is run again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dtrain.batch import (
    BatchSpec,
    FailedBatch,
    check_microbatch_size,
    count_samples,
    list_tensors,
    make_zero_samples,
    narrow_batch,
    to_device,
)
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.microbatch_step import run_step
from dtrain.step.microbatches import CountFn, Microbatches, count_batch
from dtrain.step.normalization import LossNormalizer, MetricAccumulator, check_loss, declared_weights
from dtrain.step.oom_guard import StepGuard, current_guard
from dtrain.step.sanity_checks import warn_if_mean
from dtrain.typing import Batch, LossFn, Metrics, WeightFn

_NAME = "grad_cache_step"


def grad_cache_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
    weight_fn: WeightFn | None = None,
) -> tuple[TrainState, Metrics]:
    """``microbatch_step`` for a loss whose samples see each other, as negatives do: the model is cut, the loss is not.

    A contrastive loss of a part of the batch is another loss, with fewer negatives. So here ``loss_fn`` is called once, with
    the whole local batch and a stand-in for the model, which embeds microbatch by microbatch without keeping activations.
    Backward of the loss then stops at these embeddings. At last each microbatch is run again, with the same random numbers,
    and the embeddings' gradient goes back through it. With ``f`` the model and ``L`` the loss of all embeddings ``z``,

        dL/dw = sum over microbatches i of (df(x_i)/dw)^T dL/dz_i,    z_i = f(x_i)

    which is the gradient of the unsplit step, up to rounding, for one further forward. Where everybody has one microbatch, its
    activations are kept, and nothing runs twice.

        def loss_fn(model, batch):
            z = torch.nn.functional.normalize(model(batch), dim=1)
            return my_loss(z, dt.dist.all_gather_with_grad(z))  # a LossSum of this rank's rows against everybody's

        step = dt.compose_step(loss_fn, grad=partial(dt.grad_cache_step, microbatch_size=32))

    It takes the place of ``microbatch_step``, also under ``auto_microbatch``, and the same ``loss_fn`` runs with either.

    Args:
        state: not spent; its parameters are not changed.
        batch: this rank's samples, on any device; all of them are moved to the model's device.
        loss_fn: summed loss and weight of the local batch. It calls ``model(...)`` once or several times, on tensors that need
            no gradient; in them and in what the model returns the first axis is that of the samples (or so many rows for each).
            What the model returns is kept whole: let it return embeddings, not hidden states. Parameters that the loss takes
            from the model itself, such as a learned temperature, get their gradient too.
        microbatch_size: samples per forward; None takes the whole local batch at once.
        batch_spec: how samples and tokens of ``batch`` are counted; None takes the first axis and counts no tokens.
        count: counts one: ``batch -> samples``, or ``(samples, tokens)``.
        weight_fn: as of ``microbatch_step``.

    Returns:
        ``state`` with the ranks' agreed tally, and metrics ``loss``, the terms, and the loss function's ``aux``, as local sums.

    A rank without samples calls ``loss_fn`` with its empty batch, so that it is in the loss's collectives with no rows; its
    model runs on zeros, which count nowhere.

    Mutates: as ``microbatch_step``. Buffers change once per microbatch; what a forward under ``no_grad`` would do to them is
        taken back.
    Collective: as ``microbatch_step``, with the model's gathers once more for each microbatch, and those of ``loss_fn`` once.
    Host sync: none.

    Raises:
        ConfigError: the loss never called ``model(...)``; rows of its arguments, or of what it returned, that cannot be told;
            arguments that need a gradient; a sharded part of the model that was called in another way than by ``model(...)``.
        Exception: all that ``microbatch_step`` raises, and as it does.

    Source: Gao et al. 2021, arXiv:2101.06983, section 3.2 (there called GradCache).
    """
    attempt = current_guard(state.run_context)
    if attempt is not None:
        attempt.traces.always_check = True  # how many gathers there are depends on the number of microbatches
    return run_step(
        state,
        batch,
        lambda: (_count_microbatches(batch, microbatch_size, batch_spec, count), declared_weights(weight_fn, batch)),
        partial(_accumulate, loss_fn),
        caller=_NAME,
    )


def _count_microbatches(
    batch: Batch, microbatch_size: int | None, batch_spec: BatchSpec | None, count: CountFn | None
) -> Microbatches:
    """What ``batch`` counts, and how many microbatches that makes; they are cut where the model is called."""
    if isinstance(batch, FailedBatch):
        raise batch.error
    samples, tokens = count_batch(batch, batch_spec=batch_spec, count=count)
    if microbatch_size is not None:
        check_microbatch_size(microbatch_size)
    starts = range(0, samples, microbatch_size or max(samples, 1))
    return Microbatches(batch=batch, batches=starts, samples=samples, tokens=tokens)


def _accumulate(
    loss_fn: LossFn,
    state: TrainState,
    parts: Microbatches,
    microbatches: int,
    weights: LossNormalizer,
    attempt: StepGuard | None,
) -> Metrics:
    """The three passes; a rehearsal runs the first two whole, since their memory is that of the whole batch."""
    reduction = grad_sync_of(state.model)
    calls = ForwardCache(state.model, [*parts.batches, parts.samples], microbatches)
    with restore_buffers(state.model) if calls.recomputes else nullcontext():
        loss = loss_fn(cast(nn.Module, ModelProxy(calls)), to_device(parts.batch, state.device))
    check_loss(loss, caller=_NAME)
    if state.step == 0:
        warn_if_mean(loss, _NAME)
    direct = _compute_output_grads(state, calls, weights.scaled_loss(loss))
    if calls.recomputes:
        reduction.begin_step(
            within_replica=state.spec.replica_info is not None
        )  # forwards without a backward have left parameters gathered
    run = microbatches if attempt is None else attempt.limit_microbatches(microbatches)
    for index in range(run):
        last = index == run - 1
        reduction.before_microbatch(last=last, params=state.params.values())
        if attempt is not None:
            attempt.enter_phase("forward, later" if index else "forward, first")
        with nullcontext() if calls.is_own(index) else restore_buffers(state.model):
            outputs = calls.outputs_and_grads(index)
        if attempt is not None:
            attempt.enter_phase("backward, last" if last else "backward, early")
        pairs = outputs if index else [*outputs, *direct]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
    reduction.add_stashed_grads(state.params.values())
    sums = MetricAccumulator(state.device)
    sums.add(loss)
    return sums.metrics()


def _compute_output_grads(state: TrainState, cache: ForwardCache, objective: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Give ``cache`` the gradient of what they returned; that of parameters which the loss takes from the model itself.

    Those of a sharded model are its gathered ones, since what the loss can see of it is the outermost unit after its forward.
    """
    spec = state.spec
    whole = [state.params[name] for name in spec.ignored_params] if spec.mesh is not None else list(state.params.values())
    own = [param for param in (*whole, *grad_sync_of(state.model).unsharded_params()) if param.requires_grad]
    kept = cache.leaves()
    if not kept:
        raise ConfigError(
            f"{_NAME}: the loss never called model(...) for a gradient, so there is nothing to cut into microbatches; embed "
            "by model(...), not by another method of it, or use dt.microbatch_step"
        )
    if any(leaf.grad is not None for leaf in kept):
        raise ConfigError(
            f"{_NAME}: the loss function has called backward(). The step calls backward itself; return the LossSum"
        )
    found = torch.autograd.grad(objective, [*kept, *own], allow_unused=True)
    if any(param.grad is not None for param in state.params.values()):
        raise ConfigError(
            f"{_NAME}: the loss ran a sharded part of the model in another way than by model(...), so its gradient would be "
            "lost; do that in the model's forward"
        )
    cache.set_grads(found[: len(kept)])
    return [(param, grad) for param, grad in zip(own, found[len(kept) :], strict=True) if grad is not None]


_WHERE = "grad_cache_step"
_PLAIN_TYPES = (bool, int, float, str, type(None))  # what a model may return beside tensors


@dataclass(slots=True, kw_only=True, eq=False)
class _CachedForward:
    """One call of the model by the loss.

    Args:
        inputs: ``[args, kwargs]`` for the whole local batch.
        row_ranges: first row and number of rows of each microbatch; none of a rank without rows.
        autocast: makes a context with the autocast that the loss called in.
        rng_snapshots: the random generators before each forward.
        outputs: of the only forward, with their graph, where there is one microbatch.
        leaves: what was returned and may get a gradient, whole, by its place among the outputs.
        grads: the gradients of ``leaves``, of those that the loss made use of.
    """

    inputs: list[Any]
    row_ranges: Sequence[tuple[int, int]]
    autocast: Callable[[], AbstractContextManager[Any]]
    rng_snapshots: list[RNGSnapshot] = field(default_factory=list)
    outputs: Sequence[Any] = ()
    leaves: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)

    def row_range(self, index: int) -> tuple[int, int] | None:
        """The rows of microbatch ``index``; None for one that counts nothing: other ranks have more."""
        place = self.row_ranges[index] if index < len(self.row_ranges) else (0, 0)
        return place if place[1] else None

    def microbatch_inputs(self, index: int) -> list[Any]:
        """Its inputs; in place of one that counts nothing the first that does, or zeros."""
        place = self.row_range(index) or next((place for place in self.row_ranges if place[1]), None)
        return list(narrow_batch(self.inputs, *place) if place else make_zero_samples(self.inputs))


class ForwardCache:
    """The calls of ``model`` in one step.

    Args:
        bounds: the samples at which this rank's microbatches begin, and their number.
        microbatches: how many forwards each call makes, the same on all ranks.
    """

    def __init__(self, model: nn.Module, bounds: Sequence[int], microbatches: int) -> None:
        self.model = model
        self.recomputes = microbatches > 1  # a single microbatch keeps its graph, and is not run again
        self._bounds, self._microbatches = bounds, microbatches
        self._calls: list[_CachedForward] = []

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns for the whole local batch: leaves, from which a gradient is taken.

        Mutates: these calls; the random generators, as the forwards do.
        """
        wanted, inputs = torch.is_grad_enabled(), [args, dict(kwargs)]
        if any(tensor.requires_grad for tensor in list_tensors(inputs)):
            raise ConfigError(
                f"{_WHERE}: an argument of model(...) needs a gradient, which would stop there; call the model on data, and "
                "let it do all that is to be cut into microbatches"
            )
        places = self._split_rows(inputs)
        call = _CachedForward(inputs=inputs, row_ranges=places, autocast=_capture_autocast(list_tensors(inputs)[0].device))
        own, empty = list[list[Any]](), list[Any]()
        for index in range(self._microbatches):
            if wanted and self.recomputes:
                call.rng_snapshots.append(RNGSnapshot())
            with torch.set_grad_enabled(wanted and not self.recomputes):
                flat, tree = _forward(self.model, call, index)
            if call.row_range(index):
                own.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat])
            elif not empty:
                empty = [leaf.detach()[:0] if isinstance(leaf, Tensor) else leaf for leaf in flat]
            if not self.recomputes:
                call.outputs = flat
        joined = [_concatenate(leaves) for leaves in zip(*(own or [empty]), strict=True)]
        if wanted:
            call.leaves = {at: leaf.requires_grad_() for at, leaf in enumerate(joined) if _is_differentiable(leaf)}
            self._calls.append(call)
        return tree_unflatten(joined, tree)

    def leaves(self) -> list[Tensor]:
        """All that was returned and may get a gradient."""
        return [leaf for call in self._calls for leaf in call.leaves.values()]

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of ``kept()``, None where the loss made no use of it. Mutates: these calls, which forget the rest."""
        left = iter(grads)
        for call in self._calls:
            found = {at: next(left) for at in call.leaves}
            call.grads = {at: grad for at, grad in found.items() if grad is not None}
            call.leaves.clear()

    def is_own(self, index: int) -> bool:
        """Whether microbatch ``index`` is one of this rank's own."""
        return index < len(self._bounds) - 1

    def outputs_and_grads(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What microbatch ``index`` returns, with its graph, and the gradient of it: zeros where it counts nothing.

        Mutates: buffers, as its forwards do; no random generator.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for call in self._calls:
            outputs = call.outputs
            if self.recomputes:
                with _replay_rng(call.rng_snapshots[index]):
                    outputs, _ = _forward(self.model, call, index)
            place = call.row_range(index)
            for at, grad in call.grads.items():
                if outputs[at].requires_grad:
                    pairs.append((outputs[at], grad.narrow(0, *place) if place else torch.zeros_like(outputs[at])))
        return pairs

    def _split_rows(self, inputs: list[Any]) -> list[tuple[int, int]]:
        """Where the rows of ``inputs`` are cut: as the samples are, also when there are several rows to each."""
        try:
            rows = count_samples(inputs)
        except ConfigError:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in list_tensors(inputs))
            raise ConfigError(
                f"{_WHERE}: the tensors that model(...) is called with must have one number of rows (first axis), got shapes "
                f"{shapes or 'of no tensor'}; give each of them a row per sample"
            ) from None
        samples = self._bounds[-1]
        cuts = [bound * rows // samples for bound in self._bounds] if samples else [0, rows]
        return [(start, end - start) for start, end in pairwise(cuts)]


class ModelProxy:
    """What a loss gets in place of the model: called, it embeds in microbatches; for the rest it is the model."""

    __slots__ = ("_dtrain_calls",)

    def __init__(self, cache: ForwardCache) -> None:
        self._dtrain_calls = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtrain_calls.forward(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dtrain_calls.model, name)

    @property  # type: ignore[misc]  # for isinstance(model, nn.Module), as weakref.proxy does it
    def __class__(self) -> type:
        return type(self._dtrain_calls.model)


def _forward(model: nn.Module, call: _CachedForward, index: int) -> tuple[list[Any], TreeSpec]:
    args, kwargs = call.microbatch_inputs(index)
    with call.autocast():
        flat, tree = tree_flatten(model(*args, **kwargs))
    rows = count_samples([args, kwargs])
    for leaf in flat:
        if not isinstance(leaf, (Tensor, *_PLAIN_TYPES)) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,)):
            got = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ConfigError(
                f"{_WHERE}: the model must return tensors with a row for each row that it was called with ({rows}), got {got}; "
                "return embeddings, and compute the loss of them in loss_fn"
            )
    return flat, tree


def _concatenate(leaves: Sequence[Any]) -> Any:
    return torch.cat(list(leaves)) if len(leaves) > 1 and isinstance(leaves[0], Tensor) else leaves[0]


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _capture_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts with the autocast of now. Weights cast without a graph must not be found again where one is wanted."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


@contextmanager
def _replay_rng(drawn: RNGSnapshot) -> Iterator[None]:
    """A context in which the random generators go on from where they were. Mutates: them, while it lasts."""
    now = RNGSnapshot()
    drawn.restore()
    try:
        yield
    finally:
        now.restore()
