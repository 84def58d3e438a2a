"""Describe the sharding of a model as a table of units, bytes, dtypes and placements: ``describe``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from dtrain.arguments import format_bytes, format_count
from dtrain.dist.dtensor import describe_placement, to_local
from dtrain.fqn import modules_by_fqn, parameters_by_fqn
from dtrain.shard.fsdp2_private import compute_dtypes, fsdp_param_groups, sharded_params
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.spec import ShardSpec, get_spec

_HEAD = ("unit", "class", "tensors", "parameters", "bytes", "bytes here", "stored", "computed", "reduced", "placement")


def describe(model: nn.Module) -> str:
    """Return a table of the model's units, with parameters, bytes, dtypes, placements and totals.

    The table has one row per unit, a row for ignored parameters and a row for buffers. ``bytes`` counts full tensors. ``bytes
    here`` counts the storage of this rank between steps. ``computed`` and ``reduced`` are the dtypes of forward and of gradient
    reduction. A plain or replicated model without units is one row.

    >>> import dtrain as dt
    >>> print(dt.describe(torch.nn.Linear(2, 3)))
    plain model
    unit   class   tensors  parameters  bytes  bytes here  stored   computed  reduced  placement
    model  Linear        2           9   36 B        36 B  float32  float32   -        whole
    total                2           9   36 B        36 B

    Collective: none. Host sync: none.
    """
    spec = get_spec(model)
    rows = list(_unit_rows(model))
    is_sharded = spec.mesh is not None
    reducer = grad_sync_of(model).reducer
    has_units = is_sharded and reducer is None
    whole = {name: p for name, p in parameters_by_fqn(model)[0].items() if not has_units or name in spec.ignored_params}
    unsharded = list(whole.values())
    if unsharded:
        label = ("ignored", "") if has_units else ("model", type(model).__name__)
        reduced = _dtypes(unsharded) if is_sharded else "-"
        if reducer is not None:
            reduced = ", ".join({_short(reducer.reduce_dtype(name, param)): None for name, param in whole.items()})
        rows.append(_row(*label, unsharded, computed=_dtypes(unsharded), reduced=reduced))
    params = [*(p for group in fsdp_param_groups(model) for p in sharded_params(group)), *unsharded]
    buffers = list(model.buffers())
    if buffers:
        rows.append(_row("buffers", "", buffers, computed="", reduced=_format_choices(spec) if is_sharded else "-"))
    total = _row("total", "", [*params, *buffers], computed="", reduced="")
    rows.append((*total[:6], "", "", "", ""))
    if spec.mesh is None:
        title = "plain model"
    else:
        shape = ", ".join(f"{name}={size}" for name, size in zip(spec.mesh.mesh_dim_names or (), spec.mesh.shape, strict=False))
        title = f"{spec.strategy} over {format_count(spec.data_ranks, 'rank')} ({shape}), accumulate={spec.accumulate}"
        title += f", buffers={_format_choices(spec)}"
        title += ", offload=params" if spec.compute_device else ""
    return "\n".join([title, *_table([_HEAD, *rows])])


def _format_choices(spec: ShardSpec) -> str:
    return ", ".join(dict.fromkeys(spec.buffers.values())) if isinstance(spec.buffers, Mapping) else spec.buffers or "broadcast"


def _unit_rows(model: nn.Module) -> Iterable[tuple[str, ...]]:
    modules = {id(module): (name or "model", type(module).__name__) for name, module in modules_by_fqn(model)}
    for group in fsdp_param_groups(model):
        labels = [modules.get(id(module), ("model", type(module).__name__)) for module in group.modules]
        compute, reduce = compute_dtypes(group)
        yield _row(
            " + ".join(name for name, _ in labels),
            " + ".join(kind.removeprefix("FSDP") for _, kind in labels),
            sharded_params(group),
            computed=_short(compute),
            reduced=_short(reduce),
        )


def _row(name: str, kind: str, tensors: Sequence[Tensor], *, computed: str, reduced: str) -> tuple[str, ...]:
    count = sum(tensor.numel() for tensor in tensors)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    local = sum(to_local(tensor).numel() * tensor.element_size() for tensor in tensors)
    places = ", ".join(dict.fromkeys(describe_placement(tensor) for tensor in tensors))
    return (
        name,
        kind,
        str(len(tensors)),
        f"{count:,}",
        format_bytes(total),
        format_bytes(local),
        _dtypes(tensors),
        computed,
        reduced,
        places,
    )


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(dict.fromkeys(_short(tensor.dtype) for tensor in tensors))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numbers = {2, 3, 4, 5}
    return [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
