"""Tests on a GPU: those with the marker ``gpu``, and the core's tests with their tensors on the device.

The result of each test is a line of ``gpu-NAME.jsonl`` at once, so that a run that is cut off leaves what had ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu import ROOT, environment, run_limited
from gpu_device import Setting
from gpu_results import FAILED, Table

sys.path.append(str(ROOT / "tests"))
from on_device import ROOMS

MARKED_WORKERS, CORE_WORKERS = 6, 14
MOST_ERRORS = 40

REPORT_S = 15.0
"""Seconds before the limit in which an interrupted pytest ends its workers and the file is written."""

Results = Mapping[str, Mapping[str, Any]]
"""Lines of the tests that have ended, by the test's id."""


def marked_files() -> list[str]:
    """Return the files that have tests with the marker, relative to the root."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "@pytest.mark.gpu" in path.read_text()]


def tests(setting: Setting) -> Iterator[Table]:
    """Run the tests with the marker. A dry run has one file."""
    files = ["tests/step/test_auto_gpu.py"] if setting.toy else marked_files()
    yield from _tables(setting, "tests", ["-m", "gpu", *files], MARKED_WORKERS, {}, "Tests with the marker `gpu`")


def core(setting: Setting) -> Iterator[Table]:
    """Run the core's tests with their tensors on the device, files in random order. A dry run has one file."""
    places = ["tests/step/test_means.py"] if setting.toy else [f"tests/{room}" for room in ROOMS]
    title = "Tests of the core with their tensors on the device"
    yield from _tables(setting, "core", places, CORE_WORKERS, {"DTRAIN_TEST_DEVICE": setting.device.type}, title)


def _tables(
    setting: Setting, name: str, selection: Sequence[str], workers: int, env: Mapping[str, str], title: str
) -> Iterator[Table]:
    """Run the selected tests in parallel; yield their numbers by folder, and the errors, most frequent first."""
    path = setting.folder / f"gpu-{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    order = int(time.time())
    parallel = ["-n", str(min(workers, max(1, (os.cpu_count() or 1) - 2)))] if find_spec("xdist") and not setting.toy else []
    code = run_pytest([*parallel, "--order", str(order), *selection], path, seconds=setting.seconds - REPORT_S, env=env)
    results = read_results(path)
    by_folder = defaultdict[str, list[Mapping[str, Any]]](list)
    for test, result in results.items():
        by_folder["/".join(test.split("/")[:2])].append(result)
    ended = f"pytest ended with code {code}" if code is not None else f"pytest was interrupted after {setting.seconds:.0f} s"
    yield Table(
        title=title,
        columns=("tests", "result", "passed", "failed", "skipped", "seconds of the tests"),
        rows=[
            _numbers("all", list(results.values()), code),
            *(_numbers(name, by_folder[name], code=0) for name in sorted(by_folder)),
        ],
        note=f"Order of files {order}; {ended}.",
    )
    errors = defaultdict[str, list[str]](list)
    for test, result in results.items():
        if result["outcome"] == "failed":
            errors[result["error"]].append(f"{test} ({result['place']})" if result["place"] else test)
    frequent = sorted(errors.items(), key=lambda error: -len(error[1]))
    if frequent:
        yield Table(
            title=f"First lines of the errors, {min(len(frequent), MOST_ERRORS)} of {len(frequent)}",
            columns=("error", "tests", "one of them"),
            rows=[[error.replace("|", "/"), len(failed), failed[0]] for error, failed in frequent[:MOST_ERRORS]],
        )


def run_pytest(arguments: Sequence[str], results: Path, *, seconds: float, env: Mapping[str, str]) -> int | None:
    """Run pytest with the plugin; interrupt it after ``seconds``. Return its exit code, None if interrupted."""
    command = [sys.executable, "-m", "pytest", "-p", "gpu_pytest", "--results", str(results), "-p", "no:cacheprovider"]
    # pytest-benchmark, if it is there, warns of the workers, and warnings are errors.
    options = ["-p", "no:benchmark", "-q", "--tb=short", "--continue-on-collection-errors", *arguments]

    def progress() -> None:
        _, _, passed, failed, skipped, _ = _numbers("", list(read_results(results).values()), code=0)
        print(f"\n{passed:,} passed, {failed} failed, {skipped} skipped", flush=True)

    return run_limited([*command, *options], seconds, {**environment(), **env}, grace_s=REPORT_S - 5, progress=progress)


def read_results(path: Path) -> Results:
    """Return the line of each test that has ended; a failure stays, whatever else is said of the test."""
    results: dict[str, Mapping[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        result = json.loads(line)
        if results.get(result["test"], result)["outcome"] != "failed" or result["outcome"] == "failed":
            results[result["test"]] = result
    return results


def _numbers(name: str, results: Sequence[Mapping[str, Any]], code: int | None) -> tuple[str, str, int, int, int, float]:
    """Return a row. ``code``: exit code of pytest, None if it was interrupted."""
    passed, failed, skipped = (
        sum(result["outcome"] == outcome for result in results) for outcome in ("passed", "failed", "skipped")
    )
    outcome = FAILED if failed or code else "ok" if code == 0 else "interrupted"
    return name, outcome, passed, failed, skipped, sum(result["seconds"] for result in results)
