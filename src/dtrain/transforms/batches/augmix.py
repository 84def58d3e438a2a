"""AugMix: each image mixed with a mixture of chains of operations on it."""

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
"""The paper's operations, section 3: none of those that corrupt images in the ImageNet-C benchmark."""

_MIN_LEVEL = 0.1  # level of an operation; below, nothing is to be seen of it


@dataclass(frozen=True, slots=True, kw_only=True)
class AugMixDraws:
    """What AugMix draws, for ``n`` images: numbers of the host, so that a test or a replay can give them.

    Formula: ``x = kept * x + (1 - kept) * sum_i weights_i * chain_i(x)``

    Args:
        chains: for each of ``width`` chains, what each image goes through.
        weights: for each of the chains, its share for each image; for an image they sum to 1.
        image_weights: the share of the image itself, for each.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.

    Example:
        >>> darker = Mixture(chains=[[[("brightness", 0.5)]]], weights=[[1.0]], image_weights=[0.25])
        >>> augmix_batch(torch.ones(1, 1, 1), mixture=darker).item()  # 0.25 + 0.75 * 0.5
        0.625
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
            raise ConfigError("augmix: needs alpha > 0, got alpha=0; to leave images as they are, leave it out")
        if type(self.width) is not int or self.width < 1:
            raise ConfigError(f"augmix: needs a whole width of at least 1, got width={self.width!r}")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise ConfigError(f"augmix: needs a whole depth of at least 1, or None for 1 to 3, got depth={self.depth!r}")


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
    """A batch with augmented images in place of, or with ``views`` beside, its own; targets are untouched.

    Formula: ``x = kept * x + (1 - kept) * sum_i weights_i * chain_i(x)``, ``weights ~ Dirichlet(alpha, ..., alpha)`` over
    ``width`` chains, ``kept ~ Beta(alpha, alpha)``; a chain is ``depth`` operations, each at a level drawn evenly from 0.1 to
    ``severity`` of 10, whose ranges are those of ``rand_augment_batch``.

    Args:
        batch: images ``[batch, channels, height, width]``, uint8 or floats from 0 to 1 (so normalise them later, in the model),
            or a mapping, TensorDict or tuple with them; also one image ``[channels, height, width]``, in a loader.
        severity: highest level, 0 to 10.
        width: chains that are mixed.
        depth: operations in each; None draws 1, 2 or 3.
        alpha: > 0, of both distributions.
        operations: names of those to draw from.
        fill: what is seen beside an image that was moved; black by default.
        views: 0 replaces the images; more leave them, and add so many augmented copies, under the keys ``"x_1"``, ``"x_2"``
            and so on of a mapping, for a loss that asks for one answer to all of them: ``jensen_shannon``.
        input_key: key of the images.
        generator: of the CPU, for what is not given below: the choices decide which kernels run.
        draws: all that is drawn otherwise.

    Host sync: none.

    Raises:
        ConfigError: no generator of the CPU where one is needed, no images, another dtype, an unknown operation, views of what
            is no mapping, an option that cannot be.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3, algorithm 1.

    Example:
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> half = Mixture(chains=[[[("solarize", 0.0)]], [[("solarize", 256.0)]]], weights=[[0.5], [0.5]], kept=[0.5])
        >>> augmix_batch(image, draws=half).tolist()
        [[[0.375, 0.75]]]
    """
    options = _AugMixOptions(severity=severity, width=width, depth=depth, alpha=alpha, operations=operations)
    _check_views(views)

    def draw(count: int) -> AugMixDraws:
        if draws is not None:
            return draws
        return _sample_draws(count, options, host_random_from(require_generator(generator, "augmix", "mixture=..."), "augmix"))

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
    """Train on augmented images: ``augmix_batch`` of each rank's whole batch, on its device.

    The paper trains on two views beside the image, with a loss for answers that differ::

        def loss(model, batch):
            logits = model(torch.cat([batch["x"], batch["x_1"], batch["x_2"]])).chunk(3)
            clean, apart = soft_cross_entropy(logits[0], batch["y"]), jensen_shannon(logits)
            return LossSum(total=clean.total + 12 * apart.total, weight=clean.weight)

        step = compose_step(loss, [augmix(views=2)])

    Formula: ``x = kept * x + (1 - kept) * sum_i weights_i * chain_i(x)``

    Args:
        severity: highest level of an operation, 0 to 10, or a schedule of such, read at the step about to run.
        width: chains that are mixed.
        depth: operations in each; None draws 1, 2 or 3.
        alpha: > 0, of both distributions.
        operations: names of those to draw from.
        fill: what is seen beside an image that was moved.
        views: augmented copies beside the images; 0 replaces them.
        input_key: key of the images.

    Host sync: none; choices are drawn on the host, from the run's seed, the step and the data-parallel rank.

    Raises:
        ConfigError: an option that cannot be; of a schedule, in the step for which it is.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.

    Example:
        >>> augmix(3, views=2).name
        'augmix'
    """
    severity_at = hyperparameter(severity, "augmix: severity", "[0, 10]")

    def options_at(level: float) -> _AugMixOptions:
        return _AugMixOptions(severity=level, width=width, depth=depth, alpha=alpha, operations=operations)

    options_at(0)
    _check_views(views)

    def augmented(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        options, drawn = options_at(severity_at(state.clock)), host_random_for_step(state, "augmix")
        return _augment_or_add_views(batch, input_key, views, fill, lambda count: _sample_draws(count, options, drawn))

    return batch_transform(augmented, name="augmix", image_key=input_key, hyperparameters=(severity_at,))


def _augment_or_add_views(
    batch: Batch, input_key: BatchKey, views: int, fill: float, draw: Callable[[int], AugMixDraws]
) -> Batch:
    def augmented() -> Batch:
        return map_images(batch, input_key, "augmix", lambda images: _mix_chains(images, draw(len(images)), fill))

    if not views:
        return augmented()
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"augmix: views are further keys of a mapping, got a {type(batch).__name__}; use views=0")
    further = {f"{input_key}_{view}": get_tensor(augmented(), input_key, "augmix") for view in range(1, views + 1)}
    return batch.copy().update(further) if is_tensordict(batch) else {**batch, **further}


def _mix_chains(images: Tensor, draws: AugMixDraws, fill: float) -> Tensor:
    if not len(draws.chains) == len(draws.weights) or not len(draws.image_weights) == len(images):
        raise ConfigError(
            f"augmix: a mixture has as many weights as chains, and a share kept of each of {len(images)} images, got "
            f"{len(draws.weights)}, {len(draws.chains)} and {len(draws.image_weights)}"
        )
    unit = to_unit_range(images, "augmix")
    made = torch.zeros_like(unit)
    for chains, weights in zip(draws.chains, draws.weights, strict=True):
        check_chains(chains, len(images), "augmix")
        made = made + per_image(to_device_async(weights, unit.dtype, unit.device)) * apply_chains(unit, chains, fill)
    return from_unit_range(
        torch.lerp(made, unit, per_image(to_device_async(draws.image_weights, unit.dtype, unit.device))), images.dtype
    )


def _sample_draws(count: int, options: _AugMixOptions, rng: random.Random) -> AugMixDraws:
    """A mixture for ``count`` images. Shares of gammas are a Dirichlet's."""

    def chain() -> Chain:
        names = rng.choices(options.operations, k=options.depth or rng.randint(1, 3))
        level = [rng.uniform(min(_MIN_LEVEL, options.severity), options.severity) for _ in names]
        return [(name, IMAGE_OPERATIONS[name].amount(at, rng)) for name, at in zip(names, level, strict=True)]

    gammas = [[rng.gammavariate(options.alpha, 1.0) for _ in range(options.width)] for _ in range(count)]
    shares = [[part / (sum(parts) or 1.0) for part in parts] for parts in gammas]
    return AugMixDraws(
        chains=[[chain() for _ in range(count)] for _ in range(options.width)],
        weights=[[of[at] for of in shares] for at in range(options.width)],
        image_weights=[rng.betavariate(options.alpha, options.alpha) for _ in range(count)],
    )


def _check_views(views: int) -> None:
    if type(views) is not int or views < 0:
        raise ConfigError(f"augmix: needs a whole number of views of at least 0, got {views=}")
