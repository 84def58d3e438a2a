"""The table of the benchmark of memory options."""

import pytest

from memory_options import OPTIONS, check_same, table

MIB = 2**20
FOUND = {
    "none": {"peak": 100 * MIB, "live": 40 * MIB, "norm": 1.0},
    "full": {"peak": 25 * MIB, "live": 20.5 * MIB, "norm": 1.0 + 1e-7},
}


def test_rows_show_peaks_relative_to_the_first_row():
    rows = [row.split() for row in table(FOUND).splitlines()[1:]]
    assert rows == [["none", "100.0", "1.00", "40.0"], ["full", "25.0", "0.25", "20.5"]]


def test_options_with_different_gradients_are_refused():
    check_same(FOUND)
    with pytest.raises(SystemExit, match="the gradients differ"):
        check_same({**FOUND, "wrong": {"peak": 1.0, "live": 1.0, "norm": 1.1}})


def test_gpu_only_options_are_marked():
    assert {name for name, option in OPTIONS.items() if option.gpu} == {name for name in OPTIONS if "offloaded" in name}
