"""Apply a function to tensors with gradients in every layout, and compare the results with those of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtrain.dist.dtensor import full_tensor

SHAPES = {"matrix": (5, 3), "image": (4, 3, 2, 2), "few": (1, 6), "vector": (5,), "short": (1,), "number": ()}
LAYOUTS: dict[int, dict[str, tuple[tuple[int, ...], list[Any]]]] = {
    2: {"rows": ((2,), [Shard(0)]), "columns": ((2,), [Shard(1)]), "copied": ((2,), [Replicate()])},
    4: {
        "rows of copies": ((2, 2), [Replicate(), Shard(0)]),
        "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
        "columns twice": ((2, 2), [Shard(1), Shard(1)]),
        "columns of copies": ((2, 2), [Replicate(), Shard(1)]),
    },
}


def params(*, spread: float = 3.0) -> dict[str, Tensor]:
    """Make plain parameters with gradients of very different sizes, in float64; one gradient is zero, one is missing."""
    generator = torch.Generator().manual_seed(4)
    made: dict[str, Tensor] = {}
    for name, shape in {**SHAPES, "zero": (3, 2), "without": (3, 2)}.items():
        weight, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        made[name] = nn.Parameter(weight * (name != "zero"))
        made[name].grad = None if name == "without" else grad * spread ** torch.randn((), generator=generator).item()
    return made


def placed(plain: Mapping[str, Tensor], mesh: Any, placements: list[Any]) -> dict[str, Tensor]:
    """Return the same tensors on a mesh; a tensor with too few dims to be cut this way is copied."""

    def put(tensor: Tensor) -> Tensor:
        fits = [place if isinstance(place, Replicate) or place.dim < tensor.ndim else Replicate() for place in placements]
        return distribute_tensor(tensor.detach().clone(), mesh, fits)

    made: dict[str, Tensor] = {}
    for name, param in plain.items():
        made[name] = nn.Parameter(put(param))
        made[name].grad = None if param.grad is None else put(param.grad)
    return made


def largest_differences(act: Callable[[Mapping[str, Tensor]], Any], world_size: int) -> dict[str, float]:
    """Return by layout the distance of parameters and gradients after ``act`` from those after ``act`` on whole tensors."""
    expected = params()
    act(expected)
    largest = {}
    for layout, (shape, placements) in LAYOUTS[world_size].items():
        cut = placed(params(), init_device_mesh("cpu", shape), placements)
        act(cut)
        pairs = [(full_tensor(cut[name].detach()), param.detach()) for name, param in expected.items()]
        pairs += [(full_tensor(cut[n].grad), p.grad) for n, p in expected.items() if p.grad is not None]
        largest[layout] = max((here - there).abs().max().item() for here, there in pairs)
    return largest
