"""``dtrain plan``: what a run would hold and send on each rank, found out on a machine that has none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.checkpoints.output import print_json
from dtrain.cli.plan_output import facts, headline, print_comparison, print_detail
from dtrain.cli.plan_values import (
    CHECKPOINTS,
    PRECISIONS,
    check_name,
    parse_arguments,
    parse_count,
    parse_memory,
    parse_precision,
    parse_share,
)
from dtrain.errors import printable

if TYPE_CHECKING:
    from dtrain.planning.search import Compared

EXAMPLES = """
dtrain plan model.py:workload --world 512 --memory 80GiB          compare strategies
dtrain plan model.py:workload --world 512 --strategy full_shard   what one rank holds and sends
dtrain plan package.model:workload --world 64 --replicate 8 --precision bf16 --arg layers=48
"""

_FITS_NOWHERE = 1
_LAYOUT, _SIZES, _ASKED = "How it is laid out", "Sizes", "What is asked"


def _option(heading: str, *spellings: str, help: str, metavar: str) -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=heading, show_default=False)


def plan(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:factory or module:factory, which returns a dt.Workload."),
    ],
    world: Annotated[str, _option(_LAYOUT, "--world", metavar="N", help="Ranks, from 1 to 4096.")],
    replicate: Annotated[
        str, _option(_LAYOUT, "--replicate", metavar="N", help="dp_replicate of the mesh, for hybrid_shard; default 1.")
    ] = "1",
    strategy: Annotated[
        str | None, _option(_LAYOUT, "--strategy", metavar="NAME", help="One strategy in detail, instead of a comparison.")
    ] = None,
    precision: Annotated[
        str, _option(_LAYOUT, "--precision", metavar="NAME", help=f"{', '.join(PRECISIONS)}; default fp32.")
    ] = "fp32",
    checkpoint: Annotated[
        str | None,
        _option(_LAYOUT, "--checkpoint", metavar="KEEP", help="What checkpointed blocks keep: nothing, matmuls; none: do not."),
    ] = None,
    accumulate: Annotated[
        str, _option(_LAYOUT, "--accumulate", metavar="HOW", help="Gradients between microbatches: local (default), sharded.")
    ] = "local",
    device: Annotated[str, _option(_LAYOUT, "--device", metavar="TYPE", help="cuda (default) or cpu.")] = "cuda",
    microbatch: Annotated[
        str, _option(_SIZES, "--microbatch", metavar="N", help="Samples per forward of a rank; default 1.")
    ] = "1",
    microbatches: Annotated[
        str, _option(_SIZES, "--microbatches", metavar="N", help="How many of them make a step; default 1.")
    ] = "1",
    seq: Annotated[str | None, _option(_SIZES, "--seq", metavar="N", help="The same as --arg seq=N.")] = None,
    arg: Annotated[
        list[str] | None, _option(_SIZES, "--arg", metavar="NAME=VALUE", help="An argument of the factory; may be repeated.")
    ] = None,
    memory: Annotated[
        str | None, _option(_ASKED, "--memory", metavar="SIZE", help="Of one device, as in 80GiB: the largest microbatch.")
    ] = None,
    headroom: Annotated[
        str, _option(_ASKED, "--headroom", metavar="SHARE", help="Of the memory, for what a plan does not count; default 0.05.")
    ] = "0.05",
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Show what a run would need of memory and network.

    It needs none of the devices that it plans for: a step is run on tensors without memory. Nothing of the model is allocated,
    and no GPU is used.

    Exit codes: 0 shown; 1 with --memory: no sample fits, or a step of the workload failed; 2 bad usage.
    """
    room = None if memory is None else parse_memory("--memory", memory)
    check_name("--precision", precision, PRECISIONS)
    check_name("--checkpoint", checkpoint or "none", CHECKPOINTS)
    asked: dict[str, Any] = {
        "memory": room,
        "world_size": parse_count("--world", world),
        "dp_replicate": parse_count("--replicate", replicate),
        "accumulate": accumulate,
        "device": device,
        "microbatch_size": parse_count("--microbatch", microbatch),
        "microbatches": parse_count("--microbatches", microbatches),
        "headroom": parse_share("--headroom", headroom),
    }
    arguments = parse_arguments([*(arg or ()), *([] if seq is None else [f"seq={seq}"])])
    rows = _plans(target, arguments, strategy, checkpoint, precision, asked)
    if as_json:
        print_json({"target": target, "memory": room, "headroom": asked["headroom"], "plans": [facts(row) for row in rows]})
        return _code(rows)
    typer.echo(f"{printable(headline(target, rows[0], precision))}\n")
    if strategy is None:
        print_comparison(rows)
    else:
        print_detail(rows[0])
    return _code(rows)


def _plans(
    target: str, arguments: dict[str, Any], strategy: str | None, checkpoint: str | None, precision: str, asked: dict[str, Any]
) -> list[Compared]:
    from dtrain.planning.search import compare_strategies, plan_one
    from dtrain.planning.target import loaded_workload

    asked["precision"] = parse_precision(precision)
    kept: Any = None if checkpoint in (None, "none") else checkpoint
    with loaded_workload(target, arguments) as workload:
        if strategy is not None:
            return [plan_one(workload, strategy=strategy, checkpoint=kept, **asked)]
        if checkpoint is not None:
            asked["checkpoints"] = (kept,)
        return compare_strategies(workload, **asked)


def _code(rows: list[Compared]) -> int:
    """1 where no layout has room for one sample."""
    return _FITS_NOWHERE if all(row.largest is not None and not row.largest.microbatch_size for row in rows) else 0
