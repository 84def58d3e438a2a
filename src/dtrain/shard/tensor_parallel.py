"""Shard layers over the ``tp`` axis with torch's parallel styles (``tp_plan=``), before FSDP2 shards each rank's part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from dtrain.dist.dtensor import chunks_per_dim, describe_placement, is_dtensor
from dtrain.dist.mesh import MODEL_AXES, axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn

TensorParallelPlan: TypeAlias = "Mapping[str, ParallelStyle]"
"""Module name patterns (as in ``blocks``; ``""`` is the model itself) -> parallel styles, applied in this order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedModule:
    """One module of a tensor-parallel plan."""

    name: str
    module: nn.Module
    style: ParallelStyle


def resolve_tp_plan(model: nn.Module, plan: TensorParallelPlan | None, mesh: DeviceMesh) -> list[PlannedModule]:
    """Return the modules that ``plan`` shards over the ``tp`` axis of ``mesh``, in order. A pure function.

    Raises:
        ConfigError: a plan without a ``tp`` axis or an axis without a plan, a mesh whose last axes are not ``cp`` and ``tp``, a
            name without a match, or a style that is no ``ParallelStyle``.
    """
    _check_axes(mesh)
    ranks = axis_size(mesh, "tp")
    if not plan:
        if ranks > 1:
            raise ConfigError(
                f"shard_model: a mesh with tp={ranks} needs a tp_plan. Pass tp_plan=, or build the mesh without tp."
            )
        return []
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"shard_model: tp_plan must be a mapping of module names to styles, got {type(plan).__name__}. "
            "Pass {'mlp.up': ColwiseParallel()}, for example."
        )
    if ranks == 1:
        raise ConfigError(
            f"shard_model: tp_plan needs a mesh with a tp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}. Pass for example dt.build_mesh(tp=2)."
        )
    planned_modules: list[PlannedModule] = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"shard_model: tp_plan[{pattern!r}] must be a ParallelStyle, got {style!r}. "
                "Pass for example ColwiseParallel() of torch.distributed.tensor.parallel."
            )
        is_match = compile_patterns([pattern], caller="shard_model: tp_plan")
        matches = {
            id(module): (name, module) for name, module in modules_by_fqn(model, include_duplicates=True) if is_match(name)
        }
        if not matches:
            raise ConfigError(
                f"shard_model: tp_plan names {pattern!r}, but the model has no such module. "
                "Print the names with model.named_modules()."
            )
        planned_modules += [PlannedModule(name=name, module=module, style=style) for name, module in matches.values()]
    return planned_modules


def _check_axes(mesh: DeviceMesh) -> None:
    """Raise ``ConfigError`` unless ranks of one batch are adjacent. The step counts each batch once by rank order."""
    names = mesh.mesh_dim_names or ()
    model_axes = [name for name in names if name in MODEL_AXES]
    if model_axes and (
        list(names[-len(model_axes) :]) != sorted(model_axes) or mesh.mesh.flatten().tolist() != list(range(mesh.size()))
    ):
        raise ConfigError(
            f"shard_model: cp and tp must be the last axes of a mesh of all ranks in order, got {list(names)}. "
            "Use dt.build_mesh."
        )


def format_tp_plan(planned_modules: Sequence[PlannedModule]) -> list[str]:
    """Return a description of each planned module, equal on all ranks if the plans are equal."""
    return [
        f"{p.name}: {type(p.style).__name__ if type(p.style).__repr__ is object.__repr__ else p.style!r}"
        for p in planned_modules
    ]


def apply_tp_plan(
    model: nn.Module, planned_modules: Sequence[PlannedModule], mesh: DeviceMesh, ignored_params: Collection[str]
) -> DeviceMesh:
    """Shard the planned modules over the ``tp`` axis of ``mesh``, and return the mesh without ``tp``.

    torch's styles replace parameters one by one, so this function restores ties and ``requires_grad``.

    Mutates: ``model``; the parameters of planned modules are replaced. Collective: none; all ranks hold equal values.

    Raises:
        ConfigError: a style does not fit its module, the axis does not divide a dimension, tied parameters get different
            placements, or the plan shards an ignored parameter or a buffer. All ranks raise, and the model is unusable.
    """
    if not planned_modules:
        return mesh
    locations, axis = _param_locations(model), mesh["tp"]
    for entry in planned_modules:
        try:
            parallelize_module(entry.module, axis, entry.style, src_data_rank=None)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError) as problem:
            kind, style = type(entry.module).__name__, type(entry.style).__name__
            raise ConfigError(
                f"shard_model: tp_plan: {style} does not fit {entry.name!r}, a {kind}: {str(problem).rstrip('.')}. "
                "Choose a style for this kind of module."
            ) from problem
        for key, buffer in entry.module.named_buffers():
            if is_dtensor(buffer):
                raise ConfigError(
                    f"shard_model: tp_plan: {type(entry.style).__name__} on {entry.name!r} shards the buffer {key!r}, but "
                    "every rank must hold full buffers. Move the buffer out of the module, or plan an inner module."
                )
    for param, places in locations:
        current = [module._parameters[key] for _, module, key in places]
        if all(tensor is param for tensor in current):
            continue
        _check_placements(places, current, axis.size(), ignored_params)
        first = current[0]
        assert first is not None, "a style replaces parameters by parameters"
        first.requires_grad_(param.requires_grad)
        for _, module, key in places:
            module.register_parameter(key, first)
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")]


_ParamLocation: TypeAlias = tuple[str, nn.Module, str]


def _param_locations(model: nn.Module) -> list[tuple[nn.Parameter, list[_ParamLocation]]]:
    """Return every parameter with its locations: clean name, owner and key."""
    locations: dict[int, tuple[nn.Parameter, list[_ParamLocation]]] = {}
    for name, module in modules_by_fqn(model):
        for key, param in module._parameters.items():
            if param is not None:
                locations.setdefault(id(param), (param, []))[1].append((f"{name}.{key}".lstrip("."), module, key))
    return list(locations.values())


def _check_placements(
    places: Sequence[_ParamLocation], current: Sequence[Tensor | None], ranks: int, ignored_params: Collection[str]
) -> None:
    name = places[0][0]
    if len({describe_placement(tensor) for tensor in current if tensor is not None}) > 1:
        raise ConfigError(
            f"shard_model: tp_plan: {', '.join(name for name, _, _ in places)} are one parameter, but get "
            "different placements. Use styles that agree (RowwiseParallel on an embedding, ColwiseParallel on a head)."
        )
    if name in ignored_params:
        raise ConfigError(
            f"shard_model: tp_plan shards {name!r}, which is an ignored parameter (ignored_params, a scalar, or empty). "
            "Remove the parameter from tp_plan or from ignored_params."
        )
    assert current[0] is not None, "current has one tensor per place"
    for dim, count in chunks_per_dim(current[0]).items():
        if current[0].shape[dim] % count:
            raise ConfigError(
                f"shard_model: tp_plan shards {name!r} {list(current[0].shape)} along dim {dim} into {count} uneven pieces. "
                f"Use a size that tp={ranks} divides, or leave the module out of tp_plan."
            )
