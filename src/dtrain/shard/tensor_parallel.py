"""``plan=``: layers cut over the ``tp`` axis by torch's own styles, before FSDP2 cuts what they leave to each rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from dtrain.dist.mesh import MODEL_AXES, axis_size
from dtrain.dtensor import chunks_per_dim, describe_placement, is_dtensor
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn

TensorParallelPlan: TypeAlias = "Mapping[str, ParallelStyle]"
"""Names of modules (patterns, as in ``blocks``; ``""`` is the model itself) -> how they are cut, applied in this order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedModule:
    """One module of a plan."""

    name: str
    module: nn.Module
    style: ParallelStyle


def resolve_tp_plan(model: nn.Module, plan: TensorParallelPlan | None, mesh: DeviceMesh) -> list[PlannedModule]:
    """The modules that ``plan`` cuts over the ``tp`` axis of ``mesh``, in order; none without a plan. A pure function.

    Raises:
        ConfigError: a plan without a ``tp`` axis, or the axis without a plan; a mesh whose ``cp`` and ``tp`` are not its last
            axes; a name that no module has; something that is no ``ParallelStyle``.
    """
    _check_axes(mesh)
    ranks = axis_size(mesh, "tp")
    if not plan:
        if ranks > 1:
            raise ConfigError(
                f"shard_model: the mesh has tp={ranks}, but nothing says how layers are cut over it; pass plan=, or build the "
                "mesh without tp"
            )
        return []
    if not isinstance(plan, Mapping):
        raise ConfigError(f"shard_model: plan must be a mapping of module names to styles, got {type(plan).__name__}")
    if ranks == 1:
        raise ConfigError(
            f"shard_model: plan needs a mesh with a tp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}; e.g. dt.build_mesh(tp=2)"
        )
    found: list[PlannedModule] = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"shard_model: plan[{pattern!r}] must be a ParallelStyle, got {style!r}; e.g. ColwiseParallel() of "
                "torch.distributed.tensor.parallel"
            )
        fits = compile_patterns([pattern], caller="shard_model: plan")
        matches = {id(module): (name, module) for name, module in modules_by_fqn(model, include_duplicates=True) if fits(name)}
        if not matches:
            raise ConfigError(f"shard_model: plan names {pattern!r}, but the model has no such module")
        found += [PlannedModule(name=name, module=module, style=style) for name, module in matches.values()]
    return found


def _check_axes(mesh: DeviceMesh) -> None:
    """Refuse a mesh in which the ranks of one batch are no neighbours: the step counts each batch once by their order."""
    names = mesh.mesh_dim_names or ()
    inner = [name for name in names if name in MODEL_AXES]
    if inner and (list(names[-len(inner) :]) != sorted(inner) or mesh.mesh.flatten().tolist() != list(range(mesh.size()))):
        raise ConfigError(
            f"shard_model: cp and tp must be the last axes of a mesh of all ranks in order, got {list(names)}; "
            "use dt.build_mesh"
        )


def format_tp_plan(planned: Sequence[PlannedModule]) -> list[str]:
    """What tells two plans apart, equal on all ranks where the plans are."""
    return [f"{p.name}: {type(p.style).__name__ if type(p.style).__repr__ is object.__repr__ else p.style!r}" for p in planned]


def apply_tp_plan(
    model: nn.Module, planned: Sequence[PlannedModule], mesh: DeviceMesh, ignored_params: Collection[str]
) -> DeviceMesh:
    """Cut the planned modules over the ``tp`` axis of ``mesh``, and return the rest of the mesh: all of it without a plan.

    torch's styles replace a module's parameters one by one: so tied ones are tied again here, and frozen ones frozen.

    Mutates: ``model``; the parameters of planned modules are replaced. Collective: none; all ranks hold equal values.

    Raises:
        ConfigError: a style that does not fit its module; a dimension that the axis does not divide; tied parameters that would
            be cut in different ways; a parameter of ``ignored_params``; a buffer. On all ranks alike, and the model is spoilt.
    """
    if not planned:
        return mesh
    before, axis = _param_locations(model), mesh["tp"]
    for each in planned:
        try:
            parallelize_module(each.module, axis, each.style, src_data_rank=None)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError) as problem:
            kind, style = type(each.module).__name__, type(each.style).__name__
            raise ConfigError(f"shard_model: plan: {style} does not fit {each.name!r}, a {kind}: {problem}") from problem
        for key, buffer in each.module.named_buffers():
            if is_dtensor(buffer):
                raise ConfigError(
                    f"shard_model: plan: {type(each.style).__name__} on {each.name!r} takes its buffer {key!r}, too; buffers "
                    "are whole on every rank: move it out of the module, or plan a module inside it"
                )
    for param, places in before:
        now = [module._parameters[key] for _, module, key in places]
        if all(each is param for each in now):
            continue
        _check_placements(places, now, axis.size(), ignored_params)
        first = now[0]
        assert first is not None, "a style replaces parameters by parameters"
        first.requires_grad_(param.requires_grad)
        for _, module, key in places:
            module.register_parameter(key, first)
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]


_ParamLocation: TypeAlias = tuple[str, nn.Module, str]


def _param_locations(model: nn.Module) -> list[tuple[nn.Parameter, list[_ParamLocation]]]:
    """Every parameter, and where it is: its clean names, owners, and keys there."""
    found: dict[int, tuple[nn.Parameter, list[_ParamLocation]]] = {}
    for name, module in modules_by_fqn(model):
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), (param, []))[1].append((f"{name}.{key}".lstrip("."), module, key))
    return list(found.values())


def _check_placements(
    places: Sequence[_ParamLocation], now: Sequence[Tensor | None], ranks: int, ignored_params: Collection[str]
) -> None:
    name = places[0][0]
    if len({describe_placement(each) for each in now if each is not None}) > 1:
        raise ConfigError(
            f"shard_model: plan: {', '.join(name for name, _, _ in places)} are one parameter, but would not be cut alike; "
            "give their modules styles that agree (RowwiseParallel on an embedding, ColwiseParallel on a head)"
        )
    if name in ignored_params:
        raise ConfigError(
            f"shard_model: plan cuts {name!r}, which stays whole (leave_out, a scalar, or empty); leave one of the two away"
        )
    assert now[0] is not None, "as many as places"
    for dim, count in chunks_per_dim(now[0]).items():
        if now[0].shape[dim] % count:
            raise ConfigError(
                f"shard_model: plan cuts {name!r} {list(now[0].shape)} along dim {dim} into {count} pieces, which does not "
                f"come out even; use a size that tp={ranks} divides, or leave it out of the plan"
            )
