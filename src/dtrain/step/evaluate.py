"""``evaluate``: exact metrics of a model over a dataset, each sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from dtrain.batch import count_samples, to_device, zeros_like_sample
from dtrain.dist.control import agree_max
from dtrain.errors import StepError
from dtrain.shard.fsdp import evaluating
from dtrain.types import Batch, LossFn, Metrics, add_metrics, as_metric


def evaluate(model: nn.Module, loader: Iterable[Batch], loss_fn: LossFn) -> Metrics:
    """The loss (and ``aux``) of ``model`` over all batches of ``loader``, as local sums; ``reduce_metrics`` makes means.

    Args:
        model: sharded or plain; runs in evaluation mode without gradients, and gets each module's own mode back.
        loader: this rank's batches, of any number and size; of a dtrain loader, one whole pass that leaves its position.
        loss_fn: the same function that training uses.

    Ranks may have different numbers of batches: one that has run out repeats a batch that does not count.

    Collective: one small record per batch on the control group, and the model's own gathers.

    Raises:
        StepError: no rank has a sample.
    """
    device = next(model.parameters()).device
    metrics: Metrics = {}
    filler: Batch | None = None
    with evaluating(model):
        for batch in _in_lockstep(loader):
            real = batch is not None and count_samples(batch) > 0
            if real:
                filler = batch
            elif filler is None and batch is not None:
                filler = zeros_like_sample(batch)
            if filler is None:
                raise StepError(
                    "evaluate: this rank has no batch at all, so it cannot take part in the others' forwards; use build_loader"
                )
            loss = loss_fn(model, to_device(filler, device))
            if real:
                sums = {"loss": (loss.total, loss.weight), **loss.aux}
                metrics = add_metrics(metrics, {k: as_metric(*pair, device) for k, pair in sums.items()})
            elif not metrics:
                sums = {"loss": (0.0, 0.0), **dict.fromkeys(loss.aux, (0.0, 0.0))}
                metrics = {k: as_metric(*pair, device) for k, pair in sums.items()}
    if not metrics:
        raise StepError("evaluate: the loader gave no batch on any rank")
    return metrics


def _in_lockstep(loader: Any) -> Iterator[Batch | None]:
    """This rank's batches, then None for as long as another rank still has one."""
    batches = iter(loader.one_pass() if hasattr(loader, "one_pass") else loader)
    while True:
        batch = next(batches, None)
        if not agree_max(int(batch is not None)):
            return
        yield batch
