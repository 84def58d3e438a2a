"""Work with DTensors and plain tensors alike: local shards, their place in the whole tensor, norms, in-place arithmetic.

Only this module and ``shard.model_parallel`` use the attributes of a DTensor. All functions take plain tensors and DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.errors import ConfigError
from dtrain.typing import index_tensor

# At run time, code that has a DTensor or a placement finds the loaded module at ``torch.distributed.tensor``.
if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True if ``tensor`` is on a mesh, sharded or replicated."""
    # An import of the class takes more than half as long as the import of torch, and many programs have no DTensor.
    return hasattr(tensor, "device_mesh")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard (sharing storage); for a plain tensor, the tensor itself."""
    return cast("DTensor", tensor).to_local() if hasattr(tensor, "device_mesh") else tensor


def from_local_like(like: Tensor, shard: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Make a tensor placed like ``like`` with local shard ``shard``, of any dtype and shape; ``shard`` for a plain one."""
    if not is_dtensor(like):
        return shard
    spec = like._spec
    size, stride = like.shape, like.stride()
    if shape is not None and like.shape != shape:
        size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    if shard.dtype != like.dtype or size != like.shape:
        specs = torch.distributed.tensor._dtensor_spec
        meta = specs.TensorMeta(shape=size, stride=stride, dtype=shard.dtype)
        spec = specs.DTensorSpec(mesh=spec.mesh, placements=spec.placements, tensor_meta=meta)
    # Ten times as fast as from_local, which supports autograd.
    return torch.distributed.tensor.DTensor(shard, spec, requires_grad=False)


def replicate_like(like: Tensor, whole: Tensor) -> Tensor:
    """Place ``whole``, which all ranks hold, on the mesh of ``like``. For a plain ``like``, return ``whole``."""
    if not is_dtensor(like):
        return whole
    placements = [torch.distributed.tensor.Replicate()] * like.device_mesh.ndim
    return torch.distributed.tensor.DTensor.from_local(whole, like.device_mesh, placements, run_check=False)


def is_placed_like(tensor: Tensor, like: Tensor) -> bool:
    """Return True if both are plain, or both are on one mesh with equal placements."""
    if not is_dtensor(like):
        return not is_dtensor(tensor)
    return is_dtensor(tensor) and tensor.placements == like.placements and tensor.device_mesh == like.device_mesh


def replicate() -> Any:
    """Return torch's placement of a whole copy on each rank."""
    return torch.distributed.tensor.Replicate()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a distributed tensor to a plain tensor; a plain tensor is returned unchanged.

    Collective: one all-gather per mesh axis that the tensor is sharded on.
    """
    if not is_dtensor(tensor):
        return tensor
    # Gather the axis that was sharded last first. With FSDP2 over tensor parallelism this is not the order of the axes, and
    # torch warns if it has to find the order by itself.
    placements = list(tensor.placements)
    for axis, _ in reversed(_sharding_order(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements)[1:]):
        placements[axis] = torch.distributed.tensor.Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def describe_placement(tensor: Tensor) -> str:
    """Describe the placement of a tensor for messages: ``"whole"``, or by mesh axis, as ``"cut on dim 0 over dp_shard=2"``."""
    if not is_dtensor(tensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    kinds = ["copied" if (dim := _sharded_dim(place)) is None else f"cut on dim {dim}" for place in tensor.placements]
    axes = zip(kinds, names, mesh.shape, strict=True)
    return ", ".join(f"{kind} over {name}={size}" for kind, name, size in axes if size > 1) or "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBox:
    """Box of a global tensor that one rank holds. The rank is number ``replica`` of ``num_replicas`` ranks with this box."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1


@lru_cache(maxsize=4096)
def full_box(shape: tuple[int, ...], replica: int = 0, num_replicas: int = 1) -> ShardBox:
    """Return the box of a whole tensor, held by ``num_replicas`` ranks."""
    return ShardBox(shape=shape, offset=(0,) * len(shape), size=shape, replica=replica, num_replicas=num_replicas)


