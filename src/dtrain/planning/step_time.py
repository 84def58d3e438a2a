"""Estimate the seconds of a step from counted work, datasheet rates and an assumed efficiency. Nothing here is measured.

    accelerator = dt.planning.Accelerator.preset("h100")
    seconds = dt.planning.step_seconds(estimate, accelerator, dt.planning.Network.preset("h100-ndr400"))
    print(seconds.total, seconds.samples_per_second)

The models of collectives assume idle links at the given bandwidth and nothing that overlaps, so with the bandwidth of a
datasheet the seconds are a lower bound of the time on the links. ``benchmarks/scale_plan.py`` measures latency and bandwidth,
and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch

from dtrain.arguments import check_int, check_number, explain_fields
from dtrain.dist.control_protocol import count_rounds
from dtrain.errors import ConfigError
from dtrain.monitors.flops import peak_flops
from dtrain.planning.estimate import MemoryEstimate
from dtrain.planning.step_work import CollectiveTraffic

DEFAULT_EFFICIENCY = 0.4
"""Default share of a device's peak operations that a step is assumed to reach."""

# Name for ``--device`` -> name for ``peak_flops``, and bytes per second of the memory.
_DEVICES = {
    "a100": ("A100", 2.039e12),
    "h100": ("H100", 3.35e12),
    "h200": ("H200", 4.8e12),
    "b200": ("B200", 8.0e12),
    "l40s": ("L40S", 0.864e12),
    "mi300x": ("MI300X", 5.3e12),
}
_KINDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Rates of one device, and the shares of them that a step is assumed to reach.

    Args:
        flops: peak operations per second by dtype: ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``. A dtype that is missing takes
            the lowest rate.
        bandwidth: bytes per second of the device's memory.
        efficiency: share of the peak operations; the default 0.4 is an assumption, not a measurement.
        bandwidth_efficiency: share of the bandwidth, likewise assumed.

    Example:
        >>> import dtrain as dt
        >>> dt.planning.Accelerator.preset("h100").replace(efficiency=0.5).efficiency
        0.5

    Raises:
        ConfigError: a number that is not positive, a share above 1, or no rate.
    """

    flops: Mapping[str, float]
    bandwidth: float
    efficiency: float = DEFAULT_EFFICIENCY
    bandwidth_efficiency: float = 0.8

    def __post_init__(self) -> None:
        if not self.flops:
            raise ConfigError("Accelerator: flops must not be empty. Pass for example flops={'bf16': 989e12}.")
        for name, rate in (*self.flops.items(), ("bandwidth", self.bandwidth)):
            check_number("Accelerator", name, rate, above=0, advice="Rates are per second.")
        for name in ("efficiency", "bandwidth_efficiency"):
            check_number("Accelerator", name, getattr(self, name), above=0, maximum=1, advice="Use 0.4, for example.")

    @staticmethod
    def preset(name: str) -> Accelerator:
        """Return the device with the rates of its datasheet: ``peak_flops``, and the bandwidth of the memory.

        Source: the datasheets of NVIDIA A100 80GB SXM, H100 SXM, H200 SXM, B200 (HGX), L40S; AMD Instinct MI300X.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in _DEVICES:
            raise ConfigError(
                f"Accelerator.preset: name must be one of {', '.join(_DEVICES)}, got {name!r}. "
                "Or build dt.planning.Accelerator(flops={'bf16': 989e12}, bandwidth=3.35e12)."
            )
        row, bandwidth = _DEVICES[name]
        rates = {kind: peak_flops(row, getattr(torch, dtype)) for dtype, kind in _KINDS.items()}
        return Accelerator(flops={kind: rate for kind, rate in rates.items() if rate}, bandwidth=bandwidth)

    def replace(self, **changes: float) -> Accelerator:
        """Return a copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def seconds(self, flops: Mapping[str, int]) -> float:
        """Return the seconds of operations by dtype of torch, at the assumed efficiency."""
        rates = ((count, self.flops.get(_KINDS.get(name, name), min(self.flops.values()))) for name, count in flops.items())
        return sum(count / rate for count, rate in rates) / self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Estimated seconds of one step, by cause; ``total`` is the sum of ``compute``, ``update``, ``exposed`` and ``control``.

    Args:
        compute: forward and backward.
        update: the optimizer.
        links: all collectives, one after another.
        exposed: the part of ``links`` that no computation hides.
        control: records of the control plane.
        samples_per_second: samples of all ranks.
    """

    compute: float
    update: float
    links: float
    exposed: float
    control: float
    samples_per_second: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.update + self.exposed + self.control


