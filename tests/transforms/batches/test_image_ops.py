"""Each operation against Pillow's on whole levels, where it has one, and against numbers known by hand."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from dtrain.transforms.batches.image_ops import IMAGE_OPERATIONS, apply_chains, to_grayscale

generator = torch.Generator().manual_seed(0)
NOISE = torch.randint(40, 200, (3, 9, 13), generator=generator, dtype=torch.uint8)
SLOPE = torch.arange(3 * 9 * 13).reshape(3, 9, 13).remainder(251).to(torch.uint8)
FEW = torch.tensor([10, 60, 200], dtype=torch.uint8)[torch.randint(3, (3, 30, 40), generator=generator)]
FLAT = torch.full((3, 4, 4), 77, dtype=torch.uint8)
PICTURES = {"noise": NOISE, "slope": SLOPE, "few levels": FEW, "flat": FLAT}


def ours(name: str, picture: torch.Tensor, amount: float = 0.0) -> torch.Tensor:
    """In levels, not rounded."""
    unit = picture.double().unsqueeze(0) / 255
    return IMAGE_OPERATIONS[name].apply(unit, torch.tensor([amount], dtype=torch.float64), 0.0)[0] * 255


def pillows(picture: torch.Tensor, fn) -> torch.Tensor:
    made = fn(Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()))
    return torch.from_numpy(np.array(made)).permute(2, 0, 1).double()


EXACT = {
    "equalize": (0.0, ImageOps.equalize),
    "posterize": (3.0, lambda image: ImageOps.posterize(image, 3)),
    "solarize": (110.0, lambda image: ImageOps.solarize(image, 110)),
}
ROUNDED = {
    "autocontrast": (0.0, ImageOps.autocontrast),
    "brightness": (1.6, lambda image: ImageEnhance.Brightness(image).enhance(1.6)),
    "contrast": (0.3, lambda image: ImageEnhance.Contrast(image).enhance(0.3)),
    "color": (1.7, lambda image: ImageEnhance.Color(image).enhance(1.7)),
    "sharpness": (1.9, lambda image: ImageEnhance.Sharpness(image).enhance(1.9)),
}


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", EXACT)
def test_pixel_operations_match_pillow(name, picture):
    amount, operation = EXACT[name]
    torch.testing.assert_close(ours(name, PICTURES[picture], amount), pillows(PICTURES[picture], operation), atol=1e-9, rtol=0)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", ROUNDED)
def test_color_operations_match_pillow_up_to_rounding(name, picture):
    amount, operation = ROUNDED[name]
    apart = (ours(name, PICTURES[picture], amount) - pillows(PICTURES[picture], operation)).abs()
    # Pillow rounds the blended image to whole levels, and the result once more.
    assert apart.max() <= 1 + abs(amount)


@pytest.mark.parametrize("name", IMAGE_OPERATIONS)
def test_level_zero_changes_nothing_and_level_ten_does(name):
    operation, drawn = IMAGE_OPERATIONS[name], random.Random(0)
    unit = torch.rand(2, 3, 24, 24, generator=generator, dtype=torch.float64) * 0.9 + 0.05
    unit = (unit * 255).round() / 255
    made = [operation.apply(unit, torch.full((2,), operation.amount(level, drawn)).double(), 0.0) for level in (0, 10)]
    if name not in ("autocontrast", "equalize"):
        torch.testing.assert_close(made[0], unit)
    assert torch.allclose(made[1], unit) == (name == "identity")
    assert made[1].min() >= 0
    assert made[1].max() <= 1


AMOUNTS = {
    "rotate": [-15.0, 15.0],
    "solarize": [128.0],
    "posterize": [6],
    "color": [0.55, 1.45],
    "shear_x": [-0.15, 0.15],
    "translate_y": [-75 / 331, 75 / 331],
    "identity": [0.0],
}


@pytest.mark.parametrize("name", AMOUNTS)
def test_amounts_are_the_given_fraction_of_the_papers_range(name):
    drawn = random.Random(1)
    assert sorted({IMAGE_OPERATIONS[name].amount(5, drawn) for _ in range(50)}) == pytest.approx(AMOUNTS[name])


def on_one(name: str, image: list, amount: float, fill: float = 0.0) -> torch.Tensor:
    unit = torch.tensor(image, dtype=torch.float64)[None, None]
    return IMAGE_OPERATIONS[name].apply(unit, torch.tensor([amount], dtype=torch.float64), fill)[0, 0]


def close(made: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(made, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [(5, 5), (4, 4)])
@pytest.mark.parametrize("turns", [1, 2, -1])
def test_quarter_turns_are_exact(size, turns):
    image = torch.rand(size, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(on_one("rotate", image.tolist(), 90.0 * turns), image.rot90(turns), atol=1e-9, rtol=0)


def test_rotate_by_180_degrees_is_exact():
    image = torch.rand(3, 7, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(on_one("rotate", image.tolist(), 180.0), image.flip(0, 1), atol=1e-9, rtol=0)


ROWS = [[0.1, 0.2, 0.3, 0.4]] * 3


def test_translations_are_a_fraction_of_the_image_side():
    close(on_one("translate_x", ROWS, 0.25, 0.9), [[0.2, 0.3, 0.4, 0.9]] * 3)
    close(on_one("translate_x", ROWS, -0.5), [[0.0, 0.0, 0.1, 0.2]] * 3)
    close(on_one("translate_y", [[0.1], [0.2], [0.3]], 1 / 3, 0.5), [[0.2], [0.3], [0.5]])


def test_shears_move_a_row_by_its_distance_from_the_middle():
    close(on_one("shear_x", ROWS, 1.0), [[0.0, 0.1, 0.2, 0.3], ROWS[0], [0.2, 0.3, 0.4, 0.0]])
    image = [[0.1, 0.1, 0.1], [0.2, 0.2, 0.2]]
    close(on_one("shear_y", image, 1.0), [[0.0, 0.1, 0.2], [0.1, 0.2, 0.0]])


def test_half_pixel_translation_averages_two_pixels():
    close(on_one("translate_x", ROWS, 0.125, 0.2), [[0.15, 0.25, 0.35, 0.3]] * 3)


def test_grey_is_luma_for_three_channels_and_the_mean_otherwise():
    pixel = torch.tensor([1.0, 0.5, 0.25])[None, :, None, None]
    assert to_grayscale(pixel).item() == pytest.approx(0.299 + 0.2935 + 0.0285)
    assert to_grayscale(pixel[:, 1:]).item() == pytest.approx(0.375)


def test_sharpness_keeps_images_below_three_pixels():
    close(on_one("sharpness", [[0.1, 0.9]], 1.9), [[0.1, 0.9]])


def test_apply_chains_applies_each_images_chain():
    images = torch.full((3, 1, 1, 2), 0.25)
    chains = [[("brightness", 2.0)], [], [("solarize", 0.0), ("brightness", 0.5)]]
    assert apply_chains(images, chains, 0.0, caller="rand_augment")[:, 0, 0, 0].tolist() == [0.5, 0.25, 0.375]
    assert images.unique().tolist() == [0.25]
