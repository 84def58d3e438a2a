"""The messages of dtrain's errors give advice: ``<function>: <parameter> must be <condition>, got <value>. <Advice.>``

The check reads the source. A formatted value counts as one unknown word, ``{}``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import dtrain
from dtrain import errors

SOURCE = Path(dtrain.__file__).parent
CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.DtrainError)}

# A second sentence, or a value that may be one. A value before a sentence is the message of another error.
ADVICE = re.compile(r"[.?] ?(?=[A-Z`{])|\{\} (?=[A-Z])")
# The message of another error behind the name of a function: "{}: rank {} failed: {}". That error has its own advice.
RELAY = re.compile(r"(?!.*(must be|, got )).*[:/] ?(\{\})+", re.S)

EXCEPTIONS = {
    # Reasons: the bytes of a file are wrong, so the remedy is the same everywhere and is given once.
    ("CorruptCheckpointError", "checkpoint/*"): "names file and damage; load_sharded adds the newest older step that is intact",
    ("DataError", "data/stream/*"): "names file and damage; docs/data.md tells how to verify and restore shards",
    # Reasons: the last value of the message is its advice.
    ("ConfigError", "shard/wrapping.py"): "the last value is the problem and its remedy",
    ("ConfigError", "step/normalization.py"): "the last value is the problem and its remedy",
    ("StepError", "step/evaluate.py"): "the last value is the problem and its remedy",
    ("ConfigError", "surgery/replace.py"): "the last value is the problem and its remedy",
    ("RankError", "launch/spawn_function.py"): "quotes the error or the exit of a rank, which the user's function caused",
    ("RankError", "testing/ranks.py"): "quotes the error, the exit or the stack of a rank, which the tested function caused",
}


def flatten(node: ast.expr) -> str:
    """Return the text of a message with ``{}`` for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(piece.value if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
    if isinstance(node, ast.BinOp):
        return flatten(node.left) + flatten(node.right)
    return "{}"


def messages(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, class and text of every error that a module makes; not of texts that a function returns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in CLASSES and (text := flatten(node.args[0])) != "{}":
                yield node.lineno, name, text


def problem(text: str) -> str:
    """Return the part of the form that a message lacks; empty for a good message."""
    if RELAY.fullmatch(text):
        return ""
    if not ADVICE.search(text):
        return "no advice"
    return "" if text.endswith((".", "{}")) else "no full stop"


MODULES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def found() -> list[tuple[str, int, str, str]]:
    """Return module, line, class and text of every error of the package."""
    return [(module, *message) for module, path in MODULES.items() for message in messages(path.read_text())]


def is_exempt(kind: str, module: str, key: tuple[str, str]) -> bool:
    return kind == key[0] and fnmatch(module, key[1])


def test_messages_end_with_advice():
    lacking = [
        f"{module}:{line}: {kind}: {lacks}: {text}"
        for module, line, kind, text in found()
        if (lacks := problem(text)) and not any(is_exempt(kind, module, key) for key in EXCEPTIONS)
    ]
    assert lacking == []


@pytest.mark.parametrize("key", EXCEPTIONS, ids=" ".join)
def test_each_exception_is_needed(key):
    assert any(problem(text) for module, _, kind, text in found() if is_exempt(kind, module, key))


@pytest.mark.parametrize(
    ("message", "lacks"),
    [
        ("'step: lr must be above 0, got 0. Raise lr.'", ""),
        ("f'{caller}: {name} must be {limit}, got {value}. {advice}'", ""),
        ("f'{caller}: rank {rank} failed: {error}'", ""),
        ("f'{caller}: lr must be above: {lr}'", "no advice"),
        ("'step: lr must be above 0, got 0.'", "no advice"),
        ("f'step: lr must be above 0, got {lr}'", "no advice"),
        ("'step: lr must be above 0. Raise lr'", "no full stop"),
        ("'step: a.b must be 1' + f', got {value}'", "no advice"),
    ],
)
def test_check_finds_the_missing_part(message, lacks):
    ((_, kind, text),) = messages(f"def f():\n    raise errors.ConfigError({message}) from None\n")
    assert (kind, problem(text)) == ("ConfigError", lacks)
