"""Count a rank's batch, split it into microbatches, and detect code that writes into it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dtrain.data.batch import BatchSpec, FailedBatch, count_and_split, list_tensors
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError, StepError
from dtrain.state import TrainState
from dtrain.typing import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Microbatches:
    """The microbatches of this rank's batch, with its number of samples and tokens.

    Args:
        batch: batch.
        batches: microbatches.
        tensors: tensors of the batch; those of the microbatches if only the user can split the batch.
        samples: number of samples.
        tokens: number of tokens.
    """

    batch: Batch
    batches: Sequence[Batch] = ()
    tensors: Sequence[torch.Tensor] = ()
    samples: int = 0
    tokens: int = 0

    def __len__(self) -> int:
        return len(self.batches)

    def is_on(self, device: torch.device) -> bool:
        """Return True if every tensor of the batch is on ``device``."""
        return {leaf.device for leaf in self.tensors} <= {device}

    def hash_shapes(self, data_rank: int) -> int:
        """Return a hash below 2**40 of the shapes and dtypes of all microbatches, another one on each data rank."""
        return derive_seed(data_rank, str([tensor_shapes(batch) for batch in self.batches])) % 2**40


class BatchWatch:
    """Detects code that writes into a batch, so that a second run of the batch can be refused instead of being wrong.

    torch's version counter shows in-place changes, also those through a view. A loss may write into a batch that runs once.
    Inference tensors have no counter. They are not watched.

    Args:
        tensors: tensors of the batch that is about to run. They stay alive as long as this object.
    """

    __slots__ = ("_versions",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._versions = [(leaf, leaf._version) for leaf in tensors if not leaf.is_inference()]

    def written(self) -> list[torch.Tensor]:
        """Return the tensors that changed since this object was made."""
        return [leaf for leaf, version in self._versions if leaf._version != version]

    def check(self, caller: str, writer: str = "loss_fn") -> None:
        """Raise before a second run of the batch if the first run wrote into it.

        Raises:
            StepError: a tensor of the batch changed.
        """
        if (error := self.find_error(caller, writer)) is not None:
            raise error

    def find_error(self, caller: str, writer: str) -> StepError | None:
        """Return the error of ``check``; None for an unchanged batch."""
        changed = self.written()
        return _make_write_error(caller, writer, changed[0]) if changed else None

    def record(self, state: TrainState) -> None:
        """Record for ``check_first_run`` the tensors that this run of the step used up. Mutates: the monitor of the run.

        The loss wrote into them, or its backward freed their graph.
        """
        if used_up := [leaf for leaf, version in self._versions if leaf.grad_fn is not None or leaf._version != version]:
            state._run_context.monitor.used_up_batch = state.step, [weakref.ref(leaf) for leaf in used_up]


def check_first_run(state: TrainState, batch: object) -> None:
    """Raise if an earlier run of this step used up tensors of ``batch``: a retry, or a method with two gradients.

    Raises:
        StepError: the batch has other values than in its first run, or its graph is gone.
    """
    recorded = state._run_context.monitor.used_up_batch
    if recorded is None or recorded[0] != state.step:
        return
    storages = {leaf.untyped_storage()._cdata for ref in recorded[1] if (leaf := ref()) is not None}
    for leaf in list_tensors(batch):
        if leaf.untyped_storage()._cdata in storages:
            if leaf.grad_fn is not None:
                raise StepError(
                    f"step {state.step}: batch must be without an autograd graph to run a second time, got a tensor of shape "
                    f"{tuple(leaf.shape)} with a graph, which the first backward freed. Compute the tensor inside loss_fn."
                )
            raise _make_write_error(f"step {state.step}", "loss_fn", leaf)


def _make_write_error(caller: str, writer: str, tensor: torch.Tensor) -> StepError:
    return StepError(
        f"{caller}: {writer} wrote into its batch (a tensor of shape {tuple(tensor.shape)}), so the batch cannot run a second "
        f"time. Clone tensors before {writer} changes them."
    )


def check_graph(microbatches: Microbatches) -> Microbatches:
    """Return ``microbatches``, unless they share an autograd graph, which the first backward would free.

    A tensor that only requires a gradient has no such graph.

    Raises:
        ConfigError: a tensor of a batch that was split has a graph.
    """
    if len(microbatches.batches) > 1:
        for leaf in microbatches.tensors:
            if leaf.grad_fn is not None:
                raise ConfigError(
                    f"microbatch_step: batch must be without an autograd graph to be split into {len(microbatches.batches)} "
                    f"microbatches, got a tensor of shape {tuple(leaf.shape)} with a graph. Use the whole batch "
                    "(microbatch_size=None), or compute the tensor inside loss_fn."
                )
    return microbatches


def tensor_shapes(batch: Batch) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and the dtype of each tensor of ``batch``."""
    return [(tuple(leaf.shape), leaf.dtype) for leaf in list_tensors(batch)]


def split_microbatches(batch: Batch, microbatch_size: int | None, batch_spec: BatchSpec | None) -> Microbatches:
    """Count and split ``batch``; without a size the batch is one microbatch.

    Raises:
        ConfigError: ``batch`` cannot be counted or split.
    """
    if isinstance(batch, FailedBatch):
        raise batch.error
    tensors = list_tensors(batch)
    samples, tokens, microbatches = count_and_split(batch, microbatch_size, batch_spec, tensors)
    tensors = tensors or list_tensors(microbatches)
    return Microbatches(batch=batch, batches=microbatches, tensors=tensors, samples=samples, tokens=tokens)
