"""JSON lines: exact, marked where they are no numbers, rotated, and never a reason to stop."""

import csv
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.loggers.logger import failed_loggers
from dtrain.loggers.records import csv_file, in_memory, jsonl, read_jsonl
from dtrain.report.metric_table import MetricTable
from dtrain.run.run_files import metrics_files
from dtrain.testing import inject_fault


def metrics(path):
    return {step: {k: v for k, v in record.items() if k not in ("step", "time")} for step, record in read_jsonl(path).items()}


def test_last_record_of_a_step_overrides_earlier_ones(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    log = jsonl(path)
    log(1, {"loss": 2.5})
    log(2, {"loss": 0.1 + 0.2})
    jsonl(path)(2, {"loss": 0.25})
    assert metrics(path) == {1: {"loss": 2.5}, 2: {"loss": 0.25}}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1]["loss"] == 0.1 + 0.2, "floats survive exactly"
    assert [list(line) for line in lines] == [["step", "time", "loss"]] * 3
    assert lines[0]["time"] <= lines[2]["time"]


def test_records_of_one_step_are_merged(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path)
    log(10, {"loss": 2.5, "lr": 0.1})
    log(10, {"eval/loss": 3.0, "lr": 0.2, "note": "a"})
    assert metrics(path) == {10: {"loss": 2.5, "lr": 0.2, "eval/loss": 3.0, "note": "a"}}


def test_records_of_repeated_steps_are_dropped(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path)
    for step in range(1, 7):
        log(step, {"loss": float(step)})
    log(4, {"eval": 9.0})  # comes late, and goes back to nothing
    log(6, {"eval": 8.0})
    log = jsonl(path)  # resumed after step 2
    log(3, {"loss": 0.5})
    assert metrics(path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 0.5}}


def test_report_reads_same_values_as_read_jsonl(tmp_path):
    rng, path, theirs = random.Random(0), tmp_path / "metrics.jsonl", MetricTable()
    log, step = jsonl(path, rotate_bytes=2000), 0
    for _ in range(400):
        step = max(0, step + rng.choice((0, 0, 1, 1, 1, 1, 1, 2, 2, -4)))
        names = rng.sample(["loss", "lr", "eval", "norm"], rng.randrange(1, 4))
        log(step, {name: rng.random() for name in names})
    for file in next(iter(metrics_files(tmp_path).values())):
        theirs.add([json.loads(line) for line in file.read_text().splitlines()])
    assert theirs.went_back > 3
    ours = {}
    for step, record in metrics(path).items():
        for name, value in record.items():
            ours.setdefault(name, {})[step] = value
    assert ours == {name: dict(rows[:, [0, 2]].tolist()) for name, rows in theirs.columns().items()}


