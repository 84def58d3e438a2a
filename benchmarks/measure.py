"""Measuring code against other code on a machine that others use too: interleaved runs, the A/A band beside them, a verdict.

A ratio of two timings says little by itself. Here every round runs each candidate twice, in an order drawn anew. The two runs
of one candidate differ by noise alone: their ratio, pushed through the same arithmetic as the ratio that is claimed, is the
A/A band. A claim that lies within the band of its target is "not resolved", never "met".
"""

from __future__ import annotations

import compileall
import gc
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Literal

Clock = Callable[[], float]
Run = Callable[[], object]
Timer = Callable[[Run], Mapping[str, float]]
Rounds = Sequence[tuple[float, float]]
"""Seconds of one candidate: its two runs of each round."""
Verdict = Literal["met", "not met", "not resolved"]

WALL: Clock = time.perf_counter
CPU: Clock = time.process_time  # of all threads of this process

PACKAGES = ("dtrain", "torch", "numpy", "tensordict", "typer")
_DRAWS, _TAIL = 1000, 0.025  # a 95% interval by the bootstrap


def child_cpu() -> float:
    """CPU seconds of the child processes that have ended: the clock for measuring commands."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def count_calls(run: Run) -> int:
    """Count the calls of functions, in Python and in C, of one ``run``: a figure of overhead that has no noise."""
    calls = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # A collection of garbage calls finalizers, at any time.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    # The call that ends the profile is none of the run.
    return calls - 1


def compile_bytecode() -> None:
    """Write dtrain's bytecode, as an installation does; processes that run from a checkout may compile it each time."""
    package = find_spec("dtrain")
    assert package is not None
    assert package.origin is not None
    compileall.compile_dir(Path(package.origin).parent, quiet=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured figure, and the interval in which the noise of this run leaves it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two candidates measured in the same rounds.

    Args:
        ratio: median over pairs of ``a / b``, with the A/A band around it.
        difference: median over pairs of ``a - b`` in seconds, with the A/A band around it.
        band: the median of ``pairs`` A/A ratios falls between these two ratios; holds 1.
        a_s: median seconds of the first.
        b_s: median seconds of the second.
        pairs: how many.
    """

    ratio: Figure
    difference: Figure
    band: tuple[float, float]
    a_s: float
    b_s: float
    pairs: int

    def __str__(self) -> str:
        low, high = self.band
        return f"{self.ratio.value:.3f}x of {_seconds(self.b_s)} (A/A band {low:.3f}..{high:.3f}, {self.pairs} pairs)"


def paired(a: Run, b: Run, *, pairs: int = 300, warmup: int = 10, clock: Clock = CPU, seed: int = 0) -> Comparison:
    """Measure the duration of ``a`` against ``b``, from interleaved runs.

    Args:
        a: the candidate; called without arguments, its result is dropped.
        b: the reference.
        pairs: number of ratios, even; 300 or more for a training step, 5 or more (6) for a process.
        warmup: calls of each before the first call that counts.
        clock: seconds so far: ``CPU``, ``WALL``, ``child_cpu``, or any other clock.
        seed: of the order of calls.
    """
    if pairs < 2 or pairs % 2:
        raise ValueError(f"paired: needs an even number of pairs, got {pairs=}")
    timings = interleaved({"a": a, "b": b}, rounds=pairs // 2, warmup=warmup, clocks={"clock": clock}, seed=seed)["clock"]
    return compare(timings["a"], timings["b"])


def interleaved(
    candidates: Mapping[str, Run], *, rounds: int, warmup: int = 1, clocks: Mapping[str, Clock], seed: int = 0
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Seconds by clock and candidate. Each round calls every candidate twice, in an order drawn anew."""

    def timer(run: Run) -> dict[str, float]:
        before = {clock: read() for clock, read in clocks.items()}
        run()
        return {clock: read() - before[clock] for clock, read in clocks.items()}

    return timed_rounds(candidates, timer, rounds=rounds, warmup=warmup, seed=seed)


def timed_rounds(
    candidates: Mapping[str, Run], timer: Timer, *, rounds: int, warmup: int = 1, seed: int = 0
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Do the same with a ``timer``, which calls a candidate and returns its seconds by clock."""
    for _ in range(warmup):
        for run in candidates.values():
            run()
    order = random.Random(seed)
    timings: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for _ in range(rounds):
        calls = [name for name in candidates for _ in range(2)]
        order.shuffle(calls)
        seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in candidates}
        for name in calls:
            seen[name].append(timer(candidates[name]))
        for name, (first, second) in seen.items():
            for clock in first:
                timings.setdefault(clock, {candidate: [] for candidate in candidates})[name].append(
                    (first[clock], second[clock])
                )
    return timings


def compare(a: Rounds, b: Rounds) -> Comparison:
    """The ratio and the difference of two candidates of the same rounds."""
    pairs = [(x, y) for two, others in zip(a, b, strict=True) for x, y in zip(two, others, strict=True)]
    ratio, difference = median([x / y for x, y in pairs]), median([x - y for x, y in pairs])
    low, high = _widest(_band([x / y for x, y in _turned(same)], size=len(pairs), null=1.0) for same in (a, b))
    less, more = _widest(_band([x - y for x, y in _turned(same)], size=len(pairs), null=0.0) for same in (a, b))
    return Comparison(
        ratio=Figure(value=ratio, low=ratio * low, high=ratio * high),
        difference=Figure(value=difference, low=difference + less, high=difference + more),
        band=(low, high),
        a_s=median([x for x, _ in pairs]),
        b_s=median([y for _, y in pairs]),
        pairs=len(pairs),
    )


def _turned(rounds: Rounds) -> Rounds:
    """Rounds with every second run, by the toss of a coin, put first.

    The second run of a round finds warmer caches (2-4% of a 1 ms step). Pairs of two candidates are alike in that, but in
    pairs of a candidate with itself it would pass for noise of one sign, and move the whole band.
    """
    coin = random.Random(0)
    return [(second, first) if coin.random() < 0.5 else (first, second) for first, second in rounds]


def typical(rounds: Rounds) -> Figure:
    """The median seconds of one candidate, and the interval of medians drawn again from its runs."""
    runs = [run for two in rounds for run in two]
    value = median(runs)
    low, high = _band(runs, size=len(runs), null=value)
    return Figure(value=value, low=low, high=high)


def _band(values: Sequence[float], *, size: int, null: float) -> tuple[float, float]:
    """Between which values the median of ``size`` draws lies; widened to ``null``, where it would be without noise.

    Draws blocks of neighbours, because the noise of a shared machine comes in bursts.
    """
    draw = random.Random(0)
    block = max(1, round(size ** (1 / 3)))
    ring = [*values, *values[: block - 1]]
    medians = []
    for _ in range(_DRAWS):
        starts = (draw.randrange(len(values)) for _ in range(-(-size // block)))
        medians.append(median([value for start in starts for value in ring[start : start + block]][:size]))
    medians.sort()
    tail = int(_DRAWS * _TAIL)
    return min(medians[tail], null), max(medians[-1 - tail], null)


def _widest(bands: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return a band around both candidates' bands: a noisy candidate must not be compared by the quiet of the other."""
    lows, highs = zip(*bands, strict=True)
    return min(lows), max(highs)


def verdict(figure: Figure, *, at_most: float) -> Verdict:
    """Return whether this run shows that a figure is at most its target."""
    if figure.high <= at_most:
        return "met"
    return "not met" if figure.low > at_most else "not resolved"


def verdict_line(what: str, figure: Figure, *, at_most: float, unit: str = "x") -> str:
    """The line that a benchmark ends with: the claim, the figure with its interval, the target, the verdict."""
    value, low, high, target = (f"{number:.3f}" for number in (figure.value, figure.low, figure.high, at_most))
    return f"{what}: {value}{unit} ({low}..{high}), target <= {target}{unit}: {verdict(figure, at_most=at_most)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def machine() -> str:
    """Describe the machine in lines: processor, memory, load, GPUs, and versions."""
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}"
    lines = [
        f"machine: {_processor()}, {cores}, {gib:.0f} GiB, load {os.getloadavg()[0]:.1f}, {system}",
        *(f"gpu: {gpu}" for gpu in gpus()),
        f"versions: python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    ]
    return "\n".join(lines)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU of NVIDIA, separated by commas."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
