"""Plugin of pytest for runs that may be cut off: files run in random order, and each result is a line of a file at once.

PYTHONPATH=src:benchmarks python -m pytest -p gpu_pytest --results results.jsonl --order 7 tests/step
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="file of JSON lines, one per test")
    parser.addoption("--order", type=int, help="seed of the order of files")


def pytest_configure(config: pytest.Config) -> None:
    # The workers of pytest-xdist send their reports to the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config.getoption("results")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files into a random order, the same in all workers."""
    draw = random.Random(config.getoption("order"))
    places = {path: draw.random() for path in sorted({str(item.path) for item in items})}
    items.sort(key=lambda item: places[str(item.path)])


class Results:
    """Writer of the lines: id, outcome, seconds, and the first line and the place of an error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, 0.0)

    def _write(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(seconds, 3)}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()
            # A collection error has its reason at its end.
            line["error"] = (lines or ["no message"])[0 if crash is not None else -1][:300]
            line["place"] = f"{crash.path}:{crash.lineno}" if crash is not None else ""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
