"""Find data-parallel ranks that train on the same samples, by a hash of each rank's first batches."""

from __future__ import annotations

import warnings

import torch
import xxhash
from torch import Tensor

from dtrain.batch import tensors_of
from dtrain.dist.control import Tally
from dtrain.dist.init import current
from dtrain.memory.failure import is_out_of_memory
from dtrain.state import TrainState
from dtrain.types import Batch

_VALUES = 256  # of a tensor
_TENSORS = 64  # of a batch
_SPREAD = 2654435761  # a prime: multiples of it lie in all rows and columns


def hash_to_compare(state: TrainState, batch: Batch) -> int:
    """Return the hash of ``batch`` if this step is to be compared and there is memory for the hash, and 0 if not."""
    first = state.shared.first_batches
    if not first.steps_left or first.step == state.step or state.spec.data_ranks == 1 or current().world_size == 1:
        return 0
    try:
        return content_hash(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0  # the step that follows needs more, and fails where all ranks learn of it


def content_hash(batch: Batch) -> int:
    """Hash the shapes and some values of the tensors of ``batch`` to a number from 1 to 2**52; 0 without a value.

    Host sync: one per tensor that is on a device.
    """
    digest, values = xxhash.xxh3_64(), 0
    for leaf in tensors_of(batch)[:_TENSORS]:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        if type(leaf) is Tensor and leaf.layout == torch.strided and leaf.numel():
            picked = torch.arange(min(leaf.numel(), _VALUES), device=leaf.device) * _SPREAD % leaf.numel()
            digest.update(leaf.detach().reshape(-1)[picked].cpu().view(torch.uint8).numpy().tobytes())
            values += len(picked)
    return digest.intdigest() % 2**52 + 1 if values else 0


def warn_of_equal_batches(state: TrainState, tally: Tally, content: int) -> None:
    """Note the comparison of one step; warn on rank 0 once three different batches were equal on all ranks.

    Args:
        state: of the step.
        tally: what the ranks have found.
        content: the hash of this rank's batch.

    Mutates: ``state.shared.first_batches``.
    """
    first = state.shared.first_batches
    if not first.steps_left or first.step == state.step:
        return
    first.step, first.steps_left = state.step, first.steps_left - 1
    if tally.equal_batches is False:
        first.steps_left = 0
    if not tally.equal_batches or content == first.content:
        return
    first.content, first.to_find = content, first.to_find - 1
    if first.to_find:
        return
    first.steps_left = 0
    if current().rank == 0:
        warnings.warn(
            f"step: all {state.spec.data_ranks} data-parallel ranks came with equal batches in the first steps, so they train "
            "on the same samples; give each rank its own, with dt.build_loader(..., mesh=mesh) or torch's DistributedSampler, "
            "or, if this is intended, step.init(..., equal_batches=True)",
            stacklevel=2,
        )
