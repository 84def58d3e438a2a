"""Compare planned seconds of communication with measured ones, on gloo ranks of this machine.

    python benchmarks/scale_plan.py                       # 2, 4, 8 and 16 ranks: about two minutes on a quiet machine
    python benchmarks/scale_plan.py --ranks 2 4

Latency and bandwidth are fitted to all-gathers on 2 ranks, small and large. Then ``Network`` predicts every other row: other
operations, sizes and numbers of ranks. All ranks share the cores and the memory of one machine, which a network does not: with
more ranks than cores, messages take longer than links alone explain, and the error grows.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

import dtrain as dt
from measure import machine

SIZES = (2**10, 2**20, 2**24)
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def measure_ops(sizes: Sequence[int], repeats: int) -> list[list[object]]:
    """Return ``[op, bytes, seconds]`` for each operation and size: the fastest of ``repeats``, at the slowest rank."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of torch's collectives
    ranks, rows = dist.get_world_size(), []
    for op in OPS:
        for size in sizes:
            whole = torch.zeros(max(1, size // 4 // ranks) * ranks)
            part = torch.zeros(len(whole) // ranks)
            run = {
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
                "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            }[op]
            seconds = []
            for _ in range(repeats + 2):
                dist.barrier()
                begin = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - begin)
            slowest = torch.tensor(min(seconds[2:]))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rows.append([op, len(whole) * 4, slowest.item()])
    return rows


def fit(rows: Sequence[Sequence[object]], ranks: int) -> dt.planning.Network:
    """Return the network whose seconds for the smallest and the largest all-gather are those of ``rows``."""
    gathers = {size: seconds for op, size, seconds in rows if op == "all_gather"}
    small, large = min(gathers), max(gathers)
    latency = gathers[small] / (ranks - 1)
    bandwidth = (ranks - 1) / ranks * large / max(1e-9, gathers[large] - gathers[small])
    return dt.planning.Network(
        node_ranks=2**20,
        within=bandwidth,
        between=bandwidth,
        within_latency_s=latency,
        between_latency_s=latency,
        control_latency_s=latency,
    )


def main(counts: Sequence[int], repeats: int) -> None:
    print(machine())
    network = fit(dt.testing.run_ranks(measure_ops, 2, [SIZES[0], SIZES[-1]], repeats, timeout_s=500)[0], 2)
    print(f"fitted on 2 ranks: {network.within_latency_s * 1e6:.0f} us, {network.within / 1e9:.2f} GB/s\n")
    print("| ranks | collective | bytes | measured | planned | planned / measured |\n|---|---|---|---|---|---|")
    ratios: dict[int, list[float]] = {}
    for ranks in counts:
        for op, size, seconds in dt.testing.run_ranks(measure_ops, ranks, list(SIZES), repeats, timeout_s=500)[0]:
            planned = network.seconds(op, size, ranks=ranks)
            ratios.setdefault(ranks, []).append(planned / seconds)
            print(f"| {ranks} | {op} | {size:,} | {seconds * 1e3:.3f} ms | {planned * 1e3:.3f} ms | {planned / seconds:.2f} |")
    print()
    for ranks, each in ratios.items():
        print(f"{ranks} ranks: planned / measured, median {statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=20)
    chosen = parser.parse_args()
    main(chosen.ranks, chosen.repeats)
