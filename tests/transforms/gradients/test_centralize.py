"""Gradient centralisation: rows that sum to zero, in every layout."""

import pytest
import torch

from battery.layouts import largest_differences, params
from battery.rows.gradients import line
from dtrain.transforms.combinators import masked
from dtrain.transforms.gradients.clipping import centralize_gradients, centralize_gradients_

ROUNDING = 1e-14  # of float64 numbers up to ten


def test_centralize_subtracts_row_means_and_keeps_vectors():
    given, found = params(), params()
    centralize_gradients_(found)
    for name in ("matrix", "image", "few", "zero"):
        rows = given[name].grad.flatten(1)
        expected = torch.stack([row - sum(row.tolist()) / len(row) for row in rows]).view_as(given[name].grad)
        torch.testing.assert_close(found[name].grad, expected, rtol=1e-12, atol=ROUNDING)
    for name in ("vector", "short", "number"):
        assert torch.equal(found[name].grad, given[name].grad)


def test_centralize_is_idempotent():
    once, twice = params(), params()
    centralize_gradients_(once)
    centralize_gradients_(twice)
    centralize_gradients_(twice)
    assert max((once[n].grad - twice[n].grad).abs().max().item() for n in once if n != "without") <= ROUNDING


def in_layouts(world_size):
    return largest_differences(centralize_gradients_, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_centralize_is_equal_in_every_sharding_layout(ranks, world_size):
    for found in ranks(world_size).run(in_layouts, world_size):
        assert max(found.values()) <= ROUNDING, found


def test_masked_centralize_does_not_change_other_parameters():
    weights, _ = line(masked(centralize_gradients(), lambda name, param: param.shape[1] > 2), [[1.0, 3.0, 5.0]], [0.0] * 3)
    assert weights.tolist() == [2.0, 0.0, -2.0]
