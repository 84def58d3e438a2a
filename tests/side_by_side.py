"""All tests in the time that two cores need: those that watch processes and their timing alone, then the others two at a time.

What trains whole models, and waits for nobody, runs below both, at the lowest priority: with what they leave of the cores.
Run as ``python tests/side_by_side.py [pytest's options]``.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ("benchmarks", "cli", "dist", "launch", "storage")
BESIDE = ("battery", "memory", "optim", "planning", "schedules", "shard", "step", "surgery", "transforms")
BELOW = ("examples", "pages")


def main(options: list[str]) -> int:
    """What runs beside or below is printed when it is done. The exit code is that of one that failed."""
    alone, beside, below = ([str(HERE / name) for name in names] for names in (ALONE, BESIDE, BELOW))
    rest = [f"--ignore={path}" for path in (*alone, *beside, *below)]
    codes: list[int] = []
    with _printed_later(["nice", "-n", "19", *_pytest("below"), *below, *options], codes):
        codes.append(subprocess.run([*_pytest("alone"), *alone, *options], check=False).returncode)
        with _printed_later([*_pytest("rest"), *rest, *options], codes):
            codes.append(subprocess.run([*_pytest("beside"), *beside, *options], check=False).returncode)
    return next((code for code in codes if code), 0)


def _pytest(part: str) -> list[str]:
    """A run that keeps its cache apart from the others'."""
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir=.pytest_cache/{part}"]


@contextmanager
def _printed_later(command: list[str], codes: list[int]) -> Iterator[None]:
    """A context beside which ``command`` runs, and which ends when that does. Mutates: ``codes``, which gets its exit code."""
    with tempfile.TemporaryFile() as printed, subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT) as process:
        yield
        codes.append(process.wait())
        printed.seek(0)
        sys.stdout.buffer.write(b"\n" + printed.read())
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
