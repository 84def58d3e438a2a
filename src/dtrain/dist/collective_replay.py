"""Keep the collectives of all ranks paired when a rank fails in the middle of a step.

A rank that leaves its step early must not leave its peers waiting. Its peers must not pair with one of its later collectives.
A guarded run prevents both. The guard intercepts every collective of the process, in one of two modes:

*Checked*. Before each collective the ranks exchange a record on the control channel: a failure of this rank, or the collective
that this rank is about to issue. If a rank has failed, all ranks leave before the collective is issued. If the collectives do
not match, all ranks raise. If the run succeeds on all ranks, the guard stores its sequence of collectives: the *trace* of the
plan.

*Traced*. If all ranks hold the traces of the same checked runs, the next run of that plan exchanges nothing. Each rank compares
each collective with the trace before issuing the collective. A rank aborts the model's code if the rank fails, or if its next
collective differs from the trace. Then the rank issues the rest of the trace with zeros. So each rank issues exactly the trace,
and a wrong pairing cannot occur. The exchange after the run tells all ranks that the run is void.

A trace does not have to predict the plan correctly. If the trace is wrong, the run is void, the trace is dropped, and the run
is repeated in checked mode. For example, FSDP2 gathers different units in later microbatches and in steps of more microbatches,
because each backward also prefetches for the next forward.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist

from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.dispatch import (
    FLOAT64_EXACT,
    CollectiveSpec,
    IssueFn,
    call_signature,
    describe_collective,
    get_interceptor,
    group_from_call,
    sequence_number,
)
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed
from dtrain.errors import StepError

# Plans. Ragged batches make one plan for each number of microbatches.
_MAX_TRACES = 32
# Wrong traces before every run of a model is checked.
_MAX_WRONG_TRACES = 5
_RUNNING, _RUNNING_VARIABLE_SIZE, _FAILED = range(3)


class PeerFailed(Exception):  # internal: users never see it
    """Another rank reported a failure before a collective that this rank was about to issue."""


class CollectivesChanged(Exception):  # internal: users never see it
    """This rank was about to issue a collective that differs from the next collective of the trace."""


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveTrace:
    """Collectives of a checked run on this rank, and a digest of the collectives of all ranks, equal on all ranks."""

    calls: tuple[CollectiveSpec, ...]
    digest: int


@dataclass(slots=True, eq=False)
class TraceCache:
    """Traces of one training run by plan. A plan is everything that the collectives of a step depend on.

    An incomplete plan costs time, never correctness.

    Args:
        always_check: if True, no run is traced.
    """

    always_check: bool = False
    _wrong_traces_left: int = _MAX_WRONG_TRACES
    _traces: OrderedDict[object, CollectiveTrace] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._traces)

    def digest(self, *conditions: int | str) -> int:
        """Return a number below 2**52, never 0, equal on all ranks with the same traces and the same ``conditions``."""
        known = [trace.digest for trace in self._traces.values()]
        return 1 + derive_seed(*conditions, int(self.always_check), *known) % (FLOAT64_EXACT - 1)

    def find(self, plan: object) -> CollectiveTrace | None:
        """Return the trace of ``plan``, or None if there is no reliable trace. Every rank must call with the same plan."""
        if self.always_check or plan not in self._traces:
            return None
        self._traces.move_to_end(plan)
        return self._traces[plan]

    def add(self, plan: object, trace: CollectiveTrace) -> None:
        """Use ``trace`` in the next run of ``plan``. Every rank must call, or no rank."""
        self._traces[plan] = trace
        while len(self._traces) > _MAX_TRACES:
            self._traces.popitem(last=False)

    def forget(self, plan: object) -> None:
        """Drop the trace of ``plan``, which other ranks do not hold."""
        self._traces.pop(plan, None)

    def drop(self, plan: object) -> None:
        """Drop the trace of ``plan``, which was wrong on some rank. Every rank must call, or no rank."""
        self.forget(plan)
        self._wrong_traces_left -= 1
        self.always_check |= self._wrong_traces_left <= 0

    def clear(self) -> None:
        """Drop all traces. Every rank must call, or no rank."""
        self._traces.clear()


class CollectiveGuard(ABC):
    """Interceptor of every collective of this rank in one run. ``open_guard`` makes a guard.

    Attributes:
        exit_reason: reason why this rank must leave the run. Each further collective raises the reason again, in case that the
            loss function catches the exception.
    """

    exit_reason: Exception | None = None

    def __init__(self, traces: TraceCache, plan: object) -> None:
        self._traces, self._plan = traces, plan
        self._issuing: tuple[CollectiveSpec, int] | None = None
        # True while the guard exchanges its own record.
        self._exchanging = False

    @contextmanager
    def intercept(self) -> Iterator[None]:
        """Route every collective of the process groups through this guard."""

        def listener(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], issue: IssueFn) -> Any:
            if self._exchanging or self._issuing is not None:
                return issue()
            group = group_from_call(operation, args, kwargs)
            if self.exit_reason is not None:
                raise self.exit_reason
            call = self._admit_collective(operation, args, kwargs, group)
            self._issuing = call, sequence_number(group)
            result = issue()
            self._issuing = None
            return result

        with get_interceptor().listen(listener):
            yield

    @property
    def collective_index(self) -> int:
        """Number of collectives after which other ranks may have used this rank's zeros, if this rank fails now."""
        return 0

    @abstractmethod
    def finish(self) -> None:
        """Report that this rank has completed the run.

        Raises:
            PeerFailed: another rank failed.
            CollectivesChanged: the trace has further collectives.
            StepError: other ranks are about to issue a collective; on all ranks.
        """

    @abstractmethod
    def issue_remaining(self) -> None:
        """Let the other ranks complete the run after a failure on this rank. Call once this rank has freed its memory.

        Collective: depends on the mode.
        """

    @abstractmethod
    def update_traces(self, *, failed: bool, collectives_changed: bool) -> None:
        """Store or drop a trace after the ranks have exchanged the outcome. Every rank must pass the same outcome.

        Args:
            failed: if True, the run is void.
            collectives_changed: if True, the collectives of some rank differed from the trace.
        """

    @abstractmethod
    def _admit_collective(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
    ) -> CollectiveSpec:
        """Return the collective that may be issued, or raise."""

    def _abort(self, reason: Exception) -> Exception:
        self.exit_reason = reason
        return reason

    def _take_interrupted(self) -> CollectiveSpec | None:
        """Return the collective that this rank announced but did not issue, because memory ran out inside of the call."""
        interrupted, self._issuing = self._issuing, None
        if interrupted is None or sequence_number(interrupted[0].group) != interrupted[1]:
            return None
        return interrupted[0]


