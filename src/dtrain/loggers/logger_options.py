"""Check the arguments that loggers share: ranks, paths, metric filters, optional packages, run ids and settings."""

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
from dtrain.packages import missing_extra_error
from dtrain.run.metadata import settings_to_plain
from dtrain.run.redact import make_redactor

Ranks = Literal[0, "all"]


def is_writer(ranks: Ranks, caller: str) -> bool:
    """Return True if this rank writes.

    Raises:
        ConfigError: ``ranks`` is neither 0 nor "all".
    """
    if ranks not in (0, "all") or isinstance(ranks, bool):
        raise ConfigError(f"{caller}: ranks must be 0 or 'all', got {ranks!r}. Pass ranks=0 to log on rank 0 alone.")
    return ranks == "all" or get_dist_info().rank == 0


def rank_path(path: str | Path, ranks: Ranks, caller: str) -> Path | None:
    """Return the file or folder that this rank writes; None if this rank writes nothing.

    ``{rank}`` in the path makes every rank write. ``{time}`` becomes the current time in UTC.

    Raises:
        ConfigError: the path is on a server, has a field other than rank and time, or is one file for all ranks.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"{caller}: path must be local, got {text!r}. Write to a local path and upload the folder of the run."
        )
    unknown = sorted(set(re.findall(r"\{(\w+)\}", text)) - {"rank", "time"})
    if unknown:
        raise ConfigError(
            f"{caller}: path may have only {{rank}} and {{time}} as fields, got {{{unknown[0]}}} in {text!r}. "
            "Remove the other fields."
        )
    if ranks == "all" and "{rank}" not in text:
        raise ConfigError(f"{caller}: path must contain {{rank}} if ranks='all', got {text!r}. Each rank needs its own file.")
    if not is_writer(ranks, caller) and "{rank}" not in text:
        return None
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path(text.replace("{rank}", str(get_dist_info().rank)).replace("{time}", now))


class MetricFilter:
    """Predicate that selects metrics by name or pattern; None selects all metrics.

    Raises:
        ConfigError: ``select`` is not a list of texts.
    """

    __slots__ = ("_known", "_patterns")

    def __init__(self, select: Sequence[str] | None, caller: str) -> None:
        patterns = None if select is None else tuple(select)
        if isinstance(select, str) or (patterns is not None and not all(isinstance(each, str) for each in patterns)):
            raise ConfigError(
                f"{caller}: select must be a list of names or patterns, got {select!r}. "
                "Pass a list such as ['loss', 'speed/*']."
            )
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
    """Check that a package is installed, without importing the package.

    Raises:
        ConfigError: the package is not installed. A plain folder with the same name, such as W&B's own, does not count.
    """
    try:
        spec = find_spec(package)
    # A broken installation raises these errors.
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise missing_extra_error(f"{package}: needs the package {package}", package)


def import_optional(name: str) -> ModuleType:
    """Import a module of an optional package. Call this function in the main thread only, to avoid concurrent imports."""
    return importlib.import_module(name)


_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_run_id(file: Path) -> str | None:
    """Read the run id in ``file``; None if the file is missing or holds no valid id."""
    try:
        text = storage.read_file(file, limit=1000).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _RUN_ID.fullmatch(text) else None


def write_run_id(file: Path, run_id: str) -> None:
    """Write the run id to ``file`` durably."""
    storage.make_folders(file.parent)
    storage.replace_file(file, f"{run_id}\n".encode())


def redact_settings(settings: Any, caller: str) -> dict[str, Any]:
    """Convert the settings of a run to plain data and redact secrets.

    Raises:
        ConfigError: ``settings`` is neither a mapping, a dataclass nor an ``argparse.Namespace``.
    """
    try:
        plain = settings_to_plain(settings)
    except ConfigError:
        kinds = "a mapping, a dataclass or an argparse.Namespace"
        raise ConfigError(
            f"{caller}: settings must be {kinds}, got {type(settings).__name__}. Pass settings=vars(args), for example."
        ) from None
    redacted = make_redactor((), os.environ).redact_data(plain or {})
    assert isinstance(redacted, dict), "redaction keeps the type"
    return redacted


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings into dotted names.

    >>> flatten_settings({"lr": 0.1, "model": {"width": 64}})
    {'lr': 0.1, 'model.width': 64}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
