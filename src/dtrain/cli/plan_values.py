"""Values of the options of ``dtrain plan``, read from text. Each says in one line what came and what to write instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtrain.errors import ConfigError

if TYPE_CHECKING:
    from dtrain.shard.precision import Precision

PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16", "pure-fp16")
CHECKPOINTS = ("none", "nothing", "matmuls")

_UNITS = {"B": 1, **{f"{letter}iB": 2 ** (10 * (at + 1)) for at, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}B": 10 ** (3 * (at + 1)) for at, letter in enumerate("KMGT")}


def parse_memory(option: str, text: str) -> int:
    """The bytes that a text such as ``80GiB`` says.

    Raises:
        ConfigError: no number with a unit, or nothing.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        meant = next((unit for unit in _UNITS if match and match[2].lower() == unit.lower()), None)
        advice = f"did you mean {match[1]}{meant}?" if match and meant and float(match[1]) else "80GiB and 80GB are sizes"
        raise ConfigError(f"plan: {option} must be a size above 0 with its unit, got {text!r}; {advice}")
    return size


def parse_count(option: str, text: str) -> int:
    """A whole number from 1 on.

    Raises:
        ConfigError: another text.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise ConfigError(f"plan: {option} must be a whole number of at least 1, got {text!r}; 8 is one")
    return int(text)


def parse_share(option: str, text: str) -> float:
    """A number from 0 to below 1.

    Raises:
        ConfigError: another text.
    """
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"plan: {option} must be a share from 0 to below 1, got {text!r}; 0.05 is usual")
    return share


def check_name(option: str, name: str, known: Sequence[str]) -> None:
    """Return when ``name`` is one of those that are known.

    Raises:
        ConfigError: it is not.
    """
    if name not in known:
        raise ConfigError(f"plan: {option} must be one of {', '.join(known)}, got {name!r}; choose one of them")


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """The arguments of a factory, from texts such as ``layers=48``; what is no Python literal is taken as a word.

    Raises:
        ConfigError: a text without a name, or a name that is given twice.
    """
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"plan: --arg must be name=value, got {pair!r}; as in --arg layers=48")
        if name in found:
            raise ConfigError(f"plan: the argument {name!r} is given twice; leave one out")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text  # a word
    return found


def parse_precision(name: str) -> Precision | None:
    """The precision of a name in ``PRECISIONS``. Imports torch."""
    from dtrain.shard.precision import Precision

    preset, _, low = f"DEFAULT-{name}".replace("DEFAULT-pure", "PURE").partition("-")
    return None if name == "fp32" else Precision.preset(preset, low)  # type: ignore[arg-type]
