"""Notice a loss that is a mean already, in the autograd graph of its total.

Find data-parallel ranks that train on the same samples, by a hash of each rank's first batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import xxhash
from torch import Tensor

from dtrain.batch import list_tensors
from dtrain.dist.init import get_dist_info
from dtrain.dist.step_sync import StepCounts
from dtrain.memory.oom import is_out_of_memory
from dtrain.state import TrainState
from dtrain.typing import Batch, LossSum

_IDENTITY_OPS = (
    "Neg",
    "ToCopy",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Alias",
    "Clone",
    "Squeeze",
    "Unsqueeze",
)
_REDUCTION_MEAN = 1
"""The number of ``reduction="mean"`` in torch's own losses; a sum is 2."""


def warn_if_mean(loss: LossSum, caller: str) -> None:
    """Warn on rank 0 if a total of ``loss`` is a mean although its weight counts several things.

    It looks at the operations that made the total, not at its value. So it finds the means of torch's own losses and of
    ``mean``, and a sum divided by the tensor that is the weight, unless they are multiplied again. It does not see into
    compiled code, and takes no sum for a mean.
    Host sync: one if a mean was found and its weight is a tensor on a device.
    """
    if get_dist_info().rank != 0:
        return
    for name, (total, weight) in (("total", (loss.total, loss.weight)), *loss.terms.items()):
        # A weight of another class of tensors is a stand-in without a value, as in a plan of memory.
        has_value = not isinstance(weight, Tensor) or type(weight) is Tensor
        if has_value and isinstance(total, Tensor) and _is_mean(total.grad_fn, weight) and float(weight) > 1:
            warnings.warn(
                f"{caller}: {name} of the LossSum is a mean, and its weight is {float(weight):g}. The step divides by the "
                "weight once more, so the gradient is so many times too small. Return the sum (reduction='sum'), or the mean "
                "times the weight, as dt.mean_loss does.",
                stacklevel=2,
            )


def _is_mean(node: Any, weight: Tensor | float) -> bool:
    """Return True if the result of ``node`` is a mean, in all of its terms."""
    if node is None:
        return False
    kind = node.name().removeprefix("torch::autograd::").partition("Backward")[0]
    inputs = [inner for inner, _ in node.next_functions]
    if kind in _IDENTITY_OPS:
        return _is_mean(inputs[0], weight)
    if kind in ("Add", "Sub"):
        return all(_is_mean(inner, weight) for inner in inputs)
    if kind == "Div":
        divisor = _saved_attribute(node, "other")
        # The value is not read: a saved tensor may stand for a number of Python, which dispatch modes do not take.
        same = type(divisor) is type(weight) is Tensor and divisor.data_ptr() == weight.data_ptr()
        return same and _is_kind(inputs[0], "Sum")
    if kind == "Mean":
        # The mean of sums over the batch is a sum; the mean of one number is the number.
        return int(_saved_attribute(node, "self_sym_numel") or 0) > 1 and not _is_kind(inputs[0], "Sum")
    return bool(_saved_attribute(node, "reduction") == _REDUCTION_MEAN)


def _is_kind(node: Any, kind: str) -> bool:
    while node is not None and node.name().partition("Backward")[0] in _IDENTITY_OPS:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(f"{kind}Backward")


def _saved_attribute(node: Any, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)


_MAX_VALUES = 256  # of a tensor
_MAX_TENSORS = 64  # of a batch
_STRIDE_PRIME = 2654435761  # a prime: multiples of it lie in all rows and columns


def hash_first_batch(state: TrainState, batch: Batch) -> int:
    """Return the hash of ``batch`` if this step is to be compared and there is memory for the hash, and 0 if not."""
    first = state.run_context.equal_batch_check
    if not first.steps_left or first.last_step == state.step or state.spec.data_ranks == 1 or get_dist_info().world_size == 1:
        return 0
    try:
        return hash_batch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return 0  # the step that follows needs more, and fails where all ranks learn of it


def hash_batch(batch: Batch) -> int:
    """Hash the shapes and some values of the tensors of ``batch`` to a number from 1 to 2**52; 0 without a value.

    Host sync: one per tensor that is on a device.
    """
    digest, values = xxhash.xxh3_64(), 0
    for leaf in list_tensors(batch)[:_MAX_TENSORS]:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        if type(leaf) is Tensor and leaf.layout == torch.strided and leaf.numel():
            picked = torch.arange(min(leaf.numel(), _MAX_VALUES), device=leaf.device) * _STRIDE_PRIME % leaf.numel()
            digest.update(leaf.detach().reshape(-1)[picked].cpu().view(torch.uint8).numpy().tobytes())
            values += len(picked)
    return digest.intdigest() % 2**52 + 1 if values else 0


def warn_if_equal_batches(state: TrainState, tally: StepCounts, content: int) -> None:
    """Note the comparison of one step; warn on rank 0 once three different batches were equal on all ranks.

    Args:
        state: of the step.
        tally: what the ranks have found.
        content: the hash of this rank's batch.

    Mutates: ``state.shared.first_batches``.
    """
    first = state.run_context.equal_batch_check
    if not first.steps_left or first.last_step == state.step:
        return
    first.last_step, first.steps_left = state.step, first.steps_left - 1
    if tally.equal_batches is False:
        first.steps_left = 0
    if not tally.equal_batches or content == first.last_hash:
        return
    first.last_hash, first.remaining_matches = content, first.remaining_matches - 1
    if first.remaining_matches:
        return
    first.steps_left = 0
    if get_dist_info().rank == 0:
        warnings.warn(
            f"step: all {state.spec.data_ranks} data-parallel ranks came with equal batches in the first steps, so they train "
            "on the same samples; give each rank its own, with dt.build_loader(..., mesh=mesh) or torch's DistributedSampler, "
            "or, if this is intended, step.init(..., equal_batches=True)",
            stacklevel=2,
        )
