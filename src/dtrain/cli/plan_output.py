"""What ``dtrain plan`` prints: a line for each strategy, or one in detail; and the same as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from dtrain.cli.checkpoints.output import print_table, size_text

if TYPE_CHECKING:
    from dtrain.planning.estimate import MemoryEstimate
    from dtrain.planning.search import Compared, Largest

_PARTS = ("parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations")


def headline(target: str, row: Compared, precision: str) -> str:
    """What was planned, in one line."""
    estimate = row.estimate
    setting, largest = estimate.setting, row.largest
    mesh = f"dp_replicate {setting.dp_replicate} x dp_shard {setting.world_size // setting.dp_replicate}"
    ranks = f"{setting.world_size} rank{'s' * (setting.world_size != 1)} ({mesh})"
    sizes = f"microbatches of {estimate.microbatch_size}, {estimate.microbatches} to a step"
    room = f", {size_text(largest.memory)} each" if largest else ""
    return f"{target}: {_count(estimate.parameter_count)} parameters on {ranks}{room}, {precision}, {sizes}"


def _count(number: int) -> str:
    for size, letter in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)


def print_comparison(rows: Sequence[Compared]) -> None:
    """A line for each strategy. The columns of bytes are those at the peak, and add up to it."""
    fits = ["fits"] if rows[0].largest else []
    head = ["strategy", "checkpoint", *fits, "peak", "in", *_PARTS, "sent per step"]
    lines = []
    for row in rows:
        estimate = row.estimate
        largest = [] if row.largest is None else [_fits(row.largest)]
        parts = [_size(getattr(estimate.at_peak, part)) for part in _PARTS]
        kept = estimate.setting.checkpoint or "-"
        name = estimate.setting.strategy
        lines.append([name, kept, *largest, _size(estimate.peak), estimate.peak_in, *parts, _size(estimate.sent)])
    empty = {at for at, part in enumerate(head) if part in ("transforms",) and all(line[at] == "-" for line in lines)}
    shown = [[cell for at, cell in enumerate(line) if at not in empty] for line in (head, *lines)]
    left = {"strategy", "checkpoint", "in"}
    print_table(shown[0], shown[1:], right=[at for at, name in enumerate(shown[0]) if name not in left])
    if fits:
        typer.echo("\nfits: the largest microbatch; the other columns are for the one that was asked for")


def print_detail(row: Compared) -> None:
    """What one rank holds and sends."""
    estimate, largest = row.estimate, row.largest
    lines = [[part, _size(getattr(estimate.at_peak, part)), _size(getattr(estimate.most, part))] for part in _PARTS]
    print_table(("part", "at the peak", "at most"), [*lines, ["together", _size(estimate.peak), ""]], right=(1, 2))
    phases = ", ".join(f"{phase} {_size(peak)}" for phase, peak in estimate.peaks.items())
    typer.echo(f"\nThe peak is in {estimate.peak_in}: {phases}.\n")
    traffic = [[t.op, str(t.ranks), str(t.count), _size(t.bytes), _size(t.sent)] for t in estimate.traffic]
    if traffic:
        print_table(("collective", "ranks", "per step", "bytes", "sent by a rank"), traffic, right=(1, 2, 3, 4))
    else:
        typer.echo("Nothing is sent.")
    if largest:
        typer.echo(f"\n{_fitting(largest)}")


def _fits(largest: Largest) -> str:
    return str(largest.microbatch_size) if largest.microbatch_size else "no"


def _fitting(largest: Largest) -> str:
    peak, memory = size_text(largest.estimate.peak), size_text(largest.memory)
    if not largest.microbatch_size:
        return f"Not one sample fits: it takes {peak} of {memory}."
    return f"The largest microbatch is {largest.microbatch_size}: it takes {peak} of {memory}."


def _size(size: int) -> str:
    return size_text(size) if size else "-"


def facts(row: Compared) -> dict[str, Any]:
    """A plan as plain data; sizes in bytes."""
    largest = None
    if row.largest is not None:
        largest = {
            "microbatch_size": row.largest.microbatch_size,
            "peak": row.largest.estimate.peak,
            "tries": row.largest.tries,
        }
    return {**_estimate_facts(row.estimate), "largest": largest}


def _estimate_facts(estimate: MemoryEstimate) -> dict[str, Any]:
    from dataclasses import asdict

    setting = asdict(estimate.setting)
    return {
        **setting,
        "microbatch_size": estimate.microbatch_size,
        "microbatches": estimate.microbatches,
        "parameters": estimate.parameter_count,
        "peak": estimate.peak,
        "peak_in": estimate.peak_in,
        "peaks": dict(estimate.peaks),
        "at_peak": asdict(estimate.at_peak),
        "most": asdict(estimate.most),
        "traffic": [{**asdict(each), "sent": each.sent} for each in estimate.traffic],
        "sent": estimate.sent,
    }
