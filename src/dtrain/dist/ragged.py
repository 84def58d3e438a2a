"""``all_gather_ragged``, ``gather_ragged`` and ``all_gather_by_rank``: the rows of all ranks, however many each of them has.

Everything travels as bytes, in one collective whatever the number of tensors and their dtypes: a row is the bytes of its part
of each tensor, one after the other. Ranks with fewer rows send padding, which is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain import spans
from dtrain.dist.collectives import all_gather_json, all_gather_single, check_rank
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.mesh import MODEL_AXES, data_rank
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError, PeerError
from dtrain.typing import Plain, is_tensordict

Rows: TypeAlias = Any
"""A tensor ``[n, ...]``; or mappings with text as keys, lists, tuples and TensorDicts of such, all with the same ``n``."""


def all_gather_ragged(rows: Rows | None, *, order: Tensor | None = None, mesh: DeviceMesh | None = None) -> Rows:
    """The rows of all ranks, on every rank: ``[sum of n, ...]``, in the order of ranks or in a given one.

    So predictions of an evaluation come together, whatever share of the samples each rank had::

        scores = dt.dist.all_gather_ragged(torch.cat(scores), order=torch.cat(indices), mesh=mesh)  # [len(dataset), ...]

    Args:
        rows: this rank's: a tensor ``[n, ...]``, or mappings, lists, tuples or TensorDicts of such with the same ``n``, all on
            the CPU or all on this rank's device. ``n`` may differ between ranks, down to 0; all else is the same on all of
            them. Any dtype. None on a rank that has nothing and does not know what the others have.
        order: ``[n]`` whole numbers; rows come sorted by them. Give the samples' indices, and the result is in the dataset's
            order, whatever the number of ranks.
        mesh: of its ranks that work on one batch together (along ``cp`` and ``tp``) the first counts; without it every rank
            does.

    Returns:
        New tensors, in the structure of ``rows``, on the same kind of device; no gradient flows through them.

    Collective: one exchange of JSON, and one all-gather of ``world_size * max(n)`` rows, on the control group for what is on
        the CPU, otherwise on the training group.
    Host sync: none.

    Raises:
        ConfigError: tensors that do not fit the above, or that differ between ranks; no rank has any.
        PeerError: on another rank they do not.
    """
    return _concatenate(_gather_rows("all_gather_ragged", rows, order, mesh, dst=None), "all_gather_ragged")


def gather_ragged(
    rows: Rows | None, *, dst: int = 0, order: Tensor | None = None, mesh: DeviceMesh | None = None
) -> Rows | None:
    """The rows of all ranks on rank ``dst``, None on the others; see ``all_gather_ragged``.

    Collective: one exchange of JSON, and one gather; only ``dst`` holds what ranks send.

    Raises:
        ConfigError: as there; or there is no rank ``dst``.
        PeerError: as there.
    """
    check_rank("gather_ragged", "dst", dst)
    found = _gather_rows("gather_ragged", rows, order, mesh, dst=dst)
    return None if found.blocks is None else _concatenate(found, "gather_ragged")


def all_gather_by_rank(rows: Rows | None, *, mesh: DeviceMesh | None = None) -> list[Rows]:
    """The rows of each rank, by rank (with a mesh, by its place among those that see different data), on every rank.

    Returns:
        One entry a rank, also for those without rows; an empty list when no rank has any.

    Collective: that of ``all_gather_ragged``, whose arguments and errors it has.
    """
    found = _gather_rows("all_gather_by_rank", rows, None, mesh, dst=None)
    return [_unpack_rows(found.tree, block) for block in found.blocks or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A tensor's part of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GatheredRows:
    """The bytes of every rank that counts, by place, and what they are; None on a rank that gets none."""

    tree: Any
    blocks: list[Tensor] | None


def _gather_rows(
    caller: str, rows: Rows | None, order: Tensor | None, mesh: DeviceMesh | None, *, dst: int | None
) -> _GatheredRows:
    info = get_dist_info()
    leaves: list[Tensor] = []
    try:
        report, problem = _make_report(rows, order, mesh, info, leaves), None
    except ConfigError as error:
        report, problem = {}, ConfigError(f"{caller}: {error}")
    reports = cast("list[Any]", all_gather_json({**report, "problem": str(problem or "")}, caller=caller))
    if problem is not None:
        raise problem
    tree, device = _check_same_structure(caller, reports)
    if tree is None:
        return _GatheredRows(tree=None, blocks=[])
    counts = [report["n"] if report["place"] is not None else 0 for report in reports]
    sent = _pack_rows(leaves, _columns(tree), torch.device("cpu") if device == "cpu" else info.device)
    blocks = _exchange_bytes(caller, sent[: counts[info.rank]], counts, info, dst)
    if blocks is None:
        return _GatheredRows(tree=tree, blocks=None)
    ranks = sorted((report["place"], rank) for rank, report in enumerate(reports) if report["place"] is not None)
    return _GatheredRows(tree=tree, blocks=[blocks[rank] for _, rank in ranks])


def _concatenate(found: _GatheredRows, caller: str) -> Rows:
    """All rows, sorted by their order where they have one."""
    if not found.blocks:
        raise ConfigError(f"{caller}: no rank has any rows; it must be given a tensor on one of them at least")
    return _unpack_rows(found.tree, torch.cat(found.blocks))


def _check_same_structure(caller: str, reports: list[Any]) -> tuple[Any, str]:
    """What every rank that has rows says of them, and on which kind of device they are; None if none has."""
    for rank, report in enumerate(reports):
        if report["problem"]:
            raise PeerError(f"{caller}: rank {rank} failed: {report['problem']}")
    known = [(rank, report) for rank, report in enumerate(reports) if report["tree"] is not None]
    if not known:
        return None, "cpu"
    first, shape = known[0]
    for rank, report in known[1:]:
        for what in ("tree", "device"):
            if report[what] != shape[what]:
                raise ConfigError(
                    f"{caller}: ranks differ in what they have: rank {first} {shape[what]}, rank {rank} {report[what]}; give "
                    "tensors of one structure, dtype and shape after the first axis"
                )
    return shape["tree"], shape["device"]


def _exchange_bytes(caller: str, sent: Tensor, counts: list[int], info: DistInfo, dst: int | None) -> list[Tensor] | None:
    """The bytes of every rank; None on a rank that gets none."""
    if info.world_size == 1:
        return [sent]
    name = "control" if sent.device.type == "cpu" else "training"
    group = info.control if name == "control" else None
    padded = sent.new_zeros(max(counts), sent.shape[1])
    padded[: len(sent)] = sent
    wanted = dst is None or dst == info.rank
    received = padded.new_empty(len(counts) if wanted else 0, *padded.shape)
    if padded.numel():
        with spans.outermost_span("collective"), report_missing_ranks(caller, group=name):
            if dst is None:
                all_gather_single(received.view(-1), padded.view(-1), group=group)
            else:
                dist.gather(padded, list(received.unbind()) if wanted else None, dst=dst, group=group)
    return [block[:count] for block, count in zip(received, counts, strict=True)] if wanted else None


def _make_report(
    rows: Rows | None, order: Tensor | None, mesh: DeviceMesh | None, info: DistInfo, leaves: list[Tensor]
) -> dict[str, Plain]:
    """What the other ranks must know of this one's rows; the tensors are appended to ``leaves``."""
    if order is not None and (order.ndim != 1 or order.is_floating_point() or order.is_complex()):
        raise ConfigError(f"order must be [n] whole numbers, got {order.dtype} of shape {tuple(order.shape)}")
    both = {"rows": rows} if order is None else {"rows": rows, "order": order}
    return {
        "tree": None if rows is None else _describe_structure(both, leaves),
        "n": _row_count(leaves),
        "device": _device_type(leaves if order is None else leaves[1:], info),  # keys are sorted: the order is the first
        "place": _output_index(mesh, info),
    }


