"""The public names of dtrain: the top level and the sub-packages behind it, each name with the module that defines it."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import dtrain
from dtrain.lazy_imports import public_names

DOORS = (
    "dtrain",
    "dtrain.checkpoint",
    "dtrain.data",
    "dtrain.dist",
    "dtrain.errors",
    "dtrain.experts",
    "dtrain.launch",
    "dtrain.loggers",
    "dtrain.memory",
    "dtrain.monitors",
    "dtrain.optim",
    "dtrain.planning",
    "dtrain.profiling",
    "dtrain.prove",
    "dtrain.run",
    "dtrain.schedules",
    "dtrain.schedules.composer",
    "dtrain.shard",
    "dtrain.step",
    "dtrain.surgery",
    "dtrain.testing",
    "dtrain.transforms",
    "dtrain.typing",
)


def door(name: str) -> ModuleType:
    return import_module(name)


@cache
def names(package: str) -> dict[str, str]:
    """Map each public name of one door, sub-packages left out, to the module that defines the name. Imports neither."""
    path = Path(dtrain.__file__).parent.joinpath(*package.split(".")[1:])
    if path.is_dir():
        modules = public_names(str(path / "__init__.py"))
        return {name: module for name, module in modules.items() if f"{module}.{name}" not in DOORS}
    modules = {}
    for node in ast.parse(path.with_suffix(".py").read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            modules[node.name] = package
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            modules |= {target.id: package for target in targets if isinstance(target, ast.Name)}
    return {name: module for name, module in modules.items() if not name.startswith("_")}


@cache
def all_names() -> dict[str, str]:
    """Map every public name, as ``dtrain.schedules.cosine``, to the module that defines the name."""
    return {f"{package}.{name}": module for package in DOORS for name, module in names(package).items()}


def value(name: str) -> object:
    """Import a public name such as ``dtrain.schedules.cosine``."""
    package, _, last = name.rpartition(".")
    return getattr(door(package), last)


def is_public(name: str) -> bool:
    """Return True if ``dt.save_sharded`` or ``dt.schedules.cosine`` can be written in a loop; doors count, members do not."""
    full = "dtrain." + name.removeprefix("dtrain.").removeprefix("dt.")
    return full in all_names() or full in DOORS or full == "dtrain.__version__"


def named_in(text: str) -> set[str]:
    """Return the public names and the doors that ``text`` writes as ``dt.name`` or ``dt.door.name``, as far as they exist."""
    return {name for name in _written(text) if is_public(name)}


def unknown_in(text: str) -> set[str]:
    """Return the names that ``text`` writes as ``dt.name`` or ``dt.door.name`` and that dtrain does not have."""
    return {name for name in _written(text) if not is_public(name)}


def _written(text: str) -> set[str]:
    """Return ``dt.a.b`` for a name behind the door ``a``, else ``dt.a``: the rest is a member."""
    names = set()
    for match in re.finditer(r"\bdt((?:\.[A-Za-z_]\w*)+)", text):
        parts = match[1][1:].split(".")
        doors = 0
        while doors < len(parts) and ".".join(["dtrain", *parts[: doors + 1]]) in DOORS:
            doors += 1
        names.add(".".join(["dt", *parts[: doors + 1]]))
    return names


def load_all() -> None:
    """Import every module that defines a public name."""
    for module in set(all_names().values()):
        import_module(module)


@cache
def short_names() -> set[str]:
    """Return the last part of every public name."""
    return {name.rpartition(".")[2] for name in all_names()}
