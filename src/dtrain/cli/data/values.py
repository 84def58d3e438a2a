"""Values of the options of ``dtrain data``, read from text. Each says in one line what came and what to write instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtrain.errors import ConfigError

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


def parse_count(option: str, text: str, *, least: int) -> int:
    """A whole number from ``least`` on.

    Raises:
        ConfigError: another text.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < least:
        raise ConfigError(f"{option} must be a whole number of at least {least}, got {text!r}")
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


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "shard"), counted(12345, "sample")
    ('1 shard', '12,345 samples')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
