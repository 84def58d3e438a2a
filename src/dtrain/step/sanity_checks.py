"""Warn about a loss that is a mean already, and about data-parallel ranks that train on the same samples.

A mean is found in the autograd graph of the loss. Equal batches are found by a hash of each rank's first batches.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import xxhash
from torch import Tensor

from dtrain.batch import list_tensors
from dtrain.dist.init import get_dist_info
from dtrain.dist.step_sync import StepCounts
from dtrain.memory.device_memory import is_out_of_memory
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

    The check reads the operations of the graph, not the value. Found are the means of torch's own losses and of ``mean``, and a
    sum divided by the weight's tensor, unless they are multiplied again. The check does not read compiled code, and never
    reports a sum.
    Host sync: one if a mean was found and its weight is a tensor on a device.
    """
    if get_dist_info().rank != 0:
        return
    for name, (total, weight) in (("total", (loss.total, loss.weight)), *loss.terms.items()):
        # A weight of another tensor class has no value, as in a simulated step of dt.planning.
        has_value = not isinstance(weight, Tensor) or type(weight) is Tensor
        if has_value and isinstance(total, Tensor) and _is_mean(total.grad_fn, weight) and float(weight) > 1:
            warnings.warn(
                f"{caller}: {name} of the LossSum must be a sum, got a mean with the weight {float(weight):g}. The step "
                "divides by the weight again, so the gradient would be too small by this factor. Return the sum "
                "(reduction='sum'), or the mean times the weight, as dt.mean_loss does.",
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
        # The value is not read: a saved tensor may be a fake tensor of a Python number, which dispatch modes refuse.
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


# Values hashed per tensor, and tensors per batch.
_MAX_VALUES = 256
_MAX_TENSORS = 64
# Multiples of a prime reach all rows and columns.
_STRIDE_PRIME = 2654435761


def hash_first_batch(state: TrainState, batch: Batch) -> int:
    """Return the hash of ``batch`` if this step is compared and memory suffices for the hash, and 0 if not."""
    check = state.run_context.monitor.equal_batches
    if not check.steps_left or check.last_step == state.step or state.spec.data_ranks == 1 or get_dist_info().world_size == 1:
        return 0
    try:
        return hash_batch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The step that follows needs more memory, and its failure reaches all ranks.
        return 0


def hash_batch(batch: Batch) -> int:
    """Return a hash of the shapes and some values of the tensors of ``batch``, from 1 to 2**52; 0 without a value.

    Host sync: one per tensor that is on a device.
    """
    digest, values = xxhash.xxh3_64(), 0
    for leaf in list_tensors(batch)[:_MAX_TENSORS]:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        if type(leaf) is Tensor and leaf.layout == torch.strided and leaf.numel():
            indices = torch.arange(min(leaf.numel(), _MAX_VALUES), device=leaf.device) * _STRIDE_PRIME % leaf.numel()
            digest.update(leaf.detach().reshape(-1)[indices].cpu().view(torch.uint8).numpy().tobytes())
            values += len(indices)
    return digest.intdigest() % 2**52 + 1 if values else 0


def warn_if_equal_batches(state: TrainState, counts: StepCounts, batch_hash: int) -> None:
    """Record the comparison of one step; warn on rank 0 after three different batches that were equal on all ranks.

    Args:
        state: state of the step.
        counts: counts that the ranks agreed on.
        batch_hash: hash of this rank's batch.

    Mutates: ``state.run_context.monitor.equal_batches``.
    """
    check = state.run_context.monitor.equal_batches
    if not check.steps_left or check.last_step == state.step:
        return
    check.last_step, check.steps_left = state.step, check.steps_left - 1
    if counts.equal_batches is False:
        check.steps_left = 0
    if not counts.equal_batches or batch_hash == check.last_hash:
        return
    check.last_hash, check.remaining_matches = batch_hash, check.remaining_matches - 1
    if check.remaining_matches:
        return
    check.steps_left = 0
    if get_dist_info().rank == 0:
        warnings.warn(
            f"step: the first batches of all {state.spec.data_ranks} data-parallel ranks are equal, so the ranks train on the "
            "same samples. Give each rank its own samples, with dt.build_loader(..., mesh=mesh) or torch's DistributedSampler. "
            "If equal batches are intended, pass step.init(..., allow_equal_batches=True).",
            stacklevel=2,
        )
