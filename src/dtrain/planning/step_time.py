"""Estimate the seconds of a step from counted work, datasheet rates and an assumed efficiency. Nothing here is measured.

accelerator = dt.planning.Accelerator.preset("h100")
seconds = dt.planning.step_seconds(estimate, accelerator, dt.planning.Network.preset("h100-ndr400"))
print(seconds.total, seconds.samples_per_second)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.monitors.flops import peak_flops
from dtrain.planning.network import Network, communication_seconds, control_seconds
from dtrain.planning.size_search import MemoryEstimate
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
    - ``exposed``: collectives of ``tp``, and the first one of each other kind, hide behind nothing. All other collectives run
      beside forward and backward, and only the seconds beyond ``compute`` are exposed.

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
        exposed = _exposed_seconds(estimate, network, links, compute)
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


def _exposed_seconds(estimate: MemoryEstimate, network: Network, links: float, compute: float) -> float:
    def is_tensor_parallel(each: CollectiveTraffic) -> bool:
        return estimate.config.tp > 1 and each.stride == 1 and each.group_size == estimate.config.tp

    fixed = 0.0
    for each in estimate.traffic:
        seconds = communication_seconds([each], network)
        fixed += seconds if is_tensor_parallel(each) else seconds / max(1, each.count)
    return fixed + max(0.0, links - fixed - compute)


_RATE = re.compile(r"([0-9.]+)\s*(TFLOP/s|GFLOP/s|TB/s|GB/s)")
_RATE_UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "TB/s": 1e12, "GB/s": 1e9}


def parse_accelerator(command: str, name: str, text: str) -> Accelerator:
    """Parse the name of a preset, or ``flops=400TFLOP/s,bandwidth=2TB/s``. ``command`` and ``name`` begin the errors.

    Raises:
        ConfigError: the name is unknown, or a value cannot be parsed.
    """
    if text in _DEVICES:
        return Accelerator.preset(text)
    values = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        rate = _RATE.fullmatch(value.strip())
        if rate and (key, rate[2][1:]) in (("flops", "FLOP/s"), ("bandwidth", "B/s")):
            values[key] = float(rate[1]) * _RATE_UNITS[rate[2]]
    if len(values) < 2:
        raise ConfigError(
            f"{command}: {name} must be cuda, cpu, {', '.join(_DEVICES)} or rates, got {text!r}. "
            "Pass h100, or flops=400TFLOP/s,bandwidth=2TB/s."
        )
    return Accelerator(flops={"any": values["flops"]}, bandwidth=values["bandwidth"])