def step_seconds(estimate: MemoryEstimate, accelerator: Accelerator, network: Network | None = None) -> StepSeconds:
    """Estimate the seconds of a step: a roofline of counted work, and the collectives that computation cannot hide.

    - ``compute``: counted operations / (peak * ``efficiency``).
    - ``update``: the slower of the optimizer's operations, and of its bytes / (bandwidth * ``bandwidth_efficiency``).
    - ``exposed``: collectives of ``tp``, all-to-alls of sequences, and the first one of each other kind hide behind nothing.
      All other collectives run beside forward and backward, and only the seconds beyond ``compute`` are exposed.

    Args:
        estimate: result of ``estimate_memory``.
        accelerator: rates of the device.
        network: links; None counts no communication.

    Example:
        estimate = dt.planning.estimate_memory(workload, world_size=64, microbatch_size=4)
        dt.planning.step_seconds(estimate, dt.planning.Accelerator.preset("h100")).samples_per_second
    """
    config, work = estimate.config, estimate.work
    compute = accelerator.seconds(work.flops)
    traffic_s = work.update_bytes / (accelerator.bandwidth * accelerator.bandwidth_efficiency)
    update = max(accelerator.seconds(work.update_flops), traffic_s)
    links = exposed = control = 0.0
    if network is not None:
        links, control = communication_seconds(estimate.traffic, network), control_seconds(config.world_size, network)
        unhidden = 0.0
        for collectives in estimate.traffic:
            seconds = communication_seconds([collectives], network)
            is_tensor_parallel = config.tp > 1 and collectives.stride == 1 and collectives.group_size == config.tp
            # The next product needs their result.
            is_awaited = is_tensor_parallel or collectives.op == "all_to_all"
            unhidden += seconds if is_awaited else seconds / max(1, collectives.count)
        exposed = unhidden + max(0.0, links - unhidden - compute)
    total = compute + update + exposed + control
    samples = config.world_size // (config.cp * config.tp) * estimate.microbatch_size * estimate.microbatches
    return StepSeconds(
        compute=compute,
        update=update,
        links=links,
        exposed=exposed,
        control=control,
        samples_per_second=samples / total if total else 0.0,
    )


# Values of one unit.
_UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8} | {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1,
}
_LINK_UNITS = "GB/s MB/s Gb/s Mb/s"
_NETWORK_EXAMPLE = "Pass h100-ndr400, or node=8,within=450GB/s,between=400Gb/s,latency=10us."


def _parse_values(text: str, units: Mapping[str, str]) -> dict[str, float] | None:
    """Parse ``key=value,key=value``, each value with one of the key's units; None if a key, a number or a unit is wrong."""
    values = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        match = re.fullmatch(r"([0-9]+|[0-9.]+(?=.*[a-z]))\s*([A-Za-z/]*)", value.strip())
        if match is None or match[2] not in units.get(key, "?").split(" "):
            return None
        values[key] = float(match[1]) * _UNITS[match[2]]
    return values


def parse_accelerator(command: str, name: str, text: str) -> Accelerator:
    """Parse the name of a preset, or ``flops=400TFLOP/s,bandwidth=2TB/s``. ``command`` and ``name`` begin the errors.

    Raises:
        ConfigError: the name is unknown, or a value cannot be parsed.
    """
    if text in _DEVICES:
        return Accelerator.preset(text)
    values = _parse_values(text, {"flops": "TFLOP/s GFLOP/s", "bandwidth": "TB/s GB/s"})
    if values is None or len(values) < 2:
        raise ConfigError(
            f"{command}: {name} must be cuda, cpu, {', '.join(_DEVICES)} or rates, got {text!r}. "
            "Pass h100, or flops=400TFLOP/s,bandwidth=2TB/s."
        )
    return Accelerator(flops={"any": values["flops"]}, bandwidth=values["bandwidth"])


GB = 10**9


@explain_fields
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


def parse_network(command: str, name: str, text: str) -> Network:
    """Parse the name of a preset, or ``node=8,within=450GB/s,between=400Gb/s``. ``command`` and ``name`` begin the errors.

    Raises:
        ConfigError: the name is unknown, or a value cannot be parsed.
    """
    if text in NETWORKS:
        return NETWORKS[text]
    times = {"latency": "us ms", "control": "us ms"}
    values = _parse_values(text, {"node": "", "within": _LINK_UNITS, "between": _LINK_UNITS, **times})
    if values is None:
        known = ", ".join(NETWORKS)
        raise ConfigError(f"{command}: {name} must be one of {known} or a list of values, got {text!r}. {_NETWORK_EXAMPLE}")
    if missing := sorted({"node", "within", "between"} - set(values)):
        raise ConfigError(f"{command}: {name} must have {missing[0]}=, got {text!r}. {_NETWORK_EXAMPLE}")
    latency = values.get("latency")
    latencies = {} if latency is None else {"within_latency_s": latency, "between_latency_s": latency}
    latencies |= {"control_latency_s": values["control"]} if "control" in values else {}
    return Network(local_world_size=int(values["node"]), within=values["within"], between=values["between"], **latencies)
