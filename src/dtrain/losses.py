"""Compute losses as sums with weights (``LossSum``), which ``microbatch_step`` normalizes exactly for ragged batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtrain.arguments import check_number, explain_arguments
from dtrain.dist.dtensor import local_part, whole_with_summed_grad
from dtrain.errors import ConfigError
from dtrain.fqn import is_of_peft, unwrap_module
from dtrain.shard.unshard import call_in_unit
from dtrain.typing import Batch, LossFn, LossSum


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> LossSum:
    """Compute the summed cross entropy of class indices, weighted by the number of targets that count.

    Args:
        logits: ``[*, classes]``, such as ``[batch, classes]`` or ``[batch, seq, vocab]``, any float dtype; the softmax is
            computed in at least float32. A DTensor that is sharded along ``classes`` (from a head with
            ``ColwiseParallel(use_local_output=False)``) is not gathered.
        targets: ``[*]`` int64; positions equal to ``ignore_index`` count neither in the sum nor in the weight.
        ignore_index: target that does not count.

    Returns:
        ``LossSum`` in nats, whose weight is the number of targets. Both are plain tensors, equal on the ranks of the DTensor.

    Collective: for a DTensor two all-reduces of a few numbers per target, instead of an all-gather of the logits.

    Example:
        def loss_fn(model, batch):
            logits = model(batch["input_ids"][:, :-1])
            return dt.cross_entropy(logits, batch["input_ids"][:, 1:])

    Raises:
        ConfigError: shapes that do not match, targets that are no indices, or a DTensor that is sharded along another axis.
    """
    _check_indices(logits, targets)
    local, vocab_start, group = local_part(logits, caller="cross_entropy")
    flat_logits, flat_targets = local.reshape(-1, local.shape[-1]), targets.flatten()
    flat_logits = _widen(flat_logits)
    counted = flat_targets != ignore_index
    if group is None:
        total = F.cross_entropy(flat_logits, flat_targets, ignore_index=ignore_index, reduction="sum")
    else:
        columns = _Columns(classes=logits.shape[-1], start=vocab_start, group=group)
        total = _VocabParallelCrossEntropy.apply(flat_logits, flat_targets, counted, columns)  # type: ignore[no-untyped-call]
    return LossSum(total=total, weight=counted.sum())


def _widen(values: Tensor) -> Tensor:
    """Return ``values`` in at least float32, in which sums of many values stay exact enough."""
    return values if values.dtype.itemsize >= 4 else values.float()


def _check_indices(logits: Tensor, targets: Tensor, *, caller: str = "cross_entropy", rows: str = "logits") -> None:
    if targets.is_floating_point() and targets.shape == logits.shape:
        raise ConfigError(
            f"{caller}: targets must be class indices (int64), got probabilities {list(targets.shape)}, as mixup, "
            "cutmix and label_smoothing make them. Use dt.soft_cross_entropy."
        )
    if targets.dtype != torch.int64:
        raise ConfigError(f"{caller}: targets must be class indices (int64), got {targets.dtype}. Convert them with .long().")
    if logits.shape[:-1] != targets.shape or not logits.ndim:
        classes_second = logits.ndim > 2 and targets.shape == (logits.shape[0], *logits.shape[2:])
        last = "classes" if rows == "logits" else "dim"
        raise ConfigError(
            f"{caller}: needs {rows} [*, {last}] and targets [*], got {tuple(logits.shape)} and "
            f"{tuple(targets.shape)}. "
            f"{f'Move the {last} last: {rows}.movedim(1, -1).' if classes_second else f'Give one target per row of {rows}.'}"
        )


def soft_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> LossSum:
    """Compute the summed cross entropy of targets that are class indices or probabilities, weighted by their mass.

    Formula: ``total = -sum_i sum_c w[c] * q[i, c] * log_softmax(logits[i])[c]``, ``weight = sum_i sum_c w[c] * p[i, c]``,
    ``q = (1 - smoothing) * p + smoothing * sum_c p / classes``
    with ``p`` the targets as probabilities and ``w`` the class weights, or ones. So a row of zeros, or ``ignore_index``, counts
    neither in the sum nor in the weight. For indices ``total / weight`` equals ``torch.nn.functional.cross_entropy``.

    Args:
        logits: ``[*, classes]``, any float dtype (classes last, also for images); the softmax is computed in at least float32.
        targets: class indices ``[*]`` int64, or probabilities ``[*, classes]``, for example of ``mixup``.
        ignore_index: index that does not count.
        smoothing: share of each target that is spread over all classes, in ``[0, 1]``. Indices are not expanded to
            probabilities, so large vocabularies work, too.
        class_weights: ``[classes]``, on the device of ``logits``; None weighs all classes equally.

    Returns:
        ``LossSum`` in nats.

    Example:
        >>> import dtrain as dt
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> loss = dt.soft_cross_entropy(logits, torch.tensor([[0.75, 0.25], [0.0, 0.0]]))
        >>> round(float(loss.total), 4), float(loss.weight)  # log 2, of one target
        (0.6931, 1.0)

    Raises:
        ConfigError: shapes that do not match, targets of another dtype, ``smoothing`` outside of ``[0, 1]``, a DTensor that is
            sharded along the classes.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7; ``label_smoothing`` of torch's ``cross_entropy``.
    """
    _check_soft_targets(logits, targets, smoothing)
    if class_weights is not None and class_weights.shape != logits.shape[-1:]:
        raise ConfigError(
            f"soft_cross_entropy: class_weights must have {logits.shape[-1]} elements, one per class, got shape "
            f"{tuple(class_weights.shape)}. "
            "Give a weight per class."
        )
    local, _, group = local_part(logits, caller="soft_cross_entropy")
    if group is not None:
        raise ConfigError("soft_cross_entropy: logits must not be sharded along the classes. Use dt.cross_entropy.")
    wide = _widen(local)
    weights = None if class_weights is None else class_weights.to(wide.dtype)
    if not targets.is_floating_point():
        total = F.cross_entropy(
            wide.flatten(0, -2),
            targets.flatten(),
            weight=weights,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=smoothing,
        )
        counted = targets != ignore_index
        mass = counted.sum() if weights is None else (weights[torch.where(counted, targets, 0)] * counted).sum()
        return LossSum(total=total, weight=mass)
    probabilities = targets.to(wide.dtype)
    logs = wide.log_softmax(dim=-1) if weights is None else wide.log_softmax(dim=-1) * weights
    total = -(probabilities * logs).sum()
    if smoothing:
        total = torch.lerp(total, -(probabilities.sum(dim=-1) * logs.mean(dim=-1)).sum(), smoothing)
    return LossSum(total=total, weight=(probabilities if weights is None else probabilities * weights).sum().detach())


def _check_soft_targets(logits: Tensor, targets: Tensor, smoothing: float) -> None:
    if targets.dtype != torch.int64 and not targets.is_floating_point():
        raise ConfigError(
            f"soft_cross_entropy: targets must be class indices (int64) or probabilities (float), got {targets.dtype}. "
            "Convert the targets with .long() or .float()."
        )
    if logits.ndim < 2 or targets.shape != (logits.shape if targets.is_floating_point() else logits.shape[:-1]):
        raise ConfigError(
            f"soft_cross_entropy: needs logits [*, classes], and targets [*] of indices or [*, classes] of probabilities, got "
            f"{tuple(logits.shape)} and {tuple(targets.shape)} {targets.dtype}. Give one target per row of logits."
        )
    check_number("soft_cross_entropy", "smoothing", smoothing, minimum=0, maximum=1)


@explain_arguments
def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> LossSum:
    """Compute ``cross_entropy(head(hidden), targets)`` without the logits, in a twentieth of their memory.

    The loss and its gradients are computed together for a few rows at a time, a twentieth of the bytes of the logits or 4 MiB.
    The results equal those of ``cross_entropy`` up to rounding. In bfloat16 and float16 the gradient of the head is summed over
    the blocks of rows in this dtype.

    Formula: ``total = sum_i u[i] * (l[i] - (1 - smoothing) * x[i, t[i]] - smoothing * mean_c x[i, c] + z_loss * l[i]**2)``
    with the logits ``x = head(hidden)``, ``l[i] = log sum_c exp x[i, c]``, the targets ``t``, and ``u`` the weights of tokens,
    or ones. The weight is ``sum_i u[i]`` over the targets that count.

    Args:
        hidden: ``[*, dim]``, inputs of ``head``, such as ``[batch, seq, dim]``; any float dtype. They are computed in the dtype
            of the head or of autocast. A DTensor that is sharded over ``tp``, as after ``SequenceParallel``, is gathered.
        head: ``nn.Linear(dim, classes)``, with or without bias, or an ``nn.Embedding(classes, dim)``; plain, sharded as a unit,
            in another unit or in the root, tied to another layer, or sharded along the classes (``ColwiseParallel``). Its
            forward is not called, and neither are forward hooks.
        targets: ``[*]`` int64; positions equal to ``ignore_index`` count neither in the sum nor in the weight.
        ignore_index: target that does not count.
        smoothing: share of each target that is spread over all classes, in ``[0, 1]``.
        z_loss: coefficient of the squared log of the softmax's denominator, which keeps logits small; >= 0, such as 1e-4.
        token_weights: ``[*]`` weight of each target, without gradient; None weighs all targets equally.

    Returns:
        ``LossSum`` in nats, in at least float32. With ``z_loss``, ``aux["z_loss"]`` is the part of the loss that it adds.

    Collective: the gather and the reduction of the head's unit, if the unit is not gathered, as in a call of ``head``. For a
        head that is sharded along the classes, two all-reduces of a few numbers per target, and one of the gradient of
        ``hidden`` in backward.
    Host sync: none.

    Example:
        def loss_fn(model, batch):
            hidden = model.trunk(batch["input_ids"][:, :-1])  # [batch, seq, dim]
            return dt.linear_cross_entropy(hidden, model.head, batch["input_ids"][:, 1:])

    Raises:
        ConfigError: ``head`` is of another kind or has a forward of its own, shapes that do not match, targets that are no
            indices, options out of range, or (in backward) a second backward through one loss.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7, for ``smoothing``; Chowdhery et al. 2022, arXiv:2204.02311,
        section 5, for ``z_loss``.
    """
    caller = "linear_cross_entropy"
    head = unwrap_module(head)
    weight = _check_head(head, hidden, caller=caller)
    _check_indices(hidden, targets, caller=caller, rows="hidden")
    check_number(caller, "smoothing", smoothing, minimum=0, maximum=1)
    check_number(caller, "z_loss", z_loss, minimum=0)
    if token_weights is not None and token_weights.shape != targets.shape:
        raise ConfigError(
            f"{caller}: token_weights must have the shape of targets {tuple(targets.shape)}, got {tuple(token_weights.shape)}. "
            "Give one weight per target."
        )
    counted = (targets != ignore_index).flatten()
    weights = counted if token_weights is None else torch.where(counted, token_weights.detach().flatten(), 0)

    def compute(*tensors: Tensor | None, columns: _Columns) -> Tensor:
        columns = replace(columns, smoothing=smoothing, z_loss=z_loss)
        needs_grad = torch.is_grad_enabled()
        return cast(Tensor, _LinearCrossEntropy.apply(*tensors, targets.flatten(), weights, columns, needs_grad))  # type: ignore[no-untyped-call]

    sums = _call_with_head(head, weight, hidden, compute, caller=caller)
    count = counted.sum() if token_weights is None else _widen(weights).sum()
    return LossSum(total=sums[0], weight=count, aux={"z_loss": (sums[1].detach(), count)} if z_loss else {})


def _check_head(head: nn.Module, hidden: Tensor, *, caller: str) -> Tensor:
    """Return the weight of ``head``, ``[classes, dim]``."""
    # A layer with adapters, or in float8, computes another product.
    is_plain = getattr(type(head), "forward", None) in (nn.Linear.forward, nn.Embedding.forward) and "forward" not in vars(head)
    if not is_plain:
        raise ConfigError(
            f"{caller}: head must be an nn.Linear or an nn.Embedding with the forward of torch, got "
            f"{type(head).__name__}. Use dt.{caller.removeprefix('linear_')}(head(hidden), targets)."
        )
    weight = cast(Tensor, head.weight)
    if hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"{caller}: hidden must be [*, {weight.shape[1]}], the inputs of head, got {tuple(hidden.shape)}. "
            "Pass the input of the head, not the logits."
        )
    return weight


def _call_with_head(head: nn.Module, weight: Tensor, hidden: Tensor, fn: Callable[..., Tensor], *, caller: str) -> Tensor:
    """Return ``fn(hidden, weight, bias, columns=columns)``, called in the unit of the head with its local, gathered tensors.

    ``hidden`` is flat, ``[n, dim]``, and in the dtype in which the head computes.
    """

    def compute(states: Tensor) -> Tensor:
        # Parameters are other tensors while they are gathered.
        matrix: Any = head.weight
        bias: Any = getattr(head, "bias", None)
        local, start, group = local_part(matrix, dim=0, caller=caller)
        bias = None if bias is None else local_part(bias, dim=0, caller=caller)[0]
        states = local_part(states, caller=caller)[0] if group is None else whole_with_summed_grad(states, matrix)
        dtype, device = local.dtype, local.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        tensors = [None if x is None else x.to(dtype) for x in (states.flatten(0, -2), local, bias)]
        return fn(*tensors, columns=_Columns(classes=len(matrix), start=start, group=group))

    return call_in_unit(head, weight, compute, hidden, caller=caller)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """This rank's columns of logits, and the options of their cross entropy.

    Args:
        classes: number of columns of all ranks.
        start: index of this rank's first column.
        group: ranks that hold the other columns; None if this rank holds all.
        smoothing: as in ``linear_cross_entropy``.
        z_loss: as in ``linear_cross_entropy``.
        temperature: divides the logits.
    """

    classes: int
    start: int = 0
    group: dist.ProcessGroup | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0

    def replace_by_grad_(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Replace logits by the gradient of the sum of weighted losses; return these, and their part of ``z_loss``: ``[2, n]``.

        Args:
            logits: ``[n, columns]``, this rank's columns, at least one, in at least float32.
            targets: ``[n]`` int64, columns of the whole logits, equal on all ranks. With a group, a target out of range makes
                the loss NaN; without, it is an error of torch.
            weights: ``[n]`` in the dtype of ``logits``; 0 for targets that do not count.

        Mutates: ``logits``.
        Collective: with a group, one all-reduce of ``[n]``, and one of ``[3, n]``, or ``[4, n]`` with ``smoothing``.
        """
        if self.temperature != 1:
            logits.div_(self.temperature)
        largest = logits.amax(dim=1)
        if self.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        logits.sub_(largest[:, None])
        column = torch.where(weights != 0, targets, self.start) - self.start
        if self.group is not None:
            here = (column >= 0) & (column < logits.shape[1])
            column = column.clamp(0, logits.shape[1] - 1)
        else:
            here = torch.ones_like(column, dtype=torch.bool)
        picked = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
        sums = [picked, here.to(logits.dtype), *([logits.sum(dim=1)] if self.smoothing else [])]
        stacked = torch.stack([logits.exp_().sum(dim=1), *sums])
        if self.group is not None:
            dist.all_reduce(stacked, group=self.group)
        denominator, target, ranks, *rest = stacked
        log_denominator = denominator.log()
        losses = torch.where((ranks == 1) | (weights == 0), log_denominator, torch.nan)
        losses = losses - (1 - self.smoothing) * target
        if self.smoothing:
            losses = losses - self.smoothing / self.classes * rest[0]
        log_sums = log_denominator + largest
        penalties = self.z_loss * log_sums.square()
        logits.mul_((weights * (1 + 2 * self.z_loss * log_sums) / denominator)[:, None])
        if self.smoothing:
            logits.sub_((self.smoothing / self.classes * weights)[:, None])
        logits.scatter_add_(1, column[:, None], ((self.smoothing - 1) * weights * here)[:, None])
        if self.temperature != 1:
            logits.div_(self.temperature)
        # A row that does not count may hold NaN.
        both = torch.stack([losses + penalties, penalties])
        return torch.where(weights != 0, both * weights, 0.0)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of logits that are sharded over the vocabulary, equal on all ranks.

    Backward computes the gradient of one such sum, not of one sum per rank, as is usual for tensor parallelism.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, columns: _Columns) -> Tensor:
        grad_logits = logits.clone()
        total = columns.replace_by_grad_(grad_logits, targets, counted.to(logits.dtype))[0].sum()
        ctx.save_for_backward(grad_logits.masked_fill_(~counted[:, None], 0.0))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,), (grad_logits,) = grads, ctx.saved_tensors
        return grad_logits * grad, None, None, None


