"""Exchange JSON and numbers over the control plane, without pickle, reduce tensors over ranks, and order the ranks of a node.

Each function is a collective: every rank must call it, in the same order. ``group`` names a channel of the control plane:
``"control"`` for the main thread, ``"background"`` for checkpoints. Without ``init_dist`` there is one rank, and each function
returns at once. If a rank does not call a function in time, the other ranks raise a ``DistError`` that names the missing rank.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.arguments import format_error_line
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import Channel, ChannelName
from dtrain.dist.control_protocol import RowSpec, RowSummary
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.errors import CheckpointError, ConfigError, DistError, PeerError
from dtrain.launch import heartbeats
from dtrain.typing import Plain

# Limit for the JSON of one rank. Larger data belongs into a file.
MAX_JSON_BYTES = 64 * 2**20

# torch 2.13 renamed the function.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TensorOrNumber = TypeVar("TensorOrNumber", Tensor, float)
_UNSUPPORTED_DTYPES = {torch.bool, torch.complex32, torch.complex64, torch.complex128}


def all_gather_json(obj: Plain, *, group: ChannelName = "control", caller: str = "all_gather_json") -> list[Plain]:
    """Gather every rank's ``obj`` on all ranks, in the order of ranks.

    Args:
        obj: plain data.
        group: channel that carries the data.
        caller: prefix of error messages.

    Collective: one exchange.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.all_gather_json({"samples": 7})  # one rank
        [{'samples': 7}]

    Raises:
        ConfigError: ``obj`` is not plain data, or its JSON is larger than 64 MiB.
        PeerError: the same on another rank.
    """
    text, error = _encode_json(obj, caller)
    return [json.loads(data) for data in _all_gather_texts(text, error, group, caller)]


def gather_json(obj: Plain, *, dst: int = 0, group: ChannelName = "control", caller: str = "gather_json") -> list[Plain] | None:
    """Gather every rank's ``obj`` on rank ``dst``, in the order of ranks; return None on the other ranks.

    Args:
        obj: plain data.
        dst: rank that receives the data.
        group: channel that carries the data.
        caller: prefix of error messages.

    Collective: one small exchange, then one gather. Only rank ``dst`` holds all texts.

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
    text, error = _encode_json(obj, caller)
    # A failed rank sends its error, and the other ranks send nothing.
    _all_gather_texts(b"" if error is None else text, error, group, caller)
    if info.world_size == 1:
        return [json.loads(text)]
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        texts = _channel(group).gather(text, dst, caller=caller)
    return None if texts is None else [json.loads(data) for data in texts]


def broadcast_json(obj: Plain, *, src: int = 0, group: ChannelName = "control", caller: str = "broadcast_json") -> Plain:
    """Broadcast the ``obj`` of rank ``src`` to all ranks. The values of the other ranks are ignored.

    Args:
        obj: plain data.
        src: rank that sends the data.
        group: channel that carries the data.
        caller: prefix of error messages.

    Collective: one exchange.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.broadcast_json({"run": "baseline"})
        {'run': 'baseline'}

    Raises:
        ConfigError: on rank ``src``, ``obj`` is not plain data or too large; or ``src`` is not a rank.
        PeerError: the same on rank ``src``, raised on the other ranks.
    """
    info = check_rank(caller, "src", src)
    text, error = _encode_json(obj, caller) if info.rank == src else (b"", None)
    return json.loads(_all_gather_texts(text, error, group, caller)[src])  # type: ignore[no-any-return]


