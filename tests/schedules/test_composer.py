"""Composer's form: its formulas over converted durations, and the runs for which it cannot convert them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.loader import build_loader
from dtrain.errors import ConfigError
from dtrain.schedules import composer
from dtrain.schedules.clock import Clock
from dtrain.schedules.curves import time_scale
from dtrain.schedules.durations import RunLength
from dtrain.schedules.hyperparameters import UnitSchedule, hyperparameter

RUN = RunLength(total="10ep", steps_per_epoch=20, samples_per_step=8, tokens_per_step=512)


def tau(t, warmup, end):
    return min(1.0, (t - warmup) / (end - warmup))


def _cosine(low, share):
    return low + (1 - low) * (1 + math.cos(math.pi * share)) / 2


FORMULAS = {  # of t, warmup, low, high, power: the result and, once the warm-up is over, the expected value
    "linear": (lambda w, a, b, k: composer.linear(RUN, b, a), lambda t, w, a, b, k: b + (a - b) * min(1, t / 200)),
    "cosine": (lambda w, a, b, k: composer.cosine(RUN, alpha_f=a), lambda t, w, a, b, k: _cosine(a, min(1, t / 200))),
    "polynomial": (
        lambda w, a, b, k: composer.polynomial(RUN, k, alpha_f=a),
        lambda t, w, a, b, k: a + (1 - a) * (1 - min(1, t / 200)) ** k,
    ),
    "exponential": (lambda w, a, b, k: composer.exponential(RUN, b), lambda t, w, a, b, k: b ** (t / 20)),
    "constant": (lambda w, a, b, k: composer.constant(RUN, b, "0.5dur"), lambda t, w, a, b, k: b if t < 100 else 1.0),
    "step": (lambda w, a, b, k: composer.step(RUN, "3ep", b), lambda t, w, a, b, k: b ** (t // 60)),
    "linear_with_warmup": (
        lambda w, a, b, k: composer.linear_with_warmup(RUN, w, b, a),
        lambda t, w, a, b, k: b + (a - b) * tau(t, w, 200),
    ),
    "cosine_with_warmup": (
        lambda w, a, b, k: composer.cosine_with_warmup(RUN, w, alpha_f=a),
        lambda t, w, a, b, k: _cosine(a, tau(t, w, 200)),
    ),
    "polynomial_with_warmup": (
        lambda w, a, b, k: composer.polynomial_with_warmup(RUN, w, k, alpha_f=a),
        lambda t, w, a, b, k: a + (1 - a) * (1 - tau(t, w, 200)) ** k,
    ),
    "constant_with_warmup": (
        lambda w, a, b, k: composer.constant_with_warmup(RUN, w, b),
        lambda t, w, a, b, k: b if t < 200 else 1.0,
    ),
    "multi_step_with_warmup": (
        lambda w, a, b, k: composer.multi_step_with_warmup(RUN, w, ["8ep", "0.9dur"], b),
        lambda t, w, a, b, k: b ** ((t >= 160) + (t >= 180)),
    ),
}


def test_time_scale_matches_scale_schedule_ratio_of_composer():
    """Its arithmetic: lengths in ep and ba times the ratio, shares of the scaled run, the warm-up scaled or as it is."""
    ratio, scaled = 0.5, RunLength(total="5ep", steps_per_epoch=20)
    with_it = time_scale(composer.multi_step_with_warmup(RUN, "1ep", ["4ep", "0.8dur"]), ratio)
    kept = composer.multi_step_with_warmup(scaled, "1ep", ["2ep", "0.8dur"])
    cosine = composer.cosine_with_warmup(scaled, "1ep", "0.9dur", alpha_f=0.1)
    for t in range(100):
        assert with_it(t) == pytest.approx(t / 10 if t < 10 else 0.1 ** ((t >= 40) + (t >= 80)))
        assert kept(t) == pytest.approx(t / 20 if t < 20 else 0.1 ** ((t >= 40) + (t >= 80)))
        assert cosine(t) == pytest.approx(t / 20 if t < 20 else _cosine(0.1, tau(t, 20, 90)))


RISES_TO_ALPHA = ("linear_with_warmup", "constant_with_warmup")  # the others rise to 1


@pytest.mark.parametrize("name", FORMULAS)
@given(t=st.integers(0, 250), w=st.integers(1, 150), a=st.floats(0.01, 1), b=st.floats(0.01, 1), k=st.floats(0.5, 4))
@settings(max_examples=25, deadline=None)
def test_schedules_match_the_documented_formulas(name, t, w, a, b, k):
    make, formula = FORMULAS[name]
    expected = formula(max(t, w) if name.endswith("warmup") else t, w, a, b, k)
    if name.endswith("warmup") and t < w:
        expected = (b if name in RISES_TO_ALPHA else 1.0) * t / w
    assert make(w, a, b, k)(t) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_composer_warmup_of_zero_steps_changes_nothing_in_any_unit():
    assert composer.linear_with_warmup(RunLength(total="1e6tok"), "0ba").unit == "tok"
    assert composer.linear_with_warmup(RunLength(total="100ba"), "0tok")(50) == 0.5
    assert [composer.linear_with_warmup(RUN, "0ba")(t) for t in (0, 100)] == [1.0, 0.5]


SAME = {
    "epochs": ("10ep", "1ep"),
    "steps": ("200ba", "20ba"),
    "a plain number": (200, 20),
    "shares": ("1dur", "0.1dur"),
    "samples and steps": ("1600sp", "20ba"),
    "tokens and epochs": ("102_400tok", "1ep"),
    "tokens and samples": ("102_400tok", "160sp"),
}


@pytest.mark.parametrize(("t_max", "t_warmup"), SAME.values(), ids=SAME)
def test_mixed_units_are_converted_to_steps(t_max, t_warmup):
    schedule = composer.cosine_with_warmup(RUN, t_warmup, t_max, 0.1)
    assert not isinstance(schedule, UnitSchedule)
    assert [schedule(t) for t in range(220)] == [composer.cosine_with_warmup(RUN, 20, 200, 0.1)(t) for t in range(220)]


COUNTED = {
    "tok": (RunLength(total="1e6tok"), "1e5tok", "1dur"),
    "sp": (RunLength(total="1_000_000sp"), "0.1dur", "1_000_000sp"),
    "sec": (RunLength(total="10h"), "1h", "1dur"),
}


@pytest.mark.parametrize("unit", COUNTED)
def test_composer_uses_the_common_unit_of_all_lengths(unit):
    run, t_warmup, t_max = COUNTED[unit]
    schedule = composer.linear_with_warmup(run, t_warmup, t_max=t_max)
    assert isinstance(schedule, UnitSchedule)
    assert schedule.unit == unit
    whole = run.total.value
    field = {"tok": "tokens", "sp": "samples", "sec": "seconds"}[unit]
    clock = Clock(step=3, **{field: whole * 55 // 100})
    assert hyperparameter(schedule, "x")(clock) == pytest.approx(0.5)


def test_composer_schedules_accept_the_run_length_of_a_loader():
    loader = build_loader(list(range(12)), global_batch_size=4, seed=0)
    assert [composer.linear(loader.run_length("2ep"))(t) for t in (0, 3, 6)] == [1.0, 0.5, 0.0]
    assert hyperparameter(composer.linear(loader.run_length("24sp")), "x")(Clock(step=1, samples=6)) == 0.75


def test_composer_does_not_round_fractional_steps():
    run = RunLength(total="3ba")
    assert composer.step(run, "0.1dur", 0.5)(3) == 0.5**10
    assert composer.linear(RunLength(total="9ba"), t_max="0.5dur", alpha_f=0.1)(4) == pytest.approx(1 - 0.9 * 4 / 4.5)


def test_decay_may_end_before_the_run_if_intended():
    assert composer.linear(RUN, alpha_f=0.1, t_max="5ep")(150) == 0.1
    assert composer.linear(RUN, 0.0, 1.0, t_max="5ep")(150) == 1.0
    assert composer.linear(RunLength(steps_per_epoch=20), t_max="5ep")(150) == 0.0
    assert composer.cosine(RunLength(total="1h", steps_per_epoch=20), t_max="5ep")(100) == 0.0  # the units cannot be compared


def test_decay_may_end_after_the_run():
    assert composer.cosine(RUN, t_max="20ep")(200) == pytest.approx(0.5)


SHORT = {
    "linear": lambda: composer.linear(RUN, t_max="9ep"),
    "cosine": lambda: composer.cosine(RUN, t_max="199ba"),
    "polynomial": lambda: composer.polynomial(RUN, 2.0, t_max="0.99dur"),
    "linear_with_warmup": lambda: composer.linear_with_warmup(RUN, "1ep", t_max="102_399tok"),
    "cosine_with_warmup": lambda: composer.cosine_with_warmup(RUN, "1ep", t_max="9ep"),
    "polynomial_with_warmup": lambda: composer.polynomial_with_warmup(RUN, "1ep", t_max="9ep"),
}


@pytest.mark.parametrize("name", SHORT)
def test_composer_refuses_a_run_that_continues_at_a_factor_of_zero(name):
    with pytest.raises(
        ConfigError,
        match=rf"composer.{name}: t_max must not end before the run of 10ep with a factor of 0, got .*\. Give t_max='1dur', or",
    ):
        SHORT[name]()


REFUSED = {
    "no run": (
        lambda: composer.cosine("10ep"),
        r"composer.cosine: run_length must be a dt\.schedules\.RunLength, got '10ep'\. Give loader\.run_len",
    ),
    "no total": (
        lambda: composer.cosine(RunLength(steps_per_epoch=5)),
        r"composer.cosine: t_max=1.0dur: 1.0dur is a fraction of the run, whose length is not known\. Give RunLength",
    ),
    "no steps per epoch": (
        lambda: composer.cosine(RunLength(total="3ep")),
        "composer.cosine: t_max=1.0dur: duration: .* in steps needs steps_per_epoch. Give RunLength",
    ),
    "no tokens per step": (
        lambda: composer.cosine_with_warmup(RunLength(total="100ba"), "1e6tok"),
        r"t_warmup=1000000tok, t_max=1.0dur: .*needs tokens_per_step\. Give .* Or give all durations in one unit\.",
    ),
    "seconds and steps": (
        lambda: composer.cosine_with_warmup(RunLength(total="1h"), "10ba"),
        r"cannot be converted to steps, .* Or give all durations in one unit\.",
    ),
    "no duration": (lambda: composer.exponential(RUN, 0.5, "1fortnight"), "duration: unknown unit 'fortnight'"),
    "no length": (lambda: composer.step(RUN, 0), "duration: needs at least 1 ba, got 0"),
    "a long warm-up": (
        lambda: composer.linear_with_warmup(RUN, "10ep"),
        r"t_warmup must be before t_max, got t_warmup='10ep' and t_max='1dur' \(200 and 200 ba\)\. Shorten",
    ),
    "a long warm-up, constant": (
        lambda: composer.constant_with_warmup(RUN, "11ep"),
        "composer.constant_with_warmup: t_warmup must",
    ),
    "no milestones": (lambda: composer.multi_step(RUN, []), "multi_step: milestones must not be empty, got none"),
    "milestones in disorder": (
        lambda: composer.multi_step(RUN, ["2ep", "10ba"]),
        r"increasing numbers of at least 0, got \[40, 10\]",
    ),
    "a milestone in the warm-up": (
        lambda: composer.multi_step_with_warmup(RUN, "2ep", ["2ep", "5ep"]),
        r"before the first milestone, got t_warmup=2ep and milestones\[0\]=2ep\. Remove that milestone or shorten the warm-up",
    ),
    "growth": (
        lambda: composer.step(RUN, "1ep", 2.0),
        r"composer.step: gamma must be a finite number above 0 and at most 1, got 2\.0\. For a growth",
    ),
    "alpha_f": (lambda: composer.cosine(RUN, alpha_f="0"), "composer.cosine: alpha_f must be a finite number, got '0'"),
    "alpha_f of restarts": (
        lambda: composer.cosine_warm_restarts(RUN, "1ep", alpha_f=math.inf),
        "composer.cosine_warm_restarts: alpha_f must be a finite number, got inf",
    ),
    "growth, continuously": (
        lambda: composer.exponential(RUN, 2.0),
        r"composer.exponential: gamma must be a finite number above 0 and at most 1, got 2\.0\. For a growth",
    ),
    "one milestone alone": (
        lambda: composer.multi_step(RUN, "1ep"),
        r"composer.multi_step: milestones must be a list, got milestones='1ep'\. Write \['1ep'\] for a single value",
    ),
    "t_mult": (
        lambda: composer.cosine_warm_restarts(RUN, "1ep", 0.5),
        "composer.cosine_warm_restarts: t_mult must be a finite number at least 1, got 0.5",
    ),
    "power": (lambda: composer.polynomial(RUN, 0), "polynomial: power must be a finite number above 0, got 0"),
    "alpha": (lambda: composer.constant(RUN, math.nan), "composer.constant: alpha must be a finite number, got nan"),
}


@pytest.mark.parametrize(("make", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        make()
    assert "\n" not in str(error.value)
