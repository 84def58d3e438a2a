"""``dtrain checkpoints prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain.cli.checkpoints.output import named, print_json, size_text
from dtrain.cli.checkpoints.places import AsJson, root_of


def prune(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Folder that save_sharded was given.", show_default=False)],
    keep_last: Annotated[int, typer.Option("--keep-last", metavar="N", help="How many of the last steps stay.")],
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="Steps that are multiples of N stay, too.")
    ] = None,
    pin: Annotated[list[int] | None, typer.Option("--pin", metavar="STEP", help="This step stays; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove steps that are not to be kept.

    What loading takes is never removed, nor a step that is damaged or was not completed. Of a step the manifest goes first, so
    that it is a checkpoint or is not.

    Exit codes: 0 done; 1 a step could not be removed; 2 bad usage.
    """
    folder = root_of(root, "prune")
    with named("prune"):
        from dtrain.checkpoint.retention import prune_checkpoints

        gone = prune_checkpoints(
            str(folder), keep_last=keep_last, keep_every=keep_every, pinned=tuple(pin or ()), dry_run=dry_run
        )
    if as_json:
        removed = [{"step": step.step, "path": str(step.path), "bytes": step.bytes} for step in gone]
        print_json({"root": str(folder), "dry_run": dry_run, "removed": removed})
        return 0
    for step in gone:
        typer.echo(f"{step.path.name}: {'would be removed' if dry_run else 'removed'}, {size_text(step.bytes)}")
    total = size_text(sum(step.bytes for step in gone))
    typer.echo(f"{len(gone)} step{'s' * (len(gone) != 1)}, {total}" if gone else "nothing to remove")
    return 0
