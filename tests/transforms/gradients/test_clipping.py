"""Clipping by norm, by value and by unit, and centralised gradients: by hand, against torch, and in every layout."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtrain as dt
from battery.layouts import LAYOUTS, largest_differences, params, placed
from battery.rows.gradients import line
from dtrain.errors import ConfigError
from dtrain.testing import count_collectives
from dtrain.transforms.combinators import masked
from dtrain.transforms.gradients.clipping import (
    adaptive_clip,
    centralize_gradients,
    centralize_gradients_,
    clip_by_norm,
    clip_by_value,
    clip_grad_adaptive_,
    clip_grad_value_,
)
from falling import BATCH, LOSS

ROUNDING = 1e-14  # of float64 numbers up to ten

# Each method, and how far layouts may be apart.
METHODS = {
    "clip_by_value": (lambda params: clip_grad_value_(params, 0.3), 0.0),
    "adaptive_clip": (lambda params: clip_grad_adaptive_(params, 0.5), ROUNDING),
    "centralize": (centralize_gradients_, ROUNDING),
}


def in_layouts(world_size: int) -> dict[str, dict]:
    return {name: largest_differences(method, world_size) for name, (method, _) in METHODS.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_methods_are_equal_in_every_sharding_layout(ranks, world_size):
    for by_layout in ranks(world_size).run(in_layouts, world_size):
        for name, differences in by_layout.items():
            assert max(differences.values()) <= METHODS[name][1], (name, differences)


@pytest.mark.parametrize(
    ("transform", "grad", "weight", "expected"),
    [
        (clip_by_norm(lambda step: (0.5, 0.25)[int(step)], eps=0.0), 3.0, 4.0, 4.0 - 0.5 - 0.25),
        (clip_by_value(lambda step: (1.0, 0.25)[int(step)]), 3.0, 0.0, -1.25),
        (adaptive_clip(lambda step: (0.5, 0.25)[int(step)]), -8.0, 4.0, 4.0 + 0.5 * 4.0 + 0.25 * 6.0),
    ],
    ids=["norm", "value", "adaptive"],
)
def test_schedule_is_read_at_the_current_step(transform, grad, weight, expected):
    weights, _ = line(transform, [[grad]], [weight], steps=2)
    assert weights.item() == expected


SCHEDULED = r"must be in \(0, inf\], got -1\.0 from its schedule at step 0"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clip_by_norm(0), r"clip_by_norm: max_norm must be in \(0, inf\], got 0\."),
        (lambda: clip_by_norm("1"), r"clip_by_norm: max_norm must be a finite number or a schedule .*, got '1'"),
        *(
            (lambda eps=eps: clip_by_norm(1.0, eps=eps), "clip_by_norm: eps must be a finite number at least 0, got")
            for eps in (-1e-6, float("nan"), float("inf"), "1e-6", None)
        ),
        (lambda: line(clip_by_norm(lambda step: -1.0), [[3.0]], [0.0]), f"max_norm {SCHEDULED}"),
        (lambda: clip_by_value(0.0), r"clip_by_value: limit must be in \(0, inf\], got"),
        (lambda: clip_grad_value_({}, -1.0), "clip_grad_value_: limit must be positive"),
        (lambda: line(clip_by_value(lambda step: -1.0), [[3.0]], [0.0]), f"clip_by_value: limit {SCHEDULED}"),
        (lambda: adaptive_clip(0.0), r"adaptive_clip: clipping must be in \(0, inf\], got 0\.0"),
        (lambda: adaptive_clip(0.1, eps=0.0), "adaptive_clip: eps must be a finite number above 0"),
        (lambda: clip_grad_adaptive_({}, 0.0), "clip_grad_adaptive_: clipping must be positive"),
        (lambda: clip_grad_adaptive_({}, 0.1, eps=0.0), "clip_grad_adaptive_: eps must be a finite number above 0"),
        (lambda: line(adaptive_clip(lambda step: -1.0), [[3.0]], [0.0]), f"clipping {SCHEDULED}"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_clipping_bounds_the_gradient_and_reports_the_original_norm():
    weights, metrics = line(clip_by_norm(0.25, eps=0.0), [[2.0]], [4.0])
    assert weights.item() == 4.0 - 0.25
    assert dt.reduce_metrics(metrics)["grad_norm"] == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_norm_metric_without_gradients_is_on_the_device():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).cuda()
    model[0].requires_grad_(False)
    step = dt.compose_step(LOSS, [masked(clip_by_norm(1.0), "0.*")])
    state = step.init(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    _, metrics = step(state, BATCH)
    assert dt.reduce_metrics(metrics)["grad_norm"] == 0.0


def test_clip_by_value_matches_torch():
    ours, theirs = params(), params()
    clip_grad_value_(ours, 0.3)
    torch.nn.utils.clip_grad_value_(theirs.values(), 0.3)
    assert all(torch.equal(ours[name].grad, theirs[name].grad) for name in ours if name != "without")
    assert max(ours[name].grad.abs().max().item() for name in ours if name != "without") == 0.3


def test_clip_by_value_clips_infinity_and_keeps_nan():
    w = torch.zeros(3, requires_grad=True)
    assert clip_grad_value_({"w": w}, 2.0) is None
    assert w.grad is None
    w.grad = torch.tensor([float("inf"), -float("inf"), float("nan")])
    clip_grad_value_({"w": w}, 2.0)
    assert w.grad[:2].tolist() == [2.0, -2.0]
    assert w.grad[2].isnan()


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
def test_adaptive_clip_matches_a_reference_for_each_unit(clipping):
    given, clipped, changed = params(), params(), set()
    clip_grad_adaptive_(clipped, clipping, eps=1e-3)
    for name in given:
        if given[name].grad is not None:
            expected = by_hand(given[name].detach(), given[name].grad, clipping, 1e-3)
            torch.testing.assert_close(clipped[name].grad, expected, rtol=1e-12, atol=0)
            changed.add((given[name].grad != clipped[name].grad).any().item())
    assert clipped["without"].grad is None
    assert clipping != 0.5 or changed == {True, False}, "this case has clipped units and others"


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
    assert w.grad.flatten().tolist() == pytest.approx([0.01] * 8192, rel=0.01)  # a tenth of 0.1 * 64, over 64


def collectives_of(names, layout):
    _, placements = LAYOUTS[2][layout]
    plain = {name: param for name, param in params().items() if name in names}
    cut = placed(plain, init_device_mesh("cpu", (2,)), placements)
    with count_collectives() as seen:
        clip_grad_adaptive_(cut, 0.5)
    return seen.count()


@pytest.mark.parametrize(
    ("names", "layout", "expected"),
    [(("matrix", "image"), "rows", 0), (("vector", "short"), "rows", 1), (("matrix", "image"), "columns", 1)],
    ids=["rows are whole", "vectors are cut", "columns are cut"],
)
def test_adaptive_clip_communicates_only_for_sharded_units(ranks, names, layout, expected):
    assert ranks(2).run(collectives_of, names, layout) == [expected] * 2


def test_centralize_subtracts_row_means_and_keeps_vectors():
    given, centered, twice = params(), params(), params()
    centralize_gradients_(centered)
    for name in ("matrix", "image", "few", "zero"):
        rows = given[name].grad.flatten(1)
        expected = torch.stack([row - sum(row.tolist()) / len(row) for row in rows]).view_as(given[name].grad)
        torch.testing.assert_close(centered[name].grad, expected, rtol=1e-12, atol=ROUNDING)
    for name in ("vector", "short", "number"):
        assert torch.equal(centered[name].grad, given[name].grad)
    centralize_gradients_(twice)
    centralize_gradients_(twice)
    assert max((centered[n].grad - twice[n].grad).abs().max().item() for n in centered if n != "without") <= ROUNDING


def test_masked_centralize_does_not_change_other_parameters():
    weights, _ = line(masked(centralize_gradients(), lambda name, param: param.shape[1] > 2), [[1.0, 3.0, 5.0]], [0.0] * 3)
    assert weights.tolist() == [2.0, 0.0, -2.0]
