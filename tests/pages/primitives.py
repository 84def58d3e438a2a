"""docs/primitives.md, made of the docstrings by ``python tests/written.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import public
from battery.pages import exported as recipes

PAGE = Path(__file__).parents[2] / "docs" / "primitives.md"

# A task, the rooms of the code that are about it, and the page that says more. Of several rooms that fit, the narrowest counts.
TASKS: dict[str, tuple[tuple[str, ...], str]] = {
    "Processes": (("dist.init", "dist.mesh", "launch", "heartbeats"), "launch.md"),
    "Agreements between ranks": (
        ("dist.collectives", "dist.reduce", "dist.ragged", "dist.differentiable"), "collectives.md"
    ),
    "Random numbers and bits": (("dist.rng",), "determinism.md"),
    "Layout of a model": (("shard",), "sharding.md"),
    "The step": (("step", "transform", "combinators", "state", "dtensor"), "seams.md"),
    "Losses and scores": (("losses", "metrics", "typing", "batch"), "sharding.md"),
    "Memory": (
        ("step.auto_microbatch", "step.optimizer_in_backward", "memory", "planning"),
        "microbatch.md",
    ),
    "Time": (("clock", "durations"), "time.md"),
    "Data": (("data",), "data.md"),
    "Checkpoints": (("checkpoint",), "checkpoints.md"),
    "Observing": (("loggers", "monitors", "profiling", "run", "spans", "step.evaluate", "report"), "observing.md"),
    "Errors": (("errors",), "launch.md"),
    "Tests of your own": (("testing",), "testing.md"),
}  # fmt: skip
RECIPES = {
    "Gradients and updates": "transforms.gradients",
    "Weights": "transforms.weights",
    "Batches and targets": "transforms.batches",
    "Low precision": "transforms.precision",
    "Options of the optimizer": "transforms.hyperparameters",
    "Model surgery": "surgery",
    "Optimizers": "optim",
    "Schedules": "schedules",
}

INTRO = """# Primitives and their contracts

Every exported function, with what a loop has to know before it calls one. This page is made of the docstrings
(`python tests/written.py`), and a test holds it to them. The docstrings say more: arguments, shapes,
sources, examples.

- *Gives*: what comes out.
- *Changes*: what is not the same afterwards. Empty: nothing that was there before.
- *Between ranks*: what it sends; every rank must call it then, alike. Empty: nothing.
- *Waits*: where the host waits for the device. Empty: nowhere, or there is no device in it.
- *Raises*: errors of its own. `ConfigError` is a mistake in the call, the same on every rank; `Exception` stands for whatever a
  function that it is given raises.

A name that ends in `_` writes into tensors that it is given. A function that makes a transform is listed with what the *step*
does because of it; one that makes a step, a loader or a plan with what the making does.
"""

_HEADS = "Args|Returns|Yields|Raises|Mutates|Collective|Host sync|Formula|Source|Example|Examples|Note|Warns"
_HEAD = re.compile(rf"(?:^|(?<=[.;] ))({_HEADS}):\s+", re.M)


def contract(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by heading, each as one line; the part before the first heading is under ``""``."""
    text = inspect.getdoc(value) or ""
    parts = _HEAD.split(text)
    found = {"": parts[0]}
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        found.setdefault(head, re.split(r"\n\n(?=\S)", body)[0])
    return {head: " ".join(body.split()).replace("``", "`") for head, body in found.items()} | {"raw": text}


def summary(value: Any) -> str:
    """The first paragraph of a docstring before its headings, on one line."""
    before = _HEAD.split(inspect.getdoc(value) or "")[0]
    return " ".join(before.split("\n\n")[0].split()).replace("``", "`").rstrip(".")


def raised(value: Any) -> list[str]:
    """The errors that a docstring lists."""
    body = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n(?=[ ]))*)", contract(value)["raw"], re.M)
    return re.findall(r"^    (\w+):", body[1], re.M) if body else []


def brief(text: str) -> str:
    """A section as a cell of a table: its first sentence; empty where it says that there is nothing."""
    first = re.split(r"(?<=[a-z`)\]])\.(?: |$)", text)[0]
    return "" if re.fullmatch(r"(?:none|nothing)[.;]?", first.strip()) else first.strip().rstrip(".")


def room(value: Any) -> str:
    return str(getattr(value, "__module__", "")).removeprefix("dtrain.")


@cache
def exported() -> dict[str, Any]:
    """Map each public name, as a loop writes the name, to its value; Composer's schedules are on the page of recipes alone."""
    names = [name for name in public.all_names() if not name.startswith("dtrain.schedules.composer.")]
    return {name.replace("dtrain.", "dt.", 1): public.value(name) for name in names}


ROOMS = [*(room for rooms, _ in TASKS.values() for room in rooms), *RECIPES.values()]


def home(value: Any) -> str | None:
    """The narrowest of the rooms above that a value is from; None for what is from none, such as the name of a type."""
    fits = [each for each in ROOMS if f"{room(value)}.".startswith(f"{each}.")]
    return max(fits, key=len, default=None)


def members(rooms: tuple[str, ...]) -> dict[str, Any]:
    """The exported names of some rooms."""
    return {name: value for name, value in exported().items() if home(value) in rooms}


@cache
def listed() -> set[str]:
    """The names that the page of recipes has."""
    return {name for room in recipes().values() for name, _ in room}


def row(name: str, value: Any) -> str:
    """A function, as a line of a table."""
    said = contract(value)
    bare = name.removeprefix("dt.")
    last = bare.rpartition(".")[2]
    link = f"[`{bare}`](recipes.md#{last.lower()})" if last in listed() else f"`{bare}`"
    errors = ", ".join(f"`{error}`" for error in raised(value))
    cells = [link, summary(value), *(brief(said.get(head, "")) for head in ("Mutates", "Collective", "Host sync")), errors]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(found: dict[str, Any]) -> Iterator[str]:
    """Functions with their contracts, then the values that they take and give."""
    functions = {name: value for name, value in found.items() if inspect.isfunction(value)}
    others = {name: value for name, value in found.items() if name not in functions}
    if functions:
        yield "| function | gives | changes | between ranks | waits | raises |"
        yield "|---|---|---|---|---|---|"
        yield from (row(name, value) for name, value in functions.items())
    if functions and others:
        yield ""
    if others:
        yield "| value | what it is |"
        yield "|---|---|"
        yield from (f"| `{name.removeprefix('dt.')}` | {summary(value)} |" for name, value in others.items())


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for task, (rooms, more) in TASKS.items():
        parts.append(f"\n## {task}\n\nMore: [{more}]({more})\n\n" + "\n".join(table(members(rooms))) + "\n")
    parts.append("\n## Recipes\n\nFormulas, sources, examples and costs: [recipes.md](recipes.md)\n")
    for title, of in RECIPES.items():
        parts.append(f"\n### {title}\n\n" + "\n".join(table(members((of,)))) + "\n")
    aliases = [f"`{name.removeprefix('dt.')}`" for name, value in exported().items() if home(value) is None]
    parts.append(f"\n## Names of types\n\nFor annotations; they hold nothing of their own: {', '.join(aliases)}.\n")
    return "".join(parts)
