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
from gpu_results import BENCHMARKS, ResultFile, Table
from measure import Figure

ROOT = Path(__file__).parents[2]
PARTS_OF_TESTS = ("tests", *gpu_tests.DEVICE_PARTS)
TABLES = dict.fromkeys(PARTS_OF_TESTS, 1) | {
    "train": 2, "overhead": 1, "auto_microbatch": 3, "async_save": 2, "memory": 2, "kernels": 5
}  # fmt: skip
# All parts of the tests on a device have the same dry run.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in PARTS_OF_TESTS[1:] else ()) for name in BENCHMARKS]

# Figures, and where they are: the benchmark, the number of its table, the column, and text of the rows that must be there.
FIGURES = {
    "tokens per second": ("train", 0, "tokens/s", ["dtrain, `replicate`", "by hand, autocast"]),
    "MFU": ("train", 0, "MFU, %", ["dtrain, `replicate`", "by hand, autocast"]),
    "the settings of torchtitan": ("train", 1, "time over by hand", ["dtrain, `full_shard`", "as torchtitan"]),
    "MFU with the settings of torchtitan": ("train", 1, "MFU, %", ["dtrain, `full_shard`", "as torchtitan"]),
    "overhead of a step": ("overhead", 0, "dtrain over by hand", ["MLP"]),
    "size over the largest by hand": ("auto_microbatch", 0, "found over by hand", []),
    "cost of a later step": ("auto_microbatch", 1, "auto over fixed", ["host", "device"]),
    "induced failures": ("auto_microbatch", 2, "ran out of memory", []),
    "bits after induced failures": ("auto_microbatch", 2, "equal bit for bit", []),
    "stall of an asynchronous save": ("async_save", 0, "until the call returns, ms", ["mode='async'", "mode='sync'"]),
    "pinned staging": ("async_save", 0, "GiB/s of the copy", ["pinned memory", "pageable memory", "mode='async'"]),
    "dip of tokens per second": ("async_save", 1, "of before", ["before", "from the call to the commit", "after"]),
    "peak memory against the plan": ("memory", 0, "planned over measured", ["`replicate`", "`full_shard`", "checkpointed"]),
    "activation offload": ("memory", 1, "peak over none", ["activations offloaded"]),
    "time of activation offload": ("memory", 1, "time over none", ["activations offloaded"]),
    "linear cross-entropy": ("kernels", 1, "peak, MiB", ["`linear_cross_entropy`", "8 chunks", "cross_entropy"]),
    "attention variants": ("kernels", 2, "ms", ["flash", "cudnn", "efficient", "math", "packed", "alibi"]),
    "optimizers against torch's fused": ("kernels", 3, "dtrain over torch", ["both fused", "Muon"]),
    "fp8": ("kernels", 4, "over the first row", ["bf16", "fp8"]),
}
FACTS = {**dict.fromkeys(gpu_results.FACTS, "x"), "device_memory_gib": 80.0, "commit": "c0ffee"}
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


@pytest.mark.parametrize("figure", FIGURES)
def test_each_figure_has_a_column_and_its_rows(dry_run, figure):
    name, number, column, expected = FIGURES[figure]
    table = dry_run(name)["tables"][number]
    assert column in table["columns"]
    names = [str(row[0]) + str(row[1]) for row in table["rows"]]
    assert [text for text in expected if not any(text in name for name in names)] == []


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
    assert "except a run of commit c0ffee on one NVIDIA Y on x (torch x)." in page
    assert "| `train` | c0ffee | x | NVIDIA Y, 80 GiB | x | x | x | x |" in page
    assert "\nNo result yet: `overhead`, " in page
    section = page.split("<!-- benchmarks/results/gpu-train.json -->")[1].split("<!-- end")[0]
    expected = "`x`, x, NVIDIA Y, torch x.\n\nTitle:\n\n| a | b |\n|---|---|\n| x | 1 (0.5 to 1,500) |\n| 3 |  |\n\nNote."
    assert section.strip() == expected


def test_page_of_a_gpu_is_what_the_files_say():
    text = figures.GPU_PAGE.read_text()
    assert figures.with_gpu_tables(text) == text
    assert [name for name in BENCHMARKS if f"<!-- benchmarks/results/gpu-{name}.json -->" not in text] == []
    assert [name for name in BENCHMARKS if f"python benchmarks/gpu.py {name}`" not in text] == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in ("gpu", "faq", "install", "figures", "scope"))])
