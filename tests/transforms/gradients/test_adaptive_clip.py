"""Adaptive clipping against the paper's formula, unit by unit, and in every layout."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from battery.layouts import LAYOUTS, largest_differences, params, placed
from battery.rows.gradients import line
from dtrain.errors import ConfigError
from dtrain.testing import count_collectives
from dtrain.transforms.gradients.clipping import adaptive_clip, clip_grad_adaptive_

ROUNDING = 1e-14  # of float64 numbers up to ten


def by_hand(weight, grad, clipping, eps):
    """A row at a time, in plain numbers."""
    units = [(weight, grad)] if weight.ndim <= 1 else list(zip(weight, grad, strict=True))
    rows = []
    for w, g in units:
        most = clipping * max(math.sqrt(sum(x * x for x in w.flatten().tolist())), eps)
        norm = math.sqrt(sum(x * x for x in g.flatten().tolist()))
        rows.append(g * (most / norm) if norm > most else g)
    return rows[0] if weight.ndim <= 1 else torch.stack(rows)


@pytest.mark.parametrize("clipping", [0.01, 0.5, 100.0])
def test_clip_matches_a_reference_for_each_unit(clipping):
    given, found = params(), params()
    clip_grad_adaptive_(found, clipping, eps=1e-3)
    for name in given:
        if given[name].grad is not None:
            expected = by_hand(given[name].detach(), given[name].grad, clipping, 1e-3)
            torch.testing.assert_close(found[name].grad, expected, rtol=1e-12, atol=0)
    assert found["without"].grad is None


def test_reference_case_has_clipped_and_unclipped_units():
    """The case above has both: else it could not tell them apart."""
    given, found = params(), params()
    clip_grad_adaptive_(found, 0.5)
    changed = {name: (given[name].grad != found[name].grad).any().item() for name in given if given[name].grad is not None}
    assert set(changed.values()) == {True, False}


def test_zero_gradient_is_unchanged_and_zero_weights_use_eps():
    w = torch.zeros(2, 2, requires_grad=True)
    w.grad = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    clip_grad_adaptive_({"w": w}, 0.1, eps=0.01)
    assert w.grad[0].tolist() == [0.0, 0.0]
    assert w.grad[1].tolist() == pytest.approx([0.0006, 0.0008])


def test_low_precision_keeps_its_dtype():
    w = torch.full((2, 4096), 0.1, dtype=torch.bfloat16, requires_grad=True)
    w.grad = torch.ones_like(w)
    clip_grad_adaptive_({"w": w}, 0.1)
    assert w.grad.dtype == torch.bfloat16
    assert w.grad.float() == pytest.approx(torch.full((2, 4096), 0.01), rel=0.01)  # a tenth of 0.1 * 64, over 64


def clip(found):
    clip_grad_adaptive_(found, 0.5)


def in_layouts(world_size):
    return largest_differences(clip, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_clip_is_equal_in_every_sharding_layout(ranks, world_size):
    for found in ranks(world_size).run(in_layouts, world_size):
        assert max(found.values()) <= ROUNDING, found


def collectives_of(names, layout):
    _, placements = LAYOUTS[2][layout]
    plain = {name: param for name, param in params().items() if name in names}
    cut = placed(plain, init_device_mesh("cpu", (2,)), placements)
    with count_collectives() as seen:
        clip(cut)
    return seen.count()


@pytest.mark.parametrize(
    ("names", "layout", "expected"),
    [(("matrix", "image"), "rows", 0), (("vector", "short"), "rows", 1), (("matrix", "image"), "columns", 1)],
    ids=["rows are whole", "vectors are cut", "columns are cut"],
)
def test_clip_communicates_only_for_sharded_units(ranks, names, layout, expected):
    assert ranks(2).run(collectives_of, names, layout) == [expected] * 2


def test_clipping_schedule_is_read_at_the_current_step():
    weights, _ = line(adaptive_clip(lambda step: (0.5, 0.25)[int(step)]), [[-8.0]], [4.0], steps=2)
    assert weights.item() == 4.0 + 0.5 * 4.0 + 0.25 * 6.0


@pytest.mark.parametrize(
    ("clipping", "eps", "message"),
    [(0.0, 1e-3, "clipping must be positive"), (0.1, 0.0, "eps must be a finite number above 0")],
)
def test_clip_refuses_invalid_arguments(clipping, eps, message):
    with pytest.raises(ConfigError, match=rf"adaptive_clip: ({message}|clipping must be in \(0, inf\], got 0\.0)"):
        adaptive_clip(clipping, eps=eps)
    with pytest.raises(ConfigError, match=f"clip_grad_adaptive_: {message}"):
        clip_grad_adaptive_({}, clipping, eps=eps)


def test_clip_refuses_an_invalid_scheduled_value():
    with pytest.raises(ConfigError, match=r"clipping must be in \(0, inf\], got -1\.0 from its schedule"):
        line(adaptive_clip(lambda step: -1.0), [[3.0]], [0.0])
