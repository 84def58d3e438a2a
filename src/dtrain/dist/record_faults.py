"""Records of a step, and the faults that they show: errors of a batch, ranks at different positions, other units.

A fault is in the records of all ranks, so every rank raises the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from dtrain.dist.batch_info import BATCH_INDEX_BITS, BatchInfo
from dtrain.errors import NonFiniteError, PeerError, StepError
from dtrain.schedules.clock import EpochPosition

T = TypeVar("T")


class ForwardRecord(NamedTuple, Generic[T]):
    """Record that a rank sends before forward, as float64; the sums, minima or maxima of the records; or each field by rank."""

    samples: T
    tokens: T
    microbatches: T
    batch_code: T
    late_failure: T
    elapsed_s: T
    has_error: T
    loss_terms_hash: T
    stop_signal: T
    batch_hash: T
    plan_digest: T
    rng_hash: T
    shapes_hash: T
    replica_digest: T


class BackwardRecord(NamedTuple, Generic[T]):
    """Record that a rank sends after backward, as float64; the sums, minima or maxima of the records; or each field by rank."""

    unit_order: T
    params_without_grad: T
    changed_buffers: T
    param_facts: T
    weights_mismatch: T
    status: T
    collective_index: T
    has_weight: T
    weight: T


def raise_reported_errors(records: ForwardRecord[Sequence[float]], nonfinite_limit: int) -> None:
    """Raise the errors that some rank has reported for its batch or for an earlier step, on all ranks."""
    if any(records.has_error):
        failed = [rank for rank, has_error in enumerate(records.has_error) if has_error]
        raise PeerError(
            f"step: rank {failed[0]} could not use its batch ({len(failed)} of {len(records.has_error)} ranks). "
            "See the error of that rank."
        )
    different = _different_ranks(records.loss_terms_hash)
    if different:
        raise StepError(
            f"step: batch_spec.weight of rank {different[0]} gives weights of other terms than that of rank 0. Return the same "
            "names on all ranks."
        )
    if not any(records.late_failure):
        return
    late = [code for code in records.late_failure if code]
    if max(late) > 0:
        first = int(min(code for code in late if code > 0)) - 1
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


def _different_ranks(values: Sequence[float]) -> list[int]:
    """Return the ranks whose value differs from the value of rank 0."""
    return [rank for rank, value in enumerate(values) if value != values[0]] if len(set(values)) > 1 else []


def sync_position(batch_codes: Sequence[float], batch_info: BatchInfo | None) -> EpochPosition | None:
    """Return the position of all ranks after this step from the codes of their batches. Refuse ranks at different positions.

    A code of 0 means that the batch was made of new tensors. If some rank has such a batch, the position is None on all ranks.

    Mutates: the status of ``batch_info``, which its loader reads.
    """
    if not any(batch_codes):
        return None
    codes = list(map(int, batch_codes))
    known = [rank for rank, code in enumerate(codes) if code]
    modes, ends = {codes[rank] & 2 for rank in known}, [rank for rank in known if codes[rank] & 1]
    if modes == {2} and len(known) < len(codes):
        raise StepError(
            f"step: the batch of rank {codes.index(0)} was made of new tensors (slices, copies), so the step cannot tell if "
            "the rank has samples left. Name the loader: step.init(model, optimizer, loader=loader)."
        )
    if modes == {2} and batch_info is not None:
        epoch, batch = divmod(min(code >> 2 for code in codes), 1 << BATCH_INDEX_BITS)
        batch_info.status.epoch_ended = epoch > batch_info.begin.epoch
        return EpochPosition(epoch, batch)
    if ends and len(ends) < len(known):
        raise StepError(f"step: only ranks {ends} are at the end of their epoch. Give all ranks one dataset and one seed.")
    different = [rank for rank in known if codes[rank] != codes[known[0]]]
    if different:
        raise StepError(
            f"step: rank {different[0]} is at another place in its data than rank {known[0]}, or in other data. Give all ranks "
            "one dataset, one seed and one global_batch_size, and load the same checkpoint."
        )
    if batch_info is None:
        return None
    batch_info.status.epoch_ended = batch_info.ends_epoch
    return batch_info.end if len(known) == len(codes) else None


def check_shared_batches(records: ForwardRecord[Sequence[float]], ranks_per_batch: int) -> None:
    """Refuse ranks that share a batch but have different sizes."""
    samples, tokens = records.samples, records.tokens
    for rank in range(len(samples)) if ranks_per_batch > 1 else ():
        at = rank - rank % ranks_per_batch
        if (samples[rank], tokens[rank]) != (samples[at], tokens[at]):
            raise StepError(
                f"step: ranks {at} and {rank} work on one batch together (cp, tp), but have {samples[at]:g} and "
                f"{samples[rank]:g} samples, {tokens[at]:g} and {tokens[rank]:g} tokens. Build the loader with mesh=."
            )


def raise_backward_errors(records: BackwardRecord[Sequence[float]]) -> None:
    """Raise the faults of a backward that some rank has reported, on all ranks."""
    if any(records.weights_mismatch):
        raise StepError(
            f"step: on rank {records.weights_mismatch.index(True)} the weights of the losses do not add up to what "
            "batch_spec.weight said of the batch. Let the loss and batch_spec.weight count the same things."
        )
    different = _different_ranks(records.unit_order)
    if different:
        raise StepError(
            f"step: rank {different[0]} ran other units of the model than rank 0, or in another order, so their gradients do "
            "not belong together. Run the same blocks on all ranks in every microbatch."
        )