def _describe_structure(rows: Rows, leaves: list[Tensor]) -> Plain:
    """The structure of ``rows`` as plain data; its tensors are appended to ``leaves``."""
    if isinstance(rows, Tensor):
        if hasattr(rows, "placements"):  # a DTensor, which only dtrain.dtensor looks into
            raise ConfigError("takes plain tensors, got a DTensor; pass this rank's own rows")
        if rows.dim() == 0 or rows.layout is not torch.strided:
            raise ConfigError(f"takes dense tensors with rows, got shape {tuple(rows.shape)}, {rows.layout}; stack them first")
        leaves.append(rows.detach())
        return {"tensor": str(rows.dtype).removeprefix("torch."), "shape": list(rows.shape[1:])}
    if isinstance(rows, Mapping) or is_tensordict(rows):
        keys = list(rows.keys())  # a TensorDict iterates over its rows
        if odd := [key for key in keys if not isinstance(key, str)]:
            raise ConfigError(f"keys must be text, got {odd[0]!r}")
        kind = "tensordict" if is_tensordict(rows) else "mapping"
        return {kind: {key: _describe_structure(rows[key], leaves) for key in sorted(keys)}}
    if isinstance(rows, list | tuple):
        return {type(rows).__name__ if type(rows) is list else "tuple": [_describe_structure(each, leaves) for each in rows]}
    raise ConfigError(f"takes tensors, and mappings, lists, tuples and TensorDicts of them, got {type(rows).__name__}")


