"""Benchmarks for a GPU: a dry run of each on a CPU, their files, and the page made of the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import figures
import gpu
import gpu_results
import gpu_tests
import on_device
from gpu_device import Setting
from gpu_results import BENCHMARKS, RESULTS, ResultFile, Table
from measure import Figure

ROOT = Path(__file__).parents[2]
TABLES = {"train": 2, "overhead": 1, "auto_microbatch": 3, "async_save": 2, "memory": 2, "kernels": 5, "tests": 1}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "tests" else ()) for name in BENCHMARKS]
FACTS = {**dict.fromkeys(gpu_results.FACTS, "x"), "device_memory_gib": 80.0}
TABLE = Table(title="Title", columns=("a", "b"), rows=[["x", Figure(value=1.0, low=0.5, high=1500.0)], [3, None]], note="Note.")

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks at it

DryRun = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """Run a benchmark at toy size once, and return the content of its file."""
    folder = tmp_path_factory.mktemp("dry")

    def run(name: str) -> dict[str, Any]:
        path = folder / f"gpu-{name}.json"
        if not path.exists():
            gpu.run(name, Setting(device=torch.device("cpu"), toy=True), folder)
        return json.loads(path.read_text())

    return run


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_of_each_benchmark_fills_all_tables(dry_run, name):
    content = dry_run(name)
    assert (content["name"], content["dry_run"], content["complete"]) == (name, True, True)
    assert len(content["tables"]) == TABLES[name]
    for table in content["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_both_sides_of_train_reach_the_same_loss(dry_run):
    for table in dry_run("train")["tables"]:
        ours, theirs = (row[table["columns"].index("last loss")] for row in table["rows"])
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert "losses agree" in table["note"]


def test_induced_failures_leave_equal_bits_and_no_memory(dry_run):
    steps, failed, equal, left, _ = dry_run("auto_microbatch")["tables"][2]["rows"][0]
    assert (failed, equal, left) == (steps, steps, 0)


def test_plan_matches_the_measured_peak_of_a_dry_run(dry_run):
    assert {row[-1] for row in dry_run("memory")["tables"][0]["rows"]} == {"met"}


def test_dry_run_is_refused_among_the_results(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["train", "--toy"])
    assert "--toy needs --out" in capsys.readouterr().err
    monkeypatch.setattr(gpu_results, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="a dry run at toy size is no result"):
        ResultFile(folder=tmp_path, name="train", facts=FACTS, dry_run=True).add(TABLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fact", gpu_results.FACTS)
def test_result_without_a_fact_of_the_device_is_refused(tmp_path, fact):
    ResultFile(folder=tmp_path, name="train", facts={**FACTS, fact: ""}, dry_run=False).add(TABLE)
    with pytest.raises(ValueError, match=rf"gpu-train.json: facts must not be empty, got no {fact}\."):
        gpu_results.read_results(tmp_path)


def test_result_of_an_unknown_benchmark_is_refused(tmp_path):
    ResultFile(folder=tmp_path, name="speed", facts=FACTS, dry_run=False).add(TABLE)
    with pytest.raises(ValueError, match="must be that of a benchmark, got 'speed'"):
        gpu_results.read_results(tmp_path)


def test_missing_package_is_named_and_the_next_benchmark_runs(tmp_path, monkeypatch, capsys):
    ran = []

    def run(name, setting, folder):
        ran.append(name)
        if name == "train":
            raise ModuleNotFoundError("No module named 'tensordict'", name="tensordict")

    monkeypatch.setattr(gpu, "run", run)
    with pytest.raises(SystemExit, match="not run: train"):
        gpu.main(["train", "overhead", "--toy", "--out", str(tmp_path)])
    assert ran == ["train", "overhead"]
    assert "train: needs the package tensordict, which is not installed" in capsys.readouterr().out


def test_page_shows_the_device_and_figures_of_a_result(tmp_path):
    file = ResultFile(folder=tmp_path, name="train", facts={**FACTS, "device": "NVIDIA Y"}, dry_run=False)
    file.add(TABLE)
    text = figures.GPU_PAGE.read_text()
    cut_off = figures.with_gpu_tables(text, tmp_path)
    assert "The run was cut off" in cut_off
    file.write(complete=True)
    page = figures.with_gpu_tables(text, tmp_path)
    assert "Nothing here was run on a GPU" not in page
    assert "| `train` | x | NVIDIA Y, 80 GiB | x | x | x | x |" in page
    assert "| `overhead` | not run | | | | | |" in page
    section = page.split("<!-- benchmarks/results/gpu-train.json -->")[1].split("<!-- end")[0]
    expected = "`x`, x, NVIDIA Y, torch x.\n\nTitle:\n\n| a | b |\n|---|---|\n| x | 1 (0.5 to 1,500) |\n| 3 |  |\n\nNote."
    assert section.strip() == expected


def test_page_of_a_gpu_is_what_the_files_say():
    text = figures.GPU_PAGE.read_text()
    assert figures.with_gpu_tables(text) == text
    assert [name for name in BENCHMARKS if f"<!-- benchmarks/results/gpu-{name}.json -->" not in text] == []
    assert [name for name in BENCHMARKS if f"`python benchmarks/gpu.py {name}`" not in text] == []
    assert ("Nothing here was run on a GPU" in text) == (not list(RESULTS.glob("gpu-*.json")))


def test_parts_of_the_gpu_tests_are_complete_and_on_the_page():
    marked = [
        path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu" in path.read_text()
    ]
    folders = [Path(folder) for part in gpu_tests.PARTS for folder in part]
    assert marked
    assert [path for path in marked if not any(folder in path.parents for folder in folders)] == []
    text = figures.GPU_PAGE.with_name("evidence.md").read_text()
    assert [part for part in gpu_tests.PARTS if f"python {' '.join(gpu_tests.command(part))}\n" not in text] == []


def test_parts_of_the_tests_on_a_device_are_complete_and_on_the_page():
    assert sorted(folder for part in gpu_tests.DEVICE_PARTS for folder in part) == [f"tests/{room}" for room in on_device.ROOMS]
    text = figures.GPU_PAGE.with_name("evidence.md").read_text()
    run = "timeout -s INT 480 python -m pytest -p no:cacheprovider -q --continue-on-collection-errors"
    assert [part for part in gpu_tests.DEVICE_PARTS if f"{run} {' '.join(part)}\n" not in text] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tests_on_a_device_are_collected_and_skipped_without_one():
    files = ["tests/step/test_means.py", "tests/memory/test_device_memory.py", "tests/schedules"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *files]
    env = {**os.environ, "DTRAIN_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    summary = done.stdout.splitlines()[-1]
    assert "skipped" in summary
    assert "passed" not in summary
    assert "no CUDA device" in done.stdout


def test_counts_of_a_report():
    report = ET.fromstring(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase><testcase name='c'><skipped/>"
        "</testcase><testcase name='d'><error/></testcase></testsuite></testsuites>"
    )
    assert gpu_tests.counted(report) == (1, 2, 1)
    assert gpu_tests.failures(report) == ["b", "d"]


@pytest.mark.slow
def test_command_needs_no_installation(tmp_path):
    """Run as on a machine with a copy of the tree: PYTHONPATH alone."""
    command = [sys.executable, "benchmarks/gpu.py", "overhead", "--toy", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}, check=True, timeout=300)
    assert (tmp_path / "gpu-overhead.json").exists()
