"""Import public names on first use.

A package lists its public names once, as ``from module import name as name`` under ``if TYPE_CHECKING:`` in its
``__init__.py``. Type checkers and editors read the block. ``attach`` reads the same block at run time, on first use of a name.
So importing the package imports nothing else:

    if TYPE_CHECKING:
        from dtrain.schedules.curves import cosine as cosine

    __getattr__, __dir__ = attach(__name__, __file__)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its public names lazily.

    Args:
        package: dotted name of the package, its ``__name__``.
        file: path of the package's ``__init__.py``, its ``__file__``.
    """

    def load_attribute(name: str) -> Any:
        if name == "__all__":
            return sorted(public_names(file))
        module = None if name.startswith("_") else public_names(file).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_advise(package, name)}", name=name)
        value = import_module(f"{module}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return load_attribute, lambda: sorted(public_names(file))


def _advise(package: str, name: str) -> str:
    """Return the advice on a name that does not exist, as the end of a message. Protocols probe names with underscores."""
    if name.startswith("_"):
        return ""
    # Only an error needs the tables, and the names of all doors.
    from dtrain.name_advice import advise_on_name

    line = advise_on_name(public_paths(), package, name)
    return f". {line}" if line else ""


@cache
def public_names(file: str) -> dict[str, str]:
    """Map each public name of a package to the module that defines the name.

    A sub-package maps to its parent package.
    """
    # An import of dtrain alone needs no parser.
    import ast

    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    blocks = [node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.asname: str(node.module) for node in imports for alias in node.names if alias.asname}


@cache
def public_doors() -> dict[str, dict[str, str]]:
    """Map each door of dtrain, such as ``dtrain.schedules``, to its ``public_names``. A door may be one module."""
    root, doors = os.path.dirname(__file__), dict[str, dict[str, str]]()
    packages = ["dtrain"]
    for package in packages:
        file = os.path.join(root, *package.split(".")[1:], "__init__.py")
        if os.path.exists(file):
            doors[package] = names = public_names(file)
            packages += [f"{package}.{name}" for name, module in names.items() if module == package]
        else:
            doors[package] = dict.fromkeys(_defined_names(f"{os.path.dirname(file)}.py"), package)
    return doors


def public_paths() -> dict[str, list[str]]:
    """Map each door of dtrain to the paths of its public names, such as ``dt.schedules.cosine``."""
    return {
        package: [f"{package.replace('dtrain', 'dt', 1)}.{name}" for name in names] for package, names in public_doors().items()
    }


def _defined_names(file: str) -> list[str]:
    """Return the public classes, functions and values that a module defines."""
    import ast

    with open(file, encoding="utf-8") as source:
        body = ast.parse(source.read()).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]
