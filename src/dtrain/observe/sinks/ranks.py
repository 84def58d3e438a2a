"""Which rank writes, and where: ``{rank}`` and ``{time}`` in the name of a file or folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from dtrain.dist.init import current
from dtrain.errors import ConfigError

Ranks = Literal[0, "all"]


def writes(ranks: Ranks, where: str) -> bool:
    """Whether this rank does.

    Raises:
        ConfigError: neither 0 nor "all".
    """
    if ranks not in (0, "all") or isinstance(ranks, bool):
        raise ConfigError(f"{where}: ranks must be 0 or 'all', got {ranks!r}")
    return ranks == "all" or current().rank == 0


def path_here(path: str | Path, ranks: Ranks, where: str) -> Path | None:
    """What this rank writes to, None when it writes nothing. ``{rank}`` in the path means all ranks.

    Raises:
        ConfigError: a place on a server; a field other than rank and time; all ranks in one file.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(f"{where}: needs a local path, got {text!r}; write locally, and have the run's folder uploaded")
    unknown = sorted(set(re.findall(r"\{(\w+)\}", text)) - {"rank", "time"})
    if unknown:
        raise ConfigError(f"{where}: a path may have {{rank}} and {{time}} in it, got {{{unknown[0]}}} in {text!r}")
    if ranks == "all" and "{rank}" not in text:
        raise ConfigError(f"{where}: ranks='all' needs {{rank}} in the path, got {text!r}: each rank has a file of its own")
    if not writes(ranks, where) and "{rank}" not in text:
        return None
    began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path(text.replace("{rank}", str(current().rank)).replace("{time}", began))


class Chosen:
    """Which metrics are shown: all with None, else those that match one of the patterns.

    Raises:
        ConfigError: no patterns.
    """

    __slots__ = ("_known", "_patterns")

    def __init__(self, names: Sequence[str] | None, where: str) -> None:
        patterns = None if names is None else tuple(names)
        if isinstance(names, str) or (patterns is not None and not all(isinstance(each, str) for each in patterns)):
            raise ConfigError(f"{where}: names is a list of names or patterns, as in ['loss', 'speed/*'], got {names!r}")
        self._patterns = patterns
        self._known: dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        if self._patterns is None:
            return True
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return known
