"""The reference of every exported name, by room; what is rendered is the docstring, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "dtrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One page: the names of these modules, or all that ``package`` exports."""

    file: str
    title: str
    about: str
    modules: tuple[str, ...] = ()
    package: str = "dtrain"


ROOMS = (
    Room(file="processes", title="Processes and agreements", modules=("dist", "launch", "pulse"),
         about="Who am I, who are the others, and what do we agree on. See [the launcher](../launch.md) and "
               "[collectives](../collectives.md)."),
    Room(file="sharding", title="Sharding and memory", modules=("shard", "memory", "tensors"),
         about="How a model lies on the ranks, and what is computed how. See [sharding](../sharding.md) and "
               "[memory](../memory.md)."),
    Room(file="step", title="The step", modules=("step", "state", "transform", "combinators", "losses", "scores", "batch"),
         about="Gradients, updates, and the seams between them. See [the architecture](../architecture.md#state-and-seams) and "
               "[the microbatch](../microbatch.md)."),
    Room(file="data", title="Data", modules=("data",),
         about="Loaders, shards, packing. See [data](../data.md) and [packing](../packing.md)."),
    Room(file="checkpoints", title="Checkpoints", modules=("checkpoint",),
         about="Saving, loading, finding, converting. See [checkpoints](../checkpoints.md)."),
    Room(file="time", title="Time and schedules", modules=("clock", "durations", "schedules"),
         about="How far training has come, and what depends on it. See [time](../time.md) and [schedules](../schedules.md)."),
    Room(file="schedules-composer", title="Schedules in Composer's form", package="dtrain.schedules.composer",
         about="`from dtrain.schedules import composer`. See [schedules](../schedules.md)."),
    Room(file="optimizers", title="Optimizers", modules=("optim",),
         about="What torch's optimizers lack. See [optimizers](../optimizers.md)."),
    Room(file="algorithms", title="Algorithms", modules=("algorithms",),
         about="Transforms for `compose_step`, each with its plain helper. [Every recipe](../recipes.md) has costs."),
    Room(file="surgery", title="Model surgery", modules=("surgery",),
         about="Edits of a model, made before it is sharded. [Every recipe](../recipes.md) has costs."),
    Room(file="observing", title="Observing", modules=("observe", "spans", "runs"),
         about="Meters, sinks, stops, the ledger, traces. See [observing](../observing.md) and [profiling](../profiling.md)."),
    Room(file="planning", title="Plans and reports", modules=("planning", "report"),
         about="What a run would take, and what a run took. See [planning](../planning.md) and [observing](../observing.md)."),
    Room(file="testing", title="Testing", package="dtrain.testing",
         about="`from dtrain import testing`. See [testing](../testing.md)."),
    Room(file="types", title="Types and errors", modules=("types", "errors"),
         about="Names for batches, losses and call shapes, and the tree of errors."),
)  # fmt: skip


def exported(package: str) -> dict[str, str]:
    """The names that a package exports, and the module below it that each is imported from."""
    path = SOURCE.joinpath(*package.split(".")[1:], "__init__.py")
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain."):
            found |= {alias.asname or alias.name: str(node.module).removeprefix("dtrain.") for alias in node.names}
    listed = _listed(path)
    return {name: module for name, module in sorted(found.items()) if listed is None or name in listed}


def _listed(path: Path) -> set[str] | None:
    """What ``__all__`` says, where it is written out."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            return set(ast.literal_eval(node.value))
    return None


def names(room: Room) -> list[str]:
    """The names of a page, with their package, in the order of their modules."""
    all_of_them = exported(room.package).items()
    kept = [(module, name) for name, module in all_of_them if not room.modules or module.split(".")[0] in room.modules]
    return [f"{room.package}.{name}" for _, name in sorted(kept)]


def every_name() -> list[str]:
    """All that a user may import, as it is imported."""
    return [
        f"{package}.{name}"
        for package in ("dtrain", "dtrain.testing", "dtrain.schedules.composer")
        for name in exported(package)
    ]


def pages() -> Iterator[tuple[str, str]]:
    """File and Markdown of each page of the reference."""
    yield "reference/index.md", index()
    for room in ROOMS:
        entries = "\n\n".join(f"::: {name}" for name in names(room))
        yield f"reference/{room.file}.md", f"# {room.title}\n\n{room.about}\n\n{entries}\n"


def index() -> str:
    """All names by page."""
    parts = ["# Python reference\n\nEvery name that can be imported: `import dtrain as dt`. What may change is said in "
             "[stability](../stability.md).\n"]  # fmt: skip
    for room in ROOMS:
        listed = ", ".join(f"[`{name.rpartition('.')[2]}`]({room.file}.md#{name})" for name in names(room))
        parts.append(f"## [{room.title}]({room.file}.md)\n\n{listed}\n")
    return "\n".join(parts)
