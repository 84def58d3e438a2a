"""``dtrain checkpoints list``."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.checkpoints.output import print_json, print_table, size_text
from dtrain.cli.checkpoints.places import AsJson, root_of, steps_of
from dtrain.storage import Place

if TYPE_CHECKING:
    from dtrain.checkpoint.find import Committed, Damaged

_HEAD = ("", "step", "committed at", "size", "ranks", "holds", "run", "parent", "manifest")


def list_steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Folder that save_sharded was given.", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """List the committed steps of a root.

    They come in the order of their commits, damaged ones last; * marks the one that loading takes. Of each step only the
    manifest is read: see `dtrain checkpoints verify`.

    Exit codes: 0 listed, whatever is damaged; 1 the root cannot be read; 2 bad usage.
    """
    folder = root_of(root, "list")
    steps, newest = steps_of(folder, "list")
    facts = [_facts(step, latest=step.path == newest) for step in steps]
    if as_json:
        print_json({"root": str(folder), "steps": facts})
    elif facts:
        print_table(_HEAD, [_row(step) for step in facts])
    else:
        typer.echo(f"no checkpoints in {root}")
    return 0


def _facts(step: Committed | Damaged, *, latest: bool) -> dict[str, Any]:
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.find import Damaged

    when = _committed_at(step.path)
    facts = {"step": step.step, "path": str(step.path), "latest": latest, "committed_at": when}
    if isinstance(step, Damaged):
        unknown = dict.fromkeys(("bytes", "world_size", "only", "holds", "run_id", "parent_step", "serial"))
        return {**facts, "valid": False, "problem": step.reason, **unknown}
    return {
        **facts,
        "valid": True,
        "problem": None,
        "bytes": step.bytes,
        "world_size": step.world_size,
        "only": list(step.only),
        "holds": list(layout.sections_of(step.only)),
        "run_id": step.run_id,
        "parent_step": step.parent_step,
        "serial": step.serial,
    }


def _committed_at(folder: Place) -> str | None:
    """When a step was committed, None where that cannot be known: servers have clocks of their own."""
    from dtrain.checkpoint.layout import MANIFEST

    if not isinstance(folder, Path):
        return None
    try:  # the manifest is the last file of a step that is written
        written_s = (folder / MANIFEST).lstat().st_mtime
    except FileNotFoundError:  # a run has just removed the step
        return None
    return datetime.fromtimestamp(written_s).astimezone().isoformat(timespec="seconds")


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    when = "-" if step["committed_at"] is None else step["committed_at"][:19].replace("T", " ")
    begin = ("*" * step["latest"], str(step["step"]), when)
    if not step["valid"]:
        return *begin, "-", "-", "-", "-", "-", f"damaged: {step['problem']}"
    parent = "-" if step["parent_step"] is None else str(step["parent_step"])
    holds = ", ".join(step["only"]) or "all"
    return *begin, size_text(step["bytes"]), str(step["world_size"]), holds, step["run_id"][:8], parent, "valid"
