"""Parse JSON files strictly, and check every field against a closed schema.

msgspec checks the types of fields. Duplicate keys, NaN and the size limit are checked here, because msgspec accepts them.

Input is never trusted: any deviation raises ``CorruptCheckpointError`` with the location in the file.
"""

from __future__ import annotations

import json
from math import inf
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from dtrain.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")
# The limit is per file, and the writer refuses larger files, too.
MAX_JSON_BYTES = 256 * 2**20
Count = Annotated[int, msgspec.Meta(ge=0)]


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON text of a value: keys sorted, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_limited(value: Any, location: str) -> bytes:
    """Encode a value as compact JSON.

    Raises:
        CheckpointError: more JSON than ``parse_json`` accepts.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{location}: plain values and index must be at most {MAX_JSON_BYTES} bytes, got {len(data)}. "
            "Store large plain data as tensors."
        )
    return data


def parse_json(data: bytes, location: str) -> Any:
    """Parse a JSON text.

    Raises:
        CorruptCheckpointError: invalid JSON, too large, nested too deeply, a duplicate key, NaN or Infinity.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{location}: JSON must be at most {MAX_JSON_BYTES} bytes, got {len(data)}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except RecursionError:
        raise CorruptCheckpointError(f"{location}: JSON is nested too deeply") from None
    # JSONDecodeError and UnicodeDecodeError are ValueErrors. An integer of 5,000 digits raises ValueError, too.
    except ValueError as error:
        raise CorruptCheckpointError(f"{location}: not valid JSON ({' '.join(str(error).split())[:200]})") from None


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {duplicate!r}")
    return found


def _parse_finite_float(text: str) -> float:
    value = float(text)
    if value in (inf, -inf):
        raise ValueError(f"{text[:40]} is too large for a float")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not allowed")


def compile_schema(kind: type[T]) -> type[T]:
    """Evaluate the annotations of a struct at import, so that reading an untrusted file compiles no code."""
    msgspec.json.Decoder(kind)
    return kind


def convert(value: Any, kind: type[T], location: str) -> T:
    """Convert parsed JSON to a frozen struct of msgspec, without casts: ``True`` is no integer.

    Raises:
        CorruptCheckpointError: a missing or unknown field, or a field of another type; names the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.strip("`.")
        raise CorruptCheckpointError(f"{location}: {field}{': ' if field else ''}{message}") from None


def read_object(value: Any, location: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return ``value`` as an object with exactly the fields ``names``."""
    if type(value) is not dict:
        raise CorruptCheckpointError(f"{location}: must be an object, got {describe_value(value)}")
    if value.keys() != set(names):
        missing, unknown = sorted(set(names) - value.keys()), sorted(value.keys() - set(names))
        raise CorruptCheckpointError(
            f"{location}: must have exactly the expected fields. Missing: {_format_names(missing)}. "
            f"Unknown: {_format_names(unknown)}."
        )
    return value


def read_int(value: Any, location: str) -> int:
    """Return ``value`` as an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise CorruptCheckpointError(f"{location}: must be an integer of at least 0, got {describe_value(value)}")
    return value


def read_ints(value: Any, location: str) -> tuple[int, ...]:
    """Return ``value`` as a tuple of integers of at least 0."""
    if type(value) is not list:
        raise CorruptCheckpointError(f"{location}: must be a list, got {describe_value(value)}")
    return tuple(read_int(item, f"{location}[{at}]") for at, item in enumerate(value))


def _format_names(names: list[str]) -> str:
    """Format the first ten names for an error message, each shortened."""
    shown = [repr(name) if len(name) <= 60 else f"{name[:57]!r}..." for name in names[:10]]
    return f"[{', '.join(shown)}{', ...' if len(names) > len(shown) else ''}]"


def describe_value(value: Any) -> str:
    """Describe a value shortly for an error message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
