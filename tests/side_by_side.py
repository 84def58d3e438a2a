"""Run all tests on two cores: three workers take groups of folders from a queue.

Tests of processes and their timing come first, at the usual priority. They mostly wait. All other groups run at the lowest
priority and use what these leave of the cores. A test of processes that failed beside the other groups runs once more when
the machine is idle. If it passes then, the run passes and names the test at its end. Tests of the other groups have one try.

Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


def main(options: Sequence[str]) -> int:
    """Run all groups and return the exit code of a group that failed.

    A group's output is printed when the group ends. The output of groups that failed comes last, where readers look first.
    """
    queue, failed, lock = deque(GROUPS), {}, Lock()

    def work() -> None:
        while True:
            with lock:
                if not queue:
                    return
                group = queue.popleft()
            priority = [] if group in TIMED else ["nice", "-n", "19"]
            done = subprocess.run(
                [*priority, *_pytest(group), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            with lock:
                if done.returncode in (0, NO_TESTS):
                    _print(done.stdout)
                else:
                    failed[group] = done

    with ThreadPoolExecutor(WORKERS) as threads:
        workers = [threads.submit(work) for _ in range(WORKERS)]
    for worker in workers:
        worker.result()
    for done in failed.values():
        _print(done.stdout)
    codes = (_code_after_repeat(group, done.returncode, options) for group, done in failed.items())
    return next((code for code in codes if code != 0), 0)


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
