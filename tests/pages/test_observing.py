"""docs/observing.md: its loop runs with everything on, and its other code does as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import dtrain as dt
from stand_ins import namespace

PAGE = (Path(dt.__file__).parents[2] / "docs" / "observing.md").read_text()
LOOP, METER, SINK, LOSS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_page_loop_trains_logs_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = namespace()
    exec(LOSS, scope)
    exec(LOOP.replace('"3ep"', '"2ep"'), scope)
    exec(LOOP, scope)
    records = dt.loggers.read_jsonl("runs/gpt/metrics.jsonl")
    assert set(records) == {60, 100, 120, 180}
    logged = {
        "loss",
        "accuracy",
        "lr",
        "norm/grad",
        "activation/block/mean",
        "speed/steps_per_s",
        "memory/rss_bytes",
        "time/left_s",
    }
    assert logged - set(records[100]) == {"speed/steps_per_s", "time/left_s"}  # a first call begins the window
    assert {"eval/loss", "eval/accuracy", "eval/perplexity"} <= set(records[180])
    assert sorted(path.name for path in Path("runs/gpt/attempts").iterdir()) == ["attempt-00001.json", "attempt-00002.json"]
    assert list(Path("runs/gpt/traces").glob("trace-rank-*.json")) != []


def test_meter_may_be_a_function():
    scope = {"queue": [1, 2, 3]}
    exec(METER, scope)
    assert scope["queue_length"](SimpleNamespace()) == {"data/queued": 3}


def test_sink_may_be_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    posted: list[str] = []
    scope = {"dt": dt, "post": posted.append}
    exec(SINK, scope)
    for step in (999, 1000):
        scope["log"](step, {"loss": 0.5})
    dt.loggers.close(scope["log"])
    assert posted == ["step 1000: loss 0.500"]
    assert list(dt.loggers.read_jsonl("metrics.jsonl")) == [999, 1000]
