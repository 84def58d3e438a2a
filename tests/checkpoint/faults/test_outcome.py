"""The sums of outcomes."""

from checkpoint.faults.outcome import Outcome, Tally, tally


def test_tally_counts_kinds_and_keeps_problems():
    total = Tally()
    total.add(Outcome(fault="a", came="refused", numbers={"seconds": 1.0}))
    total.add(Outcome(fault="a", came="refused", numbers={"seconds": 3.0}))
    total.add(Outcome(fault="b", came="believed", wrong="was believed", numbers={"seconds": 2.0}), where="draw 3: ")
    assert total.kinds == {"a": {"refused": 2}, "b": {"believed": 1}}
    assert (total.count, total.wrong_count, total.wrong) == (3, 1, ["draw 3: b: was believed"])
    assert total.largest == {"seconds": 3.0}
    assert total.bound == 1.0


def test_tally_draws_until_count_is_reached():
    total = tally(lambda seed, k: [Outcome(fault=str(seed), came=str(k))] * 3, seed=7, count=10)
    assert total.kinds == {"7": {"0": 3, "1": 3, "2": 3, "3": 3}}
    assert total.bound == 3 / 12


def test_tally_ends_when_draws_are_exhausted():
    assert tally(lambda seed, k: [Outcome(fault="a", came="b")] if k < 5 else [], seed=0, count=10).count == 5
