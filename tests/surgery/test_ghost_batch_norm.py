"""Ghost batch norm: groups, statistics, and what it refuses."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.normalization import ghost_batch_norm, ghost_batches


@pytest.mark.parametrize(
    ("samples", "size", "sizes"),
    [(8, 4, [4, 4]), (9, 4, [3, 3, 3]), (33, 32, [17, 16]), (5, 32, [5]), (1, 2, [1]), (0, 4, [0])],
)
def test_ghost_batches_are_few_and_evenly_sized(samples, size, sizes):
    assert [len(group) for group in ghost_batches(torch.zeros(samples, 3), size)] == sizes


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (9, 3)),
        (nn.BatchNorm1d(3), (9, 3, 5)),
        (nn.BatchNorm2d(3), (9, 3, 4, 4)),
        (nn.BatchNorm3d(3), (9, 3, 2, 2, 2)),
    ],
    ids=["1d", "1d of sequences", "2d", "3d"],
)
def test_each_ghost_batch_is_normalised_separately(norm, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    plain = type(norm)(3)
    expected = torch.cat([plain(group) for group in (x[:3], x[3:6], x[6:])])
    ghost = ghost_batch_norm(norm, ghost_batch_size=4)
    assert torch.equal(ghost(x), expected)
    assert torch.equal(ghost.running_mean, plain.running_mean)
    assert torch.equal(ghost.eval()(x), plain.eval()(x)), "evaluation is that of the plain norm"


def test_ghost_batches_returns_a_small_batch_whole():
    x, plain = torch.randn(4, 3), nn.BatchNorm1d(3)
    assert torch.equal(ghost_batch_norm(nn.BatchNorm1d(3))(x), plain(x))


def test_parameter_names_are_unchanged():
    assert list(ghost_batch_norm(nn.BatchNorm1d(3)).state_dict()) == list(nn.BatchNorm1d(3).state_dict())


@pytest.mark.parametrize("size", [1, 0, 2.0, True])
def test_invalid_ghost_batch_sizes_are_refused(size):
    with pytest.raises(ConfigError, match="ghost_batch_norm: ghost_batch_size must be an integer of at least 2, got"):
        ghost_batch_norm(nn.BatchNorm1d(3), ghost_batch_size=size)


def test_a_model_without_batch_norm_is_refused():
    with pytest.raises(ConfigError, match="ghost_batch_norm: nothing to replace"):
        ghost_batch_norm(nn.Sequential(nn.LayerNorm(3)))
