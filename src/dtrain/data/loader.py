"""``build_loader`` and ``Loader``: batches of this rank, with a position that a checkpoint stores as a few integers.

The loader advances the position; a ``BatchSource`` reads the samples. The position counts *issued*, not prefetched samples.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler

from dtrain.arguments import check_choice, check_int, check_number, explain_arguments, warn
from dtrain.data.balance import BalanceCost, BatchBalance, make_dealer, make_sample_dealer
from dtrain.data.batch import BatchSpec, FailedBatch, attach_batch_info, prefetch_items
from dtrain.data.batch_source import (
    BatchOptions,
    BatchSource,
    IterableBatchSource,
    LoaderItem,
    MapBatchSource,
    iterable_batch_source,
    next_item,
)
from dtrain.data.dataset import (
    MapDataset,
    as_row_dataset,
    fingerprint_dataset,
    hash_fingerprint,
    hash_stored_samples,
    is_hugging_face,
    is_indexed,
)
from dtrain.data.dataset_changes import items_with_changes
from dtrain.data.fetcher import ON_ERROR_MODES, Fetcher, OnError, SampleTransform, describe_error
from dtrain.data.position import (
    LAST_BATCH_MODES,
    BatchesWithoutStep,
    EpochBatches,
    IssuedBatch,
    LastBatch,
    Position,
    SkippedSamples,
    StopCondition,
    convert_run_length,
    describe_end,
    describe_epoch,
    is_reached,
    parse_length,
    read_position,
    write_position,
)
from dtrain.data.sample_lengths import LengthSource
from dtrain.data.sample_order import BlockShuffle, dataset_order
from dtrain.data.workers import WorkerConfig, divide_workers
from dtrain.device import is_accelerator
from dtrain.dist.batch_info import DATA_HASH_SHIFT, BatchInfo, BatchStatus
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import data_rank
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError, ConfigTypeError, DataError, DtrainError
from dtrain.schedules.clock import EpochPosition
from dtrain.schedules.durations import Duration, RunLength
from dtrain.schedules.hyperparameters import UnitSchedule
from dtrain.typing import Batch, Plain, Schedule


class Loader:
    """Batches of one rank, in an order that depends on data, seed and epoch, not on ranks. ``build_loader`` builds a loader.

    Global batch ``k`` of an epoch has the same samples on every number of ranks, and each rank receives a share of them.
    ``state_dict`` and ``load_state_dict`` save and restore the position: pass the loader to ``Step.init``.
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
        data_hash: int = 0,
    ) -> None:
        self._source, self.seed, self._fingerprint = source, seed, dict(fingerprint)
        self.position, self.skipped = Position(), SkippedSamples(samples=[])
        self._allow_data_change = allow_data_change
        self._device, self._prefetch_factor, self._reads_ahead = device, prefetch_factor, reads_ahead(source, device)
        self._digest = hash_fingerprint(self._fingerprint)
        # Ranks compare more facts of their data than a checkpoint holds.
        self._data_hash = derive_seed(self._digest, data_hash)
        self._dataset_state: Plain = None
        self._skip_target: Position | None = None
        self._last_batch_info: BatchInfo | None = None
        self.balance: BatchBalance | None = None
        """Costs by rank of the batch issued last; None before the first batch, or without ``balance`` and ``max_tokens``."""
        self._issued: IssuedBatch | None = None
        self._without_step = BatchesWithoutStep()
        self._step_expected = self._belongs_to_run = self._was_loaded = False
        self._loop_start: Position | None = None
        # Stops of the newest loop, which a checkpoint must hold.
        self._stops: Sequence[StopCondition] = ()

    @property
    def _identity(self) -> weakref.ref[Any]:
        """Reference by which steps and saves find the loader of a batch: one object while a batch or a state holds it."""
        return weakref.ref(self)

    def steps_per_epoch(self) -> int:
        """Count the batches of a complete epoch.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(list(range(10)), global_batch_size=4, seed=0)
            >>> loader.steps_per_epoch()
            3

        Raises:
            ConfigError: the dataset is iterable and has no length.
        """
        return self._epoch_batches("steps_per_epoch").steps_per_epoch()

    def total_steps(self, run_length: Duration | int | str) -> int:
        """Count the steps from the start of the run to ``run_length``, in epochs, batches or samples.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(list(range(10)), global_batch_size=4, seed=0)
            >>> loader.total_steps("2ep")
            6

        Raises:
            ConfigError: a loader cannot count the unit (tokens, seconds), or the dataset has no length and the unit is epochs.
        """
        goal = parse_length(run_length)
        return int(goal.value) if goal.unit == "ba" else self._epoch_batches("total_steps").total_steps(goal)

    def run_length(self, run_length: Duration | int | str) -> RunLength:
        """Return the length of a run in steps, so that schedules can convert ``"0.1dur"`` and ``"1ep"`` to steps.

        The total of the result is ``run_length``. The total is in steps if the samples per step vary: if the batch size is a
        schedule, or if samples end with a smaller batch in each epoch.

        Raises:
            ConfigError: a loader cannot count the unit (tokens, seconds), or the dataset has no length and the unit is epochs.
        """
        goal, size = parse_length(run_length), self._source.options.global_batch_size
        if goal.unit == "ep" or (goal.unit == "sp" and callable(size)):
            self._epoch_batches("run_length")
        return convert_run_length(goal, size, self._source.epoch_batches())

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of this epoch, and move the position, as ``until`` does to the end of the epoch.

        If the epoch is complete, iterate over the next epoch. The first such loop after a load prints the epoch of the run:
        ``until("3ep")`` counts the epochs of a run that resumes, and ``for epoch in range(3)`` does not. For evaluation use
        ``one_epoch()``, which also reads a batch without moving the position: ``next(loader.one_epoch())``.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(list(range(5)), global_batch_size=2, seed=0, shuffle=False)
            >>> next(iter(loader)).tolist()
            [0, 1]
            >>> [batch.tolist() for batch in loader], len(loader)
            ([[2, 3], [4]], 2)
        """
        return self._issue_batches(None)

    def __len__(self) -> int:
        """Count the batches of ``for batch in loader``: the rest of this epoch.

        In and after such a loop, this is the number of batches of that loop, until the next loop, ``skip`` or load. Schedules
        need ``steps_per_epoch()``, which counts a whole epoch, or ``run_length(...)``.

        Raises:
            ConfigTypeError: the dataset is iterable and has no length.
        """
        return self._epoch_batches("len").remaining_steps(self._loop_start or self._resume_point()[0])

    def __bool__(self) -> bool:
        """Return True, also for a loader without a length."""
        return True

    def until(self, run_length: Duration | int | str, *, stop: StopCondition | Sequence[StopCondition] = ()) -> Iterator[Batch]:
        """Iterate over batches from the current position to ``run_length`` of the whole run.

        If the run is complete, yield nothing, and print a line that says so.

        A batch is consumed when a step on the batch is complete, or when the loop requests the next batch. So a checkpoint
        agrees with its state at every point of the loop body, also after Ctrl-C in the middle of a step. A loader that
        ``step.init`` received issues a batch again that had no step, such as that of ``next(iter(loader))``. Without steps of
        dtrain, a batch is consumed when it is issued. If a batch has several steps, the first step counts.

        A new loop begins after the consumed batches: after Ctrl-C in a notebook, run the cell again, or ``skip(0)`` first to
        leave out the interrupted batch.

        The tensors of a batch carry a ``BatchInfo``, from which the step knows the epoch and checks that all ranks are at the
        same position. New tensors (slices, copies) carry no ``BatchInfo``: pass ``step.init(model, optimizer, loader=loader)``.

        Args:
            run_length: length of the whole run, in epochs, batches or samples.
            stop: an ``early_stop``, a ``threshold_stop``, or several, which end the loop after the current batch, or at once.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(
            ...     list(range(10)), global_batch_size=4, seed=0, shuffle=False
            ... )
            >>> [batch.tolist() for batch in loader.until("1ep")]
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

        Raises:
            ConfigError: a loader cannot count the unit, or another loop moved the position.
            DataError: samples could not be read. On several ranks the step raises the error, and all ranks stop together.
        """
        return self._issue_batches(parse_length(run_length), tuple(stop) if isinstance(stop, Sequence) else (stop,))

    def _issue_batches(self, length: Duration | None, stops: Sequence[StopCondition] = ()) -> Iterator[Batch]:
        """Issue the batches to ``length``, or to the end of this epoch, until one of ``stops`` ends the run."""
        pending, self._stops = self._take_back_pending(), stops
        # A loop that ended leaves no batch, and the next loop expects steps if that loop had steps.
        if self._issued is not None:
            self._step_expected = pending is not None or self._issued.is_stepped
        goal = length or Duration(self.position.epoch + 1, "ep")
        if get_dist_info().rank == 0 and (end := describe_end(goal, self.position, stops)) is not None:
            print(f"dtrain: {end}", file=sys.stderr)
        if length is None and self._was_loaded and get_dist_info().rank == 0:
            print(f"dtrain: {describe_epoch(self.position)}", file=sys.stderr)
        self._was_loaded, self._loop_start = False, self.position if length is None else None
        while not is_reached(goal, self.position) and not any(condition.stopped for condition in stops):
            pending = yield from self._issue_until_restart(goal, stops, pending)

    def _issue_until_restart(
        self, goal: Duration, stops: Sequence[StopCondition], pending: IssuedBatch | None
    ) -> Generator[Batch, None, IssuedBatch | None]:
        """Issue batches until the goal, a stop, or an event after which the source must be read from another position.

        Args:
            goal: end of the loop.
            stops: conditions that end the loop after a batch.
            pending: the batch whose step was interrupted, which is issued again.

        Returns:
            ``pending``, until it is issued.
        """
        position, context, identity = self.position, current_context(), self._identity
        items, reading = self._items(position, goal, self._dataset_state), self._source.begin_reading()
        while True:
            try:
                item = next_item(items)
            except DtrainError as error:
                if get_dist_info().world_size > 1:
                    # The step on this batch raises the error on all ranks, so that no rank waits.
                    yield self._failed_batch(error, position)
                    # The loop has handled the error of the step, and has skipped the batch.
                    if self._skip_target is self.position is not position:
                        return pending
                raise
            if item is None:
                return pending
            before, position = position, item.position_after
            if item.position_only:
                self.position, self._dataset_state = position, item.dataset_state
                continue
            batch, issued = self._mark(item, before, pending)
            # The position advances last. If an interrupt hits in between, the next loop issues the batch again.
            pending, self._issued = None, issued
            self.skipped.add(item.skipped)
            self.position, self._dataset_state = position, item.dataset_state
            context.issuing_loader = identity
            try:
                yield batch
            finally:
                # A step has taken the batch, or the loop of another loader has issued one since.
                if context.issuing_loader is identity:
                    context.issuing_loader = None
            # The batch source may wait for the agreement.
            item.status.epoch_ended = issued.status.epoch_ended
            self._step_expected, self._issued = issued.is_stepped, None
            if not issued.status.consumed:
                self._without_step.add(issued.status, position.batches)
            # A loop that was stopped reads no further batch. The loop restarts before the next batch is read, since the
            # samples to skip may be unreadable, and if one_epoch() or another loader has moved the dataset.
            if (stops and any(condition.stopped for condition in stops)) or self._skip_target is self.position:
                return None
            if reading.was_moved:
                return None
            if self.position is not position:
                raise ConfigError("loader: another loop moved the position during this loop. Run one loop at a time.")

    def one_epoch(self) -> Iterator[Batch]:
        """Iterate over each sample of an epoch once, without moving the position: for evaluation.

        ``last_batch`` has no effect: no sample is left out, and no sample is repeated.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(list(range(5)), global_batch_size=2, seed=0, shuffle=False)
            >>> [batch.tolist() for batch in loader.one_epoch()]
            [[0, 1], [2, 3], [4]]
        """
        position = Position(epoch=self.position.epoch)
        goal = Duration(position.epoch + 1, "ep")
        state: Plain = None
        while True:
            reading = self._source.begin_reading()
            for item in self._items(position, goal, state, evaluation=True):
                self.skipped.add(item.skipped)
                position, state = item.position_after, item.dataset_state
                if not item.position_only:
                    yield item.batch
                if reading.was_moved:
                    break
            else:
                return

    def skip(self, samples: int) -> None:
        """Skip the next ``samples`` over all ranks, for example unreadable samples. Call ``skip`` on every rank.

        Skipped samples count towards the epoch, but not as batches or samples of the run. They follow the batch that was
        issued last, also if the step on that batch was interrupted. If some rank could not read a batch, they begin with that
        batch on all ranks. A running ``until`` continues after them.

        Mutates: the position.

        Example:
            >>> import dtrain as dt
            >>> loader = dt.build_loader(list(range(6)), global_batch_size=2, seed=0, shuffle=False)
            >>> loader.skip(4)
            >>> [batch.tolist() for batch in loader.until("1ep")]
            [[4, 5]]

        Raises:
            ConfigError: ``samples`` is not an integer of at least 0, or the dataset is split over ranks already.
        """
        check_int("loader.skip", "samples", samples, minimum=0)
        if not self._source.can_skip:
            raise ConfigError("loader.skip: the dataset is split over ranks, so the loader cannot skip. Skip in the dataset.")
        position, batches = self._skip_begin(), self._source.epoch_batches()
        self.position = (
            replace(position, samples=position.samples + samples) if batches is None else batches.skip(position, samples)
        )
        # The dataset's state is older than the new position.
        self._dataset_state = self._loop_start = None
        self._skip_target = self.position

    def _skip_begin(self) -> Position:
        """Return the position of the first sample that ``skip`` leaves out."""
        issued = self._issued
        if issued is None or not issued.status.unread or issued.position_after is not self.position:
            return self.position
        return issued.position_before

    def state_dict(self) -> dict[str, Plain]:
        """Return the position, the properties of the order (seed, shuffle, size), and a digest of the dataset's fingerprint.

        If the step on the batch issued last is not complete, the position is before that batch, so that a save after an
        interrupt skips no batch. The key ``"dataset"`` holds the state of an iterable dataset, if the dataset has a state.
        """
        position, dataset = self._resume_point()
        if lost := self._without_step.pop_lost():
            warn(
                f"loader: the loop takes batches ahead of steps, so a resume of this save leaves out batches {lost} of the "
                "run. Hold back one batch at most, or use build_loader(num_workers=, device=) to prepare batches."
            )
        state = {**write_position(position), **self._source.order_identity(position), "data": self._digest}
        return state if dataset is None else {**state, "dataset": dataset}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Restore the position that ``state_dict`` saved. The global batch size, ranks and workers may differ.

        Mutates: the position.

        Raises:
            CheckpointMismatchError: the state has another format version, or comes from other data, another seed or another
                shuffle, with which the position means other samples.
        """
        position = read_position(state)
        if not self._allow_data_change and state.get("data") != self._digest:
            raise CheckpointMismatchError(
                f"loader: the dataset differs from the dataset of the checkpoint, which had {state.get('size')} samples; this "
                f"one has {self._fingerprint.get('count')} (names, sizes or shards differ). Resume with the same data, or pass "
                "build_loader(allow_data_change=True)."
            )
        try:
            self._source.resume({name: value for name, value in state.items() if isinstance(value, int)}, position)
        except CheckpointMismatchError:
            if not self._allow_data_change:
                raise
        epoch_batches = self._source.epoch_batches()
        self.position = position if epoch_batches is None else epoch_batches.normalize(position)
        self._dataset_state, self._last_batch_info, self._issued = state.get("dataset"), None, None
        self._was_loaded, self._loop_start = True, None
        self._without_step.clear()

    def _join_run(self) -> None:
        """Expect a step on each batch from now on, since a state holds the loader, and on a batch that had no step so far."""
        self._belongs_to_run = True
        if self._issued is not None and not self._issued.is_stepped:
            self._issued.step_expected = True

    def _resume_point(self) -> tuple[Position, Plain]:
        """Return the position of the next loop, and the state of an iterable dataset at that position."""
        if self._issued is not None and self._issued.position_after is self.position and self._issued.is_pending:
            return self._issued.position_before, self._issued.dataset_state
        position, info, state = self.position, self._last_batch_info, self._dataset_state
        if info is None or not info.independent_epochs or not info.ends_epoch or state is not None:
            return position, state
        # The batch issued last ended this rank's epoch. The position is still in that epoch.
        is_over = position.epoch == info.begin.epoch and info.status.epoch_ended is not False
        return (replace(position, epoch=position.epoch + 1, samples=0) if is_over else position), state

    def _take_back_pending(self) -> IssuedBatch | None:
        """Return the batch whose step was interrupted, or None. The loader issues that batch again.

        Mutates: the position, to the position of the next loop; the list of skipped samples.
        """
        issued, position = self._issued, self.position
        self.position, self._dataset_state = self._resume_point()
        if issued is None or not issued.is_pending or self.position is not issued.position_before:
            return None
        if position is issued.position_after:
            self.skipped.remove(issued.skipped)
        return issued

    def _mark(self, item: LoaderItem, before: Position, pending: IssuedBatch | None) -> tuple[Batch, IssuedBatch]:
        """Attach the ``BatchInfo`` to the batch to issue. ``pending`` is the batch whose step was interrupted.

        Mutates: the batch; the status of the pending batch.
        """
        status, after, independent = item.status, item.position_after, item.independent_epochs
        if pending is not None and (pending.position_before, pending.position_after) == (before, after):
            status = pending.status
            status.started = status.unread = False
        size = self._source.options.global_batch_size
        begin, end = before.in_epoch(size), after.in_epoch(size)
        # The ranks end their epochs independently, but the position moves when all ranks have ended.
        if independent and item.ends_epoch:
            end = EpochPosition(begin.epoch + 1, 0)
        self.balance = item.balance
        # Ranks that deal a batch in different ways would lose and repeat samples, so the hash covers the dealing.
        dealing = () if item.balance is None else (item.balance.digest,)
        compares_ranks = get_dist_info().world_size > 1 and not independent
        self._last_batch_info = BatchInfo(
            loader=self._identity,
            begin=begin,
            end=end,
            independent_epochs=independent,
            position_hash=self._position_hash(before, *dealing, content=item.content_hash) if compares_ranks else 0,
            padding_sample=item.padding_sample,
            status=status,
        )
        return attach_batch_info(item.batch, self._last_batch_info), IssuedBatch(
            status=status,
            position_before=before,
            dataset_state=self._dataset_state,
            position_after=after,
            skipped=item.skipped,
            step_expected=self._belongs_to_run or self._step_expected,
        )

    def _failed_batch(self, error: DtrainError, position: Position) -> FailedBatch:
        place = position.in_epoch(self._source.options.global_batch_size)
        self._last_batch_info = BatchInfo(
            loader=self._identity,
            begin=place,
            end=place,
            position_hash=self._position_hash(position),
            status=BatchStatus(unread=True),
        )
        return FailedBatch(error, self._last_batch_info)

    def _position_hash(self, position: Position, *dealing: int, content: int = 0) -> int:
        """Hash the data to the upper, and the position, the seed and the dealing of the batch to the lower bits of a number."""
        data = derive_seed(self._data_hash, content) % (1 << DATA_HASH_SHIFT)
        place = derive_seed(self.seed, position.epoch, position.samples, position.batches, *dealing) % (1 << DATA_HASH_SHIFT)
        return data << DATA_HASH_SHIFT | place

    def _epoch_batches(self, caller: str) -> EpochBatches:
        epoch_batches = self._source.epoch_batches()
        if epoch_batches is None:
            raise ConfigTypeError(f"loader.{caller}: the dataset has no length. Count in batches, as in until('1000ba').")
        return epoch_batches

    def _items(
        self, position: Position, goal: Duration, state: Plain, *, evaluation: bool = False
    ) -> Generator[LoaderItem, None, None]:
        """Iterate over the items from ``position``, where an iterable dataset has the state ``state``, on the device.

        Raises:
            DataError: the dataset or the device raised an error.
        """

        def read(position: Position, state: Plain) -> Generator[LoaderItem, None, None]:
            items = self._source.items(position, goal, state=state, evaluation=evaluation)
            if self._device is None:
                yield from items
                return
            yield from prefetch_items(
                items,
                self._device,
                prefetch_factor=self._prefetch_factor,
                get_batch=lambda item: item.batch,
                set_batch=lambda item, batch: replace(item, batch=batch),
                # The loop may change an iterable dataset at the end of an epoch, and samples in preparation cannot be read
                # again. If ranks end their epochs independently, the next batch also depends on the step on this batch.
                is_last=lambda item: not self._source.is_indexed and item.ends_epoch,
            )

        try:
            watched = self._reads_ahead and items_with_changes(read, self._source, position, goal, state, evaluation=evaluation)
            yield from watched or read(position, state)
        except Exception as error:
            # Python may close this generator when the names of this module are gone, so the handler has builtin names alone.
            if isinstance(error, DtrainError):
                raise
            raise DataError(f"loader: {describe_error(error)}") from error

    def __repr__(self) -> str:
        count, size = self._fingerprint.get("count", "unknown"), self._source.options.global_batch_size
        return f"Loader(samples={count}, global_batch_size={'varies' if callable(size) else size}, epoch={self.position.epoch})"


