"""Shard each sequence over the ranks of the ``cp`` axis with torch's ring attention: ``context_parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.data.batch import FailedBatch, to_device
from dtrain.dist.mesh import axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.shard.model_parallel import ring_attention
from dtrain.state import TrainState
from dtrain.step.sanity_checks import SequenceCheck
from dtrain.step.transform import BeforeDivision, GradStep, Transform
from dtrain.typing import Batch, LossFn, Metrics

_NAME = "context_parallel"
_Sharded: TypeAlias = list[tuple[Tensor, int]]
"""Tensors to shard, and their sequence dims."""


def context_parallel(
    mesh: DeviceMesh,
    *,
    batch_seq_dims: Mapping[str, int],
    buffer_seq_dims: Mapping[str, int] | None = None,
    check: bool = True,
) -> Transform:
    """Shard each sequence over the ``cp`` axis of ``mesh`` during forward and backward, for sequences too long for one rank.

    ``scaled_dot_product_attention`` exchanges keys and values around the axis, so every position attends to the full sequence.
    All other layers must treat positions independently, and positions must come from the batch or from sharded buffers. The
    transform wraps torch's experimental ``context_parallel``. Losses and weights are those of the rank's part, and the step
    sums both.

    The first step of a run in which all ranks have samples compares the parts with the whole sequence: it runs ``loss_fn`` on
    one sample, once in parts and once whole, in evaluation mode and without gradients. A layer that sees only its part, such as
    attention by hand, a convolution or positions that count from 0, raises an error that names the first module with other
    values.

    Args:
        mesh: mesh of the sharded model, ``build_mesh(cp=...)``.
        batch_seq_dims: batch keys -> sequence dims, ``{"input_ids": 1, "labels": 1}``. The length must be a multiple of
            ``2 * cp``. Labels must be shifted already.
        buffer_seq_dims: buffer name patterns -> sequence dims, for example of rotary tables; the buffers are restored
            afterwards.
        check: if True, the first step compares parts and whole sequences. Pass False for a loss that cannot run on one sample
            in evaluation mode.

    Attention must be causal (``is_causal=True``), without a mask and without dropout, and have a fused kernel. In float64 the
    gradient is that of one process to 1e-12, so tests need no GPU.

    Collective: torch's exchange of keys and values around the ``cp`` axis, in each attention, forward and backward. In the
    first step three records, and the model's own gathers in two more forwards.

    Example:
        mesh = dt.build_mesh(cp=2)
        model = dt.shard_model(model, mesh, blocks=(Block,))
        step = dt.compose_step(
            loss_fn, [dt.transforms.context_parallel(mesh, batch_seq_dims={"input_ids": 1, "labels": 1})]
        )

    Raises:
        ConfigError: ``mesh`` has no ``cp`` axis, or ``batch_seq_dims`` is empty. In a step: a key or buffer is missing, a
            length is not divisible, or attention has arguments that the ring cannot compute. In the first step, on all
            ranks: no call of ``scaled_dot_product_attention``, or parts that give other values than the whole sequence.

    Warns: UserWarning, on rank 0, in the first step: a whole sequence does not fit in memory, or the loss draws random numbers
        in evaluation mode, so parts and whole sequences were not compared.
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

    def clone(state: TrainState, batch: Batch) -> tuple[Batch, _Sharded, _Sharded]:
        """Return the batch with clones of its sequences, these clones, and the buffers."""
        if isinstance(batch, FailedBatch):
            return batch, [], []
        try:
            full_batch, sequences = _clone_sequences(batch, batch_seq_dims, state.device, ranks)
            return full_batch, sequences, _match_buffers(state.model, buffer_seq_dims or {}, sequences)
        except ConfigError as error:
            # The step raises the error on all ranks.
            return FailedBatch(error), [], []

    def wrap(inner: GradStep) -> GradStep:
        def grad_step(
            state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
        ) -> tuple[TrainState, Metrics]:
            size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
            cache = state._run_context.transform_cache
            full_batch, sequences, buffers = clone(state, batch)
            if check and _NAME not in cache:
                comparison = SequenceCheck(state, loss_fn, axis=mesh["cp"], seq_dims=batch_seq_dims, buffers=buffers)
                if comparison.run(full_batch):
                    cache[_NAME] = True
            if isinstance(full_batch, FailedBatch):
                return inner(state, full_batch, loss_fn=loss_fn, **size)
            with ring_attention(mesh["cp"], sequences, buffers):
                state, metrics = inner(state, full_batch, loss_fn=loss_fn, **size)
            if state._step_counts is None:
                return state, metrics
            # Each rank along cp counted its own part of the tokens.
            step_counts = state._step_counts._replace(tokens=state._step_counts.tokens * ranks)
            return state._replace(_step_counts=step_counts), metrics

        return grad_step

    return Transform(name=_NAME, grad_step=BeforeDivision(wrap))


def _clone_sequences(
    batch: Batch, dims: Mapping[str, int], device: torch.device, ranks: int
) -> tuple[dict[str, Tensor], _Sharded]:
    """Return the batch on ``device`` with clones of the tensors to shard, and these clones with their sequence dims."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"context_parallel: batch must be a mapping of tensors, got {type(batch).__name__}. "
            "Return a dict from the collate function."
        )
    moved = dict(cast("Mapping[str, Tensor]", to_device(batch, device)))
    sequences, first = [], next(iter(dims))
    for key, dim in dims.items():
        if key not in moved:
            raise ConfigError(
                f"context_parallel: the batch has no {key!r}, only {sorted(moved)}. Name keys of the batch in batch_seq_dims."
            )
        tensor = moved[key]
        if not isinstance(tensor, Tensor) or not -tensor.ndim <= dim < tensor.ndim:
            shape = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"context_parallel: {key!r} must be a tensor with a dim {dim}, got {shape}. Correct batch_seq_dims."
            )
        length = tensor.shape[dim]
        if length % (2 * ranks):
            raise ConfigError(
                f"context_parallel: the length of dim {dim} of {key!r} must be a multiple of 2 * cp = {2 * ranks}, "
                f"got {length}. Pad the sequences."
            )
        if length != moved[first].shape[dims[first]]:
            raise ConfigError(
                f"context_parallel: the length of {key!r} must be that of {first!r}, {moved[first].shape[dims[first]]}, got "
                f"{length}. Pad the sequences to one length."
            )
        moved[key] = tensor.clone()
        # torch takes no negative dims.
        sequences.append((moved[key], dim % tensor.ndim))
    return moved, sequences


def _match_buffers(model: nn.Module, dims: Mapping[str, int], sequences: _Sharded) -> _Sharded:
    buffer_dims = []
    buffers = buffers_by_fqn(model)
    longest = max(tensor.shape[dim] for tensor, dim in sequences)
    for pattern, dim in dims.items():
        is_match = compile_patterns([pattern], caller="context_parallel: buffer_seq_dims")
        matches = {name: buffer for name, buffer in buffers.items() if is_match(name)}
        if not matches:
            raise ConfigError(
                f"context_parallel: buffer_seq_dims names {pattern!r}, but the model has no such buffer. "
                "Print the names with model.named_buffers()."
            )
        for name, buffer in matches.items():
            if not -buffer.ndim <= dim < buffer.ndim or buffer.shape[dim] < longest:
                raise ConfigError(
                    f"context_parallel: dim {dim} of the buffer {name!r} must hold at least {longest} positions, got shape "
                    f"{list(buffer.shape)}. Correct buffer_seq_dims."
                )
            buffer_dims.append((buffer, dim % buffer.ndim))
    return buffer_dims
