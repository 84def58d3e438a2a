"""Estimate the seconds of a step's collectives and control messages on a given network.

    network = dt.planning.Network.preset("h100-ndr400")
    seconds = dt.planning.communication_seconds(estimate.traffic, network)

The models assume idle links at the given bandwidth and nothing that overlaps, so with the bandwidth of a datasheet the seconds
are a lower bound of the time on the links. ``benchmarks/scale_plan.py`` measures latency and bandwidth, and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from dtrain.arguments import check_int, check_number
from dtrain.dist.control_protocol import count_rounds
from dtrain.errors import ConfigError
from dtrain.planning.step_work import CollectiveTraffic

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between the ranks of a job.

    Args:
        local_world_size: ranks per node, which are neighbours in the order of ranks.
        within: bytes per second that a rank sends within its node, in one direction.
        between: bytes per second that a rank sends to other nodes, in one direction.
        within_latency_s: seconds of one small message within a node.
        between_latency_s: seconds of one small message between nodes.
        control_latency_s: seconds of one message of the control plane between nodes, with the work of both ranks.
        control_within_latency_s: the same between two ranks of a node.

    Example:
        >>> import dtrain as dt
        >>> network = dt.planning.Network(local_world_size=8, within=450e9, between=50e9)
        >>> round(network.seconds("all_gather", 2**30, group_size=8) * 1e3, 1)
        2.1

    Raises:
        ConfigError: a number that is not positive.
    """

    local_world_size: int
    within: float
    between: float
    within_latency_s: float = 3e-6
    between_latency_s: float = 10e-6
    control_latency_s: float = 55e-6
    control_within_latency_s: float = 40e-6

    def __post_init__(self) -> None:
        check_int("Network", "local_world_size", self.local_world_size)
        for field in fields(self)[1:]:
            check_number("Network", field.name, getattr(self, field.name), above=0, advice="Bandwidth is in bytes per second.")

    @staticmethod
    def preset(name: str) -> Network:
        """Return the network of a well-known machine, with the bandwidths of its datasheet; the latencies are assumptions.

        Source: the datasheets of NVIDIA DGX A100 (NVLink 3, 600 GB/s a GPU in both directions; 200 Gb/s InfiniBand a GPU),
        DGX H100 and HGX H200 (NVLink 4, 900 GB/s; 400 Gb/s), DGX B200 (NVLink 5, 1,800 GB/s; 400 Gb/s). ``pcie4-100gbe``: eight
        GPUs on PCIe 4.0 x16 (32 GB/s) that share one port of 100 Gb/s.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in NETWORKS:
            raise ConfigError(
                f"Network.preset: name must be one of {', '.join(NETWORKS)}, got {name!r}. "
                "Or build dt.planning.Network(local_world_size=8, within=450e9, between=50e9)."
            )
        return NETWORKS[name]

    def replace(self, **changes: float) -> Self:
        """Return a copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def seconds(self, op: str, size: int, *, group_size: int, stride: int = 1) -> float:
        """Return the seconds of one collective.

        A group within a node, or with one rank per node, uses one kind of link, with latency ``a`` and ``b`` bytes per second.
        For ``n`` ranks and ``S`` bytes:

        - all-gather, reduce-scatter, all-to-all: a ring, ``(n - 1) a + (n - 1) / n S / b``;
        - all-reduce: the faster of a ring, ``2 (n - 1) a + 2 (n - 1) / n S / b``, and a tree, ``2 log2(n) a + 2 S / b``;
        - broadcast, reduce, gather, scatter: a pipelined tree, ``log2(n) a + S / b``;
        - others, such as permute and send: ``a + S / b``, between nodes if the group is on several.

        A group with ``m`` ranks on each of ``k`` nodes works in two levels: within nodes on ``S`` bytes, and between nodes on
        ``S / m`` bytes, as each of the ``m`` ranks has its own ring over the nodes. An all-reduce is a reduce-scatter within
        nodes, an all-reduce between nodes, and an all-gather within nodes.

        Args:
            op: operation, as in ``CollectiveTraffic``.
            size: logical bytes, as in ``CollectiveTraffic``.
            group_size: ranks of the group.
            stride: distance between the global ranks of neighbours in the group.

        Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (rings and
        recursive doubling); Sanders, Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan" (trees); ``PERFORMANCE.md`` of NVIDIA's nccl-tests (bus bandwidth).
        """
        inner = min(group_size, max(1, self.local_world_size // stride))
        nodes = math.ceil(group_size / inner)
        if op in ("permute", "send", "recv"):
            return self._level(op, size, group_size, inside=nodes == 1)
        if op == "all_reduce" and inner > 1 and nodes > 1:
            within = 2 * self._level("all_gather", size, inner, inside=True)
            return within + self._level(op, size / inner, nodes, inside=False)
        return self._level(op, size, inner, inside=True) + self._level(op, size / inner, nodes, inside=False)

    def _level(self, op: str, size: float, group_size: int, *, inside: bool) -> float:
        latency, bandwidth = (self.within_latency_s, self.within) if inside else (self.between_latency_s, self.between)
        if group_size == 1:
            return 0.0
        hops, part, depth = group_size - 1, (group_size - 1) / group_size, math.ceil(math.log2(group_size))
        if op in ("all_gather", "reduce_scatter", "all_to_all"):
            return hops * latency + part * size / bandwidth
        if op == "all_reduce":
            return 2 * min(hops * latency + part * size / bandwidth, depth * latency + size / bandwidth)
        if op in ("broadcast", "reduce", "gather", "scatter", "barrier"):
            return depth * latency + size / bandwidth
        return latency + size / bandwidth


NETWORKS = {
    "a100-hdr200": Network(local_world_size=8, within=300 * GB, between=25 * GB),
    "h100-ndr400": Network(local_world_size=8, within=450 * GB, between=50 * GB),
    "b200-ndr400": Network(local_world_size=8, within=900 * GB, between=50 * GB),
    "pcie4-100gbe": Network(local_world_size=8, within=32 * GB, between=12.5 * GB / 8),
}
"""Networks by name; see ``Network.preset``."""


def communication_seconds(traffic: Sequence[CollectiveTraffic], network: Network) -> float:
    """Return the seconds of a step's collectives, one after another, if nothing overlaps with them.

    Example:
        estimate = dt.planning.estimate_memory(workload, world_size=64)
        dt.planning.communication_seconds(estimate.traffic, dt.planning.Network.preset("h100-ndr400"))
    """
    total = 0.0
    for each in traffic:
        # Collectives of a kind differ in size, and their seconds are linear in it: count them at their mean size.
        seconds = network.seconds(
            each.op, round(each.bytes / max(1, each.count)), group_size=each.group_size, stride=each.stride
        )
        total += each.count * seconds
    return total


# Records per step of the control plane: one before the first forward, and one after the last backward.
_RECORDS_PER_STEP = 2


def control_seconds(world_size: int, network: Network) -> float:
    """Return the seconds of a step's control records: the messages in sequence of the control plane, times their latency.

    The default latencies are those of the simulation in ``benchmarks/control_plane.py``: 15 us of each of the two ranks, and
    10 us within a node or 25 us between nodes.

    Example:
        >>> import dtrain as dt
        >>> round(
        ...     dt.planning.control_seconds(512, dt.planning.Network.preset("h100-ndr400")), 6
        ... )
        0.00114
    """
    local = min(world_size, network.local_world_size)
    # Nodes with different numbers of ranks exchange without a leader.
    rounds = count_rounds(world_size, local if world_size % local == 0 else 1)
    record = rounds.local * network.control_within_latency_s + rounds.remote * network.control_latency_s
    return _RECORDS_PER_STEP * record


_RATE = re.compile(r"([0-9.]+)\s*(?:(GB|MB|Gb|Mb)/s)")
_RATE_UNITS = {"GB": 1e9, "MB": 1e6, "Gb": 1e9 / 8, "Mb": 1e6 / 8}
_NETWORK_EXAMPLE = "Pass h100-ndr400, or node=8,within=450GB/s,between=400Gb/s,latency=10us."


def parse_network(command: str, name: str, text: str) -> Network:
    """Parse the name of a preset, or ``node=8,within=450GB/s,between=400Gb/s``. ``command`` and ``name`` begin the errors.

    Raises:
        ConfigError: the name is unknown, or a value cannot be parsed.
    """
    if text in NETWORKS:
        return NETWORKS[text]
    values: dict[str, float] = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        rate, seconds = _RATE.fullmatch(value.strip()), re.fullmatch(r"([0-9.]+)(us|ms)", value.strip())
        if key in ("within", "between") and rate:
            values[key] = float(rate[1]) * _RATE_UNITS[rate[2]]
        elif key in ("latency", "control") and seconds:
            values[key] = float(seconds[1]) * (1e-6 if seconds[2] == "us" else 1e-3)
        elif key == "node" and value.isdecimal():
            values[key] = int(value)
        else:
            known = ", ".join(NETWORKS)
            raise ConfigError(f"{command}: {name} must be one of {known} or a list of values, got {text!r}. {_NETWORK_EXAMPLE}")
    if missing := sorted({"node", "within", "between"} - set(values)):
        raise ConfigError(f"{command}: {name} must have {missing[0]}=, got {text!r}. {_NETWORK_EXAMPLE}")
    latency = values.get("latency")
    latencies = {} if latency is None else {"within_latency_s": latency, "between_latency_s": latency}
    latencies |= {"control_latency_s": values["control"]} if "control" in values else {}
    return Network(local_world_size=int(values["node"]), within=values["within"], between=values["between"], **latencies)
