"""What the ranks agree on in a step: one small record on the control group before it, and one after backward.

Counts come from the batch in host memory, so the clock is exact for ragged batches without a GPU sync, and all ranks
learn how many microbatches there are before the first collective of the step. The second record finds what would be silently
wrong: ranks that reduced different gradients. Neither waits for a device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import cast

import torch

from dtrain import pulse, spans
from dtrain.dist import stopping
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.init import current
from dtrain.dist.rng import derive_seed, draws_digest
from dtrain.errors import PeerError, StepError
from dtrain.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The agreed record of a step: counts are summed over ranks, ``microbatches`` is the maximum, ``seconds`` rank 0's.

    ``draws`` is this rank's own, and ``unlike`` two ranks that work on one batch together and have others: no fault as long as
    nothing is drawn; see ``check_drawn``.
    """

    samples: int
    tokens: int
    microbatches: int
    end_of_epoch: bool
    seconds: float
    draws: int = 0
    unlike: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Post:
    """What a loader says of the batch that it is about to hand out.

    Args:
        epoch_ends: whether it is the last one of this rank's epoch.
        alone: ranks end their epochs each for itself; it is over when all have.
        stamp: a number below 2**48 that is equal on all ranks where they are at one place in the same data.
        spare: a real sample for a rank that has none in this batch.
    """

    epoch_ends: bool = False
    alone: bool = False
    stamp: int = 0
    spare: Batch | None = None

    def code(self) -> int:
        """Stamp and end of the epoch as one number that float64 holds exactly."""
        return self.stamp * 4 + 2 * self.alone + self.epoch_ends


@dataclass(slots=True)
class _Process:
    """What this process knows between two steps.

    ``post`` comes from the loader with each batch that ``until`` hands out, and holds for as long as the loop is busy with it;
    ``over`` is what the ranks then agreed about the end of the epoch, and ``last`` is when the last step was begun. They are
    facts of the process, like the process groups, and not of any one state: two states that train on one batch (a GAN's) see
    the same end of the epoch.
    """

    post: Post = Post()
    over: bool | None = None
    last: float | None = None


_PROCESS = _Process()


def post_batch(post: Post | None = None) -> None:
    """Say what is known of the batch that is about to be handed out; nothing: no batch of a loader is being worked on.

    Mutates: this process's record for the next step.
    """
    _PROCESS.post = post or Post()
    if post is not None:
        _PROCESS.over = None


def epoch_is_over() -> bool | None:
    """What the ranks agreed in the step on the posted batch; None if there was no step."""
    return _PROCESS.over


def spare_sample() -> Batch | None:
    """The sample that the loader spared for this rank, None when it has none."""
    return _PROCESS.post.spare


@contextmanager
def spare_replaced(sample: Batch | None) -> Iterator[None]:
    """Let ``sample`` be this rank's spare while the block runs: what a batch method made of the loader's.

    Mutates: this process's record, for the time of the block.
    """
    before = _PROCESS.post
    _PROCESS.post = replace(before, spare=sample)
    try:
        yield
    finally:
        _PROCESS.post = before


