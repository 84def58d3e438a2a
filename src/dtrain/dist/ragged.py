"""Gather any number of rows per rank, and differentiate through collectives.

``all_gather_ragged``, ``gather_ragged`` and ``all_gather_by_rank`` send all tensors of a structure as bytes in one collective:
each row is the concatenated bytes of its tensors. Ranks with fewer rows send padding, which is removed.
``all_gather_with_grad`` gathers the rows of one tensor with the exact gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dtrain import spans
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, all_gather_single, check_rank
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.mesh import MODEL_AXES, cpu_group, data_rank
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, PeerError
from dtrain.typing import Plain, is_tensordict

_CALLER = "all_gather_with_grad"
# torch 2.13 renamed the function.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Rows: TypeAlias = Any
"""A tensor ``[n, ...]``, or a mapping with text keys, list, tuple or TensorDict of such tensors with the same ``n``."""


def all_gather_ragged(rows: Rows | None, *, order: Tensor | None = None, mesh: DeviceMesh | None = None) -> Rows:
    """Gather the rows of all ranks on every rank: ``[sum of n, ...]``, in the order of ranks, or sorted by ``order``.

    Args:
        rows: this rank's rows: a tensor ``[n, ...]``, or mappings, lists, tuples or TensorDicts of such tensors with the same
            ``n``. All tensors are on the CPU or all on this rank's device, of any dtype. ``n`` may differ between ranks, down
            to 0. The structure, the dtypes and the other dimensions must be equal on all ranks. None on a rank that has no
            rows and does not know the structure.
        order: ``[n]`` whole numbers to sort the rows by. The indices of the samples give the order of the dataset, with any
            number of ranks.
        mesh: mesh whose ranks along ``cp`` and ``tp`` share a batch, of which only the first rank counts; None counts every
            rank.

    Returns:
        New tensors without gradient, in the structure of ``rows``, on the same kind of device.

    Collective: one exchange of JSON, and one all-gather of ``world_size * max(n)`` rows; on the training group, or for CPU
        tensors that it does not carry on a gloo group of their own.
    Host sync: none.

    Example:
        for indices, batch in loader:
            scores.append(model(batch))
            order.append(indices)
        scores = dt.dist.all_gather_ragged(torch.cat(scores), order=torch.cat(order), mesh=mesh)  # [len(dataset), ...]

    Raises:
        ConfigError: unsupported tensors, tensors that differ between ranks, or no rank has any.
        PeerError: unsupported tensors on another rank.
    """
    return _gather_rows("all_gather_ragged", rows, order, mesh, dst=None).concatenate("all_gather_ragged")


def gather_ragged(
    rows: Rows | None, *, dst: int = 0, order: Tensor | None = None, mesh: DeviceMesh | None = None
) -> Rows | None:
    """Gather the rows of all ranks on rank ``dst``; return None on the other ranks. See ``all_gather_ragged``.

    Args:
        rows: as in ``all_gather_ragged``.
        dst: rank that receives the rows.
        order: as in ``all_gather_ragged``.
        mesh: as in ``all_gather_ragged``.

    Collective: one exchange of JSON, and one gather. Only ``dst`` holds the rows of all ranks.

    Example:
        scores = dt.dist.gather_ragged(scores, order=indices)  # [n, ...] on each rank
        if scores is not None:  # rank 0
            torch.save(scores, "scores.pt")

    Raises:
        ConfigError: as in ``all_gather_ragged``; or ``dst`` is not a rank.
        PeerError: as in ``all_gather_ragged``.
    """
    check_rank("gather_ragged", "dst", dst)
    gathered = _gather_rows("gather_ragged", rows, order, mesh, dst=dst)
    return None if gathered.blocks is None else gathered.concatenate("gather_ragged")


def all_gather_by_rank(rows: Rows | None, *, mesh: DeviceMesh | None = None) -> list[Rows]:
    """Gather the rows of each rank on every rank as a list, in the order of ranks.

    Args:
        rows: as in ``all_gather_ragged``.
        mesh: as in ``all_gather_ragged``. With a mesh, the list is in the order of ``data_rank``.

    Returns:
        One entry per rank, also for ranks without rows; an empty list if no rank has rows.

    Collective: as ``all_gather_ragged``, with the same errors.

    Example:
        lengths = dt.dist.all_gather_by_rank(torch.tensor([len(sample) for sample in samples]))
        print([len(rows) for rows in lengths])  # samples of each rank
    """
    gathered = _gather_rows("all_gather_by_rank", rows, None, mesh, dst=None)
    return [_unpack_rows(gathered.tree, block) for block in gathered.blocks or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """Dtype and row shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GatheredRows:
    """Rows of all ranks as bytes, and their structure. ``blocks`` is None on a rank that receives no rows."""

    tree: Any
    blocks: list[Tensor] | None

    def concatenate(self, caller: str) -> Rows:
        """Return the rows of all ranks in one structure, sorted if the structure has an order."""
        if not self.blocks:
            raise ConfigError(f"{caller}: no rank has any rows. Pass a tensor on at least one rank.")
        return _unpack_rows(self.tree, torch.cat(self.blocks))


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
    tree, device_type = _check_same_structure(caller, reports)
    if tree is None:
        return _GatheredRows(tree=None, blocks=[])
    counts = [report["n"] if report["place"] is not None else 0 for report in reports]
    columns, device = _columns(tree), torch.device("cpu") if device_type == "cpu" else info.device
    # The bytes of all rows: [n, bytes of a row].
    sent = torch.empty(0, sum(column.width for column in columns), dtype=torch.uint8, device=device)
    if leaves:
        bytes_of_leaves = [
            _flatten_copy(leaf.to(device)).view(torch.uint8).view(len(leaf), column.width)
            for leaf, column in zip(leaves, columns, strict=True)
        ]
        sent = torch.cat(bytes_of_leaves, dim=1)
    blocks = _exchange_bytes(caller, sent[: counts[info.rank]], counts, info, dst)
    if blocks is None:
        return _GatheredRows(tree=tree, blocks=None)
    ranks = sorted((report["place"], rank) for rank, report in enumerate(reports) if report["place"] is not None)
    return _GatheredRows(tree=tree, blocks=[blocks[rank] for _, rank in ranks])


