"""Define ``dtrain plan``: estimate the memory and traffic of each rank on a machine without the devices."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.arguments import format_count
from dtrain.cli.output import print_json
from dtrain.cli.parameters import choice, integer, number, option, size
from dtrain.cli.plan_tables import Machine, headline, plan_facts, print_comparison, print_detail, sort_by_speed
from dtrain.errors import ConfigError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.planning.estimate import PlanProgress, StrategyEstimate
    from dtrain.planning.network import Network
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
    from dtrain.planning import network

    return network.parse_network(command, name, text)


EXAMPLES = """
dtrain plan model.py:workload --world 512 --memory 80GiB          compare strategies
dtrain plan model.py:workload --world 512 --strategy full_shard   what one rank holds and sends
dtrain plan package.model:workload --world 64 --replicate 8 --precision bf16 --arg layers=48
"""

_NOTHING_FITS_EXIT_CODE = 1
_LAYOUT_HEADING, _SIZES_HEADING, _QUERY_HEADING = "Layout", "Sizes", "Query"


_option = partial(option, "plan")

World = Annotated[int, _option(_LAYOUT_HEADING, "--world N", "Ranks, from 1 to 4096.", integer(1))]
Replicate = Annotated[
    int, _option(_LAYOUT_HEADING, "--replicate N", "dp_replicate of the mesh, for hybrid_shard.  [default: 1]", integer(1))
]
ContextParallel = Annotated[
    int,
    _option(_LAYOUT_HEADING, "--cp N", "cp of the mesh; the workload must have batch_seq_dims.  [default: 1]", integer(1)),
]
TensorParallel = Annotated[
    int, _option(_LAYOUT_HEADING, "--tp N", "tp of the mesh; the workload must have a tp_plan.  [default: 1]", integer(1))
]
NetworkOption = Annotated[
    Any,
    _option(
        _QUERY_HEADING,
        "--network NAME",
        "Network, for seconds: a100-hdr200, h100-ndr400, b200-ndr400, pcie4-100gbe, or node=8,within=450GB/s,between=400Gb/s.",
        parse_network,
    ),
]
Processes = Annotated[
    int, _option(_QUERY_HEADING, "--processes N", "Layouts to estimate at a time, each in a fork.  [default: 1]", integer(1))
]
Strategy = Annotated[
    str | None, _option(_LAYOUT_HEADING, "--strategy NAME", "Strategy to show in detail, instead of a comparison.")
]
PrecisionName = Annotated[
    str, _option(_LAYOUT_HEADING, "--precision NAME", f"{', '.join(PRECISIONS)}.  [default: fp32]", choice(*PRECISIONS))
]
Checkpoint = Annotated[
    str | None,
    _option(
        _LAYOUT_HEADING,
        "--checkpoint KEEP",
        "Values that checkpointed blocks keep: nothing, matmuls; none: no checkpointing.",
        choice("none", "nothing", "matmuls"),
    ),
]
Accumulation = Annotated[
    str, _option(_LAYOUT_HEADING, "--accumulate HOW", "Gradients between microbatches: local or sharded.  [default: local]")
]
Device = Annotated[
    Any,
    _option(
        _LAYOUT_HEADING,
        "--device NAME",
        "cuda or cpu; for seconds a100, h100, h200, b200, l40s, mi300x, or flops=400TFLOP/s,bandwidth=2TB/s.  [default: cuda]",
        parse_device,
    ),
]
Efficiency = Annotated[
    float | None,
    _option(
        _QUERY_HEADING,
        "--efficiency SHARE",
        "Share of the device's peak operations that a step is assumed to reach.  [default: 0.4]",
        number(above=0, maximum=1, advice="Use 0.4, for example."),
    ),
]
Workers = Annotated[
    int, _option(_QUERY_HEADING, "--workers N", "Loader processes of a rank, for the host's memory.  [default: 0]", integer(0))
]
Microbatch = Annotated[
    int, _option(_SIZES_HEADING, "--microbatch N", "Samples per forward of a rank.  [default: 1]", integer(1))
]
Microbatches = Annotated[int, _option(_SIZES_HEADING, "--microbatches N", "Microbatches per step.  [default: 1]", integer(1))]
SequenceLength = Annotated[str | None, _option(_SIZES_HEADING, "--seq N", "The same as --arg seq=N.")]
FactoryArguments = Annotated[
    list[str] | None, _option(_SIZES_HEADING, "--arg NAME=VALUE", "Argument of the factory; may be repeated.")
]
Memory = Annotated[
    int | None,
    _option(_QUERY_HEADING, "--memory SIZE", "Memory of a device, as in 80GiB: find the largest microbatch.", parse_memory),
]
Headroom = Annotated[
    float,
    _option(
        _QUERY_HEADING,
        "--headroom SHARE",
        "Share of the memory to leave free.  [default: 0.05]",
        number(minimum=0, below=1, advice="Use 0.05, for example."),
    ),
]


def plan(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:factory or module:factory, which returns a dt.planning.Workload."),
    ],
    world: World,
    replicate: Replicate = 1,
    cp: ContextParallel = 1,
    tp: TensorParallel = 1,
    strategy: Strategy = None,
    precision: PrecisionName = "fp32",
    checkpoint: Checkpoint = None,
    accumulate: Accumulation = "local",
    device: Device = ("cuda", None),
    microbatch: Microbatch = 1,
    microbatches: Microbatches = 1,
    seq: SequenceLength = None,
    arg: FactoryArguments = None,
    memory: Memory = None,
    headroom: Headroom = 0.05,
    network: NetworkOption = None,
    efficiency: Efficiency = None,
    workers: Workers = 0,
    processes: Processes = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Estimate the memory and network traffic of a run.

    The command needs no device: it runs a step on tensors without memory. It does not allocate the model, and uses no GPU.

    Exit codes: 0 shown; 1 with --memory: no sample fits, or a step of the workload failed; 2 bad usage.
    """
    settings: dict[str, Any] = {
        "memory": memory,
        "world_size": world,
        "dp_replicate": replicate,
        "cp": cp,
        "tp": tp,
        "accumulate": accumulate,
        "device": device[0],
        "microbatch_size": microbatch,
        "microbatches": microbatches,
        "headroom": headroom,
    }
    arguments = parse_factory_arguments([*(arg or ()), *([] if seq is None else [f"seq={seq}"])])
    rows = _run_plans(target, arguments, strategy, checkpoint, precision, settings, processes)
    machine = _machine(network, device[1], efficiency, workers)
    if machine.accelerator is not None:
        rows = sort_by_speed(rows, machine)
    if as_json:
        plans = [plan_facts(row, machine) for row in rows]
        print_json({"target": target, "memory": memory, "headroom": headroom, "plans": plans})
    else:
        typer.echo(f"{escape_unprintable(headline(target, rows[0], precision))}\n")
        print_comparison(rows, machine) if strategy is None else print_detail(rows[0], machine)
    nothing_fits = all(row.largest is not None and not row.largest.microbatch_size for row in rows)
    return _NOTHING_FITS_EXIT_CODE if nothing_fits else 0


