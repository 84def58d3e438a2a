"""Compare planned seconds of communication with measured seconds, on gloo ranks of this machine.

    python benchmarks/scale_plan.py                        # 2, 4, 8 and 16 ranks: half a minute on a quiet machine
    python benchmarks/scale_plan.py --link 200             # each rank behind a link of 200 Mbit/s: some minutes, as root

Without ``--link``, latency and bandwidth are fitted to all-gathers on 2 ranks, small and large, and ``Network`` predicts every
other row. All ranks share the cores and the memory of one machine, which a network does not: with more ranks than cores,
messages take longer than links alone explain, and the error grows.

With ``--link`` each rank has a network namespace of its own. Its interface sends at most so many megabits a second (a token
bucket of the kernel), so links decide and not cores. Nothing is fitted: the plan gets the bandwidth of the link.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import dtrain as dt
from measure import machine

SIZES = (2**10, 2**20, 2**24)
LINK_SIZES = (2**20, 2**22, 2**24)
OPS = ("all_gather", "reduce_scatter", "all_reduce")


def measure_ops(sizes: Sequence[int], repeats: int) -> list[list[object]]:
    """Return ``[op, bytes, seconds]`` for each operation and size: the fastest of ``repeats``, at the slowest rank."""
    warnings.simplefilter("ignore", FutureWarning)  # newer names of torch's collectives
    ranks, rows = dist.get_world_size(), []
    for op in OPS:
        for size in sizes:
            whole = torch.zeros(max(1, size // 4 // ranks) * ranks)
            shard = torch.zeros(len(whole) // ranks)
            run = {
                "all_gather": lambda whole=whole, shard=shard: dist.all_gather_into_tensor(whole, shard),
                "reduce_scatter": lambda whole=whole, shard=shard: dist.reduce_scatter_tensor(shard, whole),
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
        local_world_size=2**20,
        within=bandwidth,
        between=bandwidth,
        within_latency_s=latency,
        between_latency_s=latency,
        control_latency_s=latency,
    )


# Links


@contextlib.contextmanager
def links(count: int, megabits: int) -> Iterator[list[str]]:
    """Make network namespaces, joined by a bridge, that send at most this fast. Yields their names."""
    mark = f"plan{os.getpid()}"
    switch, names = f"{mark}-sw", [f"{mark}-{place}" for place in range(count)]
    try:
        _ip(f"netns add {switch}", f"-n {switch} link add br0 type bridge", f"-n {switch} link set br0 up")
        for place, name in enumerate(names):
            _ip(
                f"netns add {name}",
                f"-n {switch} link add port{place} type veth peer name eth0 netns {name}",
                f"-n {switch} link set port{place} master br0 up",
                f"-n {name} addr add {_address(place)}/24 dev eth0",
                f"-n {name} link set lo up",
                f"-n {name} link set eth0 up",
            )
            bucket = f"tc -n {name} qdisc add dev eth0 root tbf rate {megabits}mbit burst 64kb limit 4mb"
            subprocess.run(bucket.split(), check=True)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def _address(place: int) -> str:
    return f"10.78.0.{place + 1}"


def _run_behind_link(namespace: str, rank: int, ranks: int, repeats: int, results: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{_address(0)}:29500", rank=rank, world_size=ranks)
    rows = measure_ops(LINK_SIZES, repeats)
    if rank == 0:
        results.put(rows)
    dist.barrier()


def measure_behind_links(ranks: int, megabits: int, repeats: int) -> list[list[object]]:
    """Measure the collectives on ranks that are behind links."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with links(ranks, megabits) as names:
        processes = [
            context.Process(target=_run_behind_link, args=(name, rank, ranks, repeats, results), daemon=True)
            for rank, name in enumerate(names)
        ]
        for process in processes:
            process.start()
        rows = results.get(timeout=900)
        for process in processes:
            process.join(60)
    return rows


# Tables


def main(counts: Sequence[int], repeats: int, megabits: int | None) -> None:
    print(machine())
    if megabits is None:
        network = fit(dt.testing.run_ranks(measure_ops, 2, [SIZES[0], SIZES[-1]], repeats, timeout_s=500)[0], 2)
        print(f"fitted on 2 ranks: {network.within_latency_s * 1e6:.0f} us, {network.within / 1e9:.2f} GB/s\n")
    else:
        network = dt.planning.Network(
            local_world_size=1, within=megabits * 125e3, between=megabits * 125e3, between_latency_s=1e-4
        )
        print(f"links of {megabits} Mbit/s, latency of 0.1 ms assumed\n")
    print("| ranks | collective | bytes | measured | planned | planned / measured |\n|---|---|---|---|---|---|")
    ratios: dict[int, list[float]] = {}
    for ranks in counts:
        if megabits is None:
            rows = dt.testing.run_ranks(measure_ops, ranks, list(SIZES), repeats, timeout_s=500)[0]
        else:
            rows = measure_behind_links(ranks, megabits, repeats)
        for op, size, seconds in rows:
            planned = network.seconds(op, size, group_size=ranks)
            ratios.setdefault(ranks, []).append(planned / seconds)
            print(
                f"| {ranks} | {op} | {size:,} | {seconds * 1e3:.3f} ms | {planned * 1e3:.3f} ms | {planned / seconds:.2f} |",
                flush=True,
            )
    print()
    for ranks, by_row in ratios.items():
        print(
            f"{ranks} ranks: planned / measured, median {statistics.median(by_row):.2f}, {min(by_row):.2f} to {max(by_row):.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--link", type=int, metavar="MBIT", help="put each rank behind a link of so many megabits a second")
    chosen = parser.parse_args()
    main(chosen.ranks, chosen.repeats, chosen.link)