def _make_report(
    rows: Rows | None, order: Tensor | None, mesh: DeviceMesh | None, info: DistInfo, leaves: list[Tensor]
) -> dict[str, Plain]:
    """Describe this rank's rows for the other ranks, and append the tensors to ``leaves``."""
    if order is not None and (order.ndim != 1 or order.is_floating_point() or order.is_complex()):
        raise ConfigError(
            f"order must be [n] whole numbers, got {order.dtype} of shape {tuple(order.shape)}. "
            "Pass the int64 indices of the samples of these rows."
        )
    both = {"rows": rows} if order is None else {"rows": rows, "order": order}
    tree = None if rows is None else _describe_structure(both, leaves)
    counts = {len(leaf) for leaf in leaves}
    if len(counts) > 1:
        raise ConfigError(
            f"all tensors must have the same number of rows, got shapes {[tuple(leaf.shape) for leaf in leaves]}. "
            "Give each tensor one row per sample."
        )
    # Keys are sorted, so the order is the first tensor.
    device_types = {leaf.device.type for leaf in (leaves if order is None else leaves[1:])} or {"cpu"}
    if len(device_types) > 1 or not device_types <= {"cpu", info.device.type}:
        raise ConfigError(f"all tensors must be on the CPU or all on {info.device}, got {sorted(device_types)}. Move them.")
    place: int | None = info.rank
    if mesh is not None:
        coordinate = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False)
        # Another rank with the same batch sends the rows of a duplicate.
        is_duplicate = any(index for axis, index in coordinate if axis in MODEL_AXES)
        place = None if is_duplicate else data_rank(mesh)[0]
    return {"tree": tree, "n": counts.pop() if counts else 0, "device": device_types.pop(), "place": place}


