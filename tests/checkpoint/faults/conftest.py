"""One nursery for all tests of faults."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from checkpoint.faults.nursery import Nursery
from checkpoint.faults.outcome import Outcome, Tally, tally

Collect = Callable[..., Tally]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def collect(nursery: Nursery) -> Collect:
    """``collect(draw, count=n)``: at least ``n`` outcomes of a row's draws, made in the nursery."""

    def asked(draw: Any, *, count: int, seed: int = 0, first: int = 0, stride: int = 1) -> Tally:
        def one(seed: int, k: int) -> list[Outcome]:
            return [Outcome(**outcome) for outcome in nursery.ask(draw, seed, first + k * stride)]

        return tally(one, seed=seed, count=count)

    return asked
