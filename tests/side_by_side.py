"""Run all tests on two cores: tests of processes and their timing alone, then two workers take the other folders from a queue.

Tests that train whole models wait for nobody. They begin beside the tests that run alone, at the lowest priority.
Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock

HERE = Path(__file__).parent
ALONE = ("benchmarks", "cli", "dist", "launch", "storage")
TRAINING = (("examples",), ("pages",))
# The longest groups come first, so that both workers end at about the same time. The last group is all other tests.
SHARED = (
    ("checkpoint",),
    ("step",),
    ("battery",),
    ("shard",),
    ("data",),
    ("transforms", "optim", "schedules"),
    ("surgery", "memory", "planning"),
    (),
)
NO_TESTS = 5


def main(options: Sequence[str]) -> int:
    """Run all groups and return the exit code of a group that failed. Each group's output is printed at its end."""
    training, shared, codes, lock, end = deque(TRAINING), deque(SHARED), [], Lock(), Event()

    def run(group: Sequence[str], *priority: str) -> None:
        done = subprocess.run(
            [*priority, *_pytest(group), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        with lock:
            codes.append(done.returncode)
            sys.stdout.buffer.write(b"\n" + done.stdout)
            sys.stdout.flush()

    def train() -> None:
        with suppress(IndexError):
            while not end.is_set():
                run(training.popleft(), "nice", "-n", "19")

    def work() -> None:
        for queue in (training, shared):
            with suppress(IndexError):
                while True:
                    run(queue.popleft())

    with ThreadPoolExecutor(3) as threads:
        beside = threads.submit(train)
        codes.append(subprocess.run([*_pytest(ALONE), *options], check=False).returncode)
        end.set()
        for worker in [beside, *(threads.submit(work) for _ in range(2))]:
            worker.result()
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def _pytest(group: Sequence[str]) -> list[str]:
    """Return the command of a group, with a cache of its own."""
    named = [name for names in ((ALONE,), TRAINING, SHARED) for part in names for name in part]
    paths = [str(HERE / name) for name in group] or [f"--ignore={HERE / name}" for name in named]
    cache = f"cache_dir=.pytest_cache/{group[0] if group else 'other'}"
    return [sys.executable, "-m", "pytest", "-o", cache, *paths]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
