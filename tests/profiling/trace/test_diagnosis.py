"""The rules on shares by hand, and the verdict on a folder."""

import json

import pytest

from dtrain.errors import ConfigError
from dtrain.profiling.trace.diagnosis import (
    DeviceMemoryUse,
    KernelBreakdown,
    check_communication,
    check_data_wait,
    check_host_bound,
    check_memory_spike,
    check_stragglers,
    diagnose,
)
from traces_made import allocation, mark, op, trace, written

MIB = 2**20


def share(rank: int = 0, *, on_device: bool = False, **seconds: float) -> KernelBreakdown:
    """Of one step of one second, on a CPU that computes all the time."""
    none = {"compute": 1.0, "communication": 0.0, "exposed_communication": 0.0, "copies": 0.0, "data_wait": 0.0, "idle": 0.0}
    return KernelBreakdown(
        rank=rank, steps=1, seconds=1.0, on_device=on_device, data_wait_source="spans", **{**none, **seconds}
    )


@pytest.mark.parametrize(
    ("rule", "shares", "expected"),
    [
        (check_data_wait, [share(), share(1, data_wait=0.11)], (1, 0.11)),
        (check_data_wait, [share(), share(1, data_wait=0.1)], None),
        (check_data_wait, [share(on_device=True, data_wait=0.5, idle=0.05)], None),  # the GPU works meanwhile
        (check_data_wait, [share(on_device=True, data_wait=0.5, idle=0.2)], (0, 0.2)),
        (check_communication, [share(exposed_communication=0.3), share(1, exposed_communication=0.25)], (1, 0.25)),
        (
            check_communication,
            [share(exposed_communication=0.9), share(1, exposed_communication=0.1)],
            None,
        ),  # rank 0 waits for rank 1
        (check_communication, [share(communication=0.9, exposed_communication=0.2)], None),  # the rest is hidden
        (check_communication, [share()], None),
        (check_host_bound, [share(on_device=True, idle=0.3, compute=0.7)], (0, 0.3)),
        (check_host_bound, [share(on_device=True, idle=0.3, data_wait=0.15, compute=0.7)], None),
        (check_host_bound, [share(idle=0.9)], None),  # of a CPU nothing is known
        (check_stragglers, [share(compute=0.5), share(1, compute=0.5), share(2, compute=0.7)], (2, 1.4)),
        (check_stragglers, [share(compute=0.5), share(1, compute=0.6)], None),
        (check_stragglers, [share(compute=0.5)], None),
        (check_stragglers, [share(compute=0.02), share(1, compute=0.06)], None),  # no rank waits long for it
        (check_stragglers, [share(compute=0.0), share(1, compute=0.0)], None),
    ],
)
def test_rule_fires_above_its_limit(rule, shares, expected):
    finding = rule(shares)
    if expected is None:
        assert finding is None
        return
    rank, value = expected
    assert f"check_{finding.rule}" == rule.__name__
    assert finding.numbers["rank"] == rank
    assert finding.numbers.get("share", finding.numbers.get("times")) == pytest.approx(value)


@pytest.mark.parametrize(
    ("peak", "median", "fires"),
    [(300 * MIB, 100 * MIB, True), (200 * MIB, 100 * MIB, False), (3 * MIB, MIB, False), (100 * MIB, -MIB, True)],
    ids=["spike", "at_the_limit", "small", "below_zero"],
)
def test_memory_spike_is_reported_for_large_peak(peak, median, fires):
    finding = check_memory_spike([DeviceMemoryUse(rank=2, device="cuda:0", peak=peak, median=median)])
    assert (finding is not None) == fires
    if finding is not None:
        assert finding.numbers["rank"] == 2
        assert finding.text.startswith(f"memory spike: cuda:0 of rank 2 holds {peak // MIB:,} MiB at its peak")


def rank_trace(folder, rank: int, *, spans=None, events=(), step: int = 0):
    marks = (mark(f"ProfilerStep#{step}", 0, 1e6), mark("dtrain.step", 5e5, 1e6), op("aten::mm", 5e5, 1e6))
    noted = [{"step": step, "done": True, "spans": spans or {"data": 0.01}}]
    return written(folder, trace(*marks, *events, rank=rank, steps=noted), rank=rank, step=step)


def test_diagnosis_lists_findings_with_numbers(tmp_path):
    for rank in (0, 1):
        rank_trace(tmp_path, rank, spans={"data": (0.25, 0.5)[rank]})
    diagnosis = diagnose(tmp_path)
    assert str(diagnosis).splitlines() == [
        "data wait: rank 1 spends 50% of a step waiting for data (500.0 ms of 1000.0 ms); use more loader workers, or less "
        "work in them",
        "straggler: rank 1 works 1.33 times as long in a step as the other ranks (1000.0 ms against 750.0 ms), which wait "
        "for rank 1",
    ]
    plain = json.loads(json.dumps(diagnosis.to_json()))
    assert plain["text"] == str(diagnosis)
    assert plain["findings"][0]["numbers"] == {"rank": 1, "share": 0.5, "limit": 0.1, "seconds_per_step": 0.5}
    assert [row["rank"] for row in plain["shares"]] == [0, 1]
    assert plain["shares"][0]["top"] == [["aten::mm", 0.5, 1]]


def test_balanced_trace_has_no_findings(tmp_path):
    rank_trace(tmp_path, 0)
    diagnosis = diagnose(tmp_path)
    assert (str(diagnosis), diagnosis.findings) == ("nothing stands out", ())


def test_windows_of_one_rank_are_combined(tmp_path):
    for step in (0, 9):
        rank_trace(tmp_path, 0, step=step)
    assert [(share.rank, share.steps, share.seconds) for share in diagnose(tmp_path).shares] == [(0, 2, 2.0)]


def test_memory_of_each_rank_is_checked(tmp_path):
    rank_trace(tmp_path, 0, events=[allocation(0, 10), allocation(9e5, 500 * MIB), allocation(1e6, 20)])
    diagnosis = diagnose(tmp_path)
    assert [finding.rule for finding in diagnosis.findings] == ["memory_spike"]
    assert diagnosis.memory == (DeviceMemoryUse(rank=0, device="cpu", peak=500 * MIB, median=10),)


def test_unusable_traces_are_named_and_others_analyzed(tmp_path):
    rank_trace(tmp_path, 0)
    written(tmp_path, trace(), rank=1)
    (tmp_path / "trace-rank-00002-step-00000000.pt.trace.json").write_text('{"traceEvents": [')
    diagnosis = diagnose(tmp_path)
    assert [share.rank for share in diagnosis.shares] == [0]
    empty, damaged = sorted(diagnosis.problems, key=len)
    assert empty == "trace-rank-00001-step-00000000.pt.trace.json: nothing was recorded in it"
    assert "trace-rank-00002-step-00000000.pt.trace.json cannot be read as a trace" in damaged
    assert "nothing was recorded" in str(diagnosis)


def test_only_damaged_traces_give_no_findings(tmp_path):
    (tmp_path / "trace-rank-00000-step-00000000.pt.trace.json").write_text("")
    diagnosis = diagnose(tmp_path)
    assert (diagnosis.findings, diagnosis.shares, len(diagnosis.problems)) == ((), (), 1)


def test_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"diagnose: path must contain trace-rank-\*\.pt\.trace\.json"):
        diagnose(tmp_path)
