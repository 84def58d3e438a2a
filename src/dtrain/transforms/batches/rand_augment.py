"""RandAugment: apply a few random operations of one strength to each image."""

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
    """Return a batch with ``depth`` uniformly random operations applied to each image; targets are unchanged.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``: a fraction ``magnitude / 10`` of
    its range. The ranges, with a random sign, are 30 degrees for ``rotate``, 0.3 for ``shear_x`` and ``shear_y``, 150 / 331 of
    the side for ``translate_x`` and ``translate_y``, and a factor of 1 +- 0.9 for ``color``, ``contrast``, ``brightness`` and
    ``sharpness``. ``solarize`` has a threshold from 256 down to 0 levels, ``posterize`` 8 bits down to 4. ``identity``,
    ``autocontrast`` and ``equalize`` have no strength.

    Images are warped about their center, with bilinear interpolation.

    Args:
        batch: images ``[batch, channels, height, width]``, uint8 or floats from 0 to 1 (so normalize later, in the model), or a
            mapping, TensorDict or tuple with images; also one image ``[channels, height, width]``, in a loader.
        magnitude: strength, 0 to 10.
        depth: operations per image, at least 1.
        operations: names of the operations to draw from.
        fill: value of pixels beside a moved image; gray by default.
        input_key: key of the images.
        generator: CPU generator for ``chains`` if not given; the choices on the host select kernels.
        chains: operations with amounts, per image.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> chain = [("brightness", 0.5), ("solarize", 64.0)]
        >>> dt.transforms.rand_augment_batch(image, chains=[chain]).tolist()
        [[[0.125, 0.5]]]

    Raises:
        ConfigError: a CPU ``generator`` is required but missing, the inputs are not images or have another dtype, an operation
            is unknown, or ``magnitude`` or ``depth`` is out of its range.

    Source: Cubuk et al. 2020, arXiv:1909.13719, section 3, magnitude and depth as for ResNet-50 in section 4; ranges of
        AutoAugment, arXiv:1805.09501.
    """
    _check(magnitude, depth, operations)

    def draw(count: int) -> Sequence[Chain]:
        if chains is not None:
            check_chains(chains, count, "rand_augment")
            return chains
        rng = host_random_from(require_generator(generator, "rand_augment", "chains="), "rand_augment")
        return _sample_chains(count, magnitude, depth, operations, rng)

    return map_images(batch, input_key, "rand_augment", lambda images: _augment(images, draw, fill))


def rand_augment(
    magnitude: float | Schedule = 9,
    *,
    depth: int = 2,
    operations: Sequence[str] = RAND_AUGMENT_OPERATIONS,
    fill: float = 0.5,
    input_key: BatchKey = "x",
) -> Transform:
    """Train on augmented images: apply ``rand_augment_batch`` to each rank's whole batch, on its device.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``

    Args:
        magnitude: strength, 0 to 10, or a schedule.
        depth: operations per image.
        operations: names of the operations to draw from.
        fill: value of pixels beside a moved image.
        input_key: key of the images.

    Host sync: none; the host draws the choices from the run's seed, the step and the data-parallel rank.

    Example:
        >>> import dtrain as dt
        >>> transform = dt.transforms.rand_augment(9, depth=2)
        >>> transform.name
        'rand_augment'

    Raises:
        ConfigError: an operation is unknown, or ``magnitude`` (a schedule is checked in each step) or ``depth`` is out of its
            range.

    Source: Cubuk et al. 2020, arXiv:1909.13719, section 3.
    """
    magnitude_at = hyperparameter(magnitude, "rand_augment: magnitude", "[0, 10]")
    _check(0, depth, operations)

    def batch_fn(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        strength = magnitude_at(state.clock)
        rng = host_random_for_step(state, "rand_augment")

        def draw(count: int) -> Sequence[Chain]:
            return _sample_chains(count, strength, depth, operations, rng)

        return map_images(batch, input_key, "rand_augment", lambda images: _augment(images, draw, fill))

    return batch_transform(batch_fn, name="rand_augment", image_key=input_key, hyperparameters=(magnitude_at,))


def _augment(images: Tensor, draw: Callable[[int], Sequence[Chain]], fill: float) -> Tensor:
    unit = to_unit_range(images, "rand_augment")
    return from_unit_range(apply_chains(unit, draw(len(images)), fill), images.dtype)


def _sample_chains(count: int, magnitude: float, depth: int, operations: Sequence[str], rng: random.Random) -> list[Chain]:
    def sample_operation() -> tuple[str, float]:
        name = rng.choice(operations)
        return name, IMAGE_OPERATIONS[name].amount(magnitude, rng)

    return [[sample_operation() for _ in range(depth)] for _ in range(count)]


def _check(magnitude: float, depth: int, operations: Sequence[str]) -> None:
    check_level(magnitude, "rand_augment", "magnitude")
    check_operations(operations, "rand_augment")
    if type(depth) is not int or depth < 1:
        raise ConfigError(f"rand_augment: depth must be an int of at least 1, got {depth=}.")
