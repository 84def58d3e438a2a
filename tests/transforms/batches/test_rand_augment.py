from types import SimpleNamespace

import pytest
import torch

from dtrain.data.fetcher import apply_transform
from dtrain.errors import ConfigError
from dtrain.transforms.batches.rand_augment import RAND_AUGMENT_OPERATIONS, rand_augment, rand_augment_batch


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


IMAGES = torch.rand(8, 3, 9, 9, generator=generator(5))


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
    assert made.mean() == pytest.approx(0.5, abs=0.035)  # five standard errors


def test_input_images_and_global_generator_are_unchanged():
    copy, state = IMAGES.clone(), torch.get_rng_state()
    one, same, other = (rand_augment_batch(IMAGES, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(IMAGES, copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_rand_augment_batch_transforms_one_sample_in_a_loader():
    sample = {"x": IMAGES[0], "y": 3}
    one, again, other = (
        apply_transform(lambda s, g: rand_augment_batch(s, generator=g), sample, seed=0, epoch=e, index=4) for e in (0, 0, 1)
    )
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], other["x"])
    assert one["x"].shape == (3, 9, 9)


def test_rand_augment_batch_accepts_an_empty_batch():
    assert rand_augment_batch(IMAGES[:0], generator=generator()).shape == (0, 3, 9, 9)


REFUSED = {
    "no generator": (
        lambda: rand_augment_batch(IMAGES),
        "rand_augment: generator must be given, got None. Give generator= or chains=",
    ),
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
}


@pytest.mark.parametrize("name", REFUSED)
def test_rand_augment_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
