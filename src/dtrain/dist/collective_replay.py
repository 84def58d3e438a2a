"""Keep the collectives of all ranks paired when a rank fails in the middle of a step.

A rank that leaves its step early must not leave its peers waiting. Its peers must not pair with one of its later collectives.
A guarded run prevents both. The guard intercepts every collective of the process, in one of two modes:

*Checked*. Before each collective the ranks exchange a record on the control channel: a failure of this rank, or the collective
that this rank is about to issue. If a rank has failed, all ranks leave before the collective is issued. A collective is issued
once all ranks of its group have announced it. The other ranks announce their own again. If no group is complete, all ranks
raise. If the run succeeds on all ranks, the guard stores its sequence of collectives: the *trace* of the plan.

*Traced*. If all ranks hold the traces of the same checked runs, the next run of that plan exchanges nothing. Each rank compares
each collective with the trace before issuing the collective. A rank aborts the model's code if the rank fails, or if its next
collective differs from the trace. Then the rank issues the rest of the trace with zeros. So each rank issues exactly the trace,
and a wrong pairing cannot occur. The exchange after the run tells all ranks that the run is void.

A trace does not have to predict the plan correctly. If the trace is wrong, the run is void, the trace is dropped, and the run
is repeated in checked mode. For example, FSDP2 gathers different units in later microbatches and in steps of more microbatches,
because each backward also prefetches for the next forward.

``CollectiveInterceptor`` runs Python code before each collective of the process, and ``OpObserver`` before each operation of a
thread. A ``CollectiveSpec`` describes a collective without its tensors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.incident import is_collective_error
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed
from dtrain.errors import PeerError, StepError

# Plans. Ragged batches make one plan for each number of microbatches.
_MAX_TRACES = 32
# Wrong traces before every run of a model is checked.
_MAX_WRONG_TRACES = 5
_RUNNING, _RUNNING_VARIABLE_SIZE, _FAILED = range(3)
# Numbers in place of a group's, for records of all ranks that announce no collective.
_END_OF_RUN, _EVENT = 0, 1
EQUAL_MICROBATCHES_ADVICE = (
    "A rank without a further microbatch runs no forward, so it takes part in no collective of the loss or the model's own. "
    "Give all ranks equal numbers of microbatches, or run the same modules in the same order on all ranks."
)
_RUN_EQUALLY = "Run the same modules in the same order on all ranks."
# Float64 holds all smaller whole numbers exactly.
FLOAT64_EXACT = 2**52
# Operations whose tensor sizes may differ between ranks. A run with such an operation has no trace.
_VARIABLE_SIZE_OPS = {
    "allgather_",
    "allgather_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_scatter_",
    "scatter_",
    "send",
}
_POINT_TO_POINT_OPS = {"recv_", "recv_any_source_", "send"}
OpCallback = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Called with the operation, its arguments and its keyword arguments."""


IssueFn = Callable[[], Any]
"""Issues the intercepted collective."""


CollectiveListener = Callable[[Any, tuple[Any, ...], dict[str, Any], IssueFn], Any]
"""Called with a c10d operation, its arguments, its keyword arguments, and the function that issues the collective. Returns the
result of the collective."""


