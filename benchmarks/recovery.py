"""From the death of a rank to the next loss, with steps in memory, beside torchrun with DCP in the same run.

``python benchmarks/recovery.py --kills 8`` kills a random rank of two again and again, of dtrain and of torchrun in turn, and
prints the seconds to the next loss (p50, p95), which include a step, those of an undisturbed step, and the parts of dtrain's
recovery; ``--width 4096 --layers 6`` makes 1.2 GB of state. ``--jobs`` adds others: ``survive`` (torch 2.14) lets the other
rank stay, ``torchft`` (0.2.0, if installed) goes on with the replica that is left, and the dead one joins later.

Then it prints what a copy costs a step, each step, each tenth step and never, with the A/A band; and with ``--failure-every``,
the minutes for ``--steps`` steps when a rank dies that often.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import compare, compile_bytecode, machine

RANKS = 2
BOTH_REPLICAS = "torchft, both replicas"
LONG_S = 900.0
# Memory in huge pages that is kept once it is freed, for both: on a virtual machine, page faults are else most of a large step.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}

COMMON = """
import json, os, sys, time
from pathlib import Path

rank = int(os.environ.get("REPLICA", os.environ["RANK"]))
width, layers, steps, every, pause_s = json.loads(sys.argv[1])
Path(f"pid-{rank}.new").write_text(str(os.getpid()))
os.replace(f"pid-{rank}.new", f"pid-{rank}")
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def tell(step, members=0):
    # A rank that stays learns of a restart here.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0 or members:
        with open("losses", "a") as file:
            file.write(f"{restart} {step} {time.monotonic()} {rank} {members}\\n")
    time.sleep(pause_s)
"""

DTRAIN = (
    COMMON
    + """
import dtrain as dt

with dt.init_dist() as info:
    dt.open_run("run")
    mesh = dt.build_mesh()
    model = dt.shard_model(build(), mesh, blocks=(nn.Linear,))
    data = torch.utils.data.TensorDataset(torch.randn(64, width))
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=4, seed=0)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().mean(1)))
    checkpoints = dt.Checkpointer("ckpt", mode="async", memory_every=every, keep_last=2)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader=loader)
    state = checkpoints.load(state, missing_ok=True)
    for batch in loader.until(steps):
        state, metrics = step(state, batch)
        dt.reduce_metrics(metrics)
        tell(state.step)
        checkpoints.keep(state)
"""
)

# The same with ranks that stay: strategy replicate, and the loop in a function.
_SETUP, _, _LOOP = DTRAIN.partition("    for batch in loader")
SURVIVE = (
    _SETUP.replace("init_dist()", "init_dist(survive=True)").replace("blocks=(nn.Linear,)", 'strategy="replicate"')
    + "    def train(state):\n"
    + textwrap.indent("    for batch in loader" + _LOOP, "    ")
    + "        return state\n\n"
    + "    checkpoints.retry(train, state)\n"
)

TORCHRUN = (
    COMMON
    + """
from datetime import timedelta
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

# A restart may hang while its ranks connect, by default for half an hour.
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = build()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def stored():
    weights, moments = get_state_dict(model, optimizer)
    return {"weights": weights, "moments": moments}


done = max((int(path.name) for path in Path("dcp").glob("*") if (path / ".metadata").exists()), default=0)
if done:
    content = stored()
    dcp.load(content, checkpoint_id=f"dcp/{done}")
    set_state_dict(model, optimizer, model_state_dict=content["weights"], optim_state_dict=content["moments"])
