"""Clipping by value: a true clamp."""

import pytest
import torch

from battery.layouts import largest_differences, params
from battery.rows.gradients import line
from dtrain.errors import ConfigError
from dtrain.transforms.gradients.clipping import clip_by_value, clip_grad_value_


def test_clip_by_value_matches_torch():
    ours, theirs = params(), params()
    clip_grad_value_(ours, 0.3)
    torch.nn.utils.clip_grad_value_(theirs.values(), 0.3)
    assert all(torch.equal(ours[name].grad, theirs[name].grad) for name in ours if name != "without")
    assert max(ours[name].grad.abs().max().item() for name in ours if name != "without") == 0.3


def test_clip_by_value_clips_infinity_and_keeps_nan():
    w = torch.zeros(3, requires_grad=True)
    w.grad = torch.tensor([float("inf"), -float("inf"), float("nan")])
    clip_grad_value_({"w": w}, 2.0)
    assert w.grad[:2].tolist() == [2.0, -2.0]
    assert w.grad[2].isnan()


def test_clip_by_value_without_gradients_is_a_no_op():
    w = torch.zeros(3, requires_grad=True)
    assert clip_grad_value_({"w": w}, 2.0) is None
    assert w.grad is None


def clip(found):
    clip_grad_value_(found, 0.3)


def in_layouts(world_size):
    return largest_differences(clip, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_clip_by_value_is_equal_in_every_sharding_layout(ranks, world_size):
    assert all(set(found.values()) == {0.0} for found in ranks(world_size).run(in_layouts, world_size))


def test_limit_schedule_is_read_at_the_current_step():
    weights, _ = line(clip_by_value(lambda step: (1.0, 0.25)[int(step)]), [[3.0]], [0.0], steps=2)
    assert weights.item() == -1.25


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_clip_by_value_refuses_an_invalid_limit(limit):
    with pytest.raises(ConfigError, match=r"clip_by_value: limit must be in \(0, inf\], got"):
        clip_by_value(limit)
    with pytest.raises(ConfigError, match="clip_grad_value_: limit must be positive"):
        clip_grad_value_({}, limit)


def test_clip_by_value_refuses_an_invalid_scheduled_limit():
    with pytest.raises(ConfigError, match=r"clip_by_value: limit must be in \(0, inf\], got 0\.0 from its schedule at step 0"):
        line(clip_by_value(lambda step: 0.0), [[3.0]], [0.0])
