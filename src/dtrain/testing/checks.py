"""Check in a test that a loss function returns sums, and that a piece of code stays within a limit of memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.arguments import check_int, format_bytes
from dtrain.data.batch import BatchSpec, list_tensors, to_device
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import MemoryStats, use_device_memory
from dtrain.memory.live_tensors import LiveBytes
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
    batch_sums, *half_sums = [_loss_sums(loss_fn, model, batch) for batch in (batch, *halves)]
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
    watch = BatchWatch(list_tensors(batch))
    sums = loss_sums(
        lambda model, batch: check_loss(loss_fn(model, batch), caller=_NAME), model, to_device(batch, get_device(model))
    )
    watch.check(_NAME)
    return sums


UNLIMITED = sys.maxsize
"""Limit of a rank without a budget."""

# gloo's threads free their buffers when they get Python's lock, which sleeping releases. Seconds.
BACKEND_RELEASE_S = 0.02


class MemoryBudget(LiveBytes):
    """Memory budget of this rank, and the ``DeviceMemory`` of every device while its context is open.

    Args:
        limit: limit in bytes, which may change at any time. A limit below the live bytes applies from the next allocation.
        rank: rank named in messages.
        shared: if True, there are other ranks, so threads of the backend hold tensors, too. An allocation then waits a moment
            for these threads before the refusal.
        stack_depth: number of call-stack lines per storage in ``storages``.
    """

    def __init__(self, limit: int, *, rank: int = 0, shared: bool = False, stack_depth: int = 0) -> None:
        super().__init__(admit=self._check_allocation, stack_depth=stack_depth)
        self.refused = 0
        self.rank = rank
        self._shared = shared
        self.limit = limit

    @property
    def limit(self) -> int:
        """Most bytes that tensors may hold at once; ``UNLIMITED`` for a rank without a budget."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = check_int("memory_budget", "max_bytes", limit, minimum=0)

    def read(self) -> MemoryStats:
        """Return the memory in the form of ``DeviceMemory``."""
        return MemoryStats(live=self.live, peak=self.peak, capacity=self.limit, used_by_others=0, alloc_retries=0)

    def release(self) -> None:
        """Do nothing, because a CPU's allocator keeps no cache."""

    def __repr__(self) -> str:
        return f"MemoryBudget(rank={self.rank}, live={self.live}, peak={self.peak}, limit={self.limit}, refused={self.refused})"

    def _check_allocation(self, size: int) -> torch.OutOfMemoryError | None:
        live = self.live
        if live + size > self._limit and self._shared:
            time.sleep(BACKEND_RELEASE_S)
            live = self.live
        if live + size <= self._limit:
            return None
        self.refused += 1
        limit, free = format_bytes(self._limit), format_bytes(max(0, self._limit - live))
        return torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {format_bytes(size)}. The memory budget of rank {self.rank} is {limit}, of "
            f"which {free} is free; its tensors hold {format_bytes(live)}, at most {format_bytes(self.peak)}."
        )


@contextmanager
def memory_budget(
    max_bytes: int | Sequence[int] | Mapping[int, int],
    *,
    rank: int | None = None,
    existing: Iterable[Tensor] = (),
    stack_depth: int = 0,
) -> Iterator[MemoryBudget]:
    """Limit the bytes that tensors of this rank hold, and raise as on a GPU if an allocation exceeds the limit.

    Storages count, each once: activations, gradients, optimizer state, buffers of a collective, unsharded parameters, copies
    and tensors of backward. A tensor from before the context counts from its first use, or at once if listed in ``existing``.
    An operation whose result exceeds the limit raises ``torch.OutOfMemoryError``; its result is dropped, and a storage that
    should grow keeps its size. A collective is refused before it begins.

    Not counted are temporary memory inside one operation (a convolution's workspace), and memory outside of tensors. Inside the
    context ``torch.compile`` runs its functions uncompiled. The context is meant for tests: an operation takes about ten
    microseconds longer.

    Args:
        max_bytes: limit of every rank, a sequence with one limit per rank, or a mapping from rank to limit. A rank that is not
            in the mapping has no limit.
        rank: the only rank with a limit, if ``max_bytes`` is one number; the other ranks only count.
        existing: tensors that count from the start, such as ``existing=model.parameters()``.
        stack_depth: call-stack lines to record per storage, for ``MemoryBudget.storages`` and ``write_snapshot``; slow.

    Returns:
        A context with the ``MemoryBudget``: ``live``, ``peak``, ``limit`` (may be set), ``refused`` (number of errors raised).

    Mutates: the ``DeviceMemory`` of this process, and ``torch.UntypedStorage.resize_``, until the context ends.

    Example:
        >>> import dtrain as dt
        >>> with dt.testing.memory_budget(100) as budget:
        ...     x = torch.zeros(10)
        ...     try:
        ...         x.repeat(2)
        ...     except torch.OutOfMemoryError:
        ...         budget.live, budget.peak, budget.refused
        (40, 40, 1)

    Raises:
        ConfigError: a limit that is not a whole number of bytes >= 0, or limits of ranks that do not exist.
    """
    info = get_dist_info()
    limit = _limit_of(max_bytes, rank, info.rank, info.world_size)
    budget = MemoryBudget(limit, rank=info.rank, shared=info.world_size > 1, stack_depth=stack_depth)
    budget.count(existing)
    with use_device_memory(budget), budget:
        yield budget


def _limit_of(max_bytes: int | Sequence[int] | Mapping[int, int], only: int | None, rank: int, world_size: int) -> int:
    """Return the limit of ``rank``."""
    if isinstance(max_bytes, str) or not isinstance(max_bytes, (Sequence, Mapping)):
        if only is not None:
            check_int("memory_budget", "rank", only, minimum=0, maximum=world_size - 1)
        limit = check_int("memory_budget", "max_bytes", max_bytes, minimum=0)
        return limit if only in (None, rank) else UNLIMITED
    if only is not None:
        raise ConfigError(f"memory_budget: rank needs one number of bytes, got {max_bytes!r}. Leave out rank.")
    by_rank = max_bytes if isinstance(max_bytes, Mapping) else dict(enumerate(max_bytes))
    unknown = sorted(set(by_rank) - set(range(world_size)))
    if unknown or (not isinstance(max_bytes, Mapping) and len(max_bytes) != world_size):
        raise ConfigError(
            f"memory_budget: max_bytes must have a limit for each of {world_size} ranks, got {max_bytes!r}. Use a mapping to "
            "limit some ranks."
        )
    return by_rank.get(rank, UNLIMITED)
