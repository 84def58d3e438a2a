"""Batch methods at the grad seam: ``on_batch`` for functions that also read the clock, or that draw on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from dtrain.algorithms.batches.fields import Key, check_batched, read
from dtrain.combinators import on_batch
from dtrain.dist.rng import derive_seed
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.types import Batch, Metrics

StatedBatchFn: TypeAlias = Callable[[Batch, TrainState, torch.Generator], Batch]
"""A batch method that reads the state about to be stepped (its clock, its seed) and changes nothing of it."""


def at_batch(fn: StatedBatchFn, *, name: str, images: Key | None = None, **parts: Any) -> Transform:
    """``fn`` on this rank's whole batch before it is split, as by ``on_batch``.

    Args:
        fn: the method.
        name: of the transform.
        images: where there must be images ``[batch, channels, height, width]``: three axes would pass for one image.
        parts: further seams.
    """

    def checked(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        if images is not None:
            check_batched(read(batch, images, name), name, key=images)
        return fn(batch, state, generator)

    def grad(inner: GradFn) -> GradFn:
        def changed(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            now = on_batch(lambda batch, generator: checked(batch, state, generator), name=name)
            assert now.grad is not None
            return now.grad(inner)(state, batch, microbatch_size=microbatch_size)

        return changed

    return Transform(name=name, grad=grad, sees_gradient=False, **parts)


def host_random(state: TrainState, name: str) -> random.Random:
    """Random numbers on the host for choices that decide which kernels run: reading them off a device would wait for it.

    Seeded as a transform's generator is: by the run's seed, ``name``, the step and the data-parallel rank.
    """
    return random.Random(derive_seed(state.seed, name, state.step, state.spec.data_rank))
