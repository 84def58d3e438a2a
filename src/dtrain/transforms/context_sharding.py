"""Shard each sequence over the ranks of the ``cp`` axis, with ring attention or Ulysses: ``context_parallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.arguments import check_choice
from dtrain.data.batch import FailedBatch, to_device
from dtrain.data.packed_tokens import document_bounds
from dtrain.dist.mesh import axis_size
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, compile_patterns
from dtrain.shard.sequence_attention import SequenceAttention, SplitLoss
from dtrain.shard.spec import attach_spec, get_device, get_spec
from dtrain.state import TrainState
from dtrain.step.sanity_checks import SequenceCheck, SequencePart
from dtrain.step.transform import BeforeDivision, GradStep, Transform
from dtrain.typing import Batch, LossFn, LossSum, Metrics, TransformState

_NAME = "context_parallel"
_DOCUMENTS = "documents"
"""Key of the documents in a batch of ``PackedTokens``."""
_Sharded: TypeAlias = list[tuple[Tensor, int]]
"""Tensors to shard, and their sequence dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelTransform(Transform):
    """Transform of ``context_parallel``, which also splits sequences in evaluation.

    Args:
        eval_loss: function that returns a loss function on this rank's part of each sequence, for ``evaluate``. Without it each
            rank of a group evaluates whole sequences.

    Example:
        sequences = dt.transforms.context_parallel(mesh, batch_seq_dims={"input_ids": 1, "labels": 1}, method="ulysses")
        step = dt.compose_step(loss_fn, [sequences])
        metrics = dt.evaluate(model, valid_loader, sequences.eval_loss(loss_fn))
    """

    eval_loss: Callable[[LossFn], LossFn]


