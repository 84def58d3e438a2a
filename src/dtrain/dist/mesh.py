"""Device meshes: how the ranks are laid out, and which of them see the same data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.dist.init import DistInfo, get_dist_info, mesh_cache
from dtrain.errors import ConfigError, DistError

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes that every mesh of ``build_mesh`` has, outermost first. They carry different data on different ranks."""

MODEL_AXES = ("cp", "tp")
"""Axes whose ranks work on one batch together, innermost last; a mesh has those of a degree above 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ReplicaInfo:
    """Copies of a model that train apart for a while, as one of its ranks sees them.

    Args:
        index: of the copy that this rank belongs to.
        count: how many copies there are.
        across_group: the ranks that hold the same part of each copy.
        within_groups: the ranks of this copy, by axis of the mesh; axes of one rank are left out.
    """

    index: int
    count: int
    across_group: dist.ProcessGroup
    within_groups: tuple[dist.ProcessGroup, ...] = ()


def build_mesh(*, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> DeviceMesh:
    """A mesh of all ranks; a degree of -1 is filled from the world size.

    Args:
        dp_replicate: groups of ranks that hold copies of what ``dp_shard`` cuts; see ``hybrid_shard`` in ``shard_model``.
        dp_shard: ranks that parameters are cut over. Both axes carry different data.
        cp: ranks that share each sequence (context parallelism).
        tp: ranks that share each layer (tensor parallelism); neighbours, since they exchange most.

    The mesh has the axes ``dp_replicate``, ``dp_shard``, and ``cp`` and ``tp`` where they are above 1, in this order. Called
    again with the same degrees it returns the same mesh.

    Collective: makes process groups the first time, so every rank must call it with the same degrees.

    Raises:
        ConfigError: degrees that do not multiply to the world size.
        DistError: ``init_dist`` was not called.
    """
    if not dist.is_initialized():
        raise DistError("build_mesh: there are no process groups yet; call dt.init_dist() first (one process works too)")
    asked = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    degrees = _fill_degrees(
        {name: value for name, value in asked.items() if name in DATA_AXES or value != 1}, get_dist_info().world_size
    )
    return get_mesh({name: value for name, value in degrees.items() if name in DATA_AXES or value != 1})


def get_mesh(degrees: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks with these axes, outermost first: the same one for the same degrees, until the groups are closed.

    Each is made once: a group costs threads, sockets and a meeting of its ranks.

    Collective: makes process groups the first time, so every rank must call it with the same degrees.
    """
    info, meshes, key = get_dist_info(), mesh_cache(), tuple(degrees.items())
    if key not in meshes:
        meshes[key] = init_device_mesh(info.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        _set_group_timeouts(meshes[key], info)
    return meshes[key]


def _set_group_timeouts(mesh: DeviceMesh, info: DistInfo) -> None:
    """Have the groups of ``mesh`` give up when the others do: torch gives each of them 30 minutes, whatever the default's."""
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=info.timeout_s), group)


def _fill_degrees(degrees: dict[str, int], world_size: int) -> dict[str, int]:
    """``degrees`` with the one that is -1 filled in, a pure function."""
    shown = " * ".join(f"{name}={value}" for name, value in degrees.items())
    free = [name for name, value in degrees.items() if value == -1]
    if len(free) > 1 or any(value < 1 and value != -1 for value in degrees.values()):
        raise ConfigError(f"build_mesh: degrees must be at least 1, and at most one of them -1, got {shown}")
    known = math.prod(value for value in degrees.values() if value != -1)
    if free:
        if world_size % known:
            raise ConfigError(f"build_mesh: {world_size=} is not a multiple of {known} ({shown}); change the given degree")
        return {**degrees, free[0]: world_size // known}
    if known != world_size:
        raise ConfigError(
            f"build_mesh: needs {' * '.join(degrees)} = world_size, got {shown} = {known}, {world_size=}; set one to -1"
        )
    return degrees


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """The number of ranks along ``axis``, 1 for a mesh without it."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def data_shape(mesh: DeviceMesh) -> tuple[int, ...]:
    """The sizes of the axes that carry different data: all but ``cp`` and ``tp``, whatever their names are."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple(size for name, size in zip(names, mesh.shape, strict=True) if name not in MODEL_AXES)


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's place among those that see different data, and how many such places there are.

    Ranks that differ only along ``cp`` and ``tp`` have the same place: they work on one batch together. What must be alike on
    all of them is seeded by it: ``dt.seed_all(seed, dt.dist.data_rank(mesh)[0])`` before a model with dropout.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("mesh: this rank is not part of it; build the mesh over all ranks with dt.build_mesh")
    index, count = 0, 1
    for name, places, at in zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, coordinate, strict=True):
        if name not in MODEL_AXES:
            index, count = index * places + at, count * places
    return index, count


def tp_rank(mesh: DeviceMesh) -> int:
    """This rank's place along ``tp``, 0 for a mesh without it."""
    return mesh.get_local_rank("tp") if axis_size(mesh, "tp") > 1 else 0
