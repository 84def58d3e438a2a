"""AugMix: mix each image with a weighted sum of augmented copies (chains of random operations)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_alpha,
    get_tensor,
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
    per_image,
    to_device_async,
    to_unit_range,
)
from dtrain.typing import Batch, Schedule, is_tensordict

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AugMixDraws:
    """The random numbers of AugMix for ``n`` images, on the host, for example for a test or a replay.

    Formula: ``x = image_weights * x + (1 - image_weights) * sum_i weights_i * chain_i(x)``

    Args:
        chains: for each of ``width`` chains, one chain of operations per image.
        weights: for each chain, its weight per image; the weights of an image sum to 1.
        image_weights: weight of the unchanged image, per image.

    Example:
        >>> import dtrain as dt
        >>> chains = [[[("brightness", 0.5)]]]
        >>> draws = dt.transforms.AugMixDraws(chains=chains, weights=[[1.0]], image_weights=[0.25])
        >>> dt.transforms.augmix_batch(torch.ones(1, 1, 1), draws=draws).item()  # 0.25 + 0.75 * 0.5
        0.625

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.
    """

    chains: Sequence[Sequence[Chain]]
    weights: Sequence[Sequence[float]]
    image_weights: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AugMixOptions:
    severity: float
    width: int
    depth: int | None
    alpha: float
    operations: Sequence[str]

    def __post_init__(self) -> None:
        check_level(self.severity, "augmix", "severity")
        check_operations(self.operations, "augmix")
        check_alpha(self.alpha, "augmix")
        if self.alpha == 0:
            raise ConfigError("augmix: alpha must be above 0, got alpha=0. For unchanged images omit augmix.")
        if type(self.width) is not int or self.width < 1:
            raise ConfigError(f"augmix: width must be an int of at least 1, got width={self.width!r}.")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise ConfigError(f"augmix: depth must be an int of at least 1 or None, got depth={self.depth!r}.")


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
    input_key: BatchKey = "x",
    generator: torch.Generator | None = None,
    draws: AugMixDraws | None = None,
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
        input_key: key of the images.
        generator: CPU generator for ``draws`` if not given; the choices on the host select kernels.
        draws: all random numbers.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> chains = [[[("solarize", 0.0)]], [[("solarize", 256.0)]]]
        >>> draws = dt.transforms.AugMixDraws(chains=chains, weights=[[0.5], [0.5]], image_weights=[0.5])
        >>> dt.transforms.augmix_batch(image, draws=draws).tolist()
        [[[0.375, 0.75]]]

    Raises:
        ConfigError: a CPU ``generator`` is required but missing, the inputs are not images or have another dtype, an operation
            is unknown, ``views`` is given for a batch that is not a mapping, or an option is out of its range.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3, algorithm 1.
    """
    options = _AugMixOptions(severity=severity, width=width, depth=depth, alpha=alpha, operations=operations)
    _check_views(views)

    def draw(count: int) -> AugMixDraws:
        if draws is not None:
            return draws
        return _sample_draws(count, options, host_random_from(require_generator(generator, "augmix", "draws="), "augmix"))

    return _augment_or_add_views(batch, input_key, views, fill, draw)


