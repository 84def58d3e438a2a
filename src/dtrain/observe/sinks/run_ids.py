"""Which run of a tracking service this is: its id stays in a file, so that a resumed run goes on with it. And its settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.observe.run.secrets import redaction
from dtrain.observe.run.settings import plain_settings

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def kept_id(file: Path) -> str | None:
    """The id in ``file``; None when there is none that could be one."""
    try:
        text = storage.read_file(file, limit=1000).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _ID.fullmatch(text) else None


def keep_id(file: Path, run_id: str) -> None:
    """Write it down, durably."""
    storage.make_folders(file.parent)
    storage.replace_file(file, f"{run_id}\n".encode())


def settings_of(settings: Any, where: str) -> dict[str, Any]:
    """The run's settings as plain data, without what looks like a secret.

    Raises:
        ConfigError: neither a mapping, nor a dataclass, nor what argparse makes.
    """
    try:
        found = plain_settings(settings)
    except ConfigError:
        kinds = "a mapping, a dataclass or argparse's Namespace"
        raise ConfigError(f"{where}: settings is {kinds}, got {type(settings).__name__}; as in settings=vars(args)") from None
    shown = redaction((), os.environ).plain(found or {})
    assert isinstance(shown, dict), "as it was"
    return shown


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> flat({"lr": 0.1, "model": {"width": 64}})
    {'lr': 0.1, 'model.width': 64}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
