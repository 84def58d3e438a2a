"""The table: one header, whatever comes later and however the last run ended."""

import csv
import math

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.loggers.records import csv_file
from dtrain.testing import inject_fault


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


def test_full_disk_warns_once(tmp_path):
    log = csv_file(tmp_path / "run.csv")
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="write", error=full), pytest.warns(UserWarning, match=r"csv_file .*No space left on device"):
        log(1, {"loss": 1.0})
    log(2, {"loss": 1.0})
    assert not (tmp_path / "run.csv").exists()


def test_remote_path_is_refused():
    with pytest.raises(ConfigError, match="csv_file: path must be local"):
        csv_file("gs://bucket/run.csv")
