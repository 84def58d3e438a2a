"""Recompute the running statistics of batch normalization, for example for averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtrain.data.batch import BatchSpec, count_samples_and_tokens, to_device
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import StepError
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.spec import get_device, get_spec
from dtrain.shard.unshard import eval_mode
from dtrain.step.evaluate import pad_to_longest_rank
from dtrain.typing import Batch

_NAME = "update_batch_norm_"


def update_batch_norm_(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[nn.Module, Batch], Any],
    *,
    batch_spec: BatchSpec | None = None,
) -> int:
    """Replace the running statistics of every batch normalization by the statistics of ``batches``.

    Formula: ``running_mean = mean over batches of m``, ``running_var = mean over batches of v * n / (n - 1)``, where ``m``,
    ``v`` and ``n`` are mean, variance and number of a channel's values in one global batch, which normalize that batch

    The statistics are those of the batch over all ranks, so they do not depend on the split over ranks. All other modules run
    in evaluation mode: dropout is off, and the statistics are those of an evaluation. (torch's ``update_bn`` has the same
    formula in one process, but runs all modules in training mode.)

    Args:
        model: sharded or plain model.
        batches: this rank's batches, in any number; for a dtrain loader, one full pass that keeps the loader's position.
        forward: function ``(model, batch) -> anything`` that runs the model, for example the loss function.
        batch_spec: description of the batch, as in ``microbatch_step``; None uses the first axis.

    Returns:
        The number of global batches; 0, without a pass, for a model without running statistics.

    Mutates: ``running_mean``, ``running_var`` and ``num_batches_tracked``; nothing if it raises.
    Collective: per batch one small record on the control channel and one all-reduce (float64) for each batch normalization, and
    the model's own gathers; every rank must call it.
    Host sync: none besides those records.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.BatchNorm1d(1)
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [8.0]])]
        >>> dt.transforms.update_batch_norm_(model, batches, lambda model, batch: model(batch))
        2
        >>> model.running_mean.item(), model.running_var.item()  # (2 + 6) / 2; (2 + 8) / 2
        (4.0, 5.0)

    Raises:
        StepError: no rank has a batch, or a rank has no batch at all although another rank has.
        Exception: any error of ``batches`` or ``forward`` (a loader's error: ``StepError`` on the other ranks).

    Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2, batch normalization.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    device, spec, num_batches = get_device(model), get_spec(model), 0
    count_fn = partial(count_samples_and_tokens, batch_spec=batch_spec)
    means = [_RunningStatistics() for _ in norms]
    # An already compiled graph would skip the hooks.
    eager = torch.compiler.set_stance("force_eager")
    with (
        eager,
        report_missing_ranks(_NAME),
        eval_mode(model),
        restore_buffers(model),
        _record_statistics(norms, means) as flag,
    ):
        for batch, _, real in pad_to_longest_rank(batches, count_fn):
            # Ranks along tp have the same values, which count once.
            flag.counts = real and spec.counts_in_loss
            forward(model, to_device(batch, device))
            num_batches += 1
        if not num_batches:
            raise StepError(
                f"{_NAME}: batches must not be empty on all ranks, got no batch. Pass a loader with at least one batch."
            )
    for norm, mean in zip(norms, means, strict=True):
        mean.write_(norm)
    return num_batches


@dataclass(slots=True)
class _BatchFlag:
    """A mutable flag: ``counts`` is True if the current batch of this rank counts."""

    counts: bool = True


@dataclass(slots=True, eq=False)
class _RunningStatistics:
    """The cumulative average of the batch statistics of one batch normalization."""

    batches: Tensor | float = 0.0
    mean: Tensor | float = 0.0
    var: Tensor | float = 0.0

    def add(self, mean: Tensor, var: Tensor, values: Tensor) -> None:
        # 0 for a batch without samples on any rank.
        counts = (values > 0).double()
        self.batches = self.batches + counts
        self.mean = self.mean + (mean - self.mean) * counts / self.batches.clamp(min=1.0)
        self.var = self.var + (var - self.var) * counts / self.batches.clamp(min=1.0)

    def write_(self, norm: _BatchNorm) -> None:
        for buffer, value in (
            (norm.running_mean, self.mean),
            (norm.running_var, self.var),
            (norm.num_batches_tracked, self.batches),
        ):
            # The value is a float if the forward never ran this module.
            if buffer is not None and isinstance(value, Tensor):
                buffer.copy_(value.reshape(buffer.shape))


@contextmanager
def _record_statistics(norms: Sequence[_BatchNorm], means: Sequence[_RunningStatistics]) -> Iterator[_BatchFlag]:
    """In this context each of ``norms`` normalizes by the global batch and adds the batch statistics to its ``means`` entry.

    In evaluation mode a batch normalization uses its running statistics, so a hook first writes the batch statistics there.

    Mutates: running statistics; hooks, inside the context.
    """
    flag = _BatchFlag()

    def record(statistics: _RunningStatistics, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        mean, var, values = _global_statistics(inputs[0], counts=flag.counts)
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        statistics.add(mean, var * (values / (values - 1.0).clamp(min=1.0)), values)

    handles = [norm.register_forward_pre_hook(partial(record, mean)) for norm, mean in zip(norms, means, strict=True)]
    try:
        yield flag
    finally:
        for handle in handles:
            handle.remove()


def _global_statistics(x: Tensor, *, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance ``[channels]`` of ``x`` ``[batch, channels, ...]`` over all ranks, and the value count.

    Collective: on several ranks one all-reduce of float64 ``[2 * channels + 1]``.
    """
    wide = x if x.dtype.itemsize >= 4 else x.float()
    var, mean = (value.double() for value in torch.var_mean(wide, [dim for dim in range(x.ndim) if dim != 1], correction=0))
    values = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    # Sum means and variances in float64: sums of squared values in the narrow dtype would lose digits.
    sums = torch.cat([values, values * mean, values * (var + mean.square())]) * float(counts)
    if get_dist_info().world_size > 1:
        dist.all_reduce(sums)
    total, (first, second) = sums[:1], sums[1:].chunk(2)
    mean = first / total.clamp(min=1.0)
    return mean, (second / total.clamp(min=1.0) - mean.square()).clamp(min=0.0), total
