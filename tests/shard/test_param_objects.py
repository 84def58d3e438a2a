"""Facts that belong to the Parameter objects of a model: attributes and classes, after ``shard_model`` and ``materialize``."""

import pytest
import torch
from torch import nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.shard.precision import Precision
from dtrain.step.compose import compose_step
from dtrain.typing import LossSum

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
WORLDS = (1, 2)


def strategies() -> list[str]:
    """Return the strategies for this number of ranks."""
    return [strategy for strategy in STRATEGIES if strategy != "hybrid_shard" or get_dist_info().world_size > 1]


def mesh_for(strategy: str):
    return build_mesh(dp_replicate=get_dist_info().world_size) if strategy == "hybrid_shard" else build_mesh()


class Tagged(nn.Module):
    """Reads and writes attributes of its weight in forward; two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.first.weight.gain = 3.0
        self.first.weight.calls = 0
        self.out.bias._no_weight_decay = True
        self.register_buffer("table", torch.ones(4))
        self.table.kind = "mask"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.calls += 1
        return self.out(self.second(self.first(x) * self.first.weight.gain) * self.table)


def squares(model: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=model(x).square().sum(), weight=len(x))


def describe_attributes(model: nn.Module) -> list:
    weight = model.first.weight
    tied = model.second.weight is weight
    return [weight.gain, weight.calls, tied, getattr(model.out.bias, "_no_weight_decay", None), model.table.kind]


def attributes_after_a_step() -> list:
    descriptions = []
    for strategy in strategies():
        for options in ({}, {"precision": Precision(param="bf16", buffer="bf16")}, {"blocks": (nn.Linear,)}):
            for meta in (False, True) if options else (True,):
                torch.manual_seed(0)
                with torch.device("meta" if meta else get_dist_info().device):
                    model = Tagged()
                model = shard_model(model, mesh_for(strategy), strategy=strategy, **options)
                model = materialize(model, seed=0, init=fill) if meta else model
                descriptions.append([strategy, len(options), meta, *describe_attributes(model)])
                model.out.weight.late = 5  # after shard_model; a forward sees it
                step = compose_step(squares)
                state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
                state, _ = step(state, torch.ones(2, 4))
                descriptions.append([model.first.weight.calls, state.params["out.weight"].late])
    return descriptions


def fill(module: nn.Module) -> None:
    if isinstance(module, Tagged):
        module.table.fill_(1.0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_attributes_of_parameters_and_buffers_are_kept(ranks, world_size):
    for descriptions in ranks(world_size).run(attributes_after_a_step):
        for before, after in zip(descriptions[::2], descriptions[1::2], strict=True):
            assert before[3:] == [3.0, 0, True, True, "mask"], before
            assert after == [1, 5], before


class Shared(nn.Module):
    """Two parameters, or a parameter and a buffer, in the same memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "two parameters":
            self.b.weight = nn.Parameter(self.a.weight.data)
        elif kind == "a slice":
            self.b.bias = nn.Parameter(self.a.weight.data[1])
        elif kind == "a buffer":
            self.register_buffer("copy", self.a.weight.detach())
        elif kind == "columns":
            both = torch.ones(4, 8)
            self.a.weight, self.b.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])
        elif kind == "rows":
            both = torch.ones(8, 4)
            self.a.weight, self.b.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def make_refused(case: str) -> nn.Module:
    if case == "complex":
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
        return model
    if case == "lazy":
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    if case == "max_norm":
        return nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 2))
    if case == "sparse":
        return nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 2))
    return Shared(case)


def told(cases: list) -> dict[str, dict]:
    messages: dict = {case: {} for case in cases}
    for case in cases:
        for strategy in strategies():
            try:
                shard_model(make_refused(case), mesh_for(strategy), strategy=strategy)
                messages[case][strategy] = "taken"
            except ConfigError as error:
                messages[case][strategy] = str(error)
    return messages


REFUSED = {
    "complex": "shard_model: the parameter 'weight' must be real, got complex64. Store nn.Parameter(torch.view_as_real(",
    "lazy": "shard_model: the parameter '1.weight' must have a shape, got a lazy module that has not run.",
    "two parameters": "shard_model: 'a.weight' and 'b.weight' must be one Parameter or have memory of their own",
    "a slice": "shard_model: 'a.weight' and 'b.bias' must be one Parameter or have memory of their own",
    "a buffer": "shard_model: 'a.weight' and 'copy' must be one Parameter or have memory of their own",
    "max_norm": "shard_model: the Embedding '0' must not have max_norm=1.0",
    "sparse": "shard_model: the EmbeddingBag '0' must not have sparse=True",
}


@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_that_would_train_otherwise_are_refused_by_name(ranks, world_size):
    for messages in ranks(world_size).run(told, [*REFUSED, "columns", "rows", "none"]):
        for case, lines in messages.items():
            if world_size == 1 and case in ("max_norm", "sparse"):  # whole on the only rank, as in one process
                assert lines.pop("replicate") == "taken"
            assert all(REFUSED.get(case, "taken") in line and "\n" not in line for line in lines.values()), lines


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("complex", "init: the parameter 'weight' must be real, got complex64"),
        ("lazy", "init: the parameter '1.weight' must have"),
    ],
)
def test_complex_and_lazy_parameters_are_refused_in_one_process(case, message):
    model = make_refused(case)
    with pytest.raises(ConfigError, match=message):
        compose_step(squares).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
