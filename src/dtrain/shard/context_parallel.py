"""``context_parallel``: each sequence cut over the ranks of the ``cp`` axis, with torch's ring attention."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import FailedBatch, to_device
from dtrain.dist.mesh import axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics


def context_parallel(
    mesh: DeviceMesh, *, batch_seq_dims: Mapping[str, int], buffer_seq_dims: Mapping[str, int] | None = None
) -> Transform:
    """Cut each sequence over the ``cp`` axis of ``mesh`` while gradients are computed, for sequences that fit on no rank alone.

    ``scaled_dot_product_attention`` then exchanges keys and values around the axis, so that every position still sees the whole
    sequence; all else of a model must treat positions one by one. This is torch's own ``context_parallel`` (a prototype there),
    put around forward *and* backward of the step. Losses and their weights are those of a rank's part, which a step adds up.

    Args:
        mesh: the one that the model is sharded over, ``build_mesh(cp=...)``.
        batch_seq_dims: the batch's tensors that have a sequence -> its dim, ``{"input_ids": 1, "labels": 1}``. Its length must be a
            multiple of ``2 * cp``. Labels must be shifted already.
        buffer_seq_dims: the same of the model's buffers by name (patterns), such as rotary tables; they are whole again afterwards.

    GPUs only: torch has no such attention for the CPU.

    Collective: torch's exchange of keys and values around the ``cp`` axis, in each attention, forward and backward.

    Raises:
        ConfigError: a mesh without ``cp``, or of CPU ranks; nothing to cut; in a step, a key that the batch or a name that the
            model does not have, or a length that does not come out even.
    """
    if mesh.device_type == "cpu":
        raise ConfigError(
            "context_parallel: torch's ring attention runs on GPUs only, and this mesh is of CPU ranks; leave cp out"
        )
    return shard_sequences(mesh, batch_seq_dims=batch_seq_dims, buffer_seq_dims=buffer_seq_dims)


def shard_sequences(
    mesh: DeviceMesh, *, batch_seq_dims: Mapping[str, int], buffer_seq_dims: Mapping[str, int] | None = None
) -> Transform:
    """``context_parallel`` on any device: on the CPU for models without attention, as in tests."""
    ranks = axis_size(mesh, "cp")
    if ranks == 1:
        raise ConfigError(
            f"context_parallel: needs a mesh with a cp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}; e.g. dt.build_mesh(cp=2)"
        )
    if not batch_seq_dims:
        raise ConfigError("context_parallel: nothing to cut; name the batch's sequences, as in batch={'input_ids': 1}")

    def grad(inner: GradFn) -> GradFn:
        def cut(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if isinstance(batch, FailedBatch):
                return inner(state, batch, microbatch_size=microbatch_size)
            spare = state.padding_sample
            try:
                whole = _clone_batch(batch, batch_seq_dims, state.device, ranks)
                filler = None if spare is None else _clone_batch(spare, batch_seq_dims, state.device, ranks)
                tables = _match_buffers(state.model, buffer_seq_dims or {})
            except ConfigError as error:  # raised in the step, by all ranks
                return inner(state, FailedBatch(error), microbatch_size=microbatch_size)
            ours = [(each[key], dim) for each in (whole, filler) if each is not None for key, dim in batch_seq_dims.items()]
            begun = state.step_batch
            with _torch_context_parallel(mesh["cp"], ours, tables):
                state, metrics = inner(state.with_padding_sample(filler), whole, microbatch_size=microbatch_size)
            state = state._replace(step_batch=begun)
            if state.step_counts is None:
                return state, metrics
            return state._replace(
                step_counts=replace(state.step_counts, tokens=state.step_counts.tokens * ranks)
            ), metrics  # each saw its part

        return cut

    return Transform(name="context_parallel", grad=grad)


def _torch_context_parallel(
    axis: DeviceMesh, ours: list[tuple[Tensor, int]], tables: list[tuple[Tensor, int]]
) -> AbstractContextManager[None]:
    """torch's context: it cuts all these tensors in place, and makes ``tables`` whole again."""
    from torch.distributed.tensor.experimental import context_parallel as torchs

    both = [*ours, *tables]
    tensors, dims = [tensor for tensor, _ in both], [dim for _, dim in both]
    return torchs(axis, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers={tensor for tensor, _ in ours})


def _clone_batch(given: Batch, dims: Mapping[str, int], device: torch.device, ranks: int) -> dict[str, Tensor]:
    """The batch on ``device``, with tensors of its own where they are to be cut."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"context_parallel: takes a batch with named tensors, got {type(given).__name__}")
    moved = dict(cast("Mapping[str, Tensor]", to_device(given, device)))
    for key, dim in dims.items():
        if key not in moved:
            raise ConfigError(f"context_parallel: the batch has no {key!r}, only {sorted(moved)}")
        length = moved[key].shape[dim]
        if length % (2 * ranks):
            raise ConfigError(
                f"context_parallel: dim {dim} of {key!r} has length {length}, which must be a multiple of 2 * cp = "
                f"{2 * ranks}; pad the sequences"
            )
        moved[key] = moved[key].clone()
    return moved


def _match_buffers(model: nn.Module, dims: Mapping[str, int]) -> list[tuple[Tensor, int]]:
    found = []
    known = buffers_by_fqn(model)
    for pattern, dim in dims.items():
        fits = compile_patterns([pattern], caller="context_parallel: buffers")
        matches = [(buffer, dim) for name, buffer in known.items() if fits(name)]
        if not matches:
            raise ConfigError(f"context_parallel: buffers names {pattern!r}, but the model has no such buffer")
        found += matches
    return found
