"""What happened in a run: checkpoints, and all other events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.report.model import Checkpoint, Event
from dtrain.report.reading.attempts import Together
from dtrain.report.reading.lines import Row

CHECKPOINTS, EVENTS = 1000, 1000
OF_ALL_RANKS = {"save", "committed", "resumed", "evaluated", "stop", "desync", "early_stop"}  # each rank tells of the same
_OWN = {"kind", "attempt", "at", "name", "step"}
_TEXT, _FIELDS, _DEEP = 500, 20, 3


def checkpoints(found: Sequence[Together], *, started_at: float) -> tuple[list[Checkpoint], int]:
    """The checkpoints in order of time, and how many there were."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for each, _, event in _all(found):
        step = _step(event)
        if event["name"] not in ("save", "committed") or step is None:
            continue
        row = rows.setdefault((each.number, step), {})
        if event["name"] == "save":
            row["at"] = max(row.get("at", 0.0), event["at"])
            row["held_s"] = max(row.get("held_s", 0.0), _amount(event.get("held_s")) or 0.0)
        else:
            row.setdefault("at", event["at"])
            row["duration_s"], row["bytes"] = _amount(event.get("seconds")), _amount(event.get("bytes"))
    all_of_them = [
        Checkpoint(
            step=step,
            attempt=attempt,
            at=row["at"] - started_at,
            held_s=row.get("held_s"),
            duration_s=row.get("duration_s"),
            bytes=None if row.get("bytes") is None else int(row["bytes"]),
        )
        for (attempt, step), row in rows.items()
    ]
    longest = sorted(all_of_them, key=lambda each: -(each.held_s or 0.0))[:CHECKPOINTS]
    return sorted(longest, key=lambda each: each.at), len(all_of_them)


def events(found: Sequence[Together], *, started_at: float) -> tuple[list[Event], dict[str, int]]:
    """Events in order of time, of a name with many the first and the last; and how many there were of each name."""
    told: set[tuple[int, str, Any]] = set()
    by_name: dict[str, list[Event]] = {}
    for each, rank, event in _all(found):
        name, step = event["name"][:_TEXT], _step(event)
        if name in OF_ALL_RANKS:
            key = (each.number, name, step)
            if key in told:
                continue
            told.add(key)
        by_name.setdefault(name, []).append(
            Event(
                at=event["at"] - started_at,
                name=name,
                attempt=each.number,
                rank=rank,
                step=step,
                fields={key[:_TEXT]: trimmed(value) for key, value in list(event.items())[: _FIELDS + 5] if key not in _OWN},
            )
        )
    kept: list[Event] = []
    half = max(1, EVENTS // max(1, 2 * len(by_name)))
    for several in by_name.values():
        several.sort(key=lambda event: event.at)
        kept += several if len(several) <= 2 * half else several[:half] + several[-half:]
    counts = dict(Counter({name: len(several) for name, several in by_name.items()}).most_common(EVENTS))
    return sorted(kept, key=lambda event: event.at)[:EVENTS], counts


def _all(found: Sequence[Together]) -> Iterator[tuple[Together, int, Row]]:
    for each in found:
        for rank, lines in each.ranks.items():
            for event in lines.events:
                yield each, rank, event


def _step(event: Row) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and 0 <= step < 10**15 else None


def _amount(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else None


def trimmed(value: Any, deep: int = _DEEP) -> Any:
    """Plain data of bounded size: a report shows it, and nobody reads a megabyte of it."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT else value[: _TEXT - 1] + "…"
    if isinstance(value, int) and abs(value) > 1e300:  # no float is so large
        return trimmed(str(value))
    if isinstance(value, dict | list) and not deep:
        return "…"
    if isinstance(value, dict):
        return {str(key)[:_TEXT]: trimmed(each, deep - 1) for key, each in list(value.items())[: 10 * _FIELDS]}
    if isinstance(value, list):
        return [trimmed(each, deep - 1) for each in value[: 10 * _FIELDS]]
    return value
