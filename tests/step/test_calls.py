"""A step makes hardly more calls than the loop by hand. Counts of calls have no noise."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from dtrain.testing import run_ranks
from measure import count_calls
from peers_growth import evaluations
from peers_step import BARE, CASES, Case, _replicated_by_hand, _sharded, batches, calls_of_a_step, looped

# Calls of a step that reads its loss beyond those of the loop by hand, with Python 3.11, in which a comprehension is a call.
# A change that makes fewer calls lowers the number. Some 25 of them look for parameters that were added, replaced or assigned,
# for options that differ between ranks, and for a block of init_dist that has ended.
BEYOND_HAND = {
    "4 microbatches of a tuple": 227,
    "4 microbatches of a dict": 228,
    "4 microbatches of a dict, `auto_microbatch`": 307,
    "a batch of 1 sample": 225,
    "one microbatch": 225,
    "one microbatch, `auto_microbatch`": 304,
    "4 microbatches of a nested batch of 20 tensors": 355,
    "4 microbatches, a declared weight": 254,
}
BEYOND_DDP = 142
# The same of an evaluation over 16 batches of 32 samples, by the samples of a part.
EVALUATION_BEYOND_HAND: dict[int | Literal["auto"] | None, int] = {None: 318, 8: 1597, "auto": 540}
GROWTH = 1.1


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in (BARE, *CASES)])
def test_step_makes_no_more_calls_than_before(case: Case):
    calls = calls_of_a_step(case)["calls"]
    (by_hand, _), (ours, _) = calls["by hand"][0], calls["dtrain"][0]
    assert ours - by_hand <= GROWTH * BEYOND_HAND[case.name]


def calls_on_a_rank() -> tuple[int, int]:
    """Calls of a step under ``replicate``, and of one with DDP; the numbers of the two sides of a socket differ by a few."""
    counts = []
    for side in (_sharded(torch.float32, strategy="replicate"), _replicated_by_hand(torch.float32)):
        run = looped(side, batches(torch.float32, dist.get_rank()))
        for _ in range(6):
            run()
        counts.append(count_calls(run))
    return counts[0], counts[1]


def test_step_on_two_ranks_makes_no_more_calls_than_before():
    assert max(ours - by_hand for ours, by_hand in run_ranks(calls_on_a_rank, 2)) <= GROWTH * BEYOND_DDP


@pytest.mark.parametrize("size", EVALUATION_BEYOND_HAND)
def test_evaluation_makes_no_more_calls_than_before(size: int | Literal["auto"] | None):
    calls = {}
    for name, run in evaluations(size).items():
        for _ in range(3):
            run()
        calls[name] = count_calls(run)
    assert calls["dtrain"] - calls["by hand"] <= GROWTH * EVALUATION_BEYOND_HAND[size]


@pytest.mark.parametrize("case", CASES[:1], ids=["dict"])
def test_calls_of_a_step_do_not_depend_on_the_run(case: Case):
    assert calls_of_a_step(case) == calls_of_a_step(case)


def test_calls_in_python_and_in_c_are_counted():
    def run() -> None:
        for _ in range(3):
            abs(0)
        (lambda: len(()))()

    before = sys.getprofile()
    assert count_calls(run) == 1 + 3 + 2
    assert sys.getprofile() is before
