"""A state whose every tensor is known by its name, on any layout, and whether it has come back."""

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from checkpoint.states import Net
from dtrain.checkpoint import plan
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import seed_all
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState, init_state

SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
LAYOUTS = {1: ("none", "full_shard", "shard_grad_op", "replicate"), 2: SHARDED, 3: SHARDED, 4: SHARDED}
"""The strategies at each world size; "none" is a plain model."""


class Model(Net):
    """With a weight in two blocks, and a scalar, which no strategy cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(7, 2)
        self.again.weight = self.last.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return super().forward(x) + self.again(hidden) * self.scale


def laid_out(model: nn.Module, strategy: str, **options: Any) -> nn.Module:
    """The model by this strategy; 4 ranks make 2 x 2 for ``hybrid_shard``."""
    if strategy == "none":
        return model
    ranks = get_dist_info().world_size
    mesh = build_mesh(dp_replicate=2 if ranks == 4 else ranks) if strategy == "hybrid_shard" else build_mesh()
    return shard_model(model, mesh, strategy=strategy, blocks=(nn.Linear,), **options)


def value_of(name: str, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of the tensor of this name in every checkpoint of these tests."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2], "little")
    return (torch.arange(torch.Size(shape).numel()) + start).reshape(shape).to(dtype)


def like(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(full, param.device_mesh, param.placements) if isinstance(param, DTensor) else full


def sharded_state(strategy: str, *, filled: bool, kind: type[Net] = Model) -> TrainState:
    """A state on all ranks; ``filled`` with values derived from names, or with zeros and an empty optimizer."""
    torch.manual_seed(0)
    model = laid_out(kind(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if filled else 0.1, betas=(0.5, 0.25) if filled else (0.9, 0.99))
    state = init_state(model, optimizer, seed=11 if filled else 0)
    shadow = {}
    with torch.no_grad():
        for name, p in state.params.items():
            value = like(p, value_of(name, p.shape) if filled else torch.zeros(p.shape))
            to_local(p).copy_(to_local(value))
            shadow[name] = like(p, value_of(f"ema {name}", p.shape, torch.float64) * filled)
            if filled:
                optimizer.state[p] = {
                    "step": torch.tensor(3.0),
                    "exp_avg": like(p, value_of(f"avg {name}", p.shape)),
                    "exp_avg_sq": like(p, value_of(f"sq {name}", p.shape, torch.bfloat16)),
                    "row": like_replicated(p, value_of(f"row {name}", (*p.shape[:1], 1))),
                }
        model.seen.fill_(5 if filled else 0)
    clock = replace(state.clock, step=4, samples=44, seconds=1.5) if filled else state.clock
    slices = {"ema": {"shadow": shadow, "whole": value_of("whole", (2, 2)) * filled, "updates": 4 * filled}}
    return replace(state, transform_states=slices, clock=clock)


def like_replicated(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return full
    made = param.new_empty(full.shape, dtype=full.dtype)
    to_local(made).copy_(full)
    return made


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_filled(state: TrainState) -> None:
    """Every tensor as ``value_of`` says, put together by torch's own ``full_tensor``."""
    for name, p in state.params.items():
        assert torch.equal(full(p.detach()), value_of(name, p.shape)), name
        content = state.optimizer.state[p]
        assert list(content) == ["step", "exp_avg", "exp_avg_sq", "row"]
        for key, prefix, dtype in (("exp_avg", "avg", torch.float32), ("exp_avg_sq", "sq", torch.bfloat16)):
            tensor = content[key]
            assert is_dtensor(tensor) == is_dtensor(p)
            if isinstance(p, DTensor):
                assert (tensor.placements, tensor.device_mesh) == (p.placements, p.device_mesh)
            assert torch.equal(full(tensor), value_of(f"{prefix} {name}", p.shape, dtype)), f"{key} {name}"
        assert is_dtensor(content["row"]) == is_dtensor(p)
        assert torch.equal(full(content["row"]), value_of(f"row {name}", (*p.shape[:1], 1)))
        assert not is_dtensor(content["step"])
        assert float(content["step"]) == 3.0
        shadow = state.transform_states["ema"]["shadow"][name]
        assert is_dtensor(shadow) == is_dtensor(p)
        assert torch.equal(full(shadow), value_of(f"ema {name}", p.shape, torch.float64)), f"ema {name}"
    assert torch.equal(state.transform_states["ema"]["whole"], value_of("whole", (2, 2)))
    assert state.transform_states["ema"]["updates"] == 4
    assert int(state.model.seen) == 5
    assert (state.step, state.clock.samples, state.clock.seconds, state.seed) == (4, 44, 1.5, 11)
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.25))


def save_filled(root: str, strategy: str) -> list:
    state = sharded_state(strategy, filled=True)
    seed_all("stream", get_dist_info().rank)
    # So that replicas share even the writing of so little.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_WRITER_BYTES", 1)
        handle = save_sharded(root, state, extra={"history": [1, 2]})
    return [str(handle.path), handle.result().bytes, rng_digest()]


def rng_digest() -> str:
    return hashlib.sha256(repr([random.random(), float(np.random.rand()), float(torch.rand(()))]).encode()).hexdigest()


def load_filled(path: str, strategy: str) -> list:
    history: list[int] = []
    restored = load_sharded(path, sharded_state(strategy, filled=False), extra={"history": history})
    drawn = rng_digest()
    check_filled(restored)
    seed_all(11, "resume", 4, get_dist_info().rank)
    return [restored.step, history, drawn, rng_digest()]
