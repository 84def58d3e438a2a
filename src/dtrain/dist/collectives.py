"""Exchange JSON and numbers between ranks on a gloo group, without pickle, and order the ranks of a node.

Each function is a collective: every rank must call it, in the same order. ``group`` names one of the two gloo groups of
``DistInfo``. Without ``init_dist`` there is one rank, and each function returns at once. If a rank does not call a function in
time, the other ranks raise a ``DistError`` that names the missing rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.dist.context import current_context
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import CheckpointError, ConfigError, DistError, PeerError
from dtrain.typing import Plain

GroupName: TypeAlias = Literal["control", "background"]
# Limit for the JSON of one rank. Larger data belongs into a file.
MAX_JSON_BYTES = 64 * 2**20

# torch 2.13 renamed the function.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_json(obj: Plain, *, group: GroupName = "control", caller: str = "all_gather_json") -> list[Plain]:
    """Gather every rank's ``obj`` on all ranks, in the order of ranks.

    Args:
        obj: plain data.
        group: gloo group that carries the data.
        caller: prefix of error messages.

    Collective: two all-gathers (lengths, then padded bytes).

    Example:
        >>> import dtrain as dt
        >>> dt.dist.all_gather_json({"samples": 7})  # one rank
        [{'samples': 7}]

    Raises:
        ConfigError: ``obj`` is not plain data, or its JSON is larger than 64 MiB.
        PeerError: the same on another rank.
    """
    text, lengths = _exchange_lengths(obj, group, caller)
    return _parse_json(_all_gather_bytes(text, lengths, group, caller))


def gather_json(obj: Plain, *, dst: int = 0, group: GroupName = "control", caller: str = "gather_json") -> list[Plain] | None:
    """Gather every rank's ``obj`` on rank ``dst``, in the order of ranks; return None on the other ranks.

    Args:
        obj: plain data.
        dst: rank that receives the data.
        group: gloo group that carries the data.
        caller: prefix of error messages.

    Collective: an all-gather of lengths, then one gather of padded bytes. Rank ``dst`` holds the largest text once per rank.

    Example:
        >>> import dtrain as dt
        >>> hosts = dt.dist.gather_json({"host": "node-1"})
        >>> if hosts is not None:  # rank 0
        ...     print(hosts)
        [{'host': 'node-1'}]

    Raises:
        ConfigError: ``obj`` is not plain data, its JSON is larger than 64 MiB, or ``dst`` is not a rank.
        PeerError: the same on another rank.
    """
    info = check_rank(caller, "dst", dst)
    text, lengths = _exchange_lengths(obj, group, caller)
    if info.world_size == 1:
        return _parse_json([text])
    padded = _pad_bytes(text, max(lengths))
    texts = [torch.empty_like(padded) for _ in lengths] if info.rank == dst else None
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        dist.gather(padded, texts, dst=dst, group=_group_by_name(info, group))
    return None if texts is None else _parse_json(_trim_padding(texts, lengths))


def broadcast_json(obj: Plain, *, src: int = 0, group: GroupName = "control", caller: str = "broadcast_json") -> Plain:
    """Broadcast the ``obj`` of rank ``src`` to all ranks. The values of the other ranks are ignored.

    Args:
        obj: plain data.
        src: rank that sends the data.
        group: gloo group that carries the data.
        caller: prefix of error messages.

    Collective: an all-gather of lengths, then one broadcast.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.broadcast_json({"run": "baseline"})
        {'run': 'baseline'}

    Raises:
        ConfigError: on rank ``src``, ``obj`` is not plain data or too large; or ``src`` is not a rank.
        PeerError: the same on rank ``src``, raised on the other ranks.
    """
    info = check_rank(caller, "src", src)
    text, lengths = _exchange_lengths(obj if info.rank == src else None, group, caller)
    if info.world_size == 1:
        return _parse_json([text])[0]
    padded = _pad_bytes(text, lengths[src]) if info.rank == src else torch.empty(lengths[src], dtype=torch.uint8, device="cpu")
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        dist.broadcast(padded, src=src, group=_group_by_name(info, group))
    return _parse_json([padded.numpy().tobytes()])[0]


def all_gather_numbers(
    numbers: Sequence[float], *, group: GroupName = "control", caller: str = "all_gather_numbers"
) -> list[list[float]]:
    """Gather every rank's row of numbers on all ranks, in the order of ranks. Fast path for float64 records of fixed length.

    Collective: one all-gather. Every rank must pass the same number of numbers.
    Host sync: none. The numbers are never on a device.
    """
    info = get_dist_info()
    if info.world_size == 1:
        return [[float(number) for number in numbers]]
    mine, rows, sent, received = _number_buffers(group, info.world_size, len(numbers))
    mine[:] = numbers
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        all_gather_single(received, sent, group=_group_by_name(info, group))
    return rows.tolist()  # type: ignore[no-any-return]


def all_gather_record(record: Sequence[float]) -> list[tuple[float, ...]]:
    """Gather every rank's record of a step, and return each field by rank. Early ranks wait here for the last rank.

    Collective: one message per round of ``RecordExchange`` on one node, one all-gather on the control group on several nodes.
    Host sync: none. The numbers are never on a device.
    """
    exchange = current_context().record_exchange
    if exchange is None and get_dist_info().world_size == 1:
        return [(value,) for value in record]
    spans.begin("agree")
    try:
        if exchange is None:
            return list(zip(*all_gather_numbers(record, caller="step"), strict=True))
        with report_missing_ranks("step", group="control"):
            return list(zip(*exchange.all_gather(record), strict=True))
    finally:
        spans.end("agree")


def all_gather_with_timeout(number: int, *, timeout_s: float) -> list[int] | None:
    """Gather every rank's ``number``, in the order of ranks; return None if some rank does not call this in time.

    After a timeout no rank may use the control group.

    Collective: one all-gather on the control group.
    """
    info = get_dist_info()
    sent = torch.tensor([number], dtype=torch.int64, device="cpu")
    received = torch.zeros(info.world_size, dtype=torch.int64, device="cpu")
    work = all_gather_single(received, sent, group=_group_by_name(info, "control"), async_op=True)
    assert work is not None
    try:
        work.wait(timedelta(seconds=timeout_s))
    # gloo raises RuntimeError on a timeout and if a rank is gone.
    except RuntimeError:
        return None
    return [int(value) for value in received]


@lru_cache(maxsize=32)
def _number_buffers(group: GroupName, world_size: int, n: int) -> tuple[Any, Any, Tensor, Tensor]:
    """Return NumPy views of the row to send and of the received rows, and their tensors.

    The buffers are cached because every training step exchanges a record. Reuse is safe: a group belongs to one thread, and a
    call has read its rows before the call returns.
    """
    sent, received = (torch.zeros(size, dtype=torch.float64, device="cpu") for size in (n, world_size * n))
    return sent.numpy(), received.numpy().reshape(world_size, n), sent, received


@contextmanager
def raise_on_all_ranks(caller: str, *, group: GroupName = "control", advice: str = "") -> Iterator[None]:
    """Run a block after which all ranks continue, or all ranks raise.

    Failed ranks raise their own error, an ``OSError`` as a ``CheckpointError`` with ``advice``. The other ranks raise a
    ``PeerError`` that names the first failed rank. The block must contain no other collective.

    Args:
        caller: prefix of error messages.
        group: gloo group that carries the exchange.
        advice: text after the message of an ``OSError``.

    Collective: one exchange of JSON on exit, except after exceptions like KeyboardInterrupt.
    """
    failure: Exception | None = None
    try:
        yield
    except OSError as error:
        failure = CheckpointError(f"{caller}: {error}{advice}").with_traceback(error.__traceback__)
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    raise_if_any_failed(failure, caller=caller, group=group)


def raise_if_any_failed(error: Exception | None, *, caller: str, group: GroupName = "control") -> None:
    """Raise on every rank if any rank passes an ``error``.

    Failed ranks raise their own error. The other ranks raise a ``PeerError`` that names the first failed rank.

    Collective: one exchange of JSON.
    """
    reports = all_gather_json(None if error is None else format_error_line(error), group=group, caller=caller)
    if error is not None:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if failed:
        rank, report = failed[0]
        raise PeerError(f"{caller}: rank {rank} failed ({len(failed)} of {len(reports)} ranks did): {report}")


def broadcast_decision(caller: str, decide: Callable[[], Plain], *, group: GroupName = "control", advice: str = "") -> Plain:
    """Call ``decide`` on rank 0, and return its result on every rank. If ``decide`` raises, all ranks raise.

    Collective: two exchanges of JSON.
    """
    decision: Plain = None
    with raise_on_all_ranks(caller, group=group, advice=advice):
        if get_dist_info().rank == 0:
            decision = decide()
    return broadcast_json(decision, group=group, caller=caller)


def format_error_line(error: BaseException) -> str:
    """Format the class and message of an error on one line of at most 2000 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]


