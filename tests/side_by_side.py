"""All tests in two processes side by side: those that mostly wait for processes and servers, and those that mostly compute.

Two cores run both in little more than the time of the longer one. Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WAITING = ("benchmarks", "cli", "dist", "examples", "launch", "storage")


def main(options: list[str]) -> int:
    """Both halves; what the second one printed comes when the first one is done. The exit code is that of one that failed."""
    waiting = [str(HERE / name) for name in WAITING]
    computing = [f"--ignore={path}" for path in waiting]
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            [*_pytest("computing"), *computing, *options], stdout=printed, stderr=subprocess.STDOUT
        ) as second:
            first = subprocess.run([*_pytest("waiting"), *waiting, *options], check=False)
        printed.seek(0)
        sys.stdout.buffer.write(b"\n" + printed.read())
    return first.returncode or second.returncode


def _pytest(half: str) -> list[str]:
    """A run that keeps its cache apart from the other's."""
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{half}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