def _columns(tree: Any) -> list[_Column]:
    """The tensors of a described structure, in the order of ``leaves``."""
    (kind, content), *_ = tree.items()
    if kind == "tensor":
        return [_Column(dtype=getattr(torch, content), shape=tuple(tree["shape"]))]
    parts = content.values() if isinstance(content, dict) else content
    return [column for part in parts for column in _columns(part)]


def _row_count(leaves: list[Tensor]) -> int:
    heights = {len(leaf) for leaf in leaves}
    if len(heights) > 1:
        raise ConfigError(f"all tensors must have the same number of rows, got shapes {[tuple(leaf.shape) for leaf in leaves]}")
    return heights.pop() if heights else 0


def _device_type(leaves: list[Tensor], info: DistInfo) -> str:
    kinds = {leaf.device.type for leaf in leaves} or {"cpu"}
    if len(kinds) > 1 or not kinds <= {"cpu", info.device.type}:
        raise ConfigError(f"all tensors must be on the CPU or all on {info.device}, got {sorted(kinds)}; move them")
    return kinds.pop()


def _output_index(mesh: DeviceMesh | None, info: DistInfo) -> int | None:
    """Where this rank's rows go among those of the others; None when they are those of a rank beside it."""
    if mesh is None:
        return info.rank
    coordinate = mesh.get_coordinate() or ()
    beside = any(at for name, at in zip(mesh.mesh_dim_names or (), coordinate, strict=False) if name in MODEL_AXES)
    return None if beside else data_rank(mesh)[0]


def _pack_rows(leaves: list[Tensor], columns: list[_Column], device: torch.device) -> Tensor:
    """The bytes of all rows: ``[n, bytes of a row]`` uint8."""
    width = sum(column.width for column in columns)
    if not leaves:
        return torch.empty(0, width, dtype=torch.uint8, device=device)
    parts = [
        _flatten_copy(leaf.to(device)).view(torch.uint8).view(len(leaf), column.width)
        for leaf, column in zip(leaves, columns, strict=True)
    ]
    return torch.cat(parts, dim=1)


def _unpack_rows(tree: Any, rows: Tensor) -> Rows:
    """The structure again, sorted by its order where it has one."""
    columns = _columns(tree)
    parts = rows.split([column.width for column in columns], dim=1)
    leaves = [
        _flatten_copy(part).view(column.dtype).view(len(rows), *column.shape)
        for part, column in zip(parts, columns, strict=True)
    ]
    found = _rebuild_structure(tree, iter(leaves), len(rows))
    if "order" not in found:
        return found["rows"]
    places = found["order"].argsort(stable=True)
    return _rebuild_structure(tree, iter([leaf[places] for leaf in leaves]), len(rows))["rows"]


def _flatten_copy(x: Tensor) -> Tensor:
    """``x`` as one row that can be viewed in any dtype: a copy, as a slice may begin where a wider dtype cannot."""
    return x.clone(memory_format=torch.contiguous_format).view(-1)


def _rebuild_structure(tree: Any, leaves: Any, n: int) -> Any:
    (kind, content), *_ = tree.items()
    if kind == "tensor":
        return next(leaves)
    if kind in ("mapping", "tensordict"):
        parts = {key: _rebuild_structure(part, leaves, n) for key, part in content.items()}
        return parts if kind == "mapping" else _make_tensordict(parts, n)
    each = [_rebuild_structure(part, leaves, n) for part in content]
    return each if kind == "list" else tuple(each)


def _make_tensordict(parts: dict[str, Any], n: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(parts, batch_size=[n])
