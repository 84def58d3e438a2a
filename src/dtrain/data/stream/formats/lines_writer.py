"""Writes JSON and text by lines."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dtrain.data.stream.formats.samples import Naming, Sample, check_mapping
from dtrain.errors import ConfigError
from dtrain.types import Plain


class LinesWriter:
    """See ``Writer``."""

    sample_bytes = 0
    shard_bytes = 0

    def __init__(self, form: str, settings: dict[str, Plain]) -> None:
        self.suffix = ".jsonl" if form == "jsonl" else ".txt"
        self.details = settings
        self._line = _json_line if form == "jsonl" else _text_line

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """The line with its end."""
        check_mapping(sample, number)
        return self._line(sample, number) + b"\n"

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The lines."""
        return b"".join(encoded)


def _json_line(sample: Sample, number: int) -> bytes:
    try:
        text = json.dumps(dict(sample), ensure_ascii=False, allow_nan=False)
        return text.encode() if _is_unicode(text) else json.dumps(dict(sample)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"sample {number}: JSON cannot hold it: {error}") from error


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can hold only as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_line(sample: Sample, number: int) -> bytes:
    text = sample.get("text")
    if not isinstance(text, str) or len(sample) != 1:
        raise ConfigError(
            f"sample {number}: text by lines has the one column 'text', a str, got {', '.join(sample)}; use jsonl"
        )
    if "\n" in text or text.endswith("\r"):
        raise ConfigError(f"sample {number}: has a line end in its text; use jsonl")
    with Naming("text", number):
        return text.encode()
