"""``Attempt``: one call of ``microbatch_step`` that may run out of memory on any rank, and leaves nothing when it did."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from dtrain.dist.control import Outcome, Tally, Verdict
from dtrain.dist.init import current
from dtrain.dist.replay import Deviated, Guard, PeerFailed, Traces, open_guard
from dtrain.dist.timeouts import is_of_a_collective
from dtrain.errors import DoesNotFitError, PeerError
from dtrain.memory.failure import is_out_of_memory

T = TypeVar("T")


class Abandoned(Exception):  # between two modules of this room, never a user's
    """A try of a step has failed for want of memory on some rank, and all ranks have left it.

    Args:
        tally: what the ranks had agreed before it.
        verdicts: how it went, by rank.
    """

    def __init__(self, tally: Tally, verdicts: Sequence[Verdict]) -> None:
        super().__init__("a try of a step was abandoned")
        self.tally, self.verdicts = tally, tuple(verdicts)


@dataclass(slots=True, eq=False)
class Attempt:
    """What the caller asks of one try, and what it hears of it.

    Args:
        run: whose step it is, an object that only this run has.
        traces: of the model's collectives, kept from try to try.
        shared: whether there are other ranks, who must not be left waiting.
        at_most: run no more microbatches than these, and leave no gradient: a rehearsal. None runs them all.
        prepare: called before anything else; it may run out of memory like the rest.
        on_failure: called where memory ran out, before anything is given back.
        thrashed: called at the end of a try that fitted: whether it did so only because memory was given back in between.
        live: reads how many bytes are held now; None where that is of no interest.
        kept: out: what the first forward has left, in bytes.
        samples: out: this rank's samples.
        asked: out: the words of the allocator that refused on this rank.
        verdict: out: how the try went on this rank; ``verdicts`` on all of them.
        place: out: the number of collectives before this rank's failure.
        repeat: out: the try says nothing about memory, and is to be made again.
    """

    run: object
    traces: Traces
    shared: bool
    at_most: int | None = None
    prepare: Callable[[], None] | None = None
    on_failure: Callable[[], object] | None = None
    thrashed: Callable[[], bool] | None = None
    live: Callable[[], int] | None = None
    kept: int = 0
    samples: int = 0
    asked: str = ""
    verdict: Verdict = Verdict.FINE
    verdicts: Sequence[Verdict] = ()
    error: Exception | None = None
    guard: Guard | None = field(default=None, repr=False)
    place: int = 0
    repeat: bool = False

    def microbatches(self, wanted: int) -> int:
        """How many to run of those that the step needs."""
        return wanted if self.at_most is None else min(wanted, self.at_most)

    def enter(self, name: str) -> None:
        """A part of the step begins; the memory that the first forward leaves is measured between two of them."""
        if self.live is not None and name == "forward, first":
            self.kept = -self.live()
        elif self.live is not None and self.kept < 0:
            self.kept += self.live()

    def guarded(self, body: Callable[[], T], *, plan: object, undo: Callable[[], None]) -> T | None:
        """What ``body`` returns; None when it failed here or elsewhere: then nothing of it is left, and ``verdict`` says why.

        Args:
            body: forwards and backwards, up to the vote.
            plan: what the collectives of ``body`` depend on; equal on all ranks.
            undo: gives back what a failed try holds; runs outside of it, so that its frames hold nothing any more.

        Collective: those of ``body``, on every rank, also on one that failed; see ``dist/replay.py``.

        Raises:
            DistError: a collective failed: there is nobody to wait for any more.
            DoesNotFitError: this rank cannot even stand in for what it has not issued; the others lose it.
        """
        self.guard = open_guard(self.traces, plan) if self.shared else None
        value, failed = None, False
        try:
            if self.prepare is not None:
                self.prepare()
            value = body() if self.guard is None else _watched(self.guard, body)
        except Exception as error:
            if is_of_a_collective(error):
                raise
            failed = True
            # The loss may have made another error of the reason why this rank had to leave.
            self.note(error if self.guard is None or self.guard.left is None else self.guard.left)
        if not failed:
            if self.thrashed is not None and self.thrashed():
                self.verdict |= Verdict.THRASHED
            return value
        gc.collect()  # an exception and its frames are a cycle, and hold what the frames hold
        undo()
        if self.guard is not None:
            _stand_in(self.guard)
            self.place = self.guard.place
        return None

    def note(self, error: Exception) -> None:
        """Take note that this rank has failed. Mutates: this attempt; frees what the frames behind ``error`` hold."""
        if isinstance(error, PeerFailed | Deviated):
            self.verdict |= Verdict.DEVIATED if isinstance(error, Deviated) else Verdict.FINE
            _let_go(error)
        elif is_out_of_memory(error):
            self.verdict |= Verdict.OUT_OF_MEMORY
            self.asked = " ".join(str(error).split()) or type(error).__name__
            if self.on_failure is not None:
                self.on_failure()
            _let_go(error)
        else:
            self.verdict |= Verdict.ERROR
            self.error = error

    def judge(self, outcome: Outcome, tally: Tally) -> None:
        """After the vote: go on, or leave the step on all ranks.

        The ranks that failed first decide: those that failed later may have computed with the zeros of the first.

        Args:
            outcome: of the vote.

        Raises:
            Abandoned: memory ran out on some rank, or the try is to be repeated; nothing worse happened.
            PeerError: something else happened to another rank. This rank's own error, if it is this one.
        """
        self.verdicts = outcome.verdicts
        failed = [rank for rank, verdict in enumerate(self.verdicts) if verdict.failed]
        if self.guard is not None:
            deviated = any(Verdict.DEVIATED in verdict for verdict in self.verdicts)
            self.guard.settle(failed=bool(failed), deviated=deviated)
        if not failed:
            return
        places = outcome.places or [0] * len(self.verdicts)
        first = [rank for rank in failed if places[rank] == min(places[rank] for rank in failed)]
        broken = [rank for rank in first if Verdict.ERROR in self.verdicts[rank]]
        error, self.error = self.error, None
        if error is not None and current().rank in broken:
            raise error
        if error is not None:
            _let_go(error)
        if broken:
            raise PeerError(
                f"step: rank {broken[0]} failed ({len(broken)} of {len(self.verdicts)} ranks did); see its own error"
            )
        self.repeat = not any(Verdict.OUT_OF_MEMORY in self.verdicts[rank] for rank in first)
        raise Abandoned(tally, self.verdicts)


def _watched(guard: Guard, body: Callable[[], T]) -> T:
    with guard.watched():
        value = body()
        guard.finish()
    return value


def _stand_in(guard: Guard) -> None:
    try:
        guard.stand_in()
    except Exception as error:
        if is_of_a_collective(error) or not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"step: rank {current().rank} has no memory left, not even to take part in the collectives that the others wait in "
            f"({error}), so it leaves them; look for what has taken the memory, and start again from the last checkpoint"
        ) from error


def _let_go(error: BaseException) -> None:
    """Free what the frames of a failed try hold, whoever keeps the error. Mutates: ``error`` and those it came from."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__


@dataclass(slots=True)
class _Process:
    attempt: Attempt | None = None


_PROCESS = _Process()


@contextmanager
def attempting(attempt: Attempt) -> Iterator[None]:
    """Let the next ``microbatch_step`` of its run be this attempt. Mutates: this process's record, while the block runs."""
    before, _PROCESS.attempt = _PROCESS.attempt, attempt
    try:
        yield
    finally:
        _PROCESS.attempt = before


def attempt_of(run: object) -> Attempt | None:
    """The attempt that a step of ``run`` is, if it is one."""
    attempt = _PROCESS.attempt
    return attempt if attempt is not None and attempt.run is run else None
