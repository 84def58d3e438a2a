"""The only place that looks inside a DTensor: local shards, where they lie, norms over meshes, in-place arithmetic.

Everything takes plain tensors and DTensors alike, so the code above needs no case distinction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dtrain.errors import ConfigError


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies on a mesh, cut or copied."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard that this rank holds (sharing storage), or the tensor itself when it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_shard(like: Tensor, shard: Tensor) -> Tensor:
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


def copied_like(like: Tensor, whole: Tensor) -> Tensor:
    """``whole``, which all ranks hold, as a tensor on the mesh of ``like``; for a plain ``like`` that is ``whole`` itself."""
    if not isinstance(like, DTensor):
        return whole
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a distributed tensor, as a plain one; the tensor itself when it is not distributed.

    Collective: one all-gather per mesh axis that it is sharded on.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placement(tensor: Tensor) -> str:
    """Where a tensor lies, for people: ``"whole"``, or by mesh axis, such as ``"cut on dim 0 over dp_shard=2"``."""
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    how = [f"cut on dim {place.dim}" if isinstance(place, Shard) else "copied" for place in tensor.placements]
    axes = zip(how, names, mesh.shape, strict=True)
    return ", ".join(f"{what} over {name}={size}" for what, name, size in axes if size > 1) or "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The box of a global tensor that one rank holds. ``copy`` of ``copies`` ranks hold this very box."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    copy: int = 0
    copies: int = 1


@lru_cache(maxsize=4096)
def whole_extent(shape: tuple[int, ...], copy: int = 0, copies: int = 1) -> Extent:
    """All of a tensor, which so many ranks hold."""
    return Extent(shape=shape, offset=(0,) * len(shape), size=shape, copy=copy, copies=copies)


def extent(tensor: Tensor) -> Extent:
    """Where this rank's shard of ``tensor`` lies in the global tensor. A plain tensor is its own only copy."""
    if not isinstance(tensor, DTensor):
        return whole_extent(tuple(tensor.shape))
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"tensor of shape {tuple(tensor.shape)} lives on a mesh that this rank is not part of")
    return shard_extent(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements)


@lru_cache(maxsize=4096)  # of the many tensors of a model few have a shape of their own
def shard_extent(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> Extent:
    """The box at ``coordinate`` of a tensor placed on a mesh, a pure function.

    ``Shard(d)`` cuts as ``torch.chunk`` does: pieces of ``ceil(n / k)`` rows, the last ones shorter or empty.

    Raises:
        ConfigError: a placement other than ``Replicate`` and ``Shard``.
    """
    offset, size = [0] * len(shape), list(shape)
    copy, copies = 0, 1
    for places, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            copy, copies = copy * places + index, copies * places
        elif type(placement) is Shard:
            rows = -(-size[placement.dim] // places)
            start = min(index * rows, size[placement.dim])
            offset[placement.dim] += start
            size[placement.dim] = min(rows, size[placement.dim] - start)
        else:
            raise ConfigError(f"tensor of shape {shape} has placement {placement}; dtrain knows Replicate and Shard")
    return Extent(shape=shape, offset=tuple(offset), size=tuple(size), copy=copy, copies=copies)


def lerp_(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """``target += weight * (source - target)`` for each pair, on the local shards.

    Mutates: ``targets``.
    """
    if targets:
        torch._foreach_lerp_([local(t) for t in targets], [local(s) for s in sources], weight)


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by the scalar ``factor`` ``[]``, in each tensor's own dtype, without a host sync.

    Mutates: ``tensors``.
    """
    shards = [local(tensor) for tensor in tensors]
    dtypes = {shard.dtype for shard in shards}
    for dtype in dtypes:
        same = shards if len(dtypes) == 1 else [shard for shard in shards if shard.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype))  # by a tensor: by a number it takes three times as long on a CPU


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm over all elements of all tensors, each global element counted once.

    Args:
        tensors: plain tensors (equal on all ranks) and DTensors, on any number of meshes.

    Returns:
        Scalar ``[]``, at least float32, on the tensors' device, the same on every rank of the meshes; 0 for no tensors.

    Collective: one all-reduce of a scalar per mesh axis that tensors are sharded on.
    Host sync: none.
    """
    given = list(tensors)
    if given and not any([isinstance(tensor, DTensor) for tensor in given]):  # noqa: C419  # a list is faster for a few
        whole: Tensor = torch.linalg.vector_norm(torch.stack(_norms(given)))
        return whole
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = defaultdict(list)
    for tensor in given:
        groups[_sharded_on(tensor)].append(local(tensor))
    squares = [_reduced_square(shards, where) for where, shards in groups.items()]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _sharded_on(tensor: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its axes that ``tensor`` is cut along, or None when each rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    return (tensor.device_mesh, tuple(axes)) if axes else None


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Their norms, in one dtype that is at least float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    norms = torch._foreach_norm(tensors) if dtypes == {wide} else torch._foreach_norm(tensors, 2.0, dtype=wide)
    return list(norms)


def _reduced_square(shards: list[Tensor], where: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    square = torch.stack(_norms(shards)).square().sum()
    if where is not None:
        mesh, axes = where
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(square, group=mesh.get_group(axis))
    return square
