"""The phases of steps, by hand and against torch's own schedule."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerAction

from dtrain.errors import ConfigError
from dtrain.profiling.driver import schedule

TORCH = {
    "skip": ProfilerAction.NONE,
    "wait": ProfilerAction.NONE,
    "warmup": ProfilerAction.WARMUP,
    "active": ProfilerAction.RECORD,
    "save": ProfilerAction.RECORD_AND_SAVE,
}


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        pytest.param({"skip_first": 1, "active": 2}, "skip warmup active save skip skip", id="once"),
        pytest.param({"wait": 1, "warmup": 2, "active": 1}, "wait warmup warmup save skip", id="one_active"),
        pytest.param({"warmup": 0, "active": 2, "repeat": 2}, "active save active save skip", id="no_warmup"),
        pytest.param({"wait": 1, "active": 1, "repeat": 0}, "wait warmup save wait warmup save wait", id="for_ever"),
        pytest.param({}, "warmup active active active save skip", id="defaults"),
    ],
)
def test_phases_match_expected_sequence(options, phases):
    phase = schedule(**options)
    assert [phase(index) for index in range(len(phases.split()))] == phases.split()


def test_phases_match_torch_schedule():
    grid = list(itertools.product((0, 1, 3), (0, 2), (1, 2), (1, 3), (0, 1, 2)))
    for skip_first, wait, warmup, active, repeat in grid:
        options = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        ours, theirs = schedule(**options), torch.profiler.schedule(**options)
        assert [TORCH[ours(index)] for index in range(25)] == [theirs(index) for index in range(25)], options
    assert len(grid) == 72


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_first": -1}, r"schedule: skip_first must be an integer of at least 0, got -1"),
        ({"wait": 1.0}, r"schedule: wait must be an integer of at least 0, got 1\.0"),
        ({"warmup": True}, r"schedule: warmup must be an integer of at least 0, got True"),
        ({"active": 0}, r"schedule: active must be an integer of at least 1, got 0"),
        ({"repeat": None}, r"schedule: repeat must be an integer of at least 0, got None"),
    ],
    ids=["skip_first", "wait", "warmup", "active", "repeat"],
)
def test_invalid_phase_lengths_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        schedule(**options)
