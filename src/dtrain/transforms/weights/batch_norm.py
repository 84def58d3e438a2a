"""Running statistics of batch normalisation, made anew for the parameters that there are."""

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

from dtrain.batch import BatchSpec, to_device
from dtrain.dist.init import get_dist_info
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import StepError
from dtrain.shard.buffers import BufferSnapshot
from dtrain.shard.unshard import eval_mode
from dtrain.state import get_device, get_spec
from dtrain.step.evaluate import pad_to_longest_rank
from dtrain.step.microbatches import CountFn, count_batch
from dtrain.typing import Batch

_NAME = "update_batch_norm_"


def update_batch_norm_(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[nn.Module, Batch], Any],
    *,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
) -> int:
    """Leave the statistics of ``batches`` as the running ones of every batch normalisation, for weights that were averaged.

    Formula: ``running_mean = mean over batches of m``, ``running_var = mean over batches of v * n / (n - 1)``, where ``m``,
    ``v`` and ``n`` are mean, variance and number of a channel's values in one global batch, which normalise that batch

    The statistics are those of the batch over all ranks, so they do not depend on how it is split over them. All other modules
    run in evaluation mode: dropout draws nothing, and the statistics are of what an evaluation computes. (torch's ``update_bn``
    is the same in one process, but runs everything in training mode.)

    Args:
        model: sharded or plain.
        batches: this rank's batches, of any number; of a dtrain loader, one whole pass that leaves its position.
        forward: runs the model on a batch, ``(model, batch) -> anything``; the loss function of the training will do.
        batch_spec: where the batch axis is; None takes the first one.
        count: samples of a batch that no ``batch_spec`` describes.

    Returns:
        The number of global batches; 0, without a look at them, for a model without running statistics.

    Mutates: ``running_mean``, ``running_var`` and ``num_batches_tracked``; nothing if it raises.
    Collective: per batch one small record on the control group and one all-reduce (float64) for each batch normalisation, and
    the model's own gathers; every rank must call it.
    Host sync: none of its own but those records.

    Raises:
        StepError: no rank has a batch, or one rank has none to take part with.
        Exception: whatever ``batches`` or ``forward`` raise (a loader's: ``StepError`` on the other ranks).

    Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2, batch normalisation.

    Example:
        >>> model = torch.nn.BatchNorm1d(1)
        >>> batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [8.0]])]
        >>> update_batch_norm_(model, batches, lambda model, batch: model(batch))
        2
        >>> model.running_mean.item(), model.running_var.item()  # (2 + 6) / 2; (2 + 8) / 2
        (4.0, 5.0)
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    device, spec, number = get_device(model), get_spec(model), 0
    counted = partial(count_batch, batch_spec=batch_spec, count=count)
    means = [_RunningStatistics() for _ in norms]
    whole = torch.compiler.set_stance("force_eager")  # a graph that was compiled before would pass the hooks by
    with (
        whole,
        report_missing_ranks(_NAME),
        eval_mode(model),
        _restore_buffers_on_error(model),
        _record_statistics(norms, means) as pace,
    ):
        for batch, real in pad_to_longest_rank(batches, counted):
            pace.counts = real and spec.counts_in_loss  # ranks along tp have the same values: they count once
            forward(model, to_device(batch, device))
            number += 1
        if not number:
            raise StepError(f"{_NAME}: there was no batch on any rank")
        for norm, mean in zip(norms, means, strict=True):
            mean.write_(norm)
    return number


@dataclass(slots=True)
class _BatchFlag:
    counts: bool = True  # whether what this rank runs just now counts


@dataclass(slots=True, eq=False)
class _RunningStatistics:
    """The cumulative average of the statistics that one normalisation has seen."""

    batches: Tensor | float = 0.0
    mean: Tensor | float = 0.0
    var: Tensor | float = 0.0

    def add(self, mean: Tensor, var: Tensor, values: Tensor) -> None:
        counts = (values > 0).double()  # 0 for a batch that had no sample on any rank
        self.batches = self.batches + counts
        self.mean = self.mean + (mean - self.mean) * counts / self.batches.clamp(min=1.0)
        self.var = self.var + (var - self.var) * counts / self.batches.clamp(min=1.0)

    def write_(self, norm: _BatchNorm) -> None:
        for buffer, value in (
            (norm.running_mean, self.mean),
            (norm.running_var, self.var),
            (norm.num_batches_tracked, self.batches),
        ):
            if buffer is not None and isinstance(value, Tensor):  # else the forward did not come by here
                buffer.copy_(value.reshape(buffer.shape))


@contextmanager
def _record_statistics(norms: Sequence[_BatchNorm], means: Sequence[_RunningStatistics]) -> Iterator[_BatchFlag]:
    """A context in which each of ``norms`` normalises by the global batch, and adds that batch's statistics to its means.

    In evaluation mode it normalises by its running statistics: those of the batch are put there first.

    Mutates: running statistics; hooks, while it lasts.
    """
    pace = _BatchFlag()

    def before(mean: _RunningStatistics, norm: nn.Module, given: tuple[Any, ...]) -> None:
        found, biased, values = _global_statistics(given[0], counts=pace.counts)
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(found)
        norm.running_var.copy_(biased)
        mean.add(found, biased * (values / (values - 1.0).clamp(min=1.0)), values)

    handles = [norm.register_forward_pre_hook(partial(before, mean)) for norm, mean in zip(norms, means, strict=True)]
    try:
        yield pace
    finally:
        for handle in handles:
            handle.remove()


def _global_statistics(x: Tensor, *, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance ``[channels]`` of ``x`` ``[batch, channels, ...]`` over all ranks, and the number of values.

    Collective: on several ranks one all-reduce of float64 ``[2 * channels + 1]``.
    """
    wide = x if x.dtype.itemsize >= 4 else x.float()
    var, mean = (found.double() for found in torch.var_mean(wide, [dim for dim in range(x.ndim) if dim != 1], correction=0))
    values = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    # Made of means and variances: sums of squares of values would lose digits before they are wide.
    sums = torch.cat([values, values * mean, values * (var + mean.square())]) * float(counts)
    if get_dist_info().world_size > 1:
        dist.all_reduce(sums)
    total, (first, second) = sums[:1], sums[1:].chunk(2)
    mean = first / total.clamp(min=1.0)
    return mean, (second / total.clamp(min=1.0) - mean.square()).clamp(min=0.0), total


@contextmanager
def _restore_buffers_on_error(model: nn.Module) -> Iterator[None]:
    """Buffers are, after an exception, as they were. Mutates: buffers."""
    kept = BufferSnapshot(model)
    kept.capture()
    try:
        yield
    except BaseException:
        kept.restore()
        raise
