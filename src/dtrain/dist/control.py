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

from dtrain import pulse, spans
from dtrain.clock import Place
from dtrain.dist import stopping
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import current
from dtrain.dist.origin import BATCH_BITS, Origin
from dtrain.dist.rng import derive_seed, draws_digest
from dtrain.errors import NonFiniteError, PeerError, StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The agreed record of a step: counts are summed over ranks, ``microbatches`` is the maximum, ``seconds`` rank 0's.

    ``equal_batches`` is True if all data-parallel ranks came with one hash of their batch, and None if they compared none.
    ``place`` is the place of all ranks in their loader's data after the step, None if the batch is not a loader's.
    ``draws`` is this rank's own, and ``unlike`` two ranks that work on one batch together and have others: no fault as long as
    nothing is drawn; see ``check_drawn``. ``alike`` is False if ranks came with different plans.
    """

    samples: int
    tokens: int
    microbatches: int
    place: Place | None
    seconds: float
    draws: int = 0
    unlike: tuple[int, int] | None = None
    equal_batches: bool | None = None
    alike: bool = True


def agree_before_step(
    *,
    samples: int,
    tokens: int,
    microbatches: int,
    weightless: bool,
    diverged: int = 0,
    in_a_row: int = 0,
    terms: Sequence[str] = (),
    error: Exception | None = None,
    run: int = 0,
    step: int = 0,
    copies: int = 1,
    draws: int = 0,
    content: int = 0,
    plan: int = 0,
    origin: Origin | None = None,
    seconds: float = 0.0,
) -> Tally:
    """The ranks' common record of the step about to run.

    Args:
        samples: local samples.
        tokens: local tokens, 0 where they are not counted.
        microbatches: how many this rank needs, 0 when it has no sample.
        weightless: this rank has seen that an earlier step had no weight anywhere (it learns so late on a GPU).
        diverged: if this rank has seen too many losses in a row that were not finite, 1 + the first step of the row; else 0.
        in_a_row: the number of such losses that is too many, for the message.
        terms: what this rank has promised weights of.
        error: what is wrong with this rank's batch; it is raised here, and the others hear of it.
        run: tells apart states that train in turns.
        step: of the run; the same in a second try.
        copies: so many ranks, one after another, have one batch together, which is counted once.
        draws: a number that differs where the next random numbers do, 0 where ranks have no batch together.
        content: a hash of the batch, below 2**53; 0 if it is not compared with that of other ranks.
        plan: digest of the traces of ``auto_microbatch`` and of what they depend on; 0 without it.
        origin: place of this rank's batch in its loader's data, None if no loader handed it out.
        seconds: time since the last step of this run began.

    Mutates: what this process knows about stopping (see ``stopping``); the agreement of ``origin``.
    Collective: one all-gather of eleven numbers on the control group, of twelve where ranks have a batch together.

    Raises:
        PeerError: another rank came with an ``error``.
        NonFiniteError: some rank has seen too many losses that were not finite; on all ranks.
        StepError: no rank has a sample, ranks disagree about the end of the epoch or about the terms, ranks that should have
            one batch have others, or an earlier step had no weight; on all ranks.
    """
    pulse.beat("step")
    stop = stopping.wanted()
    late = -1 if weightless else diverged  # learnt of an earlier step
    if error is None and samples and not late and current().world_size == 1:
        stopping.settle(stop, run=run, step=step)
        place = None if origin is None else _agreed_place([origin.code()], origin)
        return Tally(samples=samples, tokens=tokens, microbatches=microbatches, place=place, seconds=seconds)
    code = 0 if origin is None else origin.code()
    mine = [samples, tokens, microbatches, code, late, seconds, error is not None, _digest(terms), stop]
    mine += [content, plan]
    rows = _exchanged([*mine, draws] if copies > 1 else mine)
    columns = list(zip(*rows, strict=True))
    stopping.settle(int(max(columns[8])), run=run, step=step)
    if error is not None:
        raise error
    _raise_reported(rows, in_a_row)
    place = _agreed_place([int(code) for code in columns[3]], origin)
    if not any(columns[0]):
        raise StepError(
            "step: no rank has a sample in this batch; skip the step where a batch may be empty on all ranks, or end the loop "
            "there"
        )
    unlike = _together(rows, copies)
    return Tally(
        samples=int(sum(columns[0][::copies])),
        tokens=int(sum(columns[1][::copies])),
        microbatches=int(max(columns[2])),
        place=place,
        seconds=rows[0][5],
        draws=draws,
        unlike=unlike,
        equal_batches=_all_equal(columns[9][::copies]),
        alike=len(set(columns[10])) == 1,
    )


def _raise_reported(rows: Sequence[Sequence[float]], in_a_row: int) -> None:
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
        raise NonFiniteError(_diverged(int(min(code for code in late if code > 0)) - 1, in_a_row))
    if late:
        raise StepError(
            "step: an earlier step had weight 0 on all ranks together (or another than weight_fn said), so its mean loss is "
            "undefined; look for masked batches"
        )


def _diverged(first: int, in_a_row: int) -> str:
    back = f"load a checkpoint of step {first - 1} or before" if first else "start again"
    return (
        f"step: the loss was infinite or NaN in {in_a_row} steps in a row, from step {first} on; parameters that were updated "
        f"by them are spoiled, so {back}, then lower the learning rate, clip, or look at the batches; dt.nonfinite leaves such "
        "updates out, and changes how many stop the run"
    )


def _all_equal(hashes: Sequence[float]) -> bool | None:
    """Return True if the ranks have one hash, and None if there are no two hashes to compare."""
    return len(set(hashes)) == 1 if len(hashes) > 1 and all(hashes) else None


def _agreed_place(codes: Sequence[int], origin: Origin | None) -> Place | None:
    """The place of all ranks after this step, by their origins' codes; refuses ranks at different places.

    A code of 0 says nothing: the batch was made of new tensors. If that is so on some rank, the place is None on all.

    Mutates: the agreement of ``origin``, for its loader.
    """
    known = [rank for rank, code in enumerate(codes) if code]
    alone, ends = {codes[rank] & 2 for rank in known}, [rank for rank in known if codes[rank] & 1]
    if alone == {2} and len(known) < len(codes):
        raise StepError(
            f"step: the batch of rank {codes.index(0)} was made of new tensors (slices, copies), so it does not say if the "
            "rank has samples left; name the loader: step.init(model, optimizer, loader=loader)"
        )
    if alone == {2} and origin is not None:
        epoch, batch = divmod(min(code >> 2 for code in codes), 1 << BATCH_BITS)
        origin.agreement.over = epoch > origin.begin.epoch
        return Place(epoch, batch)
    if ends and len(ends) < len(known):
        raise StepError(f"step: only ranks {ends} are at the end of their epoch; give all ranks one dataset and one seed")
    astray = [rank for rank in known if codes[rank] != codes[known[0]]]
    if astray:
        raise StepError(
            f"step: rank {astray[0]} is at another place in its data than rank {known[0]}, or in other data; give all ranks "
            "one dataset, one seed and one global_batch_size, and load the same checkpoint"
        )
    if origin is None:
        return None
    origin.agreement.over = origin.ends_epoch
    return origin.end if len(known) == len(codes) else None


def _together(rows: Sequence[Sequence[float]], copies: int) -> tuple[int, int] | None:
    """Two ranks that work on one batch together but would draw other random numbers, or None; refuses other batch sizes."""
    unlike = None
    for rank, row in enumerate(rows) if copies > 1 else ():
        first = rank - rank % copies
        if row[:2] != rows[first][:2]:
            raise StepError(
                f"step: ranks {first} and {rank} work on one batch together (cp, tp), but have {rows[first][0]:g} and "
                f"{row[0]:g} samples, {rows[first][1]:g} and {row[1]:g} tokens; build the loader with mesh="
            )
        if row[11] != rows[first][11]:
            unlike = unlike or (first, rank)
    return unlike


def check_drawn(tally: Tally, device: torch.device) -> None:
    """After backward: ranks that work on one batch must have drawn alike, if they have drawn, so that masks of dropout fit.

    Every rank runs the same model, so if one has drawn all have, and all raise. Collective: none.

    Raises:
        StepError: they have not.
    """
    if tally.unlike is not None and draws_digest(device) != tally.draws:
        raise StepError(
            f"step: ranks {tally.unlike[0]} and {tally.unlike[1]} work on one batch together (cp, tp), but drew different "
            "random numbers in it, as for dropout; dt.seed_all(seed, dt.data_rank(mesh)[0]) before, and draw alike on both"
        )


class Verdict(IntFlag):
    """How a try of a step went on one rank, beside its gradients."""

    FINE = 0
    OUT_OF_MEMORY = 1
    ERROR = 2  # of another kind
    THRASHED = 4  # it fits only because the allocator gave memory back and asked again
    DEVIATED = 8  # the collectives were about to differ from their trace: the run is void, and is to be made again

    @property
    def failed(self) -> bool:
        """Whether there is nothing to be used."""
        return bool(self & (Verdict.OUT_OF_MEMORY | Verdict.ERROR | Verdict.DEVIATED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks know of a step's backward.

    Args:
        unused: parameters that had no gradient anywhere.
        changed: modules whose buffers changed on any rank.
        verdicts: by rank. If one failed, nothing else is known but the places.
        places: by rank, the number of collectives before a failure.
    """

    unused: Sequence[str] = ()
    changed: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()
    places: Sequence[int] = ()


