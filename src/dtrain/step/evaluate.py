"""Evaluate a model over a dataset, with each sample counted once on any number of ranks.

``auto_batch_eval`` runs a function over a batch in the largest parts that fit in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import nn

from dtrain import spans
from dtrain.arguments import check_int, explain_arguments
from dtrain.data.batch import (
    BatchSpec,
    MicrobatchList,
    count_and_split,
    count_samples_and_tokens,
    get_batch_infos,
    list_microbatches,
    list_tensors,
    to_device,
)
from dtrain.device import default_generators
from dtrain.dist.collective_replay import TraceCache
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot
from dtrain.dist.step_sync import BackwardSync, RankStatus, StepCounts
from dtrain.errors import ConfigError, PeerError, StepError
from dtrain.launch import heartbeats
from dtrain.memory.device_memory import release_cached_memory
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.sequence_attention import SplitLoss
from dtrain.shard.spec import get_device, get_spec
from dtrain.shard.unshard import eval_mode
from dtrain.state import check_block_open
from dtrain.step.microbatches import BatchWatch, tensor_shapes
from dtrain.step.normalization import MetricAccumulator, check_loss
from dtrain.step.oom_guard import StepAborted, StepGuard, raise_does_not_fit
from dtrain.typing import Batch, LossFn, LossSum, Metrics


@explain_arguments
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    loss_fn: LossFn,
    *,
    batch_spec: BatchSpec | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
) -> Metrics:
    """Return the loss (and ``aux``) of ``model`` over all batches of ``loader``, as local sums.

    ``reduce_metrics`` turns the sums into means over all ranks. Ranks may have different numbers of batches; a rank without
    further batches repeats one that does not count.

    Args:
        model: sharded or plain model, run in evaluation mode without gradients, and each module's mode is restored.
        loader: this rank's batches, of any number and size; a dtrain loader runs one epoch and keeps its position.
        loss_fn: the loss function of training.
        batch_spec: description of the batch, as in ``microbatch_step``; None uses the first axis.
        microbatch_size: samples per forward; ``"auto"`` halves a size that does not fit, see ``auto_batch_eval``. None runs
            each batch whole.

    Collective: one small record per batch and one at the end, on the control channel, and the model's own gathers.

    Example:
        metrics = dt.evaluate(model, valid_loader, loss_fn, microbatch_size="auto")
        print(dt.reduce_metrics(metrics)["loss"])

    Raises:
        ConfigError: no model; a batch whose samples cannot be counted (the other ranks raise a ``StepError``), or a loss that
            is not a ``LossSum`` of single numbers; a model that trains within documents of packed rows, without ``eval_loss``
            of its ``context_parallel``.
        StepError: no rank has a batch, or one rank has no batch to repeat; or ``init_dist``'s block has ended.
        Exception: any error of the loader (the other ranks raise a ``StepError``).
    """
    if not isinstance(model, nn.Module):
        advice = "Pass state.model." if hasattr(model, "model") else "Pass the model."
        raise ConfigError(f"evaluate: model must be a torch.nn.Module, got {type(model).__name__}. {advice}")
    spec = get_spec(model)
    if spec.documents is not None and not isinstance(loss_fn, SplitLoss):
        raise ConfigError(
            "evaluate: loss_fn must attend within documents as the training step does, got a loss without their bounds. Pass "
            "sequences.eval_loss(loss_fn), where sequences is the transform of context_parallel."
        )
    check_block_open(spec, "evaluate")
    started = time.monotonic()
    with spans.span("evaluate"):
        device = get_device(model)
        sums, any_batch = MetricAccumulator(device), False
        run_batch: Callable[[Batch, int], list[LossSum]] | None = None
        if microbatch_size is not None:
            first = None if microbatch_size == "auto" else microbatch_size
            run_batch = _make_auto_batch_eval(loss_fn, initial_size=first, batch_spec=batch_spec).on_model(model, device)
        with report_missing_ranks("evaluate"), eval_mode(model):
            for batch, samples, real in pad_to_longest_rank(loader, partial(count_samples_and_tokens, batch_spec=batch_spec)):
                any_batch = True
                for result in run_batch(batch, samples) if run_batch else [loss_fn(model, to_device(batch, device))]:
                    loss = check_loss(result, caller="evaluate")
                    if real:
                        sums.add(loss)
        if get_dist_info().world_size > 1:
            # A rank without a batch has seen no metric.
            for names in cast("list[list[str]]", all_gather_json(list(sums.metrics()), caller="evaluate")):
                sums.add_names(names)
        if not any_batch:
            raise StepError("evaluate: the loader returned no batch on any rank. Check the length of the dataset.")
    spans.record_event("evaluated", step=spans.position()[0], seconds=time.monotonic() - started)
    return sums.metrics()


def pad_to_longest_rank(loader: Any, count_fn: Callable[[Batch], tuple[int, int]]) -> Iterator[tuple[Batch, int, bool]]:
    """Yield this rank's batches, then padding batches until the rank with the most batches has run out.

    Yields:
        A batch, its number of samples, and True if it counts.

    Collective: one small record per batch on the control channel.
    """
    batches = chain.from_iterable(map(list_microbatches, loader.one_epoch() if hasattr(loader, "one_epoch") else loader))
    is_alone = get_dist_info().world_size == 1
    padding: tuple[Batch, int] | None = None
    while True:
        batch, samples, error = None, 0, None
        try:
            batch = next(batches, None)
            if batch is not None:
                samples = count_fn(batch)[0]
                if samples:
                    padding = batch, samples
                elif padding is None:
                    sample = _find_padding(batch)
                    padding = sample, count_fn(sample)[0]
        # The loader and count may be the user's; the error is raised once all ranks know of it.
        except Exception as problem:  # noqa: BLE001
            error = problem
        heartbeats.heartbeat("evaluate")
        if is_alone and samples:
            yield batch, samples, True
            continue
        if is_alone and batch is None and error is None:
            return
        rows = all_gather_numbers([batch is not None, padding is None, error is not None])
        if error is not None:
            raise error
        _raise_if_any_rank(rows, 2, "cannot read or count its batch. See its own error.")
        if not any(has_batch for has_batch, _, _ in rows):
            return
        _raise_if_any_rank(rows, 1, "has no batch to repeat. Use build_loader.")
        assert padding is not None
        yield *padding, samples > 0


def _find_padding(empty: Batch) -> Batch:
    """Return the batch to run in place of ``empty``: a real sample of its loader, else ``empty`` itself."""
    samples = (info.padding_sample for info in get_batch_infos(empty))
    return next((sample for sample in samples if sample is not None), empty)


def _raise_if_any_rank(rows: list[list[float]], column: int, problem: str) -> None:
    ranks = [rank for rank, row in enumerate(rows) if row[column]]
    if ranks:
        raise StepError(f"evaluate: rank {ranks[0]} ({len(ranks)} of {len(rows)} ranks) {problem}")


T = TypeVar("T")
_AUTO_BATCH_EVAL = "auto_batch_eval"
_NO_COUNTS = StepCounts(samples=0, tokens=0, microbatches=0, position=None, seconds=0.0)


def auto_batch_eval(
    fn: Callable[[nn.Module, Batch], T],
    *,
    initial_size: int | None = None,
    min_size: int = 1,
    batch_spec: BatchSpec | None = None,
) -> Callable[[nn.Module, Batch], list[T]]:
    """Return a function that calls ``fn`` on parts of a batch and returns the results in order.

    If a part does not fit on some rank, all ranks abort the part and run its halves. Each sample is in exactly one result.
    The size that fits is kept for later batches. A part that was run twice uses the same random numbers as a part run once.

    Args:
        fn: ``(model, part) -> result``, such as a forward, a loss or a generation, in evaluation mode without
            gradients. For a sharded model all ranks must run the same forwards for a part.
        initial_size: first size to try, in samples of this rank; None uses the whole batch.
        min_size: smallest size, in samples of this rank.
        batch_spec: description of the batch; None uses the first axis. Its ``count`` and ``split`` are called for a batch, or
            for a part that must be divided.

    Returns:
        ``(model, batch) -> results``. Parts are moved to the model's device. Ranks may have batches of different sizes, or
        without samples; a rank with fewer samples repeats a part that does not count.

    Collective: for a sharded model on several ranks, which must all call the function: one small record per batch, and two per
    part. In the first part, and in parts whose collectives differ from those of the last, one before each of the model's
    own collectives; under tp and cp also in the first part of each shape.

    Example:
        >>> import dtrain as dt
        >>> double = dt.step.auto_batch_eval(
        ...     lambda model, part: model(part) * 2, initial_size=2
        ... )
        >>> [len(part) for part in double(torch.nn.Identity(), torch.ones(5, 3))]
        [2, 2, 1]

    Raises:
        ConfigError: invalid sizes, or a batch that cannot be counted or split.
        OutOfMemoryError: ``min_size`` samples do not fit; on all ranks.
        StepError: a part does not fit and must run again, but ``fn`` wrote into its batch.
        PeerError: another rank has one of these errors, or ``fn`` failed there for another reason.
    """
    return _make_auto_batch_eval(fn, initial_size=initial_size, min_size=min_size, batch_spec=batch_spec)


def _make_auto_batch_eval(
    fn: Callable[[nn.Module, Batch], T], *, initial_size: int | None, min_size: int = 1, batch_spec: BatchSpec | None
) -> _AutoBatchEval[T]:
    initial_size = None if initial_size is None else check_int(_AUTO_BATCH_EVAL, "initial_size", initial_size)
    min_size = check_int(_AUTO_BATCH_EVAL, "min_size", min_size)
    return _AutoBatchEval(fn=fn, size=initial_size, min_size=min_size, batch_spec=batch_spec)


@dataclass(slots=True, kw_only=True, eq=False)
class _AutoBatchEval(Generic[T]):
    """Function returned by ``auto_batch_eval``, which remembers the size that fits."""

    fn: Callable[[nn.Module, Batch], T]
    size: int | None
    min_size: int
    batch_spec: BatchSpec | None
    _traces: TraceCache = field(default_factory=TraceCache)

    def __call__(self, model: nn.Module, batch: Batch) -> list[T]:
        with spans.outermost_span("evaluate"), report_missing_ranks(_AUTO_BATCH_EVAL), eval_mode(model):
            return self.on_model(model, get_device(model))(batch, self._count_samples(batch, _runs_with_peers(model)))

    def on_model(self, model: nn.Module, device: torch.device) -> Callable[[Batch, int], list[T]]:
        """Return the function that runs the parts of a batch of so many samples, which all ranks have counted.

        The caller enters ``eval_mode``, once for many batches.
        """
        if _runs_with_peers(model):
            return partial(self._run_with_peers, model)
        return partial(self._run_alone, model, device, default_generators())

    def _run_alone(
        self, model: nn.Module, device: torch.device, accelerators: Sequence[torch.Generator], batch: Batch, samples: int
    ) -> list[T]:
        results, rest, watch = list[T](), _RemainingSamples(batch, samples, self.batch_spec), BatchWatch(list_tensors(batch))
        is_cut = self.size is not None and self.size < samples
        are_placed = is_cut and all([leaf.device == device for leaf in list_tensors(batch)])  # noqa: C419  # faster for a few
        while remaining := rest.remaining:
            size = self.size if self.size is not None and self.size < remaining else remaining
            guard, rng_snapshot = None, RNGSnapshot(accelerators)
            try:
                part = rest.next_part(size)
                # ``fn`` may change the containers of its part, but not those of the caller.
                results.append(self.fn(model, part if are_placed and part is not batch else to_device(part, device)))
            # The error is raised below, unless it is out of memory.
            except Exception as error:  # noqa: BLE001
                guard = StepGuard(traces=self._traces, multi_rank=False)
                guard.record_failure(error)
            if guard is None:
                rest.advance()
                continue
            guard.roll_back(partial(_abort_forward, model))
            self._prepare_retry(model, size, guard, rng_snapshot)
            watch.check(_AUTO_BATCH_EVAL, "fn")
        return results

    def _run_with_peers(self, model: nn.Module, batch: Batch, samples: int) -> list[T]:
        results, rest, watch = list[T](), _RemainingSamples(batch, samples, self.batch_spec), BatchWatch(list_tensors(batch))
        retries = False
        while True:
            # The collectives of a part depend on the model, and under tp and cp on the shapes.
            plan: object = id(model)
            if get_spec(model).ranks_per_batch > 1:
                plan = id(model), str(tensor_shapes(batch)), rest.remaining, self.size
            error = watch.find_error(_AUTO_BATCH_EVAL, "fn") if retries else None
            remaining = self._agree_on_part(rest.remaining, plan, error)
            if remaining == 0:
                return results
            size = min(remaining, self.size or remaining)
            next_part = partial(rest.next_part, size) if rest.remaining else rest.padding_part
            result = self._try_part(model, next_part, size, plan)
            retries = not result
            if result and rest.remaining:
                results += result
                rest.advance()

    def _count_samples(self, batch: Batch, multi_rank: bool) -> int:
        samples, error = 0, None
        try:
            samples, _ = count_samples_and_tokens(batch, self.batch_spec)
        # The error is raised once all ranks know of it.
        except Exception as problem:  # noqa: BLE001
            error = problem
        if multi_rank:
            _exchange([], error, "cannot count its batch")
        elif error is not None:
            raise error
        return samples

    def _agree_on_part(self, remaining: int, plan: object, error: Exception | None) -> int:
        """Return the largest number of remaining samples on any rank. Drop the trace of ``plan`` unless all ranks hold it.

        Ranks name a plan differently, so they compare the traces. Collective: one record.

        Raises:
            StepError: ``error``, because this rank cannot run its part again.
            PeerError: another rank has an ``error``.
        """
        trace = self._traces.find(plan)
        rows = _exchange([remaining, 0 if trace is None else trace.digest], error, "cannot run its batch again")
        if len({digest for _, digest, _ in rows}) > 1:
            self._traces.forget(plan)
        return int(max(samples for samples, _, _ in rows))

    def _try_part(self, model: nn.Module, next_part: Callable[[], Batch], size: int, plan: object) -> list[T]:
        """Return the result of one part in a list; return [] if the part must run again, smaller if it does not fit.

        Collective: those of the part. In traced mode, and after a failure, also one record.
        """
        rng_snapshot, results = RNGSnapshot(), list[T]()
        guard = StepGuard(traces=self._traces, multi_rank=True)
        has_trace = guard.traces.find(plan) is not None
        with guard.attempt(plan):
            results = [self.fn(model, to_device(next_part(), get_device(model)))]
        if guard.failed:
            guard.roll_back(partial(_abort_forward, model))
        can_go_on = self._prepare_retry(model, size, guard, rng_snapshot, exchange=has_trace or guard.failed)
        return results if can_go_on else []

    def _prepare_retry(
        self, model: nn.Module, size: int, guard: StepGuard, rng_snapshot: RNGSnapshot, *, exchange: bool = False
    ) -> bool:
        """Return True if no rank failed; otherwise undo the part, and halve the size if the part did not fit.

        Collective: one record if ``exchange``.

        Raises:
            Exception: the error of this rank, or of a peer, that is not out of memory.
        """
        try:
            guard.raise_if_failed(_gather_statuses(guard, exchange=exchange), _NO_COUNTS)
        except Exception as problem:
            _abort_forward(model)
            rng_snapshot.restore()
            if not isinstance(problem, StepAborted):
                raise
            if not problem.retry:
                self._shrink(model, size, guard.oom_message)
            return False
        return True

    def _shrink(self, model: nn.Module, size: int, oom_message: str) -> None:
        if size <= self.min_size:
            raise_does_not_fit(
                f"{_AUTO_BATCH_EVAL}:",
                device=get_device(model),
                strategy=get_spec(model).strategy,
                oom_message=oom_message,
                subject=f"a part of {size}",
            )
        self.size = max(self.min_size, size // 2)


class _RemainingSamples:
    """Samples of a batch that have not run yet, in parts in order. A part that is too large is divided when its turn comes."""

    __slots__ = ("_batch_spec", "_index", "_parts", "remaining")

    def __init__(self, batch: Batch, samples: int, batch_spec: BatchSpec | None) -> None:
        self.remaining, self._batch_spec = samples, batch_spec
        # All parts with their numbers of samples, and the index of the next part.
        self._parts, self._index = [(batch, samples)], 0
        if type(batch) is MicrobatchList:
            self._parts = [(part, count_samples_and_tokens(part, batch_spec)[0]) for part in batch]

    def next_part(self, size: int) -> Batch:
        """Return the next samples, at most ``size`` of them."""
        index = self._index
        while self._parts[index][1] > size:
            self._parts[index : index + 1] = self._divide(*self._parts[index], size)
        return self._parts[index][0]

    def _divide(self, part: Batch, samples: int, size: int) -> list[tuple[Batch, int]]:
        spec = self._batch_spec
        _, _, smaller = count_and_split(part, size, spec)
        if spec is None or spec.split is None:
            full = len(smaller) - 1
            return list(zip(smaller, [*[size] * full, samples - full * size], strict=True))
        counts = [count_samples_and_tokens(batch, spec)[0] for batch in smaller]
        if sum(counts) != samples or not 0 < max(counts) <= size:
            raise ConfigError(
                f"{_AUTO_BATCH_EVAL}: split must return parts of at most {size} samples, {samples} in all, got {counts}. "
                "Return parts that cover the batch in order."
            )
        return [(batch, count) for batch, count in zip(smaller, counts, strict=True) if count]

    def advance(self) -> None:
        """Advance past the part, unless the part is the last: a rank without further samples repeats the part."""
        self.remaining -= self._parts[self._index][1]
        self._index += self.remaining > 0

    def padding_part(self) -> Batch:
        """Return a part that does not count, for a rank without further samples."""
        part, samples = self._parts[self._index]
        return part if samples else _find_padding(part)


def _runs_with_peers(model: nn.Module) -> bool:
    return get_dist_info().world_size > 1 and get_spec(model).mesh is not None


def _exchange(row: list[float], error: Exception | None, problem: str) -> list[list[float]]:
    """Return the rows of all ranks, unless a rank has an ``error``, which is ``problem`` for its peers."""
    rows = all_gather_numbers([*row, error is not None], caller=_AUTO_BATCH_EVAL)
    if error is not None:
        raise error
    for rank, (*_, failed) in enumerate(rows):
        if failed:
            raise PeerError(f"{_AUTO_BATCH_EVAL}: rank {rank} {problem}. See its own error.")
    return rows


def _gather_statuses(guard: StepGuard, *, exchange: bool) -> BackwardSync:
    """Return the status of each rank. Collective: one record if ``exchange``; otherwise this rank knows that all are OK."""
    if not exchange:
        return BackwardSync(statuses=[guard.status] if guard.failed else [])
    rows = all_gather_numbers([guard.status, guard.collectives_issued], caller=_AUTO_BATCH_EVAL)
    statuses = [RankStatus(int(status)) for status, _ in rows]
    return BackwardSync(statuses=statuses, collective_indices=[int(issued) for _, issued in rows])


def _abort_forward(model: nn.Module) -> None:
    grad_sync_of(model).abort_all()
    release_cached_memory(get_device(model))
