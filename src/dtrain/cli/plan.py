"""Define ``dtrain plan``: estimate the memory and traffic of each rank on a machine without the devices."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.arguments import format_bytes, format_count
from dtrain.cli.output import print_json, print_table
from dtrain.cli.parameters import choice, integer, number, option, size
from dtrain.errors import ConfigError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.planning.device_facts import DeviceFacts
    from dtrain.planning.estimate import LibraryMemory, MemoryEstimate, PlanProgress, StrategyEstimate
    from dtrain.planning.step_time import Accelerator, Network, StepSeconds
    from dtrain.shard.precision import Precision


def parse_device(command: str, name: str, text: str) -> tuple[str, Any]:
    """Parse the type of a device, and its rates: ``cuda``, ``cpu``, ``h100`` or ``flops=400TFLOP/s,bandwidth=2TB/s``."""
    if text in ("cuda", "cpu"):
        return text, None
    from dtrain.planning.step_time import parse_accelerator

    return "cuda", parse_accelerator(command, name, text)


PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16", "pure-fp16")


def parse_memory(command: str, name: str, text: str) -> int:
    """Parse a size with a unit, such as ``80GiB``, to bytes. A type of ``option``.

    Raises:
        ConfigError: the text is not a positive number with a unit.
    """
    # A number of gigabytes without its unit would be read as bytes.
    if re.fullmatch(r"[0-9.]+", text.strip()):
        raise ConfigError(f"{command}: {name} must have a unit, got {text!r}. Pass 80GiB or 80GB, for example.")
    return size(command, name, text)


def parse_factory_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of a factory from texts such as ``layers=48``; a value that is not a Python literal stays text.

    Raises:
        ConfigError: a text without a name, or a repeated name.
    """
    arguments = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"plan: --arg must be name=value, got {pair!r}. Use --arg layers=48, for example.")
        if name in arguments:
            raise ConfigError(f"plan: the argument {name!r} is repeated. Remove one of the values.")
        try:
            arguments[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            # The value is a word.
            arguments[name] = text
    return arguments


def parse_precision(name: str) -> Precision | None:
    """Return the precision of a name in ``PRECISIONS``. Imports torch."""
    from dtrain.shard.precision import Precision

    preset, _, low = f"DEFAULT-{name}".replace("DEFAULT-pure", "PURE").partition("-")
    return None if name == "fp32" else Precision.preset(preset, low)  # type: ignore[arg-type]


def parse_network(command: str, name: str, text: str) -> Network:
    """Parse the name of a preset, or values such as ``node=8,within=450GB/s,between=400Gb/s``. A type of ``option``."""
    from dtrain.planning import step_time

    return step_time.parse_network(command, name, text)


def load_facts(command: str, name: str, text: str) -> DeviceFacts:
    """Read the facts of a device from a file of ``measure_device``. A type of ``option``."""
    from dtrain.planning.device_facts import DeviceFacts

    return DeviceFacts.load(text)


_layout, _sizes, _query = (partial(option, "plan", heading) for heading in ("Layout", "Sizes", "Query"))


def plan(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="file.py:factory or module:factory, which returns a dt.planning.Workload.")
    ],
    world: Annotated[int, _layout("--world N", "Ranks, from 1 to 4096.", integer(1))],
    replicate: Annotated[
        int, _layout("--replicate N", "dp_replicate of the mesh, for hybrid_shard.  [default: 1]", integer(1))
    ] = 1,
    cp: Annotated[
        int, _layout("--cp N", "cp of the mesh; the workload must have batch_seq_dims.  [default: 1]", integer(1))
    ] = 1,
    cp_method: Annotated[
        str, _layout("--cp-method NAME", "Exchange along cp: ring or ulysses.  [default: ring]", choice("ring", "ulysses"))
    ] = "ring",
    tp: Annotated[int, _layout("--tp N", "tp of the mesh; the workload must have a tp_plan.  [default: 1]", integer(1))] = 1,
    strategy: Annotated[str | None, _layout("--strategy NAME", "Strategy to show in detail, instead of a comparison.")] = None,
    precision: Annotated[
        str, _layout("--precision NAME", f"{', '.join(PRECISIONS)}.  [default: fp32]", choice(*PRECISIONS))
    ] = "fp32",
    checkpoint: Annotated[
        str | None,
        _layout(
            "--checkpoint KEEP",
            "Values that checkpointed blocks keep: nothing, matmuls; none: no checkpointing.",
            choice("none", "nothing", "matmuls"),
        ),
    ] = None,
    accumulate: Annotated[
        str, _layout("--accumulate HOW", "Gradients between microbatches: local or sharded.  [default: local]")
    ] = "local",
    device: Annotated[
        Any,
        _layout(
            "--device NAME",
            "cuda or cpu; for seconds a100, h100, h200, b200, l40s, mi300x, or flops=400TFLOP/s,bandwidth=2TB/s.  "
            "[default: cuda]",
            parse_device,
        ),
    ] = ("cuda", None),
    microbatch: Annotated[int, _sizes("--microbatch N", "Samples per forward of a rank.  [default: 1]", integer(1))] = 1,
    microbatches: Annotated[int, _sizes("--microbatches N", "Microbatches per step.  [default: 1]", integer(1))] = 1,
    seq: Annotated[str | None, _sizes("--seq N", "The same as --arg seq=N.")] = None,
    arg: Annotated[list[str] | None, _sizes("--arg NAME=VALUE", "Argument of the factory; may be repeated.")] = None,
    memory: Annotated[
        int | None, _query("--memory SIZE", "Memory of a device, as in 80GiB: find the largest microbatch.", parse_memory)
    ] = None,
    headroom: Annotated[
        float,
        _query(
            "--headroom SHARE",
            "Share of the memory to leave free.  [default: 0.05]",
            number(minimum=0, below=1, advice="Use 0.05, for example."),
        ),
    ] = 0.05,
    network: Annotated[
        Any,
        _query(
            "--network NAME",
            "Network, for seconds: a100-hdr200, h100-ndr400, b200-ndr400, pcie4-100gbe, or "
            "node=8,within=450GB/s,between=400Gb/s.",
            parse_network,
        ),
    ] = None,
    efficiency: Annotated[
        float | None,
        _query(
            "--efficiency SHARE",
            "Share of the device's peak operations that a step is assumed to reach.  [default: 0.4]",
            number(above=0, maximum=1, advice="Use 0.4, for example."),
        ),
    ] = None,
    facts: Annotated[
        Any,
        _query(
            "--facts FILE",
            "Memory of libraries on the device, written by dt.planning.measure_device().save(FILE).  [default: assumed]",
            load_facts,
        ),
    ] = None,
    workers: Annotated[
        int, _query("--workers N", "Loader processes of a rank, for the host's memory.  [default: 0]", integer(0))
    ] = 0,
    processes: Annotated[
        int, _query("--processes N", "Layouts to estimate at a time, each in a fork.  [default: 1]", integer(1))
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Estimate the memory and network traffic of a run.

    The command needs no device: it runs a step on tensors without memory. It does not allocate the model, and uses no GPU.

    Exit codes: 0 shown; 1 with --memory: no sample fits, or a step of the workload failed; 2 bad usage.

    Examples:
        dtrain plan model.py:workload --world 512 --memory 80GiB          compare strategies
        dtrain plan model.py:workload --world 512 --strategy full_shard   what one rank holds and sends
        dtrain plan package.model:workload --world 64 --replicate 8 --precision bf16 --arg layers=48
    """
    accelerator = device[1]
    if efficiency is not None:
        if accelerator is None:
            raise ConfigError(f"plan: --efficiency must come with rates of a device, got {efficiency}. Add --device h100.")
        accelerator = accelerator.replace(efficiency=efficiency)
    machine = Machine(network=network, accelerator=accelerator, facts=facts, workers=workers)
    arguments = parse_factory_arguments([*(arg or ()), *([] if seq is None else [f"seq={seq}"])])
    settings: dict[str, Any] = {
        "memory": memory,
        "world_size": world,
        "dp_replicate": replicate,
        "cp": cp,
        "cp_method": cp_method,
        "tp": tp,
        "accumulate": accumulate,
        "device": device[0],
        "microbatch_size": microbatch,
        "microbatches": microbatches,
        "headroom": headroom,
        "processes": processes,
    }
    if strategy is not None:
        settings |= {"strategies": (strategy,), "checkpoints": (None,)}
    if checkpoint is not None:
        settings["checkpoints"] = (None if checkpoint == "none" else checkpoint,)
    from dtrain.planning.estimate import compare_strategies
    from dtrain.planning.workload import load_workload

    with load_workload(target, arguments) as workload, contextlib.closing(_Progress()) as progress:
        rows = compare_strategies(workload, precision=parse_precision(precision), on_progress=progress.show, **settings)
    if accelerator is not None:
        rows = sort_by_speed(rows, machine)
    if as_json:
        plans = [plan_facts(row, machine) for row in rows]
        print_json({"target": target, "memory": memory, "headroom": headroom, "plans": plans})
    else:
        typer.echo(f"{escape_unprintable(headline(target, rows[0], precision))}\n")
        print_comparison(rows, machine) if strategy is None else print_detail(rows[0], machine)
    nothing_fits = all(row.largest is not None and not row.largest.microbatch_size for row in rows)
    return 1 if nothing_fits else 0


_PROGRESS_INTERVAL_S = 5.0


class _Progress:
    """Progress of a search on standard error: one live line on a terminal, else a line every few seconds and at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._has_line = clock, False
        self._start = self._last = clock()

    def show(self, progress: PlanProgress) -> None:
        """Show the layouts that are done, and the step that runs."""
        on_terminal, now = sys.stderr.isatty(), self._clock()
        is_last = progress.done == progress.total
        # A plan of one layout has a line for its steps only.
        if (is_last and progress.total == 1) or not (on_terminal or is_last or now - self._last >= _PROGRESS_INTERVAL_S):
            return
        self._last = now
        text = f"plan: {progress.done} of {format_count(progress.total, 'layout')} in {now - self._start:.0f} s"
        if not is_last:
            config = progress.config
            text += f": {config.strategy}, {f'checkpoint {config.checkpoint}' if config.checkpoint else 'no checkpointing'}"
            text += "" if progress.microbatch_size is None else f", microbatches of {progress.microbatch_size}"
        typer.echo(f"\r\x1b[K{text}" if on_terminal else text, err=True, nl=not on_terminal)
        self._has_line = on_terminal

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._has_line:
            typer.echo("\r\x1b[K", err=True, nl=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates and sizes of the machine that the plan is for; None leaves their columns out.

    Args:
        network: links between ranks.
        accelerator: rates of a device.
        facts: memory of libraries on a device; None for assumptions.
        workers: loader processes of a rank.
    """

    network: Network | None = None
    accelerator: Accelerator | None = None
    facts: DeviceFacts | None = None
    workers: int = 0

    def library(self, estimate: MemoryEstimate) -> LibraryMemory:
        """Return the memory that dtrain and its backends hold beside the tensors of a step."""
        from dtrain.planning.device_facts import ASSUMED_FACTS
        from dtrain.planning.estimate import library_memory

        return library_memory(
            estimate,
            workers=self.workers,
            local_world_size=self.network.local_world_size if self.network else 8,
            facts=self.facts or ASSUMED_FACTS,
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
    sequences = "cp" if config.cp_method == "ring" else f"cp by {config.cp_method}"
    axes += [f"{name} {size}" for name, size in ((sequences, config.cp), ("tp", config.tp)) if size > 1]
    ranks = f"{format_count(config.world_size, 'rank')} ({' x '.join(axes)})"
    sizes = f"microbatches of {estimate.microbatch_size}, {estimate.microbatches} to a step"
    room = f", {_format_size(largest.memory)} each" if largest else ""
    count = str(estimate.parameter_count)
    for unit, letter in ((10**3, " k"), (10**6, " M"), (10**9, " G")):
        if estimate.parameter_count >= unit:
            count = f"{estimate.parameter_count / unit:.4g}{letter}"
    return f"{target}: {count} parameters on {ranks}{room}, {precision}, {sizes}"


def sort_by_speed(rows: Sequence[StrategyEstimate], machine: Machine) -> list[StrategyEstimate]:
    """Return the layouts with the most samples per second first, and layouts in which nothing fits last."""

    def speed(row: StrategyEstimate) -> float:
        if row.largest is not None and not row.largest.microbatch_size:
            return -1.0
        seconds = machine.seconds(_shown(row))
        return seconds.samples_per_second if seconds else 0.0

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
            *(
                []
                if (seconds := machine.seconds(_shown(row))) is None
                else [format_seconds(seconds.total), f"{seconds.samples_per_second:.4g}"]
            ),
        ]
        for row in rows
    ]
    print_table(head, lines, right=[index for index, name in enumerate(head) if name not in ("strategy", "checkpoint", "in")])
    if with_memory:
        typer.echo("\nfits: the largest microbatch; other columns are for the requested microbatch")
    if network:
        typer.echo("on the links: collectives of a step, one after another; control: records of a step")
    if accelerator:
        typer.echo(f"step, samples/s: {'for the largest microbatch; ' if with_memory else ''}{_describe_estimate(accelerator)}")


def _describe_estimate(accelerator: Accelerator) -> str:
    return f"an estimate, not measured, which assumes {accelerator.efficiency:.0%} of the peak operations"


def _seconds(row: StrategyEstimate, network: Network) -> tuple[float, float]:
    """Return the seconds of a step's collectives, and of its control records."""
    from dtrain.planning.step_time import communication_seconds, control_seconds

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
    from dtrain.planning.step_time import communication_seconds

    estimate, largest, network = row.estimate, row.largest, machine.network
    library = machine.library(estimate)
    lines = [
        [part, _format_size(getattr(estimate.at_peak, part)), _format_size(getattr(estimate.max_by_part, part))]
        for part in _MEMORY_PARTS
    ]
    lines += [
        ["together", _format_size(estimate.peak), ""],
        ["device: workspaces", "", _format_size(library.device_workspaces)],
        ["device: rounding", "", _format_size(library.device_rounding)],
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
    if library.device_workspaces:
        source = (
            f"measured on {machine.facts.device}, torch {machine.facts.torch}" if machine.facts else "assumed, not measured"
        )
        typer.echo(f"\nThe workspaces of matrix products are {escape_unprintable(source)}.")
    typer.echo(f"\nAn asynchronous save stages {_format_size(library.host_staging)} in the host's memory.")
    if largest:
        size, peak, room = largest.microbatch_size, _format_size(largest.estimate.peak), _format_size(largest.memory)
        result = f"The largest microbatch is {size}:" if size else "Not one sample fits:"
        typer.echo(f"\n{result} it takes {peak} of {room}.")


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
