"""The page of all recipes, made of the registries and the docstrings by ``python tests/written.py``."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dtrain as dt
import public
from battery.surgery import ROWS as SURGERIES
from battery.transforms import ROWS as TRANSFORMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
COSTS = ROOT / "benchmarks" / "results" / "algorithms.json"

ROOMS = {
    "transforms.gradients": "Gradients and updates",
    "transforms.weights": "Weights",
    "transforms.batches": "Batches and targets",
    "transforms.precision": "Low precision",
    "transforms.hyperparameters": "Options of the optimizer",
    "surgery": "Model surgery",
    "optim": "Optimizers",
    "schedules": "Schedules",
    "composer": "Schedules in Composer's form, of `dt.schedules.composer`",
}
_HEADS = "Args|Returns|Yields|Raises|Mutates|Collective|Host sync|Formula|Source|Example|Examples|Note"
_SECTION = re.compile(rf"^({_HEADS}):[ \t]*(.*?)(?=^(?:{_HEADS}):|\Z)", re.MULTILINE | re.DOTALL)

INTRO = """# Recipes

Every algorithm, surgery, optimizer and schedule of dtrain: what it computes, where it is from, an example that runs, and
what it costs. This page is made of the docstrings and of the registries of the tests (`python tests/written.py`), and a test
holds it to them: no algorithm or surgery is exported without numbers that are known by hand, a run on two ranks under FSDP2,
a resumed run, and a figure of its cost.

An *algorithm* is a `Transform`, listed in `compose_step`; beside it stands the plain helper, for a loop written by hand. A
*surgery* is a function of a model, called before `shard_model`. What Composer calls them is in [composer.md](composer.md).

The examples run with the tests, each in the module that defines its name: `torch` and what stands in that module are there,
and what they show is compared.
"""

TABLE = """
## What is held for each

*Numbers*: values worked out by hand that the tests compare with. *Two ranks*: sharded by FSDP2 over two ranks, a run ends
where one rank alone does (relative {tolerance:.0e} in float64); *per rank*: it draws for each rank's samples, so it is
checked to differ, and to resume. Every one of them is also resumed in the middle (bit for bit, and saved by two ranks and
resumed by one), interrupted by exceptions at every seam, compared with a run without it while it does not act, and watched
for host syncs and collectives. *Cost* is the processor time of a whole step with it, against {against};
in brackets what the noise of the run leaves possible. A composed step without any of them costs {nothing:.2f}x of one by
hand, and that is in all figures of transforms. `python benchmarks/algorithms.py` prints them.

{machine}
"""


def section(function: Any, name: str) -> str:
    """The text of a section of a docstring, without its head; empty where there is none. Paragraphs behind it are not of it."""
    bodies = (body for head, body in _SECTION.findall(inspect.getdoc(function) or "") if head == name)
    return textwrap.dedent(re.split(r"\n\n(?=\S)", next(bodies, ""))[0].strip("\n")).strip()


def exported() -> dict[str, list[tuple[str, Any]]]:
    """The public functions and classes of the rooms, in their order; reports and values (dataclasses) are left out."""
    found: dict[str, list[tuple[str, Any]]] = {room: [] for room in ROOMS}
    for full in sorted(public.all_names(), key=lambda name: name.rpartition(".")[2]):
        name, value = full.rpartition(".")[2], public.value(full)
        if full.startswith("dtrain.schedules.composer."):
            found["composer"].append((f"composer.{name}", value))
            continue
        room = next((room for room in ROOMS if getattr(value, "__module__", "").startswith(f"dtrain.{room}")), None)
        # A name behind another door is no recipe of the room: dt.transforms.hyperparameter is defined in schedules/.
        if room is not None and room.split(".")[0] == full.split(".")[1] and not hasattr(value, "__dataclass_fields__"):
            found[room].append((name, value))
    return found


def is_algorithm(value: Any) -> bool:
    """Return True if the function makes a transform."""
    return inspect.isfunction(value) and inspect.signature(value).return_annotation in ("Transform", dt.Transform)


def costs() -> dict[str, Any]:
    """Return the last measurements of ``benchmarks/algorithms.py``."""
    found: dict[str, Any] = json.loads(COSTS.read_text())
    return found


def rows_of(name: str) -> list[Any]:
    """The rows of the registries that are examples of a public function."""
    return [row for rows in (TRANSFORMS, SURGERIES) for row in rows.values() if name in row.of]


def table() -> Iterator[str]:
    """A line for each algorithm and surgery."""
    measured = costs()["costs"]
    yield "| recipe | numbers | two ranks | resumed | cost of a step |"
    yield "|---|---|---|---|---|"
    for members in exported().values():
        for name, _ in members:
            rows = rows_of(name)
            if not rows:
                continue
            points = sum(len(row.points()) for row in rows if row.points is not None)
            alike = "per rank" if all(row.per_rank for row in rows) else "as one"
            cost = measured.get(name)
            shown = f"{cost['ratio']:.2f}x ({cost['low']:.2f}..{cost['high']:.2f})" if cost else "not measured"
            yield f"| [`{name}`](#{name}) | {points} | {alike} | bit for bit | {shown} |"


def entry(name: str, value: Any) -> str:
    """The part of the page on one name."""
    summary = _prose((inspect.getdoc(value) or "").split("\n\n")[0])
    formula, source = _prose(section(value, "Formula")), _prose(section(value, "Source"))
    return (
        f"### {name}\n\n```text\n{signature(name, value)}\n```\n\n{summary}\n\n*Formula.* {formula}\n\n*Source.* {source}\n\n"
        f"```pycon\n{section(value, 'Example')}\n```\n"
    )


def _prose(text: str) -> str:
    """Text of a docstring as a paragraph of Markdown."""
    return " ".join(text.split()).replace("``", "`")


def signature(name: str, value: Any) -> str:
    """Format the signature, one argument per line if the line is too long."""
    found = inspect.signature(value)
    returns = found.return_annotation
    arrow = (
        "" if inspect.isclass(value) else f" -> {returns if isinstance(returns, str) else inspect.formatannotation(returns)}"
    )
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        written = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        kind, default = parameter.annotation, parameter.default
        if kind is not parameter.empty:
            written += f": {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
        if default is not parameter.empty:
            written += f" = {default!r}"
        parts.append(written)
    line = f"{name}({', '.join(parts)}){arrow}"
    folded = "".join(f"    {part},\n" for part in parts)
    return line if len(line) <= 110 else f"{name}(\n{folded}){arrow}"


def page() -> str:
    """The whole page."""
    measured = costs()
    head = TABLE.format(
        tolerance=1e-12,
        against=measured["against"],
        nothing=measured["costs"]["nothing"]["ratio"],
        machine=f"Measured on: {measured['machine']}.",
    )
    parts = [INTRO, head, "\n" + "\n".join(table()) + "\n"]
    for room, title in ROOMS.items():
        members = exported()[room]
        if members:
            parts.append(f"\n## {title}\n")
            parts += ["\n" + entry(name, value) for name, value in members]
    return "".join(parts)
