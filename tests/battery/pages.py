"""Docstring sections of the recipes, and the registries and measurements that belong to each. ``cards`` makes pages of them."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import dtrain as dt
import public
from battery.surgery import ROWS as SURGERIES
from battery.transforms import ROWS as TRANSFORMS

ROOT = Path(__file__).parents[2]
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
    "composer": "Schedules in Composer's form",
}
_HEADS = (
    "Args|Returns|Yields|Raises|Warns|Mutates|Collective|Host sync|Formula|Source|Example|Examples|Note|"
    "Suggested values|When not to use"
)
_SECTION = re.compile(rf"^({_HEADS}):[ \t]*(.*?)(?=^(?:{_HEADS}):|\Z)", re.MULTILINE | re.DOTALL)


def section(function: Any, name: str) -> str:
    """The text of a section of a docstring, without its head; empty where there is none. Paragraphs behind it are not of it."""
    bodies = (body for head, body in _SECTION.findall(inspect.getdoc(function) or "") if head == name)
    return textwrap.dedent(re.split(r"\n\n(?=\S)", next(bodies, ""))[0].strip("\n")).strip()


def exported() -> dict[str, list[tuple[str, Any]]]:
    """The public functions and classes of the rooms, in their order; reports and values (dataclasses) are left out."""
    by_room: dict[str, list[tuple[str, Any]]] = {room: [] for room in ROOMS}
    for full in sorted(public.all_names(), key=lambda name: name.rpartition(".")[2]):
        name, value = full.rpartition(".")[2], public.value(full)
        if full.startswith("dtrain.schedules.composer."):
            by_room["composer"].append((f"composer.{name}", value))
            continue
        room = next((room for room in ROOMS if getattr(value, "__module__", "").startswith(f"dtrain.{room}")), None)
        # A name behind another door is no recipe of the room, nor is a function that reads a schedule and makes none.
        if room is None or room.split(".")[0] != full.split(".")[1] or name == "hyperparameter":
            continue
        if not hasattr(value, "__dataclass_fields__"):
            by_room[room].append((name, value))
    return by_room


def is_algorithm(value: Any) -> bool:
    """Return True if the function makes a transform."""
    return inspect.isfunction(value) and inspect.signature(value).return_annotation in ("Transform", dt.Transform)


def costs() -> dict[str, Any]:
    """Return the last measurements of ``benchmarks/algorithms.py``."""
    content: dict[str, Any] = json.loads(COSTS.read_text())
    return content


def rows_of(name: str) -> list[Any]:
    """The rows of the registries that are examples of a public function."""
    return [row for rows in (TRANSFORMS, SURGERIES) for row in rows.values() if name in row.of]


def signature(name: str, value: Any) -> str:
    """Format the signature, one argument per line if the line is too long."""
    described = inspect.signature(value)
    returns = described.return_annotation
    arrow = (
        "" if inspect.isclass(value) else f" -> {returns if isinstance(returns, str) else inspect.formatannotation(returns)}"
    )
    parts: list[str] = []
    for parameter in described.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(piece.startswith("*") for piece in parts):
            parts.append("*")
        written = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        kind, default = parameter.annotation, parameter.default
        if kind is not parameter.empty:
            written += f": {kind if isinstance(kind, str) else inspect.formatannotation(kind)}"
        if default is not parameter.empty:
            written += f" = {default!r}"
        parts.append(written)
    line = f"{name}({', '.join(parts)}){arrow}"
    folded = "".join(f"    {piece},\n" for piece in parts)
    return line if len(line) <= 110 else f"{name}(\n{folded}){arrow}"
