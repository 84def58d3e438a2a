"""``dtrain launch`` beside torchrun, and accelerate and composer where they are installed: how long until, and how much memory.

Run it as ``python benchmarks/launch.py``, with dtrain installed in that Python. Measured are the way to a first all-reduce and
out again, a script that does nothing, the memory of the launcher's own processes, the time from a failure to the launcher's
exit, and the gap between a failure and the first line of the ranks that were started again. Targets are ratios to torchrun in
the same rounds, besides the memory (40 MB) and the refusal of a bad script (0.3 s).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from measure import WALL, Run, compare, compile_bytecode, interleaved, machine, typical, verdict_line

MEET = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
"""
NOTHING = "pass\n"
STAY = """
import os, time
import torch
path = f"{os.environ['FOLDER']}/up-{os.environ['RANK']}"
open(path + ".partial", "w").write(str(os.getpid()))
os.rename(path + ".partial", path)
time.sleep(600)
"""
FAIL = """
import os, sys, time
folder, rank = os.environ["FOLDER"], os.environ["RANK"]
open(f"{folder}/up-{rank}", "w").close()
if rank == "1":
    while not os.path.exists(f"{folder}/up-0"):
        time.sleep(0.01)
    open(f"{folder}/failed", "w").write(repr(time.monotonic()))
    sys.exit(3)
time.sleep(600)
"""
AGAIN = """
import os, sys, time
import torch
folder, rank = os.environ["FOLDER"], os.environ["RANK"]
now = time.monotonic()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if rank == "1":
        open(f"{folder}/failed", "w").write(repr(now))
        sys.exit(3)
    time.sleep(600)
if rank == "0":
    open(f"{folder}/again", "w").write(repr(now))
"""
SCRIPTS = {"meet": MEET, "nothing": NOTHING, "stay": STAY, "fail": FAIL, "again": AGAIN}

Launcher = Callable[..., list[str]]


def launchers() -> dict[str, Launcher]:
    """Command lines by launcher: ``launcher(script, ranks, *options)``. Options are dtrain's."""
    beside = Path(sys.executable).parent

    def dtrain(script: str, ranks: int, *options: str) -> list[str]:
        return [str(beside / "dtrain"), "launch", "-n", str(ranks), *options, script]

    def torchrun(script: str, ranks: int, *options: str) -> list[str]:
        again = [f"--max-restarts={options[1]}"] if "--max-restarts" in options else []
        return [str(beside / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *again, script]

    def accelerate(script: str, ranks: int, *_: str) -> list[str]:
        return [str(beside / "accelerate"), "launch", "--cpu", f"--num_processes={ranks}", "--multi_cpu", script]

    def composer(script: str, ranks: int, *_: str) -> list[str]:
        return [str(beside / "composer"), "-n", str(ranks), script]

    commands: dict[str, Launcher] = {"dtrain": dtrain, "torchrun": torchrun, "accelerate": accelerate, "composer": composer}
    return {name: launcher for name, launcher in commands.items() if (beside / name).exists()}


def run(command: Sequence[str], folder: str, expected: int | None = 0) -> None:
    """Run one launcher to its end. Raise if it fails, as its time means nothing."""
    for path in (*Path(folder).glob("up-*"), Path(folder) / "failed", Path(folder) / "again"):
        path.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=folder, env={**os.environ, "FOLDER": folder}, capture_output=True, text=True)
    if expected is not None and done.returncode != expected:
        raise SystemExit(f"launch: {' '.join(command)} exited with {done.returncode}, not {expected}: {done.stderr[-500:]}")


def write_scripts(folder: str) -> None:
    for name, source in SCRIPTS.items():
        (Path(folder) / f"{name}.py").write_text(source)


def ways(folder: str, script: str, ranks: int, options: Sequence[str] = ()) -> dict[str, Run]:
    """A launch per call of each launcher."""
    path = f"{folder}/{script}.py"
    return {name: partial(run, launcher(path, ranks, *options), folder) for name, launcher in launchers().items()}


def compare_ways(folder: str, rounds: int) -> None:
    """The way to a first all-reduce, and a script that does nothing."""
    rows = (
        ("-n 2 to a gloo all-reduce and exit", "meet", 2, (), 0.6),
        ("-n 8 to a gloo all-reduce and exit", "meet", 8, (), 0.35),
        ("-n 2 of nothing, --no-preload", "nothing", 2, ("--no-preload",), 0.15),
    )
    for what, script, ranks, options, target in rows:
        timings = interleaved(ways(folder, script, ranks, options), rounds=rounds, warmup=1, clocks={"wall": WALL})["wall"]
        for name, of in timings.items():
            print(f"{what:38} {name:10} {typical(of).value:6.2f} s, best {min(min(pair) for pair in of):6.2f} s")
        print(verdict_line(f"{what}, of torchrun", compare(timings["dtrain"], timings["torchrun"]).ratio, at_most=target))
        best = {name: min(min(pair) for pair in of) for name, of in timings.items()}
        print(f"{what}, best of {2 * rounds} against best of {2 * rounds}: {best['dtrain'] / best['torchrun']:.3f}x")


