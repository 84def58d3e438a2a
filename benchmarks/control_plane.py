"""Measure the exchanges of the control plane: simulated to 4,096 ranks, and on real ranks beside gloo.

    python benchmarks/control_plane.py                       # the simulated curve, ten seconds
    python benchmarks/control_plane.py --ranks 2 4 8 16      # real ranks too
    python benchmarks/control_plane.py --ranks 8 --node-size 2   # ranks of four nodes, which connect over TCP

The simulation runs the library's own protocol on a virtual network (``virtual_network``). A message takes 15 microseconds of a
rank that sends or receives it, and 10 microseconds to arrive on the same node.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import dtrain as dt
from dtrain.dist.collectives import all_gather_json, all_gather_single, reduce_record
from dtrain.dist.context import current_context
from dtrain.dist.control_protocol import RowSpec, all_gather, peers_of, reduce_rows
from dtrain.dist.incident_protocol import TIMED_OUT, Sign
from dtrain.dist.step_sync import ForwardRecord
from virtual_network import Network, report_incident, run_exchange, run_reports

NODE_SIZE = 8
RECORD = RowSpec(len(ForwardRecord._fields))
MISSING = (3, 17, *range(40, 48))


def simulate(world: int, latency_s: float) -> dict[str, Any]:
    """Return virtual seconds of an exchange, its largest costs for a rank, and the report of ten missing ranks."""
    network, size = Network(latency_s=latency_s), min(world, NODE_SIZE)
    record = run_exchange(lambda layout: reduce_rows(layout, [1.0] * RECORD.columns, RECORD), world, size, network=network)
    text = run_exchange(lambda layout: all_gather(layout, bytes(200)), world, size, network=network)
    figures = {
        "record_s": max(record.seconds.values()),
        "messages": max(record.sent.values()),
        "bytes": max(record.bytes.values()),
        "json_s": max(text.seconds.values()),
        "json_bytes": max(text.bytes.values()),
        "connections": max(len(peers) for peers in record.peers.values()),
    }
    missing = [rank for rank in MISSING if rank < world]
    survivors = [rank for rank in range(world) if rank not in missing]
    if missing and survivors:
        sign = Sign(mark=TIMED_OUT, caller="step")
        seen = run_reports(
            lambda rank, _: report_incident("control/0", rank, world, sign, grace_s=5), dict.fromkeys(survivors, 0.0)
        )
        right = sum(list(report.missing) == missing for report in seen.reports.values())
        figures |= {"right": f"{right} of {len(survivors)}", "requests": seen.requests / len(survivors), "report_s": seen.last}
    return figures


def show_simulation(latencies_us: list[float]) -> None:
    for latency in latencies_us:
        print(f"\nsimulated, {latency:g} us between nodes of {NODE_SIZE} ranks; messages and bytes of the busiest rank")
        print(
            "  ranks   record     messages  bytes   JSON of 200 B   connections  ranks that name the missing right   requests"
        )
        for world in (2, 4, 8, 16, 64, 256, 512, 1024, 4096):
            row = simulate(world, latency * 1e-6)
            print(
                f"  {world:5d}  {row['record_s'] * 1e3:6.3f} ms  {row['messages']:6d}  {row['bytes']:6d}"
                f"  {row['json_s'] * 1e3:9.2f} ms  {row['connections']:12d}  {row.get('right', '-'):>30s}"
                f"  {row.get('requests', 0):8.1f}"
            )


def measure(count: int, node_size: int) -> dict[str, Any]:
    """Return the median times of this rank for each exchange, wall and processor, in microseconds."""
    if node_size:
        rank = int(os.environ["RANK"])
        os.environ.update(LOCAL_RANK=str(rank % node_size), LOCAL_WORLD_SIZE=str(node_size))
    torch.set_num_threads(1)
    files = len(os.listdir("/proc/self/fd"))
    start = time.perf_counter()
    with dt.init_dist(device="cpu") as info:
        seconds = time.perf_counter() - start
        group = dist.new_group(backend="gloo")
        sent, received = torch.zeros(12, dtype=torch.float64), torch.zeros(12 * info.world_size, dtype=torch.float64)
        sides = {
            "record": lambda: reduce_record([1.0] * RECORD.columns, RECORD),
            "gloo all-gather": lambda: all_gather_single(received, sent, group=group),
            "JSON": lambda: all_gather_json({"rank": info.rank, "text": "x" * 150}),
        }
        figures: dict[str, Any] = {"init_s": seconds, "files": len(os.listdir("/proc/self/fd")) - files}
        figures["connections"] = len(peers_of(current_context().control_plane.layout))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(5):
            for name, side in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(count):
                    side()
                times[name].append(((time.perf_counter() - wall) / count * 1e6, (time.process_time() - cpu) / count * 1e6))
        for name, pairs in times.items():
            figures[name] = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return figures


def show_real(worlds: list[int], node_size: int, count: int) -> None:
    print("\nreal ranks on this machine: medians of the slowest rank, wall time and processor time in microseconds")
    for world in worlds:
        rows = dt.spawn(measure, count, node_size if node_size < world else 0, world_size=world, timeout_s=500)
        parts = [f"{world:3d} ranks: init_dist {max(row['init_s'] for row in rows):.2f} s"]
        for name in ("record", "gloo all-gather", "JSON"):
            wall, cpu = (max(row[name][column] for row in rows) for column in (0, 1))
            parts.append(f"{name} {wall:.0f} wall {cpu:.0f} cpu")
        print("; ".join(parts), flush=True)


def main() -> None:
    """Print the simulated curve, and the measured exchanges of real ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latencies", nargs="*", type=float, default=[25, 100], help="microseconds between two nodes")
    parser.add_argument("--ranks", nargs="*", type=int, default=[], help="numbers of real ranks")
    parser.add_argument("--node-size", type=int, default=0, help="pretend that so many ranks are on each node")
    parser.add_argument("--count", type=int, default=200, help="exchanges in a row")
    given = parser.parse_args()
    show_simulation(given.latencies)
    if given.ranks:
        show_real(given.ranks, given.node_size, given.count)


if __name__ == "__main__":
    main()
