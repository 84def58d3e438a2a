"""Synchronize a step between ranks: exchange one record before forward, and one after backward.

The first record adds up the counts, which come from the batch in host memory. So the clock is exact for ragged batches without
a GPU sync. All ranks also learn the number of microbatches before the first collective of the step. The second record detects
ranks that reduced different gradients, which would otherwise give wrong results silently. No exchange waits for a device.

A record is reduced to sums, minima and maxima on its way, so that its size does not depend on the number of ranks. If the sums
show a fault, or a difference that needs the values of each rank, the ranks gather their records.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from dtrain.dist.batch_info import BatchInfo
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, reduce_record
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.dist.record_faults import (
    BackwardRecord,
    ForwardRecord,
    check_shared_batches,
    raise_backward_errors,
    raise_reported_errors,
    sync_position,
)
from dtrain.dist.rng import derive_seed, hash_rng_state
from dtrain.dist.row_summary import RowSpec, RowSummary
from dtrain.errors import StepError
from dtrain.launch import heartbeats
from dtrain.schedules.clock import EpochPosition


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
    *,
    samples: int,
    tokens: int,
    microbatches: int,
    zero_weight_seen: bool,
    diverged_at: int = 0,
    nonfinite_limit: int = 0,
    loss_terms: Sequence[str] = (),
    error: Exception | None = None,
    run_key: int = 0,
    step: int = 0,
    ranks_per_batch: int = 1,
    rng_hash: int = 0,
    batch_hash: int = 0,
    plan_digest: int = 0,
    shapes_hash: int = 0,
    replica_digest: float = 0.0,
    batch_info: BatchInfo | None = None,
    elapsed_s: float = 0.0,
) -> StepCounts:
    """Exchange the record of the step that is about to run, and return the agreed counts.

    Args:
        samples: local samples.
        tokens: local tokens, 0 if tokens are not counted.
        microbatches: microbatches that this rank needs, 0 without a sample.
        zero_weight_seen: if True, this rank has found that an earlier step had no weight on any rank. On a GPU a rank learns
            this late.
        diverged_at: 1 + the first step of a row of too many losses that are not finite, 0 without such a row.
        nonfinite_limit: number of such losses in a row that is too many, for the message.
        loss_terms: names of the loss terms that this rank has declared weights for.
        error: error of this rank's batch. This rank raises the error, and the other ranks raise ``PeerError``.
        run_key: identity of the run, for several runs that train in turns.
        step: step of the run, the same for a repeated attempt.
        ranks_per_batch: number of consecutive ranks that share a batch, which is counted once.
        rng_hash: hash of the RNG state; 0 unless ranks share a batch (tp, cp).
        batch_hash: hash of the batch, below 2**53; 0 if the batch is not compared between ranks.
        plan_digest: digest of the traces of ``auto_microbatch`` and of their conditions; 0 without ``auto_microbatch``.
        shapes_hash: hash of the rank and of the shapes of its microbatches, below 2**40, so that float64 holds the sum over
            4,096 ranks exactly; 0 if the collectives of the model do not depend on the shapes.
        replica_digest: digest of the parameters whose sum over all ranks is 0 if replicas are equal; NaN if it is not on the
            host yet. See ``ReplicaCheck``.
        batch_info: info of this rank's batch, None if no loader returned the batch.
        elapsed_s: time since the last step of this run began, in seconds.

    Mutates: the preemption state of this process (see ``preemption``); the status of ``batch_info``.
    Collective: one record of fourteen numbers; on several nodes one exchange more if the ranks differ.

    Raises:
        PeerError: another rank passed an ``error``.
        NonFiniteError: some rank has seen too many losses that are not finite; on all ranks.
        StepError: no rank has a sample, ranks disagree about the end of the epoch or about the loss terms, ranks that share a
            batch have different batches, or an earlier step had no weight; on all ranks.
    """
    heartbeats.heartbeat("step")
    preemption = current_context().preemption
    stop = preemption.pending_signal()
    # A failure of an earlier step that this rank has learned about since.
    late = -1 if zero_weight_seen else diverged_at
    if error is None and samples and not late and get_dist_info().world_size == 1:
        preemption.record(stop, run_key=run_key, step=step)
        position = None if batch_info is None else sync_position([batch_info.encode()], batch_info)
        return StepCounts(samples, tokens, microbatches, position=position, seconds=elapsed_s, fewest_microbatches=microbatches)
    mine: ForwardRecord[float] = ForwardRecord(
        samples=samples,
        tokens=tokens,
        microbatches=microbatches,
        batch_code=0 if batch_info is None else batch_info.encode(),
        late_failure=late,
        elapsed_s=elapsed_s,
        has_error=error is not None,
        loss_terms_hash=_hash_values(*loss_terms),
        stop_signal=stop,
        batch_hash=batch_hash,
        plan_digest=plan_digest,
        rng_hash=rng_hash,
        shapes_hash=shapes_hash,
        replica_digest=replica_digest,
    )
    summary, rows = reduce_record(mine, _forward_spec(ranks_per_batch))
    low: ForwardRecord[float] = ForwardRecord._make(summary.minima)
    high: ForwardRecord[float] = ForwardRecord._make(summary.maxima)
    preemption.record(int(high.stop_signal), run_key=run_key, step=step)
    if error is not None:
        raise error
    if _is_regular(low, high, summary):
        position = sync_position([low.batch_code], batch_info)
    else:
        records: ForwardRecord[Sequence[float]] = ForwardRecord(*_gather_columns(mine, rows))
        raise_reported_errors(records, nonfinite_limit)
        position = sync_position(records.batch_code, batch_info)
        if not high.samples:
            raise StepError(
                "step: no rank has a sample in this batch. Skip the step if a batch may be empty on all ranks, or end the loop."
            )
        check_shared_batches(records, ranks_per_batch)
    return _combine_records(summary, low, high, position, ranks_per_batch, rng_hash)


@lru_cache(maxsize=16)
def _forward_spec(ranks_per_batch: int) -> RowSpec:
    """Return the form of the record. Ranks that share a batch must have equal sizes, and should have equal RNG states."""
    names = ForwardRecord._fields
    sizes = names.index("samples"), names.index("tokens")
    return RowSpec(len(names), compared=(sizes, (names.index("rng_hash"),)), block=ranks_per_batch)


def _is_regular(low: ForwardRecord[float], high: ForwardRecord[float], summary: RowSummary) -> bool:
    """Return True if all ranks can take the step at one position. Otherwise the value of each rank is needed."""
    faults = high.has_error or low.late_failure or high.late_failure or not high.samples or summary.changes[0] >= 0
    return not faults and low.loss_terms_hash == high.loss_terms_hash and low.batch_code == high.batch_code


def _gather_columns(mine: Sequence[float], rows: list[tuple[float, ...]] | None) -> list[tuple[float, ...]]:
    """Return each field of the records by rank. Collective: one exchange, unless the ranks hold the ``rows`` already."""
    return list(zip(*(all_gather_numbers(mine, caller="step") if rows is None else rows), strict=True))


def _combine_records(
    summary: RowSummary,
    low: ForwardRecord[float],
    high: ForwardRecord[float],
    position: EpochPosition | None,
    ranks_per_batch: int,
    rng_hash: int,
) -> StepCounts:
    """Return the counts of all ranks."""
    total: ForwardRecord[float] = ForwardRecord._make(summary.sums)
    different = int(summary.changes[1])
    several_hashes = low.batch_hash and summary.ranks > ranks_per_batch
    # By position, because a step makes this record.
    return StepCounts(
        # The ranks of a batch have counted the same samples.
        int(total.samples) // ranks_per_batch,
        int(total.tokens) // ranks_per_batch,
        int(high.microbatches),
        position,
        summary.first[_ELAPSED],
        rng_hash,
        None if different < 0 else (different - different % ranks_per_batch, different),
        low.batch_hash == high.batch_hash if several_hashes else None,
        low.plan_digest == high.plan_digest,
        int(total.shapes_hash),
        total.replica_digest,
        int(low.microbatches),
    )


_ELAPSED = ForwardRecord._fields.index("elapsed_s")


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
        return bool(self & (RankStatus.OUT_OF_MEMORY | RankStatus.ERROR | RankStatus.COLLECTIVES_CHANGED))


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
    mine: BackwardRecord[float] = BackwardRecord(
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
    summary, rows = reduce_record(mine, _BACKWARD_SPEC)
    low: BackwardRecord[float] = BackwardRecord._make(summary.minima)
    high: BackwardRecord[float] = BackwardRecord._make(summary.maxima)
    statuses: list[RankStatus] = []
    if high.status or high.weights_mismatch or low.unit_order != high.unit_order:
        records: BackwardRecord[Sequence[float]] = BackwardRecord(*_gather_columns(mine, rows))
        statuses = [RankStatus(int(value)) for value in records.status]
        if any(status.failed for status in statuses):
            return BackwardSync(statuses=statuses, collective_indices=list(map(int, records.collective_index)))
        raise_backward_errors(records)
    unused_params = params_without_grad
    if low.params_without_grad != high.params_without_grad or low.changed_buffers != high.changed_buffers:
        names = cast("list[list[list[str]]]", all_gather_json([list(params_without_grad), list(changed_buffers)]))
        without_grad = [set(params) for params, _ in names]
        unused_params = [name for name in names[0][0] if all(name in params for params in without_grad)]
        changed_buffers = list({name: None for _, buffers in names for name in buffers})
    facts: list[Sequence[str]] = [param_facts]
    if low.param_facts != high.param_facts:
        facts = cast("list[Sequence[str]]", all_gather_json(list(param_facts)))
    total_weight = BackwardRecord._make(summary.sums).weight if low.has_weight else None
    return BackwardSync(
        unused_params=unused_params,
        changed_buffers=changed_buffers,
        buffers_differ=low.changed_buffers != high.changed_buffers,
        param_facts=facts,
        weight=total_weight,
        statuses=statuses,
    )


_BACKWARD_SPEC = RowSpec(len(BackwardRecord._fields))


# Most steps reduce the same units and have the same parameters without gradients.
@lru_cache(maxsize=16)
def _hash_values(*values: int | str) -> int:
    """Hash to a number that float64 holds exactly; 0 without values."""
    return derive_seed(*values) % 2**52 if values else 0
