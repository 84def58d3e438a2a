"""Channels last: the format of activations, and parameters that FSDP2 takes."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.surgery.convolutions import channels_last

LAST = torch.channels_last


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))


def formats(model: nn.Module, x: torch.Tensor) -> list[bool]:
    seen = []
    for module in model:
        module.register_forward_hook(lambda module, given, out: seen.append(out.is_contiguous(memory_format=LAST)))
    model(x)
    return seen


def test_activations_are_channels_last_and_parameters_are_not():
    model = channels_last(net())
    assert formats(net(), torch.randn(2, 3, 8, 8)) == [False] * 5
    assert formats(model, torch.randn(2, 3, 8, 8)) == [True] * 5
    assert all(param.is_contiguous() for param in model.parameters())


def test_values_match_the_plain_model_also_for_one_image():
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(channels_last(net())(x), net()(x))
    picture = channels_last(nn.Conv2d(3, 4, 3))
    assert picture(x[0]).shape == (4, 6, 6)


def sharded() -> list[bool]:
    # FSDP2 stores weights contiguous, whatever format they had.
    model = dt.shard_model(net().to(memory_format=LAST), dt.build_mesh(), blocks=nn.Conv2d)
    assert all(to_local(param).is_contiguous() for param in model.parameters())
    model = dt.shard_model(channels_last(net()), dt.build_mesh(), blocks=nn.Conv2d)
    return formats(model, torch.randn(2, 3, 8, 8))


def test_sharded_model_computes_in_channels_last(ranks):
    assert ranks(2).run(sharded) == [[True] * 5] * 2


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ConfigError, match="channels_last: nothing to replace"):
        channels_last(nn.Linear(2, 2))
