"""Names that the code of a page uses and does not make: the page must list them."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

from pages.fences import fences

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def assumed(page: Path) -> set[str]:
    """Return the names that the code of a page reads before it binds them. A block ``anew`` keeps the earlier imports only."""
    needed: set[str] = set()
    imported = set(dir(builtins))
    bound = set(imported)
    for block in fences(page):
        if block.language != "python" or block.file:
            continue
        if block.anew:
            bound = set(imported)
        tree = ast.parse(block.text)
        imported |= {name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for name in _binds(node)}
        reader = _Reader(bound)
        reader.run(tree.body)
        needed |= reader.needed | (reader.late - bound)
    return needed


class _Reader:
    """Follow statements in order. Names that a function reads are looked up at its call, so they count after the block."""

    def __init__(self, bound: set[str]) -> None:
        self.bound = bound
        self.needed: set[str] = set()
        self.late: set[str] = set()

    def run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, _DEFINITIONS):
                self.late |= _reads(statement)
                self.bound.add(statement.name)
                continue
            inner = [nested for name in ("body", "handlers", "orelse", "finalbody") for nested in getattr(statement, name, [])]
            heads = [child for child in ast.iter_child_nodes(statement) if child not in inner]
            for head in heads or [statement]:
                self.needed |= _reads(head) - self.bound
            for head in heads or [statement]:
                self.bound |= set(_binds(head))
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.bound |= set(_binds(statement))
            for nested in inner:
                self.run(nested.body if isinstance(nested, ast.ExceptHandler) else [nested])


def _reads(node: ast.AST) -> set[str]:
    """Names that a statement or expression reads from outside; names of its comprehensions and functions are its own."""
    inside = {name for scope in ast.walk(node) if isinstance(scope, _SCOPES) for name in _own(scope)}
    loaded = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)}
    return loaded - inside


_SCOPES = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _own(scope: ast.AST) -> Iterator[str]:
    arguments = getattr(scope, "args", None)
    if isinstance(arguments, ast.arguments):
        yield from (inner.arg for inner in ast.walk(arguments) if isinstance(inner, ast.arg))
    yield from (inner.name for inner in ast.walk(scope) if isinstance(inner, _DEFINITIONS) and inner is not scope)
    yield from _binds(scope)


def _binds(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in child.names)


def sentence(names: set[str]) -> str:
    """Return the line that lists these names for the reader."""
    modules = [text for name, text in (("torch", "torch"), ("dt", "dtrain as dt")) if name in names]
    made = sorted(names & _OF_A_LOOP)
    yours = sorted(names - _OF_A_LOOP - {"torch", "dt"})
    parts = [f"`import {', '.join(modules)}`"] if modules else []
    parts += [f"{_listed(made)} of [a loop](loop.md)"] if made else []
    parts += [f"your own {_listed(yours)}"] if yours else []
    return f"*Assumed here and below: {'; '.join(parts)}.*"


_OF_A_LOOP = {"mesh", "model", "optimizer", "loader", "lr", "step", "state", "batch"}


def _listed(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
