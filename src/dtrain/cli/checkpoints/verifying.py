"""``dtrain checkpoints verify``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dtrain import storage
from dtrain.cli.checkpoints.output import Bar, one_line, print_json, size_text
from dtrain.cli.checkpoints.places import AsJson, existing, is_step, nothing_in, steps_of
from dtrain.errors import CheckpointError, ConfigError, DamagedCheckpointError, printable
from dtrain.storage import Place

_DAMAGED = 1


def verify(
    path: Annotated[str, typer.Argument(metavar="ROOT_OR_STEP", help="A step's folder, or a root: its newest step.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, and compare it with its digest.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every step of the root, not only the newest.")] = False,
    as_json: AsJson = False,
) -> int:
    """Verify the manifest, sizes and indexes of a step.

    With --deep every byte of its tensors, too. One line per step, which says what was done. Steps without a manifest are saves
    that were not completed, and are left out; a step that a run removes meanwhile is no error.

    Exit codes: 0 all is as it was written; 1 a step is damaged or cannot be read; 2 bad usage, or nothing to verify.
    """
    found = []
    for folder in _chosen(path, every=every):
        unknown = dict.fromkeys(("step", "bytes", "world_size"))
        facts = {"path": str(folder), "ok": True, "removed": False, "problem": None, **unknown, **_verified(folder, deep)}
        found.append(facts)
        if not as_json:
            typer.echo(f"{folder.name}: {_text(facts, deep)}")
    if as_json:
        print_json({"deep": deep, "steps": found})
    return 0 if all(facts["ok"] for facts in found) else _DAMAGED


def _verified(folder: Place, deep: bool) -> dict[str, Any]:
    """What there is to say about a step."""
    from dtrain.checkpoint.find import describe
    from dtrain.checkpoint.opened import open_checkpoint

    try:
        if deep:
            _verify_deeply(folder)
        else:
            open_checkpoint(folder)
        step = describe(folder)
    except (CheckpointError, OSError) as error:
        if not storage.exists(folder):  # a step is removed by renaming it first
            return {"removed": True}
        what = "damaged" if isinstance(error, DamagedCheckpointError) else "cannot be read"
        return {"ok": False, "problem": f"{what}: {one_line(error)}"}
    return {"step": step.step, "bytes": step.bytes, "world_size": step.world_size}


def _verify_deeply(folder: Place) -> None:
    from dtrain.checkpoint.opened import open_checkpoint
    from dtrain.checkpoint.verify import verify_data

    opened = open_checkpoint(folder)
    with Bar(folder.name, sum(file.bytes for file in opened.files)) as bar:
        verify_data(opened, bar.advance)


def _text(facts: dict[str, Any], deep: bool) -> str:
    if facts["problem"] is not None:
        return printable(facts["problem"])
    if facts["removed"]:
        return "removed while it was read"
    ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}"
    what = "every byte read" if deep else "manifest, sizes and indexes; --deep reads every byte"
    return f"ok, {size_text(facts['bytes'])} of {ranks} ({what})"


def _chosen(path: str, *, every: bool) -> list[Place]:
    """The folders to verify, at least one, in the order of their steps."""
    folder = existing(path, "verify")
    if every and is_step(folder):
        raise ConfigError(f"checkpoints: verify: {path!r} is the folder of one step; leave out --all")
    steps, newest = steps_of(folder, "verify")
    if newest is None:
        raise nothing_in(path, "verify")
    return [step.path for step in sorted(steps, key=lambda step: step.step)] if every else [newest]
