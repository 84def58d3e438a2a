"""The cells of the truth table's benchmark."""

from __future__ import annotations

import pytest

from table.running import Seen
from truth_table import describe

TRACEBACK = "Traceback (most recent call last):\n  File 's.py', line 1\nValueError\none\ntwo\n"


@pytest.mark.parametrize(
    ("code", "survivors", "left", "cell"),
    [
        pytest.param(3, {}, [], "3, 2, 0, 1.5 s", id="ended"),
        pytest.param(1, {7: "python", 8: "sleep"}, ["a"], "1, 2, 2, 1.5 s, 1 temporary file", id="left-behind"),
        pytest.param(None, {7: "python"}, [], "did not end in 45 s", id="did-not-end"),
    ],
)
def test_cell_shows_exit_code_lines_survivors_and_seconds(code, survivors, left, cell):
    seen = Seen(code=code, err=TRACEBACK, script="s.py", survivors=survivors, seconds=1.54, left=left)
    assert describe(seen, cap_s=45) == cell
