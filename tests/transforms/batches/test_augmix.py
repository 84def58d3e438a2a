import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.transforms.batches.rand_augment import AUGMIX_OPERATIONS, augmix, augmix_batch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = torch.rand(8, 3, 9, 9, generator=generator(5))
INVERT, SAME = [("solarize", 0.0)], [("solarize", 256.0)]


def test_augmix_batch_mixes_image_and_chains():
    made = augmix_batch(
        {"x": torch.full((2, 1, 1, 1), 0.2), "y": torch.tensor([1, 2])},
        chains=[[INVERT, SAME], [SAME, [*INVERT, ("posterize", 1)]]],
        weights=[[0.25, 0.5], [0.75, 0.5]],
        image_weights=[0.5, 0.0],
    )
    # 0.5 * 0.2 + 0.5 * (0.25 * 0.8 + 0.75 * 0.2), and 0.5 * 0.2 + 0.5 * 128 / 255
    assert made["x"].flatten().tolist() == pytest.approx([0.275, 0.1 + 64 / 255])
    assert made["y"].tolist() == [1, 2]


def test_augmix_batch_adds_views_beside_the_images():
    given = {"x": IMAGES, "y": torch.arange(8)}
    made = augmix_batch(given, views=2, generator=generator())
    assert sorted(made) == ["x", "x_1", "x_2", "y"]
    assert made["x"] is IMAGES
    assert made["x_1"].shape == made["x_2"].shape == IMAGES.shape
    assert not torch.equal(made["x_1"], made["x_2"])
    assert sorted(given) == ["x", "y"]


def test_uint8_images_keep_their_dtype():
    made = augmix_batch((IMAGES * 255).to(torch.uint8), generator=generator())
    assert (made.dtype, made.shape) == (torch.uint8, IMAGES.shape)


def test_augmix_batch_stays_between_zero_and_one():
    made = augmix_batch(IMAGES, severity=10, generator=generator())
    assert made.min() >= 0
    assert made.max() <= 1 + 1e-6


def test_augmix_operations_exclude_the_benchmarks_corruptions():
    assert not {"color", "contrast", "brightness", "sharpness"} & set(AUGMIX_OPERATIONS)


def test_input_images_and_global_generator_are_unchanged():
    copy, state = IMAGES.clone(), torch.get_rng_state()
    one, same, other = (augmix_batch(IMAGES, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(IMAGES, copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_augmix_batch_accepts_one_image_and_an_empty_batch():
    assert augmix_batch(IMAGES[0], depth=2, generator=generator()).shape == (3, 9, 9)
    assert augmix_batch(IMAGES[:0], generator=generator()).shape == (0, 3, 9, 9)


REFUSED = {
    "no generator": (
        lambda: augmix_batch(IMAGES),
        "augmix: generator must be given, got None. Give generator= or chains=, weights= and image_weights=",
    ),
    "severity": (lambda: augmix(-1), r"augmix: severity must be in \[0, 10\], got -1\."),
    "width": (lambda: augmix(width=0), "augmix: width must be an integer of at least 1, got 0"),
    "depth": (lambda: augmix(depth=-1), "augmix: depth must be an integer of at least 1, got -1"),
    "alpha": (lambda: augmix(alpha=0), "augmix: alpha must be a finite number above 0, got 0"),
    "negative alpha": (lambda: augmix(alpha=-1), "augmix: alpha must be a finite number above 0, got -1"),
    "operation": (lambda: augmix(operations=("flip",)), "augmix: operations must be some of identity, .* got 'flip'"),
    "views": (lambda: augmix(views=-1), "augmix: views must be an integer of at least 0, got -1"),
    "views of a tensor": (
        lambda: augmix_batch(IMAGES, views=1, generator=generator()),
        r"augmix: the batch must be a mapping with views, got a Tensor\. Use views=0",
    ),
    "mixture": (
        lambda: augmix_batch(IMAGES[0], chains=[[SAME]], weights=[[0.5], [0.5]], image_weights=[1.0]),
        "augmix: there must be as many weights as chains and 1 image_weights, got 2, 1 and 1",
    ),
    "chains of a mixture": (
        lambda: augmix_batch(IMAGES[0], chains=[[SAME, SAME]], weights=[[1.0]], image_weights=[1.0]),
        "augmix: chains must have one chain per image, got 2 for 1 images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_augmix_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
