"""JSON that comes from a file: parsed strictly, and checked field by field against a closed schema.

Whatever is not as expected raises ``CorruptCheckpointError`` that says where. Nothing here trusts its input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn, TypeVar

from dtrain.errors import CorruptCheckpointError

T = TypeVar("T")
MAX_JSON_BYTES = 256 * 2**20  # of one file; the writer refuses more as well
SHA256 = re.compile(r"[0-9a-f]{64}")


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON text.

    Raises:
        CorruptCheckpointError: no JSON, too large or nested too deeply, a key given twice, or NaN or Infinity.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{where}: {len(data)} bytes of JSON, at most {MAX_JSON_BYTES} are read")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except RecursionError:
        raise CorruptCheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors, so is a number of 5,000 digits
        raise CorruptCheckpointError(f"{where}: not valid JSON ({' '.join(str(error).split())[:200]})") from None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twin!r} is given twice")
    return found


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if value in (inf, -inf):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def read_object(value: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """``value`` as an object that has exactly the fields ``names``."""
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{where}: needs an object, got {describe_value(value)}")
    if value.keys() != set(names):
        missing, unknown = sorted(set(names) - value.keys()), sorted(value.keys() - set(names))
        raise CorruptCheckpointError(
            f"{where}: fields {_format_names(missing)} are missing, fields {_format_names(unknown)} are unknown"
        )
    return value


def read_int(value: Any, where: str) -> int:
    """``value`` as a whole number of at least 0."""
    if type(value) is not int or value < 0:
        raise CorruptCheckpointError(f"{where}: needs a whole number of at least 0, got {describe_value(value)}")
    return value


def read_str(value: Any, where: str, pattern: re.Pattern[str] | None = None) -> str:
    """``value`` as a string, of this pattern when one is given."""
    if type(value) is not str or (pattern is not None and pattern.fullmatch(value) is None):
        wanted = "text" if pattern is None else f"text like {pattern.pattern}"
        raise CorruptCheckpointError(f"{where}: needs {wanted}, got {describe_value(value)}")
    return value


def read_list(value: Any, where: str, of: Callable[[Any, str], T]) -> tuple[T, ...]:
    """``value`` as a list whose items all pass ``of``."""
    if type(value) is not list:
        raise CorruptCheckpointError(f"{where}: needs a list, got {describe_value(value)}")
    return tuple(of(item, f"{where}[{at}]") for at, item in enumerate(value))


def read_ints(value: Any, where: str) -> tuple[int, ...]:
    """``value`` as a list of whole numbers of at least 0."""
    if type(value) is list and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return read_list(value, where, read_int)


def read_optional(value: Any, where: str, of: Callable[[Any, str], T]) -> T | None:
    """None, or what ``of`` makes of ``value``."""
    return None if value is None else of(value, where)


def _format_names(names: list[str]) -> str:
    """Names for an error message: the first few, shortened."""
    shown = [repr(name) if len(name) <= 60 else f"{name[:57]!r}..." for name in names[:10]]
    return f"[{', '.join(shown)}{', ...' if len(names) > len(shown) else ''}]"


def describe_value(value: Any) -> str:
    """A short description of a value for an error message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
