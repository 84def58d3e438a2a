"""An asynchronous save on a GPU: how long the training thread stands still, and what a checkpoint each 50 steps costs.

Copies by hand to pinned and to pageable memory are the floor of the copy, and show the worth of pinned staging. dtrain stages
tensors of a GPU in pinned memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dtrain as dt
from gpu_device import GIB, Setting, Training, count_parameters, draw_tokens, gpt_loss
from gpu_results import Cell, Table, band
from helpers.gpt import GPT, GPTConfig
from measure import Figure, compare, typical, verdict
from observe import unrecorded

# Its steps and its checkpoint are about an eighth of those of the large model of ``train``.
FULL = GPTConfig(n_layer=6, n_head=16, dim=1024, max_seq=1024, vocab=32_768)
TOY = GPTConfig(n_layer=1, n_head=1, dim=16, max_seq=16)
SAMPLES = 16
STEPS = 50  # per checkpoint
AT_MOST = 1.02
BYTES = bytes(2**26)


def start_training(setting: Setting, config: GPTConfig) -> Training:
    """Return a loop whose first step has run."""
    model = setting.build(partial(GPT, config))
    step = dt.compose_step(gpt_loss, [dt.transforms.autocast("bf16")])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    training = Training(step=step, state=state, batch=draw_tokens(config, SAMPLES).to(setting.device))
    training.run()
    return training


def saved_tensors(training: Training) -> list[Tensor]:
    """Return the tensors that a save copies: parameters and the optimizer's state."""
    states = [value for state in training.state.optimizer.state.values() for value in state.values()]
    return [*(p.detach() for p in training.state.params.values()), *(value for value in states if isinstance(value, Tensor))]


def async_save(setting: Setting) -> Iterator[Table]:
    """Stall of the training thread by kind of save, and the time of steps with a checkpoint each 50 steps and the ledger."""
    config = TOY if setting.toy else FULL
    # Parameters, and two moments of each, in float32.
    size = 3 * 4 * count_parameters(partial(GPT, config))
    root, rate = fastest_folder(size)
    written = f"{size / GIB:.2f} GiB of parameters and optimizer state, written to {root} at {rate / GIB:.2g} GiB/s"
    with tempfile.TemporaryDirectory(dir=root) as folder, setting.open_dist():
        training = start_training(setting, config)
        yield _stalls(setting, training, Path(folder), size, written)
        yield _loops(setting, training, Path(folder), written)


def fastest_folder(size: int) -> tuple[str, float]:
    """Return the folder that takes bytes fastest and has room for the checkpoints, and its bytes per second with ``fsync``."""
    folders = [folder for folder in (tempfile.gettempdir(), "/dev/shm") if os.access(folder, os.W_OK)]
    # Two roots, each with an old and a new checkpoint.
    rates = {folder: _write_rate(folder) for folder in folders if shutil.disk_usage(folder).free > 5 * size + len(BYTES)}
    if not rates:
        raise SystemExit(f"async_save: {' and '.join(folders)} have no room for checkpoints of {size / GIB:.1f} GiB")
    fastest = max(rates, key=lambda folder: rates[folder])
    return fastest, rates[fastest]


