"""RandAugment: apply a few random operations of one strength to each image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dtrain.arguments import check_int, check_number
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import BatchKey, batch_transform, get_image_batch, host_random, map_images
from dtrain.transforms.batches.image_ops import (
    IMAGE_OPERATIONS,
    MAX_LEVEL,
    Chain,
    apply_chains,
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
    input_key: BatchKey | None = None,
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
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
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
    check_number("rand_augment", "magnitude", magnitude, minimum=0, maximum=MAX_LEVEL)
    _check(depth, operations)

    def augment(images: Tensor) -> Tensor:
        drawn = chains
        if drawn is None:
            rng = host_random(generator, "rand_augment", "chains=")
            names = [[rng.choice(operations) for _ in range(depth)] for _ in images]
            drawn = [[(name, IMAGE_OPERATIONS[name].amount(magnitude, rng)) for name in chain] for chain in names]
        unit = apply_chains(to_unit_range(images, "rand_augment"), drawn, fill, caller="rand_augment")
        return from_unit_range(unit, images.dtype)

    return map_images(batch, input_key, "rand_augment", augment)


def rand_augment(
    magnitude: float | Schedule = 9,
    *,
    depth: int = 2,
    operations: Sequence[str] = RAND_AUGMENT_OPERATIONS,
    fill: float = 0.5,
    input_key: BatchKey | None = None,
) -> Transform:
    """Train on augmented images: apply ``rand_augment_batch`` to each rank's whole batch, on its device.

    Formula: ``x = o_depth(... o_1(x))``, each ``o`` one of ``operations`` at ``magnitude``

    Args:
        magnitude: strength, 0 to 10, or a schedule.
        depth: operations per image.
        operations: names of the operations to draw from.
        fill: value of pixels beside a moved image.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.

    Host sync: none; the host draws the choices from the run's seed, the step and the data-parallel rank.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.rand_augment(9, depth=2)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> images = torch.rand(8, 3, 32, 32)
        >>> state, metrics = step(state, {"x": images, "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: an operation is unknown, or ``magnitude`` (a schedule is checked in each step) or ``depth`` is out of its
            range.

    Source: Cubuk et al. 2020, arXiv:1909.13719, section 3.

    Suggested values:
        ImageNet, ResNet-50: ``magnitude=9``, ``depth=2`` (Cubuk et al. 2020, section 4)
        CIFAR-10, Wide-ResNet: ``magnitude`` of 4 to 9, ``depth=3`` (Cubuk et al. 2020, appendix A)
    When not to use: the model underfits, or color and orientation decide the class, as with digits. Leave out such operations
        with ``operations=``.
    """
    magnitude_at = hyperparameter(magnitude, "rand_augment: magnitude", "[0, 10]")
    _check(depth, operations)
    return batch_transform(
        partial(rand_augment_batch, depth=depth, operations=operations, fill=fill, input_key=input_key),
        name="rand_augment",
        at_clock={"magnitude": magnitude_at},
        check=partial(get_image_batch, key=input_key, caller="rand_augment"),
        host_generator=True,
    )


def _check(depth: int, operations: Sequence[str]) -> None:
    check_int("rand_augment", "depth", depth)
    check_operations(operations, "rand_augment")
