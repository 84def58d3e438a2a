"""Run one gradient step so that an out-of-memory error on any rank undoes the step on all ranks.

``raise_does_not_fit`` reports a minimum size that does not fit, with suggestions.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, cast

import torch

from dtrain.dist.collective_replay import CollectiveGuard, CollectivesChanged, PeerFailed, TraceCache, open_guard
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.incident import is_collective_error
from dtrain.dist.init import get_dist_info
from dtrain.dist.step_sync import BackwardSync, RankStatus, StepCounts
from dtrain.errors import OutOfMemoryError, PeerError
from dtrain.memory.device_memory import get_device_memory, is_out_of_memory
from dtrain.typing import Plain


# Only the modules of this package see this error; no user catches it.
class StepAborted(Exception):
    """All ranks have aborted a step, because memory ran out on some rank or the step must be repeated.

    Args:
        counts: counts that ranks agreed on before the step.
        statuses: status of every rank.
    """

    def __init__(self, counts: StepCounts, statuses: Sequence[RankStatus]) -> None:
        super().__init__("a guarded step was aborted")
        self.counts, self.statuses = counts, tuple(statuses)


@dataclass(slots=True, eq=False)
class StepGuard:
    """Options and outcome of one guarded step, which travels in ``TrainState._guard``. Fields marked "out" are outcomes.

        with guard.attempt(plan):
            ...  # forward and backward
        if guard.failed:
            guard.roll_back(undo)

    Args:
        traces: traces of the model's collectives, shared by the steps of a run.
        multi_rank: if True, the model runs on several ranks, and no rank may be left waiting.
        max_microbatches: number of microbatches of a probe, which leaves no gradient; None runs all microbatches.
        prepare: function that the step calls first in ``attempt``, and which may run out of memory, too.
        on_oom: function called when memory runs out, before any memory is freed.
        allocator_retried: function called after a step that fits; True if the allocator had to free memory.
        read_live_bytes: function that returns the bytes in use; None skips the measurement.
        forward_bytes: out: bytes kept by the first forward.
        samples: out: this rank's samples.
        oom_message: out: message of the allocator on this rank.
        failed: out: True if the step failed on this rank, or if this rank had to leave the step of another rank.
        status: out: status of this rank.
        statuses: out: status of every rank.
        error: out: error of this rank that is not out of memory.
        collectives_issued: out: number of collectives before this rank's failure.
        retry: out: True if the step says nothing about memory and must be repeated.
    """

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
    failed: bool = False
    status: RankStatus = RankStatus.OK
    statuses: Sequence[RankStatus] = ()
    error: Exception | None = None
    collective_guard: CollectiveGuard | None = field(default=None, repr=False)
    collectives_issued: int = 0
    retry: bool = False

    def limit_microbatches(self, required: int) -> int:
        """Return the number of microbatches to run out of ``required``."""
        return required if self.max_microbatches is None else min(required, self.max_microbatches)

    def begin_first_forward(self) -> None:
        """Start to measure the memory that the first forward keeps for its backward."""
        if self.read_live_bytes is not None:
            self.forward_bytes = -self.read_live_bytes()

    def end_first_forward(self) -> None:
        """End the measurement of ``begin_first_forward``."""
        if self.read_live_bytes is not None:
            self.forward_bytes += self.read_live_bytes()

    @contextmanager
    def attempt(self, plan: object, *, traced: bool = True) -> Iterator[None]:
        """Run the forwards and backwards of the context. An exception ends the context, and is recorded instead of raised.

        Args:
            plan: facts that decide the collectives of the context; equal on all ranks.
            traced: if False, every collective is checked, and no trace is stored.

        Raises:
            DistError: a collective failed, so this rank waits for no other rank.
        """
        traces = self.traces if traced else TraceCache(always_check=True)
        guard = self.collective_guard = open_guard(traces, plan) if self.multi_rank else None
        try:
            if guard is None:
                yield
            else:
                with guard.intercept():
                    yield
                    guard.finish()
        except Exception as error:
            if is_collective_error(error):
                raise
            # The loss may have replaced the reason for which this rank had to abort by an error of its own.
            self.record_failure(error if guard is None or guard.exit_reason is None else guard.exit_reason)
        else:
            if self.allocator_retried is not None and self.allocator_retried():
                self.status |= RankStatus.ALLOCATOR_RETRIED

    def roll_back(self, undo: Callable[[], None]) -> None:
        """Free the memory of a failed ``attempt``, and let the other ranks complete their collectives.

        Args:
            undo: function that frees the objects of the failed step.

        Collective: the remaining collectives of the attempt, on every rank; see ``dist/collective_replay.py``.

        Raises:
            OutOfMemoryError: this rank has no memory to issue its remaining collectives; the other ranks lose this rank.
        """
        # An exception and its frames form a cycle that keeps the tensors of the frames.
        gc.collect()
        undo()
        if self.collective_guard is not None:
            _issue_remaining(self.collective_guard)
            self.collectives_issued = self.collective_guard.collective_index

    def record_failure(self, error: Exception) -> None:
        """Record that this rank has failed. Mutates: this guard; frees the tensors in the frames of ``error``."""
        self.failed = True
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
        """Return if no rank failed; otherwise abort the step on all ranks.

        The ranks that failed first decide: a rank that failed later may have computed with zeros in place of their results.

        Args:
            outcome: statuses of all ranks.
            counts: counts of the step, for ``StepAborted``.

        Raises:
            StepAborted: memory ran out on some rank, or the step must be repeated, and no rank had another error.
            PeerError: another rank had another error. The rank with the error raises its own error.
        """
        self.statuses = outcome.statuses
        failed = [rank for rank, status in enumerate(self.statuses) if status.failed]
        if self.collective_guard is not None:
            changed = any(RankStatus.COLLECTIVES_CHANGED in status for status in self.statuses)
            self.collective_guard.update_traces(failed=bool(failed), collectives_changed=changed)
        if not failed:
            return
        indices = outcome.collective_indices or [0] * len(self.statuses)
        first = [rank for rank in failed if indices[rank] == min(indices[rank] for rank in failed)]
        broken = [rank for rank in first if RankStatus.ERROR in self.statuses[rank]]
        error, self.error = self.error, None
        if error is not None and (not self.multi_rank or get_dist_info().rank in broken):
            raise error
        if error is not None:
            _free_frames(error)
        if broken:
            raise PeerError(
                f"step: rank {broken[0]} failed ({len(broken)} of {len(self.statuses)} ranks did). See its own error."
            )
        self.retry = not any(RankStatus.OUT_OF_MEMORY in self.statuses[rank] for rank in first)
        raise StepAborted(counts, self.statuses)


def _issue_remaining(guard: CollectiveGuard) -> None:
    try:
        guard.issue_remaining()
    except Exception as error:
        if is_collective_error(error) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"step: rank {get_dist_info().rank} is out of memory and cannot issue the collectives that the other ranks wait in "
            f"({error}), so it leaves them. Find what uses the memory, and start again from the last checkpoint."
        ) from error


def _free_frames(error: BaseException) -> None:
    """Free the tensors in the frames of ``error``, even if the error is kept. Mutates: ``error`` and its causes."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__


