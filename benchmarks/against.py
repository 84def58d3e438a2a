"""Measure this checkout against another checkout: each part of a loop on 1 to 8 ranks, in processor and wall time.

    python benchmarks/against.py                         # this checkout against itself: the A/A band
    python benchmarks/against.py /path/to/src            # against the folder src of another checkout
    python benchmarks/against.py /path/to/src --ranks 1 --rounds 20 --steps 2000

Every run is a new process that imports dtrain from one of the two folders and forks its ranks. Times are the mean over the
ranks; processor time is that of all threads of a rank. The model is tiny, the worst case: all of the time is overhead. With
more ranks than cores a rank waits for a core, and a thread that polls while it waits takes processor time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import operator
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from measure import Run, compare, machine, timed_rounds, verdict_line

AT_MOST = 1.05
WIDTH, SAMPLES = 16, 8
TIMEOUT_S = 300.0

Seconds = dict[str, float]


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def time_parts(root: Path, steps: int) -> Seconds:
    """Run a loop on this rank, and return the seconds of each part: processor, and wall."""
    seconds: Seconds = {}

    @contextmanager
    def part(name: str, count: int = 1) -> Iterator[None]:
        processor, wall = time.process_time(), time.perf_counter()
        yield
        seconds[name] = (time.process_time() - processor) / count
        seconds[f"{name}, wall"] = (time.perf_counter() - wall) / count

    with part("init_dist"):
        dt.init_dist()
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, WIDTH)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with part("shard_model, first step"):
        is_alone = torch.distributed.get_world_size() == 1
        model = plain if is_alone else dt.shard_model(plain, dt.build_mesh(), blocks=(nn.Linear,))
        step = dt.compose_step(loss_fn)
        state = step.init(model, torch.optim.AdamW(model.parameters()))
        state, metrics = step(state, batch)
    with part("step", steps):
        for _ in range(steps):
            state, metrics = step(state, batch)
            dt.reduce_metrics(metrics)
    with part("evaluate, a batch", 20):
        dt.evaluate(model, [batch] * 20, loss_fn)
    with part("save_sharded", 2):
        for _ in range(2):
            dt.save_sharded(root / "checkpoints", state)
            state, _ = step(state, batch)
    with part("load_sharded"):
        dt.load_sharded(root / "checkpoints", state)
    guarded = dt.compose_step(loss_fn, [dt.auto_microbatch(initial_size=2, grow_every=None)])
    state = guarded.init(model, torch.optim.AdamW(model.parameters()))
    state, _ = guarded(state, batch)
    with part("auto_microbatch, a later step", steps // 4):
        for _ in range(steps // 4):
            state, _ = guarded(state, batch)
    return seconds


def _run_rank(rank: int, environment: dict[str, str], root: Path, steps: int, results: Any) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    results.put(time_parts(root, steps))
    torch.distributed.barrier()


def run_ranks_here(ranks: int, steps: int) -> Seconds:
    """Fork the ranks of one loop, and return the mean of their seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as root:
        processes = [
            context.Process(target=_run_rank, args=(rank, environment, Path(root), steps, results), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        by_rank = [results.get(timeout=TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(TIMEOUT_S)
    return {name: fmean(seconds[name] for seconds in by_rank) for name in by_rank[0]}


def seconds_of(source: Path, ranks: int, steps: int) -> Seconds:
    """Return the seconds of the parts in a new process that imports dtrain from ``source``."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(source), "--as-child", str(ranks), "--steps", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=2 * TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def measure(own: Path, other: Path, *, ranks: int, rounds: int, steps: int) -> None:
    """Print a line for each part of the loop on this number of ranks."""
    candidates: dict[str, Run] = {
        "own": lambda: seconds_of(own, ranks, steps),
        "other": lambda: seconds_of(other, ranks, steps),
    }
    for name, timings in timed_rounds(candidates, operator.call, rounds=rounds).items():
        compared = compare(timings["own"], timings["other"])
        what = f"{ranks} ranks, {name}: {compared.a_s * 1e3:.3f} ms, the other {compared.b_s * 1e3:.3f} ms"
        print(verdict_line(what, compared.ratio, at_most=AT_MOST), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = Path(dt.__file__).parents[1]
    parser.add_argument(
        "against", type=Path, nargs="?", default=own, help="folder src of the other checkout (default: this one)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--as-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_child:
        if own != args.against.resolve():
            parser.error(f"against: {args.against} has no package dtrain. Name the folder src of a checkout.")
        print(json.dumps(run_ranks_here(args.as_child, args.steps)))
        return
    print(machine(), flush=True)
    for ranks in args.ranks:
        measure(own, args.against, ranks=ranks, rounds=args.rounds, steps=args.steps)


if __name__ == "__main__":
    main()