def shard_box(tensor: Tensor, shape: tuple[int, ...] | None = None) -> ShardBox:
    """Return the box of this rank's shard in the global tensor, or in a tensor of ``shape`` with the same placement."""
    shape = tuple(tensor.shape) if shape is None else shape
    if not is_dtensor(tensor):
        return full_box(shape)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"tensor of shape {tuple(tensor.shape)} lives on a mesh without this rank. Pass tensors of its mesh.")
    box = compute_shard_box(shape, tuple(mesh.shape), tuple(coordinate), tensor.placements)
    index, count = _submesh_position(mesh)
    return box if count == 1 else replace(box, replica=box.replica * count + index, num_replicas=box.num_replicas * count)


def _submesh_position(mesh: DeviceMesh) -> tuple[int, int]:
    """Return index and number of the ranks that hold equal shards because ``mesh`` is part of a larger mesh.

    For example, with tensor parallelism there is one mesh of data-parallel ranks per index along ``tp``. A tensor that only
    FSDP2 has sharded is equal on all of them.
    """
    root = mesh._get_root_mesh()
    if root.size() == mesh.size():
        return 0, 1
    # Coordinates of the mesh's ranks in the root mesh.
    inside = (root.mesh.unsqueeze(-1) == mesh.mesh.reshape(-1)).any(-1).nonzero()
    fixed = [axis for axis in range(root.ndim) if inside[:, axis].unique().numel() == 1]
    index, count = 0, 1
    for axis in fixed:
        index, count = index * root.size(axis) + int(inside[0, axis]), count * root.size(axis)
    if count * mesh.size() != root.size():
        parts = f"a mesh of {mesh.size()} ranks is no part of the mesh {tuple(root.shape)} along its axes"
        raise ConfigError(f"tensors: {parts}. Build both meshes with one dt.build_mesh.")
    return index, count


