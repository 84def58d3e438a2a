"""Cutting a plain model into units: pure functions, no ranks."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.wrapping import plan_wrapping
from shard.models import Block, Masked, Scaled, Stack, Tied


def units(model: nn.Module, blocks) -> list[str]:
    names = {id(module): name or "model" for name, module in modules_by_fqn(model)}
    return [" ".join(names[id(module)] for module in modules) for modules in plan_wrapping(model, blocks, ()).units]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), ["model"]),
        ((Block,), ["blocks.0", "blocks.1", "blocks.2", "model"]),
        (Block, ["blocks.0", "blocks.1", "blocks.2", "model"]),
        ("head", ["head", "model"]),
        (("blocks.0", Block), ["blocks.0", "blocks.1", "blocks.2", "model"]),
        (lambda name, module: name == "blocks.1", ["blocks.1", "model"]),
        (("blocks.0", "blocks.*.up"), ["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.0", "model"]),
        ((Stack, "head"), ["head", "model"]),
    ],
    ids=["none", "class", "bare class", "name", "both", "predicate", "nested", "the model itself"],
)
def test_blocks_are_selected_by_class_name_or_predicate(blocks, expected):
    names = units(Stack(), blocks)
    assert sorted(names) == sorted(expected)
    assert names[-1] == "model"
    assert all(names.index(inner) < names.index(outer) for inner in names for outer in names if inner.startswith(f"{outer}."))


def test_tied_parameters_across_units_form_an_earlier_unit():
    names = units(Tied(), ("first", "last"))
    assert names.index("first.0 last.1") < names.index("first")
    assert sorted(names) == ["first", "first.0 last.1", "last", "model"]
    assert units(Tied(), (Block,)) == ["first.1", "last.0", "model"], "both in the model's own unit: nothing to do"


def test_three_modules_that_share_two_parameters_are_one_unit():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight, net[2].bias = net[0].weight, net[1].bias
    first, last = units(net, (nn.Linear,))
    assert (sorted(first.split()), last) == (["0", "1", "2"], "model")


def test_scalar_and_named_parameters_are_not_sharded():
    assert sorted(plan_wrapping(Scaled(), (), ()).ignored_params) == ["temperature"]
    assert sorted(plan_wrapping(Scaled(), (), "head.*").ignored_params) == ["head.bias", "head.weight", "temperature"]
    assert sorted(plan_wrapping(Scaled(), (), lambda name, p: p.ndim == 1).ignored_params) == [
        "block.down.bias", "block.up.bias", "head.bias", "temperature",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), {"model"}),
        (("embed", "cls"), {"embed", "cls", "embed.0 cls.1", "model"}),
        ((nn.Linear, nn.Embedding), {"cls.0", "cls.1.mix", "embed.1.up", "embed.1.down", "embed.0 cls.1", "model"}),
        (("cls.1.decoder",), {"embed.0 cls.1", "model"}),
    ],
    ids=["none", "around", "leaves", "one leaf"],
)
def test_nested_ties_across_units_form_one_outermost_unit(blocks, expected):
    names = {" ".join(sorted(name.split(), reverse=True)) for name in units(Masked(), blocks)}
    assert names == expected


def test_empty_parameters_are_not_sharded():
    net = Stack()
    net.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    assert sorted(plan_wrapping(net, (), ()).ignored_params) == ["empty"]


class Listed(nn.Module):
    """Its parameters are in a list, which nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize("blocks", [(), ("0",)])
def test_frozen_and_ignored_parameters_may_have_other_dtypes(blocks):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double().requires_grad_(False), nn.Linear(2, 2).half())
    assert sorted(plan_wrapping(net, blocks, "2.*").ignored_params) == ["2.bias", "2.weight"]


@pytest.mark.parametrize(
    ("model", "blocks", "ignored_params", "message"),
    [
        (Stack, (nn.Conv2d,), (), "blocks names Conv2d, but the model has no such module"),
        (Stack, ("blocks.7",), (), "blocks names 'blocks.7', but the model has no such module"),
        (Stack, ("blocks",), (), "blocks selects 'blocks', a ModuleList without forward. Select its submodules."),
        (Stack, (3,), (), r"must be module classes, names or a function of \(name, module\), got 3"),
        (Stack, lambda name, module: False, (), "a function that selects no module"),
        (Stack, (), ("tail.*",), r"ignored_params names 'tail.\*', but no parameter matches"),
        (Stack, (), (4,), "ignored_params: patterns of names must be text, got 4"),
        (Stack, (), 4, r"ignored_params must be names or a function of \(name, parameter\), got 4"),
        (Stack, 4, (), r"must be module classes, names or a function of \(name, module\), got 4"),
        (Stack, (Block(),), (), r"must be module classes, names or a function of \(name, module\), got a Block. Pass"),
        (Listed, ("rows",), (), "blocks selects 'rows', a ParameterList without forward. Select its submodules."),
    ],
)
def test_invalid_arguments_are_refused(model, blocks, ignored_params, message):
    with pytest.raises(ConfigError, match=message):
        plan_wrapping(model(), blocks, ignored_params)


def test_root_parameter_tied_to_a_block_is_refused():
    net = Stack()
    net.register_parameter("own", net.blocks[0].up.weight)
    with pytest.raises(ConfigError, match="the root module owns a parameter that is tied to a parameter of a block"):
        plan_wrapping(net, (Block,), ())