class PeerFailed(Exception):  # internal: users never see it
    """Another rank, ``rank``, reported a failure before a collective that this rank was about to issue."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} failed")
        self.rank = rank


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
        digests = [trace.digest for trace in self._traces.values()]
        return 1 + derive_seed(*conditions, int(self.always_check), *digests) % (FLOAT64_EXACT - 1)

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
    """Guard that exchanges one record before each collective.

    Args:
        advice: last sentence of the error for collectives that do not match.
    """

    def __init__(self, traces: TraceCache, plan: object, advice: str = _RUN_EQUALLY) -> None:
        super().__init__(traces, plan)
        self._advice = advice
        # True once all ranks know that the run is over.
        self._run_is_over = False
        self._has_variable_sizes = False
        self._calls: list[CollectiveSpec] = []
        # A step has many collectives of few signatures.
        self._call_cache: dict[tuple[object, ...], CollectiveSpec] = {}
        # Digest of the records of all ranks.
        self._digest = hashlib.blake2b(digest_size=6)

    def finish(self) -> None:
        self._exchange([_RUNNING, _END_OF_RUN, get_dist_info().world_size, 0], "the end of the step")

    def exchange_event(self, code: int, description: str) -> list[int]:
        """Return the ``code`` of every rank, once all ranks have called. Ranks may issue other collectives before the call.

        Collective: one record, and one more for each collective that other ranks issue before.

        Raises:
            PeerFailed: another rank failed.
            StepError: other ranks are about to issue a collective in which a rank is missing; on all ranks.
        """
        row = [_RUNNING, _EVENT, get_dist_info().world_size, code]
        return [int(row[3]) for row in self._exchange(row, description)]

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
        status = _RUNNING_VARIABLE_SIZE if call.has_variable_sizes else _RUNNING
        self._exchange([status, *call.fingerprint()], str(call))
        self._calls.append(call)
        return call

    def _exchange(self, mine: Sequence[float], description: str) -> list[list[float]]:
        """Announce ``mine`` until all ranks of its group have, and return all records. Raise if all ranks must leave."""
        if self.exit_reason is not None:
            raise self.exit_reason
        while True:
            self._exchanging = True
            try:
                rows = all_gather_numbers(mine, caller="step")
                failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
                complete = _complete_groups(rows)
                if failed or not complete:
                    self._run_is_over = True
                    raise self._abort(PeerFailed(failed[0]) if failed else self._mismatch_error(description))
            finally:
                self._exchanging = False
            self._has_variable_sizes |= any(row[0] == _RUNNING_VARIABLE_SIZE for row in rows)
            for row in rows:
                self._digest.update(array("d", row).tobytes())
            if mine[1] in complete:
                return rows

    def _mismatch_error(self, description: str) -> StepError:
        """Make the error for ranks whose next collectives do not match, equal on all ranks. Collective: an exchange of JSON."""
        announced = cast("list[str]", all_gather_json(description, caller="step"))
        other = next((rank for rank, text in enumerate(announced) if text != announced[0]), len(announced) - 1)
        return StepError(
            f"step: ranks were about to issue different collectives, and none was issued: rank 0 {announced[0]}, rank {other} "
            f"{announced[other]}, after {len(self._calls)} equal collectives. {self._advice}"
        )


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


@contextmanager
def check_collectives(caller: str, advice: str) -> Iterator[CheckedGuard]:
    """Check each collective of the context before all ranks issue it, so that a rank that would be missing is reported.

    Collective: one record before each collective, and one at the end.

    Raises:
        StepError: ranks are about to issue different collectives; on all ranks, with ``advice``.
        PeerError: the context raised on another rank. The rank raises its own error.
    """
    guard = CheckedGuard(TraceCache(always_check=True), None, advice)
    try:
        with guard.intercept():
            yield guard
            guard.finish()
    except Exception as error:
        if is_collective_error(error):
            raise
        # The loss may have replaced the reason by an error of its own.
        reason = guard.exit_reason or error
        guard.issue_remaining()
        if isinstance(reason, PeerFailed):
            raise PeerError(f"{caller}: rank {reason.rank} failed. See its own error.") from None
        raise reason from None if reason is guard.exit_reason else reason.__cause__


def _complete_groups(rows: Sequence[Sequence[float]]) -> set[float]:
    """Return the announced groups all of whose ranks have announced the same collective."""
    by_group: dict[float, list[Sequence[float]]] = {}
    for row in rows:
        by_group.setdefault(row[1], []).append(row[2:])
    return {
        group
        for group, members in by_group.items()
        if len(members) == members[0][0] and (group == _EVENT or members.count(members[0]) == len(members))
    }


class OpObserver(TorchDispatchMode):
    """Context manager that calls ``callback`` before each operation of this thread, and of backwards started in this thread."""

    # torch refuses compiled code inside of a mode without this attribute.
    supports_higher_order_operators = True

    def __init__(self, callback: OpCallback) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callback = callback

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator) or FakeTensor in types:
            # Compiled code, or DTensor's shape inference, which computes nothing.
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A tensor subclass such as DTensor unpacks itself first. The operations on its parts then reach this method.
            return NotImplemented
        self._callback(func, args, kwargs)
        return func(*args, **kwargs)


def is_collective(func: Any) -> bool:
    """Return True if ``func`` is in a namespace of torch's collectives. Some operations there do not communicate."""
    return func.namespace in ("c10d", "_c10d_functional")


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}


