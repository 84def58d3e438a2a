"""An asynchronous save on a GPU: how long the training thread stands still, and how far tokens per second dip.

Copies by hand to pinned and to pageable memory are the floor of the copy, and show the worth of pinned staging. dtrain stages
tensors of a GPU in pinned memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from gpu_device import GIB, Setting
from gpu_results import Cell, Table
from measure import Figure, typical

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, GPTConfig

FULL = GPTConfig(n_layer=24, n_head=16, dim=1024, max_seq=1024, vocab=32_768)
TOY = GPTConfig(n_layer=1, n_head=1, dim=16, max_seq=16)
SAMPLES = 8


@dataclass(slots=True, kw_only=True)
class Training:
    """A loop that trains step after step."""

    setting: Setting
    config: GPTConfig
    step: dt.step.Step = field(init=False)
    state: dt.TrainState = field(init=False)
    batch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = GPT(self.config).to(self.setting.device)
        self.step = dt.compose_step(loss_fn, [dt.transforms.autocast("bf16")])
        self.state = self.step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        self.batch = torch.randint(self.config.vocab, (SAMPLES, self.config.max_seq + 1)).to(self.setting.device)
        self.run()

    def run(self) -> None:
        self.state, _ = self.step(self.state, self.batch)

    def synchronize(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a save copies: parameters and the optimizer's state."""
        states = [value for state in self.state.optimizer.state.values() for value in state.values()]
        return [*(p.detach() for p in self.state.params.values()), *(value for value in states if isinstance(value, Tensor))]


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def async_save(setting: Setting) -> Iterator[Table]:
    """Stall of the training thread by kind of save, and tokens per second around asynchronous saves."""
    with setting.open_dist(), tempfile.TemporaryDirectory() as folder:
        training = Training(setting=setting, config=TOY if setting.toy else FULL)
        size = sum(tensor.nbytes for tensor in training.tensors())
        yield _stalls(training, Path(folder), size)
        yield _dip(training, Path(folder), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds of one copy or save: until the call returns, until the tensors are copied, until the file is durable."""

    returned: float
    copied: float
    durable: float | None = None


def _copy(training: Training, into: Sequence[Tensor]) -> Stall:
    training.synchronize()
    begun = time.perf_counter()
    for host, tensor in zip(into, training.tensors(), strict=True):
        host.copy_(tensor, non_blocking=True)
    returned = time.perf_counter() - begun
    training.synchronize()
    return Stall(returned=returned, copied=time.perf_counter() - begun)


def _save(training: Training, root: Path, mode: Any) -> Stall:
    # A step that is saved already is not written again.
    training.run()
    training.synchronize()
    begun = time.perf_counter()
    handle = dt.save_sharded(root, training.state, mode=mode, keep_last=1)
    returned = time.perf_counter() - begun
    handle.wait_staged()
    copied = time.perf_counter() - begun
    handle.wait()
    return Stall(returned=returned, copied=copied, durable=time.perf_counter() - begun)


def _stalls(training: Training, folder: Path, size: int) -> Table:
    """Measure each kind of copy and save several times, in turn."""
    pinned = training.setting.device.type == "cuda"
    hosts = {
        "copy by hand to pageable memory": [torch.empty_like(t, device="cpu") for t in training.tensors()],
        "copy by hand to pinned memory": [torch.empty_like(t, device="cpu", pin_memory=pinned) for t in training.tensors()],
    }
    first = _save(training, folder / "async", "async")
    kinds: dict[str, Callable[[], Stall]] = {
        **{name: lambda into=into: _copy(training, into) for name, into in hosts.items()},
        "`save_sharded(mode='async')`, later saves": lambda: _save(training, folder / "async", "async"),
        "`save_sharded(mode='sync')`": lambda: _save(training, folder / "sync", "sync"),
    }
    by_kind: dict[str, list[Stall]] = {name: [] for name in kinds}
    for _ in range(2 if training.setting.toy else 6):
        for name, run in kinds.items():
            by_kind[name].append(run())
    rows: list[list[Cell]] = [_stall_row("`save_sharded(mode='async')`, first save, which allocates", [first], size)]
    rows += [_stall_row(name, stalls, size) for name, stalls in by_kind.items()]
    return Table(
        title=f"Stall of the training thread, {size / GIB:.2f} GiB of parameters and optimizer state",
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


def _dip(training: Training, folder: Path, size: int) -> Table:
    """Train on before, during and after several asynchronous saves."""
    steps, saves = (3, 2) if training.setting.toy else (40, 4)
    phases: dict[str, list[float]] = {"before a save": [], "from the call to the commit": [], "after a save": []}
    lost = []
    for _ in range(saves):
        before = _step_seconds(training, lambda done: done >= steps)
        training.synchronize()
        times = StepTimes(training.setting.device)
        times.mark()
        handle = dt.save_sharded(folder / "async", training.state, mode="async", keep_last=1)
        during = _step_seconds(training, lambda done, handle=handle: done > 0 and handle.done, times)
        handle.wait()
        after = _step_seconds(training, lambda done: done >= steps)
        for phase, seconds in zip(phases, (before, during, after), strict=True):
            phases[phase] += seconds
        lost.append(sum(during) - len(during) * median(before))
    return Table(
        title=f"Tokens per second around {saves} asynchronous saves of {size / GIB:.2f} GiB",
        columns=("phase", "steps", "tokens/s", "of before", "median step, ms", "longest step, ms"),
        rows=[_phase_row(training, name, seconds, phases["before a save"]) for name, seconds in phases.items()],
        note=f"Training time lost per save, by the median step before: {shown_millis(lost)}.",
    )


def shown_millis(seconds: Sequence[float]) -> str:
    return ", ".join(f"{duration * 1e3:.0f}" for duration in sorted(seconds)) + " ms"


def _step_seconds(training: Training, ended: Callable[[int], bool], times: StepTimes | None = None) -> list[float]:
    """Train until ``ended(steps)``; return the seconds of each step."""
    if times is None:
        training.synchronize()
        times = StepTimes(training.setting.device)
        times.mark()
    done = 0
    while not ended(done):
        training.run()
        times.mark()
        done += 1
    return times.seconds()


def _phase_row(training: Training, name: str, seconds: Sequence[float], before: Sequence[float]) -> list[Cell]:
    tokens = SAMPLES * training.config.max_seq
    rate, usual = (tokens * len(durations) / sum(durations) for durations in (seconds, before))
    return [name, len(seconds), rate, rate / usual, median(seconds) * 1e3, max(seconds) * 1e3]
