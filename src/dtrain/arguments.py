"""Check arguments, format and parse quantities, and warn in the line of the user's loop.

>>> check_int("build_loader", "num_workers", 4, minimum=0)
4
>>> parse_bytes("--memory", "80GiB"), format_bytes(3 * 2**29)
(85899345920, '1.5 GiB')
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from types import FrameType
from typing import ParamSpec, SupportsIndex, TypeVar

from dtrain.errors import ConfigError
from dtrain.lazy_imports import FOREIGN_ARGUMENTS, FOREIGN_VALUES, find_line

Choice = TypeVar("Choice")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# Packages whose lines a warning never names: a loop calls dtrain through them, or a thread of them does.
_LIBRARIES = frozenset({"dtrain", "torch"}) | sys.stdlib_module_names


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line of the script that called dtrain; in a thread without a line of it, with the caller's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)  # noqa: TID251


def explain_arguments(fn: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function so that arguments that do not fit its signature raise a line that names the right arguments."""

    @wraps(fn)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return fn(*args, **kwargs)
        except TypeError:
            # The arguments are compared with the signature after a failure only, so that a call and an import cost nothing.
            signature = inspect.signature(fn)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                caller = fn.__name__ if fn.__name__ != "__init__" else fn.__qualname__.split(".")[-2]
                raise TypeError(_describe_arguments(caller, signature, args, kwargs)) from None
            raise

    return checked


def explain_fields(record: type[Result]) -> type[Result]:
    """Decorate a dataclass that users make, as ``explain_arguments`` does a function. Mutates: ``record``."""
    record.__init__ = explain_arguments(record.__init__)  # type: ignore[method-assign]
    return record