def _describe_structure(rows: Rows, leaves: list[Tensor]) -> Plain:
    """Describe the structure of ``rows`` as plain data, and append the tensors to ``leaves``."""
    if isinstance(rows, Tensor):
        # Only dtrain.dist.dtensor may use the attributes of a DTensor.
        if hasattr(rows, "placements"):
            raise ConfigError("takes plain tensors, got a DTensor. Pass this rank's own rows.")
        if rows.dim() == 0 or rows.layout is not torch.strided:
            raise ConfigError(f"takes dense tensors with rows, got shape {tuple(rows.shape)}, {rows.layout}. Stack them first.")
        leaves.append(rows.detach())
        return {"tensor": str(rows.dtype).removeprefix("torch."), "shape": list(rows.shape[1:])}
    if isinstance(rows, Mapping) or is_tensordict(rows):
        # Iterating over a TensorDict gives rows, not keys.
        keys = list(rows.keys())
        if invalid := [key for key in keys if not isinstance(key, str)]:
            raise ConfigError(f"keys must be text, got {invalid[0]!r}. Convert the keys with str().")
        kind = "tensordict" if is_tensordict(rows) else "mapping"
        return {kind: {key: _describe_structure(rows[key], leaves) for key in sorted(keys)}}
    if isinstance(rows, list | tuple):
        return {type(rows).__name__ if type(rows) is list else "tuple": [_describe_structure(item, leaves) for item in rows]}
    raise ConfigError(
        f"takes tensors, and mappings, lists, tuples and TensorDicts of them, got {type(rows).__name__}. "
        "Convert the rows with torch.as_tensor first."
    )


def _check_same_structure(caller: str, reports: list[Any]) -> tuple[Any, str]:
    """Return the common structure and device type of all ranks with rows; the structure is None if no rank has rows."""
    for rank, report in enumerate(reports):
        if report["problem"]:
            raise PeerError(f"{caller}: rank {rank} failed: {report['problem']}")
    with_rows = [(rank, report) for rank, report in enumerate(reports) if report["tree"] is not None]
    if not with_rows:
        return None, "cpu"
    first, shape = with_rows[0]
    for rank, report in with_rows[1:]:
        for key in ("tree", "device"):
            if report[key] != shape[key]:
                raise ConfigError(
                    f"{caller}: ranks differ in their rows: rank {first} {shape[key]}, rank {rank} {report[key]}. Give tensors "
                    "of one structure, dtype and shape after the first axis."
                )
    return shape["tree"], shape["device"]


def _exchange_bytes(caller: str, sent: Tensor, counts: list[int], info: DistInfo, dst: int | None) -> list[Tensor] | None:
    """Return the bytes of every rank, None on a rank that receives no rows."""
    if info.world_size == 1:
        return [sent]
    name, group = ("cpu", cpu_group()) if sent.device.type == "cpu" else ("training", None)
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


def _columns(tree: Any) -> list[_Column]:
    """Return dtype and row shape of each tensor of a described structure, in the order of ``leaves``."""
    (kind, content), *_ = tree.items()
    if kind == "tensor":
        return [_Column(dtype=getattr(torch, content), shape=tuple(tree["shape"]))]
    children = content.values() if isinstance(content, dict) else content
    return [column for child in children for column in _columns(child)]


def _unpack_rows(tree: Any, rows: Tensor) -> Rows:
    """Rebuild the structure from bytes, sorted by the order if the structure has one."""
    columns = _columns(tree)
    slices = rows.split([column.width for column in columns], dim=1)
    leaves = [
        _flatten_copy(x).view(column.dtype).view(len(rows), *column.shape) for x, column in zip(slices, columns, strict=True)
    ]
    structure = _rebuild_structure(tree, iter(leaves), len(rows))
    if "order" not in structure:
        return structure["rows"]
    permutation = structure["order"].argsort(stable=True)
    return _rebuild_structure(tree, iter([leaf[permutation] for leaf in leaves]), len(rows))["rows"]


def _flatten_copy(x: Tensor) -> Tensor:
    """Copy ``x`` to one dimension. A view of a slice in a wider dtype may be misaligned, a copy is aligned."""
    return x.clone(memory_format=torch.contiguous_format).view(-1)


def _rebuild_structure(tree: Any, leaves: Any, n: int) -> Any:
    (kind, content), *_ = tree.items()
    if kind == "tensor":
        return next(leaves)
    if kind in ("mapping", "tensordict"):
        children = {key: _rebuild_structure(child, leaves, n) for key, child in content.items()}
        if kind == "mapping":
            return children
        from tensordict import TensorDict

        return TensorDict(children, batch_size=[n])
    items = [_rebuild_structure(child, leaves, n) for child in content]
    return items if kind == "list" else tuple(items)


