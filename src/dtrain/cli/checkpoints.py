"""Define ``dtrain checkpoints``, with the commands list, show, verify, diff, prune and convert."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count, single_line
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json, print_table
from dtrain.cli.parameters import OTHER_HEADING, AsJson, command_group, integer, option, size
from dtrain.errors import CheckpointError, ConfigError, CorruptCheckpointError, escape_unprintable
from dtrain.run import run_files
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_info import CheckpointInfo, CorruptStep
    from dtrain.checkpoint.conversion.diff import CheckpointDifference
    from dtrain.checkpoint.reader import CheckpointReader
    from dtrain.checkpoint.weights import TensorFiles


Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="Folder that save_sharded writes to, or the run.", show_default=False)
]
RootOrStep = Annotated[
    str, typer.Argument(metavar="ROOT_OR_STEP", help="Folder of a step; a root or a run for its newest step.")
]
_STEP_COLUMNS = ("", "step", "committed at", "size", "ranks", "holds", "run", "parent", "manifest")


def list_steps(
    root: Root,
    as_json: AsJson = False,
) -> int:
    """List the committed steps of a root.

    The root of a run is RUN/checkpoints. Steps are in the order of their commits, and corrupt steps are last; * marks the step
    that loading uses. The command reads only manifests: see `dtrain checkpoints verify`.

    Exit codes: 0 listed, even if steps are corrupt; 1 the root cannot be read; 2 bad usage, or no steps.

    Examples:
        dtrain checkpoints list runs/gpt      the steps in runs/gpt/checkpoints
        dtrain checkpoints list s3://bucket/ckpt --json | jq .steps
    """
    folder = find_folder(root, "list", is_root=True)
    steps, newest = list_root_steps(folder, "list")
    facts = [_step_facts(step, latest=step.path == newest) for step in steps]
    if as_json:
        print_json({"root": str(folder), "steps": facts})
        return 0 if facts else 2
    if not facts:
        raise no_checkpoints_error(root, "list")
    rows = []
    for step in facts:
        when = "-" if step["committed_at"] is None else step["committed_at"][:19].replace("T", " ")
        cells = ("-", "-", "-", "-", "-", f"corrupt: {step['problem']}")
        if step["valid"]:
            parent = "-" if step["parent_step"] is None else str(step["parent_step"])
            ranks, run = str(step["world_size"]), step["run_id"][:8]
            cells = (format_bytes(step["bytes"]), ranks, step["scope"], run, parent, "valid")
        rows.append(("*" * step["latest"], str(step["step"]), when, *cells))
    print_table(_STEP_COLUMNS, rows)
    return 0


def _step_facts(step: CheckpointInfo | CorruptStep, *, latest: bool) -> dict[str, Any]:
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.checkpoint_info import CorruptStep

    committed_at = None
    # The clock of a server may differ, and a run may remove the step meanwhile.
    if isinstance(step.path, Path):
        with suppress(FileNotFoundError):
            # The manifest is the last file of a step.
            written_s = (step.path / layout.MANIFEST).lstat().st_mtime
            committed_at = datetime.fromtimestamp(written_s).astimezone().isoformat(timespec="seconds")
    facts = {"step": step.step, "path": str(step.path), "latest": latest, "committed_at": committed_at}
    names = ("bytes", "world_size", "scope", "holds", "run_id", "parent_step", "serial")
    if isinstance(step, CorruptStep):
        return {**facts, "valid": False, "problem": step.reason, **dict.fromkeys(names)}
    holds = list(layout.SECTIONS[step.scope])
    known = {name: holds if name == "holds" else getattr(step, name) for name in names}
    return {**facts, "valid": True, "problem": None, **known}


_TENSOR_COLUMNS = ("tensor", "dtype", "shape", "size", "in")
_MAX_FILES_LISTED = 3


def show(
    path: RootOrStep,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PREFIX", help="Only tensors with this name prefix, as in params/encoder.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the tensors of a step and their files.

    The first part of a name is the kind of tensor: params/, buffers/, optimizer/, transforms/, extra/, and rank-00000/ for
    values of each rank. The command reads the manifest and the indexes, but no tensor.

    Exit codes: 0 shown; 1 the step is corrupt or cannot be read; 2 bad usage.

    Examples:
        dtrain checkpoints show ckpt --only params/encoder
        dtrain checkpoints show ckpt/step-00000100
    """
    from dtrain.checkpoint.reader import open_checkpoint

    folder = find_step(path, "show")
    with prefix_errors("checkpoints: show", CheckpointError):
        facts = _checkpoint_facts(open_checkpoint(folder))
    tensor_count = format_count(len(facts["tensors"]), "tensor")
    facts["tensors"] = [tensor for tensor in facts["tensors"] if tensor["key"].startswith(only or "")]
    if as_json:
        print_json(facts)
        return 0
    mesh, states = facts["layout"], f" of the states {', '.join(facts['states'])}" if facts["states"] else ""
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh["axes"], mesh["shape"], strict=True))
    size = f"{format_bytes(facts['bytes'])} in {format_count(len(facts['files']), 'data file')}"
    for line in (
        f"step {facts['step']} of run {facts['run_id']} in {facts['path']}",
        f"written by {format_count(facts['world_size'], 'rank')}, {mesh['strategy']}{f' ({axes})' if axes else ''}: {size}",
        f"holds {', '.join(facts['holds'])}{states}: {tensor_count}, {format_count(facts['values'], 'plain value')}",
    ):
        typer.echo(escape_unprintable(line))
    rows = []
    for tensor in facts["tensors"]:
        names = list(dict.fromkeys(part["file"].removesuffix(".safetensors") for part in tensor["parts"]))
        location = ", ".join(names) if len(names) <= _MAX_FILES_LISTED else f"{names[0]} to {names[-1]} ({len(names)} files)"
        rows.append((tensor["key"], tensor["dtype"], str(tensor["shape"]), format_bytes(tensor["bytes"]), location or "-"))
    if rows:
        typer.echo()
        print_table(_TENSOR_COLUMNS, rows, right=(3,))
    return 0


