"""States, digests and failing operations for the checkpoint tests."""

import errno
import hashlib
import json
import os
import random
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.lock import HEARTBEAT_THREAD, LOCK_FILE
from dtrain.dist.dtensor import to_local
from dtrain.dist.rng import rng_state
from dtrain.state import TrainState, init_state
from shard.models import as_in_a_step


class Net(nn.Module):
    """Uneven rows for 2 and 3 ranks, fewer rows than ranks, a buffer of each kind, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training))


class Counter:
    """An object with a state of its own, as a data loader has."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "weights": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"position", "weights"}:
            raise ValueError(f"Counter: what is {sorted(state)}?")
        self.state = state


def plain_state(seed: int = 0, *, optimizer: str = "adamw") -> TrainState:
    torch.manual_seed(seed)
    model = Net()
    made = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), amsgrad=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }[optimizer]()
    state = init_state(model, made, seed=seed)
    shadow = {name: p.detach().clone() for name, p in state.params.items()}
    return replace(
        state, transform_states={"ema": {"shadow": shadow, "updates": 0}, "spikes": {"worst": float("inf"), "window": (1, 2)}}
    )


def train(state: TrainState, steps: int) -> TrainState:
    """A loop by hand whose every step draws from the generators of Python, NumPy and torch."""
    for _ in range(steps):
        x = torch.randn(4, 5) * random.random() + float(np.random.rand())
        state.optimizer.zero_grad()
        with as_in_a_step(state.model):
            state.model(x).square().sum().backward()
        if state.spec.plain_params:
            # FSDP2 sums gradients in this backward, but those of plain parameters are summed in a step of dtrain only.
            for p in state.params.values():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "optimizer.step: the gradients are those of a backward outside of a step")
            state.optimizer.step()
        ema = state.transform_states["ema"]
        with torch.no_grad():
            for name, p in state.params.items():
                shadow = to_local(ema["shadow"][name])
                shadow.lerp_(to_local(p).to(shadow.dtype), 0.1)
        clock = state.clock.tick(samples=4, tokens=7, seconds=0.25)
        state = state._next(clock=clock).with_transform_state("ema", {**ema, "updates": ema["updates"] + 1})
    return state


def digest(state: TrainState, *, rng: bool = True) -> str:
    """A hash over every bit that training reads, on this rank."""
    sha = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            data = to_local(value).detach().cpu().contiguous()
            sha.update(f"{data.dtype}{tuple(data.shape)}".encode() + data.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                take(value[key])
        elif isinstance(value, (list, tuple)):
            sha.update(type(value).__name__.encode())
            for item in value:
                take(item)
        else:
            sha.update(repr(value).encode())

    take(dict(state.params))
    take({name: b for name, b in state.model.named_buffers() if name != "scratch"})
    take([{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups])
    take({name: dict(state.optimizer.state[p]) for name, p in state.params.items() if p in state.optimizer.state})
    take(dict(state.transform_states))
    take([state.clock.state_dict(), state.seed])
    if rng:
        take(rng_state())
    return sha.hexdigest()


def write_of_another_version(step: Path) -> None:
    """Mark the step as written by a future version of dtrain."""
    path = step / layout.MANIFEST
    body = json.loads(path.read_text())
    del body["sha256"]
    path.write_bytes(layout._sign({**body, "version": 9}))


class WatchedOs:
    """Stands in for ``os`` inside ``dtrain.storage.local``: records every call that touches files, and acts at the k-th."""

    CHANGING = frozenset(
        {"open", "write", "pwritev", "link", "replace", "fsync", "rename", "unlink", "rmdir", "mkdir", "makedirs"}
    )
    WATCHED = CHANGING | {"listdir", "preadv", "close"}

    def __init__(self, *, operation: int | None = None, kind: str | None = None, action: str = "fail") -> None:
        self.operation, self.kind, self.action = operation, kind, action
        self.calls: list[str] = []
        self.fired = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in (self.WATCHED if self.kind is None else {self.kind}):
            return real

        def watched(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name == HEARTBEAT_THREAD:
                return real(*args, **options)  # comes at any time: the operations of a save must be the same each time
            self.calls.append(name)
            if len(self.calls) - 1 != self.operation:
                return real(*args, **options)
            self.fired = True
            if self.action == "kill":
                os._exit(9)
            if self.action == "flip":
                got = real(*args, **options)
                args[1][0][got // 2] ^= 1
                return got
            if name == "close":
                real(*args, **options)  # a failing close has released the handle
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return watched


class watching:
    """``with watching(operation=3) as watched``: the third-next file operation fails."""

    def __init__(self, **options: Any) -> None:
        self.watched = WatchedOs(**options)

    def __enter__(self) -> WatchedOs:
        storage.local.os = self.watched
        return self.watched

    def __exit__(self, *_: object) -> None:
        storage.local.os = os


def names(folder: Path) -> list[str]:
    """Return the names in a folder, except the lock of a live job."""
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(LOCK_FILE))
