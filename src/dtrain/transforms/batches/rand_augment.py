"""RandAugment: each image goes through a few operations of one strength, chosen at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    host_random_for_step,
    host_random_from,
    map_images,
    require_generator,
)
from dtrain.transforms.batches.image_ops import (
    IMAGE_OPERATIONS,
    Chain,
    apply_chains,
    check_chains,
    check_level,
    check_operations,
    from_unit_range,
    to_unit_range,
)
from dtrain.typing import Batch, Schedule

RAND_AUGMENT_OPERATIONS = tuple(IMAGE_OPERATIONS)
"""The paper's operations, section 3."""


def rand_augment_batch(
    batch: Batch,
    *,
    magnitude: float = 9,
    depth: int = 2,
    operations: Sequence[str] = RAND_AUGMENT_OPERATIONS,
    fill: float = 0.5,
    input_key: BatchKey = "x",
    generator: torch.Generator | None = None,
    chains: Sequence[Chain] | None = None,
) -> Batch:
    """A batch whose images each went through ``depth`` operations, drawn for each image and evenly; targets are untouched.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``: a share ``magnitude / 10`` of its
    range, which is, to a random side, 30 degrees for ``rotate``, 0.3 for ``shear_x`` and ``shear_y``, 150 / 331 of the side for
    ``translate_x`` and ``translate_y``, 0.9 more or less of ``colour``, ``contrast``, ``brightness`` and ``sharpness``; a
    threshold of 256 down to 0 levels for ``solarize``, 8 bits down to 4 for ``posterize``. ``identity``, ``autocontrast`` and
    ``equalize`` have no strength.

    Images are moved about their centre, with bilinear interpolation.

    Args:
        batch: images ``[batch, channels, height, width]``, uint8 or floats from 0 to 1 (so normalise them later, in the model),
            or a mapping, TensorDict or tuple with them; also one image ``[channels, height, width]``, in a loader.
        magnitude: 0 to 10.
        depth: operations one after another, at least 1.
        operations: names of those to draw from.
        fill: what is seen beside an image that was moved; grey by default.
        input_key: key of the images.
        generator: of the CPU, for what is not given below: the choices decide which kernels run.
        chains: for each image, its operations with their amounts.

    Host sync: none.

    Raises:
        ConfigError: no generator of the CPU where one is needed, no images, another dtype, an unknown operation, a magnitude or
            depth that cannot be.

    Source: Cubuk et al. 2020, arXiv:1909.13719, section 3, magnitude and depth as for ResNet-50 in section 4; ranges of
        AutoAugment, arXiv:1805.09501.

    Example:
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> rand_augment_batch(image, chains=[[("brightness", 0.5), ("solarize", 64.0)]]).tolist()
        [[[0.125, 0.5]]]
    """
    _check(magnitude, depth, operations)

    def draw(count: int) -> Sequence[Chain]:
        if chains is not None:
            check_chains(chains, count, "rand_augment")
            return chains
        drawn = host_random_from(require_generator(generator, "rand_augment", "chains=..."), "rand_augment")
        return _sample_chains(count, magnitude, depth, operations, drawn)

    return map_images(batch, input_key, "rand_augment", lambda images: _augment(images, draw, fill))


def rand_augment(
    magnitude: float | Schedule = 9,
    *,
    depth: int = 2,
    operations: Sequence[str] = RAND_AUGMENT_OPERATIONS,
    fill: float = 0.5,
    input_key: BatchKey = "x",
) -> Transform:
    """Train on augmented images: ``rand_augment_batch`` of each rank's whole batch, on its device.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``

    Args:
        magnitude: 0 to 10, or a schedule of such, read at the step about to run.
        depth: operations one after another.
        operations: names of those to draw from.
        fill: what is seen beside an image that was moved.
        input_key: key of the images.

    Host sync: none; choices are drawn on the host, from the run's seed, the step and the data-parallel rank.

    Raises:
        ConfigError: an unknown operation, a magnitude or depth that cannot be; of a schedule, in the step for which it is.

    Source: Cubuk et al. 2020, arXiv:1909.13719, section 3.

    Example:
        >>> rand_augment(9, depth=2).name
        'rand_augment'
    """
    magnitude_at = hyperparameter(magnitude, "rand_augment: magnitude", "[0, 10]")
    _check(0, depth, operations)

    def augmented(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = magnitude_at(state.clock)
        drawn = host_random_for_step(state, "rand_augment")

        def draw(count: int) -> Sequence[Chain]:
            return _sample_chains(count, now, depth, operations, drawn)

        return map_images(batch, input_key, "rand_augment", lambda images: _augment(images, draw, fill))

    return batch_transform(augmented, name="rand_augment", image_key=input_key, hyperparameters=(magnitude_at,))


def _augment(images: Tensor, draw: Callable[[int], Sequence[Chain]], fill: float) -> Tensor:
    unit = to_unit_range(images, "rand_augment")
    return from_unit_range(apply_chains(unit, draw(len(images)), fill), images.dtype)


def _sample_chains(count: int, magnitude: float, depth: int, operations: Sequence[str], rng: random.Random) -> list[Chain]:
    def one() -> tuple[str, float]:
        name = rng.choice(operations)
        return name, IMAGE_OPERATIONS[name].amount(magnitude, rng)

    return [[one() for _ in range(depth)] for _ in range(count)]


def _check(magnitude: float, depth: int, operations: Sequence[str]) -> None:
    check_level(magnitude, "rand_augment", "magnitude")
    check_operations(operations, "rand_augment")
    if type(depth) is not int or depth < 1:
        raise ConfigError(f"rand_augment: needs a whole depth of at least 1, got {depth=}")
