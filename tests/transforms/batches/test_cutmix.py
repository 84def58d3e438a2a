import pytest
import torch

from draws import generator
from dtrain.errors import ConfigError
from dtrain.transforms.batches.image_ops import box_area_fraction, box_mask, sample_boxes
from dtrain.transforms.batches.mixup import cutmix, cutmix_batch, mixup_batch


def zeros_and_ones(height: int = 4, width: int = 6) -> dict[str, torch.Tensor]:
    """One image of zeros, label 0, and one image of ones, label 1."""
    return {"x": torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 3, height, width), "y": torch.tensor([0, 1])}


SWAP = torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("box", "rows", "columns", "share"),
    [
        ((1, 2, 3, 5), slice(1, 3), slice(2, 5), 6 / 24),
        ((-2, 4, 1, 9), slice(0, 1), slice(4, 6), 2 / 24),
        ((0, 0, 4, 6), slice(0, 4), slice(0, 6), 1.0),
        ((2, 2, 2, 5), slice(0, 0), slice(0, 0), 0.0),
        ((3, 4, 1, 2), slice(0, 0), slice(0, 0), 0.0),
    ],
    ids=["inside", "clipped", "all", "empty", "inside out"],
)
def test_cutmix_batch_mixes_targets_by_the_clipped_area(box, rows, columns, share):
    given = zeros_and_ones()
    made = cutmix_batch(given, num_classes=2, box=box, order=SWAP)
    expected = torch.zeros(3, 4, 6)
    expected[:, rows, columns] = 1.0
    assert torch.equal(made["x"], torch.stack([expected, 1 - expected]))
    torch.testing.assert_close(made["y"], torch.tensor([[1 - share, share], [share, 1 - share]]))


@pytest.mark.parametrize("place", ["center", "even", "inside"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_cutmix_batch_targets_equal_the_fraction_of_pixels(place, per_sample):
    for seed in range(20):
        made = cutmix_batch(
            zeros_and_ones(), num_classes=2, placement=place, per_sample=per_sample, generator=generator(seed), order=SWAP
        )
        torch.testing.assert_close(made["y"][:, 1], made["x"].mean((1, 2, 3)))


@pytest.mark.parametrize("length", [0.0, 0.25, 0.5, 1.0])
def test_cutmix_batch_length_is_a_fraction_of_each_side(length):
    for seed in range(10):
        made = cutmix_batch(zeros_and_ones(8, 12), num_classes=2, length=length, generator=generator(seed), order=SWAP)
        cut = made["x"][0, 0] > 0
        assert (cut.any(1).sum(), cut.any(0).sum()) == (round(8 * length), round(12 * length))
        assert made["y"][0, 1].item() == pytest.approx(length**2)


def test_cutmix_batch_areas_are_uniform_before_clipping():
    sides = []
    for seed in range(400):
        made = cutmix_batch(zeros_and_ones(64, 64), num_classes=2, placement="inside", generator=generator(seed), order=SWAP)
        sides.append(float(made["y"][0, 1]))
    areas = torch.tensor(sides)
    assert areas.mean().item() == pytest.approx(
        0.5, abs=0.07
    )  # five standard errors; and a little less, as sides are rounded down
    assert areas.var().item() == pytest.approx(1 / 12, rel=0.25)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("center", [2.0, 3.0, 3.0, 3.0, 2.0]),  # of five centres, each pixel is within one of so many
        ("even", [15 / 7] * 5),  # of seven places that hide a pixel, three cover each pixel
        ("inside", [5 / 3, 10 / 3, 5.0, 10 / 3, 5 / 3]),
    ],
)
def test_sample_boxes_covers_pixels_as_placement_says(place, expected):
    n = 60000
    # The sides are where the generator is.
    sides = torch.full((n,), 3, device="cpu"), torch.full((n,), 1, device="cpu")
    boxes = sample_boxes(sides, (5, 1), place, generator())
    covered = box_mask(boxes, (5, 1)).float().mean(0)[0, :, 0] * 5
    torch.testing.assert_close(covered, torch.tensor(expected, device="cpu"), atol=0.05, rtol=0)  # five standard errors


def test_box_area_fraction_equals_the_mean_of_box_mask():
    boxes = torch.randint(-3, 9, (200, 4), generator=generator())
    torch.testing.assert_close(
        box_area_fraction(boxes, (5, 6), torch.float64), box_mask(boxes, (5, 6)).double().mean((1, 2, 3))
    )


def test_mixup_after_cutmix_mixes_the_cut_images():
    given = zeros_and_ones()
    cut = cutmix_batch(given, num_classes=2, box=(0, 0, 2, 3), order=SWAP)  # a quarter
    made = mixup_batch(cut, coefficient=0.8, order=SWAP)
    torch.testing.assert_close(made["y"], torch.tensor([[0.65, 0.35], [0.35, 0.65]]))  # 0.8 * 3/4 + 0.2 * 1/4
    assert made["x"][0, 0, 0, 0].item() == pytest.approx(0.8)
    assert made["x"][0, 0, 3, 3].item() == pytest.approx(0.2)


def test_cutmix_batch_keeps_uint8():
    given = {"x": (zeros_and_ones()["x"] * 255).to(torch.uint8), "y": torch.tensor([0, 1])}
    made = cutmix_batch(given, num_classes=2, box=(0, 0, 2, 3), order=SWAP)
    assert made["x"].dtype == torch.uint8
    assert made["x"][0].unique().tolist() == [0, 255]


REFUSED = {
    "no order": (lambda: cutmix_batch(zeros_and_ones(), num_classes=2, box=(0, 0, 1, 1)), "cutmix: generator must be given"),
    "alpha": (lambda: cutmix(-1.0), r"cutmix: alpha must be in \[0, inf\), got -1\.0\."),
    "length": (lambda: cutmix(length=1.5), r"cutmix: length must be a finite number at least 0 and at most 1, got 1\.5"),
    "place": (lambda: cutmix(placement="middle"), "cutmix: placement must be None, 'center', 'even' or 'inside', got 'middle'"),
    "box": (
        lambda: cutmix_batch(zeros_and_ones(), num_classes=2, box=(0, 0, 1), order=SWAP),
        r"cutmix: box must be integers \(top, left, bottom, right\), \[4\] or \[batch, 4\], got \(0, 0, 1\)",
    ),
    "vectors": (
        lambda: cutmix_batch({"x": torch.zeros(2, 3), "y": torch.zeros(2, 2)}, generator=generator()),
        r"cutmix: images must be \[batch, channels, height, width\], got shape \(2, 3\) at 'x'",
    ),
    "a map of targets": (
        lambda: cutmix_batch({**zeros_and_ones(), "y": torch.zeros(2, 4, 6, 2)}, generator=generator()),
        r"cutmix: targets must be \[batch\] or \[batch, classes\], got shape \(2, 4, 6, 2\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cutmix_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