batches = torch.randn(64, width).split(4 // dist.get_world_size())
for step in range(done + 1, steps + 1):
    model(batches[(step + rank) % len(batches)]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(step)
    if step % every == 0:
        dcp.save(stored(), checkpoint_id=f"dcp/{step}")
dist.destroy_process_group()
"""
)

REPLICAS = (
    COMMON
    + """
from datetime import timedelta
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

model = build()
moments = torch.optim.AdamW(model.parameters(), lr=1e-4)


def stored():
    return {"weights": model.state_dict(), "moments": moments.state_dict()}


def load(content):
    model.load_state_dict(content["weights"])
    moments.load_state_dict(content["moments"])


wait = timedelta(seconds=60)
manager = Manager(ProcessGroupGloo(wait), load, stored, min_replica_size=1, timeout=wait, replica_id=f"{rank}-")
model_of_all, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, moments)
batches = torch.randn(64, width).split(2)
while (done := manager.current_step()) < steps:
    optimizer.zero_grad()
    model_of_all(batches[(done + rank) % len(batches)]).square().mean().backward()
    optimizer.step()
    if manager.current_step() > done:
        tell(manager.current_step(), manager.num_participants())
manager.shutdown()
"""
)

# Each replica is a job of torchrun with one rank, and a server tells them who takes part in a step.
START_REPLICAS = f"""
import os, signal, subprocess, sys
from torchft.coordination import LighthouseServer

server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=50)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "100", "--standalone"]
replicas = [
    subprocess.Popen(
        [*torchrun, *sys.argv[1:]], env={{**os.environ, "REPLICA": str(number), "TORCHFT_LIGHTHOUSE": server.address()}}
    )
    for number in range({RANKS})
]
signal.signal(signal.SIGTERM, lambda *_: [replica.terminate() for replica in replicas])
codes = [replica.wait() for replica in replicas]
server.shutdown()
sys.exit(any(codes))
"""

STEADY = (
    COMMON
    + """
import random
import dtrain as dt

with dt.init_dist() as info:
    mesh = dt.build_mesh()
    model = dt.shard_model(build(), mesh, blocks=(nn.Linear,))
    data = torch.utils.data.TensorDataset(torch.randn(64, width))
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=4, seed=0)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().mean(1)))
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader=loader)
    choices = {"each step": 1, "each tenth step": 10, "never": None}
    pairs = {name: [] for name in choices}
    order = random.Random(0)
    batches = iter(loader.until(10**6))
    for round in range(steps):
        calls = [name for name in choices for _ in range(2)]
        order.shuffle(calls)
        seen = {name: [] for name in choices}
        for name in calls:
            checkpoints = dt.Checkpointer("ckpt", memory_every=choices[name])
            begun = time.perf_counter()
            for _ in range(10):
                state, metrics = step(state, next(batches))
                checkpoints.keep(state)
            dt.reduce_metrics(metrics)
            seen[name].append((time.perf_counter() - begun) / 10)
            checkpoints.close()
        if round:
            for name, times in seen.items():
                pairs[name].append(times)
    if info.is_main:
        Path("steady").write_text(json.dumps(pairs))
"""
)


class Loss(NamedTuple):
    """What a job tells of a step: restart of the rank, time, rank, and of torchft how many replicas took part."""

    restart: int
    at: float
    rank: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A running job, and the folder that it runs in."""

    folder: Path
    process: subprocess.Popen[bytes]

    def losses(self) -> list[Loss]:
        path = self.folder / "losses"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [Loss(int(row[0]), float(row[2]), int(row[3]), int(row[4])) for row in rows if len(row) == 5]

    def undisturbed_steps(self) -> list[float]:
        """Return the seconds between two losses of one start, from its second loss on."""
        times: dict[int, list[float]] = {}
        for loss in self.losses():
            if loss.rank == 0:
                times.setdefault(loss.restart, []).append(loss.at)
        return [after - before for own in times.values() for before, after in pairwise(own[1:])]

    def await_loss(self, counts: Callable[[Loss], bool], number: int = 1) -> float:
        """Wait for some losses that count, and return the time of the last one of them."""
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            times = [loss.at for loss in self.losses() if counts(loss)]
            if len(times) >= number:
                return times[number - 1]
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise RuntimeError((self.folder / "out").read_text()[-3000:])

    def kill_a_rank(self, chance: random.Random) -> tuple[int, float]:
        """Kill a random rank, and return its number and the time."""
        rank = chance.randrange(RANKS)
        pid = int((self.folder / f"pid-{rank}").read_text())
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return rank, at

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


