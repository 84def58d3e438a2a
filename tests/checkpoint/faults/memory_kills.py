"""SIGKILLs at random moments of jobs that keep their steps in memory: ``python memory_kills.py --kills 500 --seconds 1200``.

Three ranks of ``dtrain launch --max-restarts`` train a small model (``--large``: two ranks and 1.2 GB of state), copy each
second step into memory, and save each sixth one.
One rank or several are killed while they train, copy, save or start, or after a bit of the step in memory was flipped. Each
logged loss, each sample and the final weights must be those of the undisturbed run, no death may cost more than the interval of
the copies (after a flip: nothing that is on disk), and at the end the memory is given back.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 48
KEPT_EVERY, SAVED_EVERY = 2, 6
KINDS = ("one rank", "several ranks", "during a copy", "during a save", "during a restart", "after a flipped bit")
PHASES = {"one rank": b"t", "several ranks": b"t", "during a copy": b"c", "during a save": b"s", "during a restart": b"r"}
LONG_S = 900.0
MOST = 16  # kills of one job: it must end

LOOP = f"""
import hashlib, json, os, sys
from pathlib import Path

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
width, layers = int(sys.argv[1]), int(sys.argv[2])
status = os.open("status", os.O_RDWR | os.O_CREAT)


def enter(phase):
    os.pwrite(status, f"{{phase}} {{os.getpid():10d}} {{restart:8d}}\\n".encode(), rank * 64)


enter("r")
import torch
from torch import nn
import dtrain as dt

torch.set_default_dtype(torch.float64)
log = os.open(f"log-{{rank}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with dt.init_dist() as info:
    Path(f"memory-{{rank}}").write_text(os.environ["DTRAIN_MEMORY_FOLDER"])
    mesh = dt.build_mesh()
    dt.seed_all(0)
    middle = [nn.Linear(width, width) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.1), nn.Tanh(), *middle, nn.Linear(width, 1))
    model = dt.shard_model(model, mesh, blocks=(nn.Linear,))
    data = torch.utils.data.TensorDataset(torch.arange(96), torch.randn(96, 8, generator=torch.Generator().manual_seed(1)))
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=6, seed=0)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[1]).square().sum(1)))
    checkpoints = dt.Checkpointer("ckpt", mode="async", memory_every={KEPT_EVERY}, keep_last=2)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader=loader)
    state = checkpoints.load(state, missing_ok=True)
    for batch in loader.until({STEPS}):
        enter("t")
        samples = batch[0].tolist()
        state, metrics = step(state, batch)
        loss = dt.reduce_metrics(metrics)["loss"].hex()
        os.write(log, (json.dumps([restart, state.step, loss, samples]) + "\\n").encode())
        enter("c")
        checkpoints.keep(state)
        if state.crossed({SAVED_EVERY}):
            enter("s")
            checkpoints.save(state)
    enter("s")
    checkpoints.save(state)
    weights = torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()])
    if info.is_main:
        Path("weights").write_text(hashlib.sha256(weights.numpy()).hexdigest())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Number of ranks, and width and number of the layers between the first and the last."""

    ranks: int
    width: int
    layers: int


SMALL = Size(ranks=3, width=16, layers=0)
LARGE = Size(ranks=2, width=4096, layers=3)  # 50 million weights of 8 bytes, and Adam's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The undisturbed run: its size, loss and samples by rank and step, and a hash of the final weights."""

    size: Size
    lines: dict[tuple[int, int], tuple[str, list[int]]]
    weights: str


