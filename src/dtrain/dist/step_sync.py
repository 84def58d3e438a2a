"""What the ranks agree on in a step: one small record on the control group before it, and one after backward.

Counts come from the batch in host memory, so the clock is exact for ragged batches without a GPU sync, and all ranks
learn how many microbatches there are before the first collective of the step. The second record finds what would be silently
wrong: ranks that reduced different gradients. Neither waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import cast

import torch

from dtrain import heartbeats, spans
from dtrain.clock import EpochPosition
from dtrain.dist import preemption
from dtrain.dist.batch_info import BATCH_INDEX_BITS, BatchInfo
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed, hash_rng_state
from dtrain.errors import NonFiniteError, PeerError, StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The agreed record of a step: counts are summed over ranks, ``microbatches`` is the maximum, ``seconds`` rank 0's.

    ``equal_batches`` is True if all data-parallel ranks came with one hash of their batch, and None if they compared none.
    ``position`` is the place of all ranks in their loader's data after the step, None if the batch is not a loader's.
    ``rng_hash`` is this rank's own, and ``rng_mismatch`` two ranks that work on one batch together and have others: no fault as long as
    nothing is drawn; see ``check_rng_in_sync``. ``same_plan`` is False if ranks came with different plans.
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
    batch_info: BatchInfo | None = None,
    elapsed_s: float = 0.0,
) -> StepCounts:
    """The ranks' common record of the step about to run.

    Args:
        samples: local samples.
        tokens: local tokens, 0 where they are not counted.
        microbatches: how many this rank needs, 0 when it has no sample.
        zero_weight_seen: this rank has seen that an earlier step had no weight anywhere (it learns so late on a GPU).
        diverged_at: if this rank has seen too many losses in a row that were not finite, 1 + the first step of the row; else 0.
        nonfinite_limit: the number of such losses that is too many, for the message.
        loss_terms: what this rank has promised weights of.
        error: what is wrong with this rank's batch; it is raised here, and the others hear of it.
        run_key: tells apart states that train in turns.
        step: of the run; the same in a second try.
        ranks_per_batch: so many ranks, one after another, have one batch together, which is counted once.
        rng_hash: a number that differs where the next random numbers do, 0 where ranks have no batch together.
        batch_hash: a hash of the batch, below 2**53; 0 if it is not compared with that of other ranks.
        plan_digest: digest of the traces of ``auto_microbatch`` and of what they depend on; 0 without it.
        batch_info: place of this rank's batch in its loader's data, None if no loader handed it out.
        elapsed_s: time since the last step of this run began.

    Mutates: what this process knows about stopping (see ``stopping``); the agreement of ``batch_info``.
    Collective: one all-gather of eleven numbers on the control group, of twelve where ranks have a batch together.

    Raises:
        PeerError: another rank came with an ``error``.
        NonFiniteError: some rank has seen too many losses that were not finite; on all ranks.
        StepError: no rank has a sample, ranks disagree about the end of the epoch or about the terms, ranks that should have
            one batch have others, or an earlier step had no weight; on all ranks.
    """
    heartbeats.heartbeat("step")
    stop = preemption.pending_signal()
    late = -1 if zero_weight_seen else diverged_at  # learnt of an earlier step
    if error is None and samples and not late and get_dist_info().world_size == 1:
        preemption.record(stop, run_key=run_key, step=step)
        place = None if batch_info is None else _sync_position([batch_info.encode()], batch_info)
        return StepCounts(samples=samples, tokens=tokens, microbatches=microbatches, position=place, seconds=elapsed_s)
    code = 0 if batch_info is None else batch_info.encode()
    mine = [samples, tokens, microbatches, code, late, elapsed_s, error is not None, _hash_values(loss_terms), stop]
    mine += [batch_hash, plan_digest]
    rows = _all_gather_record([*mine, rng_hash] if ranks_per_batch > 1 else mine)
    columns = list(zip(*rows, strict=True))
    preemption.record(int(max(columns[8])), run_key=run_key, step=step)
    if error is not None:
        raise error
    _raise_reported_errors(rows, nonfinite_limit)
    place = _sync_position([int(code) for code in columns[3]], batch_info)
    if not any(columns[0]):
        raise StepError(
            "step: no rank has a sample in this batch; skip the step where a batch may be empty on all ranks, or end the loop "
            "there"
        )
    unlike = _check_shared_batches(rows, ranks_per_batch)
    return StepCounts(
        samples=int(sum(columns[0][::ranks_per_batch])),
        tokens=int(sum(columns[1][::ranks_per_batch])),
        microbatches=int(max(columns[2])),
        position=place,
        seconds=rows[0][5],
        rng_hash=rng_hash,
        rng_mismatch=unlike,
        equal_batches=_all_equal(columns[9][::ranks_per_batch]),
        same_plan=len(set(columns[10])) == 1,
    )


def _raise_reported_errors(rows: Sequence[Sequence[float]], nonfinite_limit: int) -> None:
    """Raise what some rank has reported of its batch or of an earlier step; on all ranks alike."""
    failed = [rank for rank, row in enumerate(rows) if row[6]]
    if failed:
        raise PeerError(
            f"step: rank {failed[0]} could not use its batch ({len(failed)} of {len(rows)} ranks); see its own error"
        )
    strangers = [rank for rank, row in enumerate(rows) if row[7] != rows[0][7]]
    if strangers:
        raise StepError(
            f"step: the weight_fn of rank {strangers[0]} gives weights of other terms than that of rank 0 (or only one has any)"
            "; give the same names on all ranks"
        )
    late = [row[4] for row in rows if row[4]]
    if late and max(late) > 0:
        raise NonFiniteError(_diverged_message(int(min(code for code in late if code > 0)) - 1, nonfinite_limit))
    if late:
        raise StepError(
            "step: an earlier step had weight 0 on all ranks together (or another than weight_fn said), so its mean loss is "
            "undefined; look for masked batches"
        )


def _diverged_message(first: int, nonfinite_limit: int) -> str:
    back = f"load a checkpoint of step {first - 1} or before" if first else "start again"
    return (
        f"step: the loss was infinite or NaN in {nonfinite_limit} steps in a row, from step {first} on; parameters that were updated "
        f"by them are spoiled, so {back}, then lower the learning rate, clip, or look at the batches; dt.transforms.nonfinite leaves such "
        "updates out, and changes how many stop the run"
    )


def _all_equal(hashes: Sequence[float]) -> bool | None:
    """Return True if the ranks have one hash, and None if there are no two hashes to compare."""
    return len(set(hashes)) == 1 if len(hashes) > 1 and all(hashes) else None


def _sync_position(codes: Sequence[int], batch_info: BatchInfo | None) -> EpochPosition | None:
    """The place of all ranks after this step, by their origins' codes; refuses ranks at different places.

    A code of 0 says nothing: the batch was made of new tensors. If that is so on some rank, the place is None on all.

    Mutates: the agreement of ``batch_info``, for its loader.
    """
    known = [rank for rank, code in enumerate(codes) if code]
    alone, ends = {codes[rank] & 2 for rank in known}, [rank for rank in known if codes[rank] & 1]
    if alone == {2} and len(known) < len(codes):
        raise StepError(
            f"step: the batch of rank {codes.index(0)} was made of new tensors (slices, copies), so it does not say if the "
            "rank has samples left; name the loader: step.init(model, optimizer, loader=loader)"
        )
    if alone == {2} and batch_info is not None:
        epoch, batch = divmod(min(code >> 2 for code in codes), 1 << BATCH_INDEX_BITS)
        batch_info.status.epoch_ended = epoch > batch_info.begin.epoch
        return EpochPosition(epoch, batch)
    if ends and len(ends) < len(known):
        raise StepError(f"step: only ranks {ends} are at the end of their epoch; give all ranks one dataset and one seed")
    astray = [rank for rank in known if codes[rank] != codes[known[0]]]
    if astray:
        raise StepError(
            f"step: rank {astray[0]} is at another place in its data than rank {known[0]}, or in other data; give all ranks "
            "one dataset, one seed and one global_batch_size, and load the same checkpoint"
        )
    if batch_info is None:
        return None
    batch_info.status.epoch_ended = batch_info.ends_epoch
    return batch_info.end if len(known) == len(codes) else None


def _check_shared_batches(rows: Sequence[Sequence[float]], ranks_per_batch: int) -> tuple[int, int] | None:
    """Two ranks that work on one batch together but would draw other random numbers, or None; refuses other batch sizes."""
    unlike = None
    for rank, row in enumerate(rows) if ranks_per_batch > 1 else ():
        first = rank - rank % ranks_per_batch
        if row[:2] != rows[first][:2]:
            raise StepError(
                f"step: ranks {first} and {rank} work on one batch together (cp, tp), but have {rows[first][0]:g} and "
                f"{row[0]:g} samples, {rows[first][1]:g} and {row[1]:g} tokens; build the loader with mesh="
            )
        if row[11] != rows[first][11]:
            unlike = unlike or (first, rank)
    return unlike


def check_rng_in_sync(counts: StepCounts, device: torch.device) -> None:
    """After backward: ranks that work on one batch must have drawn alike, if they have drawn, so that masks of dropout fit.

    Every rank runs the same model, so if one has drawn all have, and all raise. Collective: none.

    Raises:
        StepError: they have not.
    """
    if counts.rng_mismatch is not None and hash_rng_state(device) != counts.rng_hash:
        raise StepError(
            f"step: ranks {counts.rng_mismatch[0]} and {counts.rng_mismatch[1]} work on one batch together (cp, tp), but drew different "
            "random numbers in it, as for dropout; dt.seed_all(seed, dt.dist.data_rank(mesh)[0]) before, and draw alike on both"
        )


class RankStatus(IntFlag):
    """How a try of a step went on one rank, beside its gradients."""

    OK = 0
    OUT_OF_MEMORY = 1
    ERROR = 2  # of another kind
    ALLOCATOR_RETRIED = 4  # it fits only because the allocator gave memory back and asked again
    COLLECTIVES_CHANGED = 8  # the collectives were about to differ from their trace: the run is void, and is to be made again

    @property
    def failed(self) -> bool:
        """Whether there is nothing to be used."""
        return bool(self & (RankStatus.OUT_OF_MEMORY | RankStatus.ERROR | RankStatus.COLLECTIVES_CHANGED))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSync:
    """What the ranks know of a step's backward.

    Args:
        unused_params: parameters that had no gradient anywhere.
        changed_buffers: modules whose buffers changed on any rank.
        statuses: by rank. If one failed, nothing else is known but the places.
        collective_indices: by rank, the number of collectives before a failure.
    """

    unused_params: Sequence[str] = ()
    changed_buffers: Sequence[str] = ()
    statuses: Sequence[RankStatus] = ()
    collective_indices: Sequence[int] = ()


def sync_after_backward(
    *,
    unit_order: Sequence[int],
    params_without_grad: Sequence[str],
    changed_buffers: Sequence[str],
    weights_mismatch: bool,
    status: RankStatus = RankStatus.OK,
    collective_index: int = 0,
) -> BackwardSync:
    """The ranks' common record of the backward that has run.

    Args:
        unit_order: which units this rank reduced, one after another.
        params_without_grad: parameters without a gradient from this rank.
        changed_buffers: modules whose buffers this rank's forwards changed.
        weights_mismatch: the weights that this rank was promised are not those that its losses came with.
        status: how the try went, where it may be abandoned. If any rank's failed, the rest of the record says nothing.
        collective_index: the number of collectives before this rank's failure.

    Collective: one all-gather of six numbers on the control group; one exchange of JSON more when ranks differ.

    Raises:
        StepError: ranks reduced different units, or one has a ``weights_mismatch``; on all ranks.
    """
    rows = _all_gather_record(
        [
            _hash_values(unit_order),
            _hash_values(params_without_grad),
            _hash_values(changed_buffers),
            weights_mismatch,
            status,
            collective_index,
        ]
    )
    places = [int(row.pop()) for row in rows]
    verdicts = [RankStatus(int(row.pop())) for row in rows]
    if any(one.failed for one in verdicts):
        return BackwardSync(statuses=verdicts, collective_indices=places)
    faulty = [rank for rank, row in enumerate(rows) if row[3]]
    if faulty:
        raise StepError(
            f"step: on rank {faulty[0]} the weights of the losses do not add up to what weight_fn said of the batch; let both "
            "count the same things"
        )
    strangers = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
    if strangers:
        raise StepError(
            f"step: rank {strangers[0]} ran other units of the model than rank 0, or in another order, so their gradients do "
            "not belong together; run the same blocks on all ranks in every microbatch"
        )
    if all(row == rows[0] for row in rows):
        return BackwardSync(unused_params=params_without_grad, changed_buffers=changed_buffers, statuses=verdicts)
    everyone = cast("list[list[list[str]]]", all_gather_json([list(params_without_grad), list(changed_buffers)]))
    without = [set(theirs) for theirs, _ in everyone]
    return BackwardSync(
        unused_params=[name for name in everyone[0][0] if all(name in theirs for theirs in without)],
        changed_buffers=list({name: None for _, theirs in everyone for name in theirs}),
        statuses=verdicts,
    )


def _all_gather_record(record: Sequence[float]) -> list[list[float]]:
    """Every rank's record, by rank. Who comes early waits here for the last one."""
    if get_dist_info().world_size == 1:
        return all_gather_numbers(record, caller="step")
    spans.begin("agree")
    try:
        return all_gather_numbers(record, caller="step")
    finally:
        spans.end("agree")


def _hash_values(values: Sequence[int] | Sequence[str]) -> int:
    """A number that float64 holds exactly, 0 for nothing."""
    return derive_seed(*values) % 2**52 if values else 0