class CheckedGuard(CollectiveGuard):
    """Guard that exchanges one record before each collective."""

    def __init__(self, traces: TraceCache, plan: object) -> None:
        super().__init__(traces, plan)
        # True once all ranks know that the run is over.
        self._run_is_over = False
        self._has_variable_sizes = False
        self._calls: list[CollectiveSpec] = []
        # A step has many collectives of few signatures.
        self._call_cache: dict[tuple[object, ...], CollectiveSpec] = {}
        # Digest of the records of all ranks.
        self._digest = hashlib.blake2b(digest_size=6)

    def finish(self) -> None:
        if self.exit_reason is not None:
            raise self.exit_reason
        self._exchange(None)

    def issue_remaining(self) -> None:
        """Issue the announced collective with zeros, then report the failure.

        Collective: the announced collective and one record.
        """
        interrupted = self._take_interrupted()
        if interrupted is not None:
            interrupted.issue_zeros()
        if not self._run_is_over:
            self._run_is_over = True
            all_gather_numbers([_FAILED, 0, 0, 0], caller="step")

    def update_traces(self, *, failed: bool, collectives_changed: bool) -> None:
        if not (failed or self._has_variable_sizes or self._traces.always_check):
            digest = int.from_bytes(self._digest.digest(), "little")
            self._traces.add(self._plan, CollectiveTrace(tuple(self._calls), digest))

    def _admit_collective(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
    ) -> CollectiveSpec:
        signature = call_signature(operation, args, group)
        call = self._call_cache.get(signature) or self._call_cache.setdefault(
            signature, describe_collective(operation, args, kwargs, group, signature)
        )
        self._exchange(call)
        self._calls.append(call)
        return call

    def _exchange(self, call: CollectiveSpec | None) -> None:
        """Report ``call``, or the end of the run if ``call`` is None. Raise if all ranks must leave."""
        status = _RUNNING_VARIABLE_SIZE if call is not None and call.has_variable_sizes else _RUNNING
        fingerprint = [0, get_dist_info().world_size, 0] if call is None else call.fingerprint()
        self._exchanging = True
        try:
            rows = all_gather_numbers([status, *fingerprint], caller="step")
            if any(row[0] == _FAILED for row in rows):
                self._run_is_over = True
                raise self._abort(PeerFailed())
            if not _calls_match(rows):
                self._run_is_over = True
                raise self._abort(_mismatch_error(call, len(self._calls)))
        finally:
            self._exchanging = False
        self._has_variable_sizes |= any(row[0] == _RUNNING_VARIABLE_SIZE for row in rows)
        for row in rows:
            self._digest.update(array("d", row).tobytes())


