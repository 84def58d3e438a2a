"""Apply random operations to images: ``rand_augment`` a few of one strength, ``augmix`` a weighted sum of augmented copies."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from dtrain.arguments import check_int, check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    get_image_batch,
    get_inputs,
    host_random,
    map_images,
)
from dtrain.transforms.batches.image_ops import (
    IMAGE_OPERATIONS,
    MAX_LEVEL,
    Chain,
    apply_chains,
    check_operations,
    from_unit_range,
    to_device_async,
    to_unit_range,
)
from dtrain.typing import Batch, LossSum, Schedule, is_tensordict

RAND_AUGMENT_OPERATIONS = tuple(IMAGE_OPERATIONS)
"""The paper's operations, section 3."""

AUGMIX_OPERATIONS = (
    "autocontrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
"""The paper's operations, section 3, without the corruptions of the ImageNet-C benchmark."""

# Below this level the effect of an operation is invisible.
_MIN_LEVEL = 0.1


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
    _check_rand_augment(depth, operations)

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
    _check_rand_augment(depth, operations)
    return batch_transform(
        partial(rand_augment_batch, depth=depth, operations=operations, fill=fill, input_key=input_key),
        name="rand_augment",
        at_clock={"magnitude": magnitude_at},
        check=partial(get_image_batch, key=input_key, caller="rand_augment"),
        host_generator=True,
    )


def _check_rand_augment(depth: int, operations: Sequence[str]) -> None:
    check_int("rand_augment", "depth", depth)
    check_operations(operations, "rand_augment")


def augmix_batch(
    batch: Batch,
    *,
    severity: float = 3,
    width: int = 3,
    depth: int | None = None,
    alpha: float = 1.0,
    operations: Sequence[str] = AUGMIX_OPERATIONS,
    fill: float = 0.0,
    views: int = 0,
    input_key: BatchKey | None = None,
    generator: torch.Generator | None = None,
    chains: Sequence[Sequence[Chain]] | None = None,
    weights: Sequence[Sequence[float]] = (),
    image_weights: Sequence[float] = (),
) -> Batch:
    """Return a batch with augmented images, or with ``views`` augmented copies beside the images; targets are unchanged.

    Formula: ``x = m * x + (1 - m) * sum_i weights_i * chain_i(x)``, ``weights ~ Dirichlet(alpha, ..., alpha)`` over ``width``
    chains, ``m ~ Beta(alpha, alpha)``; a chain is ``depth`` operations, each at a uniform level from 0.1 to ``severity`` of 10,
    with the ranges of ``rand_augment_batch``.

    Args:
        batch: images ``[batch, channels, height, width]``, uint8 or floats from 0 to 1 (so normalize later, in the model), or a
            mapping, TensorDict or tuple with images; also one image ``[channels, height, width]``, in a loader.
        severity: highest level, 0 to 10.
        width: number of chains.
        depth: operations per chain; None draws 1, 2 or 3.
        alpha: parameter of both distributions, > 0.
        operations: names of the operations to draw from.
        fill: value of pixels beside a moved image; black by default.
        views: 0 replaces the images. Otherwise the images are kept, and this number of augmented copies is added under the keys
            ``"x_1"``, ``"x_2"`` and so on of a mapping, for a consistency loss such as ``jensen_shannon``.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        generator: CPU generator for the random numbers if not given; the choices on the host select kernels.
        chains: for each of ``width`` chains, one chain of operations per image.
        weights: for each of the ``chains``, its weight per image; the weights of an image sum to 1.
        image_weights: weight of the unchanged image, per image, with ``chains``.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> chains = [[[("solarize", 0.0)]], [[("solarize", 256.0)]]]
        >>> weights = [[0.5], [0.5]]
        >>> dt.transforms.augmix_batch(
        ...     image, chains=chains, weights=weights, image_weights=[0.5]
        ... ).tolist()
        [[[0.375, 0.75]]]

    Raises:
        ConfigError: a CPU ``generator`` is required but missing, the inputs are not images or have another dtype, an operation
            is unknown, ``views`` is given for a batch that is not a mapping, or an option is out of its range.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3, algorithm 1.
    """
    check_number("augmix", "severity", severity, minimum=0, maximum=MAX_LEVEL)
    _check_augmix(width, depth, alpha, operations, views)

    def draw(count: int) -> tuple[Sequence[Sequence[Chain]], Sequence[Sequence[float]], Sequence[float]]:
        if chains is not None:
            return chains, weights, image_weights
        rng = host_random(generator, "augmix", "chains=, weights= and image_weights=")
        # Normalized gamma samples have a Dirichlet distribution.
        gammas = [[rng.gammavariate(alpha, 1.0) for _ in range(width)] for _ in range(count)]
        by_image = [[gamma / (sum(row) or 1.0) for gamma in row] for row in gammas]
        return (
            [[_draw_chain(rng, severity, depth, operations) for _ in range(count)] for _ in range(width)],
            [[row[index] for row in by_image] for index in range(width)],
            [rng.betavariate(alpha, alpha) for _ in range(count)],
        )

    def augment(images: Tensor) -> Tensor:
        drawn_chains, chain_weights, own_weights = draw(len(images))
        if len(drawn_chains) != len(chain_weights) or len(own_weights) != len(images):
            raise ConfigError(
                f"augmix: there must be as many weights as chains and {len(images)} image_weights, got "
                f"{len(chain_weights)}, {len(drawn_chains)} and {len(own_weights)}. "
                "Give one weight per chain and image."
            )
        unit = to_unit_range(images, "augmix")
        mixed = torch.zeros_like(unit)
        for one_chain, weight in zip(drawn_chains, chain_weights, strict=True):
            mixed = mixed + _per_image(weight, unit) * apply_chains(unit, one_chain, fill, caller="augmix")
        return from_unit_range(torch.lerp(mixed, unit, _per_image(own_weights, unit)), images.dtype)

    if not views:
        return map_images(batch, input_key, "augmix", augment)
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"augmix: the batch must be a mapping with views, got a {type(batch).__name__}. Use views=0.")
    key, images = get_inputs(batch, input_key, "augmix")
    copies = {f"{key}_{view}": map_images(images, None, "augmix", augment) for view in range(1, views + 1)}
    return batch.copy().update(copies) if is_tensordict(batch) else {**batch, **copies}


