"""Settings of a loop as plain data: what it was started with, to be read next year."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from dtrain.errors import ConfigError
from dtrain.types import Plain

_DEEP = 20
_LONG = 1000  # entries of a list, characters of an object's text


def plain_settings(settings: Any) -> dict[str, Plain] | None:
    """Settings by name; what is no plain data becomes its text.

    Raises:
        ConfigError: neither a mapping, nor a dataclass, nor what argparse makes.
    """
    if settings is None:
        return None
    if not (isinstance(settings, Mapping | Namespace) or (is_dataclass(settings) and not isinstance(settings, type))):
        raise ConfigError(
            f"open_run: settings is a mapping, a dataclass or argparse's Namespace, got {type(settings).__name__}; "
            "as in settings=vars(args)"
        )
    found = plain(settings)
    assert isinstance(found, dict), "a mapping becomes one"
    return found


def plain(value: Any, deep: int = _DEEP) -> Plain:
    """``value`` as JSON has it. Numbers that are not finite become text, and so does all that JSON knows nothing of."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int) and not isinstance(value, Enum):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.name
    if deep and isinstance(value, Mapping | Namespace):
        pairs = value.items() if isinstance(value, Mapping) else vars(value).items()
        return {str(key): plain(each, deep - 1) for key, each in pairs}
    if deep and is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name, None), deep - 1) for field in fields(value)}
    if deep and isinstance(value, list | tuple | Set):
        return [plain(each, deep - 1) for each in list(value)[:_LONG]]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)[:_LONG]
    except Exception:  # noqa: BLE001 - of the user's class; what is written down must not stop training
        return f"<{type(value).__name__}>"