def test_partial_line_is_ended_and_skipped(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n[1]\n{"no": "step"}\n{"step": 2, "lo')
    jsonl(path)(2, {"loss": 1.0})
    assert metrics(path) == {1: {"loss": 2.0}, 2: {"loss": 1.0}}
    path.write_bytes(path.read_bytes() + b'{"step": 3, "x": "\xff')
    assert list(read_jsonl(path)) == [1, 2]


VALUES = {
    "nan": (math.nan, "nan", None),
    "inf": (math.inf, "inf", math.inf),
    "minus inf": (-math.inf, "-inf", -math.inf),
    "tensor": (torch.tensor(1.5), 1.5, 1.5),
    "bfloat16 tensor": (torch.tensor(1.5, dtype=torch.bfloat16), 1.5, 1.5),
    "tensor that is inf": (torch.tensor(math.inf), "inf", math.inf),
    "numpy": (np.float32(0.25), 0.25, 0.25),
    "numpy integer": (np.int64(7), 7, 7),
    "bool": (True, True, True),
    "text": ("a", "a", "a"),
    "none": (None, None, None),
    "list": ([1, math.inf, (2,)], [1, "inf", [2]], [1, math.inf, [2]]),
    "mapping": ({"a": {"b": -math.inf}}, {"a": {"b": "-inf"}}, {"a": {"b": -math.inf}}),
    "vector": (torch.ones(2, 3), {"unloggable": "Tensor [2, 3]"}, {"unloggable": "Tensor [2, 3]"}),
    "vector of one": (torch.ones(1), {"unloggable": "Tensor [1]"}, {"unloggable": "Tensor [1]"}),
    "without content": (torch.ones((), device="meta"), {"unloggable": "Tensor"}, {"unloggable": "Tensor"}),
    "array": (np.ones(2), {"unloggable": "ndarray [2]"}, {"unloggable": "ndarray [2]"}),
    "part of a tensor": (
        SimpleNamespace(ndim=0, placements=(), item=lambda: pytest.fail("a collective")),
        {"unloggable": "SimpleNamespace"},
        {"unloggable": "SimpleNamespace"},
    ),
    "complex": (1j, {"unloggable": "complex"}, {"unloggable": "complex"}),
    "object": (object(), {"unloggable": "object"}, {"unloggable": "object"}),
    "keys that are no texts": ({1: 2}, {"unloggable": "dict"}, {"unloggable": "dict"}),
}


@pytest.mark.parametrize(("value", "written", "read"), VALUES.values(), ids=VALUES)
def test_values_are_written_as_json_and_read_back(tmp_path, value, written, read):
    path = tmp_path / "run.jsonl"
    jsonl(path)(1, {"value": value})
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict["value"] == written
    value_read = read_jsonl(path)[1]["value"]
    assert math.isnan(value_read) if read is None and written == "nan" else value_read == read


def test_self_containing_list_is_marked_unloggable(tmp_path):
    endless = []
    endless.append(endless)
    jsonl(tmp_path / "run.jsonl")(1, {"value": endless})
    assert '{"unloggable": "list"}' in (tmp_path / "run.jsonl").read_text()


def test_metrics_named_like_record_keys_are_renamed(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path)
    log(3, {"step": 9, "time": 8})
    with pytest.warns(UserWarning, match="'metric/step' is written as 'metric/step_2'. Another metric is"):
        log(4, {"metric/step": 7})
    log(5, {"metric/step": 6})
    assert metrics(path) == {3: {"metric/step": 9, "metric/time": 8}, 4: {"metric/step_2": 7}, 5: {"metric/step_2": 6}}


def test_rotated_files_are_read_in_order(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path, rotate_bytes=120)
    for step in range(10):
        log(step, {"loss": float(step)})
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["run.jsonl", *(f"run.jsonl.{number}" for number in range(1, len(names)))]
    assert len(names) > 3
    assert all(entry.stat().st_size <= 120 for entry in tmp_path.iterdir())
    assert metrics(path) == {step: {"loss": float(step)} for step in range(10)}
    log(0, {"loss": 0.5})
    assert metrics(path) == {0: {"loss": 0.5}}, "the steps after it are to be done again"


def test_only_newest_rotated_files_are_kept(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path, rotate_bytes=1, keep_last=2)  # a line a file
    for step in range(6):
        log(step, {"loss": 1.0})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.jsonl", "run.jsonl.1", "run.jsonl.2"]
    assert list(read_jsonl(path)) == [3, 4, 5]


@pytest.mark.parametrize("call", [1, 2, 3], ids=["first", "second", "last"])
def test_interrupted_rotation_loses_no_records(tmp_path, call):
    path = tmp_path / "run.jsonl"
    log = jsonl(path, rotate_bytes=1)
    for step in range(3):
        log(step, {"loss": 1.0})
    with inject_fault("raise", at="rename", call=call), pytest.warns(UserWarning, match="no longer logged"):
        log(3, {"loss": 1.0})
    assert list(read_jsonl(path)) == [0, 1, 2]
    log = jsonl(path, rotate_bytes=1)  # the next attempt
    log(3, {"loss": 1.0})
    assert list(read_jsonl(path)) == [0, 1, 2, 3]


def test_reading_missing_file_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.jsonl"):
        read_jsonl(tmp_path / "run.jsonl")
    with pytest.raises(FileNotFoundError, match=r"run\.jsonl"):
        read_jsonl(tmp_path / "no" / "run.jsonl")


def test_unwritable_file_warns_once(tmp_path):
    (tmp_path / "run.jsonl").mkdir()
    log, before = jsonl(tmp_path / "run.jsonl"), len(failed_loggers())
    with pytest.warns(UserWarning, match=r"run\.jsonl.*. Metrics are no longer logged there"):
        log(1, {"loss": 1.0})
    log(2, {"loss": 1.0})
    (dropped,) = failed_loggers()[before:]
    assert (dropped.name, dropped.step) == (f"jsonl {tmp_path / 'run.jsonl'}", 1)
    assert "directory" in dropped.error


def test_full_disk_keeps_complete_lines_and_warns_once(tmp_path):
    path = tmp_path / "run.jsonl"
    log = jsonl(path)
    log(1, {"loss": 1.0})
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="write", error=full), pytest.warns(UserWarning, match="No space left on device"):
        log(2, {"loss": 1.0})
    log(3, {"loss": 1.0})
    assert list(read_jsonl(path)) == [1]


BAD = {
    "server": ({"path": "s3://bucket/run.jsonl"}, "path must be local, got 's3://bucket/run.jsonl'"),
    "field": ({"path": "{node}.jsonl"}, r"may have only \{rank\} and \{time\} as fields, got \{node\}"),
    "one file for all": ({"path": "run.jsonl", "ranks": "all"}, r"path must contain \{rank\} if ranks='all'"),
    "ranks": ({"path": "run.jsonl", "ranks": 1}, "ranks must be 0 or 'all', got 1"),
    "ranks with a field": ({"path": "{rank}.jsonl", "ranks": "some"}, "ranks must be 0 or 'all', got 'some'"),
    "rotate": ({"path": "run.jsonl", "rotate_bytes": 0}, "rotate_bytes must be an integer of at least 1, got 0"),
    "keep_last": (
        {"path": "run.jsonl", "rotate_bytes": 9, "keep_last": 1.5},
        "keep_last must be an integer of at least 1, got 1.5",
    ),
    "keep alone": (
        {"path": "run.jsonl", "keep_last": 3},
        "rotate_bytes must be given with keep_last, got keep_last=3 and None",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        jsonl(**arguments)


def log_everywhere(folder: str) -> list[list[int]]:
    kept = [in_memory(ranks=0), in_memory(ranks="all")]
    for log in (jsonl(f"{folder}/one.jsonl"), jsonl(f"{folder}/each-{{rank}}.jsonl"), *kept):
        log(get_dist_info().rank, {"loss": 1.0})
    return [[record["step"] for record in log.records] for log in kept]


def test_only_rank_0_logs_unless_each_rank_has_a_file_or_all_are_asked(ranks, tmp_path):
    assert ranks(2).run(log_everywhere, str(tmp_path)) == [[[0], [0]], [[], [1]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["each-0.jsonl", "each-1.jsonl", "one.jsonl"]
    assert list(read_jsonl(tmp_path / "one.jsonl")) == [0]
    assert list(read_jsonl(tmp_path / "each-1.jsonl")) == [1]


def test_time_placeholder_in_name_is_filled(tmp_path):
    jsonl(tmp_path / "run-{time}.jsonl")(1, {"loss": 1.0})
    (path,) = tmp_path.iterdir()
    assert path.name[4:-6].replace("-", "").isdecimal()


def rows(path):
    with open(path, newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "time"} for row in csv.DictReader(file)]


def test_each_record_is_a_row_with_exact_numbers(tmp_path):
    path = tmp_path / "deep" / "run.csv"
    log = csv_file(path)
    log(1, {"loss": 0.1 + 0.2, "note": 'a,"b"\nc'})
    log(2, {"loss": math.nan, "note": torch.ones(2)})
    assert path.read_text().splitlines()[0] == "step,time,loss,note"
    first, second = rows(path)
    assert (first["step"], float(first["loss"])) == ("1", 0.1 + 0.2)
    assert first["note"] == '"a,\\"b\\"\\nc"'
    assert (second["loss"], second["note"]) == ("nan", '{"unloggable": "Tensor [2]"}')
    assert len(path.read_text().splitlines()) == 3


def test_new_metric_adds_last_column(tmp_path):
    path = tmp_path / "run.csv"
    log = csv_file(path)
    log(1, {"loss": 2.0, "step": 5})
    log(2, {"accuracy": 0.5})
    log(3, {"loss": 1.0})
    assert rows(path) == [
        {"step": "1", "loss": "2.0", "metric/step": "5", "accuracy": ""},
        {"step": "2", "loss": "", "metric/step": "", "accuracy": "0.5"},
        {"step": "3", "loss": "1.0", "metric/step": "", "accuracy": ""},
    ]


def test_resumed_run_appends_after_last_complete_row(tmp_path):
    path = tmp_path / "run.csv"
    csv_file(path)(1, {"a": 1, "b": 2})
    with open(path, "a") as file:
        file.write("2,17000")
    log = csv_file(path)
    log(2, {"b": 4})
    log(3, {"a": 5})
    assert [(row["step"], row["a"], row["b"]) for row in rows(path)] == [("1", "1", "2"), ("2", "", "4"), ("3", "5", "")]


def test_failed_rewrite_keeps_complete_file(tmp_path):
    path = tmp_path / "run.csv"
    log = csv_file(path)
    log(1, {"a": 1})
    before = path.read_bytes()
    with inject_fault("raise", at="rename"), pytest.warns(UserWarning, match="no longer logged"):
        log(2, {"b": 1})
    assert path.read_bytes() == before


def test_full_disk_leaves_no_table_and_warns_once(tmp_path):
    log = csv_file(tmp_path / "run.csv")
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="write", error=full), pytest.warns(UserWarning, match=r"csv_file .*No space left on device"):
        log(1, {"loss": 1.0})
    log(2, {"loss": 1.0})
    assert not (tmp_path / "run.csv").exists()


def test_records_and_columns_hold_plain_values():
    kept = in_memory()
    kept(2, {"loss": torch.tensor(1.0), "step": 7})
    kept(1, {"loss": math.inf})
    kept(2, {"loss": 0.5, "map": torch.ones(2)})
    assert [(record["step"], record["metrics"]) for record in kept.records] == [
        (2, {"loss": 1.0, "step": 7}),
        (1, {"loss": math.inf}),
        (2, {"loss": 0.5, "map": {"unloggable": "Tensor [2]"}}),
    ]
    assert kept.column("loss") == {1: math.inf, 2: 0.5}
    assert list(kept.column("loss")) == [1, 2]
    assert kept.column("other") == {}
    assert kept.names == ["loss", "step", "map"]


def test_arguments_of_other_loggers_are_checked_alike():
    with pytest.raises(ConfigError, match="in_memory: ranks must be 0 or 'all', got 'none'"):
        in_memory(ranks="none")
    with pytest.raises(ConfigError, match="csv_file: path must be local"):
        csv_file("gs://bucket/run.csv")