def augmix(
    severity: float | Schedule = 3,
    *,
    width: int = 3,
    depth: int | None = None,
    alpha: float = 1.0,
    operations: Sequence[str] = AUGMIX_OPERATIONS,
    fill: float = 0.0,
    views: int = 0,
    input_key: BatchKey | None = None,
) -> Transform:
    """Train on augmented images: apply ``augmix_batch`` to each rank's whole batch, on its device.

    The paper trains on two views beside the image, with a consistency loss::

        def loss_fn(model, batch):
            logits = model(torch.cat([batch["x"], batch["x_1"], batch["x_2"]])).chunk(3)
            clean, divergence = (
                dt.soft_cross_entropy(logits[0], batch["y"]),
                dt.transforms.jensen_shannon(logits),
            )
            return dt.LossSum(
                total=clean.total + 12 * divergence.total, weight=clean.weight
            )


        step = dt.compose_step(loss_fn, [dt.transforms.augmix(views=2)])

    Formula: ``x = m * x + (1 - m) * sum_i weights_i * chain_i(x)``

    Args:
        severity: highest level of an operation, 0 to 10, or a schedule.
        width: number of chains.
        depth: operations per chain; None draws 1, 2 or 3.
        alpha: parameter of both distributions, > 0.
        operations: names of the operations to draw from.
        fill: value of pixels beside a moved image.
        views: number of augmented copies beside the images; 0 replaces the images.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.

    Host sync: none; the host draws the choices from the run's seed, the step and the data-parallel rank.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.augmix(3)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> images = torch.rand(8, 3, 32, 32)
        >>> state, metrics = step(state, {"x": images, "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: an option is out of its range (a schedule is checked in each step).

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.

    Suggested values:
        CIFAR-10 and CIFAR-100: ``severity=3``, ``width=3``, ``alpha=1`` (Hendrycks et al. 2020, section 4; the authors'
            ``cifar.py``)
        ImageNet, ResNet-50: ``severity=1``, ``width=3``, ``alpha=1`` (Hendrycks et al. 2020, the authors' ``imagenet.py``)
    When not to use: robustness to corrupted images is not the aim: the gain on clean images is small. The consistency loss of
        the paper needs ``views=2`` and three times the forward.
    """
    severity_at = hyperparameter(severity, "augmix: severity", "[0, 10]")
    _check_augmix(width, depth, alpha, operations, views)
    augment = partial(
        augmix_batch,
        width=width,
        depth=depth,
        alpha=alpha,
        operations=operations,
        fill=fill,
        views=views,
        input_key=input_key,
    )
    return batch_transform(
        augment,
        name="augmix",
        at_clock={"severity": severity_at},
        check=partial(get_image_batch, key=input_key, caller="augmix"),
        host_generator=True,
    )


