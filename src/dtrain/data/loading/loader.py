"""``Loader``: batches for this rank, with a position that is a few integers.

Which samples a batch holds, and how far the run has come, is decided here and in ``position``; a feed reads them. The position
counts samples that were *handed out*, so what workers have fetched ahead is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Protocol

import torch

from dtrain import pulse, spans
from dtrain.batch import FailedBatch, mark_batch
from dtrain.clock import Place
from dtrain.data.dataset import digest_of
from dtrain.data.loading.device import moved_ahead
from dtrain.data.loading.feed import Feed, Handout
from dtrain.data.loading.handed_out import HandedOut, Unreadable
from dtrain.data.loading.position import Grid, Position, countable, reached
from dtrain.data.loading.reading import described
from dtrain.dist.init import current
from dtrain.dist.origin import Agreement, Origin
from dtrain.dist.rng import derive_seed
from dtrain.durations import Duration, RunLength
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError, DtrainError
from dtrain.types import Batch, Plain

_VERSION = 1


class Stops(Protocol):
    """A decision that ends a run before its length."""

    @property
    def stopped(self) -> bool:
        """True if the run has ended."""
        ...


class Loader:
    """Batches of one rank, in an order that depends on data, seed and epoch, not on ranks. Made by ``build_loader``.

    Global batch ``k`` of an epoch is the same set of samples for every number of ranks; a rank gets its share of it.
    ``state_dict`` and ``load_state_dict`` carry the position, so a loader goes into ``extra`` of a checkpoint.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        seed: int,
        fingerprint: Mapping[str, Plain],
        may_change: bool = False,
        device: torch.device | None = None,
        ahead: int = 2,
    ) -> None:
        self.feed = feed
        self.seed = seed
        self.fingerprint = dict(fingerprint)
        self.position = Position()
        self.unreadable = Unreadable(samples=[])
        self._may_change = may_change
        self._device, self._ahead = device, ahead
        self._digest = digest_of(self.fingerprint)
        self._dataset_state: Plain = None
        self._skipped_to: Position | None = None
        self._passes = 0
        self.identity = object()  # in the origins of its batches
        self.handed_out: Origin | None = None
        self._last: HandedOut | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch hands out over all ranks."""
        return self._grid("epoch_samples").samples

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch.

        Raises:
            ConfigError: only the end of the epoch will tell (an iterable dataset without a length).
        """
        return self._grid("steps_per_epoch").steps_per_epoch()

    def total_steps(self, length: Duration | int | str) -> int:
        """Steps from the start of the run to ``length``, in epochs, batches or samples.

        Raises:
            ConfigError: a unit that a loader cannot count (tokens, seconds), or epochs of a dataset without a length.
        """
        goal = countable(length)
        return int(goal.value) if goal.unit == "ba" else self._grid("total_steps").total_steps(goal)

    def run_length(self, length: Duration | int | str) -> RunLength:
        """What this loader knows of a run of ``length``: what ``"0.1dur"`` and ``"1ep"`` of it come to in steps.

        Its total is ``length``; or, where the size of batches is a schedule, or samples end with a smaller batch in each epoch,
        that in steps, since a number of samples per step would not tell it.

        Raises:
            ConfigError: a unit that a loader cannot count (tokens, seconds), or epochs of a dataset without a length.
        """
        goal, grid, size = countable(length), self.feed.grid(), self.feed.global_batch_size
        if callable(size):  # no two epochs need be alike
            return RunLength(total=self.total_steps(goal))
        per_epoch = self.steps_per_epoch() if goal.unit == "ep" or grid is not None else None
        run = RunLength(total=goal, steps_per_epoch=per_epoch, samples_per_step=size)
        uneven = goal.unit == "sp" and grid is not None and run.steps() != self.total_steps(goal)
        return replace(run, total=Duration(self.total_steps(goal), "ba")) if uneven else run

    def __iter__(self) -> Iterator[Batch]:
        """Refuse: a loop must say how long the run is, so that it ends at the same place after any resume.

        Raises:
            ConfigError: always; it names the loops to write.
        """
        raise ConfigError(
            "loader: write `for batch in loader.until('3ep')` to train for 3 epochs of the whole run, over any resume; or "
            "`for batch in loader.one_pass()` to see each sample once without moving the position"
        )

    def __len__(self) -> int:
        """Batches in one whole epoch: ``steps_per_epoch()``."""
        return self.steps_per_epoch()

    def __bool__(self) -> bool:
        """True: also a loader whose length only the end of the epoch will tell."""
        return True

    def until(self, length: Duration | int | str, *, stop: Stops | Sequence[Stops] = ()) -> Iterator[Batch]:
        """Batches from the current position up to ``length`` of the whole run; nothing when it is reached already.

        ``stop``, an ``early_stop`` or ``threshold_stop`` or several, ends it earlier: after the batch on which the stop says
        so, and at once in a resumed run that had stopped.

        A batch counts as consumed when a step on it is complete, or when the next one is asked for. So a checkpoint agrees with
        its state wherever it is taken in the loop body, also after Ctrl-C in the middle of a step. Where no step of dtrain is
        made, a batch counts as consumed when it is handed out. If several steps are made on a batch, the first one counts.

        A new loop begins behind the consumed batches: after Ctrl-C in a notebook, run the cell again. ``skip(0)`` leaves out a
        batch that must not come again.

        The tensors of a batch carry its place in the data. From there a step knows which epoch the batch belongs to, and that
        all ranks are at one place in the same data. A batch of new tensors (slices, copies) does not carry it: name the loader
        then, ``step.init(model, optimizer, loader=loader)``.

        Raises:
            ConfigError: a unit that a loader cannot count, or the position was moved while the loop was running.
            DataError: samples could not be read; on several ranks the step raises it, and all ranks stop together.
        """
        goal, stops = countable(length), tuple(stop) if isinstance(stop, Sequence) else (stop,)
        ended = next((one for one in stops if one.stopped), None)
        if ended is not None and current().rank == 0:
            print(f"dtrain: until: the run has ended by {ended!r}; there is nothing left to train", file=sys.stderr)
        again = self._taken_back()
        stepped = again is not None or (self._last is not None and self._last.is_stepped)
        while not reached(goal, self.position) and not any(one.stopped for one in stops):
            at, passes = self.position, self._passes
            for handout in _waited(self._handouts(at, goal)):
                if isinstance(handout, FailedBatch):
                    place = self._place(at)
                    self.handed_out = Origin(loader=self.identity, begin=place, end=place, stamp=self._stamp(at))
                    yield replace(handout, origin=self.handed_out)
                    raise handout.error
                before, at = at, handout.after
                if handout.moved_only:
                    self._move(handout)
                    continue
                batch, last = self._marked(handout, before, again, stepped=stepped)
                again, self._last = None, last  # then the position: after an interrupt between them the next loop has the batch
                self._move(handout)
                yield batch
                handout.agreement.over = last.agreement.over  # the feed may wait for it
                stepped, self._last = last.is_stepped, None
                if any(one.stopped for one in stops):
                    return
                # Before the next batch is read: a stretch is skipped because it cannot be, perhaps.
                if self._skipped_to is self.position or (self._passes != passes and self.feed.in_turns):
                    break  # skip() in the loop body, or one_pass() that has moved the dataset: go on from the position
                if self.position is not at:
                    raise ConfigError("loader: its position was moved in the middle of until(); run one such loop at a time")

    def one_pass(self) -> Iterator[Batch]:
        """Every sample of an epoch once, from its start, without moving the position: for evaluation.

        Whatever ``tail`` is, no sample is left out and none is repeated.
        """
        at = Position(epoch=self.position.epoch)
        self._passes += 1
        for handout in self._moved(self.feed.handouts(at, Duration(at.epoch + 1, "ep"), once=True)):
            self.unreadable.add(handout.unreadable)
            if not handout.moved_only:
                yield handout.batch

    def skip(self, samples: int) -> None:
        """Leave out the next ``samples`` (over all ranks), as on a bad stretch of data. Call it on every rank.

        Skipped samples count towards the epoch, and not as batches or samples of the run. They are those behind the batch that
        was handed out last, also if its step was interrupted. Inside ``until`` the loop goes on behind them.

        Mutates: the position.

        Raises:
            ConfigError: not a whole number of at least 0, or a dataset that is already split over ranks.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ConfigError(f"loader.skip: needs a whole number of samples of at least 0, got {samples!r}")
        if not self.feed.skippable():
            raise ConfigError("loader.skip: the dataset is split over ranks, and only it knows what comes next; skip there")
        grid = self.feed.grid()
        if grid is None:
            self.position = replace(self.position, samples=self.position.samples + samples)
        else:
            self.position = grid.skipped(self.position, samples)
        self._dataset_state = None  # what it remembers is before that
        self._skipped_to = self.position

    def state_dict(self) -> dict[str, Plain]:
        """The position, and what it is only meaningful with: seed, shuffle, size, and a digest of the dataset's fingerprint.

        The position is before the batch that was handed out last if a step on it is not complete: a save after an interrupt
        skips no batch. An iterable dataset's own state is in it under ``"dataset"``, if it has one.
        """
        at, dataset = self._next()
        state: dict[str, Plain] = {"version": _VERSION, **asdict(at), **self.feed.identity(at), "data": self._digest}
        return state if dataset is None else {**state, "dataset": dataset}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Continue where ``state`` was taken. The global batch size, ranks and workers may differ.

        Mutates: the position.

        Raises:
            CheckpointMismatchError: a state of another format version, or of other data, seed or shuffle, under which the
                position means other samples.
        """
        if state.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"loader: the saved position has format version {state.get('version')}, this release reads {_VERSION}; leave "
                "the loader out of extra to start over"
            )
        at = Position(**{field.name: _integer(state, field.name) for field in fields(Position)})
        if not self._may_change and state.get("data") != self._digest:
            raise CheckpointMismatchError(
                f"loader: the dataset is not the one of the checkpoint (it had {state.get('size')} samples, this one has "
                f"{self.fingerprint.get('count')}; names, sizes or shards differ); resume with the same data, or allow it with "
                "build_loader(data_may_change=True)"
            )
        try:
            self.feed.resume({name: value for name, value in state.items() if isinstance(value, int)}, at)
        except CheckpointMismatchError:
            if not self._may_change:
                raise
        grid = self.feed.grid()
        self.position = at if grid is None else grid.inside(at)
        self._dataset_state = state.get("dataset")
        self.handed_out, self._last = None, None

    def _next(self) -> tuple[Position, Plain]:
        """Where a later loop begins, and the state of an iterable dataset there."""
        if self._last is not None and self._last.after is self.position and self._last.is_pending:
            return self._last.before, self._last.dataset
        if self._ended_alone():
            return replace(self.position, epoch=self.position.epoch + 1, samples=0), self._dataset_state
        return self.position, self._dataset_state

    def _taken_back(self) -> HandedOut | None:
        """Return the batch whose step was interrupted, or None. The next batch of the loader is that batch again.

        Mutates: the position, which is where a later loop begins; the list of unreadable samples.
        """
        last, at = self._last, self.position
        self.position, self._dataset_state = self._next()
        if last is None or not last.is_pending or self.position is not last.before:
            return None
        if at is last.after:
            self.unreadable.take_back(last.unreadable)
        return last

    def _marked(self, handout: Handout, before: Position, again: HandedOut | None, *, stepped: bool) -> tuple[Batch, HandedOut]:
        """The batch to hand out now, with its origin; ``again`` is the batch whose step was interrupted.

        Mutates: the batch; the origin of the last batch.
        """
        agreement = handout.agreement
        if again is not None and (again.before, again.after) == (before, handout.after):
            agreement, again.agreement.begun = again.agreement, False
        self.handed_out = self._origin(handout, before, agreement)
        return mark_batch(handout.batch, self.handed_out), HandedOut(
            agreement=agreement,
            before=before,
            dataset=self._dataset_state,
            after=handout.after,
            unreadable=handout.unreadable,
            expected=stepped,
        )

    def _origin(self, handout: Handout, before: Position, agreement: Agreement) -> Origin:
        begin, end = self._place(before), self._place(handout.after)
        if handout.alone and handout.ends:  # the position moves when all ranks have ended
            end = Place(begin.epoch + 1, 0)
        return Origin(
            loader=self.identity,
            begin=begin,
            end=end,
            alone=handout.alone,
            stamp=0 if handout.alone or current().world_size == 1 else self._stamp(before),
            spare=handout.spare,
            agreement=agreement,
        )

    def _place(self, at: Position) -> Place:
        """Epoch and batches of it. The steps count batches if their size is a schedule."""
        size = self.feed.global_batch_size
        return Place(at.epoch, None if callable(size) else -(-at.samples // size))

    def _ended_alone(self) -> bool:
        """Return True if the batch handed out last was the end of the epoch for all ranks, and the position does not say so."""
        origin = self.handed_out
        if origin is None or not origin.alone or self._dataset_state is not None:
            return False
        return origin.ends_epoch and self.position.epoch == origin.begin.epoch and origin.agreement.over is not False

    def _stamp(self, at: Position) -> int:
        """A number for this place in these data, below 2**48."""
        return derive_seed(self._digest, self.seed, at.epoch, at.samples, at.batches) % 2**48

    def _grid(self, where: str) -> Grid:
        grid = self.feed.grid()
        if grid is None:
            raise ConfigError(f"loader.{where}: an iterable dataset without a length; count in batches, as in until('1000ba')")
        return grid

    def _move(self, handout: Handout) -> None:
        self.unreadable.add(handout.unreadable)
        self.position, self._dataset_state = handout.after, handout.state

    def _handouts(self, at: Position, goal: Duration) -> Iterator[Handout | FailedBatch]:
        """The feed's, on the device. A failure on one of several ranks becomes a batch: the step tells the others."""
        try:
            yield from self._moved(self.feed.handouts(at, goal, state=self._dataset_state))
        except DtrainError as error:
            if current().world_size == 1:
                raise
            yield FailedBatch(error)

    def _moved(self, handouts: Iterator[Handout]) -> Iterator[Handout]:
        try:
            if self._device is None:
                yield from handouts
            else:
                yield from moved_ahead(
                    handouts, self._device, ahead=self._ahead, batch_of=_batch, with_batch=_with_batch, stops=_ends_alone
                )
        except DtrainError:
            raise
        except Exception as error:  # of the dataset's order, a device, ...: of any kind, the other ranks wait in the step
            raise DataError(f"loader: {described(error)}") from error

    def __repr__(self) -> str:
        at = self.position
        return f"Loader(data={self.fingerprint}, epoch={at.epoch}, samples={at.samples})"


def _waited(handouts: Iterator[Handout | FailedBatch]) -> Iterator[Handout | FailedBatch]:
    """The same; the time in which the loop waits for the next one is counted."""
    while True:
        spans.begin("data")
        try:
            handout = next(handouts, None)
        finally:
            spans.end("data")
            pulse.beat("in the loop")  # the wait is over: a rank that stops now, before it reports anything else, has data
        if handout is None:
            return
        yield handout


def _batch(handout: Handout) -> Batch:
    return handout.batch


def _ends_alone(handout: Handout) -> bool:
    """Whether what comes next depends on the step on this one."""
    return handout.alone and handout.ends


def _with_batch(handout: Handout, batch: Batch) -> Handout:
    return replace(handout, batch=batch)


def _integer(state: Mapping[str, Plain], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointMismatchError(f"loader: the saved position has no whole number {name!r}, but {value!r}")
    return value
