"""Define ``dtrain checkpoints``, with the commands list, show, verify and prune."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count
from dtrain.cli.checkpoints_convert import (
    convert,
    diff,
    find_folder,
    find_root,
    find_step,
    is_step_folder,
    list_root_steps,
    no_checkpoints_error,
)
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json, print_table, single_line
from dtrain.cli.parameters import OTHER_HEADING, AsJson, GroupedCommand, integer, option
from dtrain.errors import CheckpointError, ConfigError, CorruptCheckpointError, escape_unprintable
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_info import CheckpointInfo, CorruptStep
    from dtrain.checkpoint.reader import CheckpointReader


_NO_STEPS_EXIT_CODE = 2
_STEP_COLUMNS = ("", "step", "committed at", "size", "ranks", "holds", "run", "parent", "manifest")


def list_steps(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="Folder that save_sharded writes to, or the run.", show_default=False)
    ],
    as_json: AsJson = False,
) -> int:
    """List the committed steps of a root.

    The root of a run is RUN/checkpoints. Steps are in the order of their commits, and corrupt steps are last; * marks the step
    that loading uses. The command reads only manifests: see `dtrain checkpoints verify`.

    Exit codes: 0 listed, even if steps are corrupt; 1 the root cannot be read; 2 bad usage, or no steps.
    """
    folder = find_root(root, "list")
    steps, newest = list_root_steps(folder, "list")
    facts = [_step_facts(step, latest=step.path == newest) for step in steps]
    if as_json:
        print_json({"root": str(folder), "steps": facts})
        return 0 if facts else _NO_STEPS_EXIT_CODE
    if not facts:
        raise no_checkpoints_error(root, "list")
    print_table(_STEP_COLUMNS, [_step_row(step) for step in facts])
    return 0


def _step_facts(step: CheckpointInfo | CorruptStep, *, latest: bool) -> dict[str, Any]:
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.checkpoint_info import CorruptStep

    committed_at = _commit_time(step.path)
    facts = {"step": step.step, "path": str(step.path), "latest": latest, "committed_at": committed_at}
    if isinstance(step, CorruptStep):
        unknown = dict.fromkeys(("bytes", "world_size", "scope", "holds", "run_id", "parent_step", "serial"))
        return {**facts, "valid": False, "problem": step.reason, **unknown}
    return {
        **facts,
        "valid": True,
        "problem": None,
        "bytes": step.bytes,
        "world_size": step.world_size,
        "scope": step.scope,
        "holds": list(layout.SECTIONS[step.scope]),
        "run_id": step.run_id,
        "parent_step": step.parent_step,
        "serial": step.serial,
    }


def _commit_time(folder: AnyPath) -> str | None:
    """Return the commit time of a local step; None on a server, whose clock may differ, or if the step was removed."""
    from dtrain.checkpoint.layout import MANIFEST

    if not isinstance(folder, Path):
        return None
    # The manifest is the last file of a step.
    try:
        written_s = (folder / MANIFEST).lstat().st_mtime
    # A run may remove the step meanwhile.
    except FileNotFoundError:
        return None
    return datetime.fromtimestamp(written_s).astimezone().isoformat(timespec="seconds")


def _step_row(step: dict[str, Any]) -> tuple[str, ...]:
    when = "-" if step["committed_at"] is None else step["committed_at"][:19].replace("T", " ")
    begin = ("*" * step["latest"], str(step["step"]), when)
    if not step["valid"]:
        return *begin, "-", "-", "-", "-", "-", f"corrupt: {step['problem']}"
    parent = "-" if step["parent_step"] is None else str(step["parent_step"])
    holds = step["scope"]
    return *begin, format_bytes(step["bytes"]), str(step["world_size"]), holds, step["run_id"][:8], parent, "valid"


_TENSOR_COLUMNS = ("tensor", "dtype", "shape", "size", "in")
_MAX_FILES_LISTED = 3


def show(
    path: Annotated[str, typer.Argument(metavar="ROOT_OR_STEP", help="Folder of a step; a root or a run for its newest step.")],
    only: Annotated[
        str | None, typer.Option("--only", metavar="PREFIX", help="Only tensors with this name prefix, as in params/encoder.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the tensors of a step and their files.

    The first part of a name is the kind of tensor: params/, buffers/, optimizer/, transforms/, extra/, and rank-00000/ for
    values of each rank. The command reads the manifest and the indexes, but no tensor.

    Exit codes: 0 shown; 1 the step is corrupt or cannot be read; 2 bad usage.
    """
    from dtrain.checkpoint.reader import open_checkpoint

    folder = find_step(path, "show")
    with prefix_errors("checkpoints: show", CheckpointError):
        facts = _checkpoint_facts(open_checkpoint(folder))
    lines = _checkpoint_summary(facts)
    facts["tensors"] = [tensor for tensor in facts["tensors"] if tensor["key"].startswith(only or "")]
    if as_json:
        print_json(facts)
        return 0
    for line in lines:
        typer.echo(escape_unprintable(line))
    if facts["tensors"]:
        typer.echo()
        print_table(_TENSOR_COLUMNS, [_tensor_row(tensor) for tensor in facts["tensors"]], right=(3,))
    return 0