def reads_ahead(source: BatchSource, device: torch.device | None) -> bool:
    """Return True if the loader may read a batch before the loop has ended the body of the batch before."""
    if isinstance(source, IterableBatchSource):
        # A StreamingDataset shares its state with its workers, which change it.
        return source.options.workers.count > 0 and source.adapter is None
    return source.options.workers.count > 0 or (device is not None and is_accelerator(device))


@explain_arguments
def build_loader(
    dataset: MapDataset | Iterable[Any],
    *,
    mesh: DeviceMesh | None = None,
    global_batch_size: int | Schedule,
    seed: int,
    shuffle: bool | BlockShuffle = True,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Batch] | None = None,
    transform: SampleTransform | None = None,
    last_batch: LastBatch = "short",
    on_error: OnError = "raise",
    batch_spec: BatchSpec | None = None,
    device: torch.device | str | None = None,
    prefetch_factor: int = 2,
    timeout_s: float = 300.0,
    start_method: str | None = None,
    pre_sharded: bool = False,
    allow_data_change: bool = False,
    balance: BalanceCost | None = None,
    lengths: LengthSource = None,
    max_tokens: int | None = None,
    padded: bool = True,
) -> Loader:
    """Build the loader of this rank's share of ``dataset``.

    Args:
        dataset: an indexed dataset with a length, equal on every rank: a map-style dataset, a Hugging Face ``Dataset``, a
            ``ShardedDataset``, one of ``mix``. Tensors and arrays have a sample per row: a tensor, an array, a tuple or dict of
            them, a ``TensorDataset``, a ``TensorDict``; without ``collate`` and ``transform`` a batch is read at once. Or an
            iterable dataset: every rank reads the whole stream and keeps its share. An iterable dataset with ``state_dict`` and
            ``load_state_dict`` resumes at once, without them by reading the consumed samples again. A MosaicML
            ``StreamingDataset`` keeps its own order and state.
        mesh: device mesh; its data-parallel ranks share each batch, ranks along ``cp`` and ``tp`` receive the same samples.
            Required on several ranks.
        global_batch_size: samples per step over all ranks; or a schedule of the number of the step, rounded down.
        seed: seed of the order and of random numbers drawn while samples are read. Both depend on the seed and epoch only.
        shuffle: if False, the dataset's order; a ``BlockShuffle`` shuffles locally, for data in shards.
        num_workers: loader processes per node, divided over the ranks of the node; 0 loads in the ranks themselves.
        collate: list of samples -> batch; None stacks tensors, and mappings of tensors become a ``TensorDict``.
        transform: ``(sample, generator) -> sample``, with a generator that depends on seed, epoch and sample only.
        last_batch: treatment of a last global batch that is not full: ``"short"`` issues it (a rank may have one sample fewer
            than another rank, or an empty batch, which ``microbatch_step`` weights correctly), ``"drop"`` leaves it out,
            ``"pad"`` fills it up with the first samples of the epoch.
        on_error: treatment of a sample that cannot be read: ``"raise"``, or ``"skip"`` and list it in ``loader.skipped``.
            A missing or damaged shard always raises.
        batch_spec: position of the batch axis in the result of ``collate``; None uses the first axis.
        device: device of the batches, copied while earlier batches are in use; None leaves the batches on the host.
        prefetch_factor: batches that each worker, and the device, prepares in advance.
        timeout_s: seconds without a batch after which a worker counts as hung; 0 disables the limit.
        start_method: start method of the workers: ``"fork"``, ``"forkserver"``, ``"spawn"``; None uses Python's default.
        pre_sharded: if True, an iterable dataset gives each rank different samples, and ranks may run out at different times.
            A resume needs the same number of ranks, and reads the consumed samples again, since a checkpoint has one state for
            all ranks.
        allow_data_change: if True, a resume accepts another dataset than the dataset of the checkpoint.
        balance: cost by which the samples of each global batch are dealt to ranks, so that all ranks have nearly the same
            sum: ``"tokens"``, ``"squared_tokens"``, or a function of lengths, int64 ``[k]``, that returns costs ``[k]``. The
            global batch stays the same. None gives each rank the same number of samples.
        lengths: tokens of each sample, for ``balance`` and ``max_tokens``: integers ``[samples]``, a function of a sample's
            number that does not read the sample, or a column with lengths or lists; of an iterable dataset, a function of a
            sample, or the key of its length. None asks the dataset.
        max_tokens: limit of the tokens of a microbatch, which is collated by itself: a batch is a ``data.MicrobatchList``.
            None collates this rank's samples together.
        padded: if True, ``max_tokens`` counts the samples of a microbatch times its longest sample; if False their sum, for
            a ``collate`` that concatenates.

    Example:
        >>> import dtrain as dt
        >>> loader = dt.build_loader(
        ...     list(range(10)), global_batch_size=4, seed=0, shuffle=False
        ... )
        >>> for batch in loader.until("1ep"):
        ...     print(batch.tolist())
        [0, 1, 2, 3]
        [4, 5, 6, 7]
        [8, 9]

    Raises:
        ConfigError: the dataset is empty, or it is a loader or sampler, the batch size is below 1, ``last_batch="drop"`` leaves
            no batch, ``num_workers`` is negative, several ranks have no mesh, or ``shuffle`` is True for an iterable dataset;
            ``balance`` or ``max_tokens`` without lengths, lengths or costs that are negative or no numbers, or a sample of more
            than ``max_tokens``.
    """
    _refuse_batches(dataset)
    dataset = as_row_dataset(dataset)
    check_int("build_loader", "num_workers", num_workers, minimum=0)
    check_int("build_loader", "prefetch_factor", prefetch_factor)
    check_number("build_loader", "timeout_s", timeout_s, minimum=0)
    check_choice("build_loader", "last_batch", last_batch, LAST_BATCH_MODES)
    check_choice("build_loader", "on_error", on_error, ON_ERROR_MODES)
    info = get_dist_info()
    if mesh is None and info.world_size > 1:
        raise ConfigError(f"build_loader: {info.world_size} ranks need a mesh. Pass mesh=, so that the ranks share each batch.")
    rank, ranks = (0, 1) if mesh is None else data_rank(mesh)
    target = None if device is None else torch.device(device)
    fetcher = Fetcher(dataset=dataset, seed=seed, collate=collate, transform=transform, on_error=on_error)
    options = BatchOptions(
        global_batch_size=_check_batch_size(global_batch_size, dataset, last_batch),
        last_batch=last_batch,
        rank=rank,
        ranks=ranks,
        workers=WorkerConfig(
            count=num_workers,
            timeout_s=timeout_s,
            prefetch_factor=prefetch_factor,
            start_method=start_method,
            pin_memory=target is not None and is_accelerator(target),
        ),
        batch_spec=batch_spec,
    )
    dealing: dict[str, Any] = {"balance": balance, "lengths": lengths, "max_tokens": max_tokens, "padded": padded}
    return Loader(
        _batch_source(fetcher, options, shuffle, pre_sharded, dealing),
        seed=seed,
        fingerprint={} if pre_sharded else fingerprint_dataset(dataset),
        allow_data_change=allow_data_change,
        device=target,
        prefetch_factor=prefetch_factor,
        data_hash=hash_stored_samples(dataset) if info.world_size > 1 and is_indexed(dataset) else 0,
    )