def agree_after_backward(
    *,
    order: Sequence[int],
    missing: Sequence[str],
    changed: Sequence[str],
    fault: bool,
    verdict: Verdict = Verdict.FINE,
    place: int = 0,
) -> Outcome:
    """The ranks' common record of the backward that has run.

    Args:
        order: which units this rank reduced, one after another.
        missing: parameters without a gradient from this rank.
        changed: modules whose buffers this rank's forwards changed.
        fault: the weights that this rank was promised are not those that its losses came with.
        verdict: how the try went, where it may be abandoned. If any rank's failed, the rest of the record says nothing.
        place: the number of collectives before this rank's failure.

    Collective: one all-gather of six numbers on the control group; one exchange of JSON more when ranks differ.

    Raises:
        StepError: ranks reduced different units, or one has a ``fault``; on all ranks.
    """
    rows = _exchanged([_digest(order), _digest(missing), _digest(changed), fault, verdict, place])
    places = [int(row.pop()) for row in rows]
    verdicts = [Verdict(int(row.pop())) for row in rows]
    if any(one.failed for one in verdicts):
        return Outcome(verdicts=verdicts, places=places)
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
        return Outcome(unused=missing, changed=changed, verdicts=verdicts)
    everyone = cast("list[list[list[str]]]", all_gather_json([list(missing), list(changed)]))
    without = [set(theirs) for theirs, _ in everyone]
    return Outcome(
        unused=[name for name in everyone[0][0] if all(name in theirs for theirs in without)],
        changed=list({name: None for _, theirs in everyone for name in theirs}),
        verdicts=verdicts,
    )


def _exchanged(record: Sequence[float]) -> list[list[float]]:
    """Every rank's record, by rank. Who comes early waits here for the last one."""
    if current().world_size == 1:
        return all_gather_numbers(record, where="step")
    spans.begin("agree")
    try:
        return all_gather_numbers(record, where="step")
    finally:
        spans.end("agree")


def _digest(values: Sequence[int] | Sequence[str]) -> int:
    """A number that float64 holds exactly, 0 for nothing."""
    return derive_seed(*values) % 2**52 if values else 0
