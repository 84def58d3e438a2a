"""Time and memory of a device, with one form for CUDA and for the dry runs on a CPU.

Times come from CUDA events around calls that are not captured in CUDA graphs. Memory is that of torch's allocator; on a CPU
``memory_budget`` counts and limits the bytes of tensors.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import dtrain as dt
from helpers.gpt import GPTConfig
from measure import Rounds, Run, timed_rounds

MIB, GIB = 2**20, 2**30
WARMUP, MOST_ROUNDS, LEAST_ROUNDS = 2, 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device and size of a benchmark.

    Args:
        device: device of all tensors.
        toy: if True, small models and few rounds: a dry run.
        seconds: limit of the benchmark. Half of it is for timed rounds, the rest for compilers and everything else.
        folder: folder of the benchmark's files.
    """

    device: torch.device
    toy: bool
    seconds: float
    folder: Path

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model with the same weights each time, made on the device: a billion draws on a host take a minute."""
        torch.manual_seed(0)
        with self.device:
            return make()

    @property
    def backend(self) -> str:
        """Backend of ``torch.compile``. A dry run traces, but does not wait for a compiler."""
        return "eager" if self.toy else "inductor"

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 rate of the device's datasheet, in operations per second; None if unknown."""
        is_cuda = self.device.type == "cuda"
        return dt.monitors.peak_flops(torch.cuda.get_device_name(self.device), "bf16") if is_cuda else None

    def open_dist(self) -> dt.dist.DistInfo:
        """Open process groups of one rank on this device."""
        return dt.init_dist(device=self.device.type)

    def synchronize(self) -> None:
        """Wait for the work of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free all tensors that no variable holds, and the compiled code of earlier models."""
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        self.release_tensors()

    def release_tensors(self) -> None:
        """Free all tensors that no variable holds, and the cache of torch's allocator."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timer(self, run: Run) -> dict[str, float]:
        """Call ``run`` once: seconds until Python continues (host), and from the first to the last work (device)."""
        if self.device.type != "cuda":
            begun = time.perf_counter()
            run()
            took = time.perf_counter() - begun
            return {"host": took, "device": took}
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.synchronize()
        start.record()
        begun = time.perf_counter()
        run()
        host = time.perf_counter() - begun
        end.record()
        end.synchronize()
        return {"host": host, "device": start.elapsed_time(end) / 1e3}

    def timed(self, candidates: Mapping[str, Run], *, share: float) -> dict[str, dict[str, Rounds]]:
        """Time candidates in as many rounds as fit into a share of the timed half; return rounds by clock and candidate."""
        if self.toy:
            return timed_rounds(candidates, self.timer, rounds=2, warmup=1)
        first = timed_rounds(candidates, self.timer, rounds=1, warmup=WARMUP)["device"]
        fitting = int(share * self.seconds / 2 / sum(sum(pair) for rounds in first.values() for pair in rounds))
        return timed_rounds(candidates, self.timer, rounds=min(max(fitting, LEAST_ROUNDS), MOST_ROUNDS), warmup=0)

    def memory(self) -> AbstractContextManager[Memory]:
        """Return a context that counts and limits the memory of tensors."""
        return _cuda_memory(self.device) if self.device.type == "cuda" else dt.testing.memory_budget(sys.maxsize)


@dataclass(slots=True, kw_only=True)
class Training:
    """A loop that trains on one batch."""

    step: dt.step.Step
    state: dt.TrainState
    batch: Tensor

    def run(self) -> None:
        self.state, _ = self.step(self.state, self.batch)


def gpt_loss(model: nn.Module, batch: Tensor) -> dt.LossSum:
    """Return the loss of the next token of ``batch``, ``[samples, tokens + 1]``."""
    return dt.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def draw_tokens(config: GPTConfig, samples: int, seed: int = 0) -> Tensor:
    """Return random tokens on the host, ``[samples, max_seq + 1]``."""
    return torch.randint(config.vocab, (samples, config.max_seq + 1), generator=torch.Generator().manual_seed(seed))


def count_parameters(make: Callable[[], nn.Module]) -> int:
    """Return the number of weights of a model, which is made without memory."""
    with torch.device("meta"):
        return sum(param.numel() for param in make().parameters())


NOT_AVAILABLE = (RuntimeError, NotImplementedError, TypeError, dt.errors.ConfigError)
"""Errors of a variant that this torch, this device or this environment does not have."""


def describe_missing(error: BaseException) -> str:
    """Return the cell of a variant that raised one of ``NOT_AVAILABLE``."""
    return f"not available: {(str(error).splitlines() or [type(error).__name__])[0][:100]}"


class Memory(Protocol):
    """Memory of the tensors of this process, in bytes. ``dt.testing.memory_budget`` has the same names."""

    limit: int

    @property
    def live(self) -> int: ...

    @property
    def peak(self) -> int: ...

    def reset(self) -> None:
        """Start the peak again."""


class CudaMemory:
    """Memory of torch's allocator on one device, whose limit raises ``torch.OutOfMemoryError`` for real."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total = torch.cuda.get_device_properties(device).total_memory
        self._limit = self._total

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = min(limit, self._total)
        torch.cuda.set_per_process_memory_fraction(self._limit / self._total, self._device)

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def _cuda_memory(device: torch.device) -> Iterator[Any]:
    memory = CudaMemory(device)
    try:
        yield memory
    finally:
        memory.limit = sys.maxsize