class TracedGuard(CollectiveGuard):
    """Guard that compares each collective with the trace and exchanges nothing."""

    def __init__(self, traces: TraceCache, plan: object, trace: CollectiveTrace) -> None:
        super().__init__(traces, plan)
        self._calls = trace.calls
        self._issued = 0

    @property
    def collective_index(self) -> int:
        return self._issued

    def finish(self) -> None:
        if self.exit_reason is not None:
            raise self.exit_reason
        if self._issued < len(self._calls):
            raise self._abort(CollectivesChanged())

    def issue_remaining(self) -> None:
        """Issue the rest of the trace with zeros.

        Collective: the rest of the trace.
        """
        if self._take_interrupted() is not None:
            self._issued -= 1
        rest = self._calls[self._issued :]
        for call in rest:
            # One call at a time, because memory is short.
            call.issue_zeros()

    def update_traces(self, *, failed: bool, collectives_changed: bool) -> None:
        if collectives_changed:
            self._traces.drop(self._plan)

    def _admit_collective(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup
    ) -> CollectiveSpec:
        if self._issued == len(self._calls) or call_signature(operation, args, group) != self._calls[self._issued].signature:
            raise self._abort(CollectivesChanged())
        self._issued += 1
        return self._calls[self._issued - 1]


def open_guard(traces: TraceCache, plan: object) -> CollectiveGuard:
    """Start a run of ``plan`` on this rank. Every rank must call with the same plan and the same traces."""
    trace = traces.find(plan)
    return CheckedGuard(traces, plan) if trace is None else TracedGuard(traces, plan, trace)


def _calls_match(rows: Sequence[Sequence[float]]) -> bool:
    """Return True if all ranks of each announced group have announced the same collective of that group."""
    by_group: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        by_group.setdefault(row[1], []).append(row[2:])
    return all(len(members) == members[0][0] and members.count(members[0]) == len(members) for members in by_group.values())


def _mismatch_error(call: CollectiveSpec | None, number: int) -> StepError:
    """Make the error for ranks whose next collectives do not match, equal on all ranks. Collective: an exchange of JSON."""
    mine = "the end of the step" if call is None else str(call)
    announced = cast("list[str]", all_gather_json(mine, caller="step"))
    other = next((rank for rank, text in enumerate(announced) if text != announced[0]), len(announced) - 1)
    return StepError(
        f"step: ranks were about to issue different collectives, and none was issued: rank 0 {announced[0]}, rank {other} "
        f"{announced[other]}, after {number} equal collectives. Run the same modules in the same order on all ranks."
    )
