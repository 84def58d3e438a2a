"""BlurPool: which modules, which shapes, which edges."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.shard.materialize import materialize
from dtrain.surgery.convolutions import blur_2d, blur_kernel, blur_pool


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_kernel_sums_to_one_and_keeps_constant_images(size):
    assert blur_kernel(size).sum() == 1
    for edge in ("replicate", "reflect"):
        out = blur_2d(torch.full((1, 2, 9, 9), 3.0), kernel=blur_kernel(size), edge=edge)
        assert torch.equal(out, torch.full((1, 2, 9, 9), 3.0))


def test_zero_padding_reduces_edge_values():
    out = blur_2d(torch.ones(1, 1, 3, 3), edge="zeros")
    assert (16 * out[0, 0]).tolist() == [[9, 12, 9], [12, 16, 12], [9, 12, 9]]


@pytest.mark.parametrize("side", [7, 8, 9])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MaxPool2d(2),
        lambda: nn.MaxPool2d(3, stride=2, padding=1),
        lambda: nn.MaxPool2d(3, stride=(3, 1), dilation=2),
        lambda: nn.Conv2d(16, 4, 3, stride=2, padding=1),
        lambda: nn.Conv2d(16, 4, (3, 1), stride=(2, 3), padding=(1, 0), groups=4),
        lambda: nn.Conv2d(16, 4, 1, stride=2, padding_mode="circular"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_output_shapes_are_unchanged(make, side, size, first):
    x = torch.randn(2, 16, side, side + 1)
    assert blur_pool(nn.Sequential(make()), size=size, blur_first=first)(x).shape == make()(x).shape


@pytest.mark.parametrize(
    "left",
    [
        nn.MaxPool2d(3, stride=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.Conv2d(16, 4, 3),
        nn.Conv2d(15, 4, 3, stride=2),
        nn.AvgPool2d(2),
        nn.ConvTranspose2d(16, 4, 3, stride=2),
    ],
    ids=["pool at every place", "ceil mode", "indices", "conv at every place", "few channels", "average", "transposed"],
)
def test_unsupported_modules_are_unchanged(left):
    with pytest.raises(ConfigError, match="blur_pool with min_channels=16: nothing to replace"):
        blur_pool(nn.Sequential(left))


def test_blur_pool_can_skip_convolutions_or_pools():
    model = blur_pool(nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 4, 3, stride=2)), replace_convs=False)
    assert [type(module).__name__ for module in model] == ["BlurMaxPool2d", "Conv2d"]


def test_second_edit_is_refused():
    with pytest.raises(ConfigError, match="nothing to replace"):
        blur_pool(blur_pool(nn.Sequential(nn.MaxPool2d(2))))


def test_single_image_and_low_precision_inputs_are_accepted():
    model = blur_pool(nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.MaxPool2d(2)))
    assert model(torch.randn(16, 9, 9)).shape == (4, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(1, 16, 9, 9)).dtype == torch.bfloat16
    assert model.bfloat16()(torch.randn(1, 16, 9, 9).bfloat16()).dtype == torch.bfloat16


def test_kernel_of_a_meta_model_is_created_on_materialization():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.MaxPool2d(2))
    model = materialize(blur_pool(model, size=5), seed=0)
    assert torch.equal(model[0].blur_kernel, blur_kernel(5))
    assert torch.equal(model[1].blur_kernel, blur_kernel(5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 1}, "size must be an integer from 2 to 15, got 1"),
        ({"size": 3.0}, "size must be an integer"),
        ({"edge": "mirror"}, "edge must be 'replicate', 'reflect' or 'zeros', got 'mirror'"),
        ({"replace_convs": False, "replace_maxpools": False}, "must be True, got False for both"),
        ({"min_channels": -1}, "min_channels must be an integer of at least 0, got -1"),
    ],
)
def test_invalid_arguments_are_refused(options, said):
    with pytest.raises(ConfigError, match=f"blur_pool: .*{said}"):
        blur_pool(nn.Sequential(nn.MaxPool2d(2)), **options)