def _describe_arguments(caller: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Describe arguments that do not fit ``signature``: unknown names, missing arguments, too many by position."""
    # The methods of a Checkpointer take the arguments of the functions.
    foreign = FOREIGN_ARGUMENTS.get({"save": "save_sharded", "load": "load_sharded"}.get(caller, caller), {})
    parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any_number = len(parameters) < len(signature.parameters)
    names = [p.name for p in parameters if p.name != "self" and not p.name.startswith("_")]
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    filled = {*by_position[: len(args)], *kwargs}
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in filled]
    problems, remedies = [], []
    for name in (name for name in kwargs if name not in names):
        problems.append(f"has no argument {name}")
        close = get_close_matches(name, names, n=1)
        remedies.append(find_line(foreign, name) or (f"Use {close[0]}." if close else f"The arguments are {', '.join(names)}."))
    if len(args) > len(by_position) and not takes_any_number:
        allowed = [name for name in by_position if name != "self"]
        problems.append(f"takes only {' and '.join(allowed) or 'named arguments'} without a name")
        remedies.append(f"Name the others, for example {names[len(allowed)]}=.")
    if missing:
        problems.append(f"needs {' and '.join(missing)}")
        remedies.append(f"Pass {', '.join(f'{name}=' for name in missing)}.")
    return f"{caller}: {', '.join(problems)}. {' '.join(dict.fromkeys(remedies))}"


def check_int(caller: str, name: str, value: object, *, minimum: int = 1, maximum: int | None = None, advice: str = "") -> int:
    """Return ``value`` as an int.

    Args:
        caller: function that got the argument, for the error.
        name: name of the argument.
        value: argument. A bool is no integer; an integer of numpy is.
        minimum: least allowed value.
        maximum: greatest allowed value; None sets no limit.
        advice: last sentence of the error.

    Raises:
        ConfigError: ``value`` is not an integer within the limits.
    """
    # The check of a protocol takes several microseconds, and every step calls this function.
    if type(value) is int:
        number: int | None = value
    else:
        number = operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ConfigError(f"{caller}: {name} must be an integer {limits}, got {value!r}.{advice and ' '}{advice}")
    return number


def check_number(
    caller: str,
    name: str,
    value: object,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    advice: str = "",
) -> float:
    """Return the finite number ``value`` as a float.

    Args:
        caller: function that got the argument, for the error.
        name: name of the argument.
        value: argument. A bool is no number; a number of numpy is.
        minimum: least allowed value.
        above: the value must be greater.
        maximum: greatest allowed value.
        below: the value must be less.
        advice: last sentence of the error.

    Raises:
        ConfigError: ``value`` is not a finite number within the limits.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    # Methods of batches call this function in every step, so a valid number is returned at once.
    is_valid = math.isfinite(number) and (minimum is None or number >= minimum) and (above is None or number > above)
    if is_valid and (maximum is None or number <= maximum) and (below is None or number < below):
        return number
    limits = ((minimum, "at least"), (above, "above"), (maximum, "at most"), (below, "below"))
    needed = " and ".join(f"{word} {limit:g}" for limit, word in limits if limit is not None)
    raise ConfigError(
        f"{caller}: {name} must be a finite number{needed and ' '}{needed}, got {value!r}.{advice and ' '}{advice}"
    )


def check_choice(caller: str, name: str, value: object, choices: Iterable[Choice]) -> Choice:
    """Return the element of ``choices`` that equals ``value``.

    Raises:
        ConfigError: ``value`` is not in ``choices``.
    """
    values = list(choices)
    for choice in values:
        if type(choice) is type(value) and choice == value:
            return choice
    words = {str(choice): str(choice) for choice in values if isinstance(choice, str)}
    meant = find_line(FOREIGN_VALUES.get(f"{caller} {name}", {}), str(value)) or find_line(words, str(value))
    advice = f" Pass {name}={meant!r}." if meant else ""
    raise ConfigError(f"{caller}: {name} must be {join_or(map(repr, values))}, got {value!r}.{advice}")


def check_choices(caller: str, name: str, values: Sequence[Choice], choices: Iterable[object]) -> tuple[Choice, ...]:
    """Return ``values``, a list with at least one of ``choices``.

    Raises:
        ConfigError: ``values`` is a text, empty, or contains another value.
    """
    known = list(choices)
    if isinstance(values, str) or not values or any(value not in known for value in values):
        raise ConfigError(
            f"{caller}: {name} must be a list of names from {', '.join(map(str, known))}, got {values!r}. "
            "Choose from these names."
        )
    return tuple(values)


def join_or(words: Iterable[str]) -> str:
    """Join words for a sentence: ``"a"``, ``"a or b"``, ``"a, b or c"``."""
    *rest, last = words
    return f"{', '.join(rest)} or {last}" if rest else last


_BYTE_UNITS = {"": 1, "B": 1}
_BYTE_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_BYTE_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(name: str, text: str) -> int:
    """Parse a positive number of bytes: ``"64MiB"``, ``"1.5 GB"``, ``"1024"``.

    Raises:
        ConfigError: the text is not a size. ``name`` begins the error.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _BYTE_UNITS.get(match[2] or "", 0)) if match else 0
    if size < 1:
        raise ConfigError(f"{name} must be a size such as 512MiB or 5GB, got {text!r}. Write a number and a unit.")
    return size


def format_bytes(size: float) -> str:
    """Format a number of bytes with three significant digits: ``"17 B"``, ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB"


def format_count(number: int, one: str, several: str = "") -> str:
    """Format a count with its noun: ``"1 shard"``, ``"12,345 samples"``, ``"2 batches"`` (``several="batches"``)."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def format_duration(seconds: float) -> str:
    """Format a duration: ``"17 ms"``, ``"0.4 s"``, ``"12 s"``, ``"5 m 20 s"``, ``"3 h 05 m"``, ``"2 d 04 h"``."""
    if 0.0005 <= seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, size, smaller_unit, smaller in (("m", 60, "s", 1), ("h", 3600, "m", 60)):
        if whole < size * (60 if unit == "m" else 24):
            return f"{whole // size} {unit} {whole % size // smaller:02d} {smaller_unit}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def single_line(message: object) -> str:
    """Return a message, such as an error, without line ends and repeated blanks."""
    return " ".join(str(message).split())


def format_error_line(error: BaseException) -> str:
    """Format the class and message of an error on one line of at most 2,000 characters."""
    return f"{type(error).__name__}: {single_line(error)}"[:2000]
