import pytest
import torch

from draws import generator
from dtrain.errors import ConfigError
from dtrain.transforms.batches.cutout import colout, colout_batch, cutout, cutout_batch


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


def places(height: int = 10, width: int = 20) -> torch.Tensor:
    """An image whose pixels say where they are."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns]).unsqueeze(0).repeat(3, 1, 1, 1)


@pytest.mark.parametrize(
    ("p_row", "p_col", "size"), [(0.15, 0.15, (8, 17)), (0.1, 0.0, (9, 20)), (0.0, 0.5, (10, 10)), (0.99, 0.99, (1, 1))]
)
def test_colout_batch_keeps_rows_and_columns_in_order(p_row, p_col, size):
    made = colout_batch(places(), p_row=p_row, p_col=p_col, generator=generator())
    assert tuple(made.shape[-2:]) == size
    rows, columns = made[0, 0, :, 0], made[0, 1, 0]
    assert rows.unique().tolist() == rows.tolist()
    assert columns.unique().tolist() == columns.tolist()
    assert torch.equal(made, places()[:, :, rows][..., columns])


def test_colout_batch_cuts_extra_keys_equally():
    given = {"x": places(), "mask": places()[:, 0], "y": torch.tensor([1, 2, 3])}
    made = colout_batch(given, extra_keys=("mask",), generator=generator())
    assert torch.equal(made["mask"], made["x"][:, 0])
    assert made["y"] is given["y"]
    assert given["x"].shape == (3, 2, 10, 20)


REFUSED = {
    "share": (lambda: cutout(1.5), r"cutout: length must be pixels \(int >= 0\) or a fraction of the side .*, got 1\.5"),
    "negative": (lambda: cutout(-1), r"cutout: length must be pixels .* got -1"),
    "holes": (lambda: cutout(holes=0), "cutout: holes must be an integer of at least 1, got 0"),
    "place": (lambda: cutout(placement="left"), "cutout: placement must be 'center', 'even' or 'inside', got 'left'"),
    "vectors": (
        lambda: cutout_batch({"x": torch.ones(3, 4)}, generator=generator()),
        r"cutout: images must be \[batch, channels, height, width\] or .*, got shape \(3, 4\) at 'x'",
    ),
    "colout: all": (lambda: colout(1.0), r"colout: p_row must be in \[0, 1\), got 1\.0\."),
    "colout: negative": (lambda: colout(0.1, -0.1), r"colout: p_col must be in \[0, 1\), got -0\.1\."),
    "colout: other sizes": (
        lambda: colout_batch({"x": places(), "mask": torch.zeros(3, 5, 5)}, extra_keys=["mask"], generator=generator()),
        r"colout: 'mask' must end in the images' height and width \(10, 20\), got \(3, 5, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
