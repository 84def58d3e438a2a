"""The page of all public names (``docs/names.md``), made from the packages and the summaries of their docstrings."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import public
from pages.fences import DOCS

PAGE = DOCS / "names.md"
# The order of a loop, and the guide of each package.
GUIDES = {
    "dtrain": "loop.md",
    "dtrain.step": "seams.md",
    "dtrain.transforms": "recipes/index.md",
    "dtrain.schedules": "schedules.md",
    "dtrain.schedules.composer": "composer.md",
    "dtrain.optim": "optimizers.md",
    "dtrain.surgery": "recipes/index.md",
    "dtrain.shard": "sharding.md",
    "dtrain.data": "data.md",
    "dtrain.checkpoint": "checkpoints.md",
    "dtrain.dist": "collectives.md",
    "dtrain.launch": "launch.md",
    "dtrain.run": "observing.md",
    "dtrain.monitors": "observing.md",
    "dtrain.loggers": "observing.md",
    "dtrain.memory": "memory.md",
    "dtrain.profiling": "profiling.md",
    "dtrain.planning": "planning.md",
    "dtrain.prove": "prove.md",
    "dtrain.testing": "testing.md",
    "dtrain.errors": "errors.md",
    "dtrain.experts": "experts.md",
    "dtrain.typing": "stability.md",
}
HEAD = """# Every public name

`import dtrain as dt`: `dt` itself holds the words of a training loop. All other names are one step further, in the folder of
the same name in [`src/dtrain`](../src/dtrain/__init__.py), whose docstrings have the signature and the contract of each name.
"""


def page() -> str:
    """Return the text of the page."""
    assert set(GUIDES) == set(public.DOORS), "a package needs a guide"
    return "\n".join([HEAD, *(line for package in GUIDES for line in _section(package))])


def read(text: str) -> dict[str, list[str]]:
    """Return the names that a page lists, by package."""
    parts = re.split(r"^## `dt([.\w]*)`.*$", text, flags=re.M)[1:]
    return {
        f"dtrain{door}": re.findall(r"^\| `(\w+)` \|", rows, re.M) for door, rows in zip(parts[::2], parts[1::2], strict=True)
    }


def _section(package: str) -> Iterator[str]:
    yield f"## `{package.replace('dtrain', 'dt', 1)}`\n"
    yield f"{_summary_of_package(package)} [Guide]({GUIDES[package]}).\n"
    groups: dict[str, list[tuple[str, str]]] = {}
    # The rows of one folder stand together, those of the package's own modules first.
    for name, module in sorted(public.names(package).items(), key=lambda item: (item[1], item[0])):
        groups.setdefault(_folder(package, module), []).append((name, module))
    for folder, rows in sorted(groups.items()):
        yield f"| {folder} | |\n|---|---|"
        yield from (f"| `{name}` | {_summary(module, name)} |" for name, module in rows)
        yield ""


def _folder(package: str, module: str) -> str:
    """Return the folder of a module inside of its package, in words."""
    first, _, rest = module.removeprefix(f"{package}.").partition(".")
    return first.replace("_", " ") if rest else ""


def _summary_of_package(package: str) -> str:
    doc = ast.get_docstring(_tree(package)) or ""
    return " ".join(doc.split("\n\n")[0].split()).replace("``", "`")


def _summary(module: str, name: str) -> str:
    """Return the first sentence of a definition's docstring, or of the string below an alias."""
    body = _tree(module).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        # The first definitions of an overloaded function have no docstring.
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and ast.get_docstring(node):
            return _first_sentence(ast.get_docstring(node) or "")
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return _first_sentence(str(following.value.value))
            return f"`{ast.unparse(node.value)}`".replace("|", "\\|") if node.value else ""
    return ""


def _first_sentence(doc: str) -> str:
    text = " ".join(doc.split("\n\n")[0].split()).replace("``", "`")
    sentence = re.match(r".*?[.:](?= |$)", text)
    return (sentence[0].removesuffix(":").removesuffix(".") + "." if sentence else text).replace("|", "\\|")


@cache
def _tree(module: str) -> ast.Module:
    origin = importlib.util.find_spec(module).origin
    return ast.parse(Path(origin).read_text())
