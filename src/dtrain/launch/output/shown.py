"""Which ranks the terminal shows: what ``--log-ranks`` says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dtrain.errors import ConfigError

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_log_ranks(text: str, world_size: int) -> frozenset[int]:
    """The global ranks named by ``0,8-15``, ``all`` or ``none``.

    Raises:
        ConfigError: something else, or a rank that the job does not have.
    """
    if text.strip() in ("all", "none"):
        return frozenset(range(world_size) if text.strip() == "all" else ())
    ranks: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"launch: --log-ranks must be ranks as in 0,8-15, or all, or none, got {text!r}; see {part!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"launch: --log-ranks {text!r}: {part.strip()} goes backwards; write {last}-{first}")
        if last >= world_size:
            raise ConfigError(f"launch: --log-ranks {text!r}: there is no rank {last}; the ranks are 0 to {world_size - 1}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def list_ranks(ranks: Iterable[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8; ``none`` for no rank: what ``parse_log_ranks`` reads."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"
