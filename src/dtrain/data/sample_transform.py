"""``SampleTransform``: transforms of a sample with a random generator that is seeded per sample.

A transform is ``fn(sample, generator) -> sample``. The generator's seed comes from the seed of the run, the epoch and the
sample's index. So augmentation is the same on any number of ranks and workers, with any batch size, and after a resume.

A transform that mixes two samples reads the second sample from the dataset, on any rank::

    def mix_with_random_sample(sample, generator):
        other = dataset[int(torch.randint(len(dataset), (), generator=generator))]
        return mix(sample, other, torch.rand((), generator=generator))

Mixing within a batch (``on_batch``) is cheaper, because no sample is read twice. But a rank mixes only its own share of the
batch, so the result depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dtrain.dist.rng import fork_rng, generator
from dtrain.errors import ConfigError

SampleTransform: TypeAlias = Callable[[Any, torch.Generator], Any]
"""``(sample, generator) -> sample``, a pure function; the generator is on the CPU."""


def apply_transform(fn: SampleTransform, sample: Any, *, seed: int, epoch: int, index: int) -> Any:
    """Apply ``fn`` to a sample, with the generator of the sample in this epoch. The overhead is a few microseconds.

    Args:
        fn: the transform.
        sample: a sample of the dataset.
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in the dataset; position in the epoch if the dataset is iterable.

    Raises:
        ConfigError: ``fn`` returns None.
    Example:
        >>> noisy = lambda x, generator: x + torch.rand((), generator=generator)
        >>> first, again, later = (apply_transform(noisy, 0.0, seed=0, epoch=epoch, index=7) for epoch in (0, 0, 1))
        >>> bool(first == again), bool(first == later)
        (True, False)
    """
    transformed = fn(sample, generator("cpu", seed, "transform", epoch, index))
    if transformed is None:
        raise ConfigError(f"transform: the transform returned None for sample {index}. Return the sample")
    return transformed


def seed_per_sample(fn: Callable[[Any], Any]) -> SampleTransform:
    """Convert a function without a generator argument, such as a torchvision transform, to a sample transform.

    While ``fn`` runs, the global generators of Python, NumPy and torch (CPU) have a seed of the sample. Afterwards they have
    their former states again. The overhead is about 25 microseconds per sample.

    Args:
        fn: ``sample -> sample``.

    Example:
        >>> import dtrain as dt
        >>> flip = dt.data.seed_per_sample(lambda x: x.flip(0) if torch.rand(()) < 0.5 else x)
        >>> loader = dt.build_loader(torch.arange(12).view(4, 3), global_batch_size=2, seed=0, transform=flip)
        >>> next(loader.until("1ep")).shape
        torch.Size([2, 3])

    Raises:
        ConfigError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise ConfigError(f"seed_per_sample: fn must be a function of a sample, got {fn!r}")
    return _SeededTransform(fn)


@dataclass(frozen=True, slots=True)
class _SeededTransform:
    """Callable class, because spawned workers cannot unpickle a closure."""

    fn: Callable[[Any], Any]

    def __call__(self, sample: Any, generator: torch.Generator) -> Any:
        with fork_rng(int(torch.randint(2**62, (), generator=generator))):
            return self.fn(sample)
