"""Deal the samples of a global batch to ranks with nearly equal cost, and group the samples of a rank to microbatches.

The global batch comes from the sample order, so it does not depend on the dealing. The dealing is a pure function of the
batch's lengths and of the number of ranks. Every rank computes the whole dealing, without communication.

Source of the dealing: the largest sample first, to the rank with the smallest sum (Graham 1969, "Bounds on multiprocessing
timing anomalies"), then exchanges between the ranks with the largest and the smallest sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from dtrain.arguments import check_choice, check_int
from dtrain.data.sample_lengths import (
    LengthFunction,
    LengthSource,
    LengthTable,
    SampleLengths,
    find_lengths,
    find_sample_lengths,
)
from dtrain.data.sample_order import IntArray
from dtrain.errors import ConfigError

FloatArray: TypeAlias = NDArray[np.float64]
CostFn: TypeAlias = Callable[[Tensor], Tensor]
"""``lengths [k] -> costs [k]``: int64 tokens of samples to their costs, numbers of at least 0, in any unit."""

BalanceCost: TypeAlias = "Literal['tokens', 'squared_tokens'] | CostFn"
"""Cost of a sample: its tokens, their square, or a function of the tokens."""


# Functions with names, because a worker of an iterable dataset may pickle them.
def _count_tokens(tokens: Tensor) -> Tensor:
    return tokens


def _square_tokens(tokens: Tensor) -> Tensor:
    return tokens.double().square()


_COSTS: dict[str, CostFn] = {"tokens": _count_tokens, "squared_tokens": _square_tokens}
_CALLER = "build_loader"
# Exchanges end once the sums differ by this share of their mean, or after this number of exchanges.
_TOLERANCE, _MAX_EXCHANGES = 2e-3, 16
# The largest microbatch is the smallest possible up to this part of ``max_tokens``.
_LIMIT_STEPS = 16
# Lengths on which a cost function is tried before the first batch.
_TRIED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBalance:
    """Costs of one global batch by rank, equal on all ranks: ``loader.balance``.

    Args:
        costs: cost of each rank's samples; tokens if the loader does not balance.
        samples: samples of each rank.
        tokens: tokens of each rank.
        padded_tokens: tokens of each rank with the padding of its microbatches; the tokens themselves without ``max_tokens``.
        microbatches: microbatches of each rank; 0 without ``max_tokens``.
        digest: number below 2**48 that depends on the samples of each rank.

    Example:
        >>> import dtrain as dt
        >>> balance = dt.data.BatchBalance(
        ...     costs=(90.0, 110.0), samples=(1, 2), tokens=(90, 110), padded_tokens=(90, 120)
        ... )
        >>> balance.spread, balance.idle, balance.padding
        (0.2, 0.09090909090909094, 0.04761904761904767)
    """

    costs: tuple[float, ...]
    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    padded_tokens: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    digest: int = 0

    @property
    def spread(self) -> float:
        """Largest minus smallest cost of a rank, relative to the mean; 0 is perfect."""
        total = sum(self.costs)
        return (max(self.costs) - min(self.costs)) * len(self.costs) / total if total else 0.0

    @property
    def idle(self) -> float:
        """Share of all ranks' time spent waiting for the rank with the largest cost, if time is proportional to the cost."""
        largest = max(self.costs)
        return 1 - sum(self.costs) / len(self.costs) / largest if largest else 0.0

    @property
    def padding(self) -> float:
        """Share of padding in the tokens of all microbatches."""
        padded = sum(self.padded_tokens)
        return 1 - sum(self.tokens) / padded if padded else 0.0


