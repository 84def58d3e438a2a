"""The rows of the truth table with dtrain, torchrun and Composer's launcher in turn, as a table in Markdown.

Each cell: exit code, lines on standard error besides the program's own traceback, processes left two seconds after the
launcher's end, and the seconds from the event of the row to that end. The rows are those that ``tests/launch/table`` holds
dtrain to. Two ranks; where a row is about one of them, it is rank 1.

    python benchmarks/truth_table.py [--cap 60] [--only TEXT] [--composer PROGRAM]

The second part of the page, about the ranks that other ranks name, without a launcher:

    python benchmarks/truth_table.py --named 8 16            # real ranks
    python benchmarks/truth_table.py --simulated 4096        # virtual ranks
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from measure import machine

sys.path.insert(0, os.fspath(Path(__file__).parents[1] / "tests"))

from table.failures import FAULTS, Fault, run_fault
from table.rows import ROWS, Row
from table.running import Command, Seen, dtrain, start, why_no_mounts
from table.simulated_failures import SIMULATED, SimulatedFault, simulate

SETTLE_S = 2.0  # the promise for a killed launcher
RANKS = 2
LOGS = "{folder}/logs"  # where a row is about the folder of the logs


def torchrun(row: Row, n: str) -> list[str]:
    """Return the command of torchrun on one node, with default options."""
    logs = ["--log-dir", LOGS, "--redirects", "3"] if LOGS in row.options else []
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", n, *logs]


def composer(program: str) -> Command:
    """Return the command of Composer's launcher on one node, with default options."""

    def command(row: Row, n: str) -> list[str]:
        logs = ["--stdout", f"{LOGS}/{{rank}}"] if LOGS in row.options else []
        return [program, "-n", n, *logs]

    return command


def cell(row: Row, command: Command, *, cap_s: float) -> str:
    """Run a row and return its outcome."""
    if command is not dtrain and row.not_for_others:
        return f"not tried: {row.not_for_others}"
    if row.mounts and (refusal := why_no_mounts()):
        return f"not tried: {refusal}"
    folder = Path(tempfile.mkdtemp(prefix="truth-"))
    with row.world() as variables:
        job = start(row, command, folder / "job", n=RANKS, culprit=RANKS - 1, variables=variables)
        try:
            seen = job.finish(job.act(), within_s=cap_s, settle_s=SETTLE_S)
        finally:
            job.end()
    shutil.rmtree(folder)
    return describe(seen, cap_s=cap_s)


def describe(seen: Seen, *, cap_s: float) -> str:
    """The text of a cell."""
    if seen.code is None:
        return f"did not end in {cap_s:g} s"
    files = f", {len(seen.left)} temporary file{'s' * (len(seen.left) > 1)}" if seen.left else ""
    return f"{seen.code}, {len(seen.lines)}, {len(seen.survivors)}, {seen.seconds:.1f} s{files}"


def table(launchers: Mapping[str, Command], rows: list[Row], *, cap_s: float) -> None:
    """Print the table, row by row."""
    print(f"| what happens | {' | '.join(launchers)} |")
    print(f"|---|{'---|' * len(launchers)}")
    for row in rows:
        cells = [cell(row, command, cap_s=cap_s) for command in launchers.values()]
        print(f"| {row.name} | {' | '.join(cells)} |", flush=True)


def named(worlds: Sequence[int], faults: Sequence[Fault]) -> None:
    """Print how many innocent ranks the others name, and the time until the last of them has raised, on real ranks."""
    print(f"| fault | {' | '.join(f'{world} ranks' for world in worlds)} |")
    print(f"|---|{'---|' * len(worlds)}")
    for fault in faults:
        cells = []
        for world in worlds:
            outcome = run_fault(fault, world)
            said = len(outcome.errors) - len(outcome.unclear & outcome.errors.keys())
            last = f"{max(outcome.seconds.values(), default=0.0):.1f} s"
            cells.append(f"{len(outcome.innocent)}, {said} of {len(outcome.errors)}, {last}")
        print(f"| {fault.name} | {' | '.join(cells)} |", flush=True)


def simulated(worlds: Sequence[int], faults: Sequence[SimulatedFault]) -> None:
    """Print the same for virtual ranks, with the requests of a rank to the store."""
    print(f"| fault, simulated | {' | '.join(f'{world:,} ranks' for world in worlds)} |")
    print(f"|---|{'---|' * len(worlds)}")
    for fault in faults:
        cells = []
        for world in worlds:
            outcome = simulate(fault, world)
            reports = outcome.found.reports
            said = f"{len(reports) - len(outcome.unsaid):,} of {len(reports):,}"
            cells.append(f"{len(outcome.innocent)}, {said}, {outcome.found.requests / world:.1f} requests")
        print(f"| {fault.name} | {' | '.join(cells)} |", flush=True)


def versions(program: str | None) -> list[str]:
    """Composer's own, which need not be installed beside this Python."""
    if program is None:
        return []
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120).stdout.strip()
    return [f"composer: {said}"]


def main() -> None:
    """Print the machine and the table."""
    parser = argparse.ArgumentParser(description="The truth table of dtrain launch beside other launchers.")
    parser.add_argument("--cap", type=float, default=60.0, help="seconds after which a launcher is ended")
    parser.add_argument("--only", action="append", help="rows whose name has this text; may be repeated")
    parser.add_argument("--composer", default=shutil.which("composer"), help="path of Composer's launcher")
    parser.add_argument("--named", nargs="+", type=int, default=[], metavar="RANKS", help="only faults of real ranks")
    parser.add_argument("--simulated", nargs="+", type=int, default=[], metavar="RANKS", help="only faults of virtual ranks")
    options = parser.parse_args()
    chosen = options.only or [""]
    if options.named:
        named(options.named, [fault for fault in FAULTS if any(text in fault.name for text in chosen)])
    if options.simulated:
        simulated(options.simulated, [fault for fault in SIMULATED if any(text in fault.name for text in chosen)])
    if options.named or options.simulated:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # or torchrun says five lines about it each time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would have every launcher ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one under nohup this
    launchers: dict[str, Command] = {"dtrain": dtrain, "torchrun": torchrun}
    if options.composer:
        launchers["composer"] = composer(options.composer)
    for line in [f"date: {date.today()}", *machine().splitlines(), *versions(options.composer)]:
        print(f"- {line}")
    print()
    table(launchers, [row for row in ROWS if any(text in row.name for text in options.only or [""])], cap_s=options.cap)


if __name__ == "__main__":
    main()
