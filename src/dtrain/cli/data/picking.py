"""Which columns of a sample are taken, and text that stands for numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from dtrain.errors import ConfigError, DataError

_NUMBERS: tuple[tuple[str, Callable[[str], Any]], ...] = ((r"u?int\d*|str_int", int), (r"float\d*|double|str_float", float))


def picked(samples: Iterable[Mapping[str, Any]], chosen: Mapping[str, str | None]) -> Iterator[Mapping[str, Any]]:
    """The samples with the chosen columns only; all columns when none is.

    Where the encoding of a column is one of numbers, text is read as one: in CSV everything is text.

    Raises:
        DataError: a sample lacks a column, or has text that is no number.
    """
    readers = {name: _reader(encoding) for name, encoding in chosen.items()}
    for number, sample in enumerate(samples):
        yield {name: _value(sample, name, readers[name], number) for name in chosen} if chosen else sample


def _reader(encoding: str | None) -> Callable[[str], Any] | None:
    return next((read for pattern, read in _NUMBERS if encoding is not None and re.fullmatch(pattern, encoding)), None)


def _value(sample: Mapping[str, Any], name: str, read: Callable[[str], Any] | None, number: int) -> Any:
    if name not in sample:
        raise DataError(f"sample {number} has no column {name!r}; it has {', '.join(map(str, sample))}")
    value = sample[name]
    if read is None or not isinstance(value, str):
        return value
    try:
        return read(value)
    except ValueError:
        raise DataError(f"sample {number}: column {name!r} holds {value!r}, which is no {read.__name__}") from None


def texts(samples: Iterable[Mapping[str, Any]], column: str) -> Iterator[str | bytes]:
    """The text of each sample.

    Raises:
        DataError: a sample lacks the column, or has something else in it.
    """
    for number, sample in enumerate(samples):
        text = _value(sample, column, None, number)
        if not isinstance(text, str | bytes):
            raise DataError(f"sample {number}: column {column!r} holds {type(text).__name__}, not text; see --text")
        yield text


def typed(
    samples: Iterator[Mapping[str, Any]], chosen: Mapping[str, str | None], form: str
) -> tuple[Iterator[Mapping[str, Any]], dict[str, str] | None]:
    """The samples, and what the columns are to be written as: of MDS encodings, seen from the first sample where none is given.

    Raises:
        ConfigError: a format that needs a type for every column, and some have none.
    """
    if form not in ("mds", "parquet"):
        return samples, None  # the types are only those that text is read as
    known = {name: encoding for name, encoding in chosen.items() if encoding is not None}
    if len(known) == len(chosen) or (first := next(samples, None)) is None:
        return samples, known
    if form != "mds":
        missing = next(name for name in chosen if name not in known)
        raise ConfigError(f"--columns: of {form} all columns get a type, or none does; {missing!r} has none")
    from dtrain.data.stream.formats.mds_values import encoding_for

    found = {name: known[name] if name in known else encoding_for(first[name]) for name in chosen}
    return chain([first], samples), found