class DealtBatch(NamedTuple):
    """One rank's samples of a global batch.

    Args:
        offsets: offsets of the rank's samples in the global batch.
        parts: of each microbatch, in the order of ``offsets``, the tokens of a part of 1, 2, ... samples, its longest samples;
            empty without ``max_tokens``.
        balance: costs of all ranks.
    """

    offsets: IntArray
    parts: tuple[Sequence[int], ...]
    balance: BatchBalance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dealer:
    """Rule that deals the samples of a global batch. ``make_dealer`` builds it.

    Args:
        lengths: tokens of the samples.
        cost_fn: cost of a sample by its tokens; None leaves each rank the samples that it has without a dealer.
        max_tokens: limit of the tokens of a microbatch; None makes no microbatches.
        padded: if True, a microbatch counts its samples times its longest sample, else the sum of its samples.
    """

    lengths: SampleLengths
    cost_fn: CostFn | None = None
    max_tokens: int | None = None
    padded: bool = True

    def deal(self, indices: IntArray, rank: int, ranks: int, shares: Sequence[range] = ()) -> DealtBatch:
        """Return the samples of ``rank`` in a global batch.

        Args:
            indices: ``[n]`` dataset indices of the global batch.
            rank: number of the rank among those that share the batch.
            ranks: number of ranks that share the batch.
            shares: offsets that each rank gets if there is no ``cost_fn``.

        Raises:
            ConfigError: a sample is longer than ``max_tokens``, or a cost is negative or not finite.
        """
        return self.deal_parts(*self.lengths.parts_of(indices), rank, ranks, shares)

    def deal_samples(self, samples: Sequence[Any], rank: int, ranks: int, shares: Sequence[range] = ()) -> DealtBatch:
        """Return the part of ``rank`` in a global batch of an iterable dataset; as ``deal``."""
        assert isinstance(self.lengths, LengthFunction)
        return self.deal_parts(self.lengths.of_samples(samples), None, rank, ranks, shares)

    def deal_parts(
        self, parts: IntArray, counts: IntArray | None, rank: int, ranks: int, shares: Sequence[range] = ()
    ) -> DealtBatch:
        """Return the samples of ``rank`` in a global batch whose samples have these parts; as ``deal``."""
        tokens = parts if counts is None else _sum_parts(parts, counts)
        if self.cost_fn is None:
            costs, owners = tokens.astype(np.float64), _owners_of(shares, len(tokens))
        else:
            costs = evaluate_cost(self.cost_fn, parts)
            costs = costs if counts is None else _sum_parts(costs, counts)
            owners = deal_by_cost(costs, ranks)
        samples = np.bincount(owners, minlength=ranks)
        ends = np.cumsum(samples).tolist()
        begins = [0, *ends[:-1]]
        sums = tuple(np.bincount(owners, weights=tokens, minlength=ranks).astype(np.int64).tolist())
        groups, padded = [list[int]() for _ in range(ranks)], sums
        if self.max_tokens is None:
            offsets = np.argsort(owners, kind="stable")
        else:
            # The longest samples run first: probes of auto_microbatch see the largest memory, and little is padded.
            offsets = np.lexsort((-tokens, owners))
            sorted_tokens = tokens[offsets].tolist()
            lengths = [sorted_tokens[begin:end] for begin, end in zip(begins, ends, strict=True)]
            check_longest(max((own[0] for own in lengths if own), default=0), self.max_tokens)
            groups = group_ranks(lengths, self.max_tokens, padded=self.padded)
            padded = tuple(map(_count_padded, lengths, groups)) if self.padded else sums
        balance = BatchBalance(
            costs=tuple(np.bincount(owners, weights=costs, minlength=ranks).tolist()),
            samples=tuple(samples.tolist()),
            tokens=sums,
            padded_tokens=padded,
            microbatches=tuple(map(len, groups)),
            digest=xxhash.xxh3_64_intdigest(owners.tobytes() + str(groups).encode()) % 2**48,
        )
        own = offsets[begins[rank] : ends[rank]]
        return DealtBatch(own, tuple(self._count_parts(tokens[own].tolist(), groups[rank])), balance)

    def _count_parts(self, lengths: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the tokens of a part of 1, 2, ... samples of each microbatch."""
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            longest = lengths[end - size]
            if self.padded:
                yield [longest * count for count in range(1, size + 1)]
            else:
                yield list(accumulate(lengths[end - size : end]))


def make_dealer(
    dataset: Any, *, balance: BalanceCost | None, lengths: LengthSource, max_tokens: int | None, padded: bool
) -> Dealer | None:
    """Return the dealer of an indexed dataset; None if batches are neither balanced nor split by tokens.

    Raises:
        ConfigError: an argument is invalid, lengths are missing or not needed, a sample is longer than ``max_tokens``, or a
            cost is negative or not finite.
    """
    cost_fn, limit = check_balance(balance, lengths, max_tokens)
    if cost_fn is None and limit is None:
        return None
    found = find_lengths(dataset, lengths)
    if isinstance(found, LengthTable):
        if limit is not None:
            check_longest(found.longest(), limit)
        if cost_fn is not None and len(found.parts):
            extremes = [int(found.parts.min()), int(found.parts.max())]
            evaluate_cost(cost_fn, np.append(found.parts[:_TRIED], extremes))
    return Dealer(lengths=found, cost_fn=cost_fn, max_tokens=limit, padded=padded)


def make_sample_dealer(
    *, balance: BalanceCost | None, lengths: LengthSource, max_tokens: int | None, padded: bool
) -> Dealer | None:
    """Return the dealer of an iterable dataset; None if batches are neither balanced nor split by tokens.

    Raises:
        ConfigError: an argument is invalid, or ``lengths`` is no function of a sample.
    """
    cost_fn, limit = check_balance(balance, lengths, max_tokens)
    if cost_fn is None and limit is None:
        return None
    return Dealer(lengths=find_sample_lengths(lengths), cost_fn=cost_fn, max_tokens=limit, padded=padded)


def check_balance(balance: object, lengths: object, max_tokens: object) -> tuple[CostFn | None, int | None]:
    """Return the cost function and the limit of a microbatch.

    Raises:
        ConfigError: ``balance`` is neither known nor a function, ``max_tokens`` is below 1, or ``lengths`` has no use.
    """
    limit = None if max_tokens is None else check_int(_CALLER, "max_tokens", max_tokens)
    if balance is None:
        if lengths is not None and limit is None:
            raise ConfigError(
                f"{_CALLER}: lengths must come with balance or max_tokens, got lengths alone. Pass balance='tokens', or leave "
                "lengths out."
            )
        return None, limit
    if callable(balance):
        return balance, limit
    return _COSTS[check_choice(_CALLER, "balance", balance, _COSTS)], limit


def check_longest(longest: int, max_tokens: int) -> None:
    """Raise ConfigError if the longest sample does not fit in a microbatch."""
    if longest > max_tokens:
        raise ConfigError(
            f"{_CALLER}: max_tokens must be at least the longest sample, got {max_tokens} and a sample of {longest} tokens. "
            f"Pass max_tokens={longest} or more, or cut the samples."
        )


def evaluate_cost(cost_fn: CostFn, lengths: IntArray) -> FloatArray:
    """Return the cost of each length: ``[k]``.

    Raises:
        ConfigError: ``cost_fn`` returns another number of costs, or a cost that is negative or not finite.
    """
    result = cost_fn(torch.from_numpy(lengths))
    costs = np.asarray(result.detach().cpu() if isinstance(result, Tensor) else result)
    if costs.shape != lengths.shape or costs.dtype.kind not in "iuf":
        got = f"{type(result).__name__} of shape {costs.shape}"
        raise ConfigError(
            f"{_CALLER}: balance must return a cost per length, a tensor [{len(lengths)}], got {got}. "
            "Compute with the whole tensor, as in lambda tokens: tokens * (1000 + tokens)."
        )
    costs = costs.astype(np.float64)
    # The comparison is False for NaN, too.
    valid = (costs >= 0) & (costs < np.inf)
    if not valid.all():
        first = int(valid.argmin())
        raise ConfigError(
            f"{_CALLER}: balance must return finite costs of at least 0, got {costs[first]:g} for {lengths[first]} tokens. "
            "Correct the cost function."
        )
    return costs


def deal_by_cost(costs: FloatArray, ranks: int) -> IntArray:
    """Deal samples to ``ranks`` so that the sums of their costs are nearly equal.

    Args:
        costs: ``[n]``, cost of each sample, at least 0.
        ranks: number of ranks.

    Returns:
        ``[n]``, rank of each sample; equal for equal arguments.

    >>> deal_by_cost(np.array([5.0, 1.0, 4.0, 2.0]), 2).tolist()
    [0, 0, 1, 1]
    """
    order = np.argsort(-costs, kind="stable")
    members: list[list[int]] = [[] for _ in range(ranks)]
    # The number of samples decides between equal sums, so that samples without cost are spread, too.
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for sample, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        total, count, rank = heap[0]
        members[rank].append(sample)
        heapreplace(heap, (total + cost, count + 1, rank))
    sums = [0.0] * ranks
    for total, _, rank in heap:
        sums[rank] = total
    _exchange(costs, members, sums)
    owners = np.empty(len(costs), dtype=np.int64)
    owners[list(chain.from_iterable(members))] = np.repeat(np.arange(ranks), list(map(len, members)))
    return owners


def _exchange(costs: FloatArray, members: list[list[int]], sums: list[float]) -> None:
    """Exchange samples between the ranks with the largest and the smallest sum. Mutates: ``members``, ``sums``."""
    tolerance = _TOLERANCE * sum(sums) / len(sums)
    for _ in range(_MAX_EXCHANGES):
        high, low = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[high] - sums[low]
        if gap <= tolerance:
            return
        # Decrease of the larger sum by each exchange. The last column is a move without a sample in return.
        decrease = costs[members[high]][:, None] - np.append(costs[members[low]], 0.0)
        row, column = divmod(int(np.abs(decrease - gap / 2).argmin()), decrease.shape[1])
        change = float(decrease[row, column])
        if not 0 < change < gap:
            return
        moved = members[high].pop(row)
        if column < len(members[low]):
            members[high].append(members[low].pop(column))
        members[low].append(moved)
        sums[high] -= change
        sums[low] += change


def group_ranks(lengths: Sequence[Sequence[int]], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Group the samples of each rank to microbatches of at most ``max_tokens``, as many on each rank if samples suffice.

    Args:
        lengths: tokens of the samples of each rank, descending, each at most ``max_tokens``.
        max_tokens: limit of the tokens of a microbatch.
        padded: if True, a microbatch counts its samples times its longest sample.

    Returns:
        samples of each microbatch, by rank.

    >>> group_ranks([[4, 3, 1], [4, 4, 4]], 8, padded=True)
    [[1, 2], [2, 1]]
    """
    sums = [list(accumulate(own)) for own in lengths]
    fewest = [_group(own, totals, max_tokens, padded=padded) for own, totals in zip(lengths, sums, strict=True)]
    count = max(map(len, fewest))
    return [
        _even_out(own, totals, sizes, count, max_tokens, padded=padded)
        for own, totals, sizes in zip(lengths, sums, fewest, strict=True)
    ]


def _group(lengths: Sequence[int], sums: Sequence[int], limit: int, *, padded: bool) -> list[int]:
    """Return the samples of each group, as few groups as possible without a change of the order.

    ``sums`` are the cumulative sums of ``lengths``.
    """
    sizes, first, count = list[int](), 0, len(lengths)
    while first < count:
        if padded:
            size = limit // lengths[first] if lengths[first] else count
        else:
            size = bisect_right(sums, limit + (sums[first - 1] if first else 0)) - first
        sizes.append(min(size, count - first))
        first += size
    return sizes


def _even_out(
    lengths: Sequence[int], sums: Sequence[int], sizes: list[int], count: int, limit: int, *, padded: bool
) -> list[int]:
    """Return ``count`` groups whose largest is nearly as small as possible; one per sample if there are fewer samples."""
    if len(lengths) <= count:
        return [1] * len(lengths)
    # Search the smallest limit that ``count`` groups can keep.
    low, high = max(lengths[0], -(-sums[-1] // count)), limit
    while count > 1 and high - low > limit // _LIMIT_STEPS:
        middle = (low + high) // 2
        smaller = _group(lengths, sums, middle, padded=padded)
        if len(smaller) <= count:
            sizes, high = smaller, middle
        else:
            low = middle + 1
    while len(sizes) < count:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    return sizes


def _sum_parts(values: NDArray[Any], counts: IntArray) -> NDArray[Any]:
    """Return the sum of each sample's parts; 0 for a sample without parts."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owners, weights=values, minlength=len(counts)).astype(values.dtype)


def _owners_of(shares: Sequence[range], samples: int) -> IntArray:
    """Return the rank of each sample. ``shares`` are the offsets of each rank."""
    owners = np.empty(samples, dtype=np.int64)
    for rank, share in enumerate(shares):
        owners[share.start : share.stop : share.step] = rank
    return owners


def _count_padded(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the tokens of microbatches of ``sizes``, each padded to its first length."""
    return sum(size * lengths[end - size] for size, end in zip(sizes, accumulate(sizes), strict=True))
