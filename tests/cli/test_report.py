"""Test ``dtrain report``: output, exit codes, and one line for each mistake."""

import json
import os
import re
import sys

import pytest

from runs_made import KILLED_TWICE, Part, write_run


@pytest.fixture
def report(command_line, monkeypatch, tmp_path):
    """``report(*args)``, as of ``command_line``, in a folder where ``gpt`` is a run."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "gpt", KILLED_TWICE, straggler=1)
    return command_line("report")


def test_report_writes_page_and_prints_summary(report, tmp_path):
    code, out, err = report("gpt")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "gpt: done at step 1,000, after 10 m 20 s on 2 ranks"
    assert lines[1] == "goodput: 53.3%, 5 m 31 s of 10 m 20 s in steps that count"
    assert lines[3] == "restarts: 2; down 1 m 05 s, set up again 18 s, lost 60 steps and 30 s"
    assert "failed: attempt 2, rank 0: RuntimeError: CUDA error: device-side assert" in lines
    assert lines[-1] == "gpt/report.html"
    assert (tmp_path / "gpt" / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(os.listdir(tmp_path / "gpt")) == ["attempts", "ledger", "metrics.jsonl", "report.html"]


def test_output_option_sets_path_of_page(report, tmp_path):
    assert report("gpt", "--output", "page.html", "--quiet") == (0, "page.html\n", "")
    assert (tmp_path / "page.html").is_file()
    assert not (tmp_path / "gpt" / "report.html").exists()


def test_json_prints_report_data(report, tmp_path):
    code, out, err = report("gpt", "--json")
    found = json.loads(out)
    assert (code, err, found["format"], found["runs"][0]["attempts"][1]["lost_steps"]) == (0, "", 2, 20)
    assert not (tmp_path / "gpt" / "report.html").exists()
    code, out, _ = report("gpt", "--json", "--output", "page.html")
    assert json.loads(out) | {"written_at": 0} == found | {"written_at": 0}
    assert (tmp_path / "page.html").exists()


def test_several_runs_are_compared(report, tmp_path):
    write_run(tmp_path / "wide", [Part(begin=0, end=100)])
    code, out, err = report("gpt", "wide")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("wide: done at step 100, after 58 s on 2 ranks, goodput 70.")
    assert out.splitlines()[-1] == "report.html"
    assert (tmp_path / "report.html").is_file()


def test_damaged_run_is_reported_with_missing_parts(report, tmp_path):
    (tmp_path / "gpt" / "ledger" / "rank-00001.jsonl").unlink()
    code, out, _ = report("gpt")
    assert code == 0
    assert "missing: attempt 1: nothing from rank 1 of 2; means are over those there (and 2 more, in the report)" in out


def test_unreadable_folder_exits_with_1(report, tmp_path):
    (tmp_path / "dust").mkdir()
    (tmp_path / "dust" / "metrics.jsonl").write_bytes(b"\x00" * 100)
    code, out, err = report("dust")
    assert (code, err) == (1, "")
    assert "missing: " in out
    assert (tmp_path / "dust" / "report.html").is_file()


def test_control_characters_in_names_are_escaped(report, tmp_path):
    write_run(tmp_path / "red\x1b[31m", [Part(begin=0, end=40)])
    code, out, _ = report("red\x1b[31m")
    assert code == 0
    assert "\x1b" not in out
    assert r"red\x1b[31m: done" in out


def test_missing_plotly_prints_summary_and_names_extra(report, tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.cli.report.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    code, out, err = report("gpt")
    assert (code, err) == (0, 'no page: its charts need the package plotly: pip install "dtrain[report]"\n')
    assert out.startswith("gpt: done at step 1,000")
    assert not (tmp_path / "gpt" / "report.html").exists()
    code, out, err = report("gpt", "--output", "page.html")
    assert (code, out) == (2, "")
    assert 'the charts of the page need the package plotly: pip install "dtrain[report]"' in err


MISTAKES = {
    "no run": (("nowhere",), 2, "report: path must be the folder of a run, got 'nowhere', which is not there. Pass the folder"),
    "a folder of runs": (
        (".",),
        2,
        "report: path must be the folder of a run, got '.', which has no ledger, no metrics.jsonl and no attempts. "
        "Runs below: gpt",
    ),
    "nothing": ((), 2, "report: missing argument 'RUN_DIR'. See"),
    "output in no folder": (
        ("gpt", "--output", "a/b.html"),
        2,
        "report: --output is in a folder that does not exist, got 'a/b.html'",
    ),
    "output is a folder": (("gpt", "--output", "gpt"), 2, "report: --output is a folder, got 'gpt'"),
    "output is full": (("gpt", "--output", "/proc/report.html"), 1, "report: /proc/report.html: "),
}


@pytest.mark.parametrize(("args", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(report, args, code, expected):
    found, out, err = report(*args)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith(f"dtrain: {expected}")
    assert re.search(r"[;.] \S", err)
