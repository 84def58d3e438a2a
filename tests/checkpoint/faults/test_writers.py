"""Two processes in one folder, their file operations interleaved."""

import pytest

from checkpoint.faults import writers
from checkpoint.faults.writers import PAIRS


@pytest.mark.costly
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_concurrent_processes_leave_only_saved_states(collect, count):
    tally = collect(writers.draw, count=count, seed=count)
    assert tally.wrong == []
    assert set(tally.kinds) == set(PAIRS)
    came = {came for fault in tally.kinds.values() for came in fault}
    assert {"one was refused", "the reader got one of the states"} <= came


def test_judge_detects_step_not_saved_by_any_writer():
    saved = {"saved": [[1, "a"]], "error": ""}
    judged = [writers._judge([], {"one": saved}, {"wrong": "", "steps": after})[1] for after in ([[1, "a"]], [[1, "b"]], [])]
    assert [len(problems) > 0 for problems in judged] == [False, True, True]


@pytest.mark.parametrize(
    ("reader", "problems"),
    [
        pytest.param({"error": "", "step": 1, "digest": "a"}, 0, id="one-of-the-states"),
        pytest.param({"error": "", "step": 1, "digest": "b"}, 1, id="torn"),
        pytest.param({"error": "CheckpointError: gone", "same": True}, 0, id="refused"),
        pytest.param({"error": "CheckpointError: gone", "same": False}, 1, id="half-loaded"),
        pytest.param({"error": "KeyError: gone", "same": True}, 1, id="unclean"),
    ],
)
def test_judge_detects_reader_with_wrong_state(reader, problems):
    writer = {"saved": [[1, "a"]], "error": ""}
    came = writers._judge([], {"writer": writer, "reader": reader}, {"wrong": "", "steps": [[1, "a"]]})
    assert len(came[1]) == problems
