"""Work of a rank of the checkpoint benchmark: timed rounds of saves and loads, memory of a load, dip of training."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter as now
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt
from checkpoint_peers import LOADS, SAVES, Moments, Run, Way, build, digest, layers, scramble_, takes_direct

Timings = dict[str, dict[str, list[tuple[float, float]]]]
"""Seconds by way and moment: the two calls of each round."""


def saves(model: str, size: int, root: str, ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds of the rounds of saves, and the bytes that a rank wrote."""
    run = build(model, size, Path(root) / "saves")
    run.root.mkdir(parents=True, exist_ok=True)
    direct = takes_direct(run.root)
    calls = {name: _saving(run, name, SAVES[name]) for name in ways if direct or not SAVES[name].direct}
    for call in calls.values():
        call()  # a call that does not count
    return {"timings": _rounds(calls, rounds), "bytes": _total(run.nbytes)}


def loads(model: str, size: int, root: str, ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure rounds of loads from the page cache; each way is checked once to restore all tensors."""
    run = build(model, size, Path(root) / "loads")
    before = digest(run)
    calls = {}
    for name in ways:
        way, folder = LOADS[name], run.root / _slug(name)
        way.ready(run)
        way.save(run, folder)
        calls[name] = _loading(run, way, folder)
        scramble_(run)
        calls[name]()  # a call that does not count
        if not way.bare and digest(run) != before:
            raise SystemExit(f"checkpoint: {name}: the loaded tensors differ from the saved ones")
    return {"timings": _rounds(calls, rounds), "bytes": _total(run.nbytes)}


def _saving(run: Run, name: str, way: Way) -> Callable[[], Moments]:
    """Return a function that times one save, then removes the files and waits until nothing is left to be written."""
    numbers = iter(range(10**9))

    def call() -> Moments:
        own = run.root / ("dtrain" if way.one_root else f"{_slug(name)}-{next(numbers)}")
        way.ready(run)
        dist.barrier()
        seconds = _slowest(way.save(run, own))
        if dist.get_rank() == 0:
            for folder in own.glob("step-*") if way.one_root else [own]:
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        dist.barrier()
        return seconds

    return call


def _loading(run: Run, way: Way, folder: Path) -> Callable[[], Moments]:
    """Return a function that times one load of files that are in the page cache."""

    def call() -> Moments:
        assert way.load is not None
        if dist.get_rank() == 0:
            _read_all(folder)
        way.ready(run)
        dist.barrier()
        return _slowest(way.load(run, folder))

    return call


def _read_all(folder: Path) -> None:
    piece = bytearray(2**22)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece):
                    pass


def _slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def _slowest(mine: Moments) -> Moments:
    """Return, for each moment, the time of the slowest rank."""
    seconds = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(mine, seconds.tolist(), strict=True))


def _total(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _rounds(calls: Mapping[str, Callable[[], Moments]], rounds: int) -> Timings:
    """Each round makes every call twice, in an order drawn anew (the same on all ranks)."""
    order = random.Random(0)
    timings: Timings = {name: {} for name in calls}
    for _ in range(rounds):
        names = [name for name in calls for _ in range(2)]
        order.shuffle(names)
        seen: dict[str, list[Moments]] = {name: [] for name in calls}
        for name in names:
            seen[name].append(calls[name]())
        for name, (first, second) in seen.items():
            for moment in first:
                timings[name].setdefault(moment, []).append((first[moment], second[moment]))
    return timings


def leave(model: str, size: int, root: str, ways: Sequence[str]) -> None:
    """Save in each way, for ranks that are started later."""
    run = build(model, size, Path(root))
    for name in ways:
        LOADS[name].ready(run)
        LOADS[name].save(run, run.root / _slug(name))


def memory(model: str, size: int, root: str, name: str, stepped: bool = False) -> dict[str, int]:
    """Peak resident memory of a load, in bytes above that before it; and the rank's own shards.

    A new run gets its optimizer state by the load. A run that has ``stepped`` has all of its memory already.
    """
    run = build(model, size, Path(root), stepped=stepped)
    way = LOADS[name]
    assert way.load is not None
    dist.barrier()
    before = _resident_now()
    way.load(run, run.root / _slug(name))
    return {"above": _status("VmHWM:") - before, "own": run.nbytes}


def _resident_now() -> int:
    """Bytes in memory, after all that can be given back was; the high-water mark starts here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def dip(size: int, root: str, device: str, steps: int) -> dict[str, float]:
    """Training while a save is under way: rows a second before it and until it is durable, and how long the call held it."""
    model = dt.shard_model(layers(size).to(device), dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    step = dt.compose_step(_square, [])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    rows = torch.randn(64 if device == "cpu" else 4096, next(iter(state.params.values())).shape[1], device=device)
    for name in ("cold", "warm"):  # the first save allocates the staging memory
        state, seconds = _train(step, state, rows, steps)
        before = steps * len(rows) / seconds
        _wait_for(device)
        begun = now()
        handle = dt.save_sharded(Path(root) / f"dip-{name}", state, mode="async")
        handle.wait_staged()
        held = now() - begun
        done = 0
        while not _durable(handle):
            state, _ = _train(step, state, rows, 1)
            done += 1
        window = now() - begun
    return {"held_s": held, "window_s": window, "before": before, "during": done * len(rows) / window}


def _durable(handle: dt.checkpoint.SaveHandle) -> bool:
    try:
        handle.wait(timeout_s=0)
    except TimeoutError:
        return False
    return True


def _train(step: Any, state: dt.TrainState, rows: torch.Tensor, steps: int) -> tuple[dt.TrainState, float]:
    begun = now()
    for _ in range(steps):
        state, _ = step(state, {"rows": rows})
    _wait_for(rows.device.type)
    return state, now() - begun


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _square(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    out = model(batch["rows"])
    return dt.LossSum(total=out.square().sum(), weight=torch.tensor(float(len(out)), device=out.device))
