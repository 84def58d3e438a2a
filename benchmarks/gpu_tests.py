"""Tests that need a GPU (marker ``gpu``), part by part in processes of their own, with the number of tests that passed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_device import Setting
from gpu_results import Cell, Table

ROOT = Path(__file__).parents[1]
PART_TIMEOUT_S = 110.0

PARTS: tuple[tuple[str, ...], ...] = (
    ("tests/step", "tests/transforms", "tests/optim"),
    ("tests/memory", "tests/planning", "tests/shard"),
    ("tests/checkpoint", "tests/data", "tests/dist"),
    ("tests/monitors", "tests/profiling"),
)
"""Folders of each part. Every test with the marker is in one of them."""

DEVICE_PARTS: tuple[tuple[str, ...], ...] = (
    ("tests/step", "tests/optim"),
    ("tests/shard",),
    ("tests/checkpoint",),
    ("tests/data", "tests/memory", "tests/surgery"),
    ("tests/battery",),
    ("tests/transforms", "tests/monitors", "tests/profiling"),
)
"""Folders of each part of the core's tests with their tensors on the device, by ``DTRAIN_TEST_DEVICE=cuda``."""


def command(folders: Sequence[str]) -> list[str]:
    """Return the command of one part, which needs no installation beyond ``PYTHONPATH=src``."""
    return ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors", *folders]


def tests(setting: Setting) -> Iterator[Table]:
    """Run all parts. A dry run collects one file."""
    if setting.toy:
        parts: Sequence[Sequence[str]] = [("tests/step/test_auto_gpu.py",)]
    else:
        parts = PARTS
    yield Table(
        title="Tests with the marker `gpu`",
        columns=("part", "passed", "failed", "skipped", "seconds", "names of failures"),
        rows=[_part_row(folders) for folders in parts],
    )


def _part_row(folders: Sequence[str]) -> list[Cell]:
    part = ", ".join(f"`{folder}`" for folder in folders)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        try:
            run = [sys.executable, *command(folders), f"--junitxml={report}"]
            subprocess.run(run, cwd=ROOT, timeout=PART_TIMEOUT_S, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return [part, None, None, None, PART_TIMEOUT_S, "timeout"]
        took = time.perf_counter() - begun
        if not report.exists():
            return [part, None, None, None, took, "pytest wrote no report"]
        return [part, *counted(ET.parse(report).getroot()), took, ", ".join(failures(ET.parse(report).getroot()))]


def counted(report: ET.Element) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed and were skipped, of a report in JUnit's form."""
    cases = list(report.iter("testcase"))
    failed = len(failures(report))
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - failed - skipped, failed, skipped


def failures(report: ET.Element) -> list[str]:
    """Return the names of tests that failed, or could not be collected."""
    cases = report.iter("testcase")
    return [case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None]
