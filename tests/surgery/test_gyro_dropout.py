"""Dropout over a fixed number of subnetworks."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dtrain.errors import ConfigError
from dtrain.surgery.dropout import GyroDropout, drop_by_masks, gyro_dropout, subnetwork_masks

MASKS = torch.tensor([[True, False, True], [False, True, True]])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [(4, [0, 0, 1, 1]), (5, [0, 0, 0, 1, 1]), (2, [0, 1]), (1, [0]), (0, [])],
)
def test_samples_are_distributed_over_masks(batch, rows):
    dropped = drop_by_masks(torch.ones(batch, 3), MASKS, 0.5)
    assert dropped.tolist() == [(2.0 * MASKS[row]).tolist() for row in rows]


@pytest.mark.parametrize(("shape", "axis"), [((2, 5, 3), -1), ((2, 3, 4, 4), 1)])
def test_feature_is_dropped_at_every_position_of_a_sample(shape, axis):
    dropped = drop_by_masks(torch.ones(shape), MASKS, 0.5, axis=axis).movedim(axis, -1)
    assert dropped.equal(2.0 * MASKS.view(2, *[1] * (len(shape) - 2), 3).expand(dropped.shape))


def test_every_precomputed_mask_is_used_and_no_other():
    layer = GyroDropout(0.5, sigma=6, tau=2, seed=3, name="a")
    expected = {tuple(row) for row in (2.0 * subnetwork_masks(6, 16, 0.5, seed=3, name="a")).tolist()}
    seen = [{tuple(row) for row in layer(torch.ones(8, 16)).tolist()} for _ in range(40)]
    assert len(expected) == 6
    assert {len(masks) for masks in seen} == {2}
    assert set.union(*seen) == expected


def test_layers_have_separate_masks_and_keep_their_rate():
    model = gyro_dropout(nn.Sequential(nn.Dropout(0.25), nn.Sequential(nn.Dropout(0.5))), sigma=4, tau=1, seed=7)
    assert [(layer.p, layer.name) for layer in (model[0], model[1][0])] == [(0.25, "0"), (0.5, "1.0")]
    assert gyro_dropout(nn.Sequential(nn.Dropout(0.25)), p=0.5)[0].p == 0.5
    one, other = (subnetwork_masks(64, 64, 0.25, seed=7, name=name) for name in ("0", "1.0"))
    assert not one.equal(other)
    assert one.double().mean().item() == pytest.approx(0.75, abs=0.03)  # five deviations of 4096 draws


def test_mask_choice_uses_the_global_generator():
    layer, x = GyroDropout(0.5, sigma=32, tau=2), torch.ones(4, 64)
    torch.manual_seed(1)
    first = layer(x)
    other = layer(x)
    torch.manual_seed(1)
    assert layer(x).equal(first)
    assert not other.equal(first)


def test_recomputed_forward_uses_the_same_masks():
    layer, x = GyroDropout(0.5, sigma=32, tau=2), torch.ones(4, 64, requires_grad=True)
    output = checkpoint(lambda x: layer(x.square()), x, use_reentrant=False)
    output.sum().backward()
    assert x.grad.equal(2 * output.detach())


def test_evaluation_and_rate_zero_return_the_input():
    x = torch.randn(4, 8)
    assert GyroDropout(0.5).eval()(x) is x
    assert GyroDropout(0.0)(x) is x


def test_masks_are_not_in_the_state_dict():
    layer = GyroDropout(0.5)
    layer(torch.ones(2, 4))
    assert layer.state_dict() == {}
    assert repr(layer) == "GyroDropout(p=0.5, sigma=256, tau=16, seed=0, axis=-1)"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: GyroDropout(1.0), r"gyro_dropout: p must be a finite number at least 0 and below 1, got 1\.0"),
        (lambda: GyroDropout(0.5, sigma=2, tau=3), "gyro_dropout: tau must be an integer from 1 to 2, got 3"),
        (lambda: GyroDropout(0.5, tau=2.0), r"gyro_dropout: tau must be an integer from 1 to 256, got 2\.0"),
        (lambda: GyroDropout(0.5, name="a")(torch.ones(3)), r"input must be \[batch, ..., features\], got shape \(3,\) in 'a'"),
        (lambda: gyro_dropout(nn.Linear(2, 2)), "gyro_dropout: nothing to replace"),
    ],
)
def test_invalid_arguments_are_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        run()


def test_fake_tensor_forward_leaves_no_fake_masks():
    model = gyro_dropout(nn.Sequential(nn.Dropout()), sigma=4, tau=2)
    with FakeTensorMode():
        model(torch.ones(2, 3))
    assert set(model(torch.ones(2, 3)).flatten().tolist()) <= {0.0, 2.0}
