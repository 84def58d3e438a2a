"""Build transforms of whole batches: read and replace tensors of a batch, and draw random numbers.

A batch method never changes the given batch. Random numbers come from a given generator, never from the global generator.
``batch_transform`` extends ``on_batch`` with the state, for methods that read the clock or draw numbers on the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtrain.combinators import on_batch
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import is_number
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics, is_tensordict

BatchKey: TypeAlias = str | int
"""Position of a tensor in a batch: key of a mapping or TensorDict, or index of a tuple. A bare tensor ignores the key."""


def get_tensor(batch: Batch, key: BatchKey, caller: str) -> Tensor:
    """Return the tensor at ``key``, or ``batch`` itself if it is a tensor.

    Raises:
        ConfigError: ``batch`` has no tensor at ``key``.
    """
    if isinstance(batch, Tensor):
        return batch
    try:
        value = batch[key]
    except (KeyError, IndexError, TypeError):
        keys = sorted(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise ConfigError(
            f"{caller}: the batch must have {key!r}, got {keys}. Give another input_key= or target_key=."
        ) from None
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{caller}: the value at {key!r} must be a tensor, got a {type(value).__name__}. Collate tensors in the loader."
        )
    return value


def get_targets(batch: Batch, key: BatchKey, caller: str) -> Tensor:
    """Return the targets at ``key`` of a batch with several tensors.

    Raises:
        ConfigError: ``batch`` has no tensor at ``key``, or is a tensor itself.
    """
    if isinstance(batch, Tensor):
        raise ConfigError(
            f"{caller}: the batch must have inputs and targets, got one tensor. Give a mapping or a tuple of both."
        )
    return get_tensor(batch, key, caller)


def replace_tensors(batch: Batch, values: Mapping[Any, Tensor]) -> Batch:
    """Return a batch of the same type with ``values`` at their keys and all other entries unchanged."""
    if isinstance(batch, Tensor):
        return next(iter(values.values()))
    if is_tensordict(batch):
        return batch.copy().update(dict(values))
    if isinstance(batch, Mapping):
        return {**batch, **values}
    items = list(batch)
    for index, value in values.items():
        items[index] = value
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def map_images(batch: Batch, key: BatchKey, caller: str, fn: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``fn`` to the images ``[batch, channels, height, width]`` of ``batch``.

    One image ``[channels, height, width]`` is treated as a batch of one, so a batch method also works on the samples of a
    loader.

    Raises:
        ConfigError: the tensor at ``key`` does not have the shape of images.
    """
    images = get_tensor(batch, key, caller)
    if images.ndim not in (3, 4) or 0 in images.shape[-3:]:
        raise ConfigError(
            f"{caller}: images must be [batch, channels, height, width] or [channels, height, width], "
            f"got shape {tuple(images.shape)} at {key!r}."
        )
    output = fn(images) if images.ndim == 4 else fn(images.unsqueeze(0)).squeeze(0)
    return replace_tensors(batch, {key: output})


def check_image_batch(images: Tensor, caller: str, *, key: BatchKey) -> None:
    """Raise unless ``images`` is a batch of images.

    Raises:
        ConfigError: the shape is not ``[batch, channels, height, width]``.
    """
    if images.ndim != 4 or 0 in images.shape[-2:]:
        raise ConfigError(
            f"{caller}: images must be [batch, channels, height, width], got shape {tuple(images.shape)} at {key!r}."
        )


def require_generator(generator: torch.Generator | None, caller: str, instead: str) -> torch.Generator:
    """Return ``generator`` if it is not None.

    Raises:
        ConfigError: ``generator`` is None. The error also offers the argument ``instead``.
    """
    if generator is None:
        raise ConfigError(f"{caller}: generator must be given, got None. Give generator= or {instead}.")
    return generator


def sample_beta(alpha: float, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return samples ``[count]`` of Beta(alpha, alpha) on ``device``; ones for ``alpha=0``, the limit without mixing.

    ``torch.distributions`` uses the global generator. A Beta sample is the first component of a Dirichlet sample of two
    components. The Dirichlet kernel divides both gammas by their sum without computing 0 / 0 for small ``alpha``.
    """
    if alpha == 0:
        return torch.ones(count, device=device, dtype=dtype)
    concentration = torch.full((count, 2), float(alpha), device=generator.device, dtype=dtype)
    return torch._sample_dirichlet(concentration, generator=generator)[:, 0].to(device, non_blocking=True)


def sample_permutation(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return a random permutation ``[count]`` on ``device``."""
    return torch.randperm(count, generator=generator, device=generator.device).to(device, non_blocking=True)


def host_random_from(generator: torch.Generator, caller: str) -> random.Random:
    """Return a host random generator seeded with the next number of ``generator``, which must be a CPU generator.

    Raises:
        ConfigError: ``generator`` is on another device, which would need a host sync.
    """
    if generator.device.type != "cpu":
        raise ConfigError(
            f"{caller}: generator must be on the CPU, got a generator on {generator.device}. "
            "Give dt.dist.generator('cpu', ...)."
        )
    return random.Random(int(torch.randint(2**62, (), generator=generator)))


def check_alpha(alpha: float, caller: str) -> None:
    """Raise ``ConfigError`` unless ``alpha`` is a parameter of a Beta distribution or 0."""
    if not is_number(alpha) or not 0 <= alpha < float("inf"):
        raise ConfigError(f"{caller}: alpha must be finite and at least 0, got {alpha=}.")


def check_fraction(value: float, caller: str, name: str, *, closed: bool = True) -> None:
    """Raise ``ConfigError`` unless ``value`` is in ``[0, 1]``, or in ``[0, 1)`` if not ``closed``."""
    if not is_number(value) or not 0 <= value <= 1 or (value == 1 and not closed):
        raise ConfigError(f"{caller}: {name} must be in [0, 1{']' if closed else ')'}, got {name}={value!r}.")


StateBatchFn: TypeAlias = Callable[[Batch, TrainState, torch.Generator], Batch]
"""A batch method that also reads the state before the step (clock, seed) without changing the state."""


def batch_transform(fn: StateBatchFn, *, name: str, image_key: BatchKey | None = None, **seams: Any) -> Transform:
    """Return a transform that applies ``fn`` to this rank's whole batch before the split into microbatches.

    Args:
        fn: batch method.
        name: name of the transform.
        image_key: key that must have images ``[batch, channels, height, width]``, because three axes would pass for one image.
        seams: further arguments of ``Transform``.
    """

    def checked_fn(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        if image_key is not None:
            check_image_batch(get_tensor(batch, image_key, name), name, key=image_key)
        return fn(batch, state, generator)

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            transform = on_batch(lambda batch, generator: checked_fn(batch, state, generator), name=name)
            assert transform.grad is not None
            return transform.grad(inner)(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    return Transform(name=name, grad=grad, uses_grad=False, **seams)


def host_random_for_step(state: TrainState, name: str) -> random.Random:
    """Return a host random generator for choices that select kernels, because reading a device generator needs a host sync.

    The seed is that of a transform's generator: derived from the run's seed, ``name``, the step and the data-parallel rank.
    """
    return random.Random(derive_seed(state.seed, name, state.step, state.spec.data_rank))
