"""One trace of several, on one clock; and the timeline of memory."""

import gzip
import json

import pytest

from dtrain.errors import ConfigError, DataError
from dtrain.profiling.trace.diagnosis import MemorySample, memory_timeline, peak_and_median
from dtrain.profiling.trace.trace_file import merge_traces
from traces_made import DEVICE, HOST, allocation, kernel, mark, op, trace, written

HOUR_NS = 3600 * 10**9
LABELS = tuple(
    {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 0, "args": {"labels": label}}
    for pid, label in ((HOST, "CPU"), (DEVICE, "GPU 0"))
)


def two(folder):
    """Both ranks begin at 2.5 ms; the clock of rank 1 is an hour ahead, and its trace has another base."""
    arrow = [{"ph": ph, "id": 5, "cat": "fwdbwd", "name": "f", "ts": 10, "pid": HOST, "tid": 1} for ph in "sf"]
    first = trace(*LABELS, op("aten::mm", 1500, 1600), kernel("gemm", 1550, 1580), *arrow, base_ns=10**6, rank=0, steps=[])
    events = (*LABELS, op("aten::mm", 500, 600), *arrow)
    second = trace(*events, base_ns=2 * 10**6 + HOUR_NS, rank=1, offset_ns=HOUR_NS, offset_bound_ns=9, steps=[])
    return [written(folder, first, rank=0), written(folder, second, rank=1)]


def named(merged, name):
    return [(event["pid"], event["ts"]) for event in merged["traceEvents"] if event["name"] == name]


@pytest.mark.parametrize("form", ["folder", "files"])
def test_merged_trace_uses_one_clock(tmp_path, form):
    files = two(tmp_path)
    out = merge_traces(tmp_path if form == "folder" else files, tmp_path / "all.json")
    merged = json.loads(out.read_text())
    assert named(merged, "aten::mm") == [(0, 1490.0), (1000, 1490.0)]  # the first event of all is at 0: the arrow of rank 0
    assert merged["baseTimeNanoseconds"] == 1_010_000
    assert [(row["file"][:16], row["rank"], row["offset_ns"]) for row in merged["dtrain"]["merged"]] == [
        ("trace-rank-00000", 0, 0),
        ("trace-rank-00001", 1, HOUR_NS),
    ]


def test_merged_processes_are_named_by_rank_and_device(tmp_path):
    files = two(tmp_path)
    second = json.loads(files[1].read_text())
    second["traceEvents"].append(
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 700}
    )  # as torch writes it
    files[1].write_text(json.dumps(second))
    merged = json.loads(gzip.decompress(merge_traces(tmp_path, tmp_path / "all.json.gz").read_bytes()))
    titles = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert titles == {0: "rank 0", 1: "rank 0: GPU 0", 1000: "rank 1", 1001: "rank 1: other"}


def test_flow_ids_of_different_files_stay_distinct(tmp_path):
    two(tmp_path)
    merged = json.loads(merge_traces(tmp_path, tmp_path / "all.json").read_text())
    ids = [(event["pid"], event["id"]) for event in merged["traceEvents"] if "id" in event]
    assert len({number for _, number in ids}) == 2
    assert len(set(ids)) == 2


def test_merged_file_is_not_merged_again(tmp_path):
    two(tmp_path)
    merge_traces(tmp_path, tmp_path / "all.json")
    before = (tmp_path / "all.json").read_text()
    assert merge_traces(tmp_path, tmp_path / "all.json").read_text() == before


def test_merge_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"merge_traces: traces must contain trace-rank-\*\.pt\.trace\.json"):
        merge_traces(tmp_path, tmp_path / "all.json")
    with pytest.raises(ConfigError, match="merge_traces: traces must be a folder or a list of files, got an empty list"):
        merge_traces([], tmp_path / "all.json")
    (tmp_path / "trace-rank-00000-step-00000000.pt.trace.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as a trace"):
        merge_traces(tmp_path, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_memory_timeline_is_by_device_in_seconds_since_first_step(tmp_path):
    events = (mark("ProfilerStep#0", 1e6, 4e6), allocation(2e6, 10), allocation(3e6, 30), allocation(2e6, 7, kind=1, index=2))
    timeline = memory_timeline(written(tmp_path, trace(*events, rank=4)), tmp_path / "memory.json")
    assert timeline == {"cpu": [MemorySample(1.0, 10), MemorySample(2.0, 30)], "cuda:2": [MemorySample(1.0, 7)]}
    devices = {"cpu": [[1.0, 10], [2.0, 30]], "cuda:2": [[1.0, 7]]}
    assert json.loads((tmp_path / "memory.json").read_text()) == {"rank": 4, "devices": devices}


def test_trace_without_memory_has_empty_timeline(tmp_path):
    assert memory_timeline(written(tmp_path, trace(mark("ProfilerStep#0", 0, 1)))) == {}


@pytest.mark.parametrize(
    ("timeline", "expected"),
    [
        ([], (0, 0)),
        ([MemorySample(0.0, 5)], (5, 5)),
        ([MemorySample(0.0, 4), MemorySample(9.0, 80), MemorySample(10.0, 4)], (80, 4)),
    ],
    ids=["none", "one", "spike"],
)
def test_peak_and_median_are_weighted_by_time(timeline, expected):
    assert peak_and_median(timeline) == expected
