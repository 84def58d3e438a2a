"""Norms against torch's own on whole tensors, in every layout, and only in the steps that log."""

import math

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.monitors.tensor_norms import norms
from dtrain.testing import count_collectives
from dtrain.transforms.combinators import masked
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.gradients.nonfinite import nonfinite
from dtrain.transforms.precision import loss_scale
from shard.copies import ADAMW, MOMENTUM, RAGGED, begin, loss, net, optimizer_of, part, small, whole_batch

ALL = ("grad", "param", "update", "moment", "cosine")
ROUNDING = 1e-12  # of float64, relative


def plain(transforms, kind=ADAMW, steps=2):
    """Reduced metrics of the last of some steps in this process, and its state."""
    model = net()
    step = dt.compose_step(loss, transforms, grad=small)
    state = step.init(model, optimizer_of(kind, model), seed=5)
    metrics = {}
    for number in range(steps):
        state, metrics = step(state, whole_batch(number))
    return reduce_metrics(metrics), state


def by_hand(kind, steps=2):
    """Compute the same with torch alone: (name, kind) -> tensor, in the last step."""
    model = net()
    optimizer = optimizer_of(kind, model)
    for number in range(steps):
        optimizer.zero_grad()
        batch = whole_batch(number)
        (model(batch["x"]) - batch["y"]).square().mean().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        old = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
        old = {name: {k: v.clone() for k, v in content.items()} for name, content in old.items()}
        optimizer.step()
    tensors = {}
    for name, p in model.named_parameters():
        tensors[name, "grad"], tensors[name, "param"], tensors[name, "update"] = p.grad, before[name], p.detach() - before[name]
        for key, value in optimizer.state[p].items():
            if key != "step":
                tensors[name, key] = value
                tensors[name, f"old {key}"] = old[name].get(key)
    return tensors


def norm(tensors, what, prefix=""):
    return math.sqrt(
        sum(t.square().sum().item() for (name, key), t in tensors.items() if key == what and name.startswith(prefix))
    )


@pytest.mark.parametrize(("kind", "keys"), [(ADAMW, ("exp_avg", "exp_avg_sq")), (MOMENTUM, ("momentum_buffer",))])
def test_norms_match_torch(kind, keys):
    norms_of_step, expected = plain([norms(1, of=ALL, by="layer")], kind)[0], by_hand(kind)
    for what in ("grad", "param", "update", *keys):
        assert norms_of_step[f"norm/{what}"] == pytest.approx(norm(expected, what), rel=ROUNDING)
        for layer in ("first", "last"):
            assert norms_of_step[f"norm/{what}/{layer}"] == pytest.approx(norm(expected, what, layer), rel=ROUNDING)
    assert norms_of_step["norm/update_ratio"] == pytest.approx(norm(expected, "update") / norm(expected, "param"), rel=ROUNDING)
    product = sum((t * expected[name, f"old {keys[0]}"]).sum().item() for (name, key), t in expected.items() if key == "grad")
    lengths = norm(expected, "grad") * norm(expected, f"old {keys[0]}")
    assert norms_of_step["norm/cosine"] == pytest.approx(product / lengths, rel=ROUNDING)


def test_cosine_needs_second_step_and_moments_need_momentum():
    assert "norm/cosine" not in plain([norms(1, of=ALL)], steps=1)[0]
    readings = plain([norms(1)], ("sgd", 0.1, 0.0))[0]
    assert [name for name in readings if "/" in name] == ["norm/grad", "norm/param", "norm/update", "norm/update_ratio"]


@pytest.mark.parametrize(
    ("by", "labels"),
    [
        ("all", []),
        ("layer", ["first", "last", "temperature"]),
        ("group", ["0"]),
        (lambda name: "weights" if name.endswith("weight") else None, ["weights"]),
    ],
    ids=["all", "layer", "group", "function"],
)
def test_by_option_selects_labels(by, labels):
    readings = plain([norms(1, of=("param",), by=by)])[0]
    assert [name for name in readings if name.startswith("norm/")] == [
        "norm/param",
        *(f"norm/param/{label}" for label in labels),
    ]


def test_group_labels_use_group_names():
    model = net()
    step = dt.compose_step(loss, [norms(1, of=("update",), by="group")])
    groups = [{"params": model.first.parameters(), "name": "body"}, {"params": model.last.parameters(), "lr": 0.0}]
    state = step.init(model, torch.optim.SGD(groups, lr=0.1), missing_ok=True)  # without the temperature
    readings = reduce_metrics(step(state, whole_batch(0))[1])
    assert readings["norm/update/1"] == 0.0 < readings["norm/update/body"]
    assert readings["norm/update"] == pytest.approx(readings["norm/update/body"])


