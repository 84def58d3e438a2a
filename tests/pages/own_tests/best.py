"""Tests of best.py of docs/own.md, which test_own.py writes beside it."""

import json

import pytest
from best import best

import dtrain as dt
from dtrain.testing import inject_fault


def test_the_least_value_stays(tmp_path):
    log = best(tmp_path / "best.json")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        log(step, {"loss": loss})
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2, "loss": 1.0}


def test_a_full_disk_is_one_warning_and_the_other_sinks_go_on(tmp_path):
    kept = dt.loggers.in_memory()
    log = dt.loggers.multi(best(tmp_path / "best.json"), kept)
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="pathlib.Path.write_text", error=full), pytest.warns(UserWarning, match="best"):
        log(1, {"loss": 2.0})
    log(2, {"loss": 1.0})
    assert kept.column("loss") == {1: 2.0, 2: 1.0}
    assert not (tmp_path / "best.json").exists()


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(dt.errors.ConfigError, match="needs a folder"):
        best(tmp_path / "nowhere" / "best.json")
