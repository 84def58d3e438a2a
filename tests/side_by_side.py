"""All tests in the time that two cores need: those that watch processes and their timing alone, then the others two at a time.

Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ("benchmarks", "cli", "dist", "examples", "launch", "storage")
BESIDE = ("algorithms", "battery", "memory", "optim", "planning", "schedules", "shard", "step", "surgery")


def main(options: list[str]) -> int:
    """What the second of two printed comes when the first one is done. The exit code is that of one that failed."""
    alone, beside = ([str(HERE / name) for name in names] for names in (ALONE, BESIDE))
    rest = [f"--ignore={path}" for path in (*alone, *beside)]
    codes = [subprocess.run([*_pytest("alone"), *alone, *options], check=False).returncode]
    with tempfile.TemporaryFile() as printed:
        second = subprocess.Popen([*_pytest("rest"), *rest, *options], stdout=printed, stderr=subprocess.STDOUT)
        with second:
            codes.append(subprocess.run([*_pytest("beside"), *beside, *options], check=False).returncode)
        codes.append(second.returncode)
        printed.seek(0)
        sys.stdout.buffer.write(b"\n" + printed.read())
    return next((code for code in codes if code), 0)


def _pytest(part: str) -> list[str]:
    """A run that keeps its cache apart from the others'."""
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{part}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
