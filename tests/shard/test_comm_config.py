"""CommConfig: gradients and the number of collectives do not depend on prefetching and groups."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard import fsdp as home
from dtrain.shard.fsdp import CommConfig, check_comm_config, shard_model
from dtrain.shard.wrapping import plan_wrapping
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives
from old_torch import torch_before
from shard.models import SAMPLES, WEIGHTS, Block, batch, make, squared

OPTIONS = {
    "far ahead": {"forward_prefetch": 3, "backward_prefetch": 3},
    "not ahead": {"backward_prefetch": 0},
    "own group": {"reduce_group": "own"},
    "buffers": {"reduce_buffers": 3},
}
MISSING = {  # fields that torch before 2.13 lacks, and dtrain's message
    case: f"shard_model: {option} needs torch 2.13, got {torch.__version__}. Leave {option} out."
    for case, option in (("own group", "reduce_group='own'"), ("buffers", "reduce_buffers"))
    if torch_before("2.13")
}


def stepped(strategy: str, communication: CommConfig | None) -> tuple[list[torch.Tensor], Counter[str]]:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = shard_model(make("called twice"), mesh, strategy=strategy, blocks=(Block,), comm_config=communication)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    share = SAMPLES // get_dist_info().world_size
    mine = {
        key: v[get_dist_info().rank * share : (get_dist_info().rank + 1) * share]
        for key, v in batch("called twice", WEIGHTS).items()
    }
    with count_collectives() as seen:
        for _ in range(2):
            microbatch_step(state, mine, loss_fn=squared, microbatch_size=1)
    return [full_tensor(p.grad) for p in net.parameters()], Counter(record.op for record in seen.records)


def same(strategy: str) -> dict[str, list]:
    grads, kinds = stepped(strategy, None)
    results = {}
    for name, options in OPTIONS.items():
        try:
            others, counted = stepped(strategy, CommConfig(**options))
        except ConfigError as refused:
            results[name] = str(refused)
            continue
        results[name] = [all(map(torch.equal, grads, others)), dict(counted - kinds), dict(kinds - counted)]
    return results


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
def test_comm_options_keep_gradients_and_collective_counts(ranks, strategy):
    expected = {name: MISSING.get(name, [True, {}, {}]) for name in OPTIONS}
    for results in ranks(4 if strategy == "hybrid_shard" else 2).run(same, strategy):
        assert results == expected


class Unit(FSDPModule, nn.Module):
    """Stand for a unit of FSDP2, and record the calls."""

    def __new__(cls, *args):
        return object.__new__(cls)

    def __init__(self, *children: nn.Module) -> None:
        nn.Module.__init__(self)
        self.told: dict[str, list] = {}
        for index, child in enumerate(children):
            self.add_module(str(index), child)

    def set_modules_to_forward_prefetch(self, modules):
        self.told["forward"] = modules

    def set_modules_to_backward_prefetch(self, modules):
        self.told["backward"] = modules

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({}, None, None),
        ({"forward_prefetch": 1}, [[1], [2], [3], []], None),
        ({"forward_prefetch": 2}, [[1, 2], [2, 3], [3], []], None),
        ({"backward_prefetch": 0}, None, [[0], [1], [2], [3]]),
        ({"backward_prefetch": 2}, None, [[0], [0], [1, 0], [2, 1]]),
    ],
)
def test_units_prefetch_their_neighbors(options, forward, backward):
    blocks = [Unit(nn.Linear(2, 2)) for _ in range(3)]
    model = Unit(*blocks)
    home._apply_comm_config(model, plan_wrapping(model, lambda name, module: module in blocks, ()), CommConfig(**options))
    units = [model, *blocks]
    for kind, expected in (("forward", forward), ("backward", backward)):
        told = [unit.told.get(kind) for unit in units]
        assert [None if neighbors is None else [units.index(u) for u in neighbors] for neighbors in told] == (
            expected or [None] * 4
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_prefetch": -1}, "forward_prefetch must be an integer of at least 0, got -1"),
        ({"backward_prefetch": 1.5}, "backward_prefetch must be an integer of at least 0, got 1.5"),
        ({"reduce_buffers": 0}, "reduce_buffers must be an integer of at least 1, got 0"),
        ({"reduce_group": "mine"}, "reduce_group must be 'shared' or 'own', got 'mine'"),
        ({"symmetric_memory": 1}, "symmetric_memory must be True or False, got 1"),
        ({"symmetric_memory": True, "reduce_buffers": 2}, "Leave reduce_buffers at 1"),
    ],
)
def test_invalid_fields_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CommConfig(**options)


def test_options_unsupported_by_the_device_are_refused():
    with pytest.raises(ConfigError, match="symmetric_memory needs CUDA, got a cpu mesh"):
        check_comm_config(CommConfig(symmetric_memory=True), "cpu")
    with pytest.raises(ConfigError, match="comm_config must be a CommConfig or None, got 3"):
        check_comm_config(3, "cpu")


@pytest.mark.parametrize(
    ("call", "options", "name", "version"),
    [
        ("set_separate_reduce_scatter_group", {"reduce_group": "own"}, "reduce_group='own'", "2.13"),
        ("set_reduce_scatter_max_input_buffers", {"reduce_buffers": 2}, "reduce_buffers", "2.13"),
        ("set_symm_mem_for_comm", {"symmetric_memory": True}, "symmetric_memory", "2.12"),
    ],
)
def test_options_missing_in_this_torch_are_refused(monkeypatch, call, options, name, version):
    assert hasattr(FSDPModule, call) != torch_before(version)
    monkeypatch.delattr(FSDPModule, call, raising=False)  # as in an older one
    message = f"shard_model: {name} needs torch {version}, got {torch.__version__}. Leave {name} out."
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_comm_config(CommConfig(**options), "cuda")
    assert check_comm_config(None, "cuda") == CommConfig()
