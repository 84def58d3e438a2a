"""The arithmetic of the benchmarks, on clocks that are made up: medians, bands and verdicts come out right."""

import itertools
import random
import subprocess
import sys

import pytest

import measure
from measure import Figure, compare, interleaved, paired, typical, verdict, verdict_line


class FakeClock:
    """A clock that only moves when a run says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def run(self, durations):
        durations = iter(durations)

        def step():
            self.now += next(durations)

        return step


def noisy(mean, spread, seed):
    draw = random.Random(seed)
    return (mean * draw.uniform(1 - spread, 1 + spread) for _ in itertools.count())


def test_ratio_difference_and_medians_are_exact_without_noise():
    clock = FakeClock()
    comparison = paired(clock.run(itertools.repeat(3.0)), clock.run(itertools.repeat(2.0)), pairs=10, warmup=2, clock=clock)
    assert comparison.ratio == Figure(value=1.5, low=1.5, high=1.5)
    assert comparison.difference == Figure(value=1.0, low=1.0, high=1.0)
    assert (comparison.band, comparison.a_s, comparison.b_s, comparison.pairs) == ((1.0, 1.0), 3.0, 2.0, 10)
    assert str(comparison) == "1.500x of 2 s (A/A band 1.000..1.000, 10 pairs)"


def test_warmup_runs_are_excluded():
    clock = FakeClock()
    cold = itertools.chain([1000.0] * 3, itertools.repeat(1.0))
    assert paired(clock.run(cold), clock.run(itertools.repeat(1.0)), pairs=2, warmup=3, clock=clock).ratio.value == 1.0


def test_each_round_calls_each_candidate_twice_in_changing_order():
    calls = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = interleaved(runs, rounds=20, warmup=0, clocks={"one": FakeClock(), "two": FakeClock()})
    rounds = [tuple(calls[begin : begin + 6]) for begin in range(0, len(calls), 6)]
    assert len(calls) == 120
    assert {tuple(sorted(names)) for names in rounds} == {("a", "a", "b", "b", "c", "c")}
    assert len(set(rounds)) > 5
    assert {clock: {name: len(runs) for name, runs in by.items()} for clock, by in timings.items()} == {
        clock: dict.fromkeys("abc", 20) for clock in ("one", "two")
    }


def test_two_runs_of_a_round_are_kept_in_the_order_of_their_calls():
    clock = FakeClock()
    timings = interleaved({"a": clock.run([1.0, 2.0, 3.0, 4.0])}, rounds=2, warmup=0, clocks={"clock": clock})
    assert timings == {"clock": {"a": [(1.0, 2.0), (3.0, 4.0)]}}


def test_noise_band_separates_equal_from_different_candidates():
    clock = FakeClock()
    same = paired(clock.run(noisy(1, 0.2, 1)), clock.run(noisy(1, 0.2, 2)), pairs=300, clock=clock)
    assert same.band[0] < same.ratio.value < same.band[1]
    assert same.ratio.low < 1 < same.ratio.high
    assert verdict(same.ratio, at_most=1.0) == "not resolved"
    slow = paired(clock.run(noisy(1.2, 0.2, 1)), clock.run(noisy(1, 0.2, 2)), pairs=300, clock=clock)
    assert slow.ratio.value == pytest.approx(1.2, abs=0.04)  # spread of the median of 300 such ratios
    assert verdict(slow.ratio, at_most=1.3) == "met"
    assert verdict(slow.ratio, at_most=1.1) == "not met"


def test_band_narrows_with_the_number_of_pairs():
    clock = FakeClock()
    few, many = (
        paired(clock.run(noisy(1, 0.2, 1)), clock.run(noisy(1, 0.2, 2)), pairs=pairs, clock=clock).band for pairs in (6, 600)
    )
    assert many[1] - many[0] < (few[1] - few[0]) / 3


def test_noise_of_either_candidate_widens_the_band():
    quiet, loud = [(1.0, 1.0)] * 20, [(1.0, 2.0), (2.0, 1.0)] * 10
    for a, b in ((quiet, loud), (loud, quiet)):
        low, high = compare(a, b).band
        assert low <= 0.75
        assert high >= 1.25


def test_typical_is_the_median_of_all_runs():
    figure = typical([(1.0, 2.0), (3.0, 100.0), (2.5, 2.0)])
    assert figure.value == 2.25
    assert figure.low < 2.25 < figure.high <= 100.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.9, 1.0, "met"), (1.0, 1.1, "not resolved"), (1.01, 1.1, "not met")],
)
def test_verdict_requires_the_whole_interval_within_the_target(low, high, expected):
    assert verdict(Figure(value=1.0, low=low, high=high), at_most=1.0) == expected


def test_verdict_line_reads_as_claim_figure_target_verdict():
    line = verdict_line("dtrain --help", Figure(value=0.1234, low=0.12, high=0.13), at_most=0.3, unit=" s")
    assert line == "dtrain --help: 0.123 s (0.120..0.130), target <= 0.300 s: met"


@pytest.mark.parametrize("pairs", [0, 7])
def test_odd_number_of_pairs_is_refused(pairs):
    with pytest.raises(ValueError, match=f"needs an even number of pairs, got pairs={pairs}"):
        paired(lambda: None, lambda: None, pairs=pairs)


def test_machine_names_what_a_figure_depends_on():
    lines = measure.machine().splitlines()
    assert lines[0].startswith("machine: ")
    assert "cores" in lines[0]
    assert "torch 2." in lines[-1]


def test_child_cpu_counts_ended_children():
    before = measure.child_cpu()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert measure.child_cpu() > before


def test_consistently_faster_second_run_does_not_move_the_band():
    draw = random.Random(0)
    rounds = [(1.04 * draw.uniform(0.95, 1.05), draw.uniform(0.95, 1.05)) for _ in range(300)]
    low, high = compare(rounds, rounds).band
    assert low < 1 < high
    assert high - 1 == pytest.approx(1 - low, abs=0.02)  # without the coin: 0 below, 0.05 above
