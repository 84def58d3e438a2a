import pytest
import torch

from dtrain.data.fetcher import apply_transform
from dtrain.errors import ConfigError
from dtrain.transforms.batches.cutout import cutout, cutout_batch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hidden(**options) -> torch.Tensor:
    """Return the mask ``[batch, height, width]`` of the pixels that became zero."""
    made = cutout_batch({"x": torch.ones(options.pop("n", 50), 2, 8, 12)}, generator=generator(), **options)["x"]
    assert torch.equal(made[:, 0], made[:, 1])
    return made[:, 0] == 0


@pytest.mark.parametrize(("length", "side"), [(0.5, 4), (0.25, 2), (3, 3), (0, 0), (0.0, 0), (1.0, 8), (100, 8)])
def test_cutout_batch_squares_have_the_given_side(length, side):
    cut = hidden(length=length, placement="inside")
    assert cut.any(2).sum(1).unique().tolist() == [side]
    assert cut.any(1).sum(1).unique().tolist() == [side]


def test_cutout_batch_draws_a_position_per_image_and_clips():
    cut = hidden(length=4)
    assert len({tuple(one.flatten().tolist()) for one in cut}) > 20
    areas = cut.sum((1, 2))
    assert areas.max() == 16
    assert areas.min() < 16


def test_cutout_batch_cuts_several_holes():
    assert hidden(length=3, holes=4, placement="inside").sum((1, 2)).float().mean() > 20  # one is 9


def test_cutout_batch_accepts_a_box_per_image():
    boxes = torch.tensor([[0, 0, 1, 1], [1, 0, 2, 2]])
    made = cutout_batch(torch.full((2, 1, 2, 2), 5, dtype=torch.uint8), boxes=boxes, fill=7)
    assert made.dtype == torch.uint8
    assert made.flatten(1).tolist() == [[7, 5, 5, 5], [5, 5, 7, 7]]


def test_cutout_batch_transforms_one_sample_in_a_loader():
    sample = {"x": torch.ones(1, 6, 6), "y": 3}
    one, again, other = (
        apply_transform(lambda s, g: cutout_batch(s, generator=g), sample, seed=0, epoch=e, index=4) for e in (0, 0, 1)
    )
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], other["x"])
    assert (one["x"].shape, one["y"], sample["x"].min()) == ((1, 6, 6), 3, 1.0)


REFUSED = {
    "no generator": (
        lambda: cutout_batch(torch.ones(1, 1, 2, 2)),
        "cutout: generator must be given, got None. Give generator= or boxes=",
    ),
    "share": (lambda: cutout(1.5), r"cutout: length must be pixels \(int >= 0\) or a fraction of the side .*, got 1\.5"),
    "negative": (lambda: cutout(-1), r"cutout: length must be pixels .* got -1"),
    "holes": (lambda: cutout(holes=0), "cutout: holes must be an integer of at least 1, got 0"),
    "place": (lambda: cutout(placement="left"), "cutout: placement must be 'center', 'even' or 'inside', got 'left'"),
    "vectors": (
        lambda: cutout_batch({"x": torch.ones(3, 4)}, generator=generator()),
        r"cutout: images must be \[batch, channels, height, width\] or .*, got shape \(3, 4\) at 'x'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cutout_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