def test_transform_order_selects_gradient_before_or_after_clipping():
    before = plain([norms(1), clip_by_norm(0.01)], steps=1)[0]
    after = plain([clip_by_norm(0.01, eps=0.0), norms(1)], steps=1)[0]
    assert before["norm/grad"] == pytest.approx(before["grad_norm"], rel=ROUNDING)
    assert after["norm/grad"] == pytest.approx(0.01, rel=1e-9)


def test_loss_scale_is_removed_from_norms():
    readings = plain([loss_scale(1024.0), norms(1)], steps=1)[0]
    assert readings["norm/grad"] == pytest.approx(plain([norms(1)], steps=1)[0]["norm/grad"], rel=ROUNDING)


def test_skipped_step_has_zero_update_norm():
    model = nn.Linear(1, 1, bias=False)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [norms(1), nonfinite("skip")])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0))
    readings = reduce_metrics(step(state, torch.tensor([[math.inf]]))[1])
    assert [readings[name] for name in ("norm/update", "norm/grad", "skipped")] == [0.0, math.inf, 1.0]


def test_masked_norms_cover_selected_parameters():
    readings = plain([masked(norms(1), "first.*")])[0]
    expected = by_hand(ADAMW)
    for what in ("grad", "param", "update", "exp_avg"):
        assert readings[f"norm/{what}"] == pytest.approx(norm(expected, what, "first"), rel=ROUNDING)


@pytest.mark.parametrize(
    ("interval", "logged"), [("3ba", [3, 6]), ("16sp", [2, 4, 6, 8]), (1, list(range(1, 9)))], ids=["steps", "samples", "every"]
)
def test_norms_are_present_on_steps_crossing_interval(interval, logged):
    model, seen = net(), []
    step = dt.compose_step(loss, [norms(interval)])
    state = step.init(model, optimizer_of(ADAMW, model))
    for number in range(8):
        state, metrics = step(state, whole_batch(number))
        assert state.crossed(interval) == ("norm/grad" in metrics)
        seen += [state.step] * ("norm/grad" in metrics)
    assert seen == logged


def on_ranks(strategy, options=None):
    """Reduced metrics of two steps on these ranks, microbatches of two and ragged shares."""
    step, state = begin([norms(1, of=ALL, by="layer")], strategy, ADAMW, **(options or {}))
    sizes, rank, metrics = RAGGED[get_dist_info().world_size], get_dist_info().rank, {}
    for number in range(2):
        state, metrics = step(state, part(number, sizes, rank, rank + 1))
    return reduce_metrics(metrics)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("full_shard", 2),
        ("shard_grad_op", 2),
        ("replicate", 2),
        pytest.param("hybrid_shard", 4, marks=pytest.mark.slow),
        pytest.param("full_shard", 4, marks=pytest.mark.slow),
    ],
)
def test_norms_on_ranks_equal_single_process(ranks, strategy, world):
    expected = plain([norms(1, of=ALL, by="layer")])[0]
    for readings in ranks(world).run(on_ranks, strategy):
        assert readings == pytest.approx(expected, rel=1e-9)


def reductions(layers, interval):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    counts = []
    for transforms in ([], [norms(interval, of=ALL, by="layer")]):
        mean = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
        step = dt.compose_step(mean, transforms)
        state = step.init(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            with count_collectives() as seen:
                state, _ = step(state, torch.ones(2, 4))
        counts.append(seen.count() - seen.count(group="control"))
    return counts[1] - counts[0]


@pytest.mark.parametrize(("layers", "interval", "more"), [(2, 1, 1), (6, 1, 1), (2, 3, 0)])
def test_norms_need_one_collective_per_interval(ranks, layers, interval, more):
    assert ranks(2).run(reductions, layers, interval) == [more] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"of": ()}, r"norms: of must be a list of names from grad, param, update, moment, cosine, got \(\)"),
        ({"of": "grad"}, "norms: of must be a list of names from .* got 'grad'"),
        ({"of": ("weights",)}, r"norms: of must be a list of names from .* got \('weights',\)"),
        ({"by": "module"}, "norms: by must be 'all', 'group', 'layer' or a function of a parameter's name, got 'module'"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        norms(1, **given)


def test_label_must_be_text_or_none():
    with pytest.raises(ConfigError, match=r"norms: by\('temperature'\) must return a text or None, got 3"):
        plain([norms(1, by=lambda name: 3)])


def test_interval_as_share_of_unknown_length_is_refused_at_start():
    with pytest.raises(ConfigError, match=r"0.1dur is a share of the run, whose length is not known"):
        plain([norms("0.1dur")])
