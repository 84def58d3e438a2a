"""The run that is killed: a small MLP with AdamW and EMA that saves every two steps, and writes a log of its steps.

Each rank appends lines of JSON to a file of its own, with one ``write`` each: they are there after a SIGKILL.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtrain as dt
from checkpoint.states import digest
from dtrain.checkpoint.checkpoint_info import CheckpointInfo
from dtrain.dist.rng import seed_all

EVERY = 2
SAMPLES = 40
BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Options of a training run.

    Args:
        folder: holds the root of the checkpoints and the logs.
        steps: how many.
        mode: of ``save_sharded``.
        elastic: made for changing world sizes: fp64 and no dropout, whose draws depend on the rank.
        dies_at: all ranks kill themselves at the begin of this step; 0 for never.
    """

    folder: str
    steps: int
    mode: str = "sync"
    elastic: bool = False
    dies_at: int = 0

    @property
    def root(self) -> Path:
        return Path(self.folder) / "root"


class Log:
    """Lines of JSON, each on its way to the disk when ``line`` returns."""

    def __init__(self, folder: str, rank: int) -> None:
        self._handle = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def line(self, **values: Any) -> None:
        os.write(self._handle, json.dumps(values).encode() + b"\n")


def read_log(folder: str, rank: int = 0) -> list[dict[str, Any]]:
    """Return the lines that a rank wrote in all attempts, without a last line that a kill has cut off."""
    path = Path(folder) / f"log-{rank}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train(values: dict[str, Any]) -> int:
    """Run one attempt, on every rank: resume from the newest checkpoint, and train to the end. Return the last step."""
    run = Run(**values)
    with dt.init_dist(device="cpu") as info:
        log = Log(run.folder, info.rank)
        step, state, loader = begin(run)
        state = dt.load_sharded(run.root, state, missing_ok=True)
        loaded = None if state.restored is None else state.step
        log.line(attempt=time.monotonic(), pid=os.getpid(), loaded=loaded, digest=_digest(run, state))
        asked = None
        for batch in loader.until(run.steps):
            if run.dies_at == state.step + 1:
                os.kill(os.getpid(), 9)
            state, metrics = step(state, batch)
            loss = dt.reduce_metrics(metrics)["loss"]
            log.line(step=state.step, loss=loss.hex(), samples=batch["id"].tolist())
            if state.step % EVERY == 0:
                if asked is not None:
                    log.line(acknowledged=_wait(asked))
                log.line(saving=state.step, digest=_digest(run, state))
                handle = dt.save_sharded(run.root, state, keep_last=3, **_mode(run))
                if run.mode == "sync":
                    log.line(acknowledged=handle.step)
                else:
                    asked = handle
        if asked is not None:
            log.line(acknowledged=_wait(asked))
        log.line(done=state.step, digest=_digest(run, state), weights=_weights(state))
        return state.step


def _digest(run: Run, state: dt.TrainState) -> str:
    """Of all that training reads; the clock's seconds are those of the machine, and streams depend on the world size."""
    previous = state.clock._previous
    clock = replace(state.clock, seconds=0.0, _previous=None if previous is None else replace(previous, seconds=0.0))
    return digest(state._replace(clock=clock), rng=not run.elastic)


def _mode(run: Run) -> dict[str, str]:
    return {} if run.mode == "sync" else {"mode": run.mode}


def _wait(handle: Any) -> int:
    handle.wait()
    return int(handle.step)


def _weights(state: Any) -> list[list[float]]:
    return [full.flatten().tolist() for _, full in dt.full_params(state)]


def begin(run: Run) -> tuple[Any, Any, Any]:
    """A fresh step, state and loader on all ranks."""
    dtype = torch.float64 if run.elastic else torch.float32
    seed_all(4) if run.elastic else seed_all(4, dt.init_dist().rank)
    mesh = dt.build_mesh()
    dropout = [] if run.elastic else [nn.Dropout(0.3)]
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *dropout, nn.Linear(8, 1)).to(dtype)
    net = dt.shard_model(net, mesh, blocks=(nn.Linear,))
    data = [{"x": torch.tensor([i / 7, i % 3, 1.0], dtype=dtype), "id": i} for i in range(SAMPLES)]
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=BATCH, seed=2)
    loss = dt.mean_loss(lambda m, b: (m(b["x"]) - b["x"][:, :1]).square().mean(), weight=lambda b: len(b["x"]))
    step = dt.compose_step(loss, [dt.transforms.clip_by_norm(0.5), dt.transforms.ema(0.9)])
    return step, step.init(net, torch.optim.AdamW(net.parameters(), lr=0.02), seed=3, loader=loader), loader


def committed(run: Run) -> list[CheckpointInfo]:
    """The committed steps, each read to the last byte; a damaged one raises, as a warning or by itself."""
    checkpoints = dt.checkpoint.list_steps(run.root)
    for checkpoint in checkpoints:
        dt.checkpoint.verify(checkpoint.path)
    return checkpoints


def look(values: dict[str, Any]) -> dict[str, Any]:
    """Return the verified steps of a root, all names and the run; or the error."""
    run = Run(**values)
    try:
        checkpoints = committed(run)
    except (dt.errors.CheckpointError, UserWarning) as error:
        return {"steps": [], "names": [], "run": "", "wrong": f"{type(error).__name__}: {error}"}
    return {
        "steps": [checkpoint.step for checkpoint in checkpoints],
        "names": sorted(os.listdir(run.root)) if run.root.exists() else [],
        "run": checkpoints[-1].run_id[:8] if checkpoints else "",
        "wrong": "",
    }
