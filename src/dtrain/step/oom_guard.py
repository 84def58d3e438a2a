"""``Attempt``: one call of ``microbatch_step`` that may run out of memory on any rank, and leaves nothing when it did.

The last word when not even the smallest microbatch fits: what was missing, where, and what to try."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar, cast

import torch

from dtrain.dist.collective_replay import CollectiveGuard, CollectivesChanged, PeerFailed, TraceCache, open_guard
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.dist.step_sync import BackwardSync, RankStatus, StepCounts
from dtrain.dist.timeout_report import is_collective_error
from dtrain.errors import OutOfMemoryError, PeerError
from dtrain.memory.device_memory import get_device_memory
from dtrain.memory.oom import is_out_of_memory
from dtrain.typing import Plain

T = TypeVar("T")


class StepAborted(Exception):  # between two modules of this room, never a user's
    """A try of a step has failed for want of memory on some rank, and all ranks have left it.

    Args:
        counts: what the ranks had agreed before it.
        statuses: how it went, by rank.
    """

    def __init__(self, counts: StepCounts, statuses: Sequence[RankStatus]) -> None:
        super().__init__("a try of a step was abandoned")
        self.counts, self.statuses = counts, tuple(statuses)


@dataclass(slots=True, eq=False)
class StepGuard:
    """What the caller asks of one try, and what it hears of it.

    Args:
        owner: whose step it is, an object that only this run has.
        traces: of the model's collectives, kept from try to try.
        multi_rank: whether there are other ranks, who must not be left waiting.
        max_microbatches: run no more microbatches than these, and leave no gradient: a rehearsal. None runs them all.
        prepare: called before anything else; it may run out of memory like the rest.
        on_oom: called where memory ran out, before anything is given back.
        allocator_retried: called at the end of a try that fitted: whether it did so only because memory was given back in between.
        read_live_bytes: reads how many bytes are held now; None where that is of no interest.
        forward_bytes: out: what the first forward has left, in bytes.
        samples: out: this rank's samples.
        oom_message: out: the words of the allocator that refused on this rank.
        status: out: how the try went on this rank; ``statuses`` on all of them.
        collectives_issued: out: the number of collectives before this rank's failure.
        retry: out: the try says nothing about memory, and is to be made again.
    """

    owner: object
    traces: TraceCache
    multi_rank: bool
    max_microbatches: int | None = None
    prepare: Callable[[], None] | None = None
    on_oom: Callable[[], object] | None = None
    allocator_retried: Callable[[], bool] | None = None
    read_live_bytes: Callable[[], int] | None = None
    forward_bytes: int = 0
    samples: int = 0
    oom_message: str = ""
    status: RankStatus = RankStatus.OK
    statuses: Sequence[RankStatus] = ()
    error: Exception | None = None
    collective_guard: CollectiveGuard | None = field(default=None, repr=False)
    collectives_issued: int = 0
    retry: bool = False

    def limit_microbatches(self, wanted: int) -> int:
        """How many to run of those that the step needs."""
        return wanted if self.max_microbatches is None else min(wanted, self.max_microbatches)

    def enter_phase(self, name: str) -> None:
        """A part of the step begins; the memory that the first forward leaves is measured between two of them."""
        if self.read_live_bytes is not None and name == "forward, first":
            self.forward_bytes = -self.read_live_bytes()
        elif self.read_live_bytes is not None and self.forward_bytes < 0:
            self.forward_bytes += self.read_live_bytes()

    def execute(self, body: Callable[[], T], *, plan: object, undo: Callable[[], None]) -> T | None:
        """What ``body`` returns; None when it failed here or elsewhere: then nothing of it is left, and ``diagnose`` says why.

        Args:
            body: forwards and backwards, up to the vote.
            plan: what the collectives of ``body`` depend on; equal on all ranks.
            undo: gives back what a failed try holds; runs outside of it, so that its frames hold nothing any more.

        Collective: those of ``body``, on every rank, also on one that failed; see ``dist/collective_replay.py``.

        Raises:
            DistError: a collective failed: there is nobody to wait for any more.
            OutOfMemoryError: this rank cannot even stand in for what it has not issued; the others lose it.
        """
        self.collective_guard = open_guard(self.traces, plan) if self.multi_rank else None
        value, failed = None, False
        try:
            if self.prepare is not None:
                self.prepare()
            value = body() if self.collective_guard is None else _run_observed(self.collective_guard, body)
        except Exception as error:
            if is_collective_error(error):
                raise
            failed = True
            # The loss may have made another error of the reason why this rank had to leave.
            self.record_failure(
                error
                if self.collective_guard is None or self.collective_guard.exit_reason is None
                else self.collective_guard.exit_reason
            )
        if not failed:
            if self.allocator_retried is not None and self.allocator_retried():
                self.status |= RankStatus.ALLOCATOR_RETRIED
            return value
        gc.collect()  # an exception and its frames are a cycle, and hold what the frames hold
        undo()
        if self.collective_guard is not None:
            _issue_remaining(self.collective_guard)
            self.collectives_issued = self.collective_guard.collective_index
        return None

    def record_failure(self, error: Exception) -> None:
        """Take note that this rank has failed. Mutates: this attempt; frees what the frames behind ``error`` hold."""
        if isinstance(error, PeerFailed | CollectivesChanged):
            self.status |= RankStatus.COLLECTIVES_CHANGED if isinstance(error, CollectivesChanged) else RankStatus.OK
            _free_frames(error)
        elif is_out_of_memory(error):
            self.status |= RankStatus.OUT_OF_MEMORY
            self.oom_message = " ".join(str(error).split()) or type(error).__name__
            if self.on_oom is not None:
                self.on_oom()
            _free_frames(error)
        else:
            self.status |= RankStatus.ERROR
            self.error = error

    def raise_if_failed(self, outcome: BackwardSync, counts: StepCounts) -> None:
        """After the vote: go on, or leave the step on all ranks.

        The ranks that failed first decide: those that failed later may have computed with the zeros of the first.

        Args:
            outcome: of the vote.

        Raises:
            Abandoned: memory ran out on some rank, or the try is to be repeated; nothing worse happened.
            PeerError: something else happened to another rank. This rank's own error, if it is this one.
        """
        self.statuses = outcome.statuses
        failed = [rank for rank, verdict in enumerate(self.statuses) if verdict.failed]
        if self.collective_guard is not None:
            deviated = any(RankStatus.COLLECTIVES_CHANGED in verdict for verdict in self.statuses)
            self.collective_guard.update_traces(failed=bool(failed), collectives_changed=deviated)
        if not failed:
            return
        places = outcome.collective_indices or [0] * len(self.statuses)
        first = [rank for rank in failed if places[rank] == min(places[rank] for rank in failed)]
        broken = [rank for rank in first if RankStatus.ERROR in self.statuses[rank]]
        error, self.error = self.error, None
        if error is not None and get_dist_info().rank in broken:
            raise error
        if error is not None:
            _free_frames(error)
        if broken:
            raise PeerError(
                f"step: rank {broken[0]} failed ({len(broken)} of {len(self.statuses)} ranks did); see its own error"
            )
        self.retry = not any(RankStatus.OUT_OF_MEMORY in self.statuses[rank] for rank in first)
        raise StepAborted(counts, self.statuses)


def _run_observed(guard: CollectiveGuard, body: Callable[[], T]) -> T:
    with guard.intercept():
        value = body()
        guard.finish()
    return value


def _issue_remaining(guard: CollectiveGuard) -> None:
    try:
        guard.issue_remaining()
    except Exception as error:
        if is_collective_error(error) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"step: rank {get_dist_info().rank} has no memory left, not even to take part in the collectives that the others wait in "
            f"({error}), so it leaves them; look for what has taken the memory, and start again from the last checkpoint"
        ) from error


def _free_frames(error: BaseException) -> None:
    """Free what the frames of a failed try hold, whoever keeps the error. Mutates: ``error`` and those it came from."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__


