"""What lies in a run's folder, and what is missing or damaged there, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dtrain import runs
from dtrain.report.reading.attempts import Together, world_size
from dtrain.report.reading.ledger import RankLedger
from dtrain.report.reading.lines import Row
from dtrain.report.reading.metrics import Metrics
from dtrain.report.words import count, listed

_PART = re.compile(r"(metrics[^/]*\.jsonl)(?:\.(\d{1,9}))?")
_MOST = 12  # lines of one kind


def ledger_files(folder: Path) -> dict[int, Path]:
    """The ledgers by rank."""
    found = {runs.rank_of(path.name): path for path in (folder / runs.LEDGER).glob("*.jsonl") if path.is_file()}
    return {rank: path for rank, path in sorted(found.items(), key=str) if rank is not None}


def metrics_files(folder: Path) -> dict[str, list[Path]]:
    """Files of metrics, each with the parts that were rotated away: oldest first. That of the loop comes first."""
    parts: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("metrics*.jsonl*"):
        if (found := _PART.fullmatch(path.name)) and path.is_file():
            parts.setdefault(found[1], []).append((-int(found[2] or 0), path))
    names = sorted(parts, key=lambda name: (name != runs.METRICS, name))
    return {name: [path for _, path in sorted(parts[name])] for name in names}


def is_run(folder: Path) -> bool:
    """Whether anything of a run is there."""
    abouts = (runs.attempt_of(path.name) is not None for path in (folder / runs.ATTEMPTS).glob("*.json"))
    return bool(ledger_files(folder) or metrics_files(folder) or any(abouts))


def runs_below(folder: Path) -> list[str]:
    """Folders in it that are runs."""
    try:
        return sorted(each.name for each in folder.iterdir() if each.is_dir() and is_run(each))
    except OSError:
        return []


def damage(path: Path, unreadable: int, folder: Path, malformed: int, what: str) -> list[str]:
    """What could not be read in a file."""
    where = path.relative_to(folder).as_posix()
    found = []
    if unreadable:
        found.append(f"{where}: {count(unreadable, 'line')} could not be read: cut short, or damaged")
    if malformed:
        found.append(f"{where}: {count(malformed, 'line')} {'is' if malformed == 1 else 'are'} no {what}")
    return found


def of_ledgers(ledgers: Sequence[RankLedger], found: Sequence[Together], abouts: dict[int, Row]) -> list[str]:
    """What the ledgers do not say."""
    if not ledgers:
        return ["no ledger: where the time went, how it ended, speed, memory and checkpoints are not known"]
    if not found:
        return ["the ledgers have no line that could be read: where the time went is not known"]
    missing = []
    for each in found:
        size = world_size(each, abouts.get(each.number, {}))
        if absent := sorted(set(range(size)) - set(each.ranks)):
            missing.append(f"attempt {each.number}: nothing from rank {listed(absent)} of {size}; means are over those there")
        if lost := sorted(rank for rank, lines in each.ranks.items() if not lines.open_count):
            missing.append(f"attempt {each.number}: rank {listed(lost)} has no line of when it began")
    numbers = {each.number for each in found}
    if gone := sorted(set(range(1, max(numbers))) - numbers):
        missing.append(f"nothing in the ledgers of attempt {listed(gone)}: it ended before its first line, or that is lost")
    strange: dict[str, int] = {}
    for ledger in ledgers:
        for kind, many in ledger.strange.items():
            strange[kind] = strange.get(kind, 0) + many
    for kind, many in list(strange.items())[:_MOST]:
        missing.append(f"ledger: {count(many, 'line')} of a kind that this version does not know, {kind[:60]!r}; left out")
    unknown = sorted({cause for each in found for lines in each.ranks.values() for cause in lines.unknown})
    if unknown:
        missing.append(f"ledger: causes that this version does not know count as other: {', '.join(unknown[:_MOST])}")
    dropped = sum(lines.dropped for each in found for lines in each.ranks.values())
    if dropped:
        missing.append(f"ledger: {count(dropped, 'event')} beyond the first many left out")
    return missing[: 4 * _MOST]


def of_metrics(name: str, metrics: Metrics, *, has_ledger: bool) -> list[str]:
    """What a file of metrics does not say."""
    missing = []
    for metric, many in sorted(metrics.texts.items(), key=lambda item: -item[1])[:_MOST]:
        missing.append(f"{name}: {count(many, 'value')} of {metric[:60]!r} {'is' if many == 1 else 'are'} no number; left out")
    if metrics.crowded:
        missing.append(f"{name}: there are more than two thousand metrics; further names are left out")
    if metrics.went_back and not has_ledger:
        missing.append(
            f"{name}: the steps go back {count(metrics.went_back, 'time')}: restarts, with which "
            f"{count(metrics.again, 'record')} no longer {'counts' if metrics.again == 1 else 'count'}"
        )
    if not metrics.count:
        missing.append(f"{name}: has no record that could be read")
    return missing