def check_rank(caller: str, name: str, rank: int) -> DistInfo:
    """Return the open ``DistInfo`` after checking that ``rank`` is one of its ranks.

    Raises:
        ConfigError: ``rank`` is out of range; on all ranks, because all ranks pass the same value.
    """
    info = get_dist_info()
    if not 0 <= rank < info.world_size:
        raise ConfigError(
            f"{caller}: {name} must be from 0 to {info.world_size - 1} (the ranks), got {rank}. "
            "Pass a rank of this run; 0 is usual."
        )
    return info


def _exchange_lengths(obj: Plain, group: GroupName, caller: str) -> tuple[bytes, list[int]]:
    """Return this rank's text and the lengths of all texts. Raise on all ranks if a rank has no text."""
    text, error = _encode_json(obj, caller)
    lengths = [
        int(row[0]) for row in all_gather_numbers([len(text) if error is None else -len(text)], group=group, caller=caller)
    ]
    if all(length > 0 for length in lengths):
        return text, lengths
    reports = _all_gather_bytes(text if error is not None else b"", [max(0, -length) for length in lengths], group, caller)
    if error is not None:
        raise error
    rank, report = next((rank, report) for rank, report in enumerate(reports) if report)
    raise PeerError(f"{caller}: rank {rank} failed: {report.decode()}")