def _write_rate(folder: str) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        file.write(BYTES)
        file.flush()
        os.fsync(file.fileno())
        return len(BYTES) / (time.perf_counter() - begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds of one copy or save: until the call returns, until the tensors are copied, until the file is durable."""

    returned: float
    copied: float
    durable: float | None = None


def _copy(setting: Setting, training: Training, into: Sequence[Tensor]) -> Stall:
    setting.synchronize()
    begun = time.perf_counter()
    for host, tensor in zip(into, saved_tensors(training), strict=True):
        host.copy_(tensor, non_blocking=True)
    returned = time.perf_counter() - begun
    setting.synchronize()
    return Stall(returned=returned, copied=time.perf_counter() - begun)


def _save(setting: Setting, training: Training, root: Path, mode: Any) -> Stall:
    # A step that is saved already is not written again.
    training.run()
    setting.synchronize()
    begun = time.perf_counter()
    handle = dt.save_sharded(root, training.state, mode=mode, keep_last=1)
    returned = time.perf_counter() - begun
    handle.wait_staged()
    copied = time.perf_counter() - begun
    handle.wait()
    return Stall(returned=returned, copied=copied, durable=time.perf_counter() - begun)


def _stalls(setting: Setting, training: Training, folder: Path, size: int, written: str) -> Table:
    """Measure each kind of copy and save several times, in turn."""
    pinned, tensors = setting.device.type == "cuda", saved_tensors(training)
    hosts = {
        "copy by hand to pageable memory": [torch.empty_like(t, device="cpu") for t in tensors],
        "copy by hand to pinned memory": [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in tensors],
    }
    save = partial(_save, setting, training)
    first = save(folder / "async", "async")
    kinds: dict[str, Callable[[], Stall]] = {
        **{name: partial(_copy, setting, training, into) for name, into in hosts.items()},
        "`save_sharded(mode='async')`, later saves": partial(save, folder / "async", "async"),
        "`save_sharded(mode='sync')`": partial(save, folder / "sync", "sync"),
    }
    stalls: dict[str, list[Stall]] = {name: [] for name in kinds}
    deadline = time.perf_counter() + setting.seconds / 4
    for number in range(6):
        if number >= 2 and (setting.toy or time.perf_counter() > deadline):
            break
        for name, run in kinds.items():
            stalls[name].append(run())
    rows: list[list[Cell]] = [_stall_row("`save_sharded(mode='async')`, first save, which allocates", [first], size)]
    rows += [_stall_row(name, measured, size) for name, measured in stalls.items()]
    return Table(
        title=f"Stall of the training thread, {written}",
        columns=("save", "until the call returns, ms", "until copied, ms", "GiB/s of the copy", "until durable, ms"),
        rows=rows,
        note="The median, and the interval of medians drawn again.",
    )


def _stall_row(name: str, stalls: Sequence[Stall], size: int) -> list[Cell]:
    durable = [stall.durable for stall in stalls if stall.durable is not None]
    copied = median(stall.copied for stall in stalls)
    return [
        name,
        _millis([stall.returned for stall in stalls]),
        _millis([stall.copied for stall in stalls]),
        size / GIB / copied,
        _millis(durable) if durable else None,
    ]


def _millis(seconds: Sequence[float]) -> Cell:
    if len(seconds) == 1:
        return seconds[0] * 1e3
    figure = typical(list(zip(seconds[::2], seconds[1::2], strict=True)))
    return Figure(value=figure.value * 1e3, low=figure.low * 1e3, high=figure.high * 1e3)


class StepTimes:
    """Seconds of each step of a loop, on the device, with at most two steps enqueued ahead."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record the end of a step."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)
        if len(self._marks) > 2:
            self._marks[-3].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds between marks."""
        if self._cuda:
            self._marks[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def _loops(setting: Setting, training: Training, folder: Path, written: str) -> Table:
    """Train on with a checkpoint each 50 steps and the ledger, and without both."""
    steps = 5 if setting.toy else STEPS
    dt.open_run(folder / "run")
    seconds: dict[str, list[list[float]]] = {}

    def loop(name: str, *, saved: bool) -> Callable[[], None]:
        def run() -> None:
            times = StepTimes(setting.device)
            with nullcontext() if saved else unrecorded():
                handle = dt.save_sharded(folder / "async", training.state, mode="async", keep_last=1) if saved else None
                times.mark()
                for _ in range(steps):
                    training.run()
                    times.mark()
                if handle is not None:
                    handle.wait()
            seconds.setdefault(name, []).append(times.seconds())

        return run

    none, both = "neither", f"a checkpoint each {steps} steps, and the ledger"
    timings = setting.timed({none: loop(none, saved=False), both: loop(both, saved=True)}, share=0.5)["host"]
    usual = median(step for burst in seconds[none] for step in burst)
    return Table(
        title=f"{steps} steps and the save before them, {written}",
        columns=(
            "loop",
            "tokens/s",
            "time over neither",
            "A/A band",
            "verdict",
            "first step, ms",
            "over the median of neither",
        ),
        rows=[
            [
                name,
                steps * training.batch[:, 1:].numel() / (found := compare(timings[name], timings[none])).a_s,
                found.ratio,
                band(found),
                verdict(found.ratio, at_most=AT_MOST),
                (first := median(burst[0] for burst in seconds[name])) * 1e3,
                first / usual,
            ]
            for name in (none, both)
        ],
        note=f"Target: at most {AT_MOST}, also of the first step. The steps wait for the save's end, as the next save does.",
    )
