"""Pictures, texts and tables: as files that other readers open, on the page of a run, and to the loggers that take them."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.loggers.logger import failed_loggers, fault_tolerant, null_logger
from dtrain.report.page import render_page
from dtrain.report.read_run import read_report


def test_pictures_are_one_frame_that_pillow_reads(tmp_path):
    pixels = torch.zeros(3, 3, 2, 4)
    pixels[1, 0] = 1.0  # the second picture is red
    pixels[2] = 0.5
    dt.loggers.log_images(dt.loggers.media_files(tmp_path), 120, {"val/samples": pixels})
    frame = np.array(Image.open(tmp_path / "val%2Fsamples" / "step-00000120.png"))
    assert frame.shape == (4, 8, 3)
    assert frame[0, 4].tolist() == [255, 0, 0]
    assert frame[2, 0].tolist() == [128, 128, 128]
    assert frame[3, 7].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.full((1, 2, 2), 7, np.uint8), 7),
        (torch.full((1, 2, 2), 300), 255),
        (torch.full((3, 2, 2), -1.0), 0),
        (torch.full((1, 2, 2), math.nan, dtype=torch.bfloat16), 0),
        (np.ones((2, 1, 2, 2)), 255),
    ],
)
def test_kinds_of_pictures(tmp_path, given, expected):
    dt.loggers.log_images(dt.loggers.media_files(tmp_path), 1, {"x": given})
    assert (np.array(Image.open(tmp_path / "x" / "step-00000001.png")) == expected).all()


def test_texts_and_tables_are_files_and_steps_that_are_repeated_replace_them(tmp_path):
    log = dt.loggers.multi(dt.loggers.in_memory(), dt.loggers.media_files(tmp_path))
    for answer in ("4", "5 é"):
        dt.loggers.log_text(log, 3, {"..": answer})
    rows = [{"prompt": "2+3=", "reward": torch.tensor(0.5)}, {"prompt": "1+1=", "answer": math.nan}]
    dt.loggers.log_table(log, 3, {"rollouts": rows})
    log(3, {"loss": 1.0})
    assert (tmp_path / "%2E%2E" / "step-00000003.txt").read_text() == "5 é"
    assert json.loads((tmp_path / "rollouts" / "step-00000003.json").read_text()) == {
        "columns": ["prompt", "reward", "answer"],
        "data": [["2+3=", 0.5, None], ["1+1=", None, "nan"]],
    }
    assert len(list(tmp_path.rglob("step-*"))) == 2


def test_page_of_a_run_shows_the_newest_of_each_name(tmp_path):
    dt.loggers.jsonl(tmp_path / "metrics.jsonl")(1, {"loss": 1.0})
    log = dt.loggers.media_files(tmp_path / "media")
    for step in (1, 20):
        dt.loggers.log_text(log, step, {"answer": f"<b>after {step}</b>"})
    dt.loggers.log_images(log, 5, {"frame": torch.rand(1, 3, 3)})
    dt.loggers.log_table(log, 5, {"rewards": [{"name": "first", "value": 0.25}]})
    (tmp_path / "media" / "broken").mkdir()
    (tmp_path / "media" / "broken" / "step-00000001.json").write_text("{")
    page = render_page(read_report([tmp_path], version="1"))
    assert "answer, step 20" in page
    assert "&lt;b&gt;after 20&lt;/b&gt;" in page
    assert "after 1&" not in page
    assert '<img src="data:image/png;base64,' in page
    assert "<td>first<td>0.25" in page
    assert "cannot be read" in page


def test_a_logger_that_fails_is_dropped_and_the_others_go_on(tmp_path):
    (tmp_path / "file").write_text("")
    before = len(failed_loggers())
    log = dt.loggers.multi(dt.loggers.media_files(tmp_path / "file"), dt.loggers.media_files(tmp_path / "media"))
    with pytest.warns(UserWarning, match="media_files"):
        dt.loggers.log_text(log, 1, {"a": "b"})
    dt.loggers.log_text(log, 2, {"a": "b"})
    assert len(failed_loggers()) == before + 1
    assert len(list((tmp_path / "media").rglob("*.txt"))) == 2


def test_a_logger_in_a_thread_takes_them_too(tmp_path):
    class Both:
        takes_media = True

        def __init__(self) -> None:
            self.calls: list[object] = []

        def __call__(self, step, numbers):
            self.calls.append((step, dict(numbers)))

        def log_media(self, step, media):
            self.calls.append((step, sorted(media)))

    both = Both()
    log = fault_tolerant(both, timeout_s=60)
    log(1, {"loss": 1.0})
    dt.loggers.log_text(log, 2, {"a": "b"})
    dt.loggers.close(log)
    assert both.calls == [(1, {"loss": 1.0}), (2, ["a"])]


def test_refused(tmp_path):
    log = dt.loggers.media_files(tmp_path)
    with pytest.raises(ConfigError, match=r"log_images: 'x' must have the shape .* got \[1, 2, 4, 4\]\. Permute the axes"):
        dt.loggers.log_images(log, 1, {"x": torch.ones(2, 4, 4)})
    with pytest.raises(ConfigError, match="log_text: 'x' must be a text, got int"):
        dt.loggers.log_text(log, 1, {"x": 1})
    with pytest.raises(ConfigError, match="log_table: 'x' must be a list of dicts, got dict"):
        dt.loggers.log_table(log, 1, {"x": {"a": 1}})
    with pytest.raises(ConfigError, match="log_text: values must be in a dict by name, got str"):
        dt.loggers.log_text(log, 1, "x")
    with pytest.raises(ConfigError, match="log_text: logger must have a part that takes more than numbers"):
        dt.loggers.log_text(dt.loggers.console(stream=io.StringIO()), 1, {"x": "y"})
    dt.loggers.log_text(null_logger, 1, {"x": "y"})