def group_from_arguments(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group among the named arguments of a c10d or functional collective, or None."""
    handle = arguments.get("process_group", arguments.get("group_name"))
    if handle is None or isinstance(handle, dist.ProcessGroup):
        return handle
    by_name: Any = dist.distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = by_name(handle) if isinstance(handle, str) else dist.ProcessGroup.unbox(handle)
    return group


class CollectiveInterceptor:
    """Hook that runs Python code before every c10d operation of this process, on any thread.

    A ``TorchDispatchMode`` adds microseconds to every operation. This hook adds time only to collectives: collectives of
    ``torch.distributed``, functional collectives, and collectives issued by C++ code. ``get_interceptor`` returns the only one.
    """

    def __init__(self) -> None:
        self._listener: CollectiveListener | None = None
        self._library = torch.library.Library("c10d", "IMPL")
        names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
        packets = [getattr(torch.ops.c10d, name.removeprefix("c10d::")) for name in sorted(names)]
        for operation in [getattr(packet, overload) for packet in packets for overload in packet.overloads()]:
            # Operations without a group do not communicate.
            if any(argument.name == "process_group" for argument in operation._schema.arguments):
                self._library.impl(operation, self._make_kernel(operation), "BackendSelect", with_keyset=True)

    @contextmanager
    def listen(self, listener: CollectiveListener) -> Iterator[None]:
        """Call ``listener`` before every c10d operation inside of the context. Mutates: this interceptor."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def _make_kernel(self, operation: Any) -> Callable[..., Any]:
        here = torch._C.DispatchKey.BackendSelect

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            def issue() -> Any:
                return operation.redispatch(keyset.remove(here), *args, **kwargs)

            listener = self._listener
            return issue() if listener is None else listener(operation, args, kwargs, issue)

        return kernel


@lru_cache(maxsize=1)
def get_interceptor() -> CollectiveInterceptor:
    """Return the interceptor of this process. The first call installs the interceptor permanently."""
    return CollectiveInterceptor()


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """Shape, dtype and device of a tensor argument of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveSpec:
    """Description of one collective without its tensors.

    Args:
        operation: c10d operation.
        args: arguments, each tensor replaced by its shape, dtype and device.
        group: process group.
        signature: operation, group, root, shapes, dtypes, devices and sizes of blocks. Collectives with equal signatures are
            interchangeable.
    """

    operation: Any
    args: tuple[Any, ...]
    group: dist.ProcessGroup
    signature: tuple[object, ...]

    def issue_zeros(self) -> None:
        """Issue the collective with zeros and wait for the result. Collective."""
        _wait_for(
            self.operation(*tree_map(lambda value: value.zeros() if isinstance(value, _TensorSpec) else value, self.args))
        )

    @property
    def has_variable_sizes(self) -> bool:
        """True if ranks may pass tensors of different sizes."""
        name = _op_name(self.operation)
        # Without sizes of the blocks all ranks pass equal blocks.
        is_even = name == "alltoall_base_" and not any(isinstance(value, list) and value for value in self.args)
        return name in _VARIABLE_SIZE_OPS and not is_even

    def fingerprint(self) -> list[float]:
        """Return numbers for group, group size and call, equal on all ranks of the group if their collectives match."""
        name = _op_name(self.operation)
        call = (
            "point to point"
            if name in _POINT_TO_POINT_OPS
            else name
            if self.has_variable_sizes
            else f"{name} {self.signature[2:]}"
        )
        return [derive_seed(self.group.group_name) % FLOAT64_EXACT, self.group.size(), derive_seed(call) % FLOAT64_EXACT]

    def __str__(self) -> str:
        specs: list[_TensorSpec] = []
        tree_map(lambda value: specs.append(value) if isinstance(value, _TensorSpec) else None, self.args)
        sizes = ", ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
        return f"{_op_name(self.operation).strip('_')} of {sizes} in a group of {self.group.size()}"


@lru_cache(maxsize=64)
def _op_name(operation: Any) -> str:
    return str(operation.name()).removeprefix("c10d::")


@lru_cache(maxsize=64)
def _argument_positions(operation: Any) -> tuple[int, int | None]:
    """Return the positions of the group and of the root among the arguments of ``operation``."""
    names = [argument.name for argument in operation._schema.arguments]
    return names.index("process_group"), names.index("root_rank") if "root_rank" in names else None


def group_from_call(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group of a collective."""
    position, _ = _argument_positions(operation)
    handle: Any = args[position] if position < len(args) else kwargs["process_group"]
    return handle if isinstance(handle, dist.ProcessGroup) else dist.ProcessGroup.unbox(handle)


def call_signature(operation: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[object, ...]:
    """Return the signature of a collective; see ``CollectiveSpec``. Fast, because every collective of a step needs one."""
    _, root = _argument_positions(operation)
    signature: list[object] = [operation, group.group_name, None if root is None else args[root]]
    for value in args:
        _add_tensors(signature, value)
    return tuple(signature)


def _add_tensors(signature: list[object], value: Any) -> None:
    if isinstance(value, Tensor):
        signature += (tuple(value.shape), value.dtype, value.device.type)
    elif isinstance(value, list | tuple):
        for item in value:
            # Sizes of the blocks of an all-to-all.
            if isinstance(item, int):
                signature.append(item)
            else:
                _add_tensors(signature, item)


def describe_collective(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, signature: tuple[object, ...]
) -> CollectiveSpec:
    """Describe a collective as a ``CollectiveSpec``."""
    names = [argument.name for argument in operation._schema.arguments]
    whole = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
    described = tree_map(lambda v: _TensorSpec(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else v, whole)
    return CollectiveSpec(operation, described, group, signature)


def sequence_number(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has issued on ``group``. torch's type stubs lack the method."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _wait_for(result: Any) -> None:
    """Wait for an issued collective, so that its tensors stay alive until then."""
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, list | tuple):
            _wait_for(value)