def context_parallel(
    mesh: DeviceMesh,
    *,
    batch_seq_dims: Mapping[str, int],
    buffer_seq_dims: Mapping[str, int] | None = None,
    method: Literal["ring", "ulysses"] = "ring",
    documents: str | None = None,
    check: bool = True,
) -> ContextParallelTransform:
    """Shard each sequence over the ``cp`` axis of ``mesh`` during forward and backward, for sequences too long for one rank.

    ``scaled_dot_product_attention`` attends to the full sequence, and to its document in packed rows. All other layers must
    treat positions independently, and positions must come from the batch or from sharded buffers. Losses and weights are those
    of the rank's part, and the step sums both.

    ``method="ring"`` wraps torch's experimental ``context_parallel``, which exchanges keys and values around the axis.
    ``method="ulysses"`` exchanges parts of sequences for heads, see ``dt.shard.document_attention``. Only ``"ulysses"`` takes
    packed documents and attention that is not causal, and runs also without a ``cp`` axis, for the same documents on each rank.

    The first step of a run in which all ranks have samples compares the parts with the whole sequence: it runs ``loss_fn`` on
    one sample, once in parts and once whole, in evaluation mode and without gradients. A layer that sees only its part, such as
    attention by hand, a convolution or positions that count from 0, raises an error that names the first module with other
    values.

    Args:
        mesh: mesh of the sharded model, ``build_mesh(cp=...)``.
        batch_seq_dims: batch keys -> sequence dims, ``{"input_ids": 1, "labels": 1}``. The length must be a multiple of
            ``2 * cp`` for the ring, and of ``cp`` for Ulysses. Labels must be shifted already.
        buffer_seq_dims: buffer name patterns -> sequence dims, for example of rotary tables; the buffers are restored
            afterwards.
        method: ``"ring"`` or ``"ulysses"``. The number of heads limits the ranks of Ulysses, and nothing limits the ring's.
        documents: key of the document numbers ``[batch, seq]`` of a packed batch, for Ulysses. The loss gets whole rows of it.
            None makes each row one document.
        check: if True, the first step compares parts and whole sequences. Pass False for a loss that cannot run on one sample
            in evaluation mode.

    The ring's attention must be causal (``is_causal=True``) and have a fused kernel. Both methods take no mask and no dropout
    of attention. In float64 the gradient is that of one process to 1e-12, so tests need no GPU.

    Collective: in each attention, forward and backward, torch's exchange of keys and values around the ``cp`` axis, or two
    all-to-alls. In the first step three records, and the model's own gathers in two more forwards.
    Host sync: with ``documents``, one per microbatch on a GPU.

    Example:
        mesh = dt.build_mesh(cp=2)
        model = dt.shard_model(model, mesh, blocks=(Block,))
        step = dt.compose_step(
            loss_fn, [dt.transforms.context_parallel(mesh, batch_seq_dims={"input_ids": 1, "labels": 1})]
        )

    Raises:
        ConfigError: ``mesh`` has no ``cp`` axis, or ``batch_seq_dims`` is empty, or ``documents`` with the ring or with
            ``buffer_seq_dims``. In a step: a key or buffer is missing, a length is not divisible, the batch has documents that
            are not named, or attention has arguments or heads that the method cannot compute. In the first step, on all ranks:
            no call of ``scaled_dot_product_attention``, or parts that give other values than the whole sequence.

    Warns: UserWarning, on rank 0, in the first step: a whole sequence does not fit in memory, or the loss draws random numbers
        in evaluation mode, so parts and whole sequences were not compared.
    """
    split = _make_split(mesh, batch_seq_dims, buffer_seq_dims or {}, method, documents)

    def init(state: TrainState) -> TransformState:
        # Evaluation refuses a loss that would attend beyond documents.
        attach_spec(state.model, replace(get_spec(state.model), documents=documents))
        return {}

    def wrap(inner: GradStep) -> GradStep:
        def grad_step(
            state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
        ) -> tuple[TrainState, Metrics]:
            size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
            cache = state._run_context.transform_cache
            checked = _check_batch(split, state.model, batch, state.device)
            if check and _NAME not in cache:
                comparison = SequenceCheck(state, loss_fn, ranks=split.ranks, seq_dims=batch_seq_dims, split=split)
                if comparison.run(checked):
                    cache[_NAME] = True
            if isinstance(checked, FailedBatch):
                return inner(state, checked, loss_fn=loss_fn, **size)
            with split.part(state.model, checked) as part:
                state, metrics = inner(state, part.batch, loss_fn=part.on_loss(loss_fn), **size)
            if state._step_counts is None:
                return state, metrics
            # Each rank along cp counted its own part of the tokens.
            step_counts = state._step_counts._replace(tokens=state._step_counts.tokens * split.ranks)
            return state._replace(_step_counts=step_counts), metrics

        return grad_step

    def evaluate_part(loss_fn: LossFn, model: nn.Module, batch: Batch) -> LossSum:
        if torch.is_grad_enabled():
            raise ConfigError(
                "eval_loss: gradients must be off, got a call with gradients. For training pass context_parallel to "
                "compose_step."
            )
        with split.part(model, split.check(model, batch, get_device(model))) as part:
            return part.on_loss(loss_fn)(model, part.batch)

    def eval_loss(loss_fn: LossFn) -> LossFn:
        return SplitLoss(loss_fn, evaluate_part)

    return ContextParallelTransform(name=_NAME, init=init, grad_step=BeforeDivision(wrap), eval_loss=eval_loss)


def _make_split(
    mesh: DeviceMesh, seq_dims: Mapping[str, int], buffer_dims: Mapping[str, int], method: str, documents: str | None
) -> _AnySplit:
    check_choice(_NAME, "method", method, ("ring", "ulysses"))
    ranks = axis_size(mesh, "cp")
    if ranks == 1 and method == "ring":
        raise ConfigError(
            f"context_parallel: mesh must have a cp axis, got axes {list(mesh.mesh_dim_names or ())} of sizes "
            f"{list(mesh.shape)}. Pass for example dt.build_mesh(cp=2)."
        )
    if not seq_dims:
        raise ConfigError(
            "context_parallel: batch_seq_dims must not be empty. Pass for example batch_seq_dims={'input_ids': 1}."
        )
    axis = mesh["cp"] if ranks > 1 else None
    if method == "ulysses":
        if documents is not None and (documents in seq_dims or buffer_dims):
            problem = "not be in batch_seq_dims" if documents in seq_dims else "be None with buffer_seq_dims"
            raise ConfigError(
                f"context_parallel: documents must {problem}, got {documents!r}. Attention needs the documents of whole rows. "
                "Give positions that restart in each document with the batch."
            )
        return _Ulysses(axis, ranks, seq_dims, buffer_dims, documents)
    if documents is not None:
        raise ConfigError(
            f"context_parallel: documents must be None for the ring, which has no documents, got {documents!r}. "
            "Pass method='ulysses'."
        )
    return _Ring(axis, ranks, seq_dims, buffer_dims, None)


