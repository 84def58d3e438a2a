"""The option ``ignore``: patterns of names in the model, and of parts of a checkpoint, that a load leaves as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dtrain.checkpoint import layout
from dtrain.errors import ConfigError
from dtrain.names import matcher

OPTIMIZER, RNG, SLICES = "optimizer", "rng", "slices"
_PART = re.compile(rf"{OPTIMIZER}|{RNG}|({layout.EXTRA}|{SLICES}|{layout.STATES})/.*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """The patterns of ``ignore``. A pattern is for parts or for names of the model: ``"**"`` fits every name and no part.

    Args:
        patterns: the patterns as they were given.
        name: returns True if a name of the model is ignored.
        part: returns True if a part is ignored: ``"optimizer"``, ``"rng"``, or a key such as ``"extra/loader"``,
            ``"slices/ema"`` and ``"states/critic"``.
    """

    patterns: tuple[str, ...]
    name: Callable[[str], bool]
    part: Callable[[str], bool]

    def check_used(self, names: Iterable[str], parts: Iterable[str], *, where: str) -> None:
        """Refuse a pattern that fits none of the names and parts that the state or the checkpoint has.

        Raises:
            ConfigError: the first such pattern.
        """
        known_names, known_parts = list(names), list(parts)
        for pattern in self.patterns:
            if not any(map(matcher([pattern], where=where), known_parts if _is_part(pattern) else known_names)):
                raise ConfigError(
                    f"{where}: nothing here or in the checkpoint fits {pattern!r}; write a name of the model, 'extra/<name>', "
                    "'slices/<transform>', 'states/<name>', 'optimizer' or 'rng' (* is text without a dot, ** any text)"
                )


def read_ignored(patterns: Sequence[str], *, where: str) -> Ignored:
    """Sort the patterns by what they are for.

    Raises:
        ConfigError: a text instead of a list, or a pattern that is no text.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"{where} takes a list of patterns, got the text {patterns!r}; write [{patterns!r}]")
    matcher(patterns, where=where)
    return Ignored(
        patterns=tuple(patterns),
        name=matcher([pattern for pattern in patterns if not _is_part(pattern)], where=where),
        part=matcher([pattern for pattern in patterns if _is_part(pattern)], where=where),
    )


def _is_part(pattern: str) -> bool:
    return _PART.fullmatch(pattern) is not None