def _checkpoint_facts(reader: CheckpointReader) -> dict[str, Any]:
    import msgspec

    from dtrain.checkpoint import layout
    from dtrain.checkpoint.conversion.diff import tensors_and_values
    from dtrain.checkpoint.plan import full_region
    from dtrain.checkpoint.weights import nbytes

    manifest = reader.manifest
    stored, values = tensors_and_values(reader)
    shards = stored.find_shards({key: full_region(ref.shape) for key, ref in stored.refs.items()})
    return {
        "step": manifest.step,
        "path": str(reader.folder),
        **{name: getattr(manifest, name) for name in ("run_id", "parent_step", "serial", "world_size")},
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
        "tensors": [
            {
                "key": key,
                "dtype": ref.dtype,
                "shape": list(ref.shape),
                "bytes": nbytes(ref),
                "parts": [
                    {
                        "file": reader.ranks.file_name(shard.file),
                        "offset": list(shard.kind.offset),
                        "size": list(shard.kind.size),
                    }
                    for shard in shards[key]
                ],
            }
            for key, ref in stored.refs.items()
        ],
    }


def verify(
    path: RootOrStep,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare its digest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every step of the root, not only the newest.")] = False,
    as_json: AsJson = False,
) -> int:
    """Verify the manifest, sizes and indexes of a step.

    With --deep, the command also reads every byte of the tensors. Output is one line per step. Steps without a manifest are
    incomplete saves and are skipped. A step that a run removes meanwhile is not an error.

    Exit codes: 0 all steps are intact; 1 a step is corrupt or cannot be read; 2 bad usage, or nothing to verify.

    Examples:
        dtrain checkpoints verify ckpt                  the newest step, without its tensors
        dtrain checkpoints verify ckpt --all --deep     every byte of every step
    """
    root, results = find_folder(path, "verify"), []
    if every and is_step_folder(root):
        raise ConfigError(f"checkpoints: verify: {path!r} is the folder of one step. Remove --all.")
    steps, newest = list_root_steps(root, "verify")
    if newest is None:
        raise no_checkpoints_error(path, "verify")
    for folder in [step.path for step in sorted(steps, key=lambda step: step.step)] if every else [newest]:
        unknown = dict.fromkeys(("step", "bytes", "world_size"))
        facts = {"path": str(folder), "ok": True, "removed": False, "problem": None, **unknown, **_verify_step(folder, deep)}
        results.append(facts)
        if as_json:
            continue
        text = "removed while it was read" if facts["removed"] else escape_unprintable(facts["problem"] or "")
        if not text:
            scope = "every byte read" if deep else "manifest, sizes and indexes; --deep reads every byte"
            text = f"ok, {format_bytes(facts['bytes'])} of {format_count(facts['world_size'], 'rank')} ({scope})"
        typer.echo(f"{folder.name}: {text}")
    if as_json:
        print_json({"deep": deep, "steps": results})
    return 0 if all(facts["ok"] for facts in results) else 1


