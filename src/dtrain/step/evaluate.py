"""``evaluate``: exact metrics of a model over a dataset, each sample counted once on any number of ranks.

``auto_batch_eval``: a forward over a batch of any size, in the largest parts that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from torch import nn

from dtrain import heartbeats, spans
from dtrain.batch import BatchSpec, make_zero_samples, narrow_batch, to_device
from dtrain.dist.collective_replay import TraceCache
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot
from dtrain.dist.step_sync import BackwardSync, RankStatus, StepCounts
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError, PeerError, StepError
from dtrain.memory.device_memory import release_cached_memory
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.unshard import eval_mode
from dtrain.state import get_device, get_spec
from dtrain.step.microbatches import CountFn, SplitFn, count_batch, split_microbatches
from dtrain.step.normalization import MetricAccumulator, check_loss
from dtrain.step.oom_guard import StepAborted, StepGuard, raise_does_not_fit
from dtrain.typing import Batch, LossFn, Metrics


def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    loss_fn: LossFn,
    *,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
    split: SplitFn | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
) -> Metrics:
    """The loss (and ``aux``) of ``model`` over all batches of ``loader``, as local sums; ``reduce_metrics`` makes means.

    Args:
        model: sharded or plain; runs in evaluation mode without gradients, and gets each module's own mode back.
        loader: this rank's batches, of any number and size; of a dtrain loader, one whole pass that leaves its position.
        loss_fn: the same function that training uses.
        batch_spec: where the batch axis is; None takes the first one.
        count: samples of a batch that no ``batch_spec`` describes.
        split: cuts such a batch into microbatches, see ``auto_batch_eval``.
        microbatch_size: samples per forward; ``"auto"`` halves what does not fit, see ``auto_batch_eval``. None takes each
            batch as it comes.

    Ranks may have different numbers of batches: one that has run out repeats a batch that does not count.

    Collective: one small record per batch on the control group, and the model's own gathers.

    Raises:
        ConfigError: a batch whose samples cannot be counted (the other ranks raise a ``StepError``), or a loss that is no
            ``LossSum`` of single numbers.
        StepError: no rank has a batch, or one rank has none to take part with.
        Exception: whatever the loader raises (the other ranks raise a ``StepError``).
    """
    begun = time.monotonic()
    with spans.span("evaluate"):
        device = get_device(model)
        sums, any_batch = MetricAccumulator(device), False
        in_parts = None
        if microbatch_size is not None:
            first = None if microbatch_size == "auto" else microbatch_size
            in_parts = auto_batch_eval(loss_fn, initial=first, batch_spec=batch_spec, count=count, split=split)
        with report_missing_ranks("evaluate"), eval_mode(model):
            for batch, real in pad_to_longest_rank(loader, partial(count_batch, batch_spec=batch_spec, count=count)):
                for found in in_parts(model, batch) if in_parts else [loss_fn(model, to_device(batch, device))]:
                    loss = check_loss(found, caller="evaluate")
                    any_batch = True
                    if real:
                        sums.add(loss)
                    else:
                        sums.add_names(loss)
        if not any_batch:
            raise StepError("evaluate: the loader gave no batch on any rank")
    spans.record_event("evaluated", step=spans.position()[0], seconds=time.monotonic() - begun)
    return sums.metrics()


def pad_to_longest_rank(loader: Any, count_fn: Callable[[Batch], tuple[int, int]]) -> Iterator[tuple[Batch, bool]]:
    """This rank's batches, then one that does not count for as long as another rank still has one.

    Yields:
        A batch, and whether it counts.

    Collective: one small record per batch on the control group.
    """
    batches = iter(loader.one_epoch() if hasattr(loader, "one_epoch") else loader)
    filler: Batch | None = None
    while True:
        batch, real, error = None, False, None
        try:
            batch = next(batches, None)
            real = batch is not None and count_fn(batch)[0] > 0
        except Exception as problem:  # noqa: BLE001  # the loader and count may be the user's; raised when the others know
            error = problem
        if real:
            filler = batch
        elif filler is None and batch is not None and error is None:
            filler = make_zero_samples(batch)
        heartbeats.heartbeat("evaluate")
        rows = all_gather_numbers([batch is not None, filler is None, error is not None])
        if error is not None:
            raise error
        _raise_if_any_rank(rows, 2, "cannot read or count its batch; see its own error")
        if not any(has_batch for has_batch, _, _ in rows):
            return
        _raise_if_any_rank(rows, 1, "has no batch at all to take part with; use build_loader")
        yield filler, real


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
    initial: int | None = None,
    minimum: int = 1,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
    split: SplitFn | None = None,
) -> Callable[[nn.Module, Batch], list[T]]:
    """A function of a model and a batch that calls ``fn`` on parts of the batch, and returns the results in order.

    A part that does not fit on any rank is abandoned on all, and tried again in halves: each sample is in exactly one of the
    results. The size that fits is kept from batch to batch; a part that was tried twice draws the same random numbers as if
    tried once.

    Args:
        fn: ``(model, part) -> anything``, a forward, a loss, or a generation; in evaluation mode, without gradients. For a
            sharded model all ranks must run the same forwards for a part.
        initial: the first size to try, in samples of this rank; None takes the whole batch.
        minimum: the smallest.
        batch_spec: where the batch axis is; None takes the first one.
        count: samples of a batch, or of a part, that no ``batch_spec`` describes.
        split: ``(batch, size) -> parts`` of at most that many samples, in order, for such a batch. It is asked when a batch,
            or a part, is to be run in smaller ones.

    Returns:
        ``(model, batch) -> results``. Parts are moved to the model's device. Ranks may have batches of different sizes, or
        without samples; those with fewer repeat a part that does not count.

    Collective: for a sharded model on several ranks, which must all call it: one small record per batch and one per
    part, and one before each of the model's own collectives.

    Raises:
        ConfigError: sizes that cannot be right; a batch that cannot be counted or cut.
        OutOfMemoryError: ``minimum`` samples do not fit; on all ranks.
        PeerError: on another rank the batch cannot be counted, or ``fn`` failed for another reason.

    Example:
        >>> import torch
        >>> double = auto_batch_eval(lambda model, part: model(part) * 2, initial=2)
        >>> [len(part) for part in double(torch.nn.Identity(), torch.ones(5, 3))]
        [2, 2, 1]
    """
    for name, value in (("initial", initial), ("minimum", minimum)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{_AUTO_BATCH_EVAL}: {name} must be a whole number of at least 1, got {value!r}")
    return _AutoBatchEval(fn=fn, size=initial, minimum=minimum, batch_spec=batch_spec, count=count, split=split)


@dataclass(slots=True, kw_only=True, eq=False)
class _AutoBatchEval(Generic[T]):
    """The function that ``auto_batch_eval`` returns: it remembers the size that fits."""

    fn: Callable[[nn.Module, Batch], T]
    size: int | None
    minimum: int
    batch_spec: BatchSpec | None
    count: CountFn | None
    split: SplitFn | None

    def __call__(self, model: nn.Module, batch: Batch) -> list[T]:
        shared = get_spec(model).mesh is not None and get_dist_info().world_size > 1
        samples = self._count_samples(batch, shared)
        rest = _RemainingSamples(batch=batch, samples=samples, batch_spec=self.batch_spec, count=self.count, split=self.split)
        results: list[T] = []
        with spans.outermost_span("evaluate"), report_missing_ranks(_AUTO_BATCH_EVAL), eval_mode(model):
            while True:
                left = _max_remaining(rest.remaining, shared)
                if left == 0:
                    return results
                size = min(left, self.size or left)
                fitted = self._try_size(
                    model, partial(rest.next_part, size) if rest.remaining else rest.padding_part, size, shared
                )
                if fitted and rest.remaining:
                    results += fitted
                    rest.advance()

    def _count_samples(self, batch: Batch, multi_rank: bool) -> int:
        samples, error = 0, None
        try:
            samples, _ = count_batch(batch, batch_spec=self.batch_spec, count=self.count)
        except Exception as problem:  # noqa: BLE001  # raised below, when the others know
            error = problem
        rows = all_gather_numbers([error is not None], caller=_AUTO_BATCH_EVAL) if multi_rank else []
        if error is not None:
            raise error
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise PeerError(f"{_AUTO_BATCH_EVAL}: rank {failed[0]} cannot count its batch; see its own error")
        return samples

    def _try_size(self, model: nn.Module, next_part: Callable[[], Batch], size: int, multi_rank: bool) -> list[T]:
        """The result of one part in a list; an empty one if it did not fit somewhere: then the next size is smaller."""
        randomness = RNGSnapshot()
        attempt = StepGuard(owner=self, traces=TraceCache(always_check=True), multi_rank=multi_rank)
        found = attempt.execute(
            partial(self._run, attempt, model, next_part), plan="evaluation", undo=partial(_abort_forward, model)
        )
        if found is not None:
            return found
        randomness.restore()
        verdicts = all_gather_numbers([attempt.status], caller=_AUTO_BATCH_EVAL) if multi_rank else [[attempt.status]]
        try:
            attempt.raise_if_failed(BackwardSync(statuses=[RankStatus(int(row[0])) for row in verdicts]), _NO_COUNTS)
        except StepAborted:
            self._shrink(model, size, attempt.oom_message)
        return []

    def _run(self, attempt: StepGuard, model: nn.Module, next_part: Callable[[], Batch]) -> list[T]:
        attempt.enter_phase("evaluation")
        return [self.fn(model, to_device(next_part(), get_device(model)))]

    def _shrink(self, model: nn.Module, size: int, oom_message: str) -> None:
        if size <= self.minimum:
            raise_does_not_fit(
                f"{_AUTO_BATCH_EVAL}:",
                device=get_device(model),
                strategy=get_spec(model).strategy,
                oom_message=oom_message,
                subject=f"a part of {size}",
            )
        self.size = max(self.minimum, size // 2)


@dataclass(slots=True, kw_only=True, eq=False)
class _RemainingSamples:
    """What is left of a batch: its front is cut off, again if it did not fit, until nothing is left."""

    batch: Batch
    samples: int
    batch_spec: BatchSpec | None
    count: CountFn | None
    split: SplitFn | None
    consumed: int = 0
    _parts: list[tuple[Batch, int]] = field(default_factory=list)  # with ``split``: what it made, and their samples
    _part_size: int = 0  # of the front

    @property
    def remaining(self) -> int:
        return self.samples - self.consumed

    def next_part(self, size: int) -> Batch:
        """The next samples, at most ``size`` of them."""
        if self.split is not None:
            return self._next_split_part(size)
        self._part_size = min(size, self.remaining)
        if self.count is not None:
            if self._part_size == self.samples:
                return self.batch  # counted by the caller, so perhaps not to be cut
            found, _ = count_batch(self.batch, self.batch_spec)
            if found != self.samples:
                raise ConfigError(
                    f"{_AUTO_BATCH_EVAL}: count gives {self.samples} samples of a batch of {found} rows; pass split= as well"
                )
        return narrow_batch(self.batch, self.consumed, self._part_size, self.batch_spec)

    def _next_split_part(self, size: int) -> Batch:
        if not self._parts:
            self._parts = [(self.batch, self.samples)]
        while self._parts[0][1] > size:
            first, samples = self._parts[0]
            parts = split_microbatches(first, size, batch_spec=self.batch_spec, split=self.split, count=self.count).batches
            counts = [count_batch(part, batch_spec=self.batch_spec, count=self.count)[0] for part in parts]
            if sum(counts) != samples or not 0 < max(counts) <= size:
                raise ConfigError(
                    f"{_AUTO_BATCH_EVAL}: split made parts of {counts} samples out of {samples}, at most {size} each were asked"
                )
            self._parts[:1] = [(part, n) for part, n in zip(parts, counts, strict=True) if n]
        part, self._part_size = self._parts[0]
        return part

    def advance(self) -> None:
        """The front has been run."""
        self.consumed += self._part_size
        if self._parts and self.remaining:
            del self._parts[0]

    def padding_part(self) -> Batch:
        """A part to run that does not count, for a rank that has none left."""
        if not self.samples:
            return make_zero_samples(self.batch)
        if self._parts:
            return self._parts[0][0]
        return self.batch if self.count is not None else narrow_batch(self.batch, 0, 1, self.batch_spec)


def _max_remaining(remaining: int, multi_rank: bool) -> int:
    """The samples that are left on the fullest rank."""
    return int(max(row[0] for row in all_gather_numbers([remaining], caller=_AUTO_BATCH_EVAL))) if multi_rank else remaining


def _abort_forward(model: nn.Module) -> None:
    grad_sync_of(model).abort_all()
    release_cached_memory(get_device(model))
