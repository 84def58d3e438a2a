"""Which steps go: a pure function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint.retention import plan_retention
from dtrain.errors import ConfigError


@given(st.lists(st.integers(0, 50), unique=True), st.integers(1, 5), st.sets(st.integers(0, 50)))
def test_the_last_ones_and_the_protected_ones_stay(steps, keep_last, protected):
    removed = plan_retention(steps, keep_last, protected)
    kept = [step for step in steps if step not in removed]
    assert kept == [step for at, step in enumerate(steps) if at >= len(steps) - keep_last or step in protected]
    assert set(removed) <= set(steps)
    assert not steps or kept, "never all"


def test_the_order_of_commits_counts_and_not_the_step():
    assert plan_retention([50, 75, 100, 60], 1, {50}) == [75, 100]


def test_none_keeps_all():
    assert plan_retention([1, 2, 3], None) == []


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.0, "3"])
def test_keeping_none_is_refused(keep_last):
    with pytest.raises(ConfigError, match="keep_last must be a whole number of at least 1"):
        plan_retention([1], keep_last)
