"""One word for one thing: each public parameter has a name of ``parameter_names.txt``, which gives the meaning of the name.

A new name needs a line there. A second word for a known thing fails with the word to use.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import public

TABLE = Path(__file__).with_name("parameter_names.txt")
# These doors repeat the words of others: Composer's schedules, and torch's layers.
WORDS_OF_OTHERS = (
    "dtrain.schedules.composer.",
    "dtrain.surgery.AlibiMultiheadAttention",
    "dtrain.surgery.LowPrecision",
    "dtrain.optim.Decoupled",
)
LINE = re.compile(r"(?P<name>\w+)(?: \[(?P<only>[^]]+)\])?: (?P<meaning>.+)|(?P<word>\w+) -> (?P<instead>.+)")


class Table(NamedTuple):
    """Meaning of each name, functions that alone may use a name, and words that are not in use with the words instead."""

    meanings: dict[str, str]
    only: dict[str, tuple[str, ...]]
    instead: dict[str, str]


@cache
def table() -> Table:
    return parse(TABLE.read_text())


def parse(text: str) -> Table:
    table = Table({}, {}, {})
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, (
                f"{TABLE.name}: a line must be 'name: meaning', 'name [function]: meaning' or 'word -> word to use': {line}"
            )
            kind, name = (table.instead, match["word"]) if match["word"] else (table.meanings, match["name"])
            assert name not in table.instead | table.meanings, f"{TABLE.name}: {name} stands there twice"
            kind[name] = match["instead"] or match["meaning"]
            if match["only"]:
                table.only[name] = tuple(match["only"].split(", "))
    return table


@cache
def callables() -> dict[str, Any]:
    """Public functions, public methods of public classes, and classes that a caller builds, by name."""
    functions = {}
    for name in public.all_names():
        value = public.value(name)
        if inspect.isfunction(value):
            functions[name] = value
        elif inspect.isclass(value) and value.__module__.startswith("dtrain.") and not issubclass(value, BaseException):
            if not getattr(value, "_is_protocol", False):
                functions[name] = value
            for member, function in vars(value).items():
                inner = getattr(function, "__func__", function)
                own = getattr(inner, "__qualname__", "").startswith(f"{value.__name__}.")
                if inspect.isfunction(inner) and own and not member.startswith("_"):
                    functions[f"{name}.{member}"] = inner
    return {name: function for name, function in functions.items() if not name.startswith(WORDS_OF_OTHERS)}


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls") and not name.startswith("_")]


def users() -> dict[str, list[str]]:
    """Names of all public functions, methods and classes with a parameter, by the name of the parameter."""
    users_of = defaultdict(list)
    for name, function in callables().items():
        for parameter in parameters(function):
            users_of[parameter].append(name.removeprefix("dtrain."))
    return users_of


@cache
def built_names() -> set[str]:
    """Return the names of the classes that a user builds, as ``dt.LossSum(...)``, in pages, examples and docstrings."""
    root = TABLE.parent.parent
    files = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/**/*.py"), *root.glob("src/**/*.py")]
    return {name for file in files for name in re.findall(r"\bdt\.(?:\w+\.)*(\w+)\(", file.read_text())}


def is_field_of_result(where: list[str]) -> bool:
    """Return True if a name is only a field of values that dtrain makes: a user reads the field and never passes it."""
    for name in where:
        value = callables().get(f"dtrain.{name}")
        if not inspect.isclass(value) or value.__name__ in built_names():
            return False
    return True


def allowed(functions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{function}" for function in functions)


def problems(table: Table, users: dict[str, list[str]]) -> list[str]:
    """Return a line for each name that the table lacks, or does not allow."""
    lines = []
    for name, where in sorted(users.items()):
        if name in table.instead:
            lines.append(f"{name} in {', '.join(where)}: use {table.instead[name]}")
        elif name in table.meanings:
            strangers = [user for user in where if name in table.only and not f".{user}".endswith(allowed(table.only[name]))]
            if strangers:
                lines.append(f"{name} in {', '.join(strangers)}: {name} means {table.meanings[name]!r}. Use another word")
        elif not is_field_of_result(where):
            lines.append(
                f"{name} in {', '.join(where)}: add 'name: meaning' to {TABLE.name}, unless a name there has the meaning"
            )
    return lines


def test_every_public_parameter_has_a_name_of_the_table():
    assert "\n".join(problems(table(), users())) == ""


def test_table_has_no_name_that_nobody_uses():
    assert sorted(table().meanings.keys() - users().keys()) == []


CASES = {
    "second word": ({"interval": ["ema"]}, ["interval in ema: use every"]),
    "another meaning": ({"window": ["ema"]}, ["window in ema: window means 'average over'. Use another word"]),
    "allowed": ({"window": ["mfu"], "every": ["ema"]}, []),
    "new name": (
        {"novel": ["ema"]},
        ["novel in ema: add 'name: meaning' to parameter_names.txt, unless a name there has the meaning"],
    ),
}


@pytest.mark.parametrize(("users", "expected"), CASES.values(), ids=CASES)
def test_problem_names_the_word_to_use(users, expected):
    table = parse("# comment\nevery: how often\nwindow [mfu]: average over\ninterval -> every\n")
    assert problems(table, users) == expected
