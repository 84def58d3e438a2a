"""Tests on a GPU, in processes of their own: the marker ``gpu``, and the core's tests with their tensors on the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpu_device import Setting
from gpu_results import Cell, Table

ROOT = Path(__file__).parents[1]
PART_TIMEOUT_S, DEVICE_PART_TIMEOUT_S = 110.0, 480.0
MOST_NAMES = 30

INTERRUPT_GRACE_S = 20.0
"""Seconds that an interrupted pytest has to end its ranks and to write its report."""

PARTS: tuple[tuple[str, ...], ...] = (
    ("tests/step", "tests/transforms", "tests/optim"),
    ("tests/memory", "tests/planning", "tests/shard"),
    ("tests/checkpoint", "tests/data", "tests/dist"),
    ("tests/monitors", "tests/profiling"),
)
"""Folders of each part. Every test with the marker is in one of them."""

DEVICE_PARTS: Mapping[str, tuple[str, ...]] = {
    "tests_step": ("tests/step", "tests/optim"),
    "tests_shard": ("tests/shard",),
    "tests_checkpoint": ("tests/checkpoint",),
    "tests_data": ("tests/data", "tests/memory", "tests/surgery"),
    "tests_battery": ("tests/battery",),
    "tests_transforms": ("tests/transforms", "tests/monitors", "tests/profiling"),
}
"""Folders of each part of the core's tests with their tensors on the device, by ``DTRAIN_TEST_DEVICE=cuda``."""

COLUMNS = ("part", "passed", "failed", "skipped", "seconds", "names of failures")


def command(folders: Sequence[str], *, marked: bool) -> list[str]:
    """Return the command of one part, which needs no installation beyond ``PYTHONPATH=src``."""
    marker = ["-m", "gpu"] if marked else []
    return ["-m", "pytest", *marker, "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors", *folders]


def tests(setting: Setting) -> Iterator[Table]:
    """Run all parts of the tests with the marker. A dry run collects one file."""
    parts: Sequence[Sequence[str]] = [("tests/step/test_auto_gpu.py",)] if setting.toy else PARTS
    yield Table(
        title="Tests with the marker `gpu`",
        columns=COLUMNS,
        rows=[_part_row(folders, marked=True, timeout=PART_TIMEOUT_S, env=os.environ) for folders in parts],
    )


def _on_device(setting: Setting, *, name: str) -> Iterator[Table]:
    """Run one part of the core's tests with their tensors on the device. A dry run has one file."""
    folders = ("tests/step/test_means.py",) if setting.toy else DEVICE_PARTS[name]
    env = {**os.environ, "DTRAIN_TEST_DEVICE": setting.device.type}
    yield Table(
        title="Tests of the core with their tensors on the device",
        columns=COLUMNS,
        rows=[_part_row(folders, marked=False, timeout=DEVICE_PART_TIMEOUT_S, env=env)],
        note=f"A part is interrupted after {DEVICE_PART_TIMEOUT_S / 60:.0f} minutes, and counts the tests that had ended.",
    )


tests_step, tests_shard, tests_checkpoint, tests_data, tests_battery, tests_transforms = (
    partial(_on_device, name=name) for name in DEVICE_PARTS
)


def _part_row(folders: Sequence[str], *, marked: bool, timeout: float, env: Mapping[str, str]) -> list[Cell]:
    label = ", ".join(f"`{folder}`" for folder in folders)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run = [sys.executable, *command(folders, marked=marked), f"--junitxml={report}"]
        ended = _run_interruptible(run, timeout=timeout, env=env)
        took = time.perf_counter() - begun
        if not report.exists():
            return [label, None, None, None, took, "timeout" if not ended else "pytest wrote no report"]
        results = ET.parse(report).getroot()
        return [label, *counted(results, ended=ended), took, _shown_failures(failures(results), ended=ended)]


def _run_interruptible(run: Sequence[str], *, timeout: float, env: Mapping[str, str]) -> bool:
    """Run pytest; interrupt it after ``timeout`` seconds, and return False then. pytest still writes its report."""
    with subprocess.Popen(run, cwd=ROOT, env=env, stdout=sys.stderr, start_new_session=True) as process:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_GRACE_S)
            return False
        finally:
            # A command that is interrupted itself leaves no tests behind.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return True


def _shown_failures(names: Sequence[str], *, ended: bool) -> str:
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*([] if ended else ["interrupted"]), *names[:MOST_NAMES], *more])


def counted(report: ET.Element, *, ended: bool = True) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, failed and were skipped, of a report in JUnit's form.

    Args:
        report: root of the report.
        ended: if False, pytest was interrupted, and the last test of the report has no result.
    """
    cases = list(report.iter("testcase"))
    failed = len(failures(report))
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - failed - skipped
    interrupted = not ended and bool(cases) and not len(cases[-1])
    return passed - interrupted, failed, skipped


def failures(report: ET.Element) -> list[str]:
    """Return the names of tests that failed, or could not be collected."""
    cases = report.iter("testcase")
    return [case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None]
