"""Run all tests on two cores: three workers take groups of folders from a queue.

Tests of processes and their timing come first, at the usual priority. They mostly wait. All other groups run at the lowest
priority and use what these leave of the cores. Run as ``python tests/side_by_side.py [pytest's options]``.
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
NO_TESTS = 5


def main(options: Sequence[str]) -> int:
    """Run all groups and return the exit code of a group that failed.

    A group's output is printed when the group ends. The output of groups that failed comes last, where readers look first.
    """
    queue, failed, lock = deque(GROUPS), [], Lock()

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
                    failed.append(done)

    with ThreadPoolExecutor(WORKERS) as threads:
        workers = [threads.submit(work) for _ in range(WORKERS)]
    for worker in workers:
        worker.result()
    for done in failed:
        _print(done.stdout)
    return failed[0].returncode if failed else 0


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
