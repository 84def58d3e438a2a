"""Run benchmarks for a GPU, each in a process of its own, and say at the end which of them ended. Needs no installation.

    python benchmarks/gpu.py quick                          # the most in 9 minutes, into benchmarks/results/gpu-*.json
    python benchmarks/gpu.py core                           # tests of the core on the GPU, files in random order
    python benchmarks/gpu.py train kernels --seconds 120    # two benchmarks, at most 120 s each
    python benchmarks/gpu.py quick --toy --out build/dry    # a dry run at toy size, on a CPU too

Wheels in the folder ``.whl`` of the checkout are installed into ``build/site`` first. ``python benchmarks/figures.py`` then
writes the tables of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
WHEELS, SITE = ROOT / ".whl", ROOT / "build" / "site"

INTERRUPT_GRACE_S = 30.0
"""Seconds that an interrupted benchmark has to end its processes."""

PROGRESS_S = 10.0
"""Seconds between two reports of the progress of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Args:
        module: module with the function of the benchmark's name.
        seconds: limit of a run without ``--seconds``.
        quick: share of the seconds of ``quick``; 0 if it is no part of it.
    """

    module: str
    seconds: float
    quick: float = 0


BENCHMARKS: Mapping[str, Benchmark] = {
    "smoke": Benchmark(module="gpu_smoke", seconds=120, quick=65),
    "resume": Benchmark(module="gpu_smoke", seconds=120, quick=45),
    "train": Benchmark(module="gpu_step", seconds=480, quick=140),
    "overhead": Benchmark(module="gpu_step", seconds=240, quick=55),
    "auto_microbatch": Benchmark(module="gpu_microbatch", seconds=240, quick=60),
    "async_save": Benchmark(module="gpu_save", seconds=240, quick=50),
    "memory": Benchmark(module="gpu_memory", seconds=300, quick=50),
    "tests": Benchmark(module="gpu_tests", seconds=300, quick=75),
    "kernels": Benchmark(module="gpu_kernels", seconds=300),
    "core": Benchmark(module="gpu_tests", seconds=480),
}
"""Benchmarks by name, in the order of ``quick``."""

QUICK_S = sum(benchmark.quick for benchmark in BENCHMARKS.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named benchmarks one after the other; exit with 1 if one of them did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["quick", *BENCHMARKS]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seconds", type=float, help=f"limit of each benchmark; of quick, of all ({QUICK_S:.0f})")
    parser.add_argument("--toy", action="store_true", help="a dry run at toy size; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files (%(default)s)")
    args = parser.parse_args(arguments)
    if args.toy and args.out.resolve() == RESULTS.resolve():
        parser.error("--toy needs --out FOLDER, because a dry run is no result")
    if "quick" in args.names and len(args.names) > 1:
        parser.error("quick must be the only name, because it has a limit of its own")
    # `timeout` ends a command by SIGTERM, and a shell starts commands in the background deaf to SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    outcomes = run_all(limits(args.names, args.seconds), args.out.resolve(), toy=args.toy)
    if set(outcomes.values()) != {"ok"}:
        raise SystemExit(1)


def limits(names: Sequence[str], seconds: float | None) -> dict[str, float]:
    """Return the seconds of each benchmark by name."""
    if list(names) == ["quick"]:
        total = seconds or QUICK_S
        return {name: total * benchmark.quick / QUICK_S for name, benchmark in BENCHMARKS.items() if benchmark.quick}
    return {name: seconds or BENCHMARKS[name].seconds for name in names}


def run_all(limits: Mapping[str, float], folder: Path, *, toy: bool) -> dict[str, str]:
    """Run each benchmark, also after one that failed; print and return the outcomes. The last one takes the time left."""
    outcomes = dict.fromkeys(limits, "not reached")
    deadline = time.monotonic() + sum(limits.values())
    # A dry run may share its cores with others: threads that wait for each other would take minutes.
    env = environment() | ({"OMP_NUM_THREADS": "1"} if toy else {})
    try:
        for name, limit in limits.items():
            left = deadline - time.monotonic()
            if left < min(limit, INTERRUPT_GRACE_S):
                break
            seconds = left if name == list(limits)[-1] else min(limit, left)
            options = ["--seconds", f"{seconds:.0f}", "--out", str(folder), *(["--toy"] if toy else [])]
            outcomes[name] = "interrupted"
            code = run_limited([sys.executable, str(HERE / "gpu_part.py"), name, *options], seconds, env)
            outcomes[name] = "cut off" if code is None else "ok" if code == 0 else "failed"
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("\n" + "\n".join(f"{name:16}{outcome}" for name, outcome in outcomes.items()), flush=True)
    return outcomes


def environment() -> dict[str, str]:
    """Return the variables of a benchmark's process, with the packages of the wheels and the checkout on its path."""
    if WHEELS.is_dir() and not SITE.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(SITE)]
        subprocess.run([*pip, *map(str, sorted(WHEELS.glob("*.whl")))], check=True)
    folders = [SITE, ROOT / "src", HERE, ROOT / "examples", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONUNBUFFERED": "1"}


def run_limited(
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str],
    *,
    grace_s: float = INTERRUPT_GRACE_S,
    progress: Callable[[], object] | None = None,
) -> int | None:
    """Run a command, interrupt it after ``seconds``, and kill what is left. Return its exit code, None if interrupted.

    A command with ``progress``, which is called as it goes, is part of a benchmark, and stays in the benchmark's session.
    """
    deadline = time.monotonic() + seconds
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=progress is None) as process:
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(PROGRESS_S, left))
                if progress is not None:
                    progress()
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            # Ranks and workers of a benchmark that ended do not disturb the next one.
            if progress is not None:
                process.kill()
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
