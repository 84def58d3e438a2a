"""Keep the collectives of all ranks paired when a rank fails in the middle of a step.

A rank that leaves its step early must not leave its peers waiting, and must not let them meet one of its later collectives.
A guarded run prevents both. It stands in front of every collective of the process, in one of two modes:

*Checked*. Before each collective the ranks exchange a record on the control group: the failure of this rank, or the collective
that it is about to issue. If a rank has failed, all ranks leave before the collective is issued. If the collectives do not
belong together, all ranks raise. If the run ends well on all ranks, its sequence of collectives is kept: the *trace* of its
plan.

*Traced*. If all ranks hold the traces of the same checked runs, the next run of that plan exchanges nothing. Each rank compares
each collective with its trace before it issues it. A rank that fails, or whose next collective is not that of the trace, leaves
the model's code and issues the rest of the trace with zeros. So each rank issues exactly the trace, whatever happens, and a
wrong pairing cannot occur. The vote after the run says that it is void.

A trace is no prediction of what a plan does: where it turns out to be wrong the run is void, the trace is dropped, and the run
is made again in checked mode. FSDP2, for one, gathers other units in a later microbatch than in an earlier one, and other ones
again in a step of more microbatches, because each backward also prefetches for the forward before it.
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

_MAX_TRACES = 32  # plans; ragged batches make one for each number of microbatches
_MAX_WRONG_TRACES = 5  # traces that turn out to be wrong before a model is checked for good
_RUNNING, _RUNNING_VARIABLE_SIZE, _FAILED = range(3)


class PeerFailed(Exception):  # internal: users never see it
    """Another rank has failed and has told so before a collective that this rank was about to issue."""


class CollectivesChanged(Exception):  # internal: users never see it
    """This rank was about to issue another collective than the trace has next."""


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveTrace:
    """The collectives of a checked run on this rank, and a digest of those of all ranks, which is equal on all."""

    calls: tuple[CollectiveSpec, ...]
    digest: int


@dataclass(slots=True, eq=False)
class TraceCache:
    """The traces of one training run, by plan: a plan is whatever the collectives of a step depend on.

    A plan that leaves something out costs time, never correctness.

    Args:
        always_check: if True, no run is traced.
    """

    always_check: bool = False
    _wrong_traces_left: int = _MAX_WRONG_TRACES
    _traces: OrderedDict[object, CollectiveTrace] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._traces)

    def digest(self, *conditions: int | str) -> int:
        """A number below 2**52, never 0, equal on all ranks that hold the same traces under the same ``conditions``."""
        known = [trace.digest for trace in self._traces.values()]
        return 1 + derive_seed(*conditions, int(self.always_check), *known) % (FLOAT64_EXACT - 1)

    def find(self, plan: object) -> CollectiveTrace | None:
        """The trace of ``plan``, if there is one that may be relied on. Every rank must ask alike."""
        if self.always_check or plan not in self._traces:
            return None
        self._traces.move_to_end(plan)
        return self._traces[plan]

    def add(self, plan: object, trace: CollectiveTrace) -> None:
        """Rely on ``trace`` in the next run of ``plan``. Every rank must, or none."""
        self._traces[plan] = trace
        while len(self._traces) > _MAX_TRACES:
            self._traces.popitem(last=False)

    def drop(self, plan: object) -> None:
        """The trace of ``plan`` was wrong on some rank. Every rank must drop it, or none."""
        self._traces.pop(plan, None)
        self._wrong_traces_left -= 1
        self.always_check |= self._wrong_traces_left <= 0

    def clear(self) -> None:
        """Drop all traces. Every rank must, or none."""
        self._traces.clear()


class CollectiveGuard(ABC):
    """This rank's part in one run: it stands in front of each collective. ``open_guard`` makes one.

    Attributes:
        exit_reason: the reason why this rank must not go on; raised again at each further collective, should the loss catch it.
    """

    exit_reason: Exception | None = None

    def __init__(self, traces: TraceCache, plan: object) -> None:
        self._traces, self._plan = traces, plan
        self._issuing: tuple[CollectiveSpec, int] | None = None
        self._exchanging = False  # this rank exchanges a record of its own

    @contextmanager
    def intercept(self) -> Iterator[None]:
        """A context in which every collective passes this guard, but those of checkpoint threads."""
        background = get_dist_info().background

        def listener(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], issue: IssueFn) -> Any:
            if self._exchanging or self._issuing is not None:
                return issue()
            group = group_from_call(operation, args, kwargs)
            if group is background:
                return issue()
            if self.exit_reason is not None:
                raise self.exit_reason
            call = self._admit(operation, args, kwargs, group)
            self._issuing = call, sequence_number(group)
            result = issue()
            self._issuing = None
            return result

        with get_interceptor().listen(listener):
            yield

    @property
    def collective_index(self) -> int:
        """The number of collectives after which other ranks may have computed with this rank's zeros, if it fails now."""
        return 0

    @abstractmethod
    def finish(self) -> None:
        """Say that this rank has come to the end of the run.

        Raises:
            PeerFailed: another rank has not.
            Deviated: the trace goes on.
            StepError: other ranks are about to issue a collective; on all ranks.
        """

    @abstractmethod
    def issue_remaining(self) -> None:
        """After a failure, and after this rank has dropped what it held: let the other ranks come to the end.

        Collective: as each mode says.
        """

    @abstractmethod
    def update_traces(self, *, failed: bool, collectives_changed: bool) -> None:
        """After the vote: learn from the run. Every rank must call it with the same outcome.

        Args:
            failed: the run is void.
            collectives_changed: on some rank because of the trace.
        """

    @abstractmethod
    def _admit(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> CollectiveSpec:
        """Let a collective be issued, or raise."""

    def _abort(self, reason: Exception) -> Exception:
        self.exit_reason = reason
        return reason

    def _take_interrupted(self) -> CollectiveSpec | None:
        """The collective that this rank has announced or begun, but not issued: memory ran out in it."""
        interrupted, self._issuing = self._issuing, None
        if interrupted is None or sequence_number(interrupted[0].group) != interrupted[1]:
            return None
        return interrupted[0]


class CheckedGuard(CollectiveGuard):
    """Exchange one record before each collective."""

    def __init__(self, traces: TraceCache, plan: object) -> None:
        super().__init__(traces, plan)
        self._run_is_over = False  # all ranks know that the run is over
        self._has_variable_sizes = False
        self._calls: list[CollectiveSpec] = []
        self._call_cache: dict[tuple[object, ...], CollectiveSpec] = {}  # a step has many collectives of few kinds
        self._digest = hashlib.blake2b(digest_size=6)  # of the records of all ranks

    def finish(self) -> None:
        if self.exit_reason is not None:
            raise self.exit_reason
        self._exchange(None)

    def issue_remaining(self) -> None:
        """Collective: the one that this rank had announced when it failed, and one record."""
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

    def _admit(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> CollectiveSpec:
        kind = call_signature(operation, args, group)
        call = self._call_cache.get(kind) or self._call_cache.setdefault(
            kind, describe_collective(operation, args, kwargs, group, kind)
        )
        self._exchange(call)
        self._calls.append(call)
        return call

    def _exchange(self, call: CollectiveSpec | None) -> None:
        """Tell the other ranks of ``call``, or of the end of the run; raise if all ranks must leave."""
        status = _RUNNING_VARIABLE_SIZE if call is not None and call.has_variable_sizes else _RUNNING
        identity = [0, get_dist_info().world_size, 0] if call is None else call.fingerprint()
        self._exchanging = True
        try:
            rows = all_gather_numbers([status, *identity], caller="step")
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
    """Compare each collective with the trace; exchange nothing."""

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
        """Collective: the rest of the trace."""
        if self._take_interrupted() is not None:
            self._issued -= 1
        rest = self._calls[self._issued :]
        for call in rest:
            call.issue_zeros()  # one at a time: there is no memory to spare

    def update_traces(self, *, failed: bool, collectives_changed: bool) -> None:
        if collectives_changed:
            self._traces.drop(self._plan)

    def _admit(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> CollectiveSpec:
        if self._issued == len(self._calls) or call_signature(operation, args, group) != self._calls[self._issued].signature:
            raise self._abort(CollectivesChanged())
        self._issued += 1
        return self._calls[self._issued - 1]


def open_guard(traces: TraceCache, plan: object) -> CollectiveGuard:
    """Begin a run of ``plan`` on this rank. Every rank must, with the same plan and the same traces."""
    trace = traces.find(plan)
    return CheckedGuard(traces, plan) if trace is None else TracedGuard(traces, plan, trace)


def _calls_match(rows: Sequence[Sequence[float]]) -> bool:
    """Return True if all ranks of each group that was announced have announced the same collective of that group."""
    by_group: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        by_group.setdefault(row[1], []).append(row[2:])
    return all(len(members) == members[0][0] and members.count(members[0]) == len(members) for members in by_group.values())


def _mismatch_error(call: CollectiveSpec | None, number: int) -> StepError:
    """The error of ranks whose next collectives do not belong together; the same on all. Collective: an exchange of JSON."""
    mine = "the end of the step" if call is None else str(call)
    said = cast("list[str]", all_gather_json(mine, caller="step"))
    other = next((rank for rank, text in enumerate(said) if text != said[0]), len(said) - 1)
    return StepError(
        f"step: ranks came to different collectives, and none of them was issued: rank 0 to {said[0]}, rank {other} to "
        f"{said[other]}, after {number} that were alike. Run the same modules in the same order on all ranks."
    )