def _refuse_batches(dataset: Any) -> None:
    """Raise ConfigError for an object that makes batches, which the loader would collate once more, and for a sampler."""
    kind = type(dataset)
    if isinstance(dataset, Sampler):
        raise ConfigError(
            f"build_loader: dataset must hold samples, got the sampler {kind.__name__}. "
            "Give the dataset, since the loader has an order of its own."
        )
    node = getattr(dataset, "root", dataset)
    is_dataset = isinstance(dataset, Dataset) or hasattr(dataset, "__getitem__")
    # A loader of torch or a wrapper around one, its iterator, a loader of this library, or a node of torchdata.
    if (
        isinstance(dataset, DataLoader | Loader)
        or kind.__module__.endswith("data.dataloader")
        or (not is_dataset and hasattr(dataset, "collate_fn") and hasattr(dataset, "batch_size"))
        or (type(node).__module__, type(node).__name__) == ("torchdata.nodes.batch", "Batcher")
    ):
        raise ConfigError(
            f"build_loader: dataset must hold samples, got batches of a {kind.__name__}. "
            "Give the dataset from which they are made, and their size over all ranks as global_batch_size."
        )


def _check_batch_size(size: int | Schedule, dataset: Any, last_batch: LastBatch) -> int | Schedule:
    if not callable(size):
        return check_int("build_loader", "global_batch_size", size)
    if isinstance(size, UnitSchedule) and size.unit != "ba":
        raise ConfigError(
            f"build_loader: global_batch_size must be a schedule of steps, got {size.unit!r}. "
            "Write it as a function of batches (ba)."
        )
    if last_batch != "short" or not is_indexed(dataset):
        raise ConfigError(
            "build_loader: a schedule of global_batch_size needs an indexed dataset and last_batch='short'. "
            "Pass last_batch='short', and a dataset with len() and []."
        )
    return size


