import pytest
import torch

import dtrain as dt
from draws import generator
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from dtrain.transforms.batches.progressive_resizing import linear_growth, progressive_resizing, resize_batch


def image(height: int, width: int) -> torch.Tensor:
    return torch.arange(float(height * width)).reshape(1, height, width)


@pytest.mark.parametrize(
    ("side", "scale", "increment", "size"),
    [
        (32, 0.5, 4, 16),
        (32, 0.55, 4, 16),
        (32, 0.6, 4, 20),
        (32, 0.01, 4, 4),
        (30, 0.97, 4, 28),
        (30, 1.0, 4, 30),
        (3, 0.1, 4, 3),
    ],
)
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_resize_batch_sides_are_multiples_of_the_increment(side, scale, increment, size, mode):
    given = {"x": torch.rand(2, 3, side, side, generator=generator()), "y": torch.tensor([0, 1])}
    made = resize_batch(given, scale=scale, size_increment=increment, method=mode, generator=generator())
    assert tuple(made["x"].shape) == (2, 3, size, size)
    assert made["y"] is given["y"]


def test_resize_batch_filters_with_a_triangle():
    # Half the size: a pixel's triangle is four wide, here with 3, 3 and 1 parts inside the image.
    made = resize_batch(image(1, 4).expand(1, 2, 4), scale=0.5, size_increment=1)
    torch.testing.assert_close(made, torch.tensor([[[5 / 7, 16 / 7]]]))


def test_resize_batch_rounds_uint8():
    made = resize_batch(image(1, 4).to(torch.uint8).expand(1, 2, 4), scale=0.5, size_increment=1)
    assert made.dtype == torch.uint8
    assert made.tolist() == [[[1, 2]]]


def test_resize_batch_crops_at_the_offset():
    made = resize_batch(image(4, 4), scale=0.5, size_increment=2, method="crop", offset=(2, 0))
    assert made.tolist() == [[[8.0, 9.0], [12.0, 13.0]]]
    corners = {
        int(resize_batch(image(4, 4), scale=0.5, size_increment=2, method="crop", generator=generator(seed))[0, 0, 0])
        for seed in range(200)
    }
    assert corners == {0, 1, 2, 4, 5, 6, 8, 9, 10}


def test_linear_growth_grows_from_delay_to_full():
    run = RunLength(total=100)
    scale = linear_growth(0.5, Duration.parse("0.5dur"), Duration.parse("0.8dur"))
    scales = [scale(Clock(step=step, run_length=run)) for step in (0, 49, 50, 65, 79, 80, 99, 100)]
    assert scales == pytest.approx([0.5, 0.5, 0.5, 0.75, 0.5 + 0.5 * 29 / 30, 1.0, 1.0, 1.0])


def test_linear_growth_may_increase_in_one_step():
    scale = linear_growth(0.25, Duration.parse(3), Duration.parse(3))
    assert [scale(Clock(step=step)) for step in (2, 3)] == [0.25, 1.0]


def sizes(transform: dt.Transform, steps: int, **options) -> list[int]:
    """Sides of the images that reach the loss."""
    seen: list[int] = []

    def loss(model, batch):
        seen.append(batch.shape[-1])
        return dt.LossSum(total=model(batch.mean((1, 2, 3), keepdim=False)[:, None]).sum(), weight=len(batch))

    model = torch.nn.Linear(1, 1)
    step = dt.compose_step(loss, [transform])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for _ in range(steps):
        state, _ = step(state, torch.rand(2, 1, 16, 16, generator=generator()))
    return seen


def test_progressive_resizing_grows_images_during_the_run():
    grown = progressive_resizing(size_increment=2)
    assert sizes(grown, 10, run_length=RunLength(total=10)) == [8, 8, 8, 8, 8, 8, 10, 14, 16, 16]
    assert sizes(progressive_resizing(lambda step: min(1.0, 0.25 + 0.25 * step)), 5) == [4, 8, 12, 16, 16]


REFUSED = {
    "a number": (lambda: progressive_resizing(0.5), "progressive_resizing: scale must be a schedule, got 0.5"),
    "initial scale": (
        lambda: progressive_resizing(initial_scale=1.5),
        r"progressive_resizing: scale must be a finite number above 0 and at most 1, got 1\.5",
    ),
    "nothing": (
        lambda: progressive_resizing(initial_scale=0),
        "progressive_resizing: scale must be a finite number above 0 and at most 1, got 0",
    ),
    "order": (
        lambda: progressive_resizing(start="5ep", end="3ep"),
        "progressive_resizing: start must be at most end in the same unit, got start='5ep', end='3ep'",
    ),
    "units": (
        lambda: progressive_resizing(start="5ba", end="8ep"),
        "start must be at most end in the same unit, got start='5ba', end='8ep'",
    ),
    "increment": (
        lambda: progressive_resizing(size_increment=0),
        "progressive_resizing: size_increment must be an integer of at least 1, got 0",
    ),
    "mode": (
        lambda: progressive_resizing(method="zoom"),
        "progressive_resizing: method must be 'resize' or 'crop', got 'zoom'",
    ),
    "unknown length": (lambda: sizes(progressive_resizing(), 0), "is a share of the run, whose length is not known"),
    "schedule": (
        lambda: sizes(progressive_resizing(lambda step: 2.0), 1),
        r"must be in \(0, 1\], got 2\.0 from",
    ),
    "offset": (
        lambda: resize_batch(image(8, 8), scale=0.5, method="crop", offset=(0, 5)),
        r"progressive_resizing: offset must be at least 0 and at most \(4, 4\), got offset=\(0, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_progressive_resizing_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