LAUNCHERS = {
    "dtrain": ["-m", "dtrain", "launch", "-n", str(RANKS), "--max-restarts", "100"],
    "survive": ["-m", "dtrain", "launch", "-n", str(RANKS), "--max-restarts", "100"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", "100", "--standalone"],
    "torchft": ["-c", START_REPLICAS],
}
SCRIPTS = {"dtrain": DTRAIN, "survive": SURVIVE, "torchrun": TORCHRUN, "torchft": REPLICAS, "steady": STEADY}


def start(folder: Path, name: str, settings: Sequence[float], launcher: str | None = None) -> Job:
    folder.mkdir()
    (folder / "loop.py").write_text(SCRIPTS[name])
    command = [sys.executable, *LAUNCHERS[launcher or name], "loop.py", json.dumps(settings)]
    with (folder / "out").open("wb") as out:
        environment = {**os.environ, **ENVIRONMENT}
        return Job(folder=folder, process=subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def kill_to_next_loss(folder: Path, args: argparse.Namespace) -> None:
    """Kill ranks of the jobs in turn, and print the seconds to the next loss. Only one job runs at a time."""
    names = [*args.jobs, *([BOTH_REPLICAS] if "torchft" in args.jobs else [])]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    chance = random.Random(args.seed)
    for block in range(-(-args.kills // args.block)):
        for name in chance.sample(args.jobs, k=len(args.jobs)):
            # Without an end of its own.
            job = start(folder / f"{name}-{block}", name, [args.width, args.layers, 10**6, args.every, args.pause])
            for _ in range(min(args.block, args.kills - block * args.block)):
                for key, value in kill_once(job, name, chance, args).items():
                    seconds[key].append(value)
                    print(f"  {key} {value:.2f} s", flush=True)
            steps[name] += job.undisturbed_steps()
            job.end()
    for name, values in seconds.items():
        p50, p95 = median(values), percentile(values, 0.95)
        step = f"; a step {median(steps[name]):.2f} s" if steps[name] else ""
        print(f"{name}: kill to next loss p50 {p50:.2f} s, p95 {p95:.2f} s, {len(values)} kills{step}")
    first, *others = names
    for name in others:
        ratios = [percentile(seconds[first], share) / percentile(seconds[name], share) for share in (0.5, 0.95)]
        print(f"{first} / {name}: p50 {ratios[0]:.3f}, p95 {ratios[1]:.3f}")
    print_parts(folder, args.timeline)


def kill_once(job: Job, name: str, chance: random.Random, args: argparse.Namespace) -> dict[str, float]:
    """Let a job train, kill a rank, and return the seconds to the next loss; of torchft to that of one replica, and of both."""
    begun, members = time.monotonic(), RANKS if name == "torchft" else 0
    job.await_loss(lambda loss: loss.at > begun and loss.members == members, 2 * args.every + 1)
    time.sleep(chance.uniform(args.settle, args.settle + 0.5))
    rank, died_at = job.kill_a_rank(chance)
    if name != "torchft":
        restart = max(loss.restart for loss in job.losses())
        return {name: job.await_loss(lambda loss: loss.restart > restart) - died_at}
    restart = max(loss.restart for loss in job.losses() if loss.rank == rank)
    alone = job.await_loss(lambda loss: loss.at > died_at and loss.rank != rank and loss.members == 1)
    both = job.await_loss(lambda loss: loss.rank == rank and loss.restart > restart and loss.members == RANKS)
    return {"torchft": alone - died_at, BOTH_REPLICAS: both - died_at}


def print_parts(folder: Path, timeline: Path | None) -> None:
    """Print the parts of the recoveries, which the ledgers tell, and draw the recovery of median length into a file."""
    events = [
        json.loads(line)
        for path in folder.glob("dtrain-*/run/ledger/rank-00000.jsonl")
        for line in path.read_text().splitlines()
        if '"recovered"' in line
    ]
    if events:
        print_line("parts (median)", {part: median([event["parts"][part] for event in events]) for part in events[0]["parts"]})
        print_line("parts (the slowest)", max(events, key=lambda event: event["seconds"])["parts"])
    print(f"steps lost: {max((event['lost_steps'] for event in events), default=0)} at most", flush=True)
    if timeline is not None and events:
        middle = sorted(events, key=lambda event: event["seconds"])[len(events) // 2]
        timeline.write_text(draw_timeline(middle), encoding="utf-8")


def print_line(title: str, parts: Mapping[str, float]) -> None:
    print(f"{title}: " + ", ".join(f"{part} {value:.3f}" for part, value in parts.items()))


def draw_timeline(event: Mapping[str, Any]) -> str:
    """Draw the parts of a recovery as an SVG: a bar a part, from the death to the next loss."""
    parts, total, row, left, width = event["parts"], event["seconds"], 24, 96, 420
    lines, begun = [], 0.0
    for number, (part, seconds) in enumerate(parts.items()):
        y, x, length = 44 + number * row, left + width * begun / total, max(1.0, width * seconds / total)
        lines.append(f'<text x="14" y="{y + 13}">{part}</text>')
        lines.append(f'<rect class="held" x="{x:.1f}" y="{y}" width="{length:.1f}" height="16" rx="2"/>')
        lines.append(f'<text class="small" x="{x + length + 6:.1f}" y="{y + 13}">{1000 * seconds:.0f} ms</text>')
        begun += seconds
    height = 56 + len(parts) * row
    title = f"From the death of rank {event['rank_died']} to the next loss: {total:.2f} s"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {height}" width="600" role="img">
<title>{title}</title>
<style>
  .ground {{ fill: #ffffff; }} text {{ font: 13px system-ui, sans-serif; fill: #1f2328; }} .small {{ font-size: 12px; }}
  .held {{ fill: #ddf0ff; stroke: #0969da; }}
  @media (prefers-color-scheme: dark) {{
    .ground {{ fill: #0d1117; }} text {{ fill: #e6edf3; }} .held {{ fill: #0f2d4d; stroke: #58a6ff; }}
  }}
</style>
<rect class="ground" width="600" height="{height}" rx="8"/>
<text x="14" y="26">{title}</text>
{chr(10).join(lines)}
</svg>
"""


def cost_of_copies(folder: Path, args: argparse.Namespace) -> None:
    job = start(folder / "steady", "steady", [args.width, args.layers, args.rounds, 1, 0.0], launcher="dtrain")
    if job.process.wait(LONG_S) != 0:
        raise RuntimeError((job.folder / "out").read_text()[-3000:])
    rounds = json.loads((job.folder / "steady").read_text())
    for name in ("each step", "each tenth step"):
        result = compare([tuple(two) for two in rounds[name]], [tuple(two) for two in rounds["never"]])
        (low, high), more_ms = result.band, result.difference.value * 1e3
        print(f"a copy {name}: step x{result.ratio.value:.3f} (A/A {low:.3f} to {high:.3f}), {more_ms:.2f} ms more")


def minutes_with_failures(folder: Path, args: argparse.Namespace) -> None:
    """Print the minutes for some steps when a random rank dies at intervals."""
    for name in args.jobs:
        chance, begun, deaths = random.Random(args.seed), time.monotonic(), 0
        job = start(folder / f"minutes-{name}", name, [args.width, args.layers, args.steps, args.every, args.pause])
        next_at = begun + args.failure_every
        while job.process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() >= next_at:
                next_at += args.failure_every
                try:
                    job.kill_a_rank(chance)
                    deaths += 1
                except (ProcessLookupError, FileNotFoundError, ValueError):
                    # Between two starts there is no rank to kill.
                    continue
        minutes = (time.monotonic() - begun) / 60
        print(f"{name}: {args.steps} steps in {minutes:.2f} minutes, {deaths} deaths, exit code {job.process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument(
        "--jobs",
        nargs="+",
        choices=LAUNCHERS,
        default=["dtrain", "torchrun"],
        help="jobs to compare",
    )
    parser.add_argument("--block", type=int, default=4, help="kills of one job")
    parser.add_argument("--every", type=int, default=5, help="steps between two copies, or saves of DCP")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a step waits")
    parser.add_argument("--settle", type=float, default=3.0, help="least seconds of training before a kill")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--failure-every", type=float, default=0.0, help="seconds between two deaths; 0 leaves this part out")
    parser.add_argument("--timeline", type=Path, help="SVG file for the recovery of median length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    compile_bytecode()
    print(machine())
    print(f"load {os.getloadavg()[0]:.1f}; state {3 * 4 * args.layers * (args.width**2 + args.width) / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kill_to_next_loss(folder, args)
        if args.rounds:
            cost_of_copies(folder, args)
        if args.failure_every:
            minutes_with_failures(folder, args)


if __name__ == "__main__":
    main()
