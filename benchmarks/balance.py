"""Measure batches balanced by tokens: the spread of costs between ranks, padding, and the cost of dealing a batch.

    python benchmarks/balance.py              # half a minute
    python benchmarks/balance.py --quick      # some seconds

Lengths are log-normal, from 50 to 8,000 tokens. Dealing is measured alone, and in a pass through a loader whose dataset and
collate cost next to nothing. It runs in one thread, so its CPU time counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dtrain as dt
from dtrain.data.balance import BatchBalance, Dealer, make_dealer
from measure import CPU, interleaved, machine, typical, verdict_line

SAMPLES, BATCH, RANKS, MAX_TOKENS = 100_000, 256, 8, 16_384
SPREAD, DEAL_S = 0.01, 1e-3


class Numbers:
    """So many samples, each its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def __getitem__(self, index: int) -> int:
        return index


def log_normal(middle: float, sigma: float) -> NDArray[np.int64]:
    """Return lengths of samples from 50 to 8,000 tokens."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(middle), sigma, 4 * SAMPLES)).astype(np.int64)
    return lengths[(lengths >= 50) & (lengths <= 8_000)][:SAMPLES]


def batch_indices(batches: int) -> list[NDArray[np.int64]]:
    """Return the samples of random global batches."""
    return [np.random.default_rng(number).integers(0, SAMPLES, BATCH) for number in range(batches)]


def dealer_of(lengths: NDArray[np.int64], balance: str, max_tokens: int | None = None) -> Dealer:
    dealer = make_dealer(Numbers(), balance=balance, lengths=lengths, max_tokens=max_tokens, padded=True)
    assert dealer is not None
    return dealer


def deal(dealer: Dealer, indices: list[NDArray[np.int64]]) -> list[BatchBalance]:
    return [dealer.deal(batch, 0, RANKS).balance for batch in indices]


def spreads(batches: int) -> None:
    """Print the spread of costs without and with balance, and the padding of microbatches."""
    print(f"{batches} batches of {BATCH} samples on {RANKS} ranks; median, 99%, largest")
    indices = batch_indices(batches)
    for middle, sigma in ((700.0, 1.0), (700.0, 0.8), (1_500.0, 1.0)):
        lengths, shape = log_normal(middle, sigma), f"median {middle:.0f}, sigma {sigma:g}"
        for cost, power in (("tokens", 1), ("squared_tokens", 2)):
            costs = np.array([lengths[batch].astype(np.float64) ** power for batch in indices])
            sums = costs.reshape(batches, RANKS, -1).sum(2)
            before, mean = (sums.max(1) - sums.min(1)) / sums.mean(1), sums.mean(1)
            after = np.array([batch.spread for batch in deal(dealer_of(lengths, cost), indices)])
            print(f"{shape}: spread of {cost}, equal numbers of samples: {shown(before)}")
            print(f"{shape}: spread of {cost}, balanced: {shown(after)}")
            # No dealing can split a sample.
            print(f"{shape}: batches with a sample above the mean of a rank: {100 * float((costs.max(1) > mean).mean()):.1f}%")
            if cost == "tokens":
                met = "met" if after.max() < SPREAD else "not met"
                print(f"{shape}: largest spread of {cost}: {100 * after.max():.3f}%, target below {100 * SPREAD:g}%: {met}")
        padding = median(batch.padding for batch in deal(dealer_of(lengths, "tokens", MAX_TOKENS), indices))
        own = [lengths[batch[: BATCH // RANKS]] for batch in indices]
        whole = median(float(1 - part.mean() / part.max()) for part in own)
        print(f"{shape}: padding: microbatches of {MAX_TOKENS} tokens {100 * padding:.1f}%, a rank's batch {100 * whole:.1f}%")


def shown(values: NDArray[np.float64]) -> str:
    return ", ".join(f"{100 * float(value):.3f}%" for value in (np.median(values), np.quantile(values, 0.99), values.max()))


def times(rounds: int, batches: int) -> None:
    """Print the time of the dealing alone, and of a loader's batch with and without it."""
    lengths, indices = log_normal(700.0, 1.0), batch_indices(batches)
    cases: dict[str, dict[str, Any]] = {
        "tokens": {"balance": "tokens"},
        "squared_tokens": {"balance": "squared_tokens"},
        f"tokens, max_tokens={MAX_TOKENS}": {"balance": "tokens", "max_tokens": MAX_TOKENS},
    }
    runs: dict[str, Callable[[], object]] = {"loader, no balance": partial(take, {}, batches)}
    for name, options in cases.items():
        runs[f"deal, {name}"] = partial(deal, dealer_of(lengths, **options), indices)
        runs[f"loader, {name}"] = partial(take, {"lengths": lengths, **options}, batches)
    for name, timings in interleaved(runs, rounds=rounds, clocks={"cpu": CPU})["cpu"].items():
        figure = typical([(1e3 * first / batches, 1e3 * second / batches) for first, second in timings])
        if name.startswith("deal"):
            print(verdict_line(name, figure, at_most=DEAL_S * 1e3, unit=" ms"))
        else:
            print(f"{name}: {figure.value:.3f} ms a batch")


def take(options: dict[str, Any], batches: int) -> None:
    loader = dt.build_loader(Numbers(), global_batch_size=BATCH, seed=0, collate=len, **options)
    for _ in loader.until(batches):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer batches and rounds")
    quick = parser.parse_args().quick
    print(machine())
    spreads(100 if quick else 1_000)
    times(5 if quick else 20, 20 if quick else 50)


if __name__ == "__main__":
    main()