def _checkpoint_facts(reader: CheckpointReader) -> dict[str, Any]:
    import msgspec

    from dtrain.checkpoint import layout
    from dtrain.checkpoint.conversion.diff import tensors_and_values
    from dtrain.checkpoint.plan import full_region

    manifest = reader.manifest
    stored, values = tensors_and_values(reader)
    shards = stored.find_shards({key: full_region(ref.shape) for key, ref in stored.refs.items()})
    return {
        "step": manifest.step,
        "path": str(reader.folder),
        "run_id": manifest.run_id,
        "parent_step": manifest.parent_step,
        "serial": manifest.serial,
        "world_size": reader.world_size,
        "layout": msgspec.to_builtins(manifest.layout),
        "scope": manifest.scope,
        "holds": list(manifest.sections),
        "states": list(manifest.states),
        "bytes": manifest.bytes,
        "files": [
            {"rank": rank, "name": name, "bytes": size}
            for rank, files in enumerate(reader.index.files)
            for name, size in files.sizes(rank).items()
            if name != layout.index_name(rank)
        ],
        "values": len(values),
        "tensors": [_tensor_facts(key, ref, shards[key], reader) for key, ref in stored.refs.items()],
    }


def _tensor_facts(key: str, ref: Any, shards: Any, reader: CheckpointReader) -> dict[str, Any]:
    from dtrain.checkpoint.weights import nbytes

    parts = [
        {"file": reader.ranks.file_name(shard.file), "offset": list(shard.kind.offset), "size": list(shard.kind.size)}
        for shard in shards
    ]
    return {"key": key, "dtype": ref.dtype, "shape": list(ref.shape), "bytes": nbytes(ref), "parts": parts}


def _checkpoint_summary(facts: dict[str, Any]) -> list[str]:
    mesh = facts["layout"]
    states = f" of the states {', '.join(facts['states'])}" if facts["states"] else ""
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh["axes"], mesh["shape"], strict=True))
    ranks = format_count(facts["world_size"], "rank")
    return [
        f"step {facts['step']} of run {facts['run_id']} in {facts['path']}",
        f"written by {ranks}, {mesh['strategy']}{f' ({axes})' if axes else ''}: "
        f"{format_bytes(facts['bytes'])} in {format_count(len(facts['files']), 'data file')}",
        f"holds {', '.join(facts['holds'])}{states}: "
        f"{format_count(len(facts['tensors']), 'tensor')}, {format_count(facts['values'], 'plain value')}",
    ]


def _tensor_row(tensor: dict[str, Any]) -> tuple[str, ...]:
    names = list(dict.fromkeys(part["file"].removesuffix(".safetensors") for part in tensor["parts"]))
    location = ", ".join(names) if len(names) <= _MAX_FILES_LISTED else f"{names[0]} to {names[-1]} ({len(names)} files)"
    return tensor["key"], tensor["dtype"], str(tensor["shape"]), format_bytes(tensor["bytes"]), location or "-"


_DAMAGED_EXIT_CODE = 1


def verify(
    path: Annotated[str, typer.Argument(metavar="ROOT_OR_STEP", help="Folder of a step; a root or a run for its newest step.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare its digest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every step of the root, not only the newest.")] = False,
    as_json: AsJson = False,
) -> int:
    """Verify the manifest, sizes and indexes of a step.

    With --deep, the command also reads every byte of the tensors. Output is one line per step. Steps without a manifest are
    incomplete saves and are skipped. A step that a run removes meanwhile is not an error.

    Exit codes: 0 all steps are intact; 1 a step is corrupt or cannot be read; 2 bad usage, or nothing to verify.
    """
    results = []
    for folder in _select_steps(path, every=every):
        unknown = dict.fromkeys(("step", "bytes", "world_size"))
        facts = {"path": str(folder), "ok": True, "removed": False, "problem": None, **unknown, **_verify_step(folder, deep)}
        results.append(facts)
        if not as_json:
            typer.echo(f"{folder.name}: {_verify_text(facts, deep)}")
    if as_json:
        print_json({"deep": deep, "steps": results})
    return 0 if all(facts["ok"] for facts in results) else _DAMAGED_EXIT_CODE


def _verify_step(folder: AnyPath, deep: bool) -> dict[str, Any]:
    """Return the facts of a verified step, or its problem."""
    from dtrain.checkpoint.checkpoint_info import read_info
    from dtrain.checkpoint.reader import open_checkpoint, verify_indexes

    try:
        if deep:
            _verify_deeply(folder)
        else:
            verify_indexes(open_checkpoint(folder))
        step = read_info(folder)
    except (CheckpointError, OSError) as error:
        # Steps are renamed before they are removed.
        if not storage.exists(folder):
            return {"removed": True}
        outcome = "corrupt" if isinstance(error, CorruptCheckpointError) else "cannot be read"
        return {"ok": False, "problem": f"{outcome}: {single_line(error)}"}
    return {"step": step.step, "bytes": step.bytes, "world_size": step.world_size}


