"""AugMix: each image mixed with a mixture of chains of operations on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.algorithms.batches.drawing import check_alpha, host_random_of, needed
from dtrain.algorithms.batches.fields import Key, on_images, read
from dtrain.algorithms.batches.image.operations import (
    OPERATIONS,
    Chain,
    check_chains,
    check_level,
    check_operations,
    through_chains,
)
from dtrain.algorithms.batches.image.values import as_before, as_unit, each, on_device
from dtrain.algorithms.batches.seam import at_batch, host_random
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.types import Batch, Schedule, is_tensordict

NINE = (
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

_LOWEST = 0.1  # level of an operation; below, nothing is to be seen of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What AugMix draws, for ``n`` images: numbers of the host, so that a test or a replay can give them.

    Formula: ``x = kept * x + (1 - kept) * sum_i weights_i * chain_i(x)``

    Args:
        chains: for each of ``width`` chains, what each image goes through.
        weights: for each of the chains, its share for each image; for an image they sum to 1.
        kept: the share of the image itself, for each.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.

    Example:
        >>> darker = Mixture(chains=[[[("brightness", 0.5)]]], weights=[[1.0]], kept=[0.25])
        >>> augmix_batch(torch.ones(1, 1, 1), mixture=darker).item()  # 0.25 + 0.75 * 0.5
        0.625
    """

    chains: Sequence[Sequence[Chain]]
    weights: Sequence[Sequence[float]]
    kept: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
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
    operations: Sequence[str] = NINE,
    fill: float = 0.0,
    views: int = 0,
    inputs: Key = "x",
    generator: torch.Generator | None = None,
    mixture: Mixture | None = None,
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
        inputs: key of the images.
        generator: of the CPU, for what is not given below: the choices decide which kernels run.
        mixture: all that is drawn otherwise.

    Host sync: none.

    Raises:
        ConfigError: no generator of the CPU where one is needed, no images, another dtype, an unknown operation, views of what
            is no mapping, an option that cannot be.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3, algorithm 1.

    Example:
        >>> image = torch.tensor([[[0.25, 1.0]]])
        >>> half = Mixture(chains=[[[("solarize", 0.0)]], [[("solarize", 256.0)]]], weights=[[0.5], [0.5]], kept=[0.5])
        >>> augmix_batch(image, mixture=half).tolist()
        [[[0.375, 0.75]]]
    """
    options = _Options(severity=severity, width=width, depth=depth, alpha=alpha, operations=operations)
    _check_views(views)

    def draw(count: int) -> Mixture:
        if mixture is not None:
            return mixture
        return _drawn(count, options, host_random_of(needed(generator, "augmix", "mixture=..."), "augmix"))

    return _viewed(batch, inputs, views, fill, draw)


def augmix(
    severity: float | Schedule = 3,
    *,
    width: int = 3,
    depth: int | None = None,
    alpha: float = 1.0,
    operations: Sequence[str] = NINE,
    fill: float = 0.0,
    views: int = 0,
    inputs: Key = "x",
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
        inputs: key of the images.

    Host sync: none; choices are drawn on the host, from the run's seed, the step and the data-parallel rank.

    Raises:
        ConfigError: an option that cannot be; of a schedule, in the step for which it is.

    Source: Hendrycks et al. 2020, arXiv:1912.02781, section 3.

    Example:
        >>> augmix(3, views=2).name
        'augmix'
    """
    severity_at = hyperparameter(severity, "augmix: severity", "[0, 10]")

    def options_at(level: float) -> _Options:
        return _Options(severity=level, width=width, depth=depth, alpha=alpha, operations=operations)

    options_at(0)
    _check_views(views)

    def augmented(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        options, drawn = options_at(severity_at(state.clock)), host_random(state, "augmix")
        return _viewed(batch, inputs, views, fill, lambda count: _drawn(count, options, drawn))

    return at_batch(augmented, name="augmix", images=inputs, hyperparameters=(severity_at,))


def _viewed(batch: Batch, inputs: Key, views: int, fill: float, draw: Callable[[int], Mixture]) -> Batch:
    def augmented() -> Batch:
        return on_images(batch, inputs, "augmix", lambda images: _mixed(images, draw(len(images)), fill))

    if not views:
        return augmented()
    if not (isinstance(batch, Mapping) or is_tensordict(batch)):
        raise ConfigError(f"augmix: views are further keys of a mapping, got a {type(batch).__name__}; use views=0")
    further = {f"{inputs}_{view}": read(augmented(), inputs, "augmix") for view in range(1, views + 1)}
    return batch.copy().update(further) if is_tensordict(batch) else {**batch, **further}


def _mixed(images: Tensor, mixture: Mixture, fill: float) -> Tensor:
    if not len(mixture.chains) == len(mixture.weights) or not len(mixture.kept) == len(images):
        raise ConfigError(
            f"augmix: a mixture has as many weights as chains, and a share kept of each of {len(images)} images, got "
            f"{len(mixture.weights)}, {len(mixture.chains)} and {len(mixture.kept)}"
        )
    unit = as_unit(images, "augmix")
    made = torch.zeros_like(unit)
    for chains, weights in zip(mixture.chains, mixture.weights, strict=True):
        check_chains(chains, len(images), "augmix")
        made = made + each(on_device(weights, unit.dtype, unit.device)) * through_chains(unit, chains, fill)
    return as_before(torch.lerp(made, unit, each(on_device(mixture.kept, unit.dtype, unit.device))), images.dtype)


def _drawn(count: int, options: _Options, drawn: random.Random) -> Mixture:
    """A mixture for ``count`` images. Shares of gammas are a Dirichlet's."""

    def chain() -> Chain:
        names = drawn.choices(options.operations, k=options.depth or drawn.randint(1, 3))
        level = [drawn.uniform(min(_LOWEST, options.severity), options.severity) for _ in names]
        return [(name, OPERATIONS[name].amount(at, drawn)) for name, at in zip(names, level, strict=True)]

    gammas = [[drawn.gammavariate(options.alpha, 1.0) for _ in range(options.width)] for _ in range(count)]
    shares = [[part / (sum(parts) or 1.0) for part in parts] for parts in gammas]
    return Mixture(
        chains=[[chain() for _ in range(count)] for _ in range(options.width)],
        weights=[[of[at] for of in shares] for at in range(options.width)],
        kept=[drawn.betavariate(options.alpha, options.alpha) for _ in range(count)],
    )


def _check_views(views: int) -> None:
    if type(views) is not int or views < 0:
        raise ConfigError(f"augmix: needs a whole number of views of at least 0, got {views=}")
