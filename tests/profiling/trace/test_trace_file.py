"""Trace files: the events that are read, and the files that are refused."""

import gzip
import json

import pytest

from dtrain.errors import ConfigError, DataError
from dtrain.profiling.trace.trace_file import find_traces, parse_trace, read_trace
from traces_made import mark, op, trace, written


def test_marked_steps_are_read_with_their_metadata():
    content = trace(
        mark("ProfilerStep#7", 0, 100),
        mark("dtrain.step", 40, 90),
        mark("ProfilerStep#8", 100, 150),
        mark("ProfilerStep#9", 150, 160),
        rank=3,
        steps=[
            {"step": 7, "done": True, "spans": {"data": 0.5}},
            {"step": 8, "done": True},
            {"step": 9, "done": False},
        ],
    )
    read = parse_trace(content, "x.json")
    assert read.rank == 3
    assert [(s.number, s.start, s.end, s.step_fn_us, s.spans) for s in read.steps] == [
        (7, 0, 100, 50, {"data": 0.5}),
        (8, 100, 150, None, {}),
    ]


def test_incomplete_step_is_used_when_it_is_the_only_one():
    read = parse_trace(trace(mark("ProfilerStep#9", 0, 10), rank=0, steps=[{"step": 9, "done": False}]), "x.json")
    assert [step.number for step in read.steps] == [9]


def test_steps_with_equal_numbers_keep_their_own_metadata():
    noted = [{"step": 5, "done": done, "spans": {"data": data}} for done, data in ((True, 0.1), (True, 0.2), (False, 0.4))]
    marks = [mark("ProfilerStep#5", start, start + 10) for start in (0, 10, 20)]
    read = parse_trace(trace(*marks, rank=0, steps=noted), "x.json")
    assert [(step.number, step.start, step.spans["data"]) for step in read.steps] == [(5, 0, 0.1), (5, 10, 0.2)]


def test_trace_without_step_marks_is_one_step():
    read = parse_trace(trace(op("aten::mm", 5, 20), op("aten::add", 8, 9)), "x.json")
    assert [(step.number, step.start, step.end) for step in read.steps] == [(0, 5, 20)]
    assert parse_trace(trace(), "x.json").steps == ()


@pytest.mark.parametrize(
    ("more", "source", "rank"),
    [
        ({"dtrain": {"rank": 2}, "distributedInfo": {"rank": 5}}, "trace-rank-00009-step-00000000.pt.trace.json", 2),
        ({"distributedInfo": {"rank": 5}}, "trace-rank-00009-step-00000000.pt.trace.json", 5),
        ({}, "trace-rank-00009-step-00000000.pt.trace.json.gz", 9),
        ({}, "other.json", 0),
    ],
    ids=["ours", "torchs", "name", "none"],
)
def test_rank_is_read_from_metadata_or_file_name(more, source, rank):
    assert parse_trace({**trace(), **more}, source).rank == rank


def test_trace_files_are_sorted_by_rank_and_step(tmp_path):
    for rank, step in ((1, 0), (0, 20), (0, 3)):
        written(tmp_path, trace(), rank=rank, step=step)
    for name in (
        ".unfinished-trace-rank-00000-step-00000001.pt.trace.json",
        "merged.json",
        "trace-rank-00000-step-00000009.txt",
    ):
        (tmp_path / name).write_text("{}")
    names = [path.name.removeprefix("trace-").removesuffix(".pt.trace.json") for path in find_traces(tmp_path)]
    assert names == ["rank-00000-step-00000003", "rank-00000-step-00000020", "rank-00001-step-00000000"]
    assert find_traces(tmp_path / "nothing") == []


def test_compressed_trace_equals_uncompressed(tmp_path):
    content = trace(mark("ProfilerStep#1", 0, 5))
    path = tmp_path / "trace-rank-00000-step-00000001.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert read_trace(path).steps == read_trace(written(tmp_path, content)).steps


@pytest.mark.parametrize(
    "data",
    [b"", b'{"traceEvents": [', b"[]", b"{}", b'{"traceEvents": 3}', b'{"traceEvents": [3]}', b"\xff\xfe"],
    ids=["empty", "cut", "list", "no_events", "number", "no_object", "binary"],
)
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_damaged_file_is_refused(tmp_path, data, suffix):
    (tmp_path / f"t.{suffix}").write_bytes(data)
    with pytest.raises(DataError, match=r"trace: .*t\.json.* cannot be read as a trace of torch's profiler: "):
        read_trace(tmp_path / f"t.{suffix}")


@pytest.mark.parametrize(
    "content",
    [
        trace({"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}),
        trace({"ph": "X", "cat": "cpu_op", "name": "a", "ts": "x", "dur": 1}),
        trace({"name": "[memory]", "ts": 1}),
        trace(rank=0, steps=[{}]),
        trace(rank=0, steps=3),
    ],
    ids=["no_end", "no_time", "no_bytes", "no_step", "no_steps"],
)
def test_malformed_event_is_refused(content):
    with pytest.raises(DataError, match=r"trace: t\.json has an event or metadata of another form"):
        parse_trace(content, "t.json")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"read_trace: path must be an existing file, got .*none\.json"):
        read_trace(tmp_path / "none.json")
