"""Lines for people: what is on them, when they come, and when they reach the disk."""

import io
import re

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.loggers.logger import close
from dtrain.loggers.text import console, text_file


def test_line_contains_selected_metrics():
    out = io.StringIO()
    log = console(names=["loss", "speed/*"], stream=out)
    log(120, {"loss": torch.tensor(2.103412), "lr": 3e-3, "speed/tokens": 51_200, "bad": torch.ones(2)})
    assert out.getvalue() == "step 120  loss 2.1034  speed/tokens 51200\n"


def test_line_shows_non_numeric_values(capsys):
    console()(1, {"nan": float("nan"), "text": "é" * 100, "bad": torch.ones(2), "none": None})
    assert capsys.readouterr().out == f'step 1  nan nan  text "{"é" * 58}…  bad <Tensor [2]>  none null\n'


def test_lines_follow_interval_after_step_goes_back(capsys):
    log = console(interval="10ba", names=[])
    for step in (1, 5, 10, 19, 40, 12, 13):
        log(step, {"loss": 1.0})
    assert capsys.readouterr().out.split() == ["step", "1", "step", "10", "step", "40", "step", "12"]


def test_closed_stream_warns_once():
    out = io.StringIO()
    out.close()
    log = console(stream=out)
    with pytest.warns(UserWarning, match=r"console: I/O operation on closed file. Metrics are no longer logged there"):
        log(1, {})
    log(2, {})


def test_text_file_is_flushed_at_interval(tmp_path):
    path = tmp_path / "logs" / "rank-0.txt"
    log = text_file(tmp_path / "logs" / "rank-{rank}.txt", flush_interval=3)
    log(1, {"loss": 2.0})
    log(2, {"loss": 1.0})
    assert not path.exists()
    log(3, {"loss": 0.5})
    log(4, {"loss": 0.25})
    assert len(path.read_text().splitlines()) == 3
    close(log)
    log(5, {"loss": 0.0})
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  step 4  loss 0.25", lines[3])


def test_unwritable_text_file_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    log = text_file(tmp_path / "file" / "log.txt")
    with pytest.warns(UserWarning, match="text_file .*no longer logged there"):
        log(1, {})
    log(2, {})


BAD = {
    "unit": (lambda: console(interval="3ep"), r"console: interval must be a number of steps, got '3ep'"),
    "names": (lambda: console(names="loss"), r"console: names must be a list of names or patterns, got 'loss'"),
    "names of numbers": (lambda: console(names=[1]), r"names must be a list of names or patterns, got \[1\]"),
    "ranks": (lambda: console(ranks=True), "console: ranks must be 0 or 'all', got True"),
    "flush": (lambda: text_file("log.txt", flush_interval=0), "flush_interval must be an integer of at least 1, got 0"),
    "server": (lambda: text_file("s3://bucket/log.txt"), "text_file: path must be local"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
