"""The report of a proof names places, allows known differences, and has a form for programs."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import dtrain as dt

BUG = Path(__file__).parent / "bugs" / "mean_over_tokens.py"
FORWARD = next(number for number, line in enumerate(BUG.read_text().splitlines(), 1) if "model(" in line)


def prove(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "prove", *arguments], capture_output=True, text=True, timeout=600, check=False
    )


def test_fast_proof_names_the_line_and_writes_junit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(BUG, fast=True, timeout_s=600.0)
    assert [(row.name, row.verdict) for row in report.rows] == [("1 rank", "ran"), ("2 ranks", "differs")]
    (finding,) = report.findings
    assert finding.line == report.as_dict()["findings"][0]["line"] == f"{BUG.name}:{FORWARD}"
    assert f", at {BUG.name}:{FORWARD}" in report.text()
    assert "A fast proof compares no metrics, resumes, strategies or microbatch sizes." in report.text()
    suite = ElementTree.fromstring(report.junit())
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    first, second = suite
    assert (first.get("name"), list(first)) == ("1 rank", [])
    assert second.find("failure").get("message") == "step 0, loss"
    assert second.find("failure").text in report.text()


@pytest.mark.parametrize("name", ["loss_weighting", "los?"], ids=["cause", "fact"])
def test_known_difference_does_not_count(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    # The gradient differs by the same mistake.
    known = {name: "weighted by hand", "gradient of *": "of the loss", "metric lost": "was removed"}
    report = dt.prove.prove(BUG, fast=True, steps=2, allow={**known, "parameter *": "of the loss"}, timeout_s=600.0)
    assert report.passed, report.text()
    assert [row.verdict for row in report.rows] == ["ran", "allowed"]
    assert f"Allowed: {name} (weighted by hand) differs in 2 ranks." in report.remarks()
    assert "Allowed: metric lost (was removed) differs in no run. Remove it." in report.remarks()
    assert report.as_dict()["allowed"][0] == {"name": name, "reason": "weighted by hand", "runs": ("2 ranks",)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow", "loss"], "prove: --allow must be NAME=REASON, got 'loss'."),
        (["--allow", "@known.txt"], "prove: --allow must be NAME=REASON or @FILE, got no file 'known.txt'."),
        (["--junit", "missing/proof.xml"], "prove: --junit must be a file in a folder that exists, got 'missing/proof.xml'."),
    ],
)
def test_command_refuses_options(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = prove(*arguments, str(BUG))
    assert done.returncode == 2
    assert message in done.stderr


def test_known_differences_come_from_a_file(tmp_path):
    from dtrain.cli.main import parse_allowed

    (tmp_path / "known.txt").write_text("# counted per rank\nmetric tokens = a number of the rank\n\nlocal_batch_norm=small\n")
    allowed = parse_allowed([f"@{tmp_path / 'known.txt'}", "loss=a=b"])
    assert allowed == {"metric tokens": "a number of the rank", "local_batch_norm": "small", "loss": "a=b"}
