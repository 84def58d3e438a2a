"""Rows of the table of peers that other scripts have the candidates of: data, checkpoints, launches, imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

import data_streaming
import launch
from checkpoint_ranks import leave, loads, memory, saves
from data_loading import WORKS, all_cpu, in_memory
from data_position import M, our_resume, their_resume
from data_streaming import CASES
from dtrain.testing import Ranks, run_ranks
from import_time import commands, run
from measure import WALL, Rounds, Run, child_cpu, compile_bytecode, interleaved

Measured = Mapping[str, Mapping[str, Rounds]]
"""Rounds by clock and candidate."""

WORLD, TIMEOUT_S = 2, 3600.0
PROCESS, WALL_TIME = "processor time", "wall time"
OF_PROCESSES = {PROCESS: child_cpu, WALL_TIME: WALL}


def memory_pass(rounds: int, scale: float, *, dataset: str) -> Measured:
    """Passes through a dataset in memory, without workers."""
    (usual,) = (work.size for work in WORKS if work.name == dataset)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = in_memory(dataset, max(128, int(usual * scale)), Path(folder))
        return interleaved(runs, rounds=rounds, clocks={PROCESS: all_cpu})


def mds_pass(rounds: int, scale: float, *, workers: int) -> Measured:
    """Passes through MDS shards on the disk."""
    case = next(case for case in CASES if case.workers == workers and not case.remote)
    samples = max(128, int(12_288 * scale))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data_streaming.write(folder / "shards", samples)
        makes = {"mosaicml-streaming": data_streaming.theirs, "dtrain": data_streaming.ours}
        runs = {name: make(case, str(folder / "shards"), folder, samples) for name, make in makes.items()}
        return interleaved(runs, rounds=rounds, clocks={WALL_TIME: WALL})


def resume(rounds: int, scale: float) -> Measured:
    """To the first batch of a loader that resumes in the middle of a shuffled epoch. The peer takes seconds: few rounds."""
    size = max(4_096, int(20 * M * scale))
    runs = {"StatefulDataLoader": their_resume(size), "dtrain": our_resume(size)}
    return interleaved(runs, rounds=min(rounds, 2), clocks={WALL_TIME: WALL})


def small_load(rounds: int, scale: float) -> Measured:
    """Loads of many small tensors. A load of the peer takes 10 to 20 seconds, and each round makes two: few rounds."""
    with tempfile.TemporaryDirectory() as folder:
        size = max(5, int(5_000 * scale))
        report = run_ranks(loads, WORLD, "small", size, folder, ["DCP", "dtrain"], min(rounds, 2), timeout_s=TIMEOUT_S)[0]
    return {WALL_TIME: {name: moments["done"] for name, moments in report["timings"].items()}}


def async_stall(rounds: int, scale: float) -> Measured:
    """Time for which an async save holds the training thread, and for which the same bytes are copied within memory."""
    ways = {"memcpy": "memcpy", "DCP, stager reused": "DCP async, stager reused", "dtrain": "dtrain async"}
    with tempfile.TemporaryDirectory() as folder:
        size = int(100 * M * scale)
        report = run_ranks(saves, WORLD, "large", size, folder, list(ways.values()), rounds, timeout_s=TIMEOUT_S)[0]
    timings = report["timings"]
    return {WALL_TIME: {name: timings[way].get("held", timings[way]["done"]) for name, way in ways.items()}}


def load_memory(rounds: int, scale: float) -> Measured:
    """Peak megabytes of a load into a run that has made a step, above those before it; each time in new processes."""
    size, ways, by_way = int(100 * M * scale), ("DCP", "dtrain"), {}
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(leave, WORLD, "large", size, folder, list(ways), timeout_s=TIMEOUT_S)
        for name in ways:
            peaks = []
            for _ in range(2 * rounds):
                with Ranks(WORLD) as ranks:
                    reports = ranks.run(memory, "large", size, folder, name, True, timeout_s=TIMEOUT_S)
                peaks.append(max(report["above"] for report in reports) / 1e6)
            by_way[name] = list(zip(peaks[::2], peaks[1::2], strict=True))
    return {"resident memory": by_way}


def import_time(rounds: int) -> Measured:
    """Processes that import one thing and end."""
    compile_bytecode()
    lines = {
        "torch": "import torch",
        "Accelerate": "from accelerate import Accelerator",
        "dtrain": "from dtrain import compose_step",
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: partial(run, [sys.executable, "-c", line], 0, folder) for name, line in lines.items()}
        return interleaved(runs, rounds=rounds, clocks=OF_PROCESSES)


def help_time(rounds: int) -> Measured:
    """Command lines that print their help."""
    compile_bytecode()
    names = {"Python alone": "python -c pass", "torchrun": "torchrun --help", "dtrain": "dtrain --help"}
    with tempfile.TemporaryDirectory() as folder:
        all_commands = commands()
        runs = {name: partial(run, *all_commands[command], folder) for name, command in names.items()}
        return interleaved(runs, rounds=rounds, clocks=OF_PROCESSES)


def no_op(rounds: int) -> Measured:
    """Launches of two ranks whose script does nothing; the floor is two processes of Python at the same time."""
    compile_bytecode()
    with tempfile.TemporaryDirectory() as folder:
        launch.write_scripts(folder)
        ways = launch.ways(folder, "nothing", WORLD, ("--no-preload",))
        runs: dict[str, Run] = {"Python alone": partial(_two_processes, f"{folder}/nothing.py")}
        runs |= {name: ways[name] for name in ("torchrun", "dtrain")}
        return interleaved(runs, rounds=rounds, clocks={WALL_TIME: WALL})


def _two_processes(script: str) -> None:
    for process in [subprocess.Popen([sys.executable, script]) for _ in range(WORLD)]:
        process.wait()
