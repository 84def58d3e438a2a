"""Define ``dtrain plan``: estimate the memory and traffic of each rank on a machine without the devices."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.output import format_bytes, print_json, print_table
from dtrain.errors import ConfigError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.planning.estimate import LargestMicrobatch, MemoryEstimate, StrategyEstimate
    from dtrain.shard.precision import Precision


PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16", "pure-fp16")
CHECKPOINTS = ("none", "nothing", "matmuls")

_UNITS = {"B": 1, **{f"{letter}iB": 2 ** (10 * (power + 1)) for power, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate("KMGT")}


def parse_memory(option: str, text: str) -> int:
    """Parse a size with a unit, such as ``80GiB``, to bytes.

    Raises:
        ConfigError: the text is not a positive number with a unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        unit_meant = next((unit for unit in _UNITS if match and match[2].lower() == unit.lower()), None)
        advice = (
            f"Did you mean {match[1]}{unit_meant}?"
            if match and unit_meant and float(match[1])
            else "Pass 80GiB or 80GB, for example."
        )
        raise ConfigError(f"plan: {option} must be a size above 0 with its unit, got {text!r}. {advice}")
    return size


def parse_count(option: str, text: str) -> int:
    """Parse a positive integer.

    Raises:
        ConfigError: the text is not a positive integer.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise ConfigError(f"plan: {option} must be an integer of at least 1, got {text!r}. Use 8, for example.")
    return int(text)


def parse_fraction(option: str, text: str) -> float:
    """Parse a number from 0 to below 1.

    Raises:
        ConfigError: the text is not such a number.
    """
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise ConfigError(f"plan: {option} must be a fraction from 0 to below 1, got {text!r}. Use 0.05, for example.")
    return fraction


def check_choice(option: str, name: str, choices: Sequence[str]) -> None:
    """Check that ``name`` is one of ``choices``.

    Raises:
        ConfigError: another name.
    """
    if name not in choices:
        raise ConfigError(f"plan: {option} must be one of {', '.join(choices)}, got {name!r}. Choose one of them.")


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


_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations")


def headline(target: str, row: StrategyEstimate, precision: str) -> str:
    """Describe the plan in one line."""
    estimate = row.estimate
    config, largest = estimate.config, row.largest
    mesh = f"dp_replicate {config.dp_replicate} x dp_shard {config.world_size // config.dp_replicate}"
    ranks = f"{config.world_size} rank{'s' * (config.world_size != 1)} ({mesh})"
    sizes = f"microbatches of {estimate.microbatch_size}, {estimate.microbatches} to a step"
    room = f", {format_bytes(largest.memory)} each" if largest else ""
    return f"{target}: {_format_count(estimate.parameter_count)} parameters on {ranks}{room}, {precision}, {sizes}"


def _format_count(number: int) -> str:
    for size, letter in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)


def print_comparison(rows: Sequence[StrategyEstimate]) -> None:
    """Print a line for each strategy. The columns of bytes are at the peak, and add up to the peak."""
    fits = ["fits"] if rows[0].largest else []
    head = ["strategy", "checkpoint", *fits, "peak", "in", *_MEMORY_PARTS, "sent per step"]
    lines = []
    for row in rows:
        estimate = row.estimate
        largest = [] if row.largest is None else [_format_largest(row.largest)]
        parts = [_format_size(getattr(estimate.at_peak, part)) for part in _MEMORY_PARTS]
        checkpoint = estimate.config.checkpoint or "-"
        name = estimate.config.strategy
        lines.append(
            [
                name,
                checkpoint,
                *largest,
                _format_size(estimate.peak),
                estimate.peak_phase,
                *parts,
                _format_size(estimate.bytes_sent),
            ]
        )
    empty = {index for index, part in enumerate(head) if part in ("transforms",) and all(line[index] == "-" for line in lines)}
    table = [[cell for index, cell in enumerate(line) if index not in empty] for line in (head, *lines)]
    left_aligned = {"strategy", "checkpoint", "in"}
    print_table(table[0], table[1:], right=[index for index, name in enumerate(table[0]) if name not in left_aligned])
    if fits:
        typer.echo("\nfits: the largest microbatch; other columns are for the requested microbatch")


def print_detail(row: StrategyEstimate) -> None:
    """Print the memory and the traffic of one rank."""
    estimate, largest = row.estimate, row.largest
    lines = [
        [part, _format_size(getattr(estimate.at_peak, part)), _format_size(getattr(estimate.max_by_part, part))]
        for part in _MEMORY_PARTS
    ]
    print_table(("part", "at the peak", "at most"), [*lines, ["together", _format_size(estimate.peak), ""]], right=(1, 2))
    phases = ", ".join(f"{phase} {_format_size(peak)}" for phase, peak in estimate.peaks.items())
    typer.echo(f"\nThe peak is in {estimate.peak_phase}: {phases}.\n")
    traffic = [[t.op, str(t.ranks), str(t.count), _format_size(t.bytes), _format_size(t.bytes_sent)] for t in estimate.traffic]
    if traffic:
        print_table(("collective", "ranks", "per step", "bytes", "sent by a rank"), traffic, right=(1, 2, 3, 4))
    else:
        typer.echo("Nothing is sent.")
    if largest:
        typer.echo(f"\n{_describe_largest(largest)}")


def _format_largest(largest: LargestMicrobatch) -> str:
    return str(largest.microbatch_size) if largest.microbatch_size else "no"


def _describe_largest(largest: LargestMicrobatch) -> str:
    peak, memory = format_bytes(largest.estimate.peak), format_bytes(largest.memory)
    if not largest.microbatch_size:
        return f"Not one sample fits: it takes {peak} of {memory}."
    return f"The largest microbatch is {largest.microbatch_size}: it takes {peak} of {memory}."


def _format_size(size: int) -> str:
    return format_bytes(size) if size else "-"


def plan_facts(row: StrategyEstimate) -> dict[str, Any]:
    """Return a plan as plain data; sizes are in bytes."""
    largest = None
    if row.largest is not None:
        largest = {
            "microbatch_size": row.largest.microbatch_size,
            "peak": row.largest.estimate.peak,
            "tries": row.largest.sizes_tried,
        }
    return {**_estimate_facts(row.estimate), "largest": largest}


def _estimate_facts(estimate: MemoryEstimate) -> dict[str, Any]:
    from dataclasses import asdict

    config = asdict(estimate.config)
    return {
        **config,
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
    }


EXAMPLES = """
dtrain plan model.py:workload --world 512 --memory 80GiB          compare strategies
dtrain plan model.py:workload --world 512 --strategy full_shard   what one rank holds and sends
dtrain plan package.model:workload --world 64 --replicate 8 --precision bf16 --arg layers=48
"""

_NOTHING_FITS_EXIT_CODE = 1
_LAYOUT_HEADING, _SIZES_HEADING, _QUERY_HEADING = "Layout", "Sizes", "Query"


def _option(heading: str, *spellings: str, help: str, metavar: str) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


def plan(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:factory or module:factory, which returns a dt.planning.Workload."),
    ],
    world: Annotated[str, _option(_LAYOUT_HEADING, "--world", metavar="N", help="Ranks, from 1 to 4096.")],
    replicate: Annotated[
        str, _option(_LAYOUT_HEADING, "--replicate", metavar="N", help="dp_replicate of the mesh, for hybrid_shard; default 1.")
    ] = "1",
    strategy: Annotated[
        str | None,
        _option(_LAYOUT_HEADING, "--strategy", metavar="NAME", help="Strategy to show in detail, instead of a comparison."),
    ] = None,
    precision: Annotated[
        str, _option(_LAYOUT_HEADING, "--precision", metavar="NAME", help=f"{', '.join(PRECISIONS)}; default fp32.")
    ] = "fp32",
    checkpoint: Annotated[
        str | None,
        _option(
            _LAYOUT_HEADING,
            "--checkpoint",
            metavar="KEEP",
            help="Values that checkpointed blocks keep: nothing, matmuls; none: no checkpointing.",
        ),
    ] = None,
    accumulate: Annotated[
        str,
        _option(
            _LAYOUT_HEADING, "--accumulate", metavar="HOW", help="Gradients between microbatches: local (default), sharded."
        ),
    ] = "local",
    device: Annotated[str, _option(_LAYOUT_HEADING, "--device", metavar="TYPE", help="cuda (default) or cpu.")] = "cuda",
    microbatch: Annotated[
        str, _option(_SIZES_HEADING, "--microbatch", metavar="N", help="Samples per forward of a rank; default 1.")
    ] = "1",
    microbatches: Annotated[
        str, _option(_SIZES_HEADING, "--microbatches", metavar="N", help="Microbatches per step; default 1.")
    ] = "1",
    seq: Annotated[str | None, _option(_SIZES_HEADING, "--seq", metavar="N", help="The same as --arg seq=N.")] = None,
    arg: Annotated[
        list[str] | None,
        _option(_SIZES_HEADING, "--arg", metavar="NAME=VALUE", help="Argument of the factory; may be repeated."),
    ] = None,
    memory: Annotated[
        str | None,
        _option(
            _QUERY_HEADING, "--memory", metavar="SIZE", help="Memory of a device, as in 80GiB: find the largest microbatch."
        ),
    ] = None,
    headroom: Annotated[
        str,
        _option(_QUERY_HEADING, "--headroom", metavar="SHARE", help="Share of the memory to leave free; default 0.05."),
    ] = "0.05",
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Estimate the memory and network traffic of a run.

    The command needs no device: it runs a step on tensors without memory. It does not allocate the model, and uses no GPU.

    Exit codes: 0 shown; 1 with --memory: no sample fits, or a step of the workload failed; 2 bad usage.
    """
    memory_bytes = None if memory is None else parse_memory("--memory", memory)
    check_choice("--precision", precision, PRECISIONS)
    check_choice("--checkpoint", checkpoint or "none", CHECKPOINTS)
    settings: dict[str, Any] = {
        "memory": memory_bytes,
        "world_size": parse_count("--world", world),
        "dp_replicate": parse_count("--replicate", replicate),
        "accumulate": accumulate,
        "device": device,
        "microbatch_size": parse_count("--microbatch", microbatch),
        "microbatches": parse_count("--microbatches", microbatches),
        "headroom": parse_fraction("--headroom", headroom),
    }
    arguments = parse_factory_arguments([*(arg or ()), *([] if seq is None else [f"seq={seq}"])])
    rows = _run_plans(target, arguments, strategy, checkpoint, precision, settings)
    if as_json:
        print_json(
            {
                "target": target,
                "memory": memory_bytes,
                "headroom": settings["headroom"],
                "plans": [plan_facts(row) for row in rows],
            }
        )
        return _exit_code(rows)
    typer.echo(f"{escape_unprintable(headline(target, rows[0], precision))}\n")
    if strategy is None:
        print_comparison(rows)
    else:
        print_detail(rows[0])
    return _exit_code(rows)


def _run_plans(
    target: str,
    arguments: dict[str, Any],
    strategy: str | None,
    checkpoint: str | None,
    precision: str,
    settings: dict[str, Any],
) -> list[StrategyEstimate]:
    from dtrain.planning.estimate import compare_strategies, estimate_strategy
    from dtrain.planning.workload import load_workload

    settings["precision"] = parse_precision(precision)
    mode: Any = None if checkpoint in (None, "none") else checkpoint
    with load_workload(target, arguments) as workload:
        if strategy is not None:
            return [estimate_strategy(workload, strategy=strategy, checkpoint=mode, **settings)]
        if checkpoint is not None:
            settings["checkpoints"] = (mode,)
        return compare_strategies(workload, **settings)


def _exit_code(rows: list[StrategyEstimate]) -> int:
    """Return 1 if not even one sample fits in any layout, otherwise 0."""
    return _NOTHING_FITS_EXIT_CODE if all(row.largest is not None and not row.largest.microbatch_size for row in rows) else 0
