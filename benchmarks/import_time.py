"""Measure ``dtrain --help``, a mistyped ``dtrain launch`` and imports of dtrain against bare Python, torch and peers.

Run it as ``python benchmarks/import_time.py``, with dtrain installed in that Python. Targets: 0.3 s for each command, 0.1 s for
the import beyond the time of a bare Python, 0.18 s for the import of a step beyond that of torch. Each is judged twice: by the
clock on the wall, which a busy machine stretches, and by the processor time of the process, which it hardly does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from measure import WALL, Comparison, Rounds, child_cpu, compare, compile_bytecode, interleaved, machine, typical, verdict_line

COMMAND_S, IMPORT_S, STEP_S = 0.3, 0.1, 0.18
HELP, MISTAKE, IMPORT, BARE = "dtrain --help", "dtrain launch nope.py", "import dtrain", "python -c pass"
STEP, TORCH = "from dtrain import compose_step", "import torch"
PEERS = ("torchrun", "accelerate", "composer")


def commands() -> dict[str, tuple[list[str], int]]:
    """Command lines by name, each with the exit code that it must have. Peers are those installed beside this Python."""
    beside = Path(sys.executable).parent
    ours = {
        BARE: ([sys.executable, "-c", "pass"], 0),
        **{line: ([sys.executable, "-c", line], 0) for line in (IMPORT, STEP, TORCH)},
        HELP: ([str(beside / "dtrain"), "--help"], 0),
        MISTAKE: ([str(beside / "dtrain"), "launch", "nope.py"], 2),
    }
    peers = {f"{peer} --help": ([str(beside / peer), "--help"], 0) for peer in PEERS if (beside / peer).exists()}
    return ours | peers


def run(command: Sequence[str], expected: int, folder: str) -> None:
    """Run one process to its end. Raise if it fails, as its time means nothing."""
    code = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    if code != expected:
        raise SystemExit(f"import_time: {' '.join(command)} exited with {code}, not {expected}; is dtrain installed?")


def report(timings: Mapping[str, Mapping[str, Rounds]]) -> None:
    """Print the table of all commands, and a verdict per claim and clock."""
    print(f"{'':32} {'wall s (95% interval)':>24} {'cpu s (95% interval)':>24}")
    for name in timings["wall"]:
        figures = (typical(timings[clock][name]) for clock in ("wall", "cpu"))
        cells = (f"{figure.value:.3f} ({figure.low:.3f}..{figure.high:.3f})" for figure in figures)
        print(f"{name:32} " + " ".join(f"{cell:>24}" for cell in cells))
    for name in (peer for peer in timings["wall"] if peer.split()[0] in PEERS):
        print(f"{HELP} takes {_ratio(timings['cpu'], HELP, name)} of {name} in processor time")
    for clock, of in timings.items():
        for name in (HELP, MISTAKE):
            print(verdict_line(f"{name}, {clock}", typical(of[name]), at_most=COMMAND_S, unit=" s"))
        beyond = compare(of[IMPORT], of[BARE]).difference
        print(verdict_line(f"{IMPORT} beyond {BARE}, {clock}", beyond, at_most=IMPORT_S, unit=" s"))
        beyond = compare(of[STEP], of[TORCH]).difference
        print(verdict_line(f"{STEP} beyond {TORCH}, {clock}", beyond, at_most=STEP_S, unit=" s"))


def _ratio(of: Mapping[str, Rounds], ours: str, theirs: str) -> Comparison:
    return compare(of[ours], of[theirs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of two processes per command (default: 5)")
    rounds = parser.parse_args().rounds
    print(machine())
    compile_bytecode()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: partial(run, command, expected, folder) for name, (command, expected) in commands().items()}
        report(interleaved(runs, rounds=rounds, warmup=1, clocks={"wall": WALL, "cpu": child_cpu}))


if __name__ == "__main__":
    main()
