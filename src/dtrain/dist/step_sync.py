"""Synchronize a step between ranks: exchange one record before forward, and one after backward.

The first record adds up the counts, which come from the batch in host memory. So the clock is exact for ragged batches without
a GPU sync. All ranks also learn the number of microbatches before the first collective of the step. The second record adds up
the weights of the losses (the global weight), if they are known on the host. The record also detects ranks that reduced
different gradients, which would otherwise give wrong results silently. No exchange waits for a device.

A record is reduced to sums, minima and maxima on its way, so that its size does not depend on the number of ranks. If the sums
show a fault, or a difference that needs the values of each rank, the ranks gather their records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch

from dtrain.dist.batch_info import BATCH_INDEX_BITS, DATA_HASH_SHIFT, BatchInfo
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, reduce_record
from dtrain.dist.context import current_context
from dtrain.dist.control_protocol import RowSpec
from dtrain.dist.incident_protocol import format_ranks
from dtrain.dist.rng import derive_seed, hash_rng_state
from dtrain.errors import NonFiniteError, PeerError, StepError
from dtrain.launch import heartbeats
from dtrain.schedules.clock import EpochPosition


class ForwardRecord(NamedTuple):
    """Record that a rank sends before forward, as float64; also the sums, minima or maxima of the records of all ranks.

    ``sync_before_forward`` sets the fields from ``batch_code`` on.

    Args:
        samples: local samples.
        tokens: local tokens, 0 if tokens are not counted.
        microbatches: microbatches that this rank needs, 0 without a sample.
        late_failure: failure of an earlier step that this rank has learned about since: -1 if the step had no weight on any
            rank; 1 + the first step of a row of too many losses that are not finite.
        batch_hash: hash of the batch, below 2**53; 0 if the batch is not compared between ranks.
        plan_digest: digest of the traces of ``auto_microbatch`` and of their conditions; 0 without ``auto_microbatch``.
        rng_hash: hash of the RNG state; 0 unless ranks share a batch (tp, cp).
        shapes_hash: hash of the rank and of the shapes of its microbatches, below 2**40, so that float64 holds the sum over
            4,096 ranks exactly; 0 if the collectives of the model do not depend on the shapes.
        replica_digest: digest of the parameters whose sum over all ranks is 0 if replicas are equal; NaN if it is not on the
            host yet. See ``ReplicaCheck``.
        elapsed_s: time since the last step of this run began, in seconds.
        batch_code: position of the batch, ``BatchInfo.encode``; 0 if no loader returned the batch.
        has_error: 1 if the rank could not use its batch, 2 if its loader could not read the batch.
        loss_terms_hash: hash of the names of the loss terms.
        trainable_hash: hash of the names of the trainable parameters.
        stop_signal: signal that asked the rank to stop, 0 without a signal.
    """

    samples: float
    tokens: float
    microbatches: float
    late_failure: float = 0
    batch_hash: float = 0
    plan_digest: float = 0
    rng_hash: float = 0
    shapes_hash: float = 0
    replica_digest: float = 0
    elapsed_s: float = 0
    batch_code: float = 0
    has_error: float = 0
    loss_terms_hash: float = 0
    trainable_hash: float = 0
    stop_signal: float = 0


class BackwardRecord(NamedTuple):
    """Record that a rank sends after backward, as float64; also the sums, minima or maxima of the records of all ranks."""

    unit_order: float
    params_without_grad: float
    changed_buffers: float
    param_facts: float
    weights_mismatch: float
    status: float
    collective_index: float
    has_weight: float
    weight: float


R = TypeVar("R", ForwardRecord, BackwardRecord)


class StepCounts(NamedTuple):
    """Record of a step, agreed by all ranks. Counts are sums over ranks, ``microbatches`` is the maximum.

    Args:
        samples: samples of all ranks.
        tokens: tokens of all ranks.
        microbatches: largest number of microbatches of a rank.
        position: position of all ranks in their loader's data after the step, None without a loader.
        seconds: rank 0's time since the last step began.
        rng_hash: hash of this rank's RNG state; 0 unless ranks share a batch (tp, cp).
        rng_mismatch: two ranks that share a batch and have different RNG states; see ``check_rng_in_sync``.
        equal_batches: True if the batches of all data-parallel ranks have one hash, None if no hashes were compared.
        same_plan: if True, all ranks have the same plan.
        shapes_hash: sum of the ``shapes_hash`` of all ranks.
        replica_digest: sum of the ``replica_digest`` of all ranks.
        fewest_microbatches: smallest number of microbatches of a rank.
    """

    samples: int
    tokens: int
    microbatches: int
    position: EpochPosition | None
    seconds: float
    rng_hash: int = 0
    rng_mismatch: tuple[int, int] | None = None
    equal_batches: bool | None = None
    same_plan: bool = True
    shapes_hash: int = 0
    replica_digest: float = 0.0
    fewest_microbatches: int = 0


def sync_before_forward(
    record: ForwardRecord,
    *,
    error: Exception | None = None,
    batch_info: BatchInfo | None = None,
    loss_terms: Sequence[str] = (),
    trainable: Iterable[str] = (),
    trainable_digest: int = 0,
    nonfinite_limit: int = 0,
    ranks_per_batch: int = 1,
    run_key: int = 0,
    step: int = 0,
) -> StepCounts:
    """Exchange the record of the step that is about to run, and return the agreed counts.

    Args:
        record: this rank's record.
        error: error of this rank's batch. This rank raises the error, and the other ranks raise ``PeerError``.
        batch_info: info of this rank's batch, None if no loader returned the batch.
        loss_terms: names of the loss terms that this rank has declared weights for.
        trainable: names of the trainable parameters, for the error of ranks with different ones.
        trainable_digest: hash of ``trainable``, below 2**63.
        nonfinite_limit: number of losses in a row that are not finite, and are too many, for the message.
        ranks_per_batch: number of consecutive ranks that share a batch, which is counted once.
        run_key: identity of the run, for several runs that train in turns.
        step: step of the run, the same for a repeated attempt.

    Mutates: the preemption state of this process (see ``Preemption``); the status of ``batch_info``.
    Collective: one record of fifteen numbers; on several nodes one exchange more if the ranks differ.

    Raises:
        PeerError: another rank passed an ``error``.
        NonFiniteError: some rank has seen too many losses that are not finite; on all ranks.
        StepError: no rank has a sample, ranks disagree about the end of the epoch, the loss terms or the trainable
            parameters, ranks that share a batch have different batches, or an earlier step had no weight; on all ranks.
    """
    heartbeats.heartbeat("step")
    context = current_context()
    preemption = context.preemption
    stop, batch_code = preemption.pending_signal(), 0 if batch_info is None else batch_info.encode()
    is_alone = context.info is None or context.info.world_size == 1
    if is_alone and error is None and record.samples and not record.late_failure:
        # A single rank has nothing to compare, and its steps are the shortest.
        preemption.record(stop, run_key=run_key, step=step)
        position = None if batch_info is None else _agree_position([batch_code], batch_info)
        microbatches = int(record.microbatches)
        return StepCounts(
            int(record.samples), int(record.tokens), microbatches, position, record.elapsed_s, fewest_microbatches=microbatches
        )
    record = record._replace(
        batch_code=batch_code,
        has_error=0 if error is None else 2 if batch_info is not None and batch_info.status.unread else 1,
        loss_terms_hash=_hash_values(*loss_terms),
        trainable_hash=trainable_digest % 2**52,
        stop_signal=stop,
    )
    summary, rows = reduce_record(record, _forward_spec(ranks_per_batch))
    total, low, high = (ForwardRecord(*row) for row in (summary.sums, summary.minima, summary.maxima))
    preemption.record(int(high.stop_signal), run_key=run_key, step=step)
    if high.has_error == 2 and batch_info is not None:
        batch_info.status.unread = True
    if error is not None:
        raise error
    first_different, different_rng = map(int, summary.changes)
    faults = high.has_error or low.late_failure or high.late_failure or not high.samples or first_different >= 0
    if faults or low.loss_terms_hash != high.loss_terms_hash or low.batch_code != high.batch_code:
        # The value of each rank is needed.
        records = _gather_rows(record, rows)
        _raise_reported_errors(records, nonfinite_limit)
        position = _agree_position([record.batch_code for record in records], batch_info)
        _check_batches(records, ranks_per_batch)
    else:
        position = _agree_position([low.batch_code], batch_info)
    if low.trainable_hash != high.trainable_hash:
        _raise_trainable_differ(trainable)
    several_batches = summary.ranks > ranks_per_batch
    return StepCounts(
        # The ranks of a batch have counted the same samples.
        samples=int(total.samples) // ranks_per_batch,
        tokens=int(total.tokens) // ranks_per_batch,
        microbatches=int(high.microbatches),
        position=position,
        seconds=ForwardRecord(*summary.first).elapsed_s,
        rng_hash=int(record.rng_hash),
        rng_mismatch=None if different_rng < 0 else (different_rng - different_rng % ranks_per_batch, different_rng),
        equal_batches=low.batch_hash == high.batch_hash if low.batch_hash and several_batches else None,
        same_plan=low.plan_digest == high.plan_digest,
        shapes_hash=int(total.shapes_hash),
        replica_digest=total.replica_digest,
        fewest_microbatches=int(low.microbatches),
    )


@lru_cache(maxsize=16)
def _forward_spec(ranks_per_batch: int) -> RowSpec:
    """Return the form of the record. Ranks that share a batch must have equal sizes, and should have equal RNG states."""
    names = ForwardRecord._fields
    sizes = names.index("samples"), names.index("tokens")
    return RowSpec(len(names), compared=(sizes, (names.index("rng_hash"),)), block=ranks_per_batch)


def _gather_rows(record: R, rows: list[tuple[float, ...]] | None) -> list[R]:
    """Return the records by rank. Collective: one exchange, unless the ranks hold the ``rows`` already."""
    return [type(record)._make(row) for row in (all_gather_numbers(record, caller="step") if rows is None else rows)]


def check_rng_in_sync(counts: StepCounts, device: torch.device) -> None:
    """Check after backward that ranks that share a batch have drawn equal random numbers, for example for dropout masks.

    Every rank runs the same model. So if one rank has drawn, all ranks have drawn, and all ranks raise. Collective: none.

    Raises:
        StepError: ranks that share a batch have drawn different random numbers.
    """
    if counts.rng_mismatch is not None and hash_rng_state(device) != counts.rng_hash:
        first, second = counts.rng_mismatch
        raise StepError(
            f"step: ranks {first} and {second} work on one batch together (cp, tp), but drew different random numbers in the "
            "step, as for dropout. Call dt.seed_all(seed, dt.dist.data_rank(mesh)[0]) before, and draw equally on both."
        )


class RankStatus(IntFlag):
    """Status of one attempt of a step on one rank."""

    OK = 0
    OUT_OF_MEMORY = 1
    # An error other than out of memory.
    ERROR = 2
    # The step fits only because the allocator released cached memory and retried.
    ALLOCATOR_RETRIED = 4
    # A collective was about to differ from the trace. The run is void and is repeated.
    COLLECTIVES_CHANGED = 8

    @property
    def failed(self) -> bool:
        """True if the results of the attempt cannot be used."""
        return bool(self.value & _FAILED)


# A number, because each operation on flags takes two microseconds.
_FAILED = (RankStatus.OUT_OF_MEMORY | RankStatus.ERROR | RankStatus.COLLECTIVES_CHANGED).value


class BackwardSync(NamedTuple):
    """Record of a step's backward, agreed by all ranks.

    Args:
        unused_params: parameters without a gradient on any rank.
        changed_buffers: modules whose buffers changed on some rank.
        param_facts: facts about parameters, by rank, which are equal if there is one entry.
        buffers_differ: if True, not all ranks have changed the same buffers.
        weight: loss weight of all ranks; None if some rank does not know its weight on the host.
        statuses: status of each rank; empty if all ranks are OK. If a rank failed, only ``statuses`` and
            ``collective_indices`` are set.
        collective_indices: number of collectives of each rank before a failure.
    """

    unused_params: Sequence[str] = ()
    changed_buffers: Sequence[str] = ()
    param_facts: Sequence[Sequence[str]] = ()
    buffers_differ: bool = False
    weight: float | None = None
    statuses: Sequence[RankStatus] = ()
    collective_indices: Sequence[int] = ()


def sync_after_backward(
    *,
    unit_order: Sequence[int],
    params_without_grad: Sequence[str],
    changed_buffers: Sequence[str],
    weights_mismatch: bool,
    param_facts: Sequence[str] = (),
    status: RankStatus = RankStatus.OK,
    collective_index: int = 0,
    weight: float | None = None,
) -> BackwardSync:
    """Exchange the record of the backward that has run, and return the agreed record.

    Args:
        unit_order: units that this rank reduced, in order.
        params_without_grad: parameters without a gradient from this rank.
        changed_buffers: modules whose buffers changed in this rank's forwards.
        weights_mismatch: if True, the weights of this rank's losses differ from the declared weights.
        param_facts: gradient hooks of parameters, and writes of forwards.
        status: status of the attempt. If a rank failed, the rest of the record is ignored.
        collective_index: number of collectives before this rank's failure.
        weight: this rank's loss weight; None if the host would wait for a device.

    Collective: one record of nine numbers. If ranks differ, also one exchange of JSON, or on several nodes of the records.

    Raises:
        StepError: ranks reduced different units, or a rank has a ``weights_mismatch``; on all ranks.
    """
    record = BackwardRecord(
        unit_order=_hash_values(*unit_order),
        params_without_grad=_hash_values(*params_without_grad),
        changed_buffers=_hash_values(*changed_buffers),
        param_facts=_hash_values(*param_facts),
        weights_mismatch=weights_mismatch,
        status=status,
        collective_index=collective_index,
        has_weight=weight is not None,
        weight=weight or 0.0,
    )
    summary, rows = reduce_record(record, _BACKWARD_SPEC)
    total, low, high = (BackwardRecord(*row) for row in (summary.sums, summary.minima, summary.maxima))
    statuses: list[RankStatus] = []
    if high.status or high.weights_mismatch or low.unit_order != high.unit_order:
        records = _gather_rows(record, rows)
        statuses = [RankStatus(int(record.status)) for record in records]
        if any(status.failed for status in statuses):
            return BackwardSync(statuses=statuses, collective_indices=[int(record.collective_index) for record in records])
        _raise_backward_errors(records)
    unused_params = params_without_grad
    if low.params_without_grad != high.params_without_grad or low.changed_buffers != high.changed_buffers:
        names = cast("list[list[list[str]]]", all_gather_json([list(params_without_grad), list(changed_buffers)]))
        without_grad = [set(params) for params, _ in names]
        unused_params = [name for name in names[0][0] if all(name in params for params in without_grad)]
        changed_buffers = list({name: None for _, buffers in names for name in buffers})
    facts: list[Sequence[str]] = [param_facts]
    if low.param_facts != high.param_facts:
        facts = cast("list[Sequence[str]]", all_gather_json(list(param_facts)))
    return BackwardSync(
        unused_params=unused_params,
        changed_buffers=changed_buffers,
        buffers_differ=low.changed_buffers != high.changed_buffers,
        param_facts=facts,
        weight=total.weight if low.has_weight else None,
        statuses=statuses,
    )


_BACKWARD_SPEC = RowSpec(len(BackwardRecord._fields))


# Most steps reduce the same units and have the same parameters without gradients.
@lru_cache(maxsize=16)
def _hash_values(*values: int | str) -> int:
    """Hash to a number that float64 holds exactly; 0 without values."""
    return derive_seed(*values) % 2**52 if values else 0


def _raise_reported_errors(records: Sequence[ForwardRecord], nonfinite_limit: int) -> None:
    """Raise the errors that some rank has reported for its batch or for an earlier step, on all ranks."""
    failed = [rank for rank, record in enumerate(records) if record.has_error]
    if failed:
        raise PeerError(
            f"step: rank {failed[0]} could not use its batch ({len(failed)} of {len(records)} ranks). "
            "See the error of that rank."
        )
    different = _different_ranks([record.loss_terms_hash for record in records])
    if different:
        raise StepError(
            f"step: batch_spec.weight of rank {different[0]} gives weights of other terms than that of rank 0. Return the same "
            "names on all ranks."
        )
    failures = [record.late_failure for record in records if record.late_failure]
    if not failures:
        return
    if max(failures) > 0:
        first = int(min(failure for failure in failures if failure > 0)) - 1
        restart = f"load a checkpoint of step {first - 1} or before" if first else "start again"
        raise NonFiniteError(
            f"step: the loss was infinite or NaN in {nonfinite_limit} steps in a row, from step {first} on. The updates have "
            f"spoiled the parameters, so {restart}, then lower the learning rate, clip, or look at the batches. "
            "dt.transforms.nonfinite skips such updates, and changes the number of steps that stops the run."
        )
    raise StepError(
        "step: an earlier step had weight 0 on all ranks together, or a weight that differs from batch_spec.weight, so its "
        "mean loss is undefined. Look for masked batches."
    )


def _raise_trainable_differ(trainable: Iterable[str]) -> NoReturn:
    """Name the first parameter that is trainable on some ranks only. Collective: one exchange of JSON."""
    by_rank = cast("list[list[str]]", all_gather_json(list(trainable), caller="step"))
    counts = Counter(name for names in by_rank for name in names)
    name = next(name for name, count in counts.items() if count < len(by_rank))
    ranks = [rank for rank, names in enumerate(by_rank) if name in names]
    raise StepError(
        f"step: the parameter {name!r} must be trainable on all ranks or on none, got ranks {format_ranks(ranks)} alone. "
        "Call requires_grad_ alike on all ranks: the reduction of its gradient would wait for the other ranks."
    )


def _agree_position(batch_codes: Sequence[float], batch_info: BatchInfo | None) -> EpochPosition | None:
    """Return the position of all ranks after this step from the codes of their batches. Refuse ranks at different positions.

    A code of 0 means that the batch was made of new tensors. If some rank has such a batch, the position is None on all ranks.

    Mutates: the status of ``batch_info``, which its loader reads.
    """
    if not any(batch_codes):
        return None
    codes = list(map(int, batch_codes))
    coded = [rank for rank, code in enumerate(codes) if code]
    modes, ends = {codes[rank] & 2 for rank in coded}, [rank for rank in coded if codes[rank] & 1]
    if modes == {2} and len(coded) < len(codes):
        raise StepError(
            f"step: the batch of rank {codes.index(0)} was made of new tensors (slices, copies), so the step cannot tell if "
            "the rank has samples left. Name the loader: step.init(model, optimizer, loader=loader)."
        )
    if modes == {2} and batch_info is not None:
        epoch, batch = divmod(min(code >> 2 for code in codes), 1 << BATCH_INDEX_BITS)
        batch_info.status.epoch_ended = epoch > batch_info.begin.epoch
        return EpochPosition(epoch, batch)
    # The two lowest bits of a code are not part of the position.
    other_data = _different_ranks([codes[rank] >> DATA_HASH_SHIFT + 2 for rank in coded]) if modes == {0} else []
    if other_data:
        raise StepError(
            f"step: the dataset of rank {coded[other_data[0]]} has other samples than that of rank {coded[0]}. Give every rank "
            "the whole dataset, which build_loader deals to ranks: draw subsets, splits and random data with one seed, before "
            "seed_all(..., rank). An iterable must give every rank the same stream, or pass build_loader(pre_sharded=True)."
        )
    if ends and len(ends) < len(coded):
        raise StepError(f"step: only ranks {ends} are at the end of their epoch. Give all ranks one dataset and one seed.")
    different = [rank for rank in coded if codes[rank] != codes[coded[0]]]
    if different:
        raise StepError(
            f"step: rank {different[0]} is at another place in its data than rank {coded[0]}, or in other data. Give all ranks "
            "one dataset, one seed and one global_batch_size, and load the same checkpoint."
        )
    if batch_info is None:
        return None
    batch_info.status.epoch_ended = batch_info.ends_epoch
    return batch_info.end if len(coded) == len(codes) else None


def _check_batches(records: Sequence[ForwardRecord], ranks_per_batch: int) -> None:
    """Refuse a step without a sample, and ranks that share a batch but have different sizes."""
    if not any(record.samples for record in records):
        raise StepError(
            "step: no rank has a sample in this batch. Skip the step if a batch may be empty on all ranks, or end the loop."
        )
    for rank, record in enumerate(records):
        first_rank = rank - rank % ranks_per_batch
        first = records[first_rank]
        if (record.samples, record.tokens) != (first.samples, first.tokens):
            raise StepError(
                f"step: ranks {first_rank} and {rank} work on one batch together (cp, tp), but have {first.samples:g} and "
                f"{record.samples:g} samples, {first.tokens:g} and {record.tokens:g} tokens. Build the loader with mesh=."
            )


def _raise_backward_errors(records: Sequence[BackwardRecord]) -> None:
    """Raise the faults of a backward that some rank has reported, on all ranks."""
    mismatched = [rank for rank, record in enumerate(records) if record.weights_mismatch]
    if mismatched:
        raise StepError(
            f"step: on rank {mismatched[0]} the weights of the losses do not add up to what "
            "batch_spec.weight said of the batch. Let the loss and batch_spec.weight count the same things."
        )
    different = _different_ranks([record.unit_order for record in records])
    if different:
        raise StepError(
            f"step: rank {different[0]} ran other units of the model than rank 0, or in another order, so their gradients do "
            "not belong together. Run the same blocks on all ranks in every microbatch."
        )


def _different_ranks(values: Sequence[float]) -> list[int]:
    """Return the ranks whose value differs from the value of rank 0."""
    return [rank for rank, value in enumerate(values) if value != values[0]]
