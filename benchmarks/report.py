"""Measure the duration of ``dtrain report`` for a long run, and the size of its page.

Run it as ``python benchmarks/report.py``. The run is made up first, and not timed: a million steps that each logged five
metrics, and eight ranks with a line of the ledger for every 17 steps, 290 MB in all. Targets: 10 s from the command to the
page, and 10 MB. On a machine with other work the processor time of all processes says more than the clock on the wall.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from measure import child_cpu, machine
from runs_made import Part, write_run

WITHIN_S, WITHIN_BYTES = 10.0, 10 * 10**6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the run (default: a million)")
    parser.add_argument("--ranks", type=int, default=8, help="of the run (default: 8)")
    parser.add_argument("--times", type=int, default=3, help="how often (default: 3)")
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        half = given.steps // 2
        parts = [Part(begin=0, end=half + half // 100, ranks=given.ranks, reason=None),
                 Part(begin=half, end=given.steps, ranks=given.ranks, down_s=60.0)]  # fmt: skip
        run = write_run(Path(folder) / "run", parts, per_line=17, save_every=1000, evaluate_every=1000, straggler=0)
        nbytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        print(f"run: {given.steps:,} steps, {given.ranks} ranks, {nbytes / 1e6:.0f} MB")
        rows = [report(run) for _ in range(given.times)]
    for wall, cpu, size in rows:
        print(f"dtrain report: {wall:.2f} s wall, {cpu:.2f} s cpu, a page of {size / 1e6:.2f} MB")
    wall, _, size = min(rows)
    print(f"fastest: {wall:.2f} s, target <= {WITHIN_S:g} s: {'met' if wall <= WITHIN_S else 'not met'}")
    print(f"page: {size / 1e6:.2f} MB, target <= {WITHIN_BYTES / 1e6:g} MB: {'met' if size <= WITHIN_BYTES else 'not met'}")


def report(run: Path) -> tuple[float, float, int]:
    """Wall and processor seconds of the command, and the bytes of its page."""
    page = run / "report.html"
    page.unlink(missing_ok=True)
    wall, cpu = time.perf_counter(), child_cpu()
    done = subprocess.run([sys.executable, "-m", "dtrain", "report", str(run), "--quiet"], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"report: dtrain report exited with {done.returncode}")
    return time.perf_counter() - wall, child_cpu() - cpu, page.stat().st_size


if __name__ == "__main__":
    main()
