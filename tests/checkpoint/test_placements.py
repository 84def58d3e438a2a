"""Tensors placed by hand, as tensor parallelism does, and unusual optimizer state, into other placements and world sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.filled import full, value_of
from checkpoint.states import digest
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.state import TrainState, init_state

LAYOUTS: dict[str, tuple[tuple[int, ...], list]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hybrid rows": ((2, 2), [Replicate(), Shard(0)]),
    "hybrid columns": ((2, 2), [Shard(1), Replicate()]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "whole": ((4,), [Replicate()]),
}
"""A mesh of four ranks, and placements on it."""
SHAPES = {"matrix": (7, 5), "few": (2, 3), "deep": (5, 3, 4)}


def by_hand(layout: str, *, filled: bool) -> TrainState:
    """Return parameters and their AdamW state placed as ``layout`` says; "plain" parameters are whole on every rank."""
    model = nn.Module()
    mesh = init_device_mesh("cpu", LAYOUTS[layout][0]) if layout != "plain" else None

    def placed(name: str, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        value = value_of(name, shape, dtype) if filled else torch.zeros(shape, dtype=dtype)
        return value if mesh is None else distribute_tensor(value, mesh, LAYOUTS[layout][1])

    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(placed(name, shape)))
    state = init_state(model, torch.optim.AdamW(model.parameters()))
    if filled:
        for name, param in state.params.items():
            moments = {key: placed(f"{key} {name}", SHAPES[name]) for key in ("exp_avg", "exp_avg_sq")}
            state.optimizer.state[param] = {"step": torch.tensor(2.0), **moments}
    return state


def check(state: TrainState, *, step: bool = True) -> None:
    for name, param in state.params.items():
        content = state.optimizer.state[param]
        assert torch.equal(full(param.detach()), value_of(name, SHAPES[name]))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full(content[key]), value_of(f"{key} {name}", SHAPES[name])), (key, name)
            if isinstance(param, DTensor):
                assert (content[key].placements, content[key].device_mesh) == (param.placements, param.device_mesh)
                assert to_local(content[key]).shape == to_local(param).shape
        assert not is_dtensor(content["step"])
    if step:  # the optimizer takes the joined tensor
        for param in state.params.values():
            param.grad = torch.ones_like(param)
        state.optimizer.step()


def load_into(root: str, wanted: list[str]) -> None:
    """Load every placement into each placement in ``wanted``."""
    for saved in LAYOUTS:
        save_sharded(Path(root) / saved, by_hand(saved, filled=True))
        for other in wanted:
            check(load_sharded(Path(root) / saved, by_hand(other, filled=False)), step=saved == "rows")


SOME = ["columns", "rows and columns", "rows twice"]


@pytest.mark.costly
@pytest.mark.parametrize("wanted", [SOME, pytest.param([*LAYOUTS, "plain"], marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_placement_loads_into_other_placements(tmp_path, ranks, wanted):
    ranks(4).run(load_into, str(tmp_path), wanted)
    for saved in LAYOUTS:
        check(load_sharded(tmp_path / saved, by_hand("plain", filled=False)))


class Mlp(nn.Module):
    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(value_of(name, param.shape).sin() if filled else torch.zeros(param.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel(*, filled: bool) -> TrainState:
    mesh = init_device_mesh("cpu", (get_dist_info().world_size,))
    model = parallelize_module(Mlp(filled=filled), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return init_state(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def steps(state: TrainState, count: int) -> list[torch.Tensor]:
    for _ in range(count):
        state.optimizer.zero_grad()
        state.model(torch.ones(3, 6)).square().sum().backward()
        state.optimizer.step()
    return [full(param.detach()) for param in state.params.values()]


def resume_tensor_parallel(root: str) -> list[bool]:
    straight = steps(tensor_parallel(filled=True), 5)
    state = tensor_parallel(filled=True)
    steps(state, 3)
    save_sharded(root, state)
    resumed = steps(load_sharded(root, tensor_parallel(filled=False)), 2)
    return [torch.equal(a, b) for a, b in zip(straight, resumed, strict=True)]


def test_tensor_parallel_run_resumes_exactly_and_in_one_process(tmp_path, ranks):
    for equal in ranks(2).run(resume_tensor_parallel, str(tmp_path)):
        assert equal == [True] * 4
    model = Mlp(filled=False)
    state = load_sharded(tmp_path, init_state(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    alone = steps(state, 2)
    model = Mlp(filled=True)
    straight = steps(init_state(model, torch.optim.AdamW(model.parameters(), lr=0.1)), 5)
    for a, b in zip(alone, straight, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums of other orders


class EightBit(torch.optim.Optimizer):
    """Moments as codes of a byte each, with the largest value of each block beside them, and a table; no ``step`` for all."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure=None) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            codes = torch.zeros_like(p, dtype=torch.uint8)
            to_local(codes).copy_(torch.arange(to_local(p).numel()).reshape(to_local(p).shape) % 251)
            blocks = p.new_empty((-(-p.numel() // 4),))
            to_local(blocks).copy_(torch.arange(blocks.numel()))
            self.state[p] = {"codes": codes, "absmax": blocks, "map": torch.arange(256.0), "bits": 8}
            if number:
                self.state[p]["step"] = torch.tensor(3, dtype=torch.int64)


def eight_bit(layout: str, *, stepped: bool) -> TrainState:
    plain = by_hand(layout, filled=False)
    state = init_state(plain.model, EightBit(plain.model.parameters()))
    if stepped:
        state.optimizer.step()
    return state


def through_eight_bit(root: str) -> list:
    save_sharded(root, eight_bit("rows", stepped=True))
    state = load_sharded(root, eight_bit("columns", stepped=False))
    save_sharded(Path(root) / "again", state)
    back = load_sharded(Path(root) / "again", eight_bit("rows", stepped=False))
    content = [back.optimizer.state[param] for param in back.params.values()]
    return [
        digest(back, rng=False) == digest(eight_bit("rows", stepped=True), rng=False),
        ["step" in c for c in content],
        [str(c["codes"].dtype) for c in content],
        [is_dtensor(c["absmax"]) for c in content],
        [is_dtensor(c["map"]) for c in content],
    ]


def test_eight_bit_optimizer_state_round_trips_through_other_placement(tmp_path, ranks):
    for same, has_step, dtypes, absmax, table in ranks(4).run(through_eight_bit, str(tmp_path)):
        assert same
        assert has_step == [False, True, True]
        assert dtypes == ["torch.uint8"] * 3
        assert absmax == [True] * 3
        assert table == [False] * 3


def grouped(layout: str, *, lr: float) -> TrainState:
    state = by_hand(layout, filled=False)
    matrix, *others = state.model.parameters()
    groups = [{"params": others, "weight_decay": lr / 10}, {"params": [matrix], "lr": torch.tensor(lr)}]
    state = init_state(state.model, torch.optim.AdamW(groups, lr=lr, foreach=False, capturable=False))
    content = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(matrix), "exp_avg_sq": torch.zeros_like(matrix)}
    state.optimizer.state[matrix] = content  # the other parameters have had no gradient
    return state


def through_groups(root: str) -> list:
    save_sharded(root, grouped("rows", lr=0.25))
    state = load_sharded(root, grouped("columns", lr=0.5))
    first, second = state.optimizer.param_groups
    return [first["lr"], first["weight_decay"], float(second["lr"]), len(state.optimizer.state)]


def test_parameter_groups_and_stateless_parameters_are_restored(tmp_path, ranks):
    expected = [0.25, 0.025, 0.25, 1]
    assert ranks(4).run(through_groups, str(tmp_path)) == [expected] * 4
    state = load_sharded(tmp_path, grouped("plain", lr=0.5))
    assert [float(group["lr"]) for group in state.optimizer.param_groups] == [0.25, 0.25]


def strided() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last))
    return model


def test_optimizer_state_keeps_strides_of_its_parameter(tmp_path):
    made = []
    for _ in range(2):
        model = strided()
        made.append(init_state(model, torch.optim.AdamW(model.parameters())))
    param = made[0].params["weight"]
    param.grad = torch.ones_like(param)
    made[0].optimizer.step()
    save_sharded(tmp_path, made[0])
    state = load_sharded(tmp_path, made[1])
    param = state.params["weight"]
    content = state.optimizer.state[param]
    assert param.is_contiguous(memory_format=torch.channels_last)
    assert content["exp_avg"].stride() == param.stride()
    assert torch.equal(content["exp_avg"], made[0].optimizer.state[made[0].params["weight"]]["exp_avg"])


@pytest.mark.parametrize("wanted", ["few", "all"])
def test_loaded_small_tensors_own_their_storage(tmp_path, wanted):
    """A tensor of the optimizer that is kept alone does not keep tensors that were read beside it."""
    state = by_hand("plain", filled=True)
    save_sharded(tmp_path, state)
    back = load_sharded(tmp_path, by_hand("plain", filled=False))
    names = list(back.params) if wanted == "all" else ["few"]
    for name in names:
        for tensor in back.optimizer.state[back.params[name]].values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
