from types import SimpleNamespace

import pytest
import torch

from draws import generator
from dtrain.errors import ConfigError
from dtrain.transforms.batches.rand_augment import (
    AUGMIX_OPERATIONS,
    RAND_AUGMENT_OPERATIONS,
    augmix,
    augmix_batch,
    rand_augment,
    rand_augment_batch,
)

IMAGES = torch.rand(8, 3, 9, 9, generator=generator(5))
INVERT, SAME = [("solarize", 0.0)], [("solarize", 256.0)]


def test_rand_augment_has_the_papers_fourteen_operations():
    assert len(RAND_AUGMENT_OPERATIONS) == 14
    assert {"identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"} < set(RAND_AUGMENT_OPERATIONS)


def test_rand_augment_batch_applies_the_chain_of_each_image():
    made = rand_augment_batch(
        {"x": torch.full((2, 1, 1, 1), 0.25), "y": 1},
        chains=[[("brightness", 0.5), ("solarize", 0.0)], [("solarize", 0.0), ("brightness", 0.5)]],
    )
    assert made["x"].flatten().tolist() == [0.875, 0.375]
    assert made["y"] == 1


def test_uint8_images_keep_their_dtype():
    bytes_ = (IMAGES * 255).to(torch.uint8)
    made = rand_augment_batch(bytes_, generator=generator())
    assert made.dtype == torch.uint8
    floats = rand_augment_batch(bytes_ / 255.0, generator=generator())
    assert (made / 255.0 - floats).abs().max() <= 0.51 / 255


def test_magnitude_zero_changes_nothing():
    strong = [name for name in RAND_AUGMENT_OPERATIONS if name not in ("autocontrast", "equalize")]
    made = rand_augment_batch(IMAGES, magnitude=0, depth=4, operations=strong, generator=generator())
    assert (made - IMAGES).abs().max() <= 0.51 / 255  # posterize with eight bits rounds to levels


def test_rand_augment_batch_draws_operations_uniformly():
    black = torch.zeros(5000, 1, 1, 1)
    made = rand_augment_batch(black, magnitude=10, depth=1, operations=("brightness", "solarize"), generator=generator())
    assert made.unique().tolist() == [0.0, 1.0]  # of a black image one leaves it, the other makes it white
    assert made.mean().item() == pytest.approx(0.5, abs=0.035)  # five standard errors


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


def test_augmix_batch_stays_between_zero_and_one():
    made = augmix_batch(IMAGES, severity=10, generator=generator())
    assert made.min() >= 0
    assert made.max() <= 1 + 1e-6


def test_augmix_operations_exclude_the_benchmarks_corruptions():
    assert not {"color", "contrast", "brightness", "sharpness"} & set(AUGMIX_OPERATIONS)


def test_augmix_batch_accepts_one_image():
    assert augmix_batch(IMAGES[0], depth=2, generator=generator()).shape == (3, 9, 9)


REFUSED = {
    "a generator of a device": (
        lambda: rand_augment_batch(IMAGES, generator=SimpleNamespace(device=torch.device("cuda:0"))),
        "rand_augment: generator must be on the CPU, got a generator on cuda:0",
    ),
    "magnitude": (lambda: rand_augment(11), r"rand_augment: magnitude must be in \[0, 10\], got 11\."),
    "depth": (lambda: rand_augment(depth=0), "rand_augment: depth must be an integer of at least 1, got 0"),
    "operation": (
        lambda: rand_augment(operations=["flip"]),
        "rand_augment: operations must be some of identity, .* got 'flip'",
    ),
    "one operation": (lambda: rand_augment(operations="rotate"), "rand_augment: operations must be some of .* got 'r'"),
    "no operation": (lambda: rand_augment(operations=[]), r"rand_augment: operations must be some of .* got \[\]"),
    "chains": (
        lambda: rand_augment_batch(IMAGES, chains=[[]]),
        "rand_augment: chains must have one chain per image, got 1 for 8 images",
    ),
    "chain": (lambda: rand_augment_batch(IMAGES[0], chains=[[("flip", 1.0)]]), "operations must be some of .* got 'flip'"),
    "integers": (
        lambda: rand_augment_batch(IMAGES.long(), generator=generator()),
        "rand_augment: images must be uint8, or floats from 0 to 1, got torch.int64",
    ),
    "augmix: severity": (lambda: augmix(-1), r"augmix: severity must be in \[0, 10\], got -1\."),
    "augmix: width": (lambda: augmix(width=0), "augmix: width must be an integer of at least 1, got 0"),
    "augmix: depth": (lambda: augmix(depth=-1), "augmix: depth must be an integer of at least 1, got -1"),
    "augmix: alpha": (lambda: augmix(alpha=0), "augmix: alpha must be a finite number above 0, got 0"),
    "augmix: negative alpha": (lambda: augmix(alpha=-1), "augmix: alpha must be a finite number above 0, got -1"),
    "augmix: operation": (lambda: augmix(operations=("flip",)), "augmix: operations must be some of identity, .* got 'flip'"),
    "augmix: views": (lambda: augmix(views=-1), "augmix: views must be an integer of at least 0, got -1"),
    "augmix: views of a tensor": (
        lambda: augmix_batch(IMAGES, views=1, generator=generator()),
        r"augmix: the batch must be a mapping with views, got a Tensor\. Use views=0",
    ),
    "augmix: mixture": (
        lambda: augmix_batch(IMAGES[0], chains=[[SAME]], weights=[[0.5], [0.5]], image_weights=[1.0]),
        "augmix: there must be as many weights as chains and 1 image_weights, got 2, 1 and 1",
    ),
    "augmix: chains of a mixture": (
        lambda: augmix_batch(IMAGES[0], chains=[[SAME, SAME]], weights=[[1.0]], image_weights=[1.0]),
        "augmix: chains must have one chain per image, got 2 for 1 images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