def _verify_deeply(folder: AnyPath) -> None:
    from dtrain.checkpoint.reader import open_checkpoint, verify_data

    reader = open_checkpoint(folder)
    with ByteProgressBar(folder.name, sum(sum(files.data_bytes) for files in reader.index.files)) as bar:
        verify_data(reader, bar.advance)


def _verify_text(facts: dict[str, Any], deep: bool) -> str:
    if facts["problem"] is not None:
        return escape_unprintable(facts["problem"])
    if facts["removed"]:
        return "removed while it was read"
    ranks = format_count(facts["world_size"], "rank")
    scope = "every byte read" if deep else "manifest, sizes and indexes; --deep reads every byte"
    return f"ok, {format_bytes(facts['bytes'])} of {ranks} ({scope})"


def _select_steps(path: str, *, every: bool) -> list[AnyPath]:
    """Return the folders to verify, at least one, ordered by step."""
    folder = find_folder(path, "verify")
    if every and is_step_folder(folder):
        raise ConfigError(f"checkpoints: verify: {path!r} is the folder of one step. Remove --all.")
    steps, newest = list_root_steps(folder, "verify")
    if newest is None:
        raise no_checkpoints_error(path, "verify")
    return [step.path for step in sorted(steps, key=lambda step: step.step)] if every else [newest]


_prune_option = partial(option, "checkpoints: prune", OTHER_HEADING)


def prune(
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="Folder that save_sharded writes to, or the run.", show_default=False)
    ],
    keep_last: Annotated[int, _prune_option("--keep-last N", "Number of newest steps to keep.", integer(0))],
    keep_every: Annotated[
        int | None, _prune_option("--keep-every N", "Also keep the steps that are multiples of N.", integer(1))
    ] = None,
    keep_step: Annotated[
        list[int] | None, _prune_option("--keep-step STEP", "Keep this step; may be repeated.", integer(0))
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the steps to remove.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove old steps.

    The step that loading uses is never removed, and neither are corrupt or incomplete steps. The manifest of a step is removed
    first, so that an interrupted command leaves no partial checkpoint.

    Exit codes: 0 done; 1 a step could not be removed; 2 bad usage, or no steps.
    """
    folder = find_root(root, "prune")
    if not list_root_steps(folder, "prune")[0]:
        raise no_checkpoints_error(root, "prune")
    with prefix_errors("checkpoints: prune", CheckpointError):
        from dtrain.checkpoint.retention import prune

        removed_steps = prune(
            str(folder), keep_last=keep_last, keep_every=keep_every, keep_steps=tuple(keep_step or ()), dry_run=dry_run
        )
    if as_json:
        removed = [{"step": step.step, "path": str(step.path), "bytes": step.bytes} for step in removed_steps]
        print_json({"root": str(folder), "dry_run": dry_run, "removed": removed})
        return 0
    for step in removed_steps:
        typer.echo(f"{step.path.name}: {'would be removed' if dry_run else 'removed'}, {format_bytes(step.bytes)}")
    total = format_bytes(sum(step.bytes for step in removed_steps))
    typer.echo(f"{format_count(len(removed_steps), 'step')}, {total}" if removed_steps else "nothing to remove")
    return 0


LIST_EXAMPLES = """
dtrain checkpoints list runs/gpt      the steps in runs/gpt/checkpoints
dtrain checkpoints list s3://bucket/ckpt --json | jq .steps
"""
VERIFY_EXAMPLES = """
dtrain checkpoints verify ckpt                  the newest step, without its tensors
dtrain checkpoints verify ckpt --all --deep     every byte of every step
"""
SHOW_EXAMPLES = """
dtrain checkpoints show ckpt --only params/encoder
dtrain checkpoints show ckpt/step-00000100
"""
DIFF_EXAMPLES = """
dtrain checkpoints diff ckpt/step-00000100 ckpt/step-00000200
dtrain checkpoints diff ckpt exported --weights     a checkpoint and its export
"""
PRUNE_EXAMPLES = """
dtrain checkpoints prune ckpt --keep-last 3 --dry-run
dtrain checkpoints prune ckpt --keep-last 3 --keep-every 1000
"""
CONVERT_EXAMPLES = """
dtrain checkpoints convert ckpt exported --to hf --dtype bf16
dtrain checkpoints convert ckpt model.safetensors --to safetensors
dtrain checkpoints convert old.pt ckpt --to dtrain --trust
"""

app = typer.Typer()


@app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> int:
    """List, verify, compare, prune and convert checkpoints."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


app.command("list", cls=GroupedCommand, epilog=LIST_EXAMPLES)(list_steps)
app.command("verify", cls=GroupedCommand, epilog=VERIFY_EXAMPLES)(verify)
app.command("show", cls=GroupedCommand, epilog=SHOW_EXAMPLES)(show)
app.command("diff", cls=GroupedCommand, epilog=DIFF_EXAMPLES)(diff)
app.command("prune", cls=GroupedCommand, epilog=PRUNE_EXAMPLES)(prune)
app.command("convert", cls=GroupedCommand, epilog=CONVERT_EXAMPLES)(convert)