def _check_batch(split: _AnySplit, model: nn.Module, batch: Batch, device: torch.device) -> Batch:
    """Return the checked batch on ``device``, or a ``FailedBatch`` whose error the step raises on all ranks."""
    if isinstance(batch, FailedBatch):
        return batch
    try:
        return split.check(model, batch, device)
    except ConfigError as error:
        return FailedBatch(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """A ``SequenceSplit``.

    Args:
        axis: mesh of the ranks that share sequences; None for one rank.
        ranks: number of these ranks.
        seq_dims: batch keys -> sequence dims.
        buffer_dims: buffer name patterns -> sequence dims.
        documents: batch key of document numbers.
    """

    axis: DeviceMesh | None
    ranks: int
    seq_dims: Mapping[str, int]
    buffer_dims: Mapping[str, int]
    documents: str | None
    chunks_per_rank: ClassVar[int] = 1

    def check(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return ``batch`` on ``device`` after checking that it can be split. Raises ``ConfigError``."""
        moved = _check_sequences(batch, self.seq_dims, device, self.ranks, self.chunks_per_rank)
        if _DOCUMENTS in moved and self.documents is None:
            raise ConfigError(
                f"context_parallel: documents must be the key of the documents of a packed batch, got None for a batch with "
                f"{_DOCUMENTS!r}. Pass method='ulysses', documents='documents', or leave the key out of the batch to attend "
                "beyond documents."
            )
        if self.documents is not None:
            key = next(iter(self.seq_dims))
            _check_documents(moved, self.documents, moved[key].shape[self.seq_dims[key]])
        _match_buffers(model, self.buffer_dims, self.length(moved))
        return moved

    def length(self, batch: Mapping[str, Any]) -> int:
        """Return the length of the sequences of a checked batch."""
        key, dim = next(iter(self.seq_dims.items()))
        return int(batch[key].shape[dim])


class _Ring(_Split):
    """torch's ring attention, which balances causal attention by two chunks per rank."""

    __slots__ = ()
    chunks_per_rank: ClassVar[int] = 2

    @contextmanager
    def part(self, model: nn.Module, batch: Mapping[str, Any]) -> Iterator[SequencePart]:
        # The import takes as long as half of torch, and only the ring needs it.
        from dtrain.shard.model_parallel import count_attention_calls, ring_attention

        assert self.axis is not None, "the ring has several ranks"
        part = {**batch, **{key: batch[key].clone() for key in self.seq_dims}}
        # torch takes no negative dims.
        sequences = [(part[key], dim % part[key].ndim) for key, dim in self.seq_dims.items()]
        positions = torch.arange(self.length(batch), device=sequences[0][0].device)
        buffers = _match_buffers(model, self.buffer_dims, self.length(batch))
        with ring_attention(self.axis, [*sequences, (positions, 0)], buffers), count_attention_calls() as calls:
            yield SequencePart(batch=part, positions=positions, on_loss=lambda loss_fn: loss_fn, count_calls=lambda: len(calls))

    def whole(self, batch: Mapping[str, Any]) -> nullcontext[None]:
        return nullcontext()


class _Ulysses(_Split):
    """All-to-all of heads, with documents."""

    __slots__ = ()

    @contextmanager
    def part(self, model: nn.Module, batch: Mapping[str, Any]) -> Iterator[SequencePart]:
        length = self.length(batch) // self.ranks
        begin = 0 if self.axis is None else self.axis.get_local_rank() * length
        part = {**batch, **{key: batch[key].narrow(dim, begin, length) for key, dim in self.seq_dims.items()}}
        attention = SequenceAttention(self.axis)

        def on_loss(loss_fn: LossFn) -> LossFn:
            def run(model: nn.Module, microbatch: Batch) -> LossSum:
                self._describe_rows(attention, cast("Mapping[str, Tensor]", microbatch), length * self.ranks)
                return loss_fn(model, microbatch)

            return run

        with attention.installed(), ExitStack() as stack:
            for buffer, dim in _match_buffers(model, self.buffer_dims, self.length(batch)):
                stack.enter_context(_narrowed(buffer, dim, begin, length))
            positions = torch.arange(begin, begin + length, device=part[next(iter(self.seq_dims))].device)
            yield SequencePart(batch=part, positions=positions, on_loss=on_loss, count_calls=lambda: attention.calls)

    @contextmanager
    def whole(self, batch: Mapping[str, Any]) -> Iterator[None]:
        attention = SequenceAttention(None)
        self._describe_rows(attention, batch, self.length(batch))
        with attention.installed():
            yield

    def _describe_rows(self, attention: SequenceAttention, batch: Mapping[str, Tensor], seq: int) -> None:
        """Tell ``attention`` the rows of ``batch``. Mutates: ``attention``. Host sync: one with documents, on a device."""
        if self.documents is None:
            attention.rows, attention.bounds = (len(batch[next(iter(self.seq_dims))]), seq), None
        else:
            documents = batch[self.documents]
            attention.rows, attention.bounds = (len(documents), seq), document_bounds(documents)


_AnySplit: TypeAlias = _Ring | _Ulysses


@contextmanager
def _narrowed(buffer: Tensor, dim: int, begin: int, length: int) -> Iterator[None]:
    """Let ``buffer`` be a part of itself, inside the context. Mutates: ``buffer``."""
    whole = buffer.data
    buffer.data = whole.narrow(dim, begin, length)
    try:
        yield
    finally:
        buffer.data = whole


def _check_sequences(
    batch: Batch, dims: Mapping[str, int], device: torch.device, ranks: int, chunks_per_rank: int
) -> dict[str, Any]:
    """Return the batch on ``device`` after checking the tensors to shard."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"context_parallel: batch must be a mapping of tensors, got {type(batch).__name__}. "
            "Return a dict from the collate function."
        )
    moved = dict(cast("Mapping[str, Tensor]", to_device(batch, device)))
    first = next(iter(dims))
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
        if length % (ranks * chunks_per_rank):
            chunks = f"cp = {ranks}" if chunks_per_rank == 1 else f"{chunks_per_rank} * cp = {chunks_per_rank * ranks}"
            raise ConfigError(
                f"context_parallel: the length of dim {dim} of {key!r} must be a multiple of {chunks}, got {length}. "
                "Pad the sequences."
            )
        if length != moved[first].shape[dims[first]]:
            raise ConfigError(
                f"context_parallel: the length of {key!r} must be that of {first!r}, {moved[first].shape[dims[first]]}, got "
                f"{length}. Pad the sequences to one length."
            )
    return moved


def _check_documents(batch: Mapping[str, Any], key: str, length: int) -> None:
    documents = batch.get(key)
    if documents is None:
        raise ConfigError(f"context_parallel: the batch has no {key!r}, only {sorted(batch)}. Correct documents=.")
    if not isinstance(documents, Tensor) or documents.ndim != 2 or documents.shape[1] != length:
        shape = f"shape {list(documents.shape)}" if isinstance(documents, Tensor) else type(documents).__name__
        raise ConfigError(
            f"context_parallel: {key!r} must be the document numbers [batch, seq] of whole rows of {length} tokens, got "
            f"{shape}. Pass the 'documents' tensor of a packed batch."
        )


def _match_buffers(model: nn.Module, dims: Mapping[str, int], length: int) -> _Sharded:
    """Return the buffers to shard, of at least ``length`` positions, and their sequence dims."""
    buffer_dims: _Sharded = []
    if not dims:
        return buffer_dims
    buffers = buffers_by_fqn(model)
    for pattern, dim in dims.items():
        is_match = compile_patterns([pattern], caller="context_parallel: buffer_seq_dims")
        matches = {name: buffer for name, buffer in buffers.items() if is_match(name)}
        if not matches:
            raise ConfigError(
                f"context_parallel: buffer_seq_dims names {pattern!r}, but the model has no such buffer. "
                "Print the names with model.named_buffers()."
            )
        for name, buffer in matches.items():
            if not -buffer.ndim <= dim < buffer.ndim or buffer.shape[dim] < length:
                raise ConfigError(
                    f"context_parallel: dim {dim} of the buffer {name!r} must hold at least {length} positions, got shape "
                    f"{list(buffer.shape)}. Correct buffer_seq_dims."
                )
            buffer_dims.append((buffer, dim % buffer.ndim))
    return buffer_dims
