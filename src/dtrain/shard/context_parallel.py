"""Shard each sequence over the ranks of the ``cp`` axis with torch's ring attention: ``context_parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import FailedBatch, to_device
from dtrain.dist.mesh import axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.shard.ring_attention import ring_attention
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.typing import Batch, Metrics


def context_parallel(
    mesh: DeviceMesh, *, batch_seq_dims: Mapping[str, int], buffer_seq_dims: Mapping[str, int] | None = None
) -> Transform:
    """Shard each sequence over the ``cp`` axis of ``mesh`` during forward and backward, for sequences too long for one rank.

    ``scaled_dot_product_attention`` exchanges keys and values around the axis, so every position attends to the full sequence.
    All other layers must treat positions independently. The transform wraps torch's experimental ``context_parallel``. Losses
    and weights are those of the rank's part, and the step sums both.

    Args:
        mesh: mesh of the sharded model, ``build_mesh(cp=...)``.
        batch_seq_dims: batch keys -> sequence dims, ``{"input_ids": 1, "labels": 1}``. The length must be a multiple of
            ``2 * cp``. Labels must be shifted already.
        buffer_seq_dims: buffer name patterns -> sequence dims, for example of rotary tables; the buffers are restored
            afterwards.

    Attention must be causal (``is_causal=True``), without a mask, and have a fused kernel. On the CPU that means no dropout. In
    float64 the gradient is that of one process to 1e-12, so tests need no GPU.

    Collective: torch's exchange of keys and values around the ``cp`` axis, in each attention, forward and backward.

    Example:
        mesh = dt.build_mesh(cp=2)
        model = dt.shard_model(model, mesh, blocks=(Block,))
        step = dt.compose_step(
            loss_fn, [dt.transforms.context_parallel(mesh, batch_seq_dims={"input_ids": 1, "labels": 1})]
        )

    Raises:
        ConfigError: ``mesh`` has no ``cp`` axis, or ``batch_seq_dims`` is empty. In a step: a key or buffer is
            missing, or a length is not divisible.
    """
    ranks = axis_size(mesh, "cp")
    if ranks == 1:
        raise ConfigError(
            f"context_parallel: mesh must have a cp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}. Pass for example dt.build_mesh(cp=2)."
        )
    if not batch_seq_dims:
        raise ConfigError(
            "context_parallel: batch_seq_dims must not be empty. Pass for example batch_seq_dims={'input_ids': 1}."
        )

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            if isinstance(batch, FailedBatch):
                return inner(state, batch, microbatch_size=microbatch_size)
            try:
                full_batch = _clone_batch(batch, batch_seq_dims, state.device, ranks)
                buffer_dims = _match_buffers(state.model, buffer_seq_dims or {})
            except ConfigError as error:
                # The step raises the error on all ranks.
                return inner(state, FailedBatch(error), microbatch_size=microbatch_size)
            sequences = [(full_batch[key], dim) for key, dim in batch_seq_dims.items()]
            with ring_attention(mesh["cp"], sequences, buffer_dims):
                state, metrics = inner(state, full_batch, microbatch_size=microbatch_size)
            if state.step_counts is None:
                return state, metrics
            # Each rank along cp counted its own part of the tokens.
            step_counts = state.step_counts._replace(tokens=state.step_counts.tokens * ranks)
            return state._replace(step_counts=step_counts), metrics

        return grad_fn

    return Transform(name="context_parallel", grad=grad)


def _clone_batch(batch: Batch, dims: Mapping[str, int], device: torch.device, ranks: int) -> dict[str, Tensor]:
    """Return the batch on ``device``, with clones of the tensors to shard."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"context_parallel: batch must be a mapping of tensors, got {type(batch).__name__}. "
            "Return a dict from the collate function."
        )
    moved = dict(cast("Mapping[str, Tensor]", to_device(batch, device)))
    for key, dim in dims.items():
        if key not in moved:
            raise ConfigError(
                f"context_parallel: the batch has no {key!r}, only {sorted(moved)}. Name keys of the batch in batch_seq_dims."
            )
        length = moved[key].shape[dim]
        if length % (2 * ranks):
            raise ConfigError(
                f"context_parallel: the length of dim {dim} of {key!r} must be a multiple of 2 * cp = {2 * ranks}, "
                f"got {length}. Pad the sequences."
            )
        moved[key] = moved[key].clone()
    return moved


def _match_buffers(model: nn.Module, dims: Mapping[str, int]) -> list[tuple[Tensor, int]]:
    buffer_dims = []
    buffers = buffers_by_fqn(model)
    for pattern, dim in dims.items():
        is_match = compile_patterns([pattern], caller="context_parallel: buffer_seq_dims")
        matches = [(buffer, dim) for name, buffer in buffers.items() if is_match(name)]
        if not matches:
            raise ConfigError(
                f"context_parallel: buffer_seq_dims names {pattern!r}, but the model has no such buffer. "
                "Print the names with model.named_buffers()."
            )
        buffer_dims += matches
    return buffer_dims