def _batch_source(
    fetcher: Fetcher, options: BatchOptions, shuffle: bool | BlockShuffle, pre_sharded: bool, dealing: dict[str, Any]
) -> BatchSource:
    """Return the source of the loader's batches. ``dealing`` are the arguments of the dealer."""
    if is_indexed(fetcher.dataset):
        source: BatchSource = _map_batch_source(fetcher, options, shuffle, pre_sharded)
        dealer = make_dealer(fetcher.dataset, **dealing)
    else:
        source, dealer = iterable_batch_source(fetcher, options, shuffle, pre_sharded), make_sample_dealer(**dealing)
        if dealer is not None and source.pre_sharded:
            raise ConfigError(
                "build_loader: balance and max_tokens must be left out for a dataset that is split over ranks already, since a "
                "rank does not see the samples of other ranks. Leave them out, or give every rank the whole stream."
            )
    source.options = replace(source.options, dealer=dealer)
    return source


def _map_batch_source(
    fetcher: Fetcher, options: BatchOptions, shuffle: bool | BlockShuffle, pre_sharded: bool
) -> MapBatchSource:
    if pre_sharded:
        raise ConfigError("build_loader: pre_sharded needs an iterable dataset, but this dataset is indexed. Leave it out.")
    dataset, batch = fetcher.dataset, options.global_batch_size
    size = len(dataset)
    if size < 1:
        raise ConfigError("build_loader: the dataset has no samples. Check the path or the filter that the dataset reads with.")
    if isinstance(shuffle, BlockShuffle) and not hasattr(dataset, "order"):
        raise ConfigError(
            f"build_loader: a {type(dataset).__name__} has no shards to shuffle within. Use shuffle=True, or a ShardedDataset."
        )
    if is_hugging_face(dataset) and fetcher.collate is None and dataset.format["type"] is None:
        fetcher = replace(fetcher, dataset=dataset.with_format("torch"))
    order = dataset_order(dataset, size, fetcher.seed, shuffle)
    if options.last_batch == "drop" and not callable(batch) and order.size < batch:
        raise ConfigError(
            f"build_loader: {order.size} samples are less than one global batch of {batch}. Use last_batch='short'."
        )
    return MapBatchSource(fetcher=fetcher, order=order, options=replace(options, workers=divide_workers(options.workers)))
