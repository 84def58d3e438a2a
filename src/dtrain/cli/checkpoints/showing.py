"""``dtrain checkpoints show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.checkpoints.output import named, print_json, print_table, size_text
from dtrain.cli.checkpoints.places import AsJson, step_in
from dtrain.errors import printable

if TYPE_CHECKING:
    from dtrain.checkpoint.opened import Opened

_HEAD = ("tensor", "dtype", "shape", "size", "in")
_SHOWN_FILES = 3


def show(
    path: Annotated[str, typer.Argument(metavar="ROOT_OR_STEP", help="A step's folder, or a root: its newest step.")],
    only: Annotated[
        str | None, typer.Option("--only", metavar="BEGIN", help="Tensors whose names begin so, as in params/encoder.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a step holds: tensors, and where they are.

    Names begin with what a tensor is: params/, buffers/, optimizer/, slices/, extra/, and for what each rank has of its own
    rank-00000/. Reads the manifest and the indexes, no tensor.

    Exit codes: 0 shown; 1 the step is damaged or cannot be read; 2 bad usage.
    """
    from dtrain.checkpoint.opened import open_checkpoint

    folder = step_in(path, "show")
    with named("show"):
        facts = _facts(open_checkpoint(folder))
    lines = _summary(facts)
    facts["tensors"] = [tensor for tensor in facts["tensors"] if tensor["key"].startswith(only or "")]
    if as_json:
        print_json(facts)
        return 0
    for line in lines:
        typer.echo(printable(line))
    if facts["tensors"]:
        typer.echo()
        print_table(_HEAD, [_row(tensor) for tensor in facts["tensors"]], right=(3,))
    return 0


def _facts(opened: Opened) -> dict[str, Any]:
    from dataclasses import asdict

    from dtrain.checkpoint.convert.compare import everything_of

    manifest = opened.manifest
    stored, values = everything_of(opened)
    return {
        "step": manifest.step,
        "path": str(opened.folder),
        "run_id": manifest.run_id,
        "parent_step": manifest.parent_step,
        "serial": manifest.serial,
        "world_size": opened.world_size,
        "layout": asdict(manifest.layout),
        "only": list(manifest.only),
        "holds": list(manifest.holds),
        "states": list(manifest.states),
        "bytes": manifest.bytes,
        "files": [{"rank": file.rank, "name": file.name, "bytes": file.bytes} for file in opened.files],
        "values": len(values),
        "tensors": [_tensor(key, ref, stored.boxes.get(key, ()), opened) for key, ref in stored.refs.items()],
    }


def _tensor(key: str, ref: Any, boxes: Any, opened: Opened) -> dict[str, Any]:
    from dtrain.checkpoint.convert.pieces import nbytes

    parts = [{"file": opened.files[b.file].name, "offset": list(b.entry.offset), "size": list(b.entry.size)} for b in boxes]
    return {"key": key, "dtype": ref.dtype, "shape": list(ref.shape), "bytes": nbytes(ref), "parts": parts}


def _summary(facts: dict[str, Any]) -> list[str]:
    mesh = facts["layout"]
    states = f" of the states {', '.join(facts['states'])}" if facts["states"] else ""
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh["axes"], mesh["shape"], strict=True))
    ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}"
    return [
        f"step {facts['step']} of run {facts['run_id']} in {facts['path']}",
        f"written by {ranks}, {mesh['strategy']}{f' ({axes})' if axes else ''}: "
        f"{size_text(facts['bytes'])} in {len(facts['files'])} data file{'s' * (len(facts['files']) != 1)}",
        f"holds {', '.join(facts['holds'])}{states}: {len(facts['tensors'])} tensors, {facts['values']} plain values",
    ]


def _row(tensor: dict[str, Any]) -> tuple[str, ...]:
    names = list(dict.fromkeys(part["file"].removesuffix(".safetensors") for part in tensor["parts"]))
    where = ", ".join(names) if len(names) <= _SHOWN_FILES else f"{names[0]} to {names[-1]} ({len(names)} files)"
    return tensor["key"], tensor["dtype"], str(tensor["shape"]), size_text(tensor["bytes"]), where or "-"