def all_gather_with_grad(x: Tensor) -> Tensor:
    """Gather the rows of all ranks as ``[sum of n, ...]``, in the order of ranks, with the exact gradient.

    The gradient is the gradient of the loss *summed* over ranks: a step divides that sum by the global weight. A contrastive
    loss compares this rank's rows with the rows of all ranks. Weighted by this rank's number of rows, such a loss trains like
    one process with the whole batch. Use ``grad_cache_step`` for such losses. In ``microbatch_step`` each microbatch would
    gather only its own rows, and also the padding rows of ranks without samples.

    Args:
        x: ``[n, ...]``, plain, floating, on the device of the training group. ``n`` may differ between ranks, down to 0. The
            other dimensions, the dtype and ``requires_grad`` must be equal on all ranks. A rank without rows must also call
            this function and run backward.

    Collective: a record of three numbers on the control channel, and one all-gather of ``world_size * max(n)`` rows on the
        training group. In backward one reduce-scatter of the same size. Every rank must run backward through the result.
    Host sync: none.

    Example:
        def loss_fn(model, batch):
            queries, keys = model(batch)  # [n, dim] each
            keys = dt.dist.all_gather_with_grad(keys)  # [sum of n, dim]
            return dt.LossSum(total=contrastive_loss(queries, keys), weight=len(queries))

    Raises:
        ConfigError: a DTensor; a dtype that is not floating; no dimension; or dtype, shape or ``requires_grad`` differ between
            ranks; on all ranks.
    """
    problem, mine = "", [-1.0, 0.0, 0.0]
    if not isinstance(x, Tensor):
        problem = f"x must be a tensor, got {type(x).__name__}"
    # Only dtrain.dist.dtensor may use the attributes of a DTensor.
    elif hasattr(x, "placements"):
        problem = "x must be a plain tensor, got a DTensor. Pass this rank's own rows."
    elif not x.is_floating_point() or x.dim() == 0:
        problem = f"x must be a floating tensor with rows, got {x.dtype} of shape {tuple(x.shape)}. Convert labels."
    else:
        # Float64 holds a hash of 53 bits exactly.
        layout_hash = derive_seed(str(x.dtype), *x.shape[1:]) >> 10
        mine = [float(len(x)), float(x.requires_grad and torch.is_grad_enabled()), float(layout_hash)]
    rows = all_gather_numbers(mine, caller=_CALLER)
    if problem:
        raise ConfigError(f"{_CALLER}: {problem}")
    for rank, row in enumerate(rows):
        if row[0] < 0:
            raise ConfigError(f"{_CALLER}: rank {rank} has a tensor that cannot be gathered. See the error of rank {rank}.")
        if row[1:] != mine[1:]:
            difference = "dtype or shape after the first dimension" if row[2] != mine[2] else "requires_grad"
            raise ConfigError(
                f"{_CALLER}: {difference} must be equal on all ranks, got {x.dtype}, {tuple(x.shape)}, "
                f"requires_grad={bool(mine[1])} on this rank. Rank {rank} differs."
            )
    if len(rows) == 1:
        return x.view_as(x)
    return cast(Tensor, _AllGatherRows.apply(x, [int(row[0]) for row in rows]))  # type: ignore[no-untyped-call]


class _AllGatherRows(torch.autograd.Function):
    """All-gather of rows, padded to the largest number of rows of a rank; reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.counts, ctx.rank = counts, get_dist_info().rank
        longest = max(counts)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        everyone = x.new_empty(len(counts) * longest, *x.shape[1:])
        if everyone.numel():
            with report_missing_ranks(_CALLER):
                all_gather_single(everyone, padded)
        blocks = everyone.view(len(counts), longest, *x.shape[1:])
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        longest, row = max(ctx.counts), grad.shape[1:]
        blocks = grad.new_zeros(len(ctx.counts), longest, *row)
        for block, piece in zip(blocks, grad.split(ctx.counts), strict=True):
            block[: len(piece)] = piece
        mine = grad.new_zeros(longest, *row)
        if mine.numel():
            with report_missing_ranks(f"{_CALLER}, backward"):
                _reduce_scatter_single(mine, blocks.view(-1, *row))
        return mine[: ctx.counts[ctx.rank]], None
