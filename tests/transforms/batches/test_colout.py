import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.transforms.batches.cutout import colout, colout_batch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    "no generator": (
        lambda: colout_batch(places()),
        "colout: generator must be given, got None. Give generator= or rows= and columns=",
    ),
    "all": (lambda: colout(1.0), r"colout: p_row must be in \[0, 1\), got 1\.0\."),
    "negative": (lambda: colout(0.1, -0.1), r"colout: p_col must be in \[0, 1\), got -0\.1\."),
    "other sizes": (
        lambda: colout_batch({"x": places(), "mask": torch.zeros(3, 5, 5)}, extra_keys=["mask"], generator=generator()),
        r"colout: 'mask' must end in the images' height and width \(10, 20\), got \(3, 5, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_colout_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