def all_gather_numbers(
    numbers: Sequence[float], *, group: ChannelName = "control", caller: str = "all_gather_numbers"
) -> list[list[float]]:
    """Gather every rank's row of numbers on all ranks, in the order of ranks. Fast path for float64 records of fixed length.

    Collective: one exchange. Every rank must pass the same number of numbers.
    Host sync: none. The numbers are never on a device.

    Raises:
        DistError: a rank passed another number of numbers.
    """
    row = struct.pack(f"={len(numbers)}d", *numbers)
    if get_dist_info().world_size == 1:
        return [list(map(float, numbers))]
    with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
        rows = _channel(group).all_gather(row, caller=caller)
    if any(len(data) != len(row) for data in rows):
        lengths = [len(data) // 8 for data in rows]
        rank = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise DistError(
            f"{caller}: ranks must pass the same number of numbers, got {lengths[0]} on rank 0 and {lengths[rank]} on rank "
            f"{rank}. Make the rows equally long."
        )
    return [list(struct.unpack(f"={len(numbers)}d", data)) for data in rows]


def reduce_record(record: Sequence[float], spec: RowSpec) -> tuple[RowSummary, list[tuple[float, ...]] | None]:
    """Return the summary of the records of all ranks; on one node also all records. Early ranks wait here for the last rank.

    Collective: one exchange, of a size that does not depend on the number of ranks.
    Host sync: none. The numbers are never on a device.
    """
    if get_dist_info().world_size == 1:
        rows = [tuple(record)]
        return spec.summarize(rows), rows
    spans.begin("agree")
    try:
        with report_missing_ranks("step", group="control"):
            return _channel("control").reduce_rows(record, spec, caller="step")
    finally:
        spans.end("agree")


def all_gather_with_timeout(number: int, *, timeout_s: float) -> list[int] | None:
    """Gather every rank's ``number``, in the order of ranks; return None if some rank does not call this in time.

    After a timeout the control channel is closed.

    Collective: one exchange on the control channel.
    """
    if get_dist_info().world_size == 1:
        return [number]
    try:
        rows = _channel("control").all_gather(struct.pack("=q", number), caller="compare units", timeout_s=timeout_s)
    # A rank is late or gone, or it is in another exchange.
    except (dist.DistNetworkError, DistError) as error:
        if (incidents := current_context().incidents) is not None:
            incidents.note_channel_failure("control", error)
        return None
    return [struct.unpack("=q", row)[0] for row in rows]


@contextmanager
def raise_on_all_ranks(caller: str, *, group: ChannelName = "control", advice: str = "") -> Iterator[None]:
    """Run a block after which all ranks continue, or all ranks raise.

    Failed ranks raise their own error, an ``OSError`` as a ``CheckpointError`` with ``advice``. The other ranks raise a
    ``PeerError`` that names the first failed rank. The block must contain no other collective.

    Args:
        caller: prefix of error messages.
        group: channel that carries the exchange.
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


def raise_if_any_failed(error: Exception | None, *, caller: str, group: ChannelName = "control") -> None:
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


def broadcast_decision(caller: str, decide: Callable[[], Plain], *, group: ChannelName = "control", advice: str = "") -> Plain:
    """Call ``decide`` on rank 0, and return its result on every rank. If ``decide`` raises, all ranks raise.

    Collective: two exchanges of JSON.
    """
    decision: Plain = None
    with raise_on_all_ranks(caller, group=group, advice=advice):
        if get_dist_info().rank == 0:
            decision = decide()
    return broadcast_json(decision, group=group, caller=caller)


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


def _all_gather_texts(text: bytes, error: ConfigError | None, group: ChannelName, caller: str) -> list[bytes]:
    """Return the texts of all ranks. If a rank has an ``error``, whose text it sends, raise on all ranks."""
    if get_dist_info().world_size == 1:
        texts = [text]
    else:
        with spans.outermost_span("collective"), report_missing_ranks(caller, group=group):
            messages = _channel(group).all_gather((b"-" if error else b"+") + text, caller=caller)
        texts = [text[1:] for text in messages]
        failed = next((rank for rank, text in enumerate(messages) if text[:1] == b"-"), None)
        if error is None and failed is not None:
            raise PeerError(f"{caller}: rank {failed} failed: {texts[failed].decode()}")
    if error is not None:
        raise error
    return texts


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


def _channel(name: ChannelName) -> Channel:
    plane = current_context().control_plane
    if plane is None:
        raise DistError("dist: the control plane is closed in this process. Exchange values in the process of the rank only.")
    return plane[name]


@contextmanager
def local_rank_zero_first(caller: str = "local_rank_zero_first") -> Iterator[bool]:
    """Run a block on local rank 0 of each node first, then on the other ranks.

    For work that is done once per node, such as a download or a cache. The block must contain no collective, because its ranks
    are not inside at the same time. The block must end within ``timeout_s`` of ``init_dist``. The context gives True on the
    ranks that run first.

    Args:
        caller: prefix of error messages.

    Collective: one exchange of JSON on the control channel, at the end of the block for the ranks that run first, and at its
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
        _wait_for_first_ranks(caller)
    try:
        yield first
    except BaseException as error:
        if first:
            try:
                all_gather_json(format_error_line(error), caller=caller)
            except DistError as failure:
                error.add_note(f"{caller}: could not report the error to the other ranks: {failure}")
        raise
    if first:
        _wait_for_first_ranks(caller)


def _wait_for_first_ranks(caller: str) -> None:
    for rank, failure in enumerate(all_gather_json(None, caller=caller)):
        if failure is not None:
            raise PeerError(f"{caller}: rank {rank}, which goes first on its node, failed: {failure}")


@overload
def reduce_sum(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_sum(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_sum(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Sum ``x`` over all ranks.

    Args:
        x: plain tensor of one shape and dtype on every rank, floating or integer, on the device of the training group; or a
            Python number. ``x`` is not changed, and no gradient flows through the result.
        dst: rank that receives the result; None gives the result to all ranks.

    Returns:
        A new tensor of ``x``'s shape and dtype, on its device. For a number a float, exact for integers below 2**53. None on
        ranks other than ``dst``.

    Collective: for a tensor one all-reduce, with ``dst`` one reduce, on the training group. For a number one all-gather of one
        float64 on the control channel.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_sum(2.5)  # one rank
        2.5

    Raises:
        ConfigError: a DTensor, a tensor that is not dense, bool, complex, or not a number; or ``dst`` is not a rank.
    """
    return _reduce("reduce_sum", x, dst, dist.ReduceOp.SUM)


@overload
def reduce_mean(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_mean(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_mean(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Average ``x`` over all ranks, each rank counted once; see ``reduce_sum``.

    If ranks have different numbers of samples, the mean of means is not the mean over samples. Then sum totals and weights with
    ``reduce_sum`` and divide, or use ``reduce_metrics``.

    Args:
        x: as in ``reduce_sum``, but not an integer tensor.
        dst: as in ``reduce_sum``.

    Collective: as ``reduce_sum``.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_mean(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])

    Raises:
        ConfigError: as in ``reduce_sum``; or an integer tensor, whose mean would need another dtype.
    """
    if isinstance(x, Tensor) and not (x.is_floating_point() or x.dtype in _UNSUPPORTED_DTYPES):
        raise ConfigError(f"reduce_mean: the mean of {x.dtype} has no dtype. Convert x first, for example x.double().")
    total = _reduce("reduce_mean", x, dst, dist.ReduceOp.SUM)
    world = check_rank("reduce_mean", "dst", 0).world_size
    return total if total is None else total / world


@overload
def reduce_max(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_max(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_max(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Return the elementwise maximum of ``x`` over all ranks; see ``reduce_sum``. NaN on any rank gives NaN.

    Args:
        x: as in ``reduce_sum``.
        dst: as in ``reduce_sum``.

    Collective: as ``reduce_sum``, but twice the size for a floating tensor. The second half marks NaN, because backends differ
        in the maximum of NaN.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_max(7)
        7.0

    Raises:
        ConfigError: as in ``reduce_sum``.
    """
    return _reduce("reduce_max", x, dst, dist.ReduceOp.MAX)


def _reduce(caller: str, x: Tensor | float, dst: int | None, op: dist.ReduceOp.RedOpType) -> Tensor | float | None:
    info = check_rank(caller, "dst", 0 if dst is None else dst)
    receives = dst is None or dst == info.rank
    heartbeats.heartbeat(caller)
    if not isinstance(x, Tensor):
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise ConfigError(
                f"{caller}: x must be a tensor or a number, got {type(x).__name__}. "
                "Convert the value with torch.as_tensor first."
            )
        numbers = [row[0] for row in all_gather_numbers([x], caller=caller)]
        has_nan = any(math.isnan(number) for number in numbers)
        result = sum(numbers) if op == dist.ReduceOp.SUM else math.nan if has_nan else max(numbers)
        return result if receives else None
    # Only dtrain.dist.dtensor may use the attributes of a DTensor.
    if hasattr(x, "placements"):
        raise ConfigError(f"{caller}: x must be a plain tensor, got a DTensor. Pass x.full_tensor() or x.to_local().")
    if x.dtype in _UNSUPPORTED_DTYPES:
        raise ConfigError(f"{caller}: x must be a floating or integer tensor, got {x.dtype}. Convert x, for example x.int().")
    if x.layout is not torch.strided:
        raise ConfigError(f"{caller}: x must be a dense tensor, got {x.layout}. Pass x.to_dense().")
    x = x.detach()
    marks_nan = op == dist.ReduceOp.MAX and x.is_floating_point()
    if marks_nan:
        buffer = torch.stack([x.masked_fill(x.isnan(), -math.inf), x.isnan().to(x.dtype)])
    else:
        buffer = x.clone(memory_format=torch.contiguous_format)
    if info.world_size > 1 and buffer.numel():
        with spans.outermost_span("collective"), report_missing_ranks(caller):
            if dst is None:
                dist.all_reduce(buffer, op)
            else:
                dist.reduce(buffer, dst, op)
    if not receives:
        return None
    return buffer[0].masked_fill(buffer[1] > 0, math.nan) if marks_nan else buffer
