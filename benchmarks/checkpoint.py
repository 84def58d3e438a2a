"""Measure saving and loading of a training state against DCP, ``torch.save`` and bare writes of the same bytes, on 2 ranks.

    python benchmarks/checkpoint.py                        # everything: about a quarter of an hour
    python benchmarks/checkpoint.py --only large           # one part
    python benchmarks/checkpoint.py --size 1G --root /mnt/fast

Prints Markdown: for each model the seconds of every way to save and load it, then the claims with their targets and verdicts.
Saves are timed until the bytes are on the disk, loads are of files in the page cache; a rank waits for the slowest. Every
ratio is of calls in the same rounds, followed by its range within the noise of this run (see ``measure``).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dtrain as dt
from checkpoint_claims import LARGE, SMALL, Claim, claim_row, judged, table, time_rows
from checkpoint_peers import LOADS, SAVES
from checkpoint_ranks import dip, leave, loads, memory, saves
from dtrain.testing import Ranks, run_ranks
from measure import Figure, machine

WORLD = 2
TIMEOUT_S = 3600.0
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}
SMALL_SAVES = ("dtrain", "dtrain async", "DCP", "torch.save, a file per rank")
SMALL_LOADS = ("dtrain", "DCP", "torch.load, a file per rank")


def speed(
    title: str,
    claims: Mapping[str, Sequence[Claim]],
    ways: Mapping[str, Sequence[str]],
    model: str,
    size: int,
    root: str,
    rounds: int,
) -> None:
    """Both tables of one model."""
    rows: list[str | None] = []
    for what, measured in (("save", saves), ("load", loads)):
        report = run_ranks(measured, WORLD, model, size, root, list(ways[what]), rounds, timeout_s=TIMEOUT_S)[0]
        nbytes = report["bytes"]
        print(f"### {title}: {what} {nbytes / 1e9:.3g} GB in all\n")
        table(f"way | training held | {what}, to the end | interval | GB/s", time_rows(report["timings"], nbytes))
        rows += [claim_row(claim, report["timings"]) for claim in claims[what]]
    print(f"### {title}: claims\n")
    table("what | seconds | ratio | A/A band | target | verdict", [row for row in rows if row is not None])


def memory_of_loads(size: int, root: str, rounds: int) -> None:
    """Measure the resident memory of a load of 2 ranks' checkpoint on another number of ranks, each time in new processes."""
    ways = ("dtrain", "DCP")
    run_ranks(leave, WORLD, "large", size, root, list(ways), timeout_s=TIMEOUT_S)
    rows = []
    for world in (1, 2 * WORLD):
        for name in ways:
            shares = []
            for _ in range(rounds):
                with Ranks(world) as ranks:
                    reports = ranks.run(memory, "large", size, root, name, timeout_s=TIMEOUT_S)
                shares.append(max(report["above"] / report["own"] for report in reports))
            figure = Figure(value=sorted(shares)[len(shares) // 2], low=min(shares), high=max(shares))
            at_most = 0.8 if name == "dtrain" else None
            cells = (
                f"{name}, {WORLD} to {world} ranks",
                f"{max(report['own'] for report in reports) / 1e6:.0f} MB",
                f"{figure.value:.3f}",
                f"{figure.low:.3f} to {figure.high:.3f}",
                "" if at_most is None else f"{at_most:g}",
                judged(figure, at_most),
            )
            rows.append(f"| {' | '.join(cells)} |")
    print("### Peak resident memory of a load at another world size, above that before it\n")
    table("what | own shards | peak / own shards | least to most | target | verdict", rows)


def on_cuda(size: int, root: str) -> None:
    """The stall and the dip of one process on a GPU."""
    print("### On a GPU: training while an async save is under way\n")
    if not torch.cuda.is_available():
        print("Not run here: there is no GPU.\n")
        return
    with dt.init_dist():
        measured = dip(size, root, "cuda", 50)
    lost = 1 - measured["during"] / measured["before"]
    rate = f"{measured['before']:.0f} | {measured['during']:.0f} | {lost:.1%}"
    row = f"| {measured['held_s'] * 1e3:.1f} ms | {measured['window_s']:.2f} s | {rate} |"
    table("training held | save, to the end | tokens (rows) a second before | meanwhile | dip", [row])


def number(text: str) -> int:
    """``100M`` as a number."""
    scale = UNITS.get(text[-1:], 1)
    return int(float(text.rstrip("kMG")) * scale)


def place(root: str) -> str:
    """Describe the file system of the files."""
    device = os.stat(root).st_dev
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kinds = [m[m.index("-") + 1] for m in mounts if m[2] == f"{os.major(device)}:{os.minor(device)}"]
    return f"files: in {root}, {kinds[0] if kinds else 'unknown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=number, default="100M", help="parameters of the large model (%(default)s)")
    parser.add_argument("--tensors", type=number, default="5k", help="parameters of the model of small ones (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of two calls per way (%(default)s)")
    parser.add_argument("--root", default=tempfile.gettempdir(), help="a folder on the disk to be measured (%(default)s)")
    parser.add_argument("--only", choices=PARTS, help="one part")
    given = parser.parse_args()
    print(f"{machine()}\n{place(given.root)}\n", flush=True)
    for name, measure in PARTS.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(dir=given.root) as folder:
                measure(given, folder)


PARTS: Mapping[str, Callable[[Any, str], None]] = {
    "small": lambda given, folder: speed(
        f"{given.tensors:,} small tensors with AdamW's state",
        SMALL,
        {"save": SMALL_SAVES, "load": SMALL_LOADS},
        "small",
        given.tensors,
        folder,
        given.rounds,
    ),
    "large": lambda given, folder: speed(
        f"{given.size / 1e6:.3g} M parameters with AdamW's state",
        LARGE,
        {"save": tuple(SAVES), "load": tuple(LOADS)},
        "large",
        given.size,
        folder,
        given.rounds,
    ),
    "memory": lambda given, folder: memory_of_loads(given.size, folder, max(2, given.rounds // 2)),
    "cuda": lambda given, folder: on_cuda(given.size, folder),
}


if __name__ == "__main__":
    main()