def _encode_json(obj: Plain, caller: str) -> tuple[bytes, ConfigError | None]:
    """Encode ``obj`` as JSON. If that fails, return the error as text and as an exception."""
    error: ConfigError
    try:
        text = json.dumps(obj, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        error = ConfigError(
            f"{caller}: takes plain data only: {problem}. Pass numbers, texts, booleans, None, lists and dicts."
        )
    else:
        if len(text) <= MAX_JSON_BYTES:
            return text, None
        error = ConfigError(
            f"{caller}: JSON must have at most {MAX_JSON_BYTES} bytes, got {len(text)}. Put the data into a file."
        )
    return format_error_line(error).encode(), error


def _all_gather_bytes(text: bytes, lengths: list[int], group: GroupName, caller: str) -> list[bytes]:
    info = get_dist_info()
    if info.world_size == 1:
        return [text]
    padded = _pad_bytes(text, max(lengths))
    received = padded.new_empty(len(lengths) * len(padded))
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        all_gather_single(received, padded, group=_group_by_name(info, group))
    return _trim_padding(received.view(len(lengths), -1).unbind(), lengths)


def _pad_bytes(text: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)


def _trim_padding(texts: Sequence[Tensor], lengths: list[int]) -> list[bytes]:
    return [text[:length].numpy().tobytes() for text, length in zip(texts, lengths, strict=True)]


def _parse_json(texts: list[bytes]) -> list[Plain]:
    return [json.loads(text) for text in texts]


def _group_by_name(info: DistInfo, name: GroupName) -> dist.ProcessGroup:
    group = info.control if name == "control" else info.background
    assert group is not None, "several ranks without groups: init_dist makes both"
    return group


@contextmanager
def local_rank_zero_first(caller: str = "local_rank_zero_first") -> Iterator[bool]:
    """Run a block on local rank 0 of each node first, then on the other ranks.

    For work that is done once per node, such as a download or a cache. The block must contain no collective, because its ranks
    are not inside at the same time. The block must end within ``timeout_s`` of ``init_dist``. The context gives True on the
    ranks that run first.

    Args:
        caller: prefix of error messages.

    Collective: one exchange of JSON on the control group, at the end of the block for the ranks that run first, and at its
        beginning for the other ranks.

    Example:
        with dt.dist.local_rank_zero_first("tokenize") as first:
            tokens = tokenize_or_read_cache(path)

    Raises:
        PeerError: the block raised on a rank that runs first (any exception, also Ctrl-C and ``sys.exit``). That rank raises
            its own error. The other ranks do not enter the block.
    """
    first = get_dist_info().local_rank == 0
    if not first:
        _wait_for_first_ranks(caller, None)
    try:
        yield first
    except BaseException as error:
        if first:
            _report_failure(caller, error)
        raise
    if first:
        _wait_for_first_ranks(caller, None)


def _wait_for_first_ranks(caller: str, report: str | None) -> None:
    reports = all_gather_json(report, caller=caller)
    for rank, failure in enumerate(reports):
        if failure is not None:
            raise PeerError(f"{caller}: rank {rank}, which goes first on its node, failed: {failure}")


def _report_failure(caller: str, error: BaseException) -> None:
    """Send the reason to the waiting ranks. The caller raises ``error`` afterwards, even if sending fails."""
    try:
        all_gather_json(format_error_line(error), caller=caller)
    except DistError as failure:
        error.add_note(f"{caller}: could not report the error to the other ranks: {failure}")
