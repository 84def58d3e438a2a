"""The only place that looks inside a DTensor: local shards, where they lie, norms over meshes, in-place arithmetic.

Everything takes plain tensors and DTensors alike, so the code above needs no case distinction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from dtrain.errors import ConfigError
from dtrain.typing import index_tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies on a mesh, cut or copied."""
    return isinstance(tensor, DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """The shard that this rank holds (sharing storage), or the tensor itself when it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_local_like(like: Tensor, shard: Tensor) -> Tensor:
    """A tensor of the shape and layout of ``like`` whose part on this rank is ``shard``: of another dtype, perhaps.

    For a plain ``like`` that is ``shard`` itself.
    """
    if not isinstance(like, DTensor):
        return shard
    spec = like._spec
    if shard.dtype != like.dtype:
        meta = TensorMeta(shape=like.shape, stride=like.stride(), dtype=shard.dtype)
        spec = DTensorSpec(mesh=spec.mesh, placements=spec.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # a tenth of what from_local costs, which is made for autograd


def replicate_like(like: Tensor, whole: Tensor) -> Tensor:
    """``whole``, which all ranks hold, as a tensor on the mesh of ``like``; for a plain ``like`` that is ``whole`` itself."""
    if not isinstance(like, DTensor):
        return whole
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a distributed tensor, as a plain one; the tensor itself when it is not distributed.

    Collective: one all-gather per mesh axis that it is sharded on.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # What was cut last is put together first: where FSDP2 has cut over tensor parallelism that is not the order of the axes,
    # and torch warns when it is to find that out by itself.
    left = list(tensor.placements)
    for axis, _ in reversed(_sharding_order(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements)[1:]):
        left[axis] = Replicate()
        tensor = tensor.redistribute(placements=left)
    return tensor.full_tensor()


def describe_placement(tensor: Tensor) -> str:
    """Where a tensor lies, for people: ``"whole"``, or by mesh axis, such as ``"cut on dim 0 over dp_shard=2"``."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    how = ["copied" if (dim := _sharded_dim(place)) is None else f"cut on dim {dim}" for place in tensor.placements]
    axes = zip(how, names, mesh.shape, strict=True)
    return ", ".join(f"{what} over {name}={size}" for what, name, size in axes if size > 1) or "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBox:
    """The box of a global tensor that one rank holds. ``replica`` of ``num_replicas`` ranks hold this very box."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1


@lru_cache(maxsize=4096)
def full_box(shape: tuple[int, ...], replica: int = 0, num_replicas: int = 1) -> ShardBox:
    """All of a tensor, which so many ranks hold."""
    return ShardBox(shape=shape, offset=(0,) * len(shape), size=shape, replica=replica, num_replicas=num_replicas)


def shard_box(tensor: Tensor) -> ShardBox:
    """Where this rank's shard of ``tensor`` lies in the global tensor. A plain tensor is its own only copy."""
    if not isinstance(tensor, DTensor):
        return full_box(tuple(tensor.shape))
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"tensor of shape {tuple(tensor.shape)} lives on a mesh that this rank is not part of")
    box = compute_shard_box(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements)
    beside, places = _submesh_position(mesh)
    return box if places == 1 else replace(box, replica=box.replica * places + beside, num_replicas=box.num_replicas * places)


