"""Muon on stacked matrices: each by itself, equal to a loop over experts, however the stack is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.optim.groups import muon_groups
from dtrain.optim.muon import Muon, orthogonalize
from dtrain.testing import count_collectives

EXPERTS = 5
SHAPES = ((EXPERTS, 4, 6), (EXPERTS, 7, 3), (1, 3, 3))
# The iteration is the same for each matrix, and only its products are batched.
TOLERANCE = 1e-12
STEPS = 3


def stacks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def grads(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def by_expert() -> list[torch.Tensor]:
    """Return the stacks after some steps of Muon on each expert as a matrix of its own."""
    matrices = [[nn.Parameter(matrix.clone()) for matrix in stack] for stack in stacks()]
    optimizer = Muon([matrix for stack in matrices for matrix in stack], ns_dtype="param")
    for step in range(STEPS):
        for stack, grad in zip(matrices, grads(step), strict=True):
            for matrix, own in zip(stack, grad, strict=True):
                matrix.grad = own.clone()
        optimizer.step()
    return [torch.stack([matrix.detach() for matrix in stack]) for stack in matrices]


def error_of(dim: int | None) -> float:
    """Return the error of stacks that are sharded along ``dim``, or whole."""
    mesh = None if dim is None else init_device_mesh("cpu", (get_dist_info().world_size,))

    def place(value: torch.Tensor) -> torch.Tensor:
        return value if dim is None else distribute_tensor(value, mesh, [Shard(dim)])

    params = [nn.Parameter(place(stack)) for stack in stacks()]
    optimizer = Muon(params, ns_dtype="param", stacked=True)
    for step in range(STEPS):
        for param, grad in zip(params, grads(step), strict=True):
            param.grad = place(grad)
        optimizer.step()
    pairs = zip(params, by_expert(), strict=True)
    return max((full_tensor(param.detach()) - expected).abs().max().item() for param, expected in pairs)


def test_stack_equals_a_loop_over_experts():
    assert error_of(None) <= TOLERANCE
    stack = stacks()[1]
    expected = torch.stack([orthogonalize(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), expected, rtol=0.0, atol=TOLERANCE)
    assert not torch.allclose(orthogonalize(stack[0] * 2 + stack[1]), expected[0])


def along_each_axis() -> dict[str, float]:
    return {str(dim): error_of(dim) for dim in (0, 1, 2)}


def test_stack_sharded_along_any_axis_equals_one_process(ranks):
    """Five experts on two ranks, and one expert on two ranks: one rank has none."""
    for errors in ranks(2).run(along_each_axis):
        assert max(errors.values()) <= TOLERANCE, errors


def trained(strategy: str | None) -> dict[str, torch.Tensor]:
    from experts.models import data, loss_fn, make, weigh

    model = make()
    if strategy is not None:
        mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
        model = dt.shard_model(model, mesh, strategy=strategy, blocks=(dt.experts.Experts,))
    groups = muon_groups(model, head="head.*", stacked="**.experts.*", lr=0.05, ns_dtype="param")
    assert [group["name"] for group in groups] == ["matrices", "stacks", "adamw", "adamw.no_decay"]
    step = dt.compose_step(loss_fn, [dt.transforms.balance_experts(0.01)], batch_spec=dt.batch_spec(weight=weigh))
    state = step.init(model, Muon(groups), allow_equal_batches=True)
    info = get_dist_info()
    share = 8 // info.world_size
    for tokens in data():
        state, _ = step(state, tokens[info.rank * share : (info.rank + 1) * share])
    return {name: full_tensor(param.detach()).clone() for name, param in state.params.items()}


def sharded_training(strategy: str, expected: dict[str, list[float]]) -> float:
    values = trained(strategy)
    return max(
        (values[name].flatten() - torch.tensor(expected[name], dtype=torch.float64)).abs().max().item() for name in expected
    )


@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("hybrid_shard", marks=pytest.mark.slow)])
def test_training_of_experts_with_muon_equals_one_process(ranks, strategy):
    expected = {name: value.flatten().tolist() for name, value in trained(None).items()}
    for error in ranks(4 if strategy == "hybrid_shard" else 2).run(sharded_training, strategy, expected):
        assert error <= 1e-11  # five steps of the iteration magnify rounding, as in test_muon.py


def step_alone() -> list[dict[str, int]]:
    """Return the collectives of a step of stacks that FSDP2 has sharded along experts."""
    experts = dt.shard_model(dt.experts.Experts(4, 6, 4).double(), dt.build_mesh())
    optimizer = Muon(experts.parameters(), stacked=True)
    for param in experts.parameters():
        param.grad = torch.ones_like(param)
    with count_collectives() as seen:
        optimizer.step()
    return [ops for ops in seen.counts().values() if ops]


def test_stacks_need_no_communication(ranks):
    assert ranks(2).run(step_alone) == [[], []]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Muon([nn.Parameter(torch.ones(3, 3))], stacked=True),
            r"Muon: parameters of a group with stacked=True must have three dims, .* got shape \(3, 3\). Put",
        ),
        (lambda: Muon([nn.Parameter(torch.ones(2, 3, 3))]), r"must have two dims, got shape \(2, 3, 3\)"),
        (
            lambda: muon_groups(nn.Linear(2, 2), head=(), stacked="weight"),
            "muon_groups: stacked must match parameters with three dims, got weight, which has 2 dims. Name the matrices",
        ),
        (
            lambda: muon_groups(nn.Linear(2, 2), head=(), stacked="experts.*"),
            "got 'experts.\\*', which matches none. Name the matrices",
        ),
    ],
)
def test_other_shapes_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_stacks_stay_with_adamw_unless_named():
    model = nn.ModuleDict({"conv": nn.Conv1d(2, 3, 3), "experts": dt.experts.Experts(4, 6, 2), "out": nn.Linear(4, 4)})
    groups = {group["name"]: group["method"] for group in muon_groups(model, head=())}
    assert groups == {"matrices": "muon", "adamw": "adamw", "adamw.no_decay": "adamw"}
