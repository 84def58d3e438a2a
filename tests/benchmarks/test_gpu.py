"""Benchmarks for a GPU: a dry run of each on a CPU, their files, and the page made of the files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import figures
import gpu
import gpu_part
import gpu_results
import gpu_save
import gpu_smoke
import gpu_tests
import on_device
from gpu import BENCHMARKS
from gpu_device import Setting
from gpu_results import ResultFile, Table
from measure import Figure

ROOT = Path(__file__).parents[2]
TABLES = {
    "smoke": 1, "resume": 1, "train": 3, "overhead": 1, "auto_microbatch": 3, "async_save": 2, "memory": 2, "tests": 1,
    "kernels": 5, "core": 1,
}  # fmt: skip
# Start processes that train, or run other tests.
SLOW = ("smoke", "resume", "core")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in BENCHMARKS]

# Figures, and where they are: the benchmark, the number of its table, the column, and text of the rows that must be there.
FIGURES = {
    "tokens per second": ("train", 0, "tokens/s", ["dtrain, `replicate`", "by hand, autocast"]),
    "MFU": ("train", 0, "MFU, %", ["dtrain, `replicate`", "by hand, autocast"]),
    "the settings of torchtitan": ("train", 1, "time over by hand", ["dtrain, `full_shard`", "as torchtitan"]),
    "MFU with the settings of torchtitan": ("train", 1, "MFU, %", ["dtrain, `full_shard`", "as torchtitan"]),
    "nanochat's shapes": ("train", 2, "MFU, %", ["dtrain, `full_shard`", "in fp8, `tensorwise`", "by hand"]),
    "fp8 against bf16 by hand": ("train", 2, "time over by hand", ["in fp8, `tensorwise`"]),
    "overhead of a step": ("overhead", 0, "dtrain over by hand", ["MLP"]),
    "size over the largest by hand": ("auto_microbatch", 0, "found over by hand", []),
    "cost of a later step": ("auto_microbatch", 1, "auto over fixed", ["host", "device"]),
    "induced failures": ("auto_microbatch", 2, "ran out of memory", []),
    "bits after induced failures": ("auto_microbatch", 2, "equal bit for bit", []),
    "stall of an asynchronous save": ("async_save", 0, "until the call returns, ms", ["mode='async'", "mode='sync'"]),
    "pinned staging": ("async_save", 0, "GiB/s of the copy", ["pinned memory", "pageable memory", "mode='async'"]),
    "a checkpoint each 50 steps": ("async_save", 1, "time over neither", ["neither", "a checkpoint each"]),
    "step after a save": ("async_save", 1, "over the median of neither", ["a checkpoint each"]),
    "peak memory against the plan": ("memory", 0, "planned over measured", ["`replicate`", "`full_shard`", "checkpointed"]),
    "activation offload": ("memory", 1, "peak over none", ["activations offloaded"]),
    "time of activation offload": ("memory", 1, "time over none", ["activations offloaded"]),
    "linear cross-entropy": ("kernels", 1, "peak, MiB", ["`linear_cross_entropy`", "8 chunks", "cross_entropy"]),
    "attention variants": ("kernels", 2, "ms", ["flash", "cudnn", "efficient", "math", "packed", "varlen", "alibi"]),
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
            file = gpu_part.run(name, Setting(device=torch.device("cpu"), toy=True, seconds=600.0, folder=folder))
            assert not file.failed
        return json.loads(path.read_text())

    return run


# One dry run for all tests of a benchmark.
of_dry_run = pytest.mark.costly(by="name")


@of_dry_run
@pytest.mark.parametrize("name", NAMES)
def test_dry_run_of_each_benchmark_fills_all_tables(dry_run, name):
    content = dry_run(name)
    assert (content["name"], content["dry_run"], content["complete"]) == (name, True, True)
    assert len(content["tables"]) == TABLES[name]
    for table in content["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}


@of_dry_run
@pytest.mark.parametrize(("name", "figure"), [pytest.param(row[0], figure, id=figure) for figure, row in FIGURES.items()])
def test_each_figure_has_a_column_and_its_rows(dry_run, name, figure):
    _, number, column, expected = FIGURES[figure]
    table = dry_run(name)["tables"][number]
    assert column in table["columns"]
    names = [str(row[0]) + str(row[1]) for row in table["rows"]]
    assert [text for text in expected if not any(text in name for name in names)] == []


@of_dry_run
@pytest.mark.parametrize("name", ["train"])
def test_both_sides_of_train_reach_the_same_loss(dry_run, name):
    for table in dry_run(name)["tables"]:
        ours, *_, theirs = (row[table["columns"].index("last loss")] for row in table["rows"])
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert "the losses in bf16 agree" in table["note"]


@of_dry_run
@pytest.mark.parametrize("name", ["auto_microbatch"])
def test_induced_failures_leave_equal_bits_and_no_memory(dry_run, name):
    steps, failed, equal, left, _ = dry_run(name)["tables"][2]["rows"][0]
    assert (failed, equal, left) == (steps, steps, 0)


@of_dry_run
@pytest.mark.parametrize("name", ["memory"])
def test_plan_matches_the_measured_peak_of_a_dry_run(dry_run, name):
    assert {row[-1] for row in dry_run(name)["tables"][0]["rows"]} == {"met"}


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


def test_failed_and_cut_off_parts_do_not_stop_the_next(tmp_path, monkeypatch, capsys):
    codes = {"smoke": 1, "train": None, "overhead": 0}
    started = {}

    def run_limited(command, seconds, env):
        started[command[2]] = (seconds, command[3:])
        return codes[command[2]]

    monkeypatch.setattr(gpu, "run_limited", run_limited)
    outcomes = gpu.run_all({"smoke": 100.0, "train": 200.0, "overhead": 300.0}, tmp_path, toy=True)
    assert outcomes == {"smoke": "failed", "train": "cut off", "overhead": "ok"}
    assert capsys.readouterr().out.split() == ["smoke", "failed", "train", "cut", "off", "overhead", "ok"]
    assert started["smoke"] == (100.0, ["--seconds", "100", "--out", str(tmp_path), "--toy"])
    # The last part takes the time that others left.
    assert started["overhead"][0] == pytest.approx(600.0, abs=60.0)


def test_parts_after_the_last_second_are_not_reached(tmp_path, monkeypatch):
    now = [0.0]

    def run_limited(command, seconds, env):
        # A part that does not react to the interrupt.
        now[0] += 2 * seconds

    monkeypatch.setattr(gpu, "run_limited", run_limited)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    outcomes = gpu.run_all({"smoke": 100.0, "train": 100.0}, tmp_path, toy=True)
    assert outcomes == {"smoke": "cut off", "train": "not reached"}


def test_summary_of_an_interrupted_run_names_all_parts(tmp_path, monkeypatch, capsys):
    def run_limited(command, seconds, env):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_limited", run_limited)
    assert gpu.run_all({"smoke": 1.0, "train": 1.0}, tmp_path, toy=True) == {"smoke": "interrupted", "train": "not reached"}
    assert "train           not reached" in capsys.readouterr().out


def test_quick_has_nine_minutes_and_keeps_its_shares():
    limits = gpu.limits(["quick"], None)
    assert sum(limits.values()) == 540.0
    assert gpu.limits(["quick"], 270.0) == {name: seconds / 2 for name, seconds in limits.items()}
    assert gpu.limits(["core", "train"], 60.0) == {"core": 60.0, "train": 60.0}


@pytest.mark.costly
def test_command_is_interrupted_at_its_limit_with_its_children(tmp_path):
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path('{tmp_path}/pid').write_text(str(child.pid))\n"
        f"try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pathlib.Path('{tmp_path}/interrupted').touch()\n"
    )
    assert gpu.run_limited([sys.executable, "-c", code], 10.0, gpu.environment()) is None
    assert (tmp_path / "interrupted").exists()
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_wheels_are_installed_and_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu, "SITE", tmp_path / "site")
    installed = []
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, check: installed.append(command))
    assert gpu.environment()["PYTHONPATH"].split(":")[:3] == [str(tmp_path / "site"), str(ROOT / "src"), str(gpu.HERE)]
    assert installed == []
    gpu.WHEELS.mkdir()
    (gpu.WHEELS / "msgspec.whl").touch()
    gpu.environment()
    assert installed[0][-2:] == [str(gpu.SITE), str(gpu.WHEELS / "msgspec.whl")]
    assert "-d .whl " in figures.GPU_PAGE.read_text()


def test_each_row_is_written_before_the_next_one_is_measured(tmp_path):
    file = ResultFile(folder=tmp_path, name="train", facts=FACTS, dry_run=False)

    def rows():
        yield ["first", 1]
        assert json.loads(file.path.read_text())["tables"][0]["rows"] == [["first", 1]]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.add(Table(title="Title", columns=("a", "b"), rows=rows()))
    assert not json.loads(file.path.read_text())["complete"]
    assert not file.failed


def test_saves_go_to_the_fastest_folder_that_has_room(monkeypatch):
    rates, free = {"/tmp": 1.0, "/dev/shm": 2.0}, {"/tmp": 10**12, "/dev/shm": 10**12}
    monkeypatch.setattr(gpu_save.tempfile, "gettempdir", lambda: "/tmp")
    monkeypatch.setattr(gpu_save, "_write_rate", rates.get)
    monkeypatch.setattr(gpu_save.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    assert gpu_save.fastest_folder(10**9) == ("/dev/shm", 2.0)
    free["/dev/shm"] = 10**9
    assert gpu_save.fastest_folder(10**9) == ("/tmp", 1.0)
    with pytest.raises(SystemExit, match=r"have no room for checkpoints of 931\.3 GiB"):
        gpu_save.fastest_folder(10**12)


def test_losses_of_a_killed_run_take_the_last_record_of_a_step(tmp_path):
    lines = [
        '{"step": 1, "loss": 3.0}',
        '{"step": 2, "loss": 2.0}',
        '{"step": 3, "lo',
        '{"step": 2, "loss": 1.5}',
        '{"step": 2}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert gpu_smoke.losses(tmp_path) == {1: 3.0, 2: 1.5}
    assert gpu_smoke.resumed_after("x\nresuming after step 40, from ckpt/step-00000040\n") == 40
    assert gpu_smoke.resumed_after("starting from scratch") == 0


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
    assert "\nNo result yet: `smoke`, `resume`, `overhead`, " in page
    section = page.split("<!-- results on a GPU -->")[1].split("<!-- end")[0]
    table = "Title:\n\n| a | b |\n|---|---|\n| x | 1 (0.5 to 1,500) |\n| 3 |  |\n\nNote."
    expected = f"### `train`\n\n`x`, x, NVIDIA Y, torch x.\n\n{table}"
    assert section.strip() == expected


def test_page_of_a_gpu_is_what_the_files_say():
    text = figures.GPU_PAGE.read_text()
    assert figures.with_gpu_tables(text) == text
    seconds = {name: f"{benchmark.quick:.0f}" if benchmark.quick else "" for name, benchmark in BENCHMARKS.items()}
    assert [name for name in BENCHMARKS if f"| `{name}` | {seconds[name]} |".replace("  ", " ") not in text] == []


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


def test_places_of_each_topic_exist():
    places = [ROOT / "tests" / place for topic in on_device.TOPICS.values() for place in topic]
    assert [place for place in places if not place.exists()] == []


@pytest.mark.slow
def test_each_room_has_tests_that_run_on_a_device():
    rows = on_device.count_table().splitlines()[2:]
    assert [row for row in rows if int(row.split("|")[2].replace(",", "")) == 0] == []


def test_all_marked_tests_are_in_the_files_of_tests():
    assert {"tests/step/test_auto_gpu.py", "tests/planning/test_estimate.py"} < set(gpu_tests.marked_files())


@pytest.fixture
def test_files(tmp_path):
    (tmp_path / "pytest.ini").touch()
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(
            "def test_passes():\n    pass\n\ndef test_fails():\n    assert 1 == 2, 'one'\n"
        )
    return tmp_path


@pytest.mark.costly
def test_files_run_in_random_order_and_errors_have_a_line_and_a_place(test_files):
    (test_files / "test_broken.py").write_text("import nothing_of_this_name\n")
    orders = []
    for seed in ("1", "2"):
        path = test_files / f"{seed}.jsonl"
        assert gpu_tests.run_pytest(["--order", seed, str(test_files)], path, seconds=300.0, env={}) == 1
        results = gpu_tests.read_results(path)
        orders.append([test for test in results if test.endswith("test_passes")])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    failed = next(result for test, result in results.items() if test.endswith("test_fails"))
    assert (failed["outcome"], failed["error"].splitlines()[0]) == ("failed", "AssertionError: one")
    assert failed["place"].endswith(":5")
    (broken,) = [result for test, result in results.items() if test.endswith("test_broken.py")]
    assert "nothing_of_this_name" in broken["error"]


@pytest.mark.costly
def test_interrupted_tests_leave_the_results_of_those_that_ended(test_files):
    (test_files / "test_waits.py").write_text("import time\n\ndef test_waits():\n    time.sleep(600)\n")
    path = test_files / "results.jsonl"
    # With this seed the first of two files runs first.
    files = [str(test_files / name) for name in ("test_0.py", "test_waits.py")]
    assert gpu_tests.run_pytest(["--order", "1", *files], path, seconds=30.0, env={}) is None
    outcomes = {test.split("::")[1]: result["outcome"] for test, result in gpu_tests.read_results(path).items()}
    assert outcomes == {"test_passes": "passed", "test_fails": "failed"}


def test_rows_of_tests_count_outcomes_and_name_what_failed():
    results = [{"outcome": outcome, "seconds": 1.0} for outcome in ("passed", "passed", "skipped")]
    assert gpu_tests._numbers("a", results, code=0) == ("a", "ok", 2, 0, 1, 3.0)
    assert gpu_tests._numbers("a", results, code=None)[1] == "interrupted"
    assert gpu_tests._numbers("a", results, code=9)[1] == "failed"
    assert gpu_tests._numbers("a", [*results, {"outcome": "failed", "seconds": 0.0}], code=None)[1] == "failed"


def test_failure_of_a_test_outlives_its_later_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = [{"test": "a", "outcome": "failed"}, {"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "passed"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"test": "b", "outcome": "failed"}]))
    assert {test: result["outcome"] for test, result in gpu_tests.read_results(path).items()} == {"a": "failed", "b": "failed"}
    assert gpu_tests.read_results(tmp_path / "none.jsonl") == {}


@pytest.mark.costly
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tests_on_a_device_are_collected_and_skipped_without_one():
    files = ["tests/step/test_means.py", "tests/memory/test_device_memory.py", "tests/schedules"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *files]
    env = {**gpu.environment(), "DTRAIN_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    summary = done.stdout.splitlines()[-1]
    assert "skipped" in summary
    assert "passed" not in summary
    assert "no CUDA device" in done.stdout


@pytest.mark.slow
def test_command_needs_no_installation(tmp_path):
    """Run as on a machine with a copy of the tree: PYTHONPATH alone."""
    command = [sys.executable, "benchmarks/gpu.py", "overhead", "--toy", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, check=True, timeout=300)
    assert (tmp_path / "gpu-overhead.json").exists()
