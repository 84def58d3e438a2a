"""Attend within documents, on whole sequences or on parts that ranks exchange for heads (Ulysses).

``document_attention`` is a function of tensors. ``SequenceAttention`` puts the function in the place of torch's
``scaled_dot_product_attention``, so that a model needs no change. ``register_attention`` gives models of transformers a name
for the same attention. Bounds of documents stand for a mask: no function makes a tensor of ``seq * seq``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from dtrain.dist.dtensor import is_dtensor
from dtrain.dist.incident import report_missing_ranks
from dtrain.errors import ConfigError
from dtrain.packages import missing_extra_error
from dtrain.shard.model_parallel import replace_attention
from dtrain.typing import Batch, LossFn, LossSum

_CALLER = "document_attention"
_STEP_CALLER = "context_parallel"
# Dtypes of torch's attention of variable length, which needs a GPU.
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)
# ``SequenceAttention`` replaces the name in ``functional``.
_attend = functional.scaled_dot_product_attention


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: tuple[Tensor, int] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    axis: DeviceMesh | None = None,
) -> Tensor:
    """Attend within documents of packed rows, without a mask. With ``axis``, each rank has a part of each row (Ulysses).

    Along ``axis`` the ranks exchange parts of sequences for heads in one all-to-all. Then each rank attends with some of the
    heads over whole rows. A second all-to-all exchanges the outputs back. A key head goes to each rank that has one of its
    query heads, so there may be fewer key heads than ranks. The result equals attention of one process up to rounding.

    On a GPU, bfloat16 and float16 run ``torch.nn.attention.varlen``. On a CPU, and for other dtypes, each document runs
    ``scaled_dot_product_attention``.

    Args:
        query: ``[batch, heads, seq, dim]``, floating, plain. With ``axis``, ``seq`` is the length of this rank's part, equal on
            all ranks. Rank ``i`` has part ``i`` of each row. The number of heads must be a multiple of the number of ranks.
        key: ``[batch, key_heads, seq, dim]``; ``key_heads`` divides the number of heads.
        value: ``[batch, key_heads, seq, value_dim]``.
        bounds: documents of the *whole* rows, from ``dt.data.document_bounds``: ``cu_seqlens`` int32 ``[documents + 1]`` among
            ``batch * seq`` tokens of all parts, and the largest length. None makes each row one document.
        causal: if True, a token attends to earlier tokens only.
        scale: factor of the scores; None uses ``dim ** -0.5``.
        axis: one-dimensional mesh of the ranks that share rows, ``mesh["cp"]``; None if this rank has whole rows.

    Returns:
        ``[batch, heads, seq, value_dim]``, for this rank's part.

    Collective: with ``axis``, two all-to-alls in forward and two in backward. A rank sends ``(ranks - 1) / ranks`` of its
    query, key, value and output, if there are at least as many key heads as ranks.
    Host sync: on a GPU, one for dtypes without variable length.

    Example:
        >>> import dtrain as dt
        >>> bounds = dt.data.document_bounds(torch.tensor([[0, 0, 1, 1]]))
        >>> query = key = value = torch.eye(4)[None, None]
        >>> dt.shard.document_attention(query, key, value, bounds)[0, 0, 2].tolist()
        [0.0, 0.0, 1.0, 0.0]

    Raises:
        ConfigError: a shape, a number of heads or bounds that do not fit, or a DTensor.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.1.
    """
    ranks = 1 if axis is None else axis.size()
    _check_tensors(query, key, value, ranks)
    if ranks == 1:
        return _attend_whole(query, key, value, bounds, causal=causal, scale=scale)
    assert axis is not None, "several ranks have an axis"
    whole = _parts_to_heads(query, key, value, axis)
    output = _attend_whole(*whole, bounds, causal=causal, scale=scale)
    return _heads_to_parts(output, axis)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> None:
    problem, advice = None, "Pass the tensors of one layer"
    if any(is_dtensor(tensor) for tensor in (query, key, value)):
        problem, advice = (
            "query, key and value must be plain tensors, got a DTensor",
            "Use ColwiseParallel() with its local output",
        )
    elif not query.ndim == key.ndim == value.ndim == 4:
        problem = f"query, key and value must be [batch, heads, seq, dim], got {query.ndim}, {key.ndim} and {value.ndim} dims"
    elif not query.shape[2] == key.shape[2] == value.shape[2]:
        lengths = f"{query.shape[2]}, {key.shape[2]} and {value.shape[2]}"
        problem, advice = f"query, key and value must have the same length, got {lengths}", "Use self-attention without a cache"
    elif query.shape[0] != key.shape[0] or key.shape[:2] != value.shape[:2] or query.shape[1] % key.shape[1]:
        shapes = f"{list(query.shape[:2])}, {list(key.shape[:2])} and {list(value.shape[:2])}"
        problem = f"[batch, heads] of key and value must be equal and divide the heads of query, got {shapes}"
    elif query.shape[1] % ranks:
        limit = f"the number of query heads must be a multiple of the {ranks} ranks along cp"
        problem = f"{limit}, got {query.shape[1]} heads on this rank"
        advice = "Use a smaller cp, or a smaller tp"
    if problem is not None:
        raise ConfigError(f"{_CALLER}: {problem}. {advice}.")


def _parts_to_heads(query: Tensor, key: Tensor, value: Tensor, axis: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange parts of rows for heads: return whole rows of this rank's query heads, and of the key heads that they use."""
    ranks, rank = axis.size(), axis.get_local_rank()
    (batch, heads, length, _), group = query.shape, query.shape[1] // key.shape[1]
    own = heads // ranks
    # First and end of the key heads that the query heads of each rank use.
    key_ranges = [(index * own // group, ((index + 1) * own - 1) // group + 1) for index in range(ranks)]
    pieces = [
        [query[:, index * own : (index + 1) * own], key[:, begin:end], value[:, begin:end]]
        for index, (begin, end) in enumerate(key_ranges)
    ]
    sent = torch.cat([tensor.reshape(-1) for piece in pieces for tensor in piece])
    shapes = [tensor.shape for tensor in pieces[rank]]
    sizes = [sum(tensor.numel() for tensor in piece) for piece in pieces]
    received = _exchange(sent, sizes, [sizes[rank]] * ranks, axis)
    blocks = received.view(ranks, -1).split([shape.numel() for shape in shapes], dim=1)
    query, key, value = (
        block.reshape(ranks, *shape).permute(1, 2, 0, 3, 4).reshape(batch, shape[1], ranks * length, shape[3])
        for block, shape in zip(blocks, shapes, strict=True)
    )
    return query, *_match_heads(key, value, rank * own, own, group)


def _match_heads(key: Tensor, value: Tensor, first: int, heads: int, group: int) -> tuple[Tensor, Tensor]:
    """Repeat key heads unless each is used by equally many of the query heads ``first`` to ``first + heads``, in order."""
    used = [head // group - first // group for head in range(first, first + heads)]
    count = key.shape[1]
    if heads % count == 0 and used == [index // (heads // count) for index in range(heads)]:
        return key, value
    indices = torch.tensor(used, device=key.device)
    return key.index_select(1, indices), value.index_select(1, indices)


def _heads_to_parts(output: Tensor, axis: DeviceMesh) -> Tensor:
    """Exchange heads for parts of rows: return all heads of this rank's part."""
    ranks = axis.size()
    batch, own, seq, dim = output.shape
    sent = output.unflatten(2, (ranks, seq // ranks)).permute(2, 0, 1, 3, 4).reshape(-1)
    received = _exchange(sent, [len(sent) // ranks] * ranks, [len(sent) // ranks] * ranks, axis)
    blocks = received.view(ranks, batch, own, seq // ranks, dim)
    return blocks.transpose(0, 1).reshape(batch, ranks * own, seq // ranks, dim)


def _exchange(sent: Tensor, send_sizes: list[int], receive_sizes: list[int], axis: DeviceMesh) -> Tensor:
    return cast(Tensor, _AllToAll.apply(sent, send_sizes, receive_sizes, axis.get_group()))  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """All-to-all of blocks of a tensor ``[n]``. The gradient goes the opposite way."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send_sizes, ctx.receive_sizes, ctx.group = send_sizes, receive_sizes, group
        received = sent.new_empty(sum(receive_sizes))
        # Without sizes the step knows that all ranks send equally much.
        equal = len({*send_sizes, *receive_sizes}) == 1
        outputs, inputs = (None, None) if equal else (receive_sizes, send_sizes)
        with report_missing_ranks(_CALLER):
            dist.all_to_all_single(received, sent, output_split_sizes=outputs, input_split_sizes=inputs, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        sent = _AllToAll.apply(grad.contiguous(), ctx.receive_sizes, ctx.send_sizes, ctx.group)  # type: ignore[no-untyped-call]
        return sent, None, None, None


def _attend_whole(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, int] | None, *, causal: bool, scale: float | None
) -> Tensor:
    batch, heads, seq, _ = query.shape
    grouped = heads != key.shape[1]
    if bounds is None or batch == 0:
        return _attend(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
    if query.is_cuda and query.dtype in _VARLEN_DTYPES:
        return _attend_varlen(query, key, value, bounds, causal=causal, scale=scale)
    rows = _lengths_by_row(bounds[0], batch, seq)
    outputs = []
    # The gradient of a split is one concatenation; the gradient of each slice would have the size of the whole.
    for lengths, *tensors in zip(rows, query.split(1), key.split(1), value.split(1), strict=True):
        documents = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
        parts = [_attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped) for q, k, v in documents]
        outputs.append(torch.cat(parts, dim=2))
    return torch.cat(outputs)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, int], *, causal: bool, scale: float | None
) -> Tensor:
    # The import takes long, and only a GPU needs it.
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, _ = query.shape
    cu_seqlens, longest = bounds
    q, k, v = (tensor.transpose(1, 2).reshape(batch * seq, tensor.shape[1], tensor.shape[3]) for tensor in (query, key, value))
    options: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1), "scale": scale}
    if heads != key.shape[1]:
        options["enable_gqa"] = True
    output = cast(Tensor, varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options))
    return output.view(batch, seq, heads, -1).transpose(1, 2)


def _lengths_by_row(cu_seqlens: Tensor, batch: int, seq: int) -> list[list[int]]:
    """Return the lengths of the documents in each row. Host sync: one, if the bounds are on a device."""
    ends = cu_seqlens.tolist()
    rows: list[list[int]] = [[] for _ in range(batch)]
    if ends and ends[-1] == batch * seq and {*range(0, batch * seq + 1, max(seq, 1))} <= {*ends}:
        for begin, end in pairwise(ends):
            rows[begin // seq].append(end - begin)
        return rows
    raise ConfigError(
        f"{_CALLER}: bounds must be those of {batch} rows of {seq} tokens, each ending with its row, got {len(ends) - 1} "
        f"documents up to token {ends[-1] if ends else 0}. Pass dt.data.document_bounds of the documents of the whole rows."
    )


@dataclass(slots=True, eq=False)
class SequenceAttention:
    """Replacement of torch's ``scaled_dot_product_attention``, inside of ``installed``.

    Args:
        axis: mesh of the ranks that share sequences; None if each rank has whole sequences.

    Attributes:
        bounds: documents of the microbatch that is computed, whole rows; None if each row is one document. The bounds stay
            until the next microbatch, because activation checkpointing runs attention again in backward.
        rows: number of rows, and tokens of a whole row, of that microbatch.
        calls: number of calls.
    """

    axis: DeviceMesh | None
    bounds: tuple[Tensor, int] | None = None
    rows: tuple[int, int] = (0, 0)
    calls: int = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace attention inside the context. Mutates: torch's ``scaled_dot_product_attention``."""
        # The lengths of documents change in each microbatch, so a compiled graph would be compiled again. The function imports
        # the compiler, which takes long.
        is_compiled = "torch._dynamo" in sys.modules
        try:
            with replace_attention(torch.compiler.disable(self.attend) if is_compiled else self.attend):
                yield
        finally:
            self.bounds, self.rows = None, (0, 0)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend like torch's function. Arguments that would need a mask, or random numbers of whole rows, are refused."""
        self.calls += 1
        problem, advice = None, "Name the documents of packed rows"
        if attn_mask is not None:
            problem = f"attn_mask must be None, got a mask of shape {list(attn_mask.shape)}"
        elif dropout_p:
            problem, advice = f"dropout_p must be 0, got {dropout_p}", "Switch the dropout of attention off"
        elif query.ndim == 4 and not self._fits(query):
            problem = (
                f"query must have {self.rows[0]} rows of {self.rows[1] // self._ranks} tokens, as the batch, got "
                f"{query.shape[0]} rows of {query.shape[2]} tokens"
            )
            advice = "Run the model on the batch as it is, and generate outside of the step"
        if problem is not None:
            raise ConfigError(f"{_STEP_CALLER}: scaled_dot_product_attention: {problem}. {advice}; see docs/parallelism.md.")
        return document_attention(query, key, value, self.bounds, causal=is_causal, scale=scale, axis=self.axis)

    def _fits(self, query: Tensor) -> bool:
        """Return True for parts of the batch's sequences. Without documents, a loss may run other numbers of rows."""
        rows, length = query.shape[0], query.shape[2]
        return length * self._ranks == self.rows[1] and (self.bounds is None or rows == self.rows[0])

    @property
    def _ranks(self) -> int:
        return 1 if self.axis is None else self.axis.size()

    def check_mask(self, mask_function: Callable[..., Tensor], length: int, device: torch.device) -> None:
        """Refuse a mask of transformers that forbids what the documents allow, or that is causal in part.

        Args:
            mask_function: function of indices of batch, head, query and key, broadcast, which returns True for a pair that
                attends.
            length: tokens of this rank's part.
            device: device of the indices.

        Host sync: one.
        """
        rows = torch.arange(self.rows[0], device=device)[:, None, None]
        last = torch.arange(length, device=device)[None, :, None]
        # Distances from a neighbor to the other end of the part.
        steps = sorted({min(2**power - 1, length - 1) for power in range(length.bit_length() + 1)})
        first = (last - torch.tensor(steps, device=device)).clamp(min=0)
        head = torch.zeros((), dtype=torch.int64, device=device)
        shape = torch.broadcast_shapes(rows.shape, first.shape)
        back = mask_function(rows, head, last, first).expand(shape)
        ahead = mask_function(rows, head, first, last).expand(shape)[(first < last).expand(shape)]
        same = self._same_document(rows, last, first, length)
        forbidden, some, all_ahead = torch.stack([(same & ~back).any(), ahead.any(), ahead.all()]).tolist()
        if forbidden:
            raise ConfigError(
                f"{_STEP_CALLER}: the model's mask must allow all pairs of a document, but it separates tokens of one "
                "document. If position_ids restart within a row, name the documents: "
                "context_parallel(..., documents='documents')."
            )
        if some and not all_ahead:
            raise ConfigError(
                f"{_STEP_CALLER}: the model's mask must be causal or bidirectional for all tokens, got one that is causal in "
                "part. Use a model without such a mask."
            )

    def _same_document(self, rows: Tensor, last: Tensor, first: Tensor, length: int) -> Tensor:
        if self.bounds is None:
            return torch.ones_like(rows * last * first, dtype=torch.bool)
        begin = 0 if self.axis is None else self.axis.get_local_rank() * length
        offset = rows * self.rows[1] + begin
        one, other = (torch.bucketize(offset + index, self.bounds[0].long(), right=True) for index in (last, first))
        return one == other


def _find_replacement() -> SequenceAttention | Literal["ring"] | None:
    """Return the attention that replaces torch's own at the moment, ``"ring"`` for ``ring_attention``, or None."""
    attend = inspect.unwrap(functional.scaled_dot_product_attention)
    if getattr(attend, "is_ring", False):
        return "ring"
    attention = getattr(attend, "__self__", None)
    return attention if isinstance(attention, SequenceAttention) else None


@dataclass(frozen=True, slots=True, eq=False)
class SplitLoss:
    """Loss function on this rank's part of each sequence, for evaluation.

    Args:
        loss_fn: loss of a batch of parts.
        run: function that splits the batch, and runs ``loss_fn``.
    """

    loss_fn: LossFn
    run: Callable[[LossFn, nn.Module, Batch], LossSum]

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        return self.run(self.loss_fn, model, batch)


_NAME = "dtrain"
# Arguments of attention functions of transformers that change the result, and that bounds cannot express.
_REFUSED_OPTIONS = ("softcap", "s_aux", "position_bias", "cache", "head_mask")


def register_attention() -> str:
    """Register dtrain's attention with transformers, and return its name for ``attn_implementation``.

    In a step of ``context_parallel``, and in an evaluation with its ``eval_loss``, the attention attends to whole sequences, or
    to the documents of packed rows, without a mask. Elsewhere the attention is ``sdpa`` of transformers, with its masks, so
    ``generate`` works as before, on whole prompts.

    Returns:
        ``"dtrain"``.

    Mutates: the tables of attention and mask functions of transformers. A second call changes nothing.

    Example:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=dt.shard.register_attention())

    Raises:
        ConfigError: transformers is not installed. In a step: a model that needs a mask (padding on the left, a sliding window
            shorter than the sequence, blocks of images), a soft cap, sinks, a bias of positions, or a paged cache.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise missing_extra_error("register_attention: needs the package transformers", "hf") from error
    AttentionInterface.register(_NAME, _attend_transformers)
    AttentionMaskInterface.register(_NAME, _mask_transformers)
    return _NAME


def _attend_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attention = _find_replacement()
    if attention is not None:
        for name in _REFUSED_OPTIONS:
            if options.get(name) is not None:
                raise ConfigError(
                    f"{_STEP_CALLER}: {type(module).__name__}: {name} must be None, because it changes the scores of "
                    f"attention, got {type(options[name]).__name__}. Use a model without {name}."
                )
        _check_window(attention, options.get("sliding_window"))
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def _mask_transformers(*args: Any, **options: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    attention = _find_replacement()
    if attention is None:
        mask: Tensor | None = sdpa_mask(*args, **options)
        return mask
    padding = options.get("attention_mask")
    if padding is not None and not padding.all():
        raise ConfigError(
            f"{_STEP_CALLER}: attention_mask must be True everywhere, got padding. Pad on the right with the label -100, "
            "without attention_mask, or name the documents of packed rows."
        )
    _check_window(attention, options.get("local_size"))
    length, keys = int(options["q_length"]), int(options["kv_length"])
    if length != keys or options.get("use_vmap"):
        problem = "a mask of the model's own" if options.get("use_vmap") else f"{length} queries and {keys} keys"
        raise ConfigError(
            f"{_STEP_CALLER}: attention must be self-attention with the usual mask, got {problem}. Generate outside of the "
            "step and of eval_loss: there each rank runs whole prompts."
        )
    # The parts of the ring are two chunks, whose positions transformers takes for documents.
    if attention != "ring":
        attention.check_mask(options["mask_function"], length, torch.device(options["device"]))
    return None


def _check_window(attention: SequenceAttention | Literal["ring"], window: int | None) -> None:
    if window is not None and (attention == "ring" or window < attention.rows[1]):
        limit = "be None for the ring" if attention == "ring" else f"reach over the sequence of {attention.rows[1]} tokens"
        raise ConfigError(
            f"{_STEP_CALLER}: a sliding window must {limit}, got {window}. Use shorter sequences, or a model without a window."
        )
