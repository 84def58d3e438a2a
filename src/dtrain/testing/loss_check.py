"""Check that a loss function returns sums, which the step adds over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dtrain.data.batch import BatchSpec, to_device
from dtrain.errors import ConfigError
from dtrain.shard.spec import get_device
from dtrain.step.microbatches import BatchWatch, split_microbatches
from dtrain.step.normalization import check_loss
from dtrain.step.sanity_checks import is_close, loss_sums
from dtrain.typing import Batch, LossFn

_NAME = "check_loss_fn"


def check_loss_fn(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    *,
    batch_spec: BatchSpec | None = None,
    rtol: float = 1e-3,
) -> None:
    """Raise unless the totals and weights of a batch are the sums of those of its two halves.

    The check fails for a mean in ``LossSum.total``, and for a loss of a sample that depends on other samples of its microbatch.
    Three forwards run in evaluation mode, without gradients, so dropout and batch statistics have no effect. If ``loss_fn``
    uses random numbers, pass a larger ``rtol``: each forward starts with the same generators, but uses a different number of
    random values. Call the function in a unit test, with a batch of odd size and ragged lengths.

    Args:
        loss_fn: ``(model, batch) -> LossSum``.
        model: plain or sharded model; on several ranks every rank must call the function.
        batch: at least two samples.
        batch_spec: description of the batch, as in ``microbatch_step``.
        rtol: largest difference, relative to the sums. A mean of halves differs by 0.5.

    Collective: as three forwards.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(model, x):
        ...     return dt.LossSum(
        ...         total=model(x).square().sum(), weight=len(x)
        ...     )  # mean() would raise
        >>> dt.testing.check_loss_fn(loss_fn, model, torch.randn(5, 2))

    Raises:
        ConfigError: totals or weights that do not add up, with the probable reason, or fewer than two samples.
        StepError: ``loss_fn`` writes into its batch, so a second forward has other values.
    """
    whole = split_microbatches(batch, None, batch_spec)
    if whole.samples < 2:
        raise ConfigError(f"{_NAME}: batch must have at least 2 samples, got {whole.samples}. Pass a larger batch.")
    halves = split_microbatches(batch, (whole.samples + 1) // 2, batch_spec).batches
    batch_sums, *half_sums = [_loss_sums(loss_fn, model, part) for part in (batch, *halves)]
    for name, (total, weight) in batch_sums.items():
        totals, weights = zip(*(half[name] for half in half_sums), strict=True)
        means = [t / w if w else 0.0 for t, w in zip(totals, weights, strict=True)]
        if is_close(total, sum(totals), rtol) and is_close(weight, sum(weights), rtol):
            continue
        sums = f"total {total:.6g} and weight {weight:.6g}, and its parts add up to {sum(totals):.6g} and {sum(weights):.6g}"
        mean = sum(t * w for t, w in zip(totals, weights, strict=True)) / (sum(weights) or 1.0)
        if is_close(total, mean, rtol):
            raise ConfigError(
                f"{_NAME}: {name} is a mean: the batch has {sums}. Return the sum (reduction='sum') and the count as weight, "
                "or wrap a function that returns a mean with dt.mean_loss."
            )
        if not is_close(weight, sum(weights), rtol):
            raise ConfigError(
                f"{_NAME}: weight of {name} does not count: the batch has {sums}. Return the number of samples or tokens that "
                "the total sums."
            )
        raise ConfigError(
            f"{_NAME}: {name} of a sample depends on the samples beside it, or on random numbers: the batch has {sums} "
            f"(means {', '.join(f'{value:.6g}' for value in means)}). Use dt.step.grad_cache_step for a loss over a whole "
            "batch, or a larger rtol for random numbers."
        )


def _loss_sums(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float, float]]:
    """Return total and weight by name. A loss that writes into its batch is refused."""
    watch = BatchWatch(batch)
    sums = loss_sums(
        lambda model, part: check_loss(loss_fn(model, part), caller=_NAME), model, to_device(batch, get_device(model))
    )
    watch.check(_NAME)
    return sums
