"""Which rank writes, and where: ``{rank}`` and ``{time}`` in the name of a file or folder.

Packages that only some sinks need: found when the sink is made, so that a missing one is told at once, on all ranks.

Which run of a tracking service this is: its id stays in a file, so that a resumed run goes on with it. And its settings."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from dtrain import storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.run.metadata import settings_to_plain
from dtrain.run.redact import make_redactor

Ranks = Literal[0, "all"]


def is_writer(ranks: Ranks, caller: str) -> bool:
    """Whether this rank does.

    Raises:
        ConfigError: neither 0 nor "all".
    """
    if ranks not in (0, "all") or isinstance(ranks, bool):
        raise ConfigError(f"{caller}: ranks must be 0 or 'all', got {ranks!r}")
    return ranks == "all" or get_dist_info().rank == 0


def rank_path(path: str | Path, ranks: Ranks, caller: str) -> Path | None:
    """What this rank writes to, None when it writes nothing. ``{rank}`` in the path means all ranks.

    Raises:
        ConfigError: a place on a server; a field other than rank and time; all ranks in one file.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(f"{caller}: needs a local path, got {text!r}; write locally, and have the run's folder uploaded")
    unknown = sorted(set(re.findall(r"\{(\w+)\}", text)) - {"rank", "time"})
    if unknown:
        raise ConfigError(f"{caller}: a path may have {{rank}} and {{time}} in it, got {{{unknown[0]}}} in {text!r}")
    if ranks == "all" and "{rank}" not in text:
        raise ConfigError(f"{caller}: ranks='all' needs {{rank}} in the path, got {text!r}: each rank has a file of its own")
    if not is_writer(ranks, caller) and "{rank}" not in text:
        return None
    began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path(text.replace("{rank}", str(get_dist_info().rank)).replace("{time}", began))


class MetricFilter:
    """Which metrics are shown: all with None, else those that match one of the patterns.

    Raises:
        ConfigError: no patterns.
    """

    __slots__ = ("_known", "_patterns")

    def __init__(self, names: Sequence[str] | None, caller: str) -> None:
        patterns = None if names is None else tuple(names)
        if isinstance(names, str) or (patterns is not None and not all(isinstance(each, str) for each in patterns)):
            raise ConfigError(f"{caller}: names is a list of names or patterns, as in ['loss', 'speed/*'], got {names!r}")
        self._patterns = patterns
        self._known: dict[str, bool] = {}

    def __call__(self, name: str) -> bool:
        if self._patterns is None:
            return True
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return known


def require_package(package: str) -> None:
    """See that a package is installed, without importing it.

    Raises:
        ConfigError: it is not. A folder of its name, such as W&B makes one, is no package.
    """
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # half an installation
        found = None
    if found is None or found.origin is None:
        raise missing_extra_error(f"{package}: needs the package {package}", package)


def import_optional(name: str) -> ModuleType:
    """A module of such a package. In the main thread: what it imports, others may be importing, too."""
    return importlib.import_module(name)


_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_run_id(file: Path) -> str | None:
    """The id in ``file``; None when there is none that could be one."""
    try:
        text = storage.read_file(file, limit=1000).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _RUN_ID.fullmatch(text) else None


def write_run_id(file: Path, run_id: str) -> None:
    """Write it down, durably."""
    storage.make_folders(file.parent)
    storage.replace_file(file, f"{run_id}\n".encode())


def redact_settings(settings: Any, caller: str) -> dict[str, Any]:
    """The run's settings as plain data, without what looks like a secret.

    Raises:
        ConfigError: neither a mapping, nor a dataclass, nor what argparse makes.
    """
    try:
        found = settings_to_plain(settings)
    except ConfigError:
        kinds = "a mapping, a dataclass or argparse's Namespace"
        raise ConfigError(f"{caller}: settings is {kinds}, got {type(settings).__name__}; as in settings=vars(args)") from None
    shown = make_redactor((), os.environ).redact_data(found or {})
    assert isinstance(shown, dict), "as it was"
    return shown


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> flat({"lr": 0.1, "model": {"width": 64}})
    {'lr': 0.1, 'model.width': 64}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_settings(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
