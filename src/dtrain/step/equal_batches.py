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
    """Return the hash of ``batch`` if this run still compares batches and there is memory for the hash, and 0 if not."""
    if not state.shared.batches_to_compare or state.spec.data_ranks == 1 or current().world_size == 1:
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


def warn_of_equal_batches(state: TrainState, tally: Tally) -> None:
    """Note the comparison of one step; warn on rank 0 when all comparisons of the first steps found equal batches.

    Mutates: the number of batches that ``state`` still compares.
    """
    shared = state.shared
    if tally.equal_batches is None or not shared.batches_to_compare:
        return
    if not tally.equal_batches:
        shared.batches_to_compare = 0
        return
    shared.equal_batches += 1
    shared.batches_to_compare -= 1
    if not shared.batches_to_compare and current().rank == 0:
        warnings.warn(
            f"step: all {state.spec.data_ranks} data-parallel ranks came with equal batches in {shared.equal_batches} steps, "
            "so they train on the same samples; give each rank its own, with dt.build_loader(..., mesh=mesh) or torch's "
            "DistributedSampler, or, if this is intended, step.init(..., equal_batches=True)",
            stacklevel=2,
        )
