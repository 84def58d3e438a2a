"""JSON that comes from a file: parsed strictly, and checked field by field against a closed schema.

Whatever is not as expected raises ``DamagedCheckpointError`` that says where. Nothing here trusts its input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn, TypeVar

from dtrain.errors import DamagedCheckpointError

T = TypeVar("T")
MAX_JSON_BYTES = 256 * 2**20  # of one file; the writer refuses more as well
SHA256 = re.compile(r"[0-9a-f]{64}")


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes, where: str) -> Any:
    """The value of a JSON text.

    Raises:
        DamagedCheckpointError: no JSON, too large or nested too deeply, a key given twice, or NaN or Infinity.
    """
    if len(data) > MAX_JSON_BYTES:
        raise DamagedCheckpointError(f"{where}: {len(data)} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_twins, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise DamagedCheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors, so is a number of 5,000 digits
        raise DamagedCheckpointError(f"{where}: not valid JSON ({' '.join(str(error).split())[:200]})") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twin!r} is given twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if value in (inf, -inf):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def record(value: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """``value`` as an object that has exactly the fields ``names``."""
    if type(value) is not dict:
        raise DamagedCheckpointError(f"{where}: needs an object, got {kind(value)}")
    if value.keys() != set(names):
        missing, unknown = sorted(set(names) - value.keys()), sorted(value.keys() - set(names))
        raise DamagedCheckpointError(f"{where}: fields {_listed(missing)} are missing, fields {_listed(unknown)} are unknown")
    return value


def whole(value: Any, where: str) -> int:
    """``value`` as a whole number of at least 0."""
    if type(value) is not int or value < 0:
        raise DamagedCheckpointError(f"{where}: needs a whole number of at least 0, got {kind(value)}")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str] | None = None) -> str:
    """``value`` as a string, of this pattern when one is given."""
    if type(value) is not str or (pattern is not None and pattern.fullmatch(value) is None):
        wanted = "text" if pattern is None else f"text like {pattern.pattern}"
        raise DamagedCheckpointError(f"{where}: needs {wanted}, got {kind(value)}")
    return value


def items(value: Any, where: str, of: Callable[[Any, str], T]) -> tuple[T, ...]:
    """``value`` as a list whose items all pass ``of``."""
    if type(value) is not list:
        raise DamagedCheckpointError(f"{where}: needs a list, got {kind(value)}")
    return tuple(of(item, f"{where}[{at}]") for at, item in enumerate(value))


def wholes(value: Any, where: str) -> tuple[int, ...]:
    """``value`` as a list of whole numbers of at least 0."""
    if type(value) is list and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return items(value, where, whole)


def optional(value: Any, where: str, of: Callable[[Any, str], T]) -> T | None:
    """None, or what ``of`` makes of ``value``."""
    return None if value is None else of(value, where)


def _listed(names: list[str]) -> str:
    """Names for an error message: the first few, shortened."""
    shown = [repr(name) if len(name) <= 60 else f"{name[:57]!r}..." for name in names[:10]]
    return f"[{', '.join(shown)}{', ...' if len(names) > len(shown) else ''}]"


def kind(value: Any) -> str:
    """A short description of a value for an error message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
