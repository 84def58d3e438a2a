"""Small agreements between ranks: JSON and numbers on a gloo group, never pickle.

Each function is a collective: every rank must call it, in the same order. ``group`` names one of the two gloo groups of
``DistInfo``; without ``init_dist`` there is one rank, and each function returns at once. A rank that does not come is named
in the error (``DistError``) of the others.

``local_rank_zero_first``: one rank of each node prepares what the others then find."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError, DistError, PeerError
from dtrain.typing import Plain

GroupName: TypeAlias = Literal["control", "background"]
MAX_JSON_BYTES = 64 * 2**20  # of one rank's JSON; what is larger belongs into a file

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def all_gather_json(obj: Plain, *, group: GroupName = "control", caller: str = "all_gather_json") -> list[Plain]:
    """Every rank's ``obj``, by rank, on every rank.

    Collective: two all-gathers (lengths, then padded bytes).

    Raises:
        ConfigError: ``obj`` is not plain data, or its JSON is larger than 64 MiB.
        PeerError: so on another rank.
    """
    text, lengths = _exchange_lengths(obj, group, caller)
    return _parse_json(_all_gather_bytes(text, lengths, group, caller))


def gather_json(obj: Plain, *, dst: int = 0, group: GroupName = "control", caller: str = "gather_json") -> list[Plain] | None:
    """Every rank's ``obj``, by rank, on rank ``dst``; None on the others.

    Collective: an all-gather of lengths, then one gather of padded bytes; ``dst`` holds the largest text once per rank.

    Raises:
        ConfigError: ``obj`` is not plain data, its JSON is larger than 64 MiB, or there is no rank ``dst``.
        PeerError: so on another rank.
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
    """The ``obj`` of rank ``src``, on every rank; what the other ranks pass is ignored.

    Collective: an all-gather of lengths, then one broadcast.

    Raises:
        ConfigError: on rank ``src``, ``obj`` is not plain data or too large; or there is no rank ``src``.
        PeerError: so on rank ``src``, seen by the others.
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
    """Every rank's row of numbers, by rank, on every rank. The fast way for a record of fixed length (float64).

    Collective: one all-gather; every rank must pass as many numbers.
    Host sync: none; the numbers never are on a device.
    """
    info = get_dist_info()
    if info.world_size == 1:
        return [[float(number) for number in numbers]]
    mine, rows, sent, received = _number_buffers(group, info.world_size, len(numbers))
    mine[:] = numbers
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        all_gather_single(received, sent, group=_group_by_name(info, group))
    return rows.tolist()  # type: ignore[no-any-return]


def all_gather_with_timeout(number: int, *, timeout_s: float) -> list[int] | None:
    """Every rank's ``number``, by rank; None if some rank does not call this in time. Nobody may use the control group then.

    Collective: one all-gather on the control group, for the ranks that come.
    """
    info = get_dist_info()
    sent = torch.tensor([number], dtype=torch.int64)
    received = torch.zeros(info.world_size, dtype=torch.int64)
    work = all_gather_single(received, sent, group=_group_by_name(info, "control"), async_op=True)
    assert work is not None
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:  # of gloo: in time, or because a rank is gone
        return None
    return [int(value) for value in received]


@lru_cache(maxsize=32)
def _number_buffers(group: GroupName, world_size: int, n: int) -> tuple[Any, Any, Tensor, Tensor]:
    """NumPy views of a row to send and of the rows received, and their tensors; made once, used for every record of ``n``.

    One vote is on the path of every training step. Reuse is safe: a group belongs to one thread, and a call has read its rows
    before it returns.
    """
    sent, received = (torch.zeros(size, dtype=torch.float64, device="cpu") for size in (n, world_size * n))
    return sent.numpy(), received.numpy().reshape(world_size, n), sent, received


def raise_if_any_failed(error: Exception | None, *, caller: str, group: GroupName = "control") -> None:
    """Raise on every rank if any rank came with an ``error``: a failure that depends on the rank is agreed on first.

    The ranks that failed raise their own error, the others a ``PeerError`` that names the first of them.

    Collective: one exchange of JSON.
    """
    reports = all_gather_json(None if error is None else format_error_line(error), group=group, caller=caller)
    if error is not None:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if failed:
        rank, report = failed[0]
        raise PeerError(f"{caller}: rank {rank} failed ({len(failed)} of {len(reports)} ranks did): {report}")


def format_error_line(error: BaseException) -> str:
    """An error as text that can travel: its class and message, on one line of at most 2000 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]


def check_rank(caller: str, name: str, rank: int) -> DistInfo:
    """The open ``DistInfo``, after a check that ``rank`` is one of its ranks.

    Raises:
        ConfigError: it is not; on all ranks alike, since all pass the same.
    """
    info = get_dist_info()
    if not 0 <= rank < info.world_size:
        raise ConfigError(f"{caller}: {name} must be from 0 to {info.world_size - 1} (the ranks), got {rank}")
    return info


def _exchange_lengths(obj: Plain, group: GroupName, caller: str) -> tuple[bytes, list[int]]:
    """This rank's text, and the lengths of all; a rank that has none tells the others why, and all raise."""
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
    """The JSON of ``obj``, or the reason why there is none, as text and as an error."""
    error: ConfigError
    try:
        text = json.dumps(obj, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        error = ConfigError(f"{caller}: takes plain data only: {problem}")
    else:
        if len(text) <= MAX_JSON_BYTES:
            return text, None
        error = ConfigError(f"{caller}: {len(text)} bytes of JSON, at most {MAX_JSON_BYTES} are taken; put it into a file")
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
    """A block that local rank 0 of each node runs first, and the other ranks when all of those are done.

    For what is done once per node and then found by everybody: a download, a cache that is built. The block must hold no
    collective, since its ranks are not in it at the same time. It must end within ``timeout_s`` of ``init_dist``.

        with dt.dist.local_rank_zero_first("tokenise") as first:
            tokens = tokenise_or_read_cache(path)  # first: this rank is one of those that go ahead

    Collective: one exchange of JSON on the control group, at the end of the block for the ranks that go first, and at its
        beginning for the others.

    Raises:
        PeerError: the block raised on a rank that went first (anything, Ctrl-C and ``sys.exit`` too); that rank is named, and
            raises its own error. The others do not enter the block.
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
    """Release the ranks that wait with the reason; ``error`` is raised afterwards, whatever comes of this."""
    try:
        all_gather_json(format_error_line(error), caller=caller)
    except DistError as trouble:
        error.add_note(f"{caller}: the other ranks could not be told: {trouble}")