def test_pages_say_the_same_about_devices(page):
    sentence = gpu_results.device_sentence(gpu_results.read_results())
    assert sentence in " ".join((ROOT / page).read_text().split())


def test_device_sentence_names_each_run_once():
    run = {"commit": "a", "device": "G", "date": "2026-01-01", "torch": "2"}
    assert gpu_results.device_sentence({"train": run, "memory": run}).count("commit") == 1
    both = gpu_results.device_sentence({"train": run, "memory": {**run, "commit": "b"}})
    assert "runs of commit a on one G on 2026-01-01 (torch 2), of commit b" in both
    assert "nothing was run on a GPU" in gpu_results.device_sentence({})


def test_result_without_a_commit_is_refused(tmp_path):
    ResultFile(folder=tmp_path, name="train", facts={**FACTS, "commit": ""}, dry_run=False).add(TABLE)
    with pytest.raises(ValueError, match=r"gpu-train.json: commit must not be empty\."):
        gpu_results.read_results(tmp_path)


def test_order_of_45_minutes_adds_up():
    section = figures.GPU_PAGE.read_text().split("## 45 minutes")[1].split("\n\n")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[2:]]
    starts, minutes = ([int(row[column]) for row in rows] for column in (0, 2))
    assert starts == [sum(minutes[:place]) for place in range(len(rows))]
    assert sum(minutes) <= 45
    assert max(minutes) < 10
    limits = [int(command.split()[3]) for _, command, *_ in rows if command.startswith("`timeout")]
    assert limits == [60 * limit for limit in minutes[1:]]


def test_parts_of_the_gpu_tests_are_complete_and_on_the_page():
    marked = [
        path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu" in path.read_text()
    ]
    folders = [Path(folder) for group in gpu_tests.PARTS for folder in group]
    assert marked
    assert [path for path in marked if not any(folder in path.parents for folder in folders)] == []
    first, *others = gpu_tests.PARTS
    text = evidence_in_one_line()
    assert f"python {' '.join(gpu_tests.command(first, marked=True))} " in text
    assert [group for group in others if f"`{' '.join(group)}`" not in text] == []


def test_parts_of_the_tests_on_a_device_are_complete_and_on_the_page():
    assert sorted(sum(gpu_tests.DEVICE_PARTS.values(), ())) == [f"tests/{room}" for room in on_device.ROOMS]
    first, *others = gpu_tests.DEVICE_PARTS.values()
    text = evidence_in_one_line()
    assert f"timeout -s INT 480 python {' '.join(gpu_tests.command(first, marked=False))} " in text
    assert [group for group in others if f"`{' '.join(group)}`" not in text] == []


def evidence_in_one_line():
    """The page of the evidence, with its commands and sentences in one line each."""
    return " ".join(figures.GPU_PAGE.with_name("evidence.md").read_text().replace("\\\n", " ").split())


def test_places_of_each_topic_exist():
    places = [ROOT / "tests" / place for topic in on_device.TOPICS.values() for place in topic]
    assert [place for place in places if not place.exists()] == []


@pytest.mark.slow
def test_each_room_has_tests_that_run_on_a_device():
    rows = on_device.count_table().splitlines()[2:]
    assert [row for row in rows if int(row.split("|")[2].replace(",", "")) == 0] == []


def test_part_that_takes_too_long_is_interrupted_and_its_failures_are_named(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import time\n\ndef test_fails():\n    assert False\n\ndef test_waits():\n    time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").touch()
    row = gpu_tests._part_row([str(tmp_path)], marked=False, timeout=20.0, env=os.environ)
    assert row[1:4] == [0, 1, 0]  # the test that waited is none of these
    assert row[5] == "interrupted, test_fails"


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
    assert gpu_tests.counted(report, ended=False) == (1, 2, 1)
    ET.SubElement(report[0], "testcase", name="e")
    assert gpu_tests.counted(report, ended=False) == (1, 2, 1)
    assert gpu_tests.failures(report) == ["b", "d"]


@pytest.mark.slow
def test_command_needs_no_installation(tmp_path):
    """Run as on a machine with a copy of the tree: PYTHONPATH alone."""
    command = [sys.executable, "benchmarks/gpu.py", "overhead", "--toy", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}, check=True, timeout=300)
    assert (tmp_path / "gpu-overhead.json").exists()
