"""The tensors that a batch method reads, and a batch with others in their place: the given one is never changed.

Random numbers of batch methods: from the generator that is given, on its device, and never from the global one.

Batch methods at the grad seam: ``on_batch`` for functions that also read the clock, or that draw on the host."""

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
"""Where a batch has a tensor: a key of a mapping or a TensorDict, a place in a tuple or list; not used of a bare tensor."""


def get_tensor(batch: Batch, key: BatchKey, caller: str) -> Tensor:
    """The tensor at ``key``; ``batch`` itself when it is one.

    Raises:
        ConfigError: there is none, or something else.
    """
    if isinstance(batch, Tensor):
        return batch
    try:
        value = batch[key]
    except (KeyError, IndexError, TypeError):
        has = sorted(map(str, batch.keys())) if hasattr(batch, "keys") else f"a {type(batch).__name__}"
        raise ConfigError(f"{caller}: the batch has no {key!r}; it has {has}; give the right inputs= or targets=") from None
    if not isinstance(value, Tensor):
        raise ConfigError(f"{caller}: needs a tensor at {key!r}, got a {type(value).__name__}; collate it in the loader")
    return value


def get_targets(batch: Batch, key: BatchKey, caller: str) -> Tensor:
    """The tensor at ``key``, of a batch that has more than one.

    Raises:
        ConfigError: there is none, something else, or the batch is a tensor, which would be its own target.
    """
    if isinstance(batch, Tensor):
        raise ConfigError(
            f"{caller}: needs inputs and targets, got a batch that is one tensor; give a mapping or a tuple of both"
        )
    return get_tensor(batch, key, caller)


def replace_tensors(batch: Batch, values: Mapping[Any, Tensor]) -> Batch:
    """A batch of the same kind with ``values`` at their keys, and all else as it was."""
    if isinstance(batch, Tensor):
        return next(iter(values.values()))
    if is_tensordict(batch):
        return batch.copy().update(dict(values))
    if isinstance(batch, Mapping):
        return {**batch, **values}
    items = list(batch)
    for at, value in values.items():
        items[at] = value
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def map_images(batch: Batch, key: BatchKey, caller: str, fn: Callable[[Tensor], Tensor]) -> Batch:
    """``batch`` with ``fn`` of its images, ``[batch, channels, height, width]``; one image ``[channels, height, width]`` is a
    batch of one, so what is made for batches serves samples in a loader too.

    Raises:
        ConfigError: something else than images.
    """
    images = get_tensor(batch, key, caller)
    if images.ndim not in (3, 4) or 0 in images.shape[-3:]:
        raise ConfigError(
            f"{caller}: needs images [batch, channels, height, width] or one [channels, height, width], "
            f"got shape {tuple(images.shape)} at {key!r}"
        )
    made = fn(images) if images.ndim == 4 else fn(images.unsqueeze(0)).squeeze(0)
    return replace_tensors(batch, {key: made})


def check_image_batch(images: Tensor, caller: str, *, key: BatchKey) -> None:
    """Refuse what is no batch of images.

    Raises:
        ConfigError: another shape than ``[batch, channels, height, width]``.
    """
    if images.ndim != 4 or 0 in images.shape[-2:]:
        raise ConfigError(
            f"{caller}: needs images [batch, channels, height, width], got shape {tuple(images.shape)} at {key!r}"
        )


def require_generator(generator: torch.Generator | None, caller: str, instead: str) -> torch.Generator:
    """``generator``, unless there is none.

    Raises:
        ConfigError: None, where ``instead`` was not given either.
    """
    if generator is None:
        raise ConfigError(f"{caller}: needs generator=..., or {instead}; it never draws from the global one")
    return generator


def sample_beta(alpha: float, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``count`` numbers ``[count]`` of Beta(alpha, alpha), on ``device``; ones for ``alpha=0``, its limit without mixing.

    ``torch.distributions`` draws from the global generator. Beta is the first share of a Dirichlet of two, whose draw scales
    both gammas by their sum in a way that does not give 0 / 0 for small ``alpha``.
    """
    if alpha == 0:
        return torch.ones(count, device=device, dtype=dtype)
    both = torch.full((count, 2), float(alpha), device=generator.device, dtype=dtype)
    return torch._sample_dirichlet(both, generator=generator)[:, 0].to(device, non_blocking=True)


def sample_permutation(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A random order ``[count]`` of so many, on ``device``."""
    return torch.randperm(count, generator=generator, device=generator.device).to(device, non_blocking=True)


def host_random_from(generator: torch.Generator, caller: str) -> random.Random:
    """Random numbers on the host that begin at the next draw of ``generator``, one of the CPU.

    Raises:
        ConfigError: a generator of another device: to read what it draws, the host would have to wait.
    """
    if generator.device.type != "cpu":
        raise ConfigError(
            f"{caller}: chooses on the host, so it needs a generator of the CPU, got one on {generator.device}; "
            "give dt.dist.generator('cpu', ...), or what it would draw"
        )
    return random.Random(int(torch.randint(2**62, (), generator=generator)))


def check_alpha(alpha: float, caller: str) -> None:
    """Raise ``ConfigError`` unless ``alpha`` can be that of a Beta distribution, or 0."""
    if not is_number(alpha) or not 0 <= alpha < float("inf"):
        raise ConfigError(f"{caller}: needs a finite alpha >= 0, got {alpha=}")


def check_fraction(value: float, caller: str, name: str, *, closed: bool = True) -> None:
    """Raise ``ConfigError`` unless ``value`` is in ``[0, 1]``, or in ``[0, 1)`` where ``closed`` is False."""
    if not is_number(value) or not 0 <= value <= 1 or (value == 1 and not closed):
        raise ConfigError(f"{caller}: needs {name} in [0, 1{']' if closed else ')'}, got {name}={value!r}")


StateBatchFn: TypeAlias = Callable[[Batch, TrainState, torch.Generator], Batch]
"""A batch method that reads the state about to be stepped (its clock, its seed) and changes nothing of it."""


def batch_transform(fn: StateBatchFn, *, name: str, image_key: BatchKey | None = None, **seams: Any) -> Transform:
    """``fn`` on this rank's whole batch before it is split, as by ``on_batch``.

    Args:
        fn: the method.
        name: of the transform.
        image_key: where there must be images ``[batch, channels, height, width]``: three axes would pass for one image.
        seams: further seams.
    """

    def checked(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        if image_key is not None:
            check_image_batch(get_tensor(batch, image_key, name), name, key=image_key)
        return fn(batch, state, generator)

    def grad(inner: GradFn) -> GradFn:
        def changed(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            now = on_batch(lambda batch, generator: checked(batch, state, generator), name=name)
            assert now.grad is not None
            return now.grad(inner)(state, batch, microbatch_size=microbatch_size)

        return changed

    return Transform(name=name, grad=grad, uses_grad=False, **seams)


def host_random_for_step(state: TrainState, name: str) -> random.Random:
    """Random numbers on the host for choices that decide which kernels run: reading them off a device would wait for it.

    Seeded as a transform's generator is: by the run's seed, ``name``, the step and the data-parallel rank.
    """
    return random.Random(derive_seed(state.seed, name, state.step, state.spec.data_rank))
