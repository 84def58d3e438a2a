"""Folders of runs, made up: of any size, with any number of restarts, and broken in the ways that runs break."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.run import run_files

START = 1_760_000_000.0  # seconds since 1970
SHARES = {"step": 0.82, "data": 0.06, "agree": 0.05, "reduce": 0.02, "save": 0.0, "evaluate": 0.02, "other": 0.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One attempt of a made-up run: steps ``begin`` to ``end``, and its end; None is a kill."""

    begin: int
    end: int
    reason: str | None = "done"
    error: str | None = None
    ranks: int = 2
    setup_s: float = 8.0
    down_s: float = 0.0
    resumed: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


KILLED_TWICE = (
    Part(begin=0, end=340, reason=None),
    Part(begin=300, end=720, reason="failed", error="RuntimeError: CUDA error: device-side assert", down_s=45.0,
         resumed="checkpoints/step-00000300"),
    Part(begin=700, end=1000, down_s=20.0, setup_s=9.5, resumed="checkpoints/step-00000700", settings={"lr": 2e-4}),
)  # fmt: skip
"""A run of 1000 steps with a kill and a failure: 40 and 20 steps are done again."""


def write_run(
    folder: Path,
    parts: Sequence[Part] = (Part(begin=0, end=1000),),
    *,
    step_s: float = 0.5,
    per_line: int = 20,
    log_every: int = 1,
    save_every: int = 100,
    evaluate_every: int = 250,
    straggler: int | None = None,
    metrics: bool = True,
    ledger: bool = True,
    about: bool = True,
    started: float = START,
    seed: int = 0,
    name: str = "gpt",
) -> Path:
    """Write the folder of a run, and return it.

    Args:
        folder: new, or another run's, which is then continued.
        parts: its attempts.
        step_s: wall time of a step.
        per_line: steps that a line of the ledger sums.
        log_every: steps between records of metrics; 0 for none.
        save_every: steps between checkpoints; 0 for none.
        evaluate_every: steps between records of ``eval/loss``; 0 for none.
        straggler: a rank that is slow in loading, and that the others wait for.
        metrics: whether to write them.
        ledger: whether to write it.
        about: True to write the file that describes each attempt.
        started: when the run began, in seconds since 1970.
        seed: of noise.
        name: of the run, in its settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now, lines = started, []
    for number, attempt in enumerate(parts, start=1):
        now += attempt.down_s
        opened = now + attempt.setup_s
        if about:
            write_about(folder, number, attempt, started_at=opened, name=name)
        if ledger:
            for rank in range(attempt.ranks):
                rows = ledger_rows(number, attempt, rank, opened, step_s, per_line, save_every, straggler)
                append(folder / run_files.LEDGER / run_files.ledger_name(rank), rows)
        if metrics and log_every:
            lines.append(records(attempt, opened, step_s, log_every, evaluate_every, random.Random(seed * 1000 + number)))
        now = opened + (attempt.end - attempt.begin) * step_s
    for record in lines:
        append(folder / run_files.METRICS, record)
    return folder


def write_about(folder: Path, number: int, attempt: Part, *, started_at: float, name: str) -> None:
    """Write the file that describes an attempt, as rank 0 does."""
    ranks = attempt.ranks
    about = {
        "format": run_files.FORMAT,
        "attempt": number,
        "started_at": started_at,
        "world_size": ranks,
        "hosts": {f"node-{host}": [*range(host * 8, min(host * 8 + 8, ranks))] for host in range(-(-ranks // 8))},
        "devices": {"NVIDIA H200": [*range(ranks)]},
        "command": ["pretrain_gpt.py", "--lr", "0.0003", "--token", "***"],
        "python": "/usr/bin/python3",
        "folder": "/home/someone/gpt",
        "settings": {"name": name, "lr": 3e-4, "layers": 12, "width": 768, "global_batch_size": 256, **attempt.settings},
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": number > 1},
        "versions": {"dtrain": "0.1.0", "python": "3.13.5", "torch": "2.13.0" if number < 3 else "2.13.1"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "launch": None,
    }  # fmt: skip
    path = folder / run_files.ATTEMPTS / run_files.attempt_name(number)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about, indent=1))


def ledger_rows(
    number: int,
    attempt: Part,
    rank: int,
    opened: float,
    step_s: float,
    per_line: int,
    save_every: int,
    straggler: int | None,
) -> Iterator[dict[str, Any]]:
    """The ledger of one rank in one attempt."""
    host = f"node-{rank // 8}"
    yield {"kind": "open", "attempt": number, "at": opened, "rank": rank, "host": host, "pid": 1000 + rank, "version": "0.1.0",
           "setup_s": attempt.setup_s, "step": 0}  # fmt: skip
    if attempt.begin:  # a run is opened first, and its checkpoint is loaded after that
        yield {"kind": "sum", "attempt": number, "at": opened, "seconds": 0.0, "step": attempt.begin,
               "samples": attempt.begin * 256, "tokens": attempt.begin * 256 * 1024,
               "spans": {"load": [1, 0.0]}, "gauges": {}}  # fmt: skip
    if attempt.resumed:
        fields = {"step": attempt.begin, "path": attempt.resumed}
        yield {"kind": "event", "attempt": number, "at": opened, "name": "resumed", **fields}
    step, now = attempt.begin, opened
    while step < attempt.end:
        steps = min(per_line, attempt.end - step)
        step, seconds = step + steps, steps * step_s
        now += seconds
        saved = save_every and step // save_every > (step - steps) // save_every
        yield {"kind": "sum", "attempt": number, "at": round(now, 3), "seconds": seconds, "step": step, "samples": step * 256,
               "tokens": step * 256 * 1024, "spans": spans(steps, seconds, rank, straggler, saved),
               "gauges": {"rss_bytes": 2**31 + (rank << 20) + step * 1000, "device_bytes": 2**35 + (rank << 28)}}  # fmt: skip
        if saved:
            yield {"kind": "event", "attempt": number, "at": round(now, 3), "name": "save", "step": step,
                   "blocked_s": round(0.4 + 0.1 * rank, 3)}  # fmt: skip
            if rank == 0 and step < attempt.end:
                yield {"kind": "event", "attempt": number, "at": round(now + 3, 3), "name": "committed", "step": step,
                       "seconds": 3.2, "bytes": 1_500_000_000}  # fmt: skip
    if attempt.reason is not None:
        close = {"kind": "close", "attempt": number, "at": round(now, 3), "reason": attempt.reason}
        yield close if attempt.error is None else close | {"error": attempt.error}


def spans(steps: int, seconds: float, rank: int, straggler: int | None, saved: bool) -> dict[str, list[float]]:
    """Seconds by name of a span; a straggler loads for as long as the others wait for it."""
    shares = dict(SHARES)
    if straggler is not None:
        late = 0.15
        shares["step"] -= late
        shares["data" if rank == straggler else "agree"] += late
    if saved:
        shares["step"] -= 0.04
        shares["save"] += 0.04
    counts = {"save": 1, "other": 0, "evaluate": 1}
    return {name: [counts.get(name, steps), round(share * seconds, 6)] for name, share in shares.items() if share}


def records(
    attempt: Part, opened: float, step_s: float, log_every: int, evaluate_every: int, noise: random.Random
) -> Iterator[dict[str, Any]]:
    """Return the records that the loop logged in one attempt."""
    for step in range(attempt.begin + 1, attempt.end + 1):
        now = round(opened + (step - attempt.begin) * step_s, 3)
        if step % log_every == 0:
            loss = 8.0 / math.sqrt(1 + step / 50) + 1.5 + 0.05 * noise.random()
            yield {"step": step, "time": now, "loss": round(loss, 5), "lr": 3e-4 * min(1.0, step / 100),
                   "norm/gradient": round(1 + noise.random(), 5), "speed/tokens_per_s": round(256 * 1024 / step_s),
                   "mfu": round(0.41 + 0.02 * noise.random(), 4)}  # fmt: skip
        if evaluate_every and step % evaluate_every == 0:
            yield {"step": step, "time": now, "eval/loss": round(8.2 / math.sqrt(1 + step / 50) + 1.6, 5)}


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def cut(path: Path, nbytes: int) -> None:
    """Cut bytes off the end of a file, as a kill in the middle of a line does."""
    with path.open("rb+") as file:
        file.truncate(max(0, path.stat().st_size - nbytes))


def garble(path: Path, offset: int, data: bytes = b"\x00\xff\xfe{]\n") -> None:
    """Write bytes over the middle of a file."""
    with path.open("rb+") as file:
        file.seek(offset)
        file.write(data)
