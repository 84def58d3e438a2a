"""``evaluate``: exact metrics of a model over a dataset, each sample counted once on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

from torch import nn

from dtrain import pulse, spans
from dtrain.batch import BatchSpec, to_device, zeros_like_samples
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.timeouts import naming_missing
from dtrain.errors import StepError
from dtrain.shard.whole import evaluating
from dtrain.state import device_of
from dtrain.step.auto_eval import auto_batch_eval
from dtrain.step.parts import CountFn, SplitFn, samples_and_tokens
from dtrain.step.sums import Sums, checked_loss
from dtrain.types import Batch, LossFn, Metrics


def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    loss_fn: LossFn,
    *,
    batch_spec: BatchSpec | None = None,
    count: CountFn | None = None,
    split: SplitFn | None = None,
    microbatch_size: int | Literal["auto"] | None = None,
) -> Metrics:
    """The loss (and ``aux``) of ``model`` over all batches of ``loader``, as local sums; ``reduce_metrics`` makes means.

    Args:
        model: sharded or plain; runs in evaluation mode without gradients, and gets each module's own mode back.
        loader: this rank's batches, of any number and size; of a dtrain loader, one whole pass that leaves its position.
        loss_fn: the same function that training uses.
        batch_spec: where the batch axis is; None takes the first one.
        count: samples of a batch that no ``batch_spec`` describes.
        split: cuts such a batch into microbatches, see ``auto_batch_eval``.
        microbatch_size: samples per forward; ``"auto"`` halves what does not fit, see ``auto_batch_eval``. None takes each
            batch as it comes.

    Ranks may have different numbers of batches: one that has run out repeats a batch that does not count.

    Collective: one small record per batch on the control group, and the model's own gathers.

    Raises:
        ConfigError: a batch whose samples cannot be counted (the other ranks raise a ``StepError``), or a loss that is no
            ``LossSum`` of single numbers.
        StepError: no rank has a batch, or one rank has none to take part with.
        Exception: whatever the loader raises (the other ranks raise a ``StepError``).
    """
    begun = time.monotonic()
    with spans.span("evaluate"):
        device = device_of(model)
        sums, any_batch = Sums(device), False
        in_parts = None
        if microbatch_size is not None:
            first = None if microbatch_size == "auto" else microbatch_size
            in_parts = auto_batch_eval(loss_fn, initial=first, batch_spec=batch_spec, count=count, split=split)
        with naming_missing("evaluate"), evaluating(model):
            for batch, real in in_lockstep(loader, partial(samples_and_tokens, spec=batch_spec, count=count)):
                for found in in_parts(model, batch) if in_parts else [loss_fn(model, to_device(batch, device))]:
                    loss = checked_loss(found, where="evaluate")
                    any_batch = True
                    if real:
                        sums.add(loss)
                    else:
                        sums.name(loss)
        if not any_batch:
            raise StepError("evaluate: the loader gave no batch on any rank")
    spans.event("evaluated", step=spans.position()[0], seconds=time.monotonic() - begun)
    return sums.metrics()


def in_lockstep(loader: Any, counted: Callable[[Batch], tuple[int, int]]) -> Iterator[tuple[Batch, bool]]:
    """This rank's batches, then one that does not count for as long as another rank still has one.

    Yields:
        A batch, and whether it counts.

    Collective: one small record per batch on the control group.
    """
    batches = iter(loader.one_pass() if hasattr(loader, "one_pass") else loader)
    filler: Batch | None = None
    while True:
        batch, real, error = None, False, None
        try:
            batch = next(batches, None)
            real = batch is not None and counted(batch)[0] > 0
        except Exception as problem:  # noqa: BLE001  # the loader and count may be the user's; raised when the others know
            error = problem
        if real:
            filler = batch
        elif filler is None and batch is not None and error is None:
            filler = zeros_like_samples(batch)
        pulse.beat("evaluate")
        rows = all_gather_numbers([batch is not None, filler is None, error is not None])
        if error is not None:
            raise error
        _check_all(rows, 2, "cannot read or count its batch; see its own error")
        if not any(has_batch for has_batch, _, _ in rows):
            return
        _check_all(rows, 1, "has no batch at all to take part with; use build_loader")
        yield filler, real


def _check_all(rows: list[list[float]], problem_at: int, what: str) -> None:
    ranks = [rank for rank, row in enumerate(rows) if row[problem_at]]
    if ranks:
        raise StepError(f"evaluate: rank {ranks[0]} ({len(ranks)} of {len(rows)} ranks) {what}")