# Cached, because most tensors of a model share their shape with other tensors.
@lru_cache(maxsize=4096)
def compute_shard_box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> ShardBox:
    """Compute the box at ``coordinate`` of a tensor on a mesh. Pure.

    ``Shard(d)`` splits like ``torch.chunk``: pieces of ``ceil(n / k)`` rows, the last pieces shorter or empty.

    Raises:
        ConfigError: a placement other than ``Replicate``, ``Shard``, and FSDP2's placement over tensor parallelism.
    """
    offset, size = [0] * len(shape), list(shape)
    copy, copies = 0, 1
    for places, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, torch.distributed.tensor.Replicate):
            copy, copies = copy * places + index, copies * places
    for axis, dim in _sharding_order(shape, mesh_shape, placements):
        rows = -(-size[dim] // mesh_shape[axis])
        start = min(coordinate[axis] * rows, size[dim])
        offset[dim] += start
        size[dim] = min(rows, size[dim] - start)
    return ShardBox(shape=shape, offset=tuple(offset), size=tuple(size), replica=copy, num_replicas=copies)


def _sharding_order(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return pairs (mesh axis, dim) in the order of sharding: from left to right, except for FSDP2 over tensor parallelism.

    There an axis to the left shards the result of axes to its right. ``split_factor`` is the number of pieces before it.
    """
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, torch.distributed.tensor.Replicate):
            continue
        dim, index, pieces = _sharded_dim(placement), 0, 1
        split = placement.split_factor if isinstance(placement, torch.distributed.tensor.placement_types._StridedShard) else 1
        while pieces < split and index < len(order):
            pieces, index = pieces * (mesh_shape[order[index][0]] if order[index][1] == dim else 1), index + 1
        if dim is None or pieces != split:
            raise ConfigError(f"tensor of shape {shape} has placement {placement}. Use Replicate or Shard.")
        order.insert(index, (axis, dim))
    return order


def tensor_mesh(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh of ``tensor``, None for a plain tensor."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def local_slice(like: Tensor, whole: Tensor) -> Tensor:
    """Return the part of the plain tensor ``whole``, of any shape, that a shard placed like ``like`` has, as a view."""
    box = shard_box(like, tuple(whole.shape))
    return whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]


def row_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the group of ranks that the rows are sharded over; None if the tensor is whole or sharded otherwise."""
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    cuts = [(axis, _sharded_dim(place)) for axis, place in enumerate(tensor.placements) if mesh.size(axis) > 1]
    cuts = [(axis, dim) for axis, dim in cuts if dim is not None]
    return mesh.get_group(cuts[0][0]) if len(cuts) == 1 and cuts[0][1] == 0 else None


def chunks_per_dim(tensor: Tensor) -> dict[int, int]:
    """Return the number of pieces per dim, without unsharded dims."""
    chunks: dict[int, int] = {}
    if is_dtensor(tensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if (dim := _sharded_dim(placement)) is not None:
                chunks[dim] = chunks.get(dim, 1) * size
    return chunks


def _sharded_dim(placement: Any) -> int | None:
    """Return the dim that a placement shards, None for other placements."""
    kinds = torch.distributed.tensor.placement_types
    return placement.dim if isinstance(placement, kinds.Shard | kinds._StridedShard) else None


def local_part(tensor: Tensor, *, dim: int = -1, caller: str) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """Return this rank's part of a tensor that is sharded along ``dim`` as a plain tensor, with gradients.

    Returns:
        The part, the index of its first element, and the ranks that hold the other parts. For a whole tensor: the tensor, 0 and
        None.

    Raises:
        ConfigError: a DTensor on several axes, a DTensor that is sharded along another dim or unevenly, or partial sums.
    """
    if not is_dtensor(tensor):
        return tensor, 0, None
    mesh, (place, *others) = tensor.device_mesh, tensor.placements
    if not others and isinstance(place, torch.distributed.tensor.Replicate):
        return tensor.to_local(), 0, None
    size, rest = divmod(tensor.shape[dim], mesh.size())
    is_cut = isinstance(place, torch.distributed.tensor.Shard) and place.dim % tensor.ndim == dim % tensor.ndim
    if others or rest or not is_cut:
        raise ConfigError(
            f"{caller}: takes a DTensor whose {'last dim' if dim == -1 else f'dim {dim}'} is sharded evenly over one axis, got "
            f"shape {tuple(tensor.shape)} placed {tensor.placements} on {mesh.size()} ranks. Give the layer "
            "ColwiseParallel(output_layouts=Shard(-1))."
        )
    return tensor.to_local(), size * mesh.get_local_rank(), mesh.get_group()


def whole_with_summed_grad(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the whole ``tensor`` on each rank of the mesh of the DTensor ``like``; its gradients are summed over these ranks.

    Args:
        tensor: DTensor on one axis, or a plain tensor, equal on all ranks.
        like: DTensor on one axis.

    Collective: one all-gather if ``tensor`` is sharded. In backward one reduce-scatter, or else one all-reduce.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not is_dtensor(tensor):
        tensor = DTensor.from_local(tensor, like.device_mesh, [Replicate()], run_check=False)  # type: ignore[attr-defined]
    return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def lerp_(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Compute ``target += weight * (source - target)`` for each pair, on the local shards. Mutates: ``targets``."""
    if targets:
        torch._foreach_lerp_([to_local(t) for t in targets], [to_local(s) for s in sources], weight)


def scale_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply every tensor by ``factor``, a scalar ``[]`` or a number, in each tensor's own dtype, without a host sync.

    Mutates: ``tensors``. Host sync: one for CPU (offloaded) tensors if the factor is on another device.
    """
    # With gradients enabled, ``to_local`` of a DTensor is an operation of autograd, which takes several times as long.
    # The comparison of types is faster than ``is_dtensor`` for a plain tensor.
    shards = [tensor._local_tensor if type(tensor) is not Tensor and is_dtensor(tensor) else tensor for tensor in tensors]
    kinds = {(shard.dtype, shard.device) for shard in shards}
    for dtype, device in kinds:
        same = shards if len(kinds) == 1 else [s for s in shards if s.dtype == dtype and s.device == device]
        # A tensor is three times as fast as a number, on a CPU.
        scalar = factor.to(device, dtype) if isinstance(factor, Tensor) else torch.full((), factor, dtype=dtype, device=device)
        torch._foreach_mul_(same, scalar)


def all_reduce_partial_(parts: Sequence[Tensor], of: Sequence[Tensor], dims: Sequence[Sequence[int]]) -> None:
    """All-reduce sums over some dims of a shard to sums over these dims of the whole tensor.

    Args:
        parts: for each tensor, the plain sum of this rank's shard.
        of: tensors, plain or DTensor.
        dims: for each tensor, the dims of the sum.

    Mutates: ``parts``.
    Collective: one all-reduce per set of mesh axes, axis and dtype of the tensors that are sharded along a dim of the sum; none
        for other tensors.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
    for partial, tensor, summed in zip(parts, of, dims, strict=True):
        if is_dtensor(tensor):
            mesh, places = tensor.device_mesh, enumerate(tensor.placements)
            if axes := tuple(axis for axis, place in places if _sharded_dim(place) in summed and mesh.size(axis) > 1):
                groups[mesh, axes, partial.dtype].append(partial)
    for (mesh, axes, _), sums in groups.items():
        # The groups of the mesh take tensors on the mesh's device. Offloaded tensors are on the CPU.
        flat = torch.cat([partial.flatten() for partial in sums]).to(mesh.device_type)
        _all_reduce_axes(flat, mesh, axes)
        for partial, total in zip(sums, flat.split([partial.numel() for partial in sums]), strict=True):
            partial.copy_(total.view_as(partial))


def mul_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor by a number, on the local shards. Mutates: ``tensors``."""
    shards = [to_local(tensor) for tensor in tensors]
    for kind in {(shard.dtype, shard.device) for shard in shards}:
        torch._foreach_mul_([shard for shard in shards if (shard.dtype, shard.device) == kind], factor)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Compute the L2 norm over all elements of all tensors, each element of a global tensor counted once.

    Args:
        tensors: plain tensors (equal on all ranks) and DTensors, on any number of meshes.

    Returns:
        Scalar ``[]``, at least float32, equal on all ranks, on the device of the tensors (offloaded: of their mesh). 0 without
        tensors.

    Collective: one all-reduce of a scalar per mesh axis that tensors are sharded on.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.global_norm([torch.tensor([3.0, 0.0]), torch.tensor(4.0)])
        tensor(5.)
    """
    items = list(tensors)
    if items and not any([hasattr(tensor, "device_mesh") for tensor in items]):  # noqa: C419  # a list is faster for a few
        norm: Tensor = torch.linalg.vector_norm(torch.stack(_foreach_norms(items)))
        return norm
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = defaultdict(list)
    for tensor in items:
        groups[_sharded_axes(tensor)].append(to_local(tensor))
    squares: list[Tensor] = []
    for where, shards in groups.items():
        square = torch.stack(_foreach_norms(shards)).square().sum()
        if where is not None:
            square = square.to(where[0].device_type) if square.device.type != where[0].device_type else square
            _all_reduce_axes(square, *where)
        squares.append(square)
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
        if squares
        else torch.zeros((), device="cpu")
    )


def _sharded_axes(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return the mesh and the axes that ``tensor`` is sharded along, None if each rank holds the whole tensor."""
    if not is_dtensor(tensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if _sharded_dim(placement) is not None]
    return (tensor.device_mesh, tuple(axes)) if axes else None


def _foreach_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Compute the norms of the tensors in one dtype, at least float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return list(torch._foreach_norm(tensors) if dtypes == {wide} else torch._foreach_norm(tensors, 2.0, dtype=wide))


def local_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Compute the L2 norm of this rank's part of each tensor: scalars ``[]``, at least float32, on the device of the tensor."""
    return _foreach_norms([to_local(tensor).detach() for tensor in tensors]) if tensors else []


def all_reduce_partial_scalars_(sums: Tensor, of: Sequence[Tensor]) -> None:
    """All-reduce sums over this rank's part of tensors to sums over the whole tensors.

    Args:
        sums: ``[n]``, on the device of the tensors' meshes.
        of: the ``n`` tensors, plain or DTensor.

    Mutates: ``sums``.
    Collective: one all-reduce per set of mesh axes and axis that tensors are sharded along, for any number of tensors.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, tensor in enumerate(of):
        if (where := _sharded_axes(tensor)) is not None:
            groups[where].append(index)
    for (mesh, axes), positions in groups.items():
        selection = None if len(positions) == len(of) else index_tensor(positions, sums.device)
        selected = sums if selection is None else sums[selection]
        _all_reduce_axes(selected, mesh, axes)
        if selection is not None:
            sums[selection] = selected


def _all_reduce_axes(tensor: Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> None:
    """Sum a plain tensor over the ranks along ``axes``, one axis after the other. Mutates: ``tensor``."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))


def dtensor_dispatcher() -> Any:
    """Return torch's object that runs every operation on DTensors; it has handlers of operations, and a sharding propagator."""
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher
