"""docs/architecture.md: the five walks name functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import dtrain as dt
from pages.fences import DOCS

SOURCE = Path(dt.__file__).parent
WALKS = {
    title: re.findall(r"^\d+\. `([\w.]+)`", steps, re.M)
    for title, steps in re.findall(r"^\*\*(A [\w]+).*?\*\*\n\n((?:\d+\. .*\n)+)", (DOCS / "architecture.md").read_text(), re.M)
}


def is_defined(name: str) -> bool:
    """Return True if a module of the package defines ``name``, as ``step.compose.Step.__call__``."""
    words = name.split(".")
    for length in range(len(words) - 1, 0, -1):
        path = SOURCE.joinpath(*words[:length]).with_suffix(".py")
        if path.is_file():
            body = ast.parse(path.read_text()).body
            for word in words[length:]:
                node = next((node for node in body if getattr(node, "name", None) == word), None)
                if node is None:
                    return False
                body = getattr(node, "body", [])
            return True
    return False


def test_walks_name_functions_that_exist():
    assert set(WALKS) == {"A batch", "A save", "A load", "A launch", "A rank"}
    assert [name for names in WALKS.values() for name in names if not is_defined(name)] == []


def test_unknown_functions_are_found():
    assert is_defined("step.compose.Step.__call__")
    assert not is_defined("step.compose.Step.call")
    assert not is_defined("step.nothing.Step")
