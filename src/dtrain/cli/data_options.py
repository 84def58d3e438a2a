"""Parse option values of ``dtrain data``, select columns of samples, and prefix errors with the command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from dtrain.errors import ConfigError, DataError


@contextmanager
def prefix_data_errors(command: str) -> Iterator[None]:
    """Prefix error messages with the command."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data: {command}: {error}") from error
    except OSError as error:
        raise DataError(f"data: {command}: {error}") from error


_UNITS = {"": 1, "B": 1, **{f"{letter}IB": 2 ** (10 * (power + 1)) for power, letter in enumerate("KMGT")}}
_UNITS |= {f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate("KMGT")}


def parse_size(option: str, text: str) -> int:
    """Parse a number of bytes, with or without a unit.

    >>> parse_size("--size-limit", "64MiB"), parse_size("--size-limit", "1.5 kb")
    (67108864, 1500)

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2] or "", 0)) if match else 0
    if size < 1:
        raise ConfigError(f"{option} must be a size as in 64MiB or 100MB, got {text!r}. Pass a size.")
    return size


def parse_data_count(option: str, text: str, *, minimum: int) -> int:
    """Parse an integer of at least ``minimum``.

    Raises:
        ConfigError: the text is not such an integer.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < minimum:
        raise ConfigError(f"{option} must be an integer of at least {minimum}, got {text!r}. Pass such an integer.")
    return int(text)


def parse_choice(option: str, text: str | None, choices: Sequence[str]) -> str | None:
    """Check that ``text`` is None or one of ``choices``, and return it.

    Raises:
        ConfigError: another text.
    """
    if text is not None and text not in choices:
        raise ConfigError(f"{option} must be one of {', '.join(choices)}, got {text!r}. Choose one of them.")
    return text


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Parse names separated by commas; ``none`` means no name.

    Raises:
        ConfigError: a name is empty or repeated.
    """
    if text.strip() == "none":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{option} must be different names with commas between, or none, got {text!r}. Name each once.")
    return names


def parse_columns(option: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Parse columns and their optional encodings: ``NAME`` or ``NAME:ENCODING``, separated by commas.

    >>> parse_columns("--columns", ["text,label:int", "mask:ndarray:uint8:4,4,place"])
    {'text': None, 'label': 'int', 'mask': 'ndarray:uint8:4,4', 'place': None}

    Raises:
        ConfigError: a name is empty or repeated.
    """
    columns: dict[str, str | None] = {}
    for text in texts:
        # A comma before a number belongs to a shape.
        for piece in re.split(r",(?![0-9]+(?:,|$))", text):
            name, colon, encoding = (part.strip() for part in piece.partition(":"))
            if not name or (colon and not encoding) or name in columns:
                raise ConfigError(
                    f"{option} must be NAME or NAME:ENCODING with commas between, got {text!r}. Name each column once."
                )
            columns[name] = encoding or None
    return columns


def format_count(count: int, noun: str) -> str:
    """Format a number of items.

    >>> format_count(1, "shard"), format_count(12345, "sample")
    ('1 shard', '12,345 samples')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


_NUMBER_ENCODINGS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"u?int\d*|str_int", int),
    (r"float\d*|double|str_float", float),
)


def select_columns(samples: Iterable[Mapping[str, Any]], selected: Mapping[str, str | None]) -> Iterator[Mapping[str, Any]]:
    """Yield the samples with the chosen columns only, or with all columns if none is chosen.

    If the encoding of a column is a number, text is parsed as a number, because CSV contains only text.

    Raises:
        DataError: a sample lacks a column, or has text that is not a number.
    """
    readers = {name: _number_parser(encoding) for name, encoding in selected.items()}
    for number, sample in enumerate(samples):
        yield {name: _read_value(sample, name, readers[name], number) for name in selected} if selected else sample


def _number_parser(encoding: str | None) -> Callable[[str], Any] | None:
    return next((read for pattern, read in _NUMBER_ENCODINGS if encoding is not None and re.fullmatch(pattern, encoding)), None)


def _read_value(sample: Mapping[str, Any], name: str, read: Callable[[str], Any] | None, number: int) -> Any:
    if name not in sample:
        raise DataError(f"sample {number} has no column {name!r}. Its columns are {', '.join(map(str, sample))}.")
    value = sample[name]
    if read is None or not isinstance(value, str):
        return value
    try:
        return read(value)
    except ValueError:
        raise DataError(f"sample {number}: column {name!r} holds {value!r}, which is not {read.__name__}") from None


def iter_texts(samples: Iterable[Mapping[str, Any]], column: str) -> Iterator[str | bytes]:
    """Yield the text of each sample.

    Raises:
        DataError: a sample lacks the column, or the column has no text.
    """
    for number, sample in enumerate(samples):
        text = _read_value(sample, column, None, number)
        if not isinstance(text, str | bytes):
            raise DataError(f"sample {number}: column {column!r} must hold text, got {type(text).__name__}. Use --text.")
        yield text


def infer_encodings(
    samples: Iterator[Mapping[str, Any]], selected: Mapping[str, str | None], form: str
) -> tuple[Iterator[Mapping[str, Any]], dict[str, str] | None]:
    """Return the samples and the encodings of their columns; missing MDS encodings are inferred from the first sample.

    Raises:
        ConfigError: the format needs a type for every column, and some columns have none.
    """
    if form not in ("mds", "parquet"):
        # The types only determine how text is parsed.
        return samples, None
    known = {name: encoding for name, encoding in selected.items() if encoding is not None}
    if len(known) == len(selected) or (first := next(samples, None)) is None:
        return samples, known
    if form != "mds":
        missing = next(name for name in selected if name not in known)
        raise ConfigError(f"--columns: {form} needs types for all columns or for none, but {missing!r} has no type. Add types.")
    from dtrain.data.stream.formats.mds_encodings import infer_encoding

    encodings = {name: known[name] if name in known else infer_encoding(first[name]) for name in selected}
    return chain([first], samples), encodings
