"""Measure the cost of reading data: resuming, shuffling, agreeing, samples per second from memory and from shards, and peers.

    python benchmarks/data.py                     # everything: less than four minutes on two free cores
    python benchmarks/data.py --quick             # smaller and fewer: less than a minute
    python benchmarks/data.py --only streaming    # one part

Every claim ends in a line with its target and a verdict; see ``measure`` for how. Where the work is done in one process, its
CPU time is compared; where workers or a server share in it, wall time.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data_loading import layers, loading
from data_peers import versions
from data_position import agreement, permutation, quality, resume
from data_streaming import streaming
from measure import machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of every measurement.

    Args:
        resumes: rounds of dtrain's resumes, and samples of torchdata's, which takes its time.
        stretches: rounds of the permutation, and of how many numbers torch's is drawn.
        votes: rounds of the agreement.
        shards: number of shards for the quality of a shuffle, and samples in each.
        passes: rounds of passes through a loader, and part of the usual size of its dataset.
        streams: rounds of passes through shards, and samples in them.
    """

    resumes: tuple[int, int]
    stretches: tuple[int, int]
    votes: int
    shards: tuple[int, int]
    passes: tuple[int, float]
    streams: tuple[int, int]


FULL = Amount(
    resumes=(20, 20_000_000),
    stretches=(5, 20_000_000),
    votes=150,
    shards=(1_024, 512),
    passes=(6, 1.0),
    streams=(3, 12_288),
)
QUICK = Amount(
    resumes=(5, 1_000_000),
    stretches=(4, 1_000_000),
    votes=40,
    shards=(256, 256),
    passes=(2, 0.25),
    streams=(1, 2_048),
)

Part = Callable[[Amount, Path], None]
PARTS: Mapping[str, Part] = {
    "resume": lambda amount, folder: resume(*amount.resumes),
    "permutation": lambda amount, folder: permutation(*amount.stretches),
    "agreement": lambda amount, folder: agreement(amount.votes),
    "quality": lambda amount, folder: quality(*amount.shards),
    "loading": lambda amount, folder: loading(folder, *amount.passes),
    "layers": lambda amount, folder: layers(*amount.passes),
    "streaming": lambda amount, folder: streaming(folder, *amount.streams),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--quick", action="store_true", help="smaller datasets and fewer rounds")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")  # of the peers' use of torch
    logging.getLogger("streaming").setLevel(logging.ERROR)
    print(machine())
    print(versions())
    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        for name in [args.only] if args.only else PARTS:
            print(f"\n## {name}\n", flush=True)
            PARTS[name](QUICK if args.quick else FULL, Path(folder))


if __name__ == "__main__":
    main()
