"""Every schedule keeps every contract; and for every contract there is a broken schedule that it must detect."""

import importlib
import inspect
import math
import pkgutil
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dtrain as dt
import dtrain.schedules
from battery.run import FIRST, STEPS, begin, train
from battery.schedules import BROKEN, ROWS, row
from dtrain.schedules.curves import plot, to_lambda_lr

RESUMED = ("warmup-cosine", "cosine_restarts", "warmup_stable_decay", "composer.linear_with_warmup")  # in every run
NEAR = 1e-7  # of a step; a change over it beyond the schedule's steepness is a jump


def check_pure(name: str, times: list[float]) -> None:
    """Equal times have equal values, in any order, asked again, and by a schedule that is made anew."""
    schedule = row(name).make()
    first = {t: schedule(t) for t in times}
    shuffled = random.Random(0).sample(times, len(times))
    assert [schedule(t) for t in shuffled] == [first[t] for t in shuffled], f"pure: {name}"
    fresh = row(name).make()
    assert [fresh(t) for t in reversed(times)] == [first[t] for t in reversed(times)], f"pure: {name}"


def check_continuous(name: str) -> None:
    """No part of a step changes it by more than its steepness, nothing jumps where two formulas meet, and a jump is on time."""
    case, schedule = row(name), row(name).make()

    def most(ahead: float) -> float:
        return case.steepest * ahead**case.root * (1 + 1e-9) + 1e-15

    for t in (eighth / 8 for eighth in range(8 * 30)):
        for ahead in (1 / 8, 1):
            if not any(t < jump <= t + ahead for jump in case.jumps):
                change = abs(schedule(t + ahead) - schedule(t))
                assert change <= most(ahead), f"continuous: {name}: from {t} to {t + ahead}"
    for join in case.joins:
        for beside in (join - NEAR, join + NEAR):
            assert abs(schedule(beside) - schedule(join)) <= 2 * most(NEAR), f"continuous: {name}: at {join}"
    for jump in case.jumps:
        assert abs(schedule(jump + NEAR) - schedule(jump)) <= 2 * most(NEAR), f"continuous: {name}: jumps behind {jump}"
        assert abs(schedule(jump - NEAR) - schedule(jump)) > 2 * most(NEAR), f"continuous: {name}: no jump at {jump}"


def check_values(name: str) -> None:
    """The values worked out by hand."""
    schedule = row(name).make()
    for t, value in row(name).values.items():
        assert schedule(t) == pytest.approx(value, rel=1e-12, abs=1e-15), f"values: {name}: at {t}"


def check_end(name: str) -> None:
    """Require finite values everywhere, and a constant value behind the end, if the schedule has an end."""
    schedule, last = row(name).make(), max(row(name).values)
    assert all(math.isfinite(schedule(t)) for t in (-1, 0, 0.5, 1e3, 1e15)), f"end: {name}: not finite"
    if row(name).ends:
        assert {schedule(last + more) for more in (0, 0.5, 1, 100, 1e12)} == {schedule(last)}, (
            f"end: {name}: moves behind {last}"
        )


def check_resume(name: str, root: str) -> None:
    """An interrupted run has the rates of an uninterrupted run: those of the step about to run."""
    expected = [0.1 * row(name).make()(t) for t in range(STEPS)]
    state, first = train(*begin([dt.transforms.scale_lr(row(name).make())]), FIRST)
    dt.save_sharded(root, state)
    step, state = begin([dt.transforms.scale_lr(row(name).make())])
    _, second = train(step, dt.load_sharded(root, state), STEPS)
    assert [numbers["lr"][0] for numbers in first + second] == expected, f"resume: {name}"


each_row = pytest.mark.parametrize("name", ROWS)


def broken(contract: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, (breaks, _) in BROKEN.items() if breaks == contract])


def makers() -> dict[str, Callable[..., Any]]:
    """Return every public function of the package that makes a schedule, those in Composer's form as ``composer.name``."""
    functions = {}
    for module in pkgutil.walk_packages(dtrain.schedules.__path__, "dtrain.schedules."):
        prefix = "composer." if module.name.startswith("dtrain.schedules.composer.") else ""
        for name, function in vars(importlib.import_module(module.name)).items():
            if inspect.isfunction(function) and function.__module__ == module.name and not name.startswith("_"):
                functions[prefix + name] = function
    schedules = {n: f for n, f in functions.items() if inspect.signature(f).return_annotation in ("Schedule", "UnitSchedule")}
    return {name: function for name, function in schedules.items() if name not in ("attach_unit", "with_unit")}


def test_every_public_schedule_factory_has_a_row():
    assert set(makers()) >= {"linear", "cosine", "composer.cosine"}
    assert set(makers()) == {case.of for case in ROWS.values()} - {""}


def test_every_schedule_docstring_has_formula_source_and_example():
    lacking = [
        f"{name}: {section}"
        for name, function in {**makers(), "plot": plot, "to_lambda_lr": to_lambda_lr}.items()
        for section in ("Formula", "Raises:", "Source: ", "Example:\n        >>> ")
        if section not in (function.__doc__ or "")
    ]
    assert lacking == []


@each_row
@given(times=st.lists(st.floats(-10, 1e6) | st.integers(0, 40), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_schedules_are_pure(name, times):
    check_pure(name, times)


@each_row
def test_schedules_are_continuous(name):
    check_continuous(name)


@each_row
def test_schedules_match_reference_values(name):
    check_values(name)


@each_row
def test_schedules_are_finite_and_stay_at_their_end(name):
    check_end(name)


@pytest.mark.parametrize("name", [name if name in RESUMED else pytest.param(name, marks=pytest.mark.slow) for name in ROWS])
def test_schedules_are_equal_after_a_resume(name, tmp_path):
    check_resume(name, str(tmp_path))


@broken("pure")
def test_purity_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"pure: {name}"):
        check_pure(name, [0, 1])


@broken("continuous")
def test_continuity_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"continuous: {name}"):
        check_continuous(name)


@broken("values")
def test_value_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"values: {name}"):
        check_values(name)


@broken("end")
def test_end_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"end: {name}: (not finite|moves behind 8)"):
        check_end(name)


@broken("resume")
def test_resume_contract_detects_violations(name, tmp_path):
    with pytest.raises(AssertionError, match=f"resume: {name}"):
        check_resume(name, str(tmp_path))


def test_every_contract_has_a_violating_case():
    assert {contract for contract, _ in BROKEN.values()} == {"pure", "continuous", "values", "end", "resume"}
