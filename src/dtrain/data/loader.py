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

from dtrain import heartbeats, spans
from dtrain.batch import FailedBatch, attach_batch_info
from dtrain.clock import EpochPosition
from dtrain.data.batch_source import BatchSource, LoaderItem
from dtrain.data.dataset import hash_fingerprint
from dtrain.data.device_prefetch import prefetch_items
from dtrain.data.fetcher import describe_error
from dtrain.data.position import EpochBatches, IssuedBatch, Position, SkippedSamples, is_reached, parse_length
from dtrain.dist.batch_info import BatchInfo, BatchStatus
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed
from dtrain.durations import Duration, RunLength
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError, DtrainError
from dtrain.typing import Batch, Plain

_STATE_VERSION = 1


class StopCondition(Protocol):
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
        source: BatchSource,
        *,
        seed: int,
        fingerprint: Mapping[str, Plain],
        allow_data_change: bool = False,
        device: torch.device | None = None,
        prefetch_factor: int = 2,
    ) -> None:
        self.source = source
        self.seed = seed
        self.fingerprint = dict(fingerprint)
        self.position = Position()
        self.skipped = SkippedSamples(samples=[])
        self._allow_data_change = allow_data_change
        self._device, self._prefetch_factor = device, prefetch_factor
        self._digest = hash_fingerprint(self.fingerprint)
        self._dataset_state: Plain = None
        self._skip_target: Position | None = None
        self._evaluations = 0
        self.identity = object()  # in the origins of its batches
        self.last_batch_info: BatchInfo | None = None
        self._issued: IssuedBatch | None = None

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch hands out over all ranks."""
        return self._epoch_batches("epoch_samples").samples_per_epoch

    def steps_per_epoch(self) -> int:
        """Batches in one whole epoch.

        Raises:
            ConfigError: only the end of the epoch will tell (an iterable dataset without a length).
        """
        return self._epoch_batches("steps_per_epoch").steps_per_epoch()

    def total_steps(self, length: Duration | int | str) -> int:
        """Steps from the start of the run to ``length``, in epochs, batches or samples.

        Raises:
            ConfigError: a unit that a loader cannot count (tokens, seconds), or epochs of a dataset without a length.
        """
        goal = parse_length(length)
        return int(goal.value) if goal.unit == "ba" else self._epoch_batches("total_steps").total_steps(goal)

    def run_length(self, length: Duration | int | str) -> RunLength:
        """What this loader knows of a run of ``length``: what ``"0.1dur"`` and ``"1ep"`` of it come to in steps.

        Its total is ``length``; or, where the size of batches is a schedule, or samples end with a smaller batch in each epoch,
        that in steps, since a number of samples per step would not tell it.

        Raises:
            ConfigError: a unit that a loader cannot count (tokens, seconds), or epochs of a dataset without a length.
        """
        goal, grid, size = parse_length(length), self.source.epoch_batches(), self.source.global_batch_size
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

    def until(self, length: Duration | int | str, *, stop: StopCondition | Sequence[StopCondition] = ()) -> Iterator[Batch]:
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
        goal, stops = parse_length(length), tuple(stop) if isinstance(stop, Sequence) else (stop,)
        ended = next((one for one in stops if one.stopped), None)
        if ended is not None and get_dist_info().rank == 0:
            print(f"dtrain: until: the run has ended by {ended!r}; there is nothing left to train", file=sys.stderr)
        again = self._take_back_pending()
        stepped = again is not None or (self._issued is not None and self._issued.is_stepped)
        while not is_reached(goal, self.position) and not any(one.stopped for one in stops):
            at, passes = self.position, self._evaluations
            for handout in _time_data_waits(self._items(at, goal)):
                if isinstance(handout, FailedBatch):
                    place = self._place(at)
                    self.last_batch_info = BatchInfo(
                        loader=self.identity, begin=place, end=place, position_hash=self._position_hash(at)
                    )
                    yield replace(handout, info=self.last_batch_info)
                    raise handout.error
                before, at = at, handout.position_after
                if handout.position_only:
                    self._advance(handout)
                    continue
                batch, last = self._mark(handout, before, again, step_expected=stepped)
                again, self._issued = (
                    None,
                    last,
                )  # then the position: after an interrupt between them the next loop has the batch
                self._advance(handout)
                yield batch
                handout.agreement.epoch_ended = last.agreement.epoch_ended  # the feed may wait for it
                stepped, self._issued = last.is_stepped, None
                if any(one.stopped for one in stops):
                    return
                # Before the next batch is read: a stretch is skipped because it cannot be, perhaps.
                if self._skip_target is self.position or (self._evaluations != passes and self.source.single_reader):
                    break  # skip() in the loop body, or one_pass() that has moved the dataset: go on from the position
                if self.position is not at:
                    raise ConfigError("loader: its position was moved in the middle of until(); run one such loop at a time")

    def one_epoch(self) -> Iterator[Batch]:
        """Every sample of an epoch once, from its start, without moving the position: for evaluation.

        Whatever ``tail`` is, no sample is left out and none is repeated.
        """
        at = Position(epoch=self.position.epoch)
        self._evaluations += 1
        for handout in self._items_on_device(self.source.items(at, Duration(at.epoch + 1, "ep"), evaluation=True)):
            self.skipped.add(handout.skipped)
            if not handout.position_only:
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
        if not self.source.can_skip():
            raise ConfigError("loader.skip: the dataset is split over ranks, and only it knows what comes next; skip there")
        grid = self.source.epoch_batches()
        if grid is None:
            self.position = replace(self.position, samples=self.position.samples + samples)
        else:
            self.position = grid.skip(self.position, samples)
        self._dataset_state = None  # what it remembers is before that
        self._skip_target = self.position

    def state_dict(self) -> dict[str, Plain]:
        """The position, and what it is only meaningful with: seed, shuffle, size, and a digest of the dataset's fingerprint.

        The position is before the batch that was handed out last if a step on it is not complete: a save after an interrupt
        skips no batch. An iterable dataset's own state is in it under ``"dataset"``, if it has one.
        """
        at, dataset = self._resume_point()
        state: dict[str, Plain] = {
            "version": _STATE_VERSION,
            **asdict(at),
            **self.source.order_identity(at),
            "data": self._digest,
        }
        return state if dataset is None else {**state, "dataset": dataset}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Continue where ``state`` was taken. The global batch size, ranks and workers may differ.

        Mutates: the position.

        Raises:
            CheckpointMismatchError: a state of another format version, or of other data, seed or shuffle, under which the
                position means other samples.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointMismatchError(
                f"loader: the saved position has format version {state.get('version')}, this release reads {_STATE_VERSION}; leave "
                "the loader out of extra to start over"
            )
        at = Position(**{field.name: _read_int(state, field.name) for field in fields(Position)})
        if not self._allow_data_change and state.get("data") != self._digest:
            raise CheckpointMismatchError(
                f"loader: the dataset is not the one of the checkpoint (it had {state.get('size')} samples, this one has "
                f"{self.fingerprint.get('count')}; names, sizes or shards differ); resume with the same data, or allow it with "
                "build_loader(data_may_change=True)"
            )
        try:
            self.source.resume({name: value for name, value in state.items() if isinstance(value, int)}, at)
        except CheckpointMismatchError:
            if not self._allow_data_change:
                raise
        grid = self.source.epoch_batches()
        self.position = at if grid is None else grid.normalize(at)
        self._dataset_state = state.get("dataset")
        self.last_batch_info, self._issued = None, None

    def _resume_point(self) -> tuple[Position, Plain]:
        """Where a later loop begins, and the state of an iterable dataset there."""
        if self._issued is not None and self._issued.position_after is self.position and self._issued.is_pending:
            return self._issued.position_before, self._issued.dataset_state
        if self._ended_independently():
            return replace(self.position, epoch=self.position.epoch + 1, samples=0), self._dataset_state
        return self.position, self._dataset_state

    def _take_back_pending(self) -> IssuedBatch | None:
        """Return the batch whose step was interrupted, or None. The next batch of the loader is that batch again.

        Mutates: the position, which is where a later loop begins; the list of unreadable samples.
        """
        last, at = self._issued, self.position
        self.position, self._dataset_state = self._resume_point()
        if last is None or not last.is_pending or self.position is not last.position_before:
            return None
        if at is last.position_after:
            self.skipped.remove(last.skipped)
        return last

    def _mark(
        self, handout: LoaderItem, before: Position, pending: IssuedBatch | None, *, step_expected: bool
    ) -> tuple[Batch, IssuedBatch]:
        """The batch to hand out now, with its origin; ``pending`` is the batch whose step was interrupted.

        Mutates: the batch; the origin of the last batch.
        """
        agreement = handout.agreement
        if pending is not None and (pending.position_before, pending.position_after) == (before, handout.position_after):
            agreement, pending.agreement.started = pending.agreement, False
        self.last_batch_info = self._origin(handout, before, agreement)
        return attach_batch_info(handout.batch, self.last_batch_info), IssuedBatch(
            agreement=agreement,
            position_before=before,
            dataset_state=self._dataset_state,
            position_after=handout.position_after,
            skipped=handout.skipped,
            step_expected=step_expected,
        )

    def _origin(self, handout: LoaderItem, before: Position, agreement: BatchStatus) -> BatchInfo:
        begin, end = self._place(before), self._place(handout.position_after)
        if handout.independent_epochs and handout.ends_epoch:  # the position moves when all ranks have ended
            end = EpochPosition(begin.epoch + 1, 0)
        return BatchInfo(
            loader=self.identity,
            begin=begin,
            end=end,
            independent_epochs=handout.independent_epochs,
            position_hash=0 if handout.independent_epochs or get_dist_info().world_size == 1 else self._position_hash(before),
            padding_sample=handout.padding_sample,
            status=agreement,
        )

    def _place(self, at: Position) -> EpochPosition:
        """Epoch and batches of it. The steps count batches if their size is a schedule."""
        size = self.source.global_batch_size
        return EpochPosition(at.epoch, None if callable(size) else -(-at.samples // size))

    def _ended_independently(self) -> bool:
        """Return True if the batch handed out last was the end of the epoch for all ranks, and the position does not say so."""
        origin = self.last_batch_info
        if origin is None or not origin.independent_epochs or self._dataset_state is not None:
            return False
        return origin.ends_epoch and self.position.epoch == origin.begin.epoch and origin.status.epoch_ended is not False

    def _position_hash(self, at: Position) -> int:
        """A number for this place in these data, below 2**48."""
        return derive_seed(self._digest, self.seed, at.epoch, at.samples, at.batches) % 2**48

    def _epoch_batches(self, where: str) -> EpochBatches:
        grid = self.source.epoch_batches()
        if grid is None:
            raise ConfigError(f"loader.{where}: an iterable dataset without a length; count in batches, as in until('1000ba')")
        return grid

    def _advance(self, handout: LoaderItem) -> None:
        self.skipped.add(handout.skipped)
        self.position, self._dataset_state = handout.position_after, handout.dataset_state

    def _items(self, at: Position, goal: Duration) -> Iterator[LoaderItem | FailedBatch]:
        """The feed's, on the device. A failure on one of several ranks becomes a batch: the step tells the others."""
        try:
            yield from self._items_on_device(self.source.items(at, goal, state=self._dataset_state))
        except DtrainError as error:
            if get_dist_info().world_size == 1:
                raise
            yield FailedBatch(error)

    def _items_on_device(self, handouts: Iterator[LoaderItem]) -> Iterator[LoaderItem]:
        try:
            if self._device is None:
                yield from handouts
            else:
                yield from prefetch_items(
                    handouts,
                    self._device,
                    prefetch_factor=self._prefetch_factor,
                    get_batch=_get_batch,
                    set_batch=_set_batch,
                    is_last=_is_independent_end,
                )
        except DtrainError:
            raise
        except Exception as error:  # of the dataset's order, a device, ...: of any kind, the other ranks wait in the step
            raise DataError(f"loader: {describe_error(error)}") from error

    def __repr__(self) -> str:
        at = self.position
        return f"Loader(data={self.fingerprint}, epoch={at.epoch}, samples={at.samples})"


def _time_data_waits(handouts: Iterator[LoaderItem | FailedBatch]) -> Iterator[LoaderItem | FailedBatch]:
    """The same; the time in which the loop waits for the next one is counted."""
    while True:
        spans.begin("data")
        try:
            handout = next(handouts, None)
        finally:
            spans.end("data")
            heartbeats.heartbeat(
                "in the loop"
            )  # the wait is over: a rank that stops now, before it reports anything else, has data
        if handout is None:
            return
        yield handout


def _get_batch(handout: LoaderItem) -> Batch:
    return handout.batch


def _is_independent_end(handout: LoaderItem) -> bool:
    """Whether what comes next depends on the step on this one."""
    return handout.independent_epochs and handout.ends_epoch


def _set_batch(handout: LoaderItem, batch: Batch) -> LoaderItem:
    return replace(handout, batch=batch)


def _read_int(state: Mapping[str, Plain], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointMismatchError(f"loader: the saved position has no whole number {name!r}, but {value!r}")
    return value