def augmix(
    severity: float | Schedule = 3,
    *,
    width: int = 3,
    depth: int | None = None,
    alpha: float = 1.0,
    operations: Sequence[str] = AUGMIX_OPERATIONS,
    fill: float = 0.0,
    views: int = 0,
    input_key: BatchKey = "x",
) -> Transform:
    """Train on augmented images: apply ``augmix_batch`` to each rank's whole batch, on its device.

    The paper trains on two views beside the image, with a consistency loss::

        def loss_fn(model, batch):
            logits = model(torch.cat([batch["x"], batch["x_1"], batch["x_2"]])).chunk(3)
            clean, divergence = dt.soft_cross_entropy(logits[0], batch["y"]), dt.transforms.jensen_shannon(logits)
            return dt.LossSum(total=clean.total + 12 * divergence.total, weight=clean.weight)

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
        input_key: key of the images.

    Host sync: none; the host draws the choices from the run's seed, the step and the data-parallel rank.

    Example:
        >>> import dtrain as dt
        >>> transform = dt.transforms.augmix(3, views=2)
        >>> transform.name
        'augmix'

    Raises:
        ConfigError: an option is out of its range (a schedule is checked in each step).

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.
    """
    severity_at = hyperparameter(severity, "augmix: severity", "[0, 10]")

    def options_at(level: float) -> _AugMixOptions:
        return _AugMixOptions(severity=level, width=width, depth=depth, alpha=alpha, operations=operations)

    options_at(0)
    _check_views(views)

    def batch_fn(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        options, rng = options_at(severity_at(state.clock)), host_random_for_step(state, "augmix")
        return _augment_or_add_views(batch, input_key, views, fill, lambda count: _sample_draws(count, options, rng))

    return batch_transform(batch_fn, name="augmix", image_key=input_key, hyperparameters=(severity_at,))


def _augment_or_add_views(
    batch: Batch, input_key: BatchKey, views: int, fill: float, draw: Callable[[int], AugMixDraws]
) -> Batch:
    def augment() -> Batch:
        return map_images(batch, input_key, "augmix", lambda images: _mix_chains(images, draw(len(images)), fill))

    if not views:
        return augment()
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"augmix: the batch must be a mapping with views, got a {type(batch).__name__}. Use views=0.")
    copies = {f"{input_key}_{view}": get_tensor(augment(), input_key, "augmix") for view in range(1, views + 1)}
    return batch.copy().update(copies) if is_tensordict(batch) else {**batch, **copies}


def _mix_chains(images: Tensor, draws: AugMixDraws, fill: float) -> Tensor:
    if not len(draws.chains) == len(draws.weights) or not len(draws.image_weights) == len(images):
        raise ConfigError(
            f"augmix: draws must have as many weights as chains and {len(images)} image_weights, got "
            f"{len(draws.weights)}, {len(draws.chains)} and {len(draws.image_weights)}."
        )
    unit = to_unit_range(images, "augmix")
    mixed = torch.zeros_like(unit)
    for chains, weights in zip(draws.chains, draws.weights, strict=True):
        check_chains(chains, len(images), "augmix")
        mixed = mixed + per_image(to_device_async(weights, unit.dtype, unit.device)) * apply_chains(unit, chains, fill)
    image_weights = per_image(to_device_async(draws.image_weights, unit.dtype, unit.device))
    return from_unit_range(torch.lerp(mixed, unit, image_weights), images.dtype)


def _sample_draws(count: int, options: _AugMixOptions, rng: random.Random) -> AugMixDraws:
    """Sample the random numbers for ``count`` images. Normalized gamma samples have a Dirichlet distribution."""

    def chain() -> Chain:
        names = rng.choices(options.operations, k=options.depth or rng.randint(1, 3))
        levels = [rng.uniform(min(_MIN_LEVEL, options.severity), options.severity) for _ in names]
        return [(name, IMAGE_OPERATIONS[name].amount(level, rng)) for name, level in zip(names, levels, strict=True)]

    gammas = [[rng.gammavariate(options.alpha, 1.0) for _ in range(options.width)] for _ in range(count)]
    weights = [[gamma / (sum(row) or 1.0) for gamma in row] for row in gammas]
    return AugMixDraws(
        chains=[[chain() for _ in range(count)] for _ in range(options.width)],
        weights=[[row[index] for row in weights] for index in range(options.width)],
        image_weights=[rng.betavariate(options.alpha, options.alpha) for _ in range(count)],
    )


def _check_views(views: int) -> None:
    if type(views) is not int or views < 0:
        raise ConfigError(f"augmix: views must be an int of at least 0, got {views=}.")
