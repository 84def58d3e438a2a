"""Datasets for tests of the loader: numbers, and numbers that make trouble."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dtrain as dt


class Numbers:
    """Sample ``i`` is ``i``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Drawing(Numbers):
    """A dataset whose sample ``i`` is a draw of each of the three global generators."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Troubled(Numbers):
    """A dataset that does something else at sample ``index``."""

    def __init__(self, size: int, index: int, trouble: Any) -> None:
        super().__init__(size)
        self.at, self.trouble = index, trouble

    def __getitem__(self, index: int) -> Any:
        return self.trouble() if index == self.at else super().__getitem__(index)


def fail() -> Any:
    raise ValueError("cannot be decoded:\nno such codec")


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_lock() -> Any:
    """Die as a worker does that is killed while it looks whether its loader ends: with the lock of torch's event."""
    frame: Any = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    die()


def die_when(now: Path) -> Any:
    while not now.exists():
        time.sleep(0.01)
    die()


def leave() -> Any:
    os._exit(3)


def hang() -> Any:
    time.sleep(600)


def lock() -> Any:
    return {"x": torch.zeros(2), "meta": [1, threading.Lock()]}


class Reporting(Numbers):
    """A dataset that leaves the pid of its reader, and its signal handling, in a folder."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, index: int) -> Tensor:
        ignored = [number.name for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_IGN]
        (self.folder / str(os.getpid())).write_text(" ".join(ignored))
        return super().__getitem__(index)


class Stream:
    """Numbers that can only be iterated; ``n`` may differ between ranks."""

    def __init__(self, size: int, start: int = 0) -> None:
        self.size, self.start = size, start

    def __iter__(self) -> Any:
        return (torch.tensor(number) for number in range(self.start, self.start + self.size))


class Remembering(Stream):
    """A stream with a state of its own, which counts how often a sample was read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0
        self.reads = 0

    def __iter__(self) -> Any:
        first, self.at = self.at, 0
        for number in range(first, self.size):
            self.at = number + 1
            self.reads += 1
            yield torch.tensor(number)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Curriculum:
    """Every sample is the level."""

    def __init__(self, size: int = 8) -> None:
        self.size, self.level = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return self.level

    def set_level(self, level: int) -> None:
        self.level = level


class UnsizedLevels:
    """Iterable; its samples are the level at the time of reading."""

    def __init__(self, size: int = 8) -> None:
        self.size, self.level = size, 0

    def __iter__(self) -> Any:
        return (self.level for _ in range(self.size))

    def set_level(self, level: int) -> None:
        self.level = level


class Levels(UnsizedLevels):
    def __len__(self) -> int:
        return self.size


class Texts:
    """Sample ``i`` is ``i`` and so many tokens as ``lengths`` says."""

    def __init__(self, lengths: Any) -> None:
        self.sizes = [int(length) for length in lengths]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.arange(1, self.sizes[index] + 1, dtype=torch.float64) / (7 + index)
        return {"index": index, "tokens": tokens}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], True, 0.0)
    return {"index": torch.tensor([sample["index"] for sample in samples]), "tokens": tokens}


def build(dataset: Any, rank: int = 0, ranks: int = 1, **options: Any) -> dt.data.Loader:
    """Build the loader of one rank of several, in a process without ranks."""
    loader = dt.build_loader(dataset, **{"global_batch_size": 4, "seed": 0, "shuffle": False, **options})
    loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
    return loader
