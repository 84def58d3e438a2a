"""Print plans of ``dtrain plan``: tables for people, and plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from dtrain.arguments import format_bytes, format_count
from dtrain.cli.output import print_table

if TYPE_CHECKING:
    from dtrain.planning.estimate import StrategyEstimate
    from dtrain.planning.library import LibraryMemory
    from dtrain.planning.network import Network
    from dtrain.planning.size_search import LargestMicrobatch, MemoryEstimate
    from dtrain.planning.step_time import Accelerator, StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and sizes of the machine that the plan is for; None leaves their columns out.

    Args:
        network: links between ranks.
        accelerator: rates of a device.
        workers: loader processes of a rank.
    """

    network: Network | None = None
    accelerator: Accelerator | None = None
    workers: int = 0

    def library(self, estimate: MemoryEstimate) -> LibraryMemory:
        """Return the memory that dtrain and its backends hold beside the tensors of a step."""
        from dtrain.planning.library import library_memory

        return library_memory(
            estimate, workers=self.workers, local_world_size=self.network.local_world_size if self.network else 8
        )

    def seconds(self, estimate: MemoryEstimate) -> StepSeconds | None:
        """Return the estimated seconds of a step; None without an accelerator."""
        from dtrain.planning.step_time import step_seconds

        return None if self.accelerator is None else step_seconds(estimate, self.accelerator, self.network)


_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations")


def headline(target: str, row: StrategyEstimate, precision: str) -> str:
    """Describe the plan in one line."""
    estimate = row.estimate
    config, largest = estimate.config, row.largest
    sharded = config.world_size // (config.dp_replicate * config.cp * config.tp)
    axes = [f"dp_replicate {config.dp_replicate}", f"dp_shard {sharded}"]
    axes += [f"{name} {size}" for name, size in (("cp", config.cp), ("tp", config.tp)) if size > 1]
    mesh = " x ".join(axes)
    ranks = f"{format_count(config.world_size, 'rank')} ({mesh})"
    sizes = f"microbatches of {estimate.microbatch_size}, {estimate.microbatches} to a step"
    room = f", {_format_size(largest.memory)} each" if largest else ""
    return f"{target}: {_format_parameter_count(estimate.parameter_count)} parameters on {ranks}{room}, {precision}, {sizes}"


def _format_parameter_count(number: int) -> str:
    for unit, letter in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.4g}{letter}"
    return str(number)


def sort_by_speed(rows: Sequence[StrategyEstimate], machine: Machine) -> list[StrategyEstimate]:
    """Return the layouts with the most samples per second first, and layouts in which nothing fits last."""

    def speed(row: StrategyEstimate) -> float:
        seconds = machine.seconds(_shown(row))
        return (
            -1.0
            if row.largest is not None and not row.largest.microbatch_size
            else seconds.samples_per_second
            if seconds
            else 0
        )

    return sorted(rows, key=speed, reverse=True)


def _shown(row: StrategyEstimate) -> MemoryEstimate:
    """Return the estimate whose seconds are shown: that of the largest microbatch, if there is one."""
    return row.largest.estimate if row.largest is not None and row.largest.microbatch_size else row.estimate


def print_comparison(rows: Sequence[StrategyEstimate], machine: Machine) -> None:
    """Print a line for each strategy. The columns of bytes are at the peak, and add up to the peak."""
    network, accelerator = machine.network, machine.accelerator
    # Most workloads have no transform with a state.
    parts = [part for part in _MEMORY_PARTS if part != "transforms" or any(row.estimate.at_peak.transforms for row in rows)]
    with_memory = rows[0].largest is not None
    head = ["strategy", "checkpoint", *(["fits"] if with_memory else []), "peak", "in", *parts, "sent per step"]
    head += ["on the links", "control"] if network else []
    head += ["step", "samples/s"] if accelerator else []
    lines = [
        [
            row.estimate.config.strategy,
            row.estimate.config.checkpoint or "-",
            *([] if row.largest is None else [str(row.largest.microbatch_size or "no")]),
            _format_size(row.estimate.peak),
            row.estimate.peak_phase,
            *(_format_size(getattr(row.estimate.at_peak, part)) for part in parts),
            _format_size(row.estimate.bytes_sent),
            *([] if network is None else map(format_seconds, _seconds(row, network))),
            *([] if (seconds := machine.seconds(_shown(row))) is None else _speed_cells(seconds)),
        ]
        for row in rows
    ]
    left_aligned = {"strategy", "checkpoint", "in"}
    print_table(head, lines, right=[index for index, name in enumerate(head) if name not in left_aligned])
    if with_memory:
        typer.echo("\nfits: the largest microbatch; other columns are for the requested microbatch")
    if network:
        typer.echo("on the links: collectives of a step, one after another; control: records of a step")
    if accelerator:
        typer.echo(f"step, samples/s: {'for the largest microbatch; ' if with_memory else ''}{_describe_estimate(accelerator)}")


