"""``auto_batch_eval``: a forward over a batch of any size, in the largest parts that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from torch import nn

from dtrain import spans
from dtrain.batch import BatchSpec, count_batch, narrow_batch, to_device, zeros_like_samples
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.control import Outcome, Tally, Verdict
from dtrain.dist.init import current
from dtrain.dist.replay import Traces
from dtrain.dist.rng import KeptRandomness
from dtrain.dist.timeouts import naming_missing
from dtrain.errors import ConfigError, PeerError
from dtrain.memory.gauge import release_cached
from dtrain.shard.reduction import reduction_of
from dtrain.shard.whole import evaluating
from dtrain.state import device_of, spec_of
from dtrain.step.attempt import Abandoned, Attempt
from dtrain.step.hopeless import raise_hopeless
from dtrain.step.parts import CountFn, SplitFn, cut, samples_and_tokens
from dtrain.types import Batch

T = TypeVar("T")
_WHERE = "auto_batch_eval"
_NO_TALLY = Tally(samples=0, tokens=0, microbatches=0, place=None, seconds=0.0)


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
        DoesNotFitError: ``minimum`` samples do not fit; on all ranks.
        PeerError: on another rank the batch cannot be counted, or ``fn`` failed for another reason.

    Example:
        >>> import torch
        >>> double = auto_batch_eval(lambda model, part: model(part) * 2, initial=2)
        >>> [len(part) for part in double(torch.nn.Identity(), torch.ones(5, 3))]
        [2, 2, 1]
    """
    for name, value in (("initial", initial), ("minimum", minimum)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{_WHERE}: {name} must be a whole number of at least 1, got {value!r}")
    return _Sized(fn=fn, size=initial, minimum=minimum, spec=batch_spec, count=count, split=split)


@dataclass(slots=True, kw_only=True, eq=False)
class _Sized(Generic[T]):
    """The function that ``auto_batch_eval`` returns: it remembers the size that fits."""

    fn: Callable[[nn.Module, Batch], T]
    size: int | None
    minimum: int
    spec: BatchSpec | None
    count: CountFn | None
    split: SplitFn | None

    def __call__(self, model: nn.Module, batch: Batch) -> list[T]:
        shared = spec_of(model).mesh is not None and current().world_size > 1
        samples = self._counted(batch, shared)
        rest = _Rest(batch=batch, samples=samples, spec=self.spec, count=self.count, split=self.split)
        results: list[T] = []
        with spans.outermost("evaluate"), naming_missing(_WHERE), evaluating(model):
            while True:
                left = _most(rest.left, shared)
                if left == 0:
                    return results
                size = min(left, self.size or left)
                fitted = self._try(model, partial(rest.front, size) if rest.left else rest.filler, size, shared)
                if fitted and rest.left:
                    results += fitted
                    rest.advance()

    def _counted(self, batch: Batch, shared: bool) -> int:
        samples, error = 0, None
        try:
            samples, _ = samples_and_tokens(batch, spec=self.spec, count=self.count)
        except Exception as problem:  # noqa: BLE001  # raised below, when the others know
            error = problem
        rows = all_gather_numbers([error is not None], where=_WHERE) if shared else []
        if error is not None:
            raise error
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise PeerError(f"{_WHERE}: rank {failed[0]} cannot count its batch; see its own error")
        return samples

    def _try(self, model: nn.Module, cut: Callable[[], Batch], size: int, shared: bool) -> list[T]:
        """The result of one part in a list; an empty one if it did not fit somewhere: then the next size is smaller."""
        randomness = KeptRandomness()
        attempt = Attempt(run=self, traces=Traces(always_check=True), shared=shared)
        found = attempt.guarded(partial(self._run, attempt, model, cut), plan="evaluation", undo=partial(_undo, model))
        if found is not None:
            return found
        randomness.put_back()
        verdicts = all_gather_numbers([attempt.verdict], where=_WHERE) if shared else [[attempt.verdict]]
        try:
            attempt.judge(Outcome(verdicts=[Verdict(int(row[0])) for row in verdicts]), _NO_TALLY)
        except Abandoned:
            self._shrink(model, size, attempt.asked)
        return []

    def _run(self, attempt: Attempt, model: nn.Module, cut: Callable[[], Batch]) -> list[T]:
        attempt.enter("evaluation")
        return [self.fn(model, to_device(cut(), device_of(model)))]

    def _shrink(self, model: nn.Module, size: int, asked: str) -> None:
        if size <= self.minimum:
            raise_hopeless(
                f"{_WHERE}:", device=device_of(model), strategy=spec_of(model).strategy, asked=asked, what=f"a part of {size}"
            )
        self.size = max(self.minimum, size // 2)


@dataclass(slots=True, kw_only=True, eq=False)
class _Rest:
    """What is left of a batch: its front is cut off, again if it did not fit, until nothing is left."""

    batch: Batch
    samples: int
    spec: BatchSpec | None
    count: CountFn | None
    split: SplitFn | None
    done: int = 0
    _parts: list[tuple[Batch, int]] = field(default_factory=list)  # with ``split``: what it made, and their samples
    _length: int = 0  # of the front

    @property
    def left(self) -> int:
        return self.samples - self.done

    def front(self, size: int) -> Batch:
        """The next samples, at most ``size`` of them."""
        if self.split is not None:
            return self._front_of_parts(size)
        self._length = min(size, self.left)
        if self.count is not None:
            if self._length == self.samples:
                return self.batch  # counted by the caller, so perhaps not to be cut
            found, _ = count_batch(self.batch, self.spec)
            if found != self.samples:
                raise ConfigError(
                    f"{_WHERE}: count gives {self.samples} samples of a batch of {found} rows; pass split= as well"
                )
        return narrow_batch(self.batch, self.done, self._length, self.spec)

    def _front_of_parts(self, size: int) -> Batch:
        if not self._parts:
            self._parts = [(self.batch, self.samples)]
        while self._parts[0][1] > size:
            first, samples = self._parts[0]
            parts = cut(first, size, spec=self.spec, split=self.split, count=self.count).parts
            counts = [samples_and_tokens(part, spec=self.spec, count=self.count)[0] for part in parts]
            if sum(counts) != samples or not 0 < max(counts) <= size:
                raise ConfigError(
                    f"{_WHERE}: split made parts of {counts} samples out of {samples}, at most {size} each were asked"
                )
            self._parts[:1] = [(part, n) for part, n in zip(parts, counts, strict=True) if n]
        part, self._length = self._parts[0]
        return part

    def advance(self) -> None:
        """The front has been run."""
        self.done += self._length
        if self._parts and self.left:
            del self._parts[0]

    def filler(self) -> Batch:
        """A part to run that does not count, for a rank that has none left."""
        if not self.samples:
            return zeros_like_samples(self.batch)
        if self._parts:
            return self._parts[0][0]
        return self.batch if self.count is not None else narrow_batch(self.batch, 0, 1, self.spec)


def _most(left: int, shared: bool) -> int:
    """The samples that are left on the fullest rank."""
    return int(max(row[0] for row in all_gather_numbers([left], where=_WHERE))) if shared else left


def _undo(model: nn.Module) -> None:
    reduction_of(model).abort_all()
    release_cached(device_of(model))
