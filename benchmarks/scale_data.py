"""Measure a dataset of very many shards: time and memory of the first process of a node, and of every other rank.

    python benchmarks/scale_data.py                              # 1e4, 1e5 and 1e6 shards: about two minutes
    python benchmarks/scale_data.py --shards 10000 --ranks 2

The index has MDS shards with two digests, as mosaicml-streaming writes them. Every figure is of a process of its own: processor
time, and resident memory beyond that of the imports. Memory of mapped files is shared by the processes of a node.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measure import machine

SAMPLES = 1000
TARGET_MIB, TARGET_S = 200, 2.0


def make_index(folder: Path, count: int) -> None:
    """Write an index of ``count`` shards that are not there."""
    folder.mkdir()
    with open(folder / "index.json", "w", encoding="utf-8") as file:
        file.write('{"shards": [')
        for number in range(count):
            digests = {"sha1": f"{number * 7919:040x}", "xxh64": f"{number * 104729:016x}"}
            raw = {"basename": f"shard.{number:07}.mds", "bytes": 67_000_000 + number, "hashes": digests}
            columns = {"column_encodings": ["bytes"], "column_names": ["a"], "column_sizes": [None]}
            entry = {**columns, "compression": None, "format": "mds", "hashes": ["sha1", "xxh64"], "raw_data": raw}
            entry |= {"samples": SAMPLES, "size_limit": 2**26, "version": 2, "zip_data": None}
            file.write((", " if number else "") + json.dumps(entry))
        file.write('], "version": 2}')


def memory_mib() -> dict[str, float]:
    """Resident memory of this process: of its own (Anon), of mapped files (File), and the maximum of both (HWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        name: int(status[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("mapped", "RssFile"), ("peak", "VmHWM"))
    }


def rank(folder: Path, cache: Path) -> dict[str, float]:
    """Open the dataset, and go to the middle of two epochs, as a resumed rank does."""
    from dtrain.data.stream.sharded_dataset import ShardedDataset

    with tempfile.TemporaryDirectory() as small:
        make_index(Path(small) / "data", 1)
        ShardedDataset(Path(small) / "data", cache=cache).order(0, shuffle=True).indices(0, 0, 1)  # imports
    before, begin = memory_mib(), time.process_time()
    dataset = ShardedDataset(folder, cache=cache)
    opened = time.process_time()
    order = dataset.order(0, shuffle=True)
    for epoch in (0, 1):
        order.indices(epoch, order.size // 2, order.size // 2 + 1024)
    ordered, after = time.process_time(), memory_mib()
    used = {name: after[name] - before[name] for name in after}
    return {"open_s": opened - begin, "order_s": ordered - opened, **used}


def run_rank(folder: Path, cache: Path) -> dict[str, float]:
    """Run ``rank`` in a process of its own."""
    command = [sys.executable, __file__, "--rank", str(folder), str(cache)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return dict(json.loads(out.stdout))


def main(counts: Sequence[int], ranks: int) -> None:
    print(machine())
    print("| shards | process | open, CPU s | two epochs' orders, CPU s | own MiB | mapped MiB | peak MiB |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as top:
        for count in counts:
            folder, cache = Path(top) / f"{count}", Path(top) / f"{count}.cache"
            make_index(folder, count)
            figures = [run_rank(folder, cache) for _ in range(1 + ranks)]
            for name, row in [("first of a node, once", figures[0])] + [("every rank", row) for row in figures[1:]]:
                cells = [
                    f"{row['open_s']:.3f}",
                    f"{row['order_s']:.3f}",
                    *(f"{row[key]:.0f}" for key in ("own", "mapped", "peak")),
                ]
                print(f"| {count:,} | {name} | {' | '.join(cells)} |", flush=True)
            # The first process opens the dataset for the node.
            worst = max(figures[0]["open_s"], *(row["open_s"] + row["order_s"] for row in figures[1:]))
            peak = max(row["peak"] for row in figures)
            if count >= 10**6:
                verdict = "met" if worst <= TARGET_S and peak <= TARGET_MIB else "not met"
                print(f"\ntarget: {TARGET_MIB} MiB a rank, in {TARGET_S:g} s; here {peak:.0f} MiB, {worst:.2f} s: {verdict}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(rank(Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--shards", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
        parser.add_argument("--ranks", type=int, default=1, help="ranks beside the first")
        chosen = parser.parse_args()
        main(chosen.shards, chosen.ranks)