def _draw_chain(rng: random.Random, severity: float, depth: int | None, operations: Sequence[str]) -> Chain:
    names = rng.choices(operations, k=depth or rng.randint(1, 3))
    return [(name, IMAGE_OPERATIONS[name].amount(rng.uniform(min(_MIN_LEVEL, severity), severity), rng)) for name in names]


def _per_image(weights: Sequence[float], images: Tensor) -> Tensor:
    return rearrange(to_device_async(weights, images.dtype, images.device), "n -> n 1 1 1")


def _check_augmix(width: int, depth: int | None, alpha: float, operations: Sequence[str], views: int) -> None:
    check_int("augmix", "width", width)
    if depth is not None:
        check_int("augmix", "depth", depth)
    check_number("augmix", "alpha", alpha, above=0, advice="For unchanged images omit augmix.")
    check_operations(operations, "augmix")
    check_int("augmix", "views", views, minimum=0)


def jensen_shannon(logits: Sequence[Tensor]) -> LossSum:
    """Compute the summed Jensen-Shannon divergence between the predictions for several views of each sample.

    Formula: ``total = sum_i mean_v KL(p[v, i] || m[i])``, ``m = mean_v p[v]``, ``p = softmax(logits)``; ``weight`` counts the
    rows. The divergence is 0 for equal predictions, and at most ``log(views)`` nats.

    Args:
        logits: ``[*, classes]`` of each view, at least two views of one shape. Gradients flow through all views.

    Returns:
        ``LossSum`` in nats.

    Example:
        >>> import dtrain as dt
        >>> sure = torch.tensor([[50.0, 0.0]])
        >>> loss = dt.transforms.jensen_shannon([sure, sure.flip(1)])
        >>> (
        ...     round(float(loss.total), 4),
        ...     float(loss.weight),
        ... )  # log 2, the largest value for two views
        (0.6931, 1.0)

    Raises:
        ConfigError: fewer than two views, or different shapes.

    Source: Lin 1991; as a consistency loss Hendrycks et al. 2020, arXiv:1912.02781, section 3 (there times 12).
    """
    shapes = [tuple(view.shape) for view in logits]
    if len(shapes) < 2 or len(set(shapes)) > 1 or len(shapes[0]) < 2:
        raise ConfigError(
            f"jensen_shannon: needs logits [*, classes] of two or more views of one shape, got {shapes}. "
            "Pass the logits of several views of the same samples."
        )
    logs = torch.stack([(view if view.dtype.itemsize >= 4 else view.float()).log_softmax(dim=-1) for view in logits])
    middle = logs.logsumexp(dim=0) - math.log(len(shapes))
    rows = logs[0, ..., 0].numel()
    return LossSum(total=(logs.exp() * (logs - middle)).sum() / len(shapes), weight=rows)