def memory_of_launchers(folder: str) -> None:
    """Memory of the processes that a launcher consists of, while its two ranks have loaded torch and sleep.

    Resident memory of the process that was started, and the proportional share of all that are no ranks: the preloaded process
    has nearly all of its pages in common with the ranks.
    """
    for name, launcher in launchers().items():
        for path in Path(folder).glob("up-*"):
            path.unlink()
        command = launcher(f"{folder}/stay.py", 2)
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, "FOLDER": folder}, stderr=subprocess.DEVNULL)
        while not all((Path(folder) / f"up-{rank}").exists() for rank in range(2)):
            time.sleep(0.05)
        ranks = {int((Path(folder) / f"up-{rank}").read_text() or 0) for rank in range(2)}
        own = [pid for pid in (process.pid, *_below(process.pid)) if pid not in ranks]
        shares = [_megabytes(pid, "smaps_rollup", "Pss:") for pid in own]
        parts = " + ".join(f"{share:.0f}" for share in shares)
        print(
            f"memory of {name}: parent {_megabytes(process.pid, 'status', 'VmRSS:'):.0f} MB resident; share of all: {parts} MB"
        )
        process.send_signal(signal.SIGINT)
        process.wait()


def _below(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(pid for child in children for pid in _below(child))]


def _megabytes(pid: int, file: str, field: str) -> float:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def failure_to_exit(folder: str, rounds: int) -> None:
    """Measure the time from the failure of a rank to the launcher's exit; ranks end at once when they are asked."""
    for name, launcher in launchers().items():
        seconds = []
        for _ in range(rounds):
            run(launcher(f"{folder}/fail.py", 2), folder, expected=None)
            seconds.append(time.monotonic() - float((Path(folder) / "failed").read_text()))
        _print_spread(f"failure to exit, {name}", seconds)


def restart_gap(folder: str, rounds: int) -> None:
    """Measure the time from the failure of a rank to the first line after ``import torch`` of the restarted ranks."""
    for name, launcher in launchers().items():
        if name not in ("dtrain", "torchrun"):
            continue
        seconds = []
        for _ in range(rounds):
            run(launcher(f"{folder}/again.py", 2, "--max-restarts", "1"), folder)
            seconds.append(float((Path(folder) / "again").read_text()) - float((Path(folder) / "failed").read_text()))
        _print_spread(f"restart gap, {name}", seconds)


def refusals(folder: str, rounds: int) -> None:
    """Measure the time until a missing script is refused."""
    timings = interleaved(
        {name: partial(run, launcher(f"{folder}/nope.py", 2), folder, None) for name, launcher in launchers().items()},
        rounds=rounds,
        warmup=1,
        clocks={"wall": WALL},
    )["wall"]
    for name, of in timings.items():
        print(f"a script that is not there: {name:10} {typical(of).value:6.2f} s")
    print(verdict_line("a script that is not there, dtrain", typical(timings["dtrain"]), at_most=0.3, unit=" s"))


def _print_spread(what: str, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(f"{what}: median {ordered[len(ordered) // 2]:.2f} s, p95 {late:.2f} s, worst {ordered[-1]:.2f} s of {len(ordered)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of two launches per launcher (default: 5)")
    parser.add_argument("--failures", type=int, default=20, help="failures per launcher (default: 20)")
    parser.add_argument("--only", choices=PARTS, help="one part")
    given = parser.parse_args()
    print(machine())
    compile_bytecode()
    with tempfile.TemporaryDirectory() as folder:
        write_scripts(folder)
        for name, measure in PARTS.items():
            if given.only in (None, name):
                measure(folder, given)


PARTS: Mapping[str, Callable[[str, argparse.Namespace], None]] = {
    "ways": lambda folder, given: compare_ways(folder, given.rounds),
    "memory": lambda folder, given: memory_of_launchers(folder),
    "failures": lambda folder, given: failure_to_exit(folder, given.failures),
    "restarts": lambda folder, given: restart_gap(folder, max(3, given.failures // 4)),
    "refusals": lambda folder, given: refusals(folder, given.rounds),
}


if __name__ == "__main__":
    main()