# Buffers take at most this share of the logits, or a few MiB: small matrix products are slow.
_BUFFER_SHARE = 20
_LEAST_BYTES = 4 * 2**20


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums ``[2]`` of ``_Columns.replace_by_grad_`` over all rows of the logits ``hidden @ weight.T + bias``.

    The logits never exist as a whole. Forward computes the gradients, because they need the logits. Backward scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        columns: _Columns,
        needs_grad: bool,
    ) -> Tensor:
        wanted = [needs_grad and needed for needed in ctx.needs_input_grad[:3]]
        losses, ctx.grads = _head_losses(hidden, weight, bias, targets, weights, columns, wanted)
        return losses.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise ConfigError(
                "linear_cross_entropy: backward must run once per loss, got a second one. Compute the loss again."
            )
        own, ctx.grads = ctx.grads, None
        for tensor in own:
            if tensor is not None:
                _scale_(tensor, grads[0][0])
        return *own, None, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities ``[n]`` of the targets under the logits ``hidden @ weight.T + bias``, which never exist as a whole.

    Backward computes the logits again, since their gradient needs that of each log-probability.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, columns: _Columns) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.columns = columns
        ones = _widen(hidden.new_ones(len(hidden)))
        return -_head_losses(hidden, weight, bias, targets, ones, columns, (False, False, False))[0][0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        # A unit that was resharded in between has freed the memory of its gathered parameters.
        if weight.untyped_storage().size() == 0:
            raise ConfigError(
                "linear_token_log_probs: the head must stay gathered until backward, got a head that was resharded. Run no "
                "other forward or snapshot of the model in between, or make the head a unit: blocks=(..., 'head')."
            )
        _, own = _head_losses(hidden, weight, bias, targets, -grads[0], ctx.columns, ctx.needs_input_grad[:3])
        return *own, None, None


def _head_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    columns: _Columns,
    wanted: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return ``[2, n]`` of ``_Columns.replace_by_grad_``, and the gradients that are wanted, for a few rows at a time."""
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight) if wanted[1] else None
    grad_bias = _widen(torch.zeros_like(bias)) if bias is not None and wanted[2] else None
    rows = _count_rows(hidden, len(weight))
    buffer = hidden.new_empty(rows, len(weight))
    wide_buffer = _widen(buffer)
    weights = weights.to(wide_buffer.dtype)
    losses = weights.new_empty(2, len(hidden))
    for begin in range(0, len(hidden), rows):
        chunk = slice(begin, begin + rows)
        states = hidden[chunk]
        logits = buffer[: len(states)]
        torch.mm(states, weight.t(), out=logits) if bias is None else torch.addmm(bias, states, weight.t(), out=logits)
        wide = logits if wide_buffer is buffer else wide_buffer[: len(states)].copy_(logits)
        losses[:, chunk] = columns.replace_by_grad_(wide, targets[chunk], weights[chunk])
        if grad_bias is not None:
            grad_bias += wide.sum(dim=0)
        if wide is not logits:
            logits.copy_(wide)
        if grad_hidden is not None:
            torch.mm(logits, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            grad_weight.addmm_(logits.t(), states)
    return losses, (grad_hidden, grad_weight, grad_bias)


def _count_rows(hidden: Tensor, classes: int) -> int:
    """Return the number of rows whose logits are computed together."""
    size = hidden.dtype.itemsize
    # Logits of low precision are copied to float32.
    bytes_per_row = classes * (size if size >= 4 else size + 4)
    share = len(hidden) * classes * size // (_BUFFER_SHARE * bytes_per_row)
    return max(1, min(len(hidden), max(share, _LEAST_BYTES // bytes_per_row)))


def _scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply ``tensor`` by a scalar ``[]`` of at least float32. Mutates: ``tensor``."""
    if tensor.dtype.itemsize >= 4:
        tensor.mul_(factor)
        return
    # A product in bfloat16 would round the factor. Blocks keep the copies small.
    for block in tensor.split(1024):
        block.copy_(block.float() * factor)


@explain_arguments
def mean_loss(fn: Callable[[nn.Module, Batch], Tensor], *, weight: Callable[[Batch], Tensor | float]) -> LossFn:
    """Make a ``LossFn`` from a function that returns a mean.

    Args:
        fn: function ``(model, batch) -> mean loss``, scalar ``[]``.
        weight: function that returns the number of items in the mean, such as ``lambda batch: len(batch["label"])``. Required,
            because a mean over tokens that is weighted by samples gives wrong gradients without an error.

    Example:
        def fn(model, batch):
            return F.cross_entropy(model(batch["x"]), batch["label"])

        step = dt.compose_step(dt.mean_loss(fn, weight=lambda batch: len(batch["label"])))

    Raises:
        ConfigError: ``weight`` is not a function, or (when called) ``fn`` does not return one number.
    """
    if not callable(weight):
        raise ConfigError(
            f"mean_loss: weight must be a function of the batch, got {weight!r}. Pass lambda batch: len(batch['label'])."
        )

    def loss_fn(model: nn.Module, batch: Batch) -> LossSum:
        mean, count = fn(model, batch), weight(batch)
        if not isinstance(mean, Tensor):
            has_loss = hasattr(mean, "loss")
            advice = "Return its loss, or use dt.transformers_loss." if has_loss else "Return the mean loss, a tensor []."
            raise ConfigError(f"mean_loss: the function must return one tensor, got {type(mean).__name__}. {advice}")
        if mean.ndim != 0:
            raise ConfigError(
                f"mean_loss: the function must return one number, got shape {tuple(mean.shape)}. Reduce the loss to a mean."
            )
        return LossSum(total=mean * count, weight=count)

    return loss_fn


def sum_loss(values: Tensor, mask: Tensor | None = None, **metrics: Tensor) -> LossSum:
    """Sum a loss that is known per item (sample or token), count the items, and sum further values of the items for metrics.

    Args:
        values: ``[*]`` loss of each item, any float dtype; the sum is computed in at least float32.
        mask: ``[*]`` True for the items that count, or the weight of each item, summed in at least float32; None counts all. A
            masked value may be NaN.
        metrics: ``[*]`` further values per item, such as the parts of the loss. ``dt.reduce_metrics`` returns the mean of each.

    Returns:
        ``LossSum`` whose weight is the number of items that count, or the sum of their weights.

    Example:
        def loss_fn(model, batch):
            log_probs, values, entropy = model(batch["observations"], batch["actions"])
            policy = -batch["advantages"] * (log_probs - batch["log_probs"]).exp()
            value = (values - batch["returns"]).square()
            return dt.sum_loss(policy + 0.5 * value - 0.01 * entropy, policy=policy, value=value, entropy=entropy)

    Raises:
        ConfigError: ``values`` is a mean or a sum already, or ``mask`` or one of ``metrics`` has another shape than ``values``.
    """
    if values.ndim == 0:
        raise ConfigError(
            "sum_loss: values must have one number per item, got one number of shape (). Give one number per item, before any "
            "mean or sum."
        )
    shape = tuple(values.shape)
    for name, given in {"mask": mask, **metrics}.items():
        if given is not None and tuple(given.shape) != shape:
            raise ConfigError(
                f"sum_loss: {name} must have the shape of values {shape}, got {tuple(given.shape)}. "
                "Give one number per item, before any mean."
            )

    def add_up(items: Tensor) -> Tensor:
        wide = _widen(items)
        return wide.sum() if mask is None else (wide.masked_fill(mask == 0, 0.0) * mask).sum()

    # A mask of ones in bfloat16 or float16 is exact, but its sum is not.
    weight = values.numel() if mask is None else _widen(mask).sum()
    return LossSum(
        total=add_up(values), weight=weight, aux={name: (add_up(items.detach()), weight) for name, items in metrics.items()}
    )


def token_log_probs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token, for policies: the same number at the rollout and in training.

    Call it in both places, on logits of one model. With equal batches in evaluation mode the numbers are equal to the bit.
    With other batches, padding or sharding they differ by the rounding of the model: below 1e-12 in float64 and 1e-5 in float32
    for the models of the tests. A model in bfloat16 may differ by 1e-2, which ``monitors.rollout_mismatch`` measures.

    Formula: ``logits[target] / temperature - logsumexp(logits / temperature)``

    Args:
        logits: ``[..., classes]``, any float dtype; computed in at least float32.
        targets: tokens, ``[...]`` int64, in ``[0, classes)``. At positions that do not count any valid token will do, as the
            result is masked.
        temperature: temperature of the sampler, above 0.

    Returns:
        ``[...]``, at least float32, with a gradient.

    Example:
        >>> import dtrain as dt
        >>> logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> [
        ...     round(value, 4)
        ...     for value in dt.token_log_probs(logits, torch.tensor([1, 0])).tolist()
        ... ]
        [-0.6931, -0.3133]

    Raises:
        ConfigError: ``targets`` of another shape or dtype, or a ``temperature`` that is not above 0.
    """
    check_number("token_log_probs", "temperature", temperature, above=0)
    if targets.shape != logits.shape[:-1] or targets.dtype != torch.int64:
        raise ConfigError(
            f"token_log_probs: targets must be int64 of shape {tuple(logits.shape[:-1])}, got {targets.dtype} of shape "
            f"{tuple(targets.shape)}. Shift logits and tokens against each other before, as logits[:, :-1] and tokens[:, 1:]."
        )
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    result = _TokenLogProbs.apply(flat, targets.flatten(), temperature)  # type: ignore[no-untyped-call]
    return cast(Tensor, result).view(targets.shape)


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities ``[n]`` of logits ``[n, classes]``, which keeps the logits in their own dtype, and no copy of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        result = _widen(logits.new_empty(len(logits)))
        log_sums, rows = torch.empty_like(result), _count_rows(logits, logits.shape[1])
        buffer = result.new_empty(rows, logits.shape[1])
        for begin in range(0, len(logits), rows):
            chunk = slice(begin, begin + rows)
            scaled = buffer[: len(logits[chunk])].copy_(logits[chunk]).div_(temperature)
            picked, largest = scaled.gather(1, targets[chunk, None])[:, 0], scaled.amax(dim=1)
            # logsumexp would take the memory of one more block.
            log_sums[chunk] = scaled.sub_(largest[:, None]).exp_().sum(dim=1).log_() + largest
            result[chunk] = picked - log_sums[chunk]
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.temperature, ctx.rows = temperature, rows
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sums = ctx.saved_tensors
        result, factors = torch.empty_like(logits), grads[0] / ctx.temperature
        buffer = factors.new_empty(ctx.rows, logits.shape[1])
        for begin in range(0, len(logits), ctx.rows):
            chunk = slice(begin, begin + ctx.rows)
            scaled = buffer[: len(logits[chunk])].copy_(logits[chunk]).div_(ctx.temperature)
            grad = scaled.sub_(log_sums[chunk, None]).exp_().mul_(-factors[chunk, None])
            result[chunk] = grad.scatter_add_(1, targets[chunk, None], factors[chunk, None])
        return result, None, None


@explain_arguments
def linear_token_log_probs(hidden: Tensor, head: nn.Module, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return ``token_log_probs(head(hidden), targets)`` without the logits, in a twentieth of their memory.

    The logits are computed for a few rows at a time, and once more in backward. So the loss may be any function of the
    log-probabilities, which ``linear_cross_entropy`` does not allow.

    Formula: ``x[target] / temperature - logsumexp(x / temperature)`` with the logits ``x = head(hidden)``

    Args:
        hidden: as in ``linear_cross_entropy``.
        head: as in ``linear_cross_entropy``. A head in the root of a model stays gathered until backward: no other forward of
            the model, and no ``snapshot``, may run in between.
        targets: tokens, ``[*]`` int64, in ``[0, classes)``, also at positions that do not count.
        temperature: temperature of the sampler, above 0.

    Returns:
        ``[*]``, at least float32, with a gradient.

    Collective: as ``linear_cross_entropy``; for a head that is sharded along the classes once more in backward.
    Host sync: none.

    Example:
        def loss_fn(model, batch):
            hidden = model.trunk(batch["tokens"][:, :-1])  # [batch, seq, dim]
            log_probs = dt.linear_token_log_probs(hidden, model.head, batch["tokens"][:, 1:])
            ratio = (log_probs - batch["log_probs"]).exp()
            return dt.sum_loss(-ratio * batch["advantages"], batch["mask"])

    Raises:
        ConfigError: as ``linear_cross_entropy``; a ``temperature`` that is not above 0; or (in backward) a head that was
            resharded before.
    """
    caller = "linear_token_log_probs"
    head = unwrap_module(head)
    weight = _check_head(head, hidden, caller=caller)
    _check_indices(hidden, targets, caller=caller, rows="hidden")
    check_number(caller, "temperature", temperature, above=0)

    def compute(*tensors: Tensor | None, columns: _Columns) -> Tensor:
        columns = replace(columns, temperature=temperature)
        return cast(Tensor, _LinearLogProbs.apply(*tensors, targets.flatten(), columns))  # type: ignore[no-untyped-call]

    return _call_with_head(head, weight, hidden, compute, caller=caller).view(targets.shape)


def transformers_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Compute the loss of a model of transformers, called with ``labels``, as a sum over the labels that count.

    Such a model returns a mean over the labels of its call, so gradient accumulation over microbatches and ranks would weigh
    tokens of short samples more. The sum is exact for the losses of causal and masked language models, of encoder-decoder
    models, and of the classification of tokens, texts, images and sounds; other models are refused. A causal language model
    predicts the next label, so the first label of each sample does not count, and neither do labels of -100. With prompt tuning
    or P-tuning of peft the first label counts, because it follows the virtual tokens.

    Args:
        model: model of transformers, also sharded or with adapters of peft. Its own loss is used.
        batch: keyword arguments of the model, with ``labels`` ``[batch, seq]`` or ``[batch]`` int64.

    Returns:
        ``LossSum`` whose weight is the number of labels that count.

    Example:
        step = dt.compose_step(dt.transformers_loss, [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()])

    Raises:
        ConfigError: ``batch`` is no mapping with integer ``labels``, the model returns no loss, or its loss is of another kind
            (segmentation, regression, several losses): use ``dt.mean_loss``. A model adds the loss of its routers or of the
            size of its logits, which is a mean over the microbatch.
    """
    labels = batch["labels"] if hasattr(batch, "keys") and "labels" in list(batch.keys()) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        got = type(batch).__name__ if labels is None else f"labels of {getattr(labels, 'dtype', type(labels).__name__)}"
        raise ConfigError(
            f"transformers_loss: batch must be a mapping with integer labels, got {got}. "
            "Use dt.mean_loss for another loss, and give its weight."
        )
    base: Any = getattr(model, "_orig_mod", model)
    prompts = base.active_peft_config if is_of_peft(base, "PeftModelForCausalLM") else None
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    counted = (labels[:, 1:] if labels.ndim > 1 and _predicts_next(base, prompts) else labels) != -100
    count = counted.sum()
    # Most models divide a sum by this number instead of computing a mean.
    items = count.clamp(min=1)
    takes_items = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())
    loss = getattr(outputs := model(**batch, **({"num_items_in_batch": items} if takes_items else {})), "loss", None)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise ConfigError(
            f"transformers_loss: the model must return one loss, got {type(loss).__name__}. Pass a model with a head, such as "
            "AutoModelForCausalLM, and return_dict=True."
        )
    _check_added_losses(base, outputs)
    # The mean of no label is NaN in models that ignore the number. Its gradient is zero.
    return LossSum(total=torch.where(count > 0, loss * items, 0.0), weight=count)


_SHIFTED_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_UNSHIFTED_LOSSES = (
    "ForMaskedLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


# Coefficients of losses that models add to the loss of the labels. Most models copy them from their config.
_ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
_ADDED_LOSSES = ("aux_loss", "encoder_aux_loss", "decoder_aux_loss", "encoder_z_loss", "decoder_z_loss")


def _check_added_losses(model: nn.Module, outputs: Any) -> None:
    """Refuse a loss of the routers, or of the size of the logits, that the model adds to the loss of the labels.

    Such a loss is a mean over the positions of one call, so it would depend on the microbatch, and be weighed by labels.
    """
    config: Any = getattr(model, "config", None)
    owners = (model, config, getattr(config, "text_config", None))
    held = [[getattr(owner, name) for name in _ROUTER_COEFFICIENTS if hasattr(owner, name)] for owner in owners]
    added = next((name for name in _ADDED_LOSSES if isinstance(getattr(outputs, name, None), Tensor)), None)
    # A model without a known coefficient adds the loss as well.
    if (added and any(next(filter(None, held), [1]))) or getattr(config, "z_loss_coefficient", None):
        raise ConfigError(
            f"transformers_loss: the model must return the loss of its labels alone, got one with {added or 'z_loss'} added, a "
            "mean over the microbatch. Set model.config.output_router_logits = False (z_loss_coefficient = 0), and balance "
            "experts with dt.experts, or use dt.mean_loss."
        )


# Methods of peft with virtual tokens before the labels, so that the loss counts the first label, and with virtual keys.
_VIRTUAL_TOKENS, _VIRTUAL_KEYS = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"), ("PREFIX_TUNING", "CARTRIDGE")


def _predicts_next(model: nn.Module, peft_config: Any) -> bool:
    """Return True if the loss of a model of transformers shifts the labels by one position, and drops the first label.

    Args:
        model: base model.
        peft_config: config of peft for a causal language model, or None.

    Raises:
        ConfigError: the loss may count other labels than those that are not -100.
    """
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    # A model without a type of loss uses that of causal language models, but only a few such models have no further loss.
    if kind is None and type(model).__name__.endswith(("GPT2LMHeadModel", "BertLMHeadModel")):
        kind = "ForCausalLM"
    # The type of the loss says nothing about a model that computes the loss itself.
    reads_type = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    prompts = str(peft_config.peft_type.value) if getattr(peft_config, "is_prompt_learning", False) else None
    if kind in _SHIFTED_LOSSES and reads_type and prompts in (None, *_VIRTUAL_TOKENS, *_VIRTUAL_KEYS):
        return prompts not in _VIRTUAL_TOKENS
    if kind == "ForConditionalGeneration" and getattr(config, "is_encoder_decoder", False):
        return False
    # A regression has no label that does not count.
    regresses = getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 2) == 1
    if kind in _UNSHIFTED_LOSSES and not (regresses and kind.endswith("Classification")):
        return False
    raise ConfigError(
        "transformers_loss: the model must have a loss of one class per label, for causal or masked language models or for "
        f"classification, got {type(model).__name__} with loss_type {kind!r}{f' and {prompts} of peft' if prompts else ''}. "
        "Use dt.mean_loss, and give the number of items in its mean as weight."
    )
