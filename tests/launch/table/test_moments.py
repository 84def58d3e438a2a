"""A signal at any moment of the start ends the job as later signals do, and nothing is left."""

from __future__ import annotations

import signal
import time

import pytest

STAYS = "import time\ntime.sleep(600)\n"
AT_ONCE = 2  # jobs
WHOLE_START_S = 1.2  # the launcher and both ranks, on a busy machine
PYTHON_HAS_NOT_STARTED = ("Fatal Python error: init_import_site", "Could not import runpy module")
PRELOADED, PLAIN = ("--preload", "json"), ("--no-preload",)


@pytest.mark.parametrize("moments", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [PRELOADED, PLAIN], ids=["preloaded", "plain"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_signal_at_any_time_during_start_leaves_no_processes(start, name, options, moments):
    number = signal.Signals[name]
    for first in range(0, moments, AT_ONCE):
        began, jobs = [], []
        for _ in range(AT_ONCE):
            began.append(time.monotonic())
            jobs.append(start(STAYS, options=[*options, "--grace", "60"]))
        for k, job in enumerate(jobs):
            time.sleep(max(0.0, began[k] + WHOLE_START_S * (first + k) / moments - time.monotonic()))
            job.process.send_signal(number)
        for job in jobs:
            result = job.wait()
            job.wait_until_gone()
            # Before it has its handlers, Python itself ends by the signal; it fails where one interrupts its own start.
            codes = (1,) if any(text in result.err for text in PYTHON_HAS_NOT_STARTED) else (128 + number, -number)
            assert result.code in codes, result.err
            assert len(result.summary) <= 1