def agree_before_step(
    *,
    samples: int,
    tokens: int,
    microbatches: int,
    weightless: bool,
    terms: Sequence[str] = (),
    error: Exception | None = None,
    run: int = 0,
    step: int = 0,
    copies: int = 1,
    draws: int = 0,
) -> Tally:
    """The ranks' common record of the step about to run.

    Args:
        samples: local samples.
        tokens: local tokens, 0 where they are not counted.
        microbatches: how many this rank needs, 0 when it has no sample.
        weightless: this rank has seen that an earlier step had no weight anywhere (it learns so late on a GPU).
        terms: what this rank has promised weights of.
        error: what is wrong with this rank's batch; it is raised here, and the others hear of it.
        run: tells apart states that train in turns.
        step: of the run; the same in a second try.
        copies: so many ranks, one after another, have one batch together, which is counted once.
        draws: a number that differs where the next random numbers do, 0 where ranks have no batch together.

    Mutates: what this process knows about stopping; see ``stopping``.
    Collective: one all-gather of nine numbers on the control group, of ten where ranks have a batch together.

    Raises:
        PeerError: another rank came with an ``error``.
        StepError: no rank has a sample, ranks disagree about the end of the epoch or about the terms, ranks that should have
            one batch have others, or an earlier step had no weight; on all ranks.
    """
    pulse.beat("step")
    now = time.monotonic()
    since = 0.0 if _PROCESS.last is None else now - _PROCESS.last
    _PROCESS.last, stop = now, stopping.wanted()
    if error is None and samples and not weightless and current().world_size == 1:
        stopping.settle(stop, run=run, step=step)
        over = _PROCESS.over = _PROCESS.post.epoch_ends
        return Tally(samples=samples, tokens=tokens, microbatches=microbatches, end_of_epoch=over, seconds=since)
    mine = [samples, tokens, microbatches, _PROCESS.post.code(), weightless, since, error is not None, _digest(terms), stop]
    rows = _exchanged([*mine, draws] if copies > 1 else mine)
    columns = list(zip(*rows, strict=True))
    stopping.settle(int(max(columns[8])), run=run, step=step)
    if error is not None:
        raise error
    if any(columns[6]):
        failed = [rank for rank, row in enumerate(rows) if row[6]]
        raise PeerError(
            f"step: rank {failed[0]} could not use its batch ({len(failed)} of {len(rows)} ranks); see its own error"
        )
    strangers = [rank for rank, row in enumerate(rows) if row[7] != rows[0][7]]
    if strangers:
        raise StepError(
            f"step: the weight_fn of rank {strangers[0]} gives weights of other terms than that of rank 0 (or only one has any)"
            "; give the same names on all ranks"
        )
    over = _PROCESS.over = _epoch_ends([int(code) for code in columns[3]])
    if any(columns[4]):
        raise StepError(
            "step: an earlier step had weight 0 on all ranks together (or another than weight_fn said), so its mean loss is "
            "undefined; look for masked batches"
        )
    if not any(columns[0]):
        raise StepError("step: no rank has a sample in this batch; stop the loop where the loader ends")
    unlike = _together(rows, copies)
    return Tally(
        samples=int(sum(columns[0][::copies])),
        tokens=int(sum(columns[1][::copies])),
        microbatches=int(max(columns[2])),
        end_of_epoch=over,
        seconds=rows[0][5],
        draws=draws,
        unlike=unlike,
    )


def _epoch_ends(codes: Sequence[int]) -> bool:
    """Whether the epoch ends with this step, from what the ranks' loaders have posted; refuses ranks at different places."""
    alone, ends = {code & 2 for code in codes}, [rank for rank, code in enumerate(codes) if code & 1]
    if alone == {2}:
        return len(ends) == len(codes)
    if ends and len(ends) < len(codes):
        raise StepError(f"step: only ranks {ends} are at the end of their epoch; give all ranks one dataset and one seed")
    astray = [rank for rank, code in enumerate(codes) if code != codes[0]]
    if astray:
        raise StepError(
            f"step: rank {astray[0]} is at another place in its data than rank 0, or in other data; give all ranks one "
            "dataset, one seed and one global_batch_size, and load the same checkpoint"
        )
    return bool(ends)


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
        if row[9] != rows[first][9]:
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
    OTHERWISE = 8  # other collectives than in the tries before

    @property
    def failed(self) -> bool:
        """Whether there is nothing to be used."""
        return bool(self & (Verdict.OUT_OF_MEMORY | Verdict.ERROR))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks know of a step's backward.

    Args:
        unused: parameters that had no gradient anywhere.
        changed: modules whose buffers changed on any rank.
        verdicts: by rank. If one failed, nothing else is known.
    """

    unused: Sequence[str] = ()
    changed: Sequence[str] = ()
    verdicts: Sequence[Verdict] = ()


def agree_after_backward(
    *,
    order: Sequence[int],
    missing: Sequence[str],
    changed: Sequence[str],
    fault: bool,
    verdict: Verdict = Verdict.FINE,
) -> Outcome:
    """The ranks' common record of the backward that has run.

    Args:
        order: which units this rank reduced, one after another.
        missing: parameters without a gradient from this rank.
        changed: modules whose buffers this rank's forwards changed.
        fault: the weights that this rank was promised are not those that its losses came with.
        verdict: how the try went, where it may be abandoned. If any rank's failed, the rest of the record says nothing.

    Collective: one all-gather of five numbers on the control group; one exchange of JSON more when ranks differ.

    Raises:
        StepError: ranks reduced different units, or one has a ``fault``; on all ranks.
    """
    rows = _exchanged([_digest(order), _digest(missing), _digest(changed), fault, verdict])
    verdicts = [Verdict(int(row.pop())) for row in rows]
    if any(one.failed for one in verdicts):
        return Outcome(verdicts=verdicts)
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
