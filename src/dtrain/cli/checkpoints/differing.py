"""``dtrain checkpoints diff``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain import storage
from dtrain.cli.checkpoints.output import Bar, named, print_json, print_table
from dtrain.cli.checkpoints.places import AsJson, existing, step_in
from dtrain.storage import Place

if TYPE_CHECKING:
    from dtrain.checkpoint.convert.compare import Difference
    from dtrain.checkpoint.stored import Stored

_DIFFERENT = 1
_HEAD = ("what", "differs in", "a", "b", "elements", "largest difference")


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step, a root (its newest step), or a Hugging Face folder.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    weights: Annotated[bool, typer.Option("--weights", help="Only parameters and persistent buffers.")] = False,
    state: Annotated[str | None, typer.Option("--state", metavar="NAME", help="Only the weights of this state.")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints tensor by tensor.

    Says what only one has, and what differs in shape, dtype or value, with the number of elements that differ and the largest
    absolute difference. Plain values (the clock, hyperparameters) are compared, too. World sizes and strategies may differ.
    Both are read side by side in pieces, and verified on the way.

    Exit codes: 0 they are equal; 1 they differ, or one cannot be read; 2 bad usage.
    """
    from dtrain.checkpoint.convert.compare import common_bytes, differences, plain_differences

    paths = [_path(path) for path in (a, b)]
    with named("diff"):
        (left, values), (right, other_values) = _opened(paths, weights=weights or state is not None, state=state)
        with Bar("comparing", common_bytes(left, right)) as bar:
            found = [*differences(left, right, compared=bar.advance), *plain_differences(values, other_values)]
    if as_json:
        names = {"a": str(paths[0]), "b": str(paths[1])}
        print_json({**names, "equal": not found, "differences": [_facts(difference) for difference in found]})
    elif found:
        print_table(_HEAD, [_row(difference) for difference in found], right=(4, 5))
    else:
        typer.echo(f"equal: {len(left.refs)} tensors, {len(values)} plain values")
    return _DIFFERENT if found else 0


def _path(path: str) -> Place:
    """The step or the folder of others that is meant."""
    from dtrain.checkpoint.foreign import SUFFIX, is_model_folder

    if path.endswith(SUFFIX) and storage.file_size(storage.place(path)) is not None:
        return storage.place(path)
    folder = existing(path, "diff")
    return folder if is_model_folder(folder) else step_in(path, "diff")


def _opened(paths: list[Place], *, weights: bool, state: str | None) -> list[tuple[Stored, dict[str, Any]]]:
    """Tensors and plain values of both: everything, unless one has weights only."""
    from dtrain.checkpoint.convert.compare import everything_of
    from dtrain.checkpoint.convert.sources import kind_of, open_weights
    from dtrain.checkpoint.find import has_manifest
    from dtrain.checkpoint.opened import open_checkpoint

    if not weights and all(has_manifest(path) for path in paths):
        return [everything_of(open_checkpoint(path)) for path in paths]
    return [(open_weights(path, kind_of(path), scratch=None, key=None, state=state), {}) for path in paths]


def _facts(difference: Difference) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    facts = asdict(difference)
    largest = difference.max_abs
    if largest is not None and not math.isfinite(largest):
        facts["max_abs"] = str(largest)
    return facts


def _row(difference: Difference) -> tuple[str, ...]:
    count = "" if difference.differing is None else str(difference.differing)
    largest = "" if difference.max_abs is None else f"{difference.max_abs:.6g}"
    return difference.key, difference.kind, difference.a or "-", difference.b or "-", count, largest