@dataclass(slots=True, kw_only=True)
class Tally:
    """Kills by kind, and what went wrong."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_lost: dict[str, int] = field(default_factory=dict)
    jobs: int = 0

    @property
    def count(self) -> int:
        return sum(self.kinds.values())


@dataclass(slots=True, kw_only=True)
class Job:
    """A running job in a folder."""

    folder: Path
    process: subprocess.Popen[bytes]
    ranks: int

    def phases(self) -> list[tuple[bytes, int, int]]:
        """Return phase, pid and restart of each rank that has begun."""
        try:
            content = (self.folder / "status").read_bytes()
        except FileNotFoundError:
            return []
        rows = [content[place : place + 64].split() for place in range(0, len(content), 64)]
        return [(row[0], int(row[1]), int(row[2])) for row in rows if len(row) >= 3]

    def last_step(self) -> int:
        """Return the last step that rank 0 has logged."""
        lines = (self.folder / "log-0").read_bytes().splitlines() if (self.folder / "log-0").exists() else []
        return max((json.loads(line)[1] for line in lines), default=0)

    def await_phase(self, phase: bytes, restart: int, after_step: int) -> list[tuple[bytes, int, int]]:
        """Wait until a rank of this start is in a phase, after a step if the rank is not starting; empty if the job has ended.

        The launcher waits longer and longer before restarts without a new step.
        """
        deadline = time.monotonic() + LONG_S
        while self.process.poll() is None and time.monotonic() < deadline:
            rows = self.phases()
            in_phase = len(rows) == self.ranks and any(row[0] == phase and row[2] == restart for row in rows)
            if in_phase and (phase == b"r" or self.last_step() >= after_step):
                return [row for row in rows if row[2] == restart]
            time.sleep(0.0005)
        return []


def start(folder: Path, size: Size) -> Job:
    (folder / "loop.py").write_text(LOOP)
    ranks, width, layers = map(str, dataclasses.astuple(size))
    command = [sys.executable, "-m", "dtrain", "launch", "-n", ranks, "--max-restarts", "100", "loop.py", width, layers]
    with (folder / "out").open("wb") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment)
    return Job(folder=folder, process=process, ranks=size.ranks)


def undisturbed(size: Size) -> Truth:
    with tempfile.TemporaryDirectory() as name:
        job = start(Path(name), size)
        if job.process.wait(LONG_S) != 0:
            raise RuntimeError((job.folder / "out").read_text())
        lines = {(rank, step): (loss, samples) for rank, _, step, loss, samples in read_logs(job.folder, size.ranks)}
        return Truth(size=size, lines=lines, weights=(job.folder / "weights").read_text())


def read_logs(folder: Path, ranks: int) -> Iterator[tuple[int, int, int, str, list[int]]]:
    """Yield rank, restart, step, loss and samples of each logged step."""
    for rank in range(ranks):
        path = folder / f"log-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            restart, step, loss, samples = json.loads(line)
            yield rank, restart, step, loss, samples


def kill_in_one_job(truth: Truth, kinds: list[str], chance: random.Random, tally: Tally) -> None:
    """Run one job, kill its ranks in these ways until it ends, and check it. Mutates: ``tally``."""
    with tempfile.TemporaryDirectory() as name:
        job = start(Path(name), truth.size)
        made: list[str] = []
        on_disk: list[int | None] = []
        after_step = KEPT_EVERY
        try:
            for kind in kinds:
                rows = job.await_phase(PHASES.get(kind, b"t"), len(made), after_step)
                time.sleep(chance.uniform(0.0, {"r": 0.8, "t": 0.4}.get(PHASES.get(kind, b"t").decode(), 0.003)))
                if not rows or job.process.poll() is not None:
                    break
                saved = newest_on_disk(job.folder)
                if kind == "after a flipped bit" and not flip(job.folder, chance):
                    kind = "one rank"
                victims = chance.sample(rows, k=min(len(rows), 2 if kind == "several ranks" else 1))
                for _, pid, _ in victims:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        # The job is at its end.
                        continue
                if job.process.poll() is not None:
                    break
                after_step = max(after_step, job.last_step() + KEPT_EVERY)
                made.append(kind)
                on_disk.append(saved if kind == "after a flipped bit" else None)
            code = job.process.wait(LONG_S)
        finally:
            job.process.kill()
            job.process.wait()
        tally.jobs += 1
        tally.kinds.update(made)
        seed = f"job {tally.jobs}, kills {made}"
        tally.wrong += [f"{problem} ({seed})" for problem in problems_of(job.folder, code, truth, on_disk, tally)]


def flip(folder: Path, chance: random.Random) -> bool:
    """Flip a bit of the newest step in memory, and return True if there is one."""
    try:
        memory = Path((folder / "memory-0").read_text())
        steps = sorted(memory.glob("*/step-*"))
        files = [path for path in steps[-1].rglob("*") if path.is_file() and path.stat().st_size > 500]
        file = max(files, key=lambda path: path.stat().st_size)
        handle = os.open(file, os.O_RDWR)
    except (OSError, IndexError, ValueError):
        return False
    try:
        place = chance.randrange(os.fstat(handle).st_size)
        os.pwrite(handle, bytes([os.pread(handle, 1, place)[0] ^ (1 << chance.randrange(8))]), place)
    finally:
        os.close(handle)
    return True


def newest_on_disk(folder: Path) -> int:
    # A step that is written or removed has a longer name.
    names = [path.parent.name for path in (folder / "ckpt").glob("step-*/manifest.json")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def problems_of(folder: Path, code: int, truth: Truth, on_disk: list[int | None], tally: Tally) -> Iterator[str]:
    """Compare a job that has ended with the undisturbed one. Mutates: ``tally.most_lost``.

    Args:
        on_disk: for each death the newest step on disk before it, if a bit in memory was flipped; else None.
    """
    if code != 0:
        yield f"exit code {code}: {(folder / 'out').read_text()[-1500:]}"
        return
    if (folder / "weights").read_text() != truth.weights:
        yield "other weights at the end"
    steps: dict[int, set[int]] = {}
    for rank, restart, step, loss, samples in read_logs(folder, truth.size.ranks):
        steps.setdefault(restart, set()).add(step)
        if (loss, samples) != truth.lines[rank, step]:
            yield f"rank {rank} differs at step {step} after {restart} restarts"
    done, saved = 0, list[int]()
    for restart in range(len(on_disk) + 1):
        saved += [step for step in on_disk[max(0, restart - 1) : restart] if step is not None]
        if not (own := steps.get(restart)):
            continue
        if sorted(own) != list(range(min(own), max(own) + 1)):
            yield f"a gap in the steps {sorted(own)}"
        lost = done - (min(own) - 1)
        if not 0 <= lost <= (done - min(saved) if saved else KEPT_EVERY):
            yield f"{lost} steps lost before start {restart}"
        key = "flipped" if saved else "killed"
        tally.most_lost[key] = max(lost, tally.most_lost.get(key, 0))
        done, saved = max(own), []
    if done != STEPS:
        yield f"ended at step {done}"
    memory = Path((folder / "memory-0").read_text())
    if memory.exists() or memory.with_name(f"{memory.name}.lock").exists():
        yield "memory was not given back"


def draw(count: int, seed: int, *, size: Size = SMALL, seconds: float = 1e9, report: Any = None) -> Tally:
    """Kill about ``count`` times, each kind in turn in a random order, within some seconds."""
    chance, tally, truth = random.Random(seed), Tally(), undisturbed(size)
    deadline = time.monotonic() + seconds
    while tally.count < count and time.monotonic() < deadline:
        kinds = [kind for _ in range(MOST // len(KINDS) + 1) for kind in chance.sample(KINDS, k=len(KINDS))]
        before = tally.count
        kill_in_one_job(truth, kinds[: min(MOST, count - tally.count)], chance, tally)
        if report is not None:
            report(tally)
        if tally.count == before:
            tally.wrong.append("a job ended before its first kill")
            break
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--large", action="store_true", help="two ranks and 1.2 GB of state")
    args = parser.parse_args()

    def report(tally: Tally) -> None:
        print(f"{tally.count} kills, {len(tally.wrong)} wrong, most lost {tally.most_lost}, {dict(tally.kinds)}", flush=True)
        for problem in tally.wrong:
            print(f"  {problem}", flush=True)

    draw(args.kills, args.seed, size=LARGE if args.large else SMALL, seconds=args.seconds, report=report)


if __name__ == "__main__":
    main()