# In the order of their cost: (remedy, strategies that it replaces; none means that it always applies).
_REMEDIES = (
    ("strategy='shard_grad_op'", ("none", "replicate")),
    ("strategy='full_shard'", ("none", "replicate", "shard_grad_op", "hybrid_shard")),
    ("activation checkpointing (dt.shard.checkpoint_activations)", ()),
    ("CPU offload (shard_model(offload='params'))", ()),
    ("a smaller model", ()),
)


def raise_does_not_fit(prefix: str, *, device: torch.device, strategy: str, oom_message: str, subject: str) -> NoReturn:
    """Raise ``OutOfMemoryError`` with suggestions because ``subject`` does not fit. Every rank must call the function.

    Args:
        prefix: start of the message.
        device: device whose memory ran out.
        strategy: current strategy, which limits the suggestions.
        oom_message: message of this rank's allocator; empty on a rank that did not run out of memory.
        subject: name of what does not fit, for the message.

    Collective: one exchange of JSON.

    Raises:
        OutOfMemoryError: always.
    """
    device_memory = get_device_memory(device)
    stats = device_memory.read() if device_memory is not None else None
    own: dict[str, Plain] = {"oom_message": " ".join(oom_message.split())[:300]}
    if stats is not None:
        own |= {"capacity": stats.capacity, "live": stats.live, "free": stats.free, "used_by_others": stats.used_by_others}
    reports = cast("list[dict[str, Plain]]", all_gather_json(own, caller=prefix.partition(":")[0]))
    rank = next((rank for rank, report in enumerate(reports) if report["oom_message"]), get_dist_info().rank)
    report = reports[rank]
    memory = (
        f" (of {_format_mib(report['capacity'])}, {_format_mib(report['live'])} in use and {_format_mib(report['free'])} free "
        f"without it, {_format_mib(report['used_by_others'])} used by others)"
        if "capacity" in report
        else ""
    )
    message = str(report["oom_message"]).rstrip(".")
    remedies = [text for text, replaced in _REMEDIES if not replaced or strategy in replaced]
    raise OutOfMemoryError(
        f"{prefix} {subject} does not fit on rank {rank}: {message or 'out of memory'}{memory}. "
        f"Try, in this order: {', '.join(remedies)}."
    )


def _format_mib(value: Plain) -> str:
    return f"{float(cast('int', value)) / 2**20:,.1f} MiB"
