"""Sizes as numbers or as fractions of others."""

from __future__ import annotations

from dtrain.errors import ConfigError


def check_whole(value: object, where: str, name: str) -> None:
    """Refuse what is no whole number of at least 0.

    Raises:
        ConfigError: with the name of the argument.
    """
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 0, got {value!r}")


def check_size(value: object, where: str, name: str) -> None:
    """Refuse what is neither a whole number of at least 1 nor a fraction between 0 and 1.

    Raises:
        ConfigError: with the name of the argument.
    """
    whole = type(value) is int and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1, or a fraction between 0 and 1, got {value!r}")


def size_of(value: int | float, of: int) -> int:
    """``value`` itself, or as a fraction of ``of``: rounded down, at least 1.

    >>> size_of(64, 10), size_of(0.25, 10), size_of(0.01, 10)
    (64, 2, 1)
    """
    return value if isinstance(value, int) else max(1, int(value * of))
