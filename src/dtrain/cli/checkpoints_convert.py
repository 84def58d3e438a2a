"""Define ``dtrain checkpoints convert`` and ``diff``, and resolve paths of the command line to roots and steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.arguments import format_bytes, format_count, parse_bytes
from dtrain.cli.output import ByteProgressBar, prefix_errors, print_json, print_table
from dtrain.cli.parameters import OTHER_HEADING, AsJson, integer, option
from dtrain.errors import CheckpointError, ConfigError
from dtrain.run import run_files
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_info import CheckpointInfo, CorruptStep
    from dtrain.checkpoint.conversion.diff import CheckpointDifference
    from dtrain.checkpoint.weights import TensorFiles


def find_folder(path: str, command: str) -> AnyPath:
    """Return the folder at ``path``, or the checkpoints of the run at ``path``.

    Raises:
        ConfigError: the folder does not exist.
    """
    # An empty path usually comes from an unset variable, and would mean the current folder.
    if not path or not storage.is_folder(folder := storage.resolve_path(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}. Check the path.")
    return enter_run(folder)


def enter_run(folder: AnyPath) -> AnyPath:
    """Return the folder of a run's checkpoints if ``folder`` is a run and has no steps of its own, else ``folder``."""
    inside = folder / run_files.CHECKPOINTS
    return inside if _has_steps(inside) and not is_step_folder(folder) and not _has_steps(folder) else folder


def _has_steps(folder: AnyPath) -> bool:
    from dtrain.checkpoint import layout

    return storage.is_folder(folder) and any(layout.step_of(name) is not None for name in storage.list_names(folder))


def find_root(path: str, command: str) -> AnyPath:
    """Return the folder at ``path``, which must not be the folder of one step.

    Raises:
        ConfigError: the folder does not exist, or is the folder of a step.
    """
    folder = find_folder(path, command)
    if is_step_folder(folder):
        raise ConfigError(
            f"checkpoints: {command}: {path!r} is the folder of one step. Name the folder that contains the step."
        )
    return folder


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
    _, newest = list_root_steps(find_folder(path, command), command)
    if newest is None:
        raise no_checkpoints_error(path, command)
    return newest


def no_checkpoints_error(path: str, command: str) -> ConfigError:
    """Build the error for a root without steps."""
    return ConfigError(
        f"checkpoints: {command}: no checkpoints in {path!r}. Name a step, the folder of the steps, or a run with checkpoints/."
    )


def convert(
    path: Annotated[str, typer.Argument(metavar="SRC", help="A step, root or run; an HF or DCP folder; .safetensors; .pt.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="The new folder, or .safetensors file.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, dtrain, dcp or safetensors.")],
    format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="dtrain, hf, dcp or pt.  [default: inferred from the files]")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Read dcp and pt files, which can run code.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.")] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Size limit of a file, for hf.")
    ] = "5GB",
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="File to copy as config.json, for hf.")] = None,
    tie: Annotated[
        list[str] | None, typer.Option("--tie", metavar="ALIAS=NAME", help="Second name of a tensor; may be repeated.")
    ] = None,
    state: Annotated[str | None, typer.Option("--state", metavar="NAME", help="State in a step with several states.")] = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Key of the weights' dict in dcp or pt.")] = None,
    step: Annotated[
        int,
        option(
            "checkpoints: convert", OTHER_HEADING, "--step N", "Number of the new step, for dtrain.  [default: 0]", integer(0)
        ),
    ] = 0,
    buffers: Annotated[
        list[str] | None, typer.Option("--buffers", metavar="PATTERN", help="Names of buffers, for dtrain; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the weights of a checkpoint in another format.

    The command writes parameters and persistent buffers in pieces, so that memory does not grow with the checkpoint. DST must
    not exist, and appears once it is complete on the disk. Code in dcp and pt files runs when they are read, so they need
    --trust, and a separate process first copies their tensors to a folder beside DST.

    Exit codes: 0 converted; 1 SRC cannot be read or DST cannot be written; 2 bad usage.
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
            tie=_parse_ties(tie or []),
            state=state,
            key=key,
            max_shard_bytes=parse_bytes("checkpoints: convert: --max-shard-size", max_shard_size),
            config=config,
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


def _parse_ties(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        alias, equals, name = text.partition("=")
        if not (alias and equals and name):
            raise ConfigError(f"checkpoints: convert: --tie must be ALIAS=NAME, got {text!r}. Pass both names.")
        pairs[alias] = name
    return pairs


_DIFFERENT_EXIT_CODE = 1
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
    """
    from dtrain.checkpoint.conversion.diff import common_bytes, diff_tensors, diff_values

    paths = [_find_source(path) for path in (a, b)]
    with prefix_errors("checkpoints: diff", CheckpointError):
        (left, values), (right, other_values) = _open_both(paths, weights=weights or state is not None, state=state)
        with ByteProgressBar("comparing", common_bytes(left, right)) as bar:
            differences = [*diff_tensors(left, right, on_bytes_compared=bar.advance), *diff_values(values, other_values)]
    if as_json:
        names = {"a": str(paths[0]), "b": str(paths[1])}
        facts = [_difference_facts(difference) for difference in differences]
        print_json({**names, "equal": not differences, "differences": facts})
    elif differences:
        typer.echo(_summarize_differences(differences, left, right))
        typer.echo()
        print_table(_DIFF_COLUMNS, [_difference_row(difference) for difference in differences], right=(4, 5))
    else:
        typer.echo(f"equal: {format_count(len(left.refs), 'tensor')}, {format_count(len(values), 'plain value')}")
    return _DIFFERENT_EXIT_CODE if differences else 0


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


def _difference_facts(difference: CheckpointDifference) -> dict[str, Any]:
    """Convert a difference to JSON, which has no NaN."""
    facts = asdict(difference)
    largest = difference.max_abs
    if largest is not None and not math.isfinite(largest):
        facts["max_abs"] = str(largest)
    return facts


def _difference_row(difference: CheckpointDifference) -> tuple[str, ...]:
    count = "" if difference.differing is None else str(difference.differing)
    largest = "" if difference.max_abs is None else f"{difference.max_abs:.6g}"
    return difference.key, difference.kind, difference.a or "-", difference.b or "-", count, largest
