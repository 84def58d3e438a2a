"""Check that a loss function returns sums, which the step adds over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dtrain.batch import BatchSpec, to_device
from dtrain.dist.rng import RNGSnapshot
from dtrain.errors import ConfigError
from dtrain.shard.unshard import eval_mode
from dtrain.state import get_device
from dtrain.step.microbatches import SplitFn, split_microbatches
from dtrain.step.normalization import check_loss
from dtrain.typing import Batch, LossFn

_WHERE = "check_loss_fn"


def check_loss_fn(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    *,
    batch_spec: BatchSpec | None = None,
    split: SplitFn | None = None,
    rtol: float = 1e-3,
) -> None:
    """Raise unless totals and weights of a batch are the sums of those of its two halves.

    A mean in ``LossSum.total`` fails the check, and so does a loss of a sample that depends on the other samples of its
    microbatch. It runs three forwards in evaluation mode, without gradients, so dropout and batch statistics take no part.
    Random numbers that ``loss_fn`` itself draws do: it sees the same generators in each forward, but draws another number of
    times, so give a larger ``rtol``. Call it in a unit test, with a batch of odd size and ragged lengths.

    Args:
        loss_fn: ``(model, batch) -> LossSum``.
        model: plain or sharded; on several ranks each one must call this function.
        batch: two samples or more.
        batch_spec: the position of the batch axis, as for ``microbatch_step``.
        split: a function that cuts a batch, as for ``microbatch_step``.
        rtol: the largest difference, relative to the sums. A mean of halves differs by 0.5.

    Collective: those of three forwards.

    Raises:
        ConfigError: totals or weights that do not add up, with the reason as far as the numbers tell it; or fewer than two
            samples.

    Example:
        >>> import dtrain as dt
        >>> from dtrain.testing import check_loss_fn
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(model, x):
        ...     return dt.LossSum(total=model(x).square().sum(), weight=len(x))  # with mean() it would raise
        >>> check_loss_fn(loss_fn, model, torch.randn(5, 2))
    """
    whole = split_microbatches(batch, None, batch_spec=batch_spec, split=split, count=None)
    if whole.samples < 2:
        raise ConfigError(f"{_WHERE}: batch must have at least 2 samples, got {whole.samples}.")
    halves = split_microbatches(batch, (whole.samples + 1) // 2, batch_spec=batch_spec, split=split, count=None).batches
    all_of_it, *parts = [_loss_sums(loss_fn, model, part) for part in (batch, *halves)]
    for name, (total, weight) in all_of_it.items():
        totals, weights = zip(*(part[name] for part in parts), strict=True)
        means = [t / w if w else 0.0 for t, w in zip(totals, weights, strict=True)]
        if _is_close(total, sum(totals), rtol) and _is_close(weight, sum(weights), rtol):
            continue
        sums = f"total {total:.6g} and weight {weight:.6g}, and its parts add up to {sum(totals):.6g} and {sum(weights):.6g}"
        mean = sum(t * w for t, w in zip(totals, weights, strict=True)) / (sum(weights) or 1.0)
        if _is_close(total, mean, rtol):
            raise ConfigError(
                f"{_WHERE}: {name} is a mean: the batch has {sums}. Return the sum (reduction='sum') and the count as weight, "
                "or wrap a function that returns a mean with dt.mean_loss."
            )
        if not _is_close(weight, sum(weights), rtol):
            raise ConfigError(
                f"{_WHERE}: weight of {name} does not count: the batch has {sums}. Return the number of samples or tokens that "
                "the total sums."
            )
        raise ConfigError(
            f"{_WHERE}: {name} of a sample depends on the samples beside it, or on random numbers: the batch has {sums} "
            f"(means {', '.join(f'{found:.6g}' for found in means)}). Use dt.grad_cache_step for a loss over a whole "
            "batch, or a larger rtol for random numbers."
        )


def _loss_sums(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float, float]]:
    """Total and weight by name, from random generators that are put back."""
    randomness = RNGSnapshot()
    try:
        with eval_mode(model):
            loss = check_loss(loss_fn(model, to_device(batch, get_device(model))), caller=_WHERE)
    finally:
        randomness.restore()
    pairs = {"loss": (loss.total, loss.weight), **loss.terms, **loss.aux}
    return {name: (float(total), float(weight)) for name, (total, weight) in pairs.items()}


def _is_close(one: float, other: float, rtol: float) -> bool:
    return abs(one - other) <= rtol * max(abs(one), abs(other))
