"""Code of the tests in the pages, which ``python tests/written.py`` brings up to date.

A block that stands under ``<!-- tests/pages/FILE.py: name -->`` is that function's source.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(<!-- (tests/[\w/]+\.py): (\w+) -->\n+```\w+\n)(.*?)(?=^```$)", re.S | re.M)


def source(file: str, name: str) -> str:
    """The lines of one function, or of one assignment, of a file."""
    text = (ROOT / file).read_text()
    for node in ast.parse(text).body:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
        if getattr(node, "name", None) == name or name in names:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
    raise LookupError(f"{file} has no {name}")


def with_sources(page: str) -> str:
    """A page with the blocks as the files have them."""
    return _BLOCK.sub(lambda match: match[1] + source(match[2], match[3]), page)


def shown(page: str) -> set[tuple[str, str]]:
    """File and name of each block that a page takes from a file."""
    return {(match[2], match[3]) for match in _BLOCK.finditer(page)}