def _speed_cells(seconds: StepSeconds) -> list[str]:
    return [format_seconds(seconds.total), f"{seconds.samples_per_second:.4g}"]


def _describe_estimate(accelerator: Accelerator) -> str:
    return f"an estimate, not measured, which assumes {accelerator.efficiency:.0%} of the peak operations"


def _seconds(row: StrategyEstimate, network: Network) -> tuple[float, float]:
    """Return the seconds of a step's collectives, and of its control records."""
    from dtrain.planning.network import communication_seconds, control_seconds

    estimate = row.estimate
    return communication_seconds(estimate.traffic, network), control_seconds(estimate.config.world_size, network)


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit that people read."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def print_detail(row: StrategyEstimate, machine: Machine) -> None:
    """Print the memory and the traffic of one rank."""
    from dtrain.planning.network import communication_seconds

    estimate, largest, network = row.estimate, row.largest, machine.network
    library = machine.library(estimate)
    lines = [
        [part, _format_size(getattr(estimate.at_peak, part)), _format_size(getattr(estimate.max_by_part, part))]
        for part in _MEMORY_PARTS
    ]
    lines += [
        ["together", _format_size(estimate.peak), ""],
        ["device: library", "", _format_size(library.device)],
        ["host: library", "", _format_size(library.host)],
    ]
    print_table(("part", "at the peak", "at most"), lines, right=(1, 2))
    phases = ", ".join(f"{phase} {_format_size(peak)}" for phase, peak in estimate.peaks.items())
    typer.echo(f"\nThe peak is in {estimate.peak_phase}: {phases}.\n")
    head = ["collective", "ranks", "per step", "bytes", "sent by a rank", *(["apart", "on the links"] if network else [])]
    traffic = [
        [
            *(t.op, str(t.group_size), str(t.count), _format_size(t.bytes), _format_size(t.bytes_sent)),
            *([str(t.stride), format_seconds(communication_seconds([t], network))] if network else []),
        ]
        for t in estimate.traffic
    ]
    if traffic:
        print_table(head, traffic, right=range(1, len(head)))
    else:
        typer.echo("Nothing is sent.")
    if network:
        links, control = map(format_seconds, _seconds(row, network))
        typer.echo(f"\nA step spends {links} on the links and {control} in control records, if nothing overlaps.")
    if machine.accelerator and (seconds := machine.seconds(estimate)):
        parts = ", ".join(
            f"{name} {format_seconds(getattr(seconds, name))}" for name in ("compute", "update", "exposed", "control")
        )
        speed = f"{format_seconds(seconds.total)} ({parts}), {seconds.samples_per_second:.4g} samples/s"
        typer.echo(f"\nA step takes {speed}: {_describe_estimate(machine.accelerator)}.")
    typer.echo(f"\nAn asynchronous save stages {_format_size(library.host_staging)} in the host's memory.")
    if largest:
        typer.echo(f"\n{_describe_largest(largest)}")


def _describe_largest(largest: LargestMicrobatch) -> str:
    peak, memory = _format_size(largest.estimate.peak), _format_size(largest.memory)
    if not largest.microbatch_size:
        return f"Not one sample fits: it takes {peak} of {memory}."
    return f"The largest microbatch is {largest.microbatch_size}: it takes {peak} of {memory}."


def _format_size(size: int) -> str:
    # Rows are compared with each other, so large sizes have four digits.
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 else format_bytes(size) if size else "-"


def _speed_facts(estimate: MemoryEstimate, machine: Machine) -> dict[str, Any] | None:
    seconds = machine.seconds(estimate)
    return None if seconds is None else {**asdict(seconds), "total": seconds.total}


def plan_facts(row: StrategyEstimate, machine: Machine) -> dict[str, Any]:
    """Return a plan as plain data; sizes are in bytes, times in seconds."""
    estimate, largest, network = row.estimate, row.largest, machine.network
    library = machine.library(estimate)
    return {
        **asdict(estimate.config),
        "microbatch_size": estimate.microbatch_size,
        "microbatches": estimate.microbatches,
        "parameters": estimate.parameter_count,
        "peak": estimate.peak,
        "peak_in": estimate.peak_phase,
        "peaks": dict(estimate.peaks),
        "at_peak": asdict(estimate.at_peak),
        "most": asdict(estimate.max_by_part),
        "traffic": [{**asdict(each), "sent": each.bytes_sent} for each in estimate.traffic],
        "sent": estimate.bytes_sent,
        "staged": library.host_staging,
        "library": {**asdict(library), "device": library.device, "host": library.host},
        "work": asdict(estimate.work),
        "seconds": None if network is None else dict(zip(("links", "control"), _seconds(row, network), strict=True)),
        "step_seconds": _speed_facts(estimate, machine),
        "largest": None
        if largest is None
        else {
            "microbatch_size": largest.microbatch_size,
            "peak": largest.estimate.peak,
            "tries": largest.sizes_tried,
            "step_seconds": _speed_facts(largest.estimate, machine),
        },
    }
