"""Run all tests on two cores: three workers take groups of folders from a queue.

Tests of processes and their timing come first, at the usual priority. They mostly wait. All other groups run at the lowest
priority and use what these leave of the cores. A test of processes that failed beside the other groups runs once more when
the machine is idle. If it passes then, the run passes and names the test at its end. Tests of the other groups have one try.

Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

HERE = Path(__file__).parent
WORKERS = 3
TIMED = (("launch",), ("cli", "dist", "storage", "benchmarks"))
# The longest groups come first, so that all workers end at about the same time. The group without a name is all other tests.
GROUPS = (
    *TIMED,
    ("examples",),
    ("checkpoint",),
    ("step", "shard"),
    ("battery", "transforms", "optim", "schedules"),
    (),
    ("pages",),
    ("data", "surgery", "memory", "planning"),
)
TESTS_FAILED, NO_TESTS = 1, 5


@dataclass(frozen=True)
class Done:
    """A group that ended: its exit code, what it printed, its seconds, and the seconds of the processor that it used."""

    group: Sequence[str]
    returncode: int
    output: bytes
    seconds: float
    processor_seconds: float

    def __str__(self) -> str:
        return f"{', '.join(self.group) or 'other'}: {self.seconds:.0f} s, {self.processor_seconds:.0f} s of the processor"


def main(options: Sequence[str]) -> int:
    """Run all groups and return the exit code of a group that failed.

    A group's output is printed when the group ends. The output of groups that failed comes last, where readers look first. The
    last lines say what each group took.
    """
    queue, ended, lock = deque(GROUPS), list[Done](), Lock()

    def work() -> None:
        while True:
            with lock:
                if not queue:
                    return
                group = queue.popleft()
            done = _run(group, options)
            with lock:
                ended.append(done)
                if done.returncode in (0, NO_TESTS):
                    _print(done.output)

    with ThreadPoolExecutor(WORKERS) as threads:
        workers = [threads.submit(work) for _ in range(WORKERS)]
    for worker in workers:
        worker.result()
    failed = [done for done in ended if done.returncode not in (0, NO_TESTS)]
    for done in failed:
        _print(done.output)
    print("", *ended, sep="\n", flush=True)
    codes = [_code_after_repeat(done.group, done.returncode, options) for done in failed]
    return next((code for code in codes if code != 0), 0)


def _run(group: Sequence[str], options: Sequence[str]) -> Done:
    """Run a group to its end, and measure it."""
    priority = [] if group in TIMED else ["nice", "-n", "19"]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*priority, *_pytest(group), *options], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # the process is gone, and Popen must not wait for it
        output.seek(0)
        used = usage.ru_utime + usage.ru_stime
        return Done(group, process.returncode, output.read(), time.monotonic() - begun, used)


def _code_after_repeat(group: Sequence[str], code: int, options: Sequence[str]) -> int:
    """Run the failed tests of a group of processes once more, alone. Return the exit code that counts.

    A run that leaves something behind has a code of its own, and is not repeated.
    """
    if group not in TIMED or code != TESTS_FAILED:
        return code
    only_failed = ["-v", "--last-failed", "--last-failed-no-failures", "none"]
    print(f"\nThe failed tests of {', '.join(group)}, once more and alone:", flush=True)
    return subprocess.run([*_pytest(group), *options, *only_failed], check=False).returncode


def _print(output: bytes) -> None:
    """Print a group's output whole, as its bytes."""
    sys.stdout.buffer.write(b"\n" + output)
    sys.stdout.flush()


def _pytest(group: Sequence[str]) -> list[str]:
    """Return the command of a group, with a cache of its own."""
    paths = [str(HERE / name) for name in group] or [f"--ignore={HERE / name}" for named in GROUPS for name in named]
    cache = f"cache_dir=.pytest_cache/{group[0] if group else 'other'}"
    return [sys.executable, "-m", "pytest", "-o", cache, *paths]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
