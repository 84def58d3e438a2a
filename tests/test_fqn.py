"""Names are those of the plain model, under any wrapper of its modules."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns, modules_by_fqn, parameters_by_fqn


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a name that wrappers use, too
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def model() -> nn.Module:
    return nn.Sequential(Inner(), nn.Sequential(nn.Linear(2, 2), Inner()))


PLAIN = [name for name, _ in model().named_parameters()]


def compiled_inside() -> nn.Module:
    net = model()
    net[1] = torch.compile(net[1], backend="eager")
    return net


def checkpointed() -> nn.Module:
    net = model()
    net[0] = checkpoint_wrapper(net[0])
    net[1][1] = torch.compile(checkpoint_wrapper(net[1][1]), backend="eager")
    return net


@pytest.mark.parametrize(
    "wrap",
    [model, compiled_inside, checkpointed, lambda: torch.compile(model(), backend="eager"), lambda: DataParallel(model())],
    ids=["plain", "compiled inside", "checkpointed", "compiled whole", "data parallel"],
)
def test_parameter_names_are_clean_for_every_wrapper(wrap):
    net = wrap()
    params, aliases = parameters_by_fqn(net)
    assert list(params) == PLAIN
    assert aliases == {}
    assert [id(p) for p in params.values()] == [id(p) for p in net.parameters()]
    assert list(buffers_by_fqn(net)) == ["0.kept", "0.scratch", "1.1.kept", "1.1.scratch"]
    assert list(buffers_by_fqn(net, persistent_only=True)) == ["0.kept", "1.1.kept"]
    assert [name for name, _ in modules_by_fqn(net)] == [name for name, _ in model().named_modules()]


def test_tied_parameters_are_listed_once_with_aliases():
    net = model()
    net[1][0].weight = net[0].module.weight
    net.append(net[0])
    params, aliases = parameters_by_fqn(net)
    assert "1.0.weight" not in params
    assert aliases == {"1.0.weight": "0.module.weight", "2.module.weight": "0.module.weight", "2.module.bias": "0.module.bias"}
    assert list(buffers_by_fqn(net)) == ["0.kept", "0.scratch", "1.1.kept", "1.1.scratch"]
    assert [name for name, _ in modules_by_fqn(net, include_duplicates=True)][-2:] == ["2", "2.module"]


def test_patterns_match_whole_names():
    fits = compile_patterns(["a.*", "b.**", "c"], caller="test")
    assert [name for name in ("a.x", "a.x.y", "xa.x", "b.x", "b.x.y", "c", "cc", "c.x") if fits(name)] == [
        "a.x",
        "b.x",
        "b.x.y",
        "c",
    ]
    assert not compile_patterns([], caller="test")("")


def test_dot_in_a_pattern_matches_only_a_dot():
    assert not compile_patterns(["a.b"], caller="test")("a_b")


def test_non_string_pattern_is_refused():
    with pytest.raises(ConfigError, match="test: patterns of names must be text, got 3"):
        compile_patterns([3], caller="test")
