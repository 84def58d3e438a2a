"""What every schedule checks of its arguments when it is made, so that no step has to."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dtrain.errors import ConfigError
from dtrain.schedules.hyper import is_number


def check_finite(where: str, **values: float) -> None:
    """Return when all ``values`` are finite numbers.

    Raises:
        ConfigError: one is not.
    """
    for name, value in values.items():
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} must be a finite number, got {value!r}")


def check_positive(where: str, advice: str, **values: float) -> None:
    """Return when all ``values`` are finite numbers above 0. ``advice`` says what they are for.

    Raises:
        ConfigError: one is not.
    """
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{where}: {name} must be a positive number, got {name}={value!r}; {advice}")


def check_listed(where: str, name: str, values: object) -> None:
    """Return when ``values`` are several, and not one alone.

    Raises:
        ConfigError: they are not.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{where}: {name} must be a list, got {name}={values!r}; write [{values!r}] for one alone")


def check_increasing(where: str, name: str, times: tuple[float, ...]) -> None:
    """Return when ``times`` are numbers of at least 0, each larger than the one before.

    Raises:
        ConfigError: they are not.
    """
    if not all(is_number(time) and 0 <= time < math.inf for time in times) or sorted(set(times)) != list(times):
        raise ConfigError(f"{where}: {name} must be numbers of at least 0 that increase, got {list(times)!r}")
