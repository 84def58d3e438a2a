"""Errors name the command that they come from.

Values of the options of ``dtrain data``, read from text. Each says in one line what came and what to write instead. Pure.

Which columns of a sample are taken, and text that stands for numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from dtrain.errors import ConfigError, DataError


@contextmanager
def prefix_data_errors(command: str) -> Iterator[None]:
    """Put the command before the message of an error."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data: {command}: {error}") from error
    except OSError as error:
        raise DataError(f"data: {command}: {error}") from error


_UNITS = {"": 1, "B": 1, **{f"{letter}IB": 2 ** (10 * (at + 1)) for at, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}B": 10 ** (3 * (at + 1)) for at, letter in enumerate("KMGT")}


def parse_size(option: str, text: str) -> int:
    """A number of bytes, with or without a unit.

    >>> parse_size("--size-limit", "64MiB"), parse_size("--size-limit", "1.5 kb")
    (67108864, 1500)

    Raises:
        ConfigError: none.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2] or "", 0)) if match else 0
    if size < 1:
        raise ConfigError(f"{option} must be a size as in 64MiB or 100MB, got {text!r}")
    return size


def parse_data_count(option: str, text: str, *, minimum: int) -> int:
    """A whole number from ``minimum`` on.

    Raises:
        ConfigError: another text.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < minimum:
        raise ConfigError(f"{option} must be a whole number of at least {minimum}, got {text!r}")
    return int(text)


def parse_choice(option: str, text: str | None, choices: Sequence[str]) -> str | None:
    """One of the choices; None when nothing was given.

    Raises:
        ConfigError: another text.
    """
    if text is not None and text not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(choices)}, got {text!r}")
    return text


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Names with commas between; none at all of ``none``.

    Raises:
        ConfigError: one is empty or comes twice.
    """
    if text.strip() == "none":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{option} takes different names with commas between, or none; got {text!r}")
    return names


def parse_columns(option: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Columns and their encodings, None where none is given: ``NAME`` or ``NAME:ENCODING``, with commas between.

    >>> parse_columns("--columns", ["text,label:int", "mask:ndarray:uint8:4,4,place"])
    {'text': None, 'label': 'int', 'mask': 'ndarray:uint8:4,4', 'place': None}

    Raises:
        ConfigError: a name is empty, or comes twice.
    """
    columns: dict[str, str | None] = {}
    for text in texts:
        for piece in re.split(r",(?![0-9]+(?:,|$))", text):  # a comma before a number is one of a shape
            name, colon, encoding = (part.strip() for part in piece.partition(":"))
            if not name or (colon and not encoding) or name in columns:
                raise ConfigError(f"{option} takes NAME or NAME:ENCODING with commas between, each once; got {text!r}")
            columns[name] = encoding or None
    return columns


def format_count(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "shard"), counted(12345, "sample")
    ('1 shard', '12,345 samples')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


_NUMBER_ENCODINGS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"u?int\d*|str_int", int),
    (r"float\d*|double|str_float", float),
)


def select_columns(samples: Iterable[Mapping[str, Any]], chosen: Mapping[str, str | None]) -> Iterator[Mapping[str, Any]]:
    """The samples with the chosen columns only; all columns when none is.

    Where the encoding of a column is one of numbers, text is read as one: in CSV everything is text.

    Raises:
        DataError: a sample lacks a column, or has text that is no number.
    """
    readers = {name: _number_parser(encoding) for name, encoding in chosen.items()}
    for number, sample in enumerate(samples):
        yield {name: _read_value(sample, name, readers[name], number) for name in chosen} if chosen else sample


def _number_parser(encoding: str | None) -> Callable[[str], Any] | None:
    return next((read for pattern, read in _NUMBER_ENCODINGS if encoding is not None and re.fullmatch(pattern, encoding)), None)


def _read_value(sample: Mapping[str, Any], name: str, read: Callable[[str], Any] | None, number: int) -> Any:
    if name not in sample:
        raise DataError(f"sample {number} has no column {name!r}; it has {', '.join(map(str, sample))}")
    value = sample[name]
    if read is None or not isinstance(value, str):
        return value
    try:
        return read(value)
    except ValueError:
        raise DataError(f"sample {number}: column {name!r} holds {value!r}, which is no {read.__name__}") from None


def iter_texts(samples: Iterable[Mapping[str, Any]], column: str) -> Iterator[str | bytes]:
    """The text of each sample.

    Raises:
        DataError: a sample lacks the column, or has something else in it.
    """
    for number, sample in enumerate(samples):
        text = _read_value(sample, column, None, number)
        if not isinstance(text, str | bytes):
            raise DataError(f"sample {number}: column {column!r} holds {type(text).__name__}, not text; see --text")
        yield text


def infer_encodings(
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
    from dtrain.data.stream.formats.mds_encodings import infer_encoding

    found = {name: known[name] if name in known else infer_encoding(first[name]) for name in chosen}
    return chain([first], samples), found