def _verify_step(folder: AnyPath, deep: bool) -> dict[str, Any]:
    """Return the facts of a verified step, or its problem."""
    from dtrain.checkpoint.checkpoint_info import read_info
    from dtrain.checkpoint.reader import open_checkpoint, verify_data, verify_indexes

    try:
        reader = open_checkpoint(folder)
        if deep:
            with ByteProgressBar(folder.name, sum(sum(files.data_bytes) for files in reader.index.files)) as bar:
                verify_data(reader, bar.advance)
        else:
            verify_indexes(reader)
        step = read_info(folder)
    except (CheckpointError, OSError) as error:
        # Steps are renamed before they are removed.
        if not storage.exists(folder):
            return {"removed": True}
        outcome = "corrupt" if isinstance(error, CorruptCheckpointError) else "cannot be read"
        return {"ok": False, "problem": f"{outcome}: {single_line(error)}"}
    return {"step": step.step, "bytes": step.bytes, "world_size": step.world_size}


_prune_option = partial(option, "checkpoints: prune", OTHER_HEADING)


def prune(
    root: Root,
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

    Examples:
        dtrain checkpoints prune ckpt --keep-last 3 --dry-run
        dtrain checkpoints prune ckpt --keep-last 3 --keep-every 1000
    """
    folder = find_folder(root, "prune", is_root=True)
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


_convert_option = partial(option, "checkpoints: convert", OTHER_HEADING)


def parse_tie(command: str, name: str, text: str) -> tuple[str, str]:
    """Parse the second name of a tensor and its first name, ``ALIAS=NAME``. A type of ``option``.

    Raises:
        ConfigError: a name is missing.
    """
    alias, equals, tensor = text.partition("=")
    if not (alias and equals and tensor):
        raise ConfigError(f"{command}: {name} must be ALIAS=NAME, got {text!r}. Pass both names.")
    return alias, tensor


def convert(
    path: Annotated[str, typer.Argument(metavar="SRC", help="A step, root or run; an HF or DCP folder; .safetensors; .pt.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="The new folder, or .safetensors file.")],
    to: Annotated[str, _convert_option("--to FORMAT", "hf, peft, dtrain, dcp or safetensors.")],
    format: Annotated[
        str | None, _convert_option("--from FORMAT", "dtrain, hf, dcp or pt.  [default: inferred from the files]")
    ] = None,
    trust: Annotated[bool, _convert_option("--trust", "Read dcp and pt files, which can run code.")] = False,
    dtype: Annotated[str | None, _convert_option("--dtype DTYPE", "fp32, bf16 or fp16.")] = None,
    max_shard_size: Annotated[
        int, _convert_option("--max-shard-size SIZE", "Size limit of a file, for hf.  [default: 5GB]", size)
    ] = 5 * 10**9,
    config: Annotated[
        str | None,
        _convert_option("--config PATH", "config.json, adapter_config.json, or a folder of these and a tokenizer."),
    ] = None,
    merge: Annotated[bool, _convert_option("--merge", "Add the LoRA adapter of peft to the weights.")] = False,
    tie: Annotated[
        list[Any] | None, _convert_option("--tie ALIAS=NAME", "Second name of a tensor; may be repeated.", parse_tie)
    ] = None,
    state: Annotated[str | None, _convert_option("--state NAME", "State in a step with several states.")] = None,
    key: Annotated[str | None, _convert_option("--key KEY", "Key of the weights' dict in dcp or pt.")] = None,
    step: Annotated[int, _convert_option("--step N", "Number of the new step, for dtrain.  [default: 0]", integer(0))] = 0,
    buffers: Annotated[
        list[str] | None, _convert_option("--buffers PATTERN", "Names of buffers, for dtrain; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the weights of a checkpoint in another format.

    The command writes parameters and persistent buffers in pieces, so that memory does not grow with the checkpoint. DST must
    not exist, and appears once it is complete on the disk. Code in dcp and pt files runs when they are read, so they need
    --trust, and a separate process first copies their tensors to a folder beside DST.

    Exit codes: 0 converted; 1 SRC cannot be read or DST cannot be written; 2 bad usage.

    Examples:
        dtrain checkpoints convert ckpt exported --to hf --dtype bf16
        dtrain checkpoints convert ckpt adapter --to peft --config lora
        dtrain checkpoints convert ckpt merged --to hf --merge --config lora
        dtrain checkpoints convert ckpt model.safetensors --to safetensors
        dtrain checkpoints convert old.pt ckpt --to dtrain --trust
    """
    from dtrain.checkpoint.conversion.convert import convert

    formats: Any = {"to": to, "format": format}
    with prefix_errors("checkpoints: convert", CheckpointError), ByteProgressBar("converting") as bar:
        if not path or not destination:
            raise ConfigError("convert: SRC and DST must not be empty. Name the checkpoint and the new folder.")
        folder = storage.resolve_path(path)
        result = convert(
            str(enter_run(folder)) if storage.is_folder(folder) else path,
            destination,
            **formats,
            trust=trust,
            dtype=dtype,
            tie=dict(tie or ()),
            state=state,
            key=key,
            max_shard_bytes=max_shard_size,
            config=config,
            merge=merge,
            step=step,
            buffers=tuple(buffers or ()),
            on_start=bar.set_total,
            on_bytes_written=bar.advance,
        )
    if as_json:
        print_json({"path": str(result.path), "tensors": result.tensors, "bytes": result.bytes})
    else:
        typer.echo(f"{result.path}: {format_count(result.tensors, 'tensor')}, {format_bytes(result.bytes)}")
    return 0


_DIFF_COLUMNS = ("what", "differs in", "a", "b", "elements", "largest difference")


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step; a root or a run for its newest step; a Hugging Face folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other checkpoint.")],
    weights: Annotated[bool, typer.Option("--weights", help="Only parameters and persistent buffers.")] = False,
    state: Annotated[str | None, typer.Option("--state", metavar="NAME", help="Only the weights of this state.")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints tensor by tensor.

    The first line is a summary. The table lists tensors that only one checkpoint has, and differences in shape, dtype or value,
    with the number of different elements and the largest absolute difference. Plain values (the clock, hyperparameters) are
    compared, too, but not the seconds of the clock. World sizes and strategies may differ. Both checkpoints are read in pieces
    and verified.

    Exit codes: 0 equal; 1 different, or a checkpoint cannot be read; 2 bad usage.

    Examples:
        dtrain checkpoints diff ckpt/step-00000100 ckpt/step-00000200
        dtrain checkpoints diff ckpt exported --weights     a checkpoint and its export
    """
    from dtrain.checkpoint.conversion.diff import common_bytes, diff_tensors, diff_values

    paths = [_find_source(path) for path in (a, b)]
    with prefix_errors("checkpoints: diff", CheckpointError):
        (left, values), (right, other_values) = _open_both(paths, weights=weights or state is not None, state=state)
        with ByteProgressBar("comparing", common_bytes(left, right)) as bar:
            differences = [*diff_tensors(left, right, on_bytes_compared=bar.advance), *diff_values(values, other_values)]
    if as_json:
        facts = [asdict(difference) for difference in differences]
        for difference in facts:
            # JSON has no NaN.
            if difference["max_abs"] is not None and not math.isfinite(difference["max_abs"]):
                difference["max_abs"] = str(difference["max_abs"])
        print_json({"a": str(paths[0]), "b": str(paths[1]), "equal": not differences, "differences": facts})
    elif differences:
        typer.echo(_summarize_differences(differences, left, right))
        typer.echo()
        rows = [
            (
                *(difference.key, difference.kind, difference.a or "-", difference.b or "-"),
                "" if difference.differing is None else str(difference.differing),
                "" if difference.max_abs is None else f"{difference.max_abs:.6g}",
            )
            for difference in differences
        ]
        print_table(_DIFF_COLUMNS, rows, right=(4, 5))
    else:
        typer.echo(f"equal: {format_count(len(left.refs), 'tensor')}, {format_count(len(values), 'plain value')}")
    return 1 if differences else 0


def _summarize_differences(differences: list[CheckpointDifference], left: TensorFiles, right: TensorFiles) -> str:
    """Count the differences by kind, and say if the checkpoints look unrelated."""
    counts: Counter[str] = Counter(difference.kind for difference in differences)
    common = left.refs.keys() & right.refs.keys()
    differing = sum(counts[kind] for kind in ("shape", "dtype", "values"))
    parts = [
        f"a has {format_count(len(left.refs), 'tensor')}, b has {format_count(len(right.refs), 'tensor')}",
        *(f"{counts[kind]:,} only in {name}" for kind, name in (("only in a", "a"), ("only in b", "b")) if counts[kind]),
        *(f"{counts[kind]:,} differ in {kind}" for kind in ("shape", "dtype", "values") if counts[kind]),
        f"{len(common) - differing:,} equal",
    ]
    if counts["plain value"]:
        parts.append(format_count(counts["plain value"], "different plain value"))
    is_unrelated = 2 * len(common) < min(len(left.refs), len(right.refs))
    return f"{'different models: ' if is_unrelated else ''}{parts[0]}: {', '.join(parts[1:])}"


def _find_source(path: str) -> AnyPath:
    """Return the step, or the folder or file of another format, that ``path`` names."""
    from dtrain.checkpoint.weights import SUFFIX, is_model_folder

    if path.endswith(SUFFIX) and storage.file_size(storage.resolve_path(path)) is not None:
        return storage.resolve_path(path)
    folder = find_folder(path, "diff")
    return folder if is_model_folder(folder) else find_step(path, "diff")


def _open_both(paths: list[AnyPath], *, weights: bool, state: str | None) -> list[tuple[TensorFiles, dict[str, Any]]]:
    """Return tensors and compared plain values of both checkpoints, or only weights if one has only weights."""
    from dtrain.checkpoint.checkpoint_info import has_manifest
    from dtrain.checkpoint.conversion.diff import tensors_and_values, without_seconds
    from dtrain.checkpoint.reader import open_checkpoint
    from dtrain.checkpoint.weights import detect_format, open_weights

    if not weights and all(has_manifest(path) for path in paths):
        opened = [tensors_and_values(open_checkpoint(path)) for path in paths]
        return [(tensors, without_seconds(values)) for tensors, values in opened]
    return [(open_weights(path, detect_format(path, "diff"), caller="diff", state=state), {}) for path in paths]


def find_folder(path: str, command: str, *, is_root: bool = False) -> AnyPath:
    """Return the folder at ``path``, or the checkpoints of the run at ``path``.

    Args:
        path: path of the command line.
        command: command in errors.
        is_root: if True, the folder must not be the folder of one step.

    Raises:
        ConfigError: the folder does not exist, or is the folder of a step.
    """
    # An empty path usually comes from an unset variable, and would mean the current folder.
    if not path or not storage.is_folder(folder := storage.resolve_path(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}. Check the path.")
    folder = enter_run(folder)
    if is_root and is_step_folder(folder):
        raise ConfigError(
            f"checkpoints: {command}: {path!r} is the folder of one step. Name the folder that contains the step."
        )
    return folder


def enter_run(folder: AnyPath) -> AnyPath:
    """Return the folder of a run's checkpoints if ``folder`` is a run and has no steps of its own, else ``folder``."""
    from dtrain.checkpoint import layout

    def has_steps(folder: AnyPath) -> bool:
        return storage.is_folder(folder) and any(layout.step_of(name) is not None for name in storage.list_names(folder))

    inside = folder / run_files.CHECKPOINTS
    return inside if has_steps(inside) and not is_step_folder(folder) and not has_steps(folder) else folder


def is_step_folder(folder: AnyPath) -> bool:
    """Return True if the folder is, or was meant to be, a step."""
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.checkpoint_info import has_manifest

    return has_manifest(folder) or layout.step_of(folder.name) is not None


def list_root_steps(folder: AnyPath, command: str) -> tuple[list[CheckpointInfo | CorruptStep], AnyPath | None]:
    """Return the steps of a root and the step that loading uses. For the folder of a step, return no steps and the folder.

    Raises:
        CheckpointError: the root cannot be read.
    """
    from dtrain.checkpoint.checkpoint_info import as_step_folder, scan_root

    try:
        scan = scan_root(folder)
        step = as_step_folder(folder, f"checkpoints: {command}")
        newest = step or (scan.newest.path if scan.newest else None)
        return [*scan.committed, *scan.corrupt], newest
    except OSError as error:
        raise CheckpointError(f"checkpoints: {command}: {error}") from error


def find_step(path: str, command: str) -> AnyPath:
    """Return the step at ``path``, or the newest step of the root at ``path``.

    Raises:
        ConfigError: there is no step.
        CheckpointError: the folder cannot be read.
    """
    newest = list_root_steps(find_folder(path, command), command)[1]
    if newest is None:
        raise no_checkpoints_error(path, command)
    return newest


def no_checkpoints_error(path: str, command: str) -> ConfigError:
    """Build the error for a root without steps."""
    return ConfigError(
        f"checkpoints: {command}: no checkpoints in {path!r}. Name a step, the folder of the steps, or a run with checkpoints/."
    )


app = command_group(
    "List, verify, compare, prune and convert checkpoints.",
    list=list_steps,
    verify=verify,
    show=show,
    diff=diff,
    prune=prune,
    convert=convert,
)