@dataclass(slots=True)
class _CurrentGuard:
    guard: StepGuard | None = None


_CURRENT = _CurrentGuard()


@contextmanager
def use_guard(guard: StepGuard) -> Iterator[None]:
    """Let the next ``microbatch_step`` of its run be this attempt. Mutates: this process's record, while the block runs."""
    before, _CURRENT.guard = _CURRENT.guard, guard
    try:
        yield
    finally:
        _CURRENT.guard = before


def current_guard(owner: object) -> StepGuard | None:
    """The attempt that a step of ``owner`` is, if it is one."""
    attempt = _CURRENT.guard
    return attempt if attempt is not None and attempt.owner is owner else None


# In the order of what they cost.
_REMEDIES = (
    ("strategy='shard_grad_op'", ("none", "replicate")),
    ("strategy='full_shard'", ("none", "replicate", "shard_grad_op", "hybrid_shard")),
    ("activation checkpointing (dt.memory.checkpoint_activations)", ()),
    ("CPU offload (shard_model(offload='params'))", ()),
    ("a smaller model", ()),
)


def raise_does_not_fit(prefix: str, *, device: torch.device, strategy: str, oom_message: str, subject: str) -> NoReturn:
    """Raise on every rank alike; each must come here.

    Args:
        prefix: begins the message.
        device: whose memory it is.
        strategy: what may still be tried depends on it.
        oom_message: what this rank's allocator said when it refused; empty on a rank that did not run out.
        subject: that does not fit, for the message.

    Collective: one exchange of JSON.

    Raises:
        OutOfMemoryError: always.
    """
    gauge = get_device_memory(device)
    reading = gauge.read() if gauge is not None else None
    mine: dict[str, Plain] = {"asked": " ".join(oom_message.split())[:300]}
    if reading is not None:
        mine |= {"capacity": reading.capacity, "live": reading.live, "free": reading.free, "others": reading.used_by_others}
    reports = cast("list[dict[str, Plain]]", all_gather_json(mine, caller=prefix.partition(":")[0]))
    rank = next((rank for rank, report in enumerate(reports) if report["asked"]), get_dist_info().rank)
    report = reports[rank]
    known = (
        f" (of {_format_mib(report['capacity'])}, {_format_mib(report['live'])} held and {_format_mib(report['free'])} free without it, "
        f"{_format_mib(report['others'])} held by others)"
        if "capacity" in report
        else ""
    )
    said = str(report["asked"]).rstrip(".")
    remedies = [text for text, instead_of in _REMEDIES if not instead_of or strategy in instead_of]
    raise OutOfMemoryError(
        f"{prefix} {subject} does not fit on rank {rank}: {said or 'out of memory'}{known}; "
        f"try, in this order: {', '.join(remedies)}"
    )


def _format_mib(value: Plain) -> str:
    return f"{float(cast('int', value)) / 2**20:,.1f} MiB"