def _submesh_position(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's place among those that hold the same of a tensor on ``mesh`` because ``mesh`` is a part of a larger one.

    A mesh of data-parallel ranks beside an axis of tensor parallelism is such a part: there is one for each place on that axis,
    and a tensor that only FSDP2 has cut lies on all of them alike.

    Returns:
        The place, and how many there are.
    """
    root = mesh._get_root_mesh()
    if root.size() == mesh.size():
        return 0, 1
    inside = (root.mesh.unsqueeze(-1) == mesh.mesh.reshape(-1)).any(-1).nonzero()  # coordinates of its ranks in the root mesh
    fixed = [axis for axis in range(root.ndim) if inside[:, axis].unique().numel() == 1]
    place, places = 0, 1
    for axis in fixed:
        place, places = place * root.size(axis) + int(inside[0, axis]), places * root.size(axis)
    if places * mesh.size() != root.size():
        raise ConfigError(f"tensors: a mesh of {mesh.size()} ranks is no part of the mesh {tuple(root.shape)} along its axes")
    return place, places


@lru_cache(maxsize=4096)  # of the many tensors of a model few have a shape of their own
def compute_shard_box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> ShardBox:
    """The box at ``coordinate`` of a tensor placed on a mesh, a pure function.

    ``Shard(d)`` cuts as ``torch.chunk`` does: pieces of ``ceil(n / k)`` rows, the last ones shorter or empty.

    Raises:
        ConfigError: a placement other than ``Replicate``, ``Shard``, and FSDP2's over tensor parallelism.
    """
    offset, size = [0] * len(shape), list(shape)
    copy, copies = 0, 1
    for places, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            copy, copies = copy * places + index, copies * places
    for axis, dim in _sharding_order(shape, mesh_shape, placements):
        rows = -(-size[dim] // mesh_shape[axis])
        start = min(coordinate[axis] * rows, size[dim])
        offset[dim] += start
        size[dim] = min(rows, size[dim] - start)
    return ShardBox(shape=shape, offset=tuple(offset), size=tuple(size), replica=copy, num_replicas=copies)


def _sharding_order(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Which mesh axis cuts which dim, one after another: from left to right, but for FSDP2 over tensor parallelism.

    There an axis to the left cuts what axes to its right have made of the dim, and says of how many pieces (``split_factor``).
    """
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim, at, pieces = _sharded_dim(placement), 0, 1
        split = placement.split_factor if isinstance(placement, _StridedShard) else 1
        while pieces < split and at < len(order):
            pieces, at = pieces * (mesh_shape[order[at][0]] if order[at][1] == dim else 1), at + 1
        if dim is None or pieces != split:
            raise ConfigError(f"tensor of shape {shape} has placement {placement}; dtrain knows Replicate and Shard")
        order.insert(at, (axis, dim))
    return order


def tensor_mesh(tensor: Tensor) -> DeviceMesh | None:
    """The mesh that ``tensor`` lies on, None when it is not distributed."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def local_slice(like: Tensor, whole: Tensor) -> Tensor:
    """The part of ``whole``, a plain tensor, that this rank has of ``like``: a view."""
    box = shard_box(like)
    return whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]


def row_sharding(tensor: Tensor) -> tuple[dist.ProcessGroup, tuple[int, ...]] | None:
    """The ranks that have the rows of ``tensor`` between them, and how many each; None when it is whole, or cut otherwise."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    cuts = [(axis, _sharded_dim(place)) for axis, place in enumerate(tensor.placements) if mesh.size(axis) > 1]
    cuts = [(axis, dim) for axis, dim in cuts if dim is not None]
    if len(cuts) != 1 or cuts[0][1] != 0:
        return None
    axis, rows = cuts[0][0], tensor.shape[0]
    most = -(-rows // mesh.size(axis))
    sizes = tuple(max(0, min(most, rows - place * most)) for place in range(mesh.size(axis)))
    return mesh.get_group(axis), sizes


def chunks_per_dim(tensor: Tensor) -> dict[int, int]:
    """Into how many pieces each dim is cut, those that are not left out."""
    found: dict[int, int] = {}
    if isinstance(tensor, DTensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            dim = _sharded_dim(placement)
            if dim is not None:
                found[dim] = found.get(dim, 1) * size
    return found


def _sharded_dim(placement: Any) -> int | None:
    """The dim that a placement cuts, None for one that cuts none."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def local_last_dim(tensor: Tensor, *, caller: str) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """This rank's part of the last dim, as a plain tensor through which gradients flow.

    Returns:
        The part, the index that it begins at, and the ranks that have the others; all of a tensor, 0 and None when it is whole.

    Raises:
        ConfigError: a DTensor on several axes, one that is cut along another dim or not evenly, or sums yet to be made.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0, None
    mesh, (place, *others) = tensor.device_mesh, tensor.placements
    if not others and isinstance(place, Replicate):
        return tensor.to_local(), 0, None
    rows, rest = divmod(tensor.shape[-1], mesh.size())
    if others or rest or not isinstance(place, Shard) or place.dim not in (-1, tensor.ndim - 1):
        raise ConfigError(
            f"{caller}: takes a DTensor whose last dim is cut evenly over one axis, got shape {tuple(tensor.shape)} placed "
            f"{tensor.placements} on {mesh.size()} ranks; give the layer output_layouts=Shard(-1)"
        )
    return tensor.to_local(), rows * mesh.get_local_rank(), mesh.get_group()


def lerp_(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """``target += weight * (source - target)`` for each pair, on the local shards.

    Mutates: ``targets``.
    """
    if targets:
        torch._foreach_lerp_([to_local(t) for t in targets], [to_local(s) for s in sources], weight)


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by the scalar ``factor`` ``[]``, in each tensor's own dtype, without a host sync.

    Mutates: ``tensors``. Host sync: one for tensors that are on the CPU (offloaded) with a factor that is not.
    """
    shards = [to_local(tensor) for tensor in tensors]
    kinds = {(shard.dtype, shard.device) for shard in shards}
    for dtype, device in kinds:
        same = shards if len(kinds) == 1 else [s for s in shards if s.dtype == dtype and s.device == device]
        torch._foreach_mul_(same, factor.to(device, dtype))  # by a tensor: by a number it takes three times as long on a CPU


def add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: Tensor) -> None:
    """``tensor += factor * other`` for each pair, on the local shards, with a scalar ``factor`` ``[]``; no host sync.

    The product is made in the wider of their dtypes: of a small float16 tensor the factor may be more than float16 holds.

    Mutates: ``tensors``. Host sync: one for tensors that are on the CPU (offloaded) with a factor that is not.
    """
    for tensor, other in zip(tensors, others, strict=True):
        shard, way, by = to_local(tensor), to_local(other), factor.to(tensor.device)
        wide = torch.promote_types(way.dtype, by.dtype)
        if wide == shard.dtype:
            shard.addcmul_(way, by.to(wide))
        else:
            shard.add_((way.to(wide) * by.to(wide)).to(shard.dtype))


def all_reduce_partial_(parts: Sequence[Tensor], of: Sequence[Tensor], dims: Sequence[Sequence[int]]) -> None:
    """Make sums over some dims of a shard sums over those dims of the whole tensor.

    Args:
        parts: for each tensor a plain one, what this rank has summed of its own shard.
        of: the tensors, plain or DTensor.
        dims: for each tensor those that were summed over.

    Mutates: ``parts``.
    Collective: for the tensors that are cut along a dim that was summed over, one all-reduce per mesh axis, set of such axes
    and dtype; none where only other dims are cut.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
    for part, tensor, summed in zip(parts, of, dims, strict=True):
        if isinstance(tensor, DTensor):
            mesh, places = tensor.device_mesh, enumerate(tensor.placements)
            axes = tuple(axis for axis, place in places if _sharded_dim(place) in summed and mesh.size(axis) > 1)
            if axes:
                groups[mesh, axes, part.dtype].append(part)
    for (mesh, axes, _), sums in groups.items():
        flat = torch.cat([part.flatten() for part in sums]).to(mesh.device_type)  # offloaded ones: as in _all_reduce_square
        for axis in axes:
            dist.all_reduce(flat, group=mesh.get_group(axis))
        for part, found in zip(sums, flat.split([part.numel() for part in sums]), strict=True):
            part.copy_(found.view_as(part))


def mul_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor by a number, on the local shards.

    Mutates: ``tensors``.
    """
    shards = [to_local(tensor) for tensor in tensors]
    for kind in {(shard.dtype, shard.device) for shard in shards}:
        torch._foreach_mul_([shard for shard in shards if (shard.dtype, shard.device) == kind], factor)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm over all elements of all tensors, each global element counted once.

    Args:
        tensors: plain tensors (equal on all ranks) and DTensors, on any number of meshes.

    Returns:
        Scalar ``[]``, at least float32, on the device of the tensors, of their mesh if they are offloaded; the same on every
        rank of the meshes; 0 for no tensors.

    Collective: one all-reduce of a scalar per mesh axis that tensors are sharded on.
    Host sync: none.
    """
    given = list(tensors)
    if given and not any([isinstance(tensor, DTensor) for tensor in given]):  # noqa: C419  # a list is faster for a few
        whole: Tensor = torch.linalg.vector_norm(torch.stack(_foreach_norms(given)))
        return whole
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = defaultdict(list)
    for tensor in given:
        groups[_sharded_axes(tensor)].append(to_local(tensor))
    squares = [_all_reduce_square(shards, where) for where, shards in groups.items()]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt() if squares else torch.zeros(())


def _sharded_axes(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its axes that ``tensor`` is cut along, or None when each rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if _sharded_dim(placement) is not None]
    return (tensor.device_mesh, tuple(axes)) if axes else None


def _foreach_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Their norms, in one dtype that is at least float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    norms = torch._foreach_norm(tensors) if dtypes == {wide} else torch._foreach_norm(tensors, 2.0, dtype=wide)
    return list(norms)


def _all_reduce_square(shards: list[Tensor], where: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    square = torch.stack(_foreach_norms(shards)).square().sum()
    if where is not None:
        mesh, axes = where
        if square.device.type != mesh.device_type:
            square = square.to(mesh.device_type)  # offloaded: its groups are for what is on their device
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
    return square


def local_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of this rank's part of each tensor: scalars ``[]``, at least float32, where the tensors are."""
    return _foreach_norms([to_local(tensor).detach() for tensor in tensors]) if tensors else []


def all_reduce_partial_scalars_(sums: Tensor, of: Sequence[Tensor]) -> None:
    """Make sums over this rank's part of some tensors sums over all of each.

    Args:
        sums: ``[n]``, on the device of the tensors' meshes.
        of: the ``n`` tensors, plain or DTensor.

    Mutates: ``sums``.
    Collective: one all-reduce per mesh axis and set of such axes that tensors are cut along, whatever their number.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for at, tensor in enumerate(of):
        if (where := _sharded_axes(tensor)) is not None:
            groups[where].append(at)
    for (mesh, axes), places in groups.items():
        index = None if len(places) == len(of) else index_tensor(places, sums.device)
        part = sums if index is None else sums[index]
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(part, group=mesh.get_group(axis))
        if index is not None:
            sums[index] = part
