"""What each attempt was: its file, and what changed from one attempt to the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dtrain import runs
from dtrain.report.model import Difference
from dtrain.report.reading.events import trimmed
from dtrain.report.reading.lines import Row

_LARGEST = 4 << 20  # bytes
_DIFFERENCES = 200
_MOMENTS = ("format", "attempt", "pid", "started_at", "time", "at")
_DEEP = 6


def read_abouts(folder: Path) -> tuple[dict[int, Row], list[str]]:
    """What the files about attempts say, by number, and what is wrong with them."""
    found: dict[int, Row] = {}
    wrong = []
    paths = sorted((folder / runs.ATTEMPTS).glob("*.json"))
    for path in paths:
        number, where = runs.attempt_of(path.name), f"{runs.ATTEMPTS}/{path.name[:100]}"
        if number is None:
            continue
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
            about = json.loads(path.read_bytes())
            if not isinstance(about, dict):
                raise ValueError("it is no object")
        except (OSError, ValueError, RecursionError) as error:
            wrong.append(f"{where}: cannot be read: {' '.join(str(error).split())[:200]}")
            continue
        said = about.get("format")
        if isinstance(said, int) and said > runs.FORMAT:
            wrong.append(f"{where}: written by a newer version (format {said}, this reads {runs.FORMAT}): there may be more")
        found[number] = trimmed(about, _DEEP)
    return found, wrong


def differences(abouts: Mapping[int, Row]) -> list[Difference]:
    """What is not the same in all attempts, apart from moments and numbers of processes."""
    flat = {number: dict(_flat(about)) for number, about in abouts.items()}
    names = sorted({name for each in flat.values() for name in each})
    changed = [name for name in names if len({repr(each.get(name)) for each in flat.values()}) > 1]
    return [
        Difference(name=name, values={number: each.get(name) for number, each in flat.items()})
        for name in changed[:_DIFFERENCES]
    ]


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if name in _MOMENTS or name.endswith("_at"):
            continue
        if isinstance(each, dict):
            yield from _flat(each, f"{before}{name}.")
        else:
            yield f"{before}{name}", each
