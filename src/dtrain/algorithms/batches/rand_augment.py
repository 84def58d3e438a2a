"""RandAugment: each image goes through a few operations of one strength, chosen at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.algorithms.batches.drawing import host_random_of, needed
from dtrain.algorithms.batches.fields import Key, on_images
from dtrain.algorithms.batches.image.operations import (
    OPERATIONS,
    Chain,
    check_chains,
    check_level,
    check_operations,
    through_chains,
)
from dtrain.algorithms.batches.image.values import as_before, as_unit
from dtrain.algorithms.batches.seam import at_batch, host_random
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.types import Batch, Schedule

FOURTEEN = tuple(OPERATIONS)
"""The paper's operations, section 3."""


def rand_augment_batch(
    batch: Batch,
    *,
    magnitude: float = 9,
    depth: int = 2,
    operations: Sequence[str] = FOURTEEN,
    fill: float = 0.5,
    inputs: Key = "x",
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
        inputs: key of the images.
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
        drawn = host_random_of(needed(generator, "rand_augment", "chains=..."), "rand_augment")
        return _drawn(count, magnitude, depth, operations, drawn)

    return on_images(batch, inputs, "rand_augment", lambda images: _augmented(images, draw, fill))


def rand_augment(
    magnitude: float | Schedule = 9,
    *,
    depth: int = 2,
    operations: Sequence[str] = FOURTEEN,
    fill: float = 0.5,
    inputs: Key = "x",
) -> Transform:
    """Train on augmented images: ``rand_augment_batch`` of each rank's whole batch, on its device.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``

    Args:
        magnitude: 0 to 10, or a schedule of such, read at the step about to run.
        depth: operations one after another.
        operations: names of those to draw from.
        fill: what is seen beside an image that was moved.
        inputs: key of the images.

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
        drawn = host_random(state, "rand_augment")

        def draw(count: int) -> Sequence[Chain]:
            return _drawn(count, now, depth, operations, drawn)

        return on_images(batch, inputs, "rand_augment", lambda images: _augmented(images, draw, fill))

    return at_batch(augmented, name="rand_augment", images=inputs, hyperparameters=(magnitude_at,))


def _augmented(images: Tensor, draw: Callable[[int], Sequence[Chain]], fill: float) -> Tensor:
    unit = as_unit(images, "rand_augment")
    return as_before(through_chains(unit, draw(len(images)), fill), images.dtype)


def _drawn(count: int, magnitude: float, depth: int, operations: Sequence[str], drawn: random.Random) -> list[Chain]:
    def one() -> tuple[str, float]:
        name = drawn.choice(operations)
        return name, OPERATIONS[name].amount(magnitude, drawn)

    return [[one() for _ in range(depth)] for _ in range(count)]


def _check(magnitude: float, depth: int, operations: Sequence[str]) -> None:
    check_level(magnitude, "rand_augment", "magnitude")
    check_operations(operations, "rand_augment")
    if type(depth) is not int or depth < 1:
        raise ConfigError(f"rand_augment: needs a whole depth of at least 1, got {depth=}")
