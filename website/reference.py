"""The Python reference: one page for each public package. Docstrings are read without importing the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dtrain.lazy_imports import public_names

SOURCE = Path(__file__).parents[1] / "src" / "dtrain"


@dataclass(frozen=True, slots=True)
class Room:
    """One page: all public names of ``package``."""

    package: str
    title: str
    about: str

    @property
    def file(self) -> str:
        return self.package.removeprefix("dtrain.").replace(".", "-") if self.package != "dtrain" else "loop"


ROOMS = (
    Room("dtrain", "The training loop",
         "Processes, the model, the step, data and checkpoints: `import dtrain as dt`. See [the loop](../loop.md)."),
    Room("dtrain.step", "Parts of a step",
         "Gradients, metrics, microbatch sizes and updates for a loop of your own. See [how a step is composed](../seams.md)."),
    Room("dtrain.shard", "Sharding",
         "Communication, activation checkpointing, offload. See [sharding](../sharding.md), [memory](../memory.md)."),
    Room("dtrain.schedules", "Schedules", "Values as functions of the step. See [schedules](../schedules.md)."),
    Room("dtrain.schedules.composer", "Composer's schedules", "`dt.schedules.composer`. See [schedules](../schedules.md)."),
    Room("dtrain.transforms", "Transforms",
         "Changes of a step, composed by `compose_step`. [Recipes](../recipes/index.md) has a page for each."),
    Room("dtrain.surgery", "Model surgery", "Edits before sharding. [Recipes](../recipes/index.md) has a page for each."),
    Room("dtrain.optim", "Optimizers", "Optimizers and parameter groups. See [optimizers](../optimizers.md)."),
    Room("dtrain.data", "Data", "Datasets, orders, packing, streaming. See [data](../data.md) and [packing](../packing.md)."),
    Room("dtrain.checkpoint", "Checkpoints", "List, verify, prune, convert. See [checkpoints](../checkpoints.md)."),
    Room("dtrain.dist", "Processes and collectives",
         "Collectives, random numbers, determinism. See [collectives](../collectives.md), [determinism](../determinism.md)."),
    Room("dtrain.launch", "Launch", "Heartbeats and hangs. See [launch](../launch.md), [hangs](../hangs.md)."),
    Room("dtrain.run", "Run folders", "Records of a run. See [observing](../observing.md)."),
    Room("dtrain.memory", "Memory", "Memory of devices, snapshots, live tensors. See [memory](../memory.md)."),
    Room("dtrain.planning", "Planning", "Estimates without the machine. See [planning](../planning.md)."),
    Room("dtrain.loggers", "Loggers", "Destinations of metrics. See [observing](../observing.md)."),
    Room("dtrain.monitors", "Monitors", "Measurements of a run. See [observing](../observing.md)."),
    Room("dtrain.profiling", "Profiling", "Traces and snapshots. See [profiling](../profiling.md)."),
    Room("dtrain.testing", "Testing", "Tests of distributed code. See [testing](../testing.md)."),
    Room("dtrain.prove", "Prove", "One script, run in several ways. See [prove](../prove.md)."),
    Room("dtrain.errors", "Errors", "The error tree. See [errors](../errors.md)."),
    Room("dtrain.typing", "Types", "Names for batches, losses, metrics and call shapes."),
)  # fmt: skip


def exported(package: str) -> dict[str, str]:
    """Map the public names of a package or module, sub-packages left out, to the modules that define them."""
    path = SOURCE.joinpath(*package.split(".")[1:])
    if not path.is_dir():
        return dict.fromkeys(sorted(_defined(path.with_suffix(".py"))), package)
    found = public_names(str(path / "__init__.py"))
    doors = {room.package for room in ROOMS}
    return {name: module for name, module in sorted(found.items()) if f"{module}.{name}" not in doors}


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


HEAD = """# Python reference

Every public name of `import dtrain as dt`, one page per sub-package. [Stability](../stability.md) says what may change.

An entry states the contract of a function:

- *Mutates*: what is not the same afterwards. Without this line, nothing that existed before changes.
- *Collective*: what the function sends. Every rank must call it then, alike. Without this line, nothing.
- *Host sync*: where the host waits for the device. Without this line, nowhere.
- *Raises*: errors of its own. `ConfigError` is a mistake in the call, the same on every rank.

A name that ends in `_` writes into tensors that it is given. For a function that makes a transform, the contract is that of the
step with the transform.
"""


ASSUMED = (
    "*Assumed in the examples: `import torch, dtrain as dt` and `from torch import nn`; `mesh`, `state`, `batch` and the like "
    "of [a loop](../loop.md).*"
)


def names(room: Room) -> list[str]:
    """Return the names of a page, with their package, in the order of their modules."""
    return [f"{room.package}.{name}" for name, _ in sorted(exported(room.package).items(), key=lambda item: item[::-1])]


def pages() -> Iterator[tuple[str, str]]:
    """Yield file and Markdown of each page of the reference."""
    yield "reference/index.md", index()
    for room in ROOMS:
        entries = "\n\n".join(f"::: {name}" for name in names(room))
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`](#{name})" for name in names(room))
        yield f"reference/{room.file}.md", f"# {room.title}\n\n{room.about}\n\n{listed}\n\n{ASSUMED}\n\n{entries}\n"


@cache
def places() -> dict[str, str]:
    """Map each public name to its place in the site."""
    return {name: f"reference/{room.file}.md#{name}" for room in ROOMS for name in names(room)}


def index() -> str:
    """Return the page that lists all names by page."""
    parts = [HEAD]
    for room in ROOMS:
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`]({room.file}.md#{name})" for name in names(room))
        parts.append(f"## [{room.title}]({room.file}.md)\n\n{listed}\n")
    return "\n".join(parts)
