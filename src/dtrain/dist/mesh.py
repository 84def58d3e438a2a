"""Build device meshes, and find the rank of this process among the ranks with different data."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtrain.dist.collectives import all_gather_json
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.dist.rendezvous import connect_on_demand
from dtrain.errors import ConfigError, DistError

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes that every mesh of ``build_mesh`` has, outermost first. Ranks along these axes get different data."""

MODEL_AXES = ("cp", "tp")
"""Axes whose ranks share each batch, innermost last. A mesh has such an axis only if its degree is above 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ReplicaInfo:
    """Replicas of a model that train separately for a while, seen from one rank.

    Args:
        index: index of this rank's replica.
        count: number of replicas.
        across_group: ranks that hold the same part of each replica.
        within_groups: ranks of this replica, by axis of the mesh, without axes of one rank.
    """

    index: int
    count: int
    across_group: dist.ProcessGroup
    within_groups: tuple[dist.ProcessGroup, ...] = ()


def build_mesh(*, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1) -> DeviceMesh:
    """Build a mesh of all ranks with the axes ``dp_replicate``, ``dp_shard``, ``cp`` and ``tp``, in this order.

    A degree of -1 is filled from the world size. Axes ``cp`` and ``tp`` exist only if their degrees are above 1. A second call
    with the same degrees returns the same mesh.

    Args:
        dp_replicate: replicas of the sharded parameters, with different data; see ``hybrid_shard`` in ``shard_model``.
        dp_shard: ranks that parameters are sharded over, with different data.
        cp: ranks that share each sequence (context parallelism).
        tp: ranks that share each layer (tensor parallelism). They are neighbors, because they communicate most.

    Collective: makes process groups the first time, so every rank must call it with the same degrees.

    Example:
        with dt.init_dist() as info:
            mesh = dt.build_mesh(dp_shard=-1, tp=2)
            model = dt.shard_model(build_model(), mesh, blocks=(Block,), tp_plan=PLAN)

    Raises:
        ConfigError: degrees that do not multiply to the world size.
        DistError: ``init_dist`` was not called.
    """
    if not dist.is_initialized():
        raise DistError("build_mesh: no process groups are open. Call dt.init_dist() first (one process works, too).")
    axes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    degrees = _fill_degrees(
        {name: value for name, value in axes.items() if name in DATA_AXES or value != 1}, get_dist_info().world_size
    )
    return get_mesh({name: value for name, value in degrees.items() if name in DATA_AXES or value != 1})


def get_mesh(degrees: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with the given axes, outermost first.

    Each mesh is made once and cached until the groups are closed, because a group costs threads, sockets and a rendezvous.

    Collective: makes process groups the first time, so every rank must call it with the same degrees.
    """
    info, context, key = get_dist_info(), current_context(), tuple(degrees.items())
    mesh = context.meshes.get(key)
    if mesh is None:
        with connect_on_demand(info):
            mesh = init_device_mesh(info.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        # torch's default is 30 minutes for each group. Since torch 2.14 the function is public, and the private name warns.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in mesh.get_all_groups():
            if group is not dist.group.WORLD:
                set_timeout(timedelta(seconds=info.timeout_s), group)
        # Without init_dist nothing reports when the user closes a group.
        if context.info is not None:
            context.meshes[key] = mesh
    return mesh


def cpu_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for CPU tensors; None if the training group carries them.

    Collective: makes a gloo group the first time, if the user's own training group has no backend for CPU tensors.
    """
    info, context = get_dist_info(), current_context()
    backends = dist.get_backend_config(dist.group.WORLD)
    if info.world_size == 1 or "gloo" in backends or "cpu:" in backends:
        return None
    if context.cpu_group is None:
        context.cpu_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=info.timeout_s))
    return context.cpu_group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeaderGroup:
    """Gloo group of the leaders of several nodes. The leader of a node is its local rank 0.

    Args:
        ranks: leader of each node.
        node: node of this rank.
        is_leader: True on a leader.
        group: the group, for leaders only.
        world_size: number of all ranks.
    """

    ranks: tuple[int, ...]
    node: int
    is_leader: bool
    group: dist.ProcessGroup
    world_size: int

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self.ranks[node], (*self.ranks, self.world_size)[node + 1])

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return bisect_right(self.ranks, rank) - 1


def leader_group() -> LeaderGroup | None:
    """Return the leaders of the nodes; None on one node. Ranks must be numbered node by node.

    Collective: makes the group the first time, in the main thread.
    """
    info, context = get_dist_info(), current_context()
    if info.local_world_size >= info.world_size:
        return None
    if context.leader_group is None:
        local_ranks = all_gather_json(info.local_rank, caller="leader_group")
        ranks = tuple(rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0)
        group = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=info.timeout_s))
        context.leader_group = LeaderGroup(
            ranks=ranks,
            node=bisect_right(ranks, info.rank) - 1,
            is_leader=info.local_rank == 0,
            group=group,
            world_size=info.world_size,
        )
    return context.leader_group


def _fill_degrees(degrees: dict[str, int], world_size: int) -> dict[str, int]:
    """Replace a degree of -1 by the quotient of the world size and the other degrees. Pure."""
    text = " * ".join(f"{name}={value}" for name, value in degrees.items())
    free = [name for name, value in degrees.items() if value == -1]
    if len(free) > 1 or any(value < 1 and value != -1 for value in degrees.values()):
        raise ConfigError(
            f"build_mesh: degrees must be at least 1, and at most one degree may be -1, got {text}. "
            "Give one degree as -1 to use the remaining ranks."
        )
    product = math.prod(value for value in degrees.values() if value != -1)
    if free:
        if world_size % product:
            raise ConfigError(
                f"build_mesh: {world_size=} must be a multiple of {product}, got {text}. Change the given degrees."
            )
        return {**degrees, free[0]: world_size // product}
    if product != world_size:
        raise ConfigError(
            f"build_mesh: {' * '.join(degrees)} must be {world_size=}, got {text} = {product}. Set one degree to -1."
        )
    return degrees


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along ``axis``, 1 for a mesh without the axis."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def data_shape(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the sizes of the axes with different data: all axes except ``cp`` and ``tp``."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple(size for name, size in zip(names, mesh.shape, strict=True) if name not in MODEL_AXES)


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's index among the ranks with different data, and the number of such indices.

    Ranks that differ only along ``cp`` and ``tp`` have the same index, because they share each batch. Use the index to seed
    random numbers that must be equal on these ranks, such as dropout.

    Args:
        mesh: mesh of ``build_mesh``, or another mesh with this rank.

    Example:
        index, count = dt.dist.data_rank(mesh)
        dt.seed_all(seed, index)

    Raises:
        ConfigError: this rank is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("mesh: this rank is not part of the mesh. Build the mesh over all ranks with dt.build_mesh.")
    index, count = 0, 1
    for name, size, position in zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, coordinate, strict=True):
        if name not in MODEL_AXES:
            index, count = index * size + position, count * size
    return index, count


def tp_rank(mesh: DeviceMesh) -> int:
    """Return this rank's index along ``tp``, 0 for a mesh without ``tp``."""
    return mesh.get_local_rank("tp") if axis_size(mesh, "tp") > 1 else 0
