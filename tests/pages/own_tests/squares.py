"""Tests of squares.py of docs/own.md, which test_own.py writes beside it."""

import pytest
import torch
from squares import Squares

import dtrain as dt


def drawn(count: int, stop: int, state: dict) -> list:
    """Return this rank's part of some global batches, and the loader's state after them."""
    loader = dt.build_loader(Squares(count), mesh=dt.build_mesh(), global_batch_size=4, seed=0)
    loader.load_state_dict(state or loader.state_dict())
    return [[int(x) for batch in loader.until(stop) for x in batch["x"]], loader.state_dict()]


def test_every_sample_comes_once_in_an_epoch(two_ranks):
    seen = [x for numbers, _ in two_ranks.run(drawn, 10, 3, {}) for x in numbers]
    assert sorted(seen) == list(range(10))


def test_a_resume_goes_on_with_the_next_sample(two_ranks):
    whole = two_ranks.run(drawn, 10, 6, {})
    first = two_ranks.run(drawn, 10, 2, {})
    then = two_ranks.run(drawn, 10, 6, first[0][1])
    assert [a + b for (a, _), (b, _) in zip(first, then, strict=True)] == [numbers for numbers, _ in whole]


def test_another_dataset_is_refused():
    loader = dt.build_loader(Squares(10), global_batch_size=4, seed=0)
    other = dt.build_loader(Squares(12), global_batch_size=4, seed=0)
    with pytest.raises(dt.errors.CheckpointMismatchError):
        other.load_state_dict(loader.state_dict())


def test_a_sample_is_what_it_says():
    assert Squares(5)[3] == {"x": torch.tensor(3.0), "y": torch.tensor(9.0)}