def _machine(network: Any, accelerator: Any, efficiency: float | None, workers: int) -> Machine:
    if efficiency is not None:
        if accelerator is None:
            raise ConfigError(f"plan: --efficiency must come with rates of a device, got {efficiency}. Add --device h100.")
        accelerator = accelerator.replace(efficiency=efficiency)
    return Machine(network=network, accelerator=accelerator, workers=workers)


def _run_plans(
    target: str,
    arguments: dict[str, Any],
    strategy: str | None,
    checkpoint: str | None,
    precision: str,
    settings: dict[str, Any],
    processes: int,
) -> list[StrategyEstimate]:
    from dtrain.planning.estimate import compare_strategies, estimate_strategy
    from dtrain.planning.workload import load_workload

    settings["precision"] = parse_precision(precision)
    mode: Any = None if checkpoint in (None, "none") else checkpoint
    with load_workload(target, arguments) as workload, contextlib.closing(_Progress()) as progress:
        settings["on_progress"] = progress.show
        if strategy is not None:
            return [estimate_strategy(workload, strategy=strategy, checkpoint=mode, **settings)]
        if checkpoint is not None:
            settings["checkpoints"] = (mode,)
        return compare_strategies(workload, processes=processes, **settings)


class _Progress:
    """Progress of a search on standard error: one live line on a terminal, else a line every few seconds and at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = 5) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._start = self._last = clock()
        self._has_line = False

    def show(self, progress: PlanProgress) -> None:
        """Show the layouts that are done, and the step that runs."""
        on_terminal, now = sys.stderr.isatty(), self._clock()
        is_last = progress.done == progress.total
        if not on_terminal and not is_last and now - self._last < self._interval_s:
            return
        self._last = now
        text = f"plan: {progress.done} of {format_count(progress.total, 'layout')} in {now - self._start:.0f} s"
        if not is_last:
            config = progress.config
            layout = f"{config.strategy}, {f'checkpoint {config.checkpoint}' if config.checkpoint else 'no checkpointing'}"
            text += f": {layout}"
            text += "" if progress.microbatch_size is None else f", microbatches of {progress.microbatch_size}"
        typer.echo(f"\r\x1b[K{text}" if on_terminal else text, err=True, nl=not on_terminal)
        self._has_line = on_terminal

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._has_line:
            typer.echo("\r\x1b[K", err=True, nl=False)
