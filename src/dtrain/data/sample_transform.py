"""Transforms of samples as pure functions: what one draws at random belongs to the sample, not to who reads it.

A transform is ``fn(sample, generator) -> sample``. Its generator is seeded by the run's seed, the epoch and the sample's index
in the dataset, so augmentation is the same on any number of ranks and loader workers, with any batch size, and after a resume.

A transform that mixes samples draws the other one from the dataset, which has no border between ranks::

    def mixed(sample, generator):
        other = dataset[int(torch.randint(len(dataset), (), generator=generator))]
        return mix(sample, other, torch.rand((), generator=generator))

Mixing within a batch (``on_batch``) is cheaper, as nothing is read twice, but a rank has only its own share of the batch to
mix, so its result does depend on the number of ranks.
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
    """``fn`` of one sample, with the generator that is this sample's in this epoch; a few microseconds more than ``fn`` takes.

    Args:
        fn: the transform.
        sample: whatever the dataset returned.
        seed: of the run.
        epoch: counted from 0.
        index: of the sample in the dataset; in an iterable one, its place in the epoch.

    Raises:
        ConfigError: ``fn`` returns None.

    Example:
        >>> noisy = lambda x, generator: x + torch.rand((), generator=generator)
        >>> first, again, later = (apply_transform(noisy, 0.0, seed=0, epoch=epoch, index=7) for epoch in (0, 0, 1))
        >>> bool(first == again), bool(first == later)
        (True, False)
    """
    made = fn(sample, generator("cpu", seed, "transform", epoch, index))
    if made is None:
        raise ConfigError(f"transform: returned None for sample {index}; it must return the sample that it makes")
    return made


def seed_per_sample(fn: Callable[[Any], Any]) -> SampleTransform:
    """A transform of a function that takes no generator, such as those of torchvision: it draws from the global ones.

    Python's, NumPy's and torch's generators (CPU) begin at a seed of the sample while ``fn`` runs, and then go on as before.
    About 25 microseconds a sample.

    Args:
        fn: ``sample -> sample``.

    Raises:
        ConfigError: ``fn`` is no function.

    Example:
        >>> flip = seeded(lambda x: x.flip(0) if torch.rand(()) < 0.5 else x)
        >>> apply_transform(flip, torch.arange(3), seed=0, epoch=0, index=1).tolist()
        [2, 1, 0]
    """
    if not callable(fn):
        raise ConfigError(f"seeded: needs a function of a sample, got {fn!r}")
    return _SeededTransform(fn)


@dataclass(frozen=True, slots=True)
class _SeededTransform:
    """A class and no closure, so that it goes to workers that are not forked."""

    fn: Callable[[Any], Any]

    def __call__(self, sample: Any, generator: torch.Generator) -> Any:
        with fork_rng(int(torch.randint(2**62, (), generator=generator))):
            return self.fn(sample)
