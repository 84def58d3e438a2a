"""List the files of a run's folder, read the metadata of attempts, and describe missing or damaged parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import run_layout
from dtrain.report.format import format_count, format_list
from dtrain.report.model import AttemptDifference
from dtrain.report.reading.attempts import MergedAttempt, trim_data, world_size
from dtrain.report.reading.jsonl_reader import Row
from dtrain.report.reading.metric_table import MetricTable
from dtrain.report.reading.rank_ledger import RankLedger

_METRICS_FILE = re.compile(r"(metrics[^/]*\.jsonl)(?:\.(\d{1,9}))?")
# lines of one kind
_MAX_PROBLEMS = 12


def ledger_files(folder: Path) -> dict[int, Path]:
    """Return the ledgers by rank."""
    ledgers = {
        run_layout.parse_rank(path.name): path for path in (folder / run_layout.LEDGER).glob("*.jsonl") if path.is_file()
    }
    return {rank: path for rank, path in sorted(ledgers.items(), key=str) if rank is not None}


def metrics_files(folder: Path) -> dict[str, list[Path]]:
    """Return the metrics files, each with its rotated files, oldest first. The file of the loop comes first."""
    parts: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("metrics*.jsonl*"):
        if (match := _METRICS_FILE.fullmatch(path.name)) and path.is_file():
            parts.setdefault(match[1], []).append((-int(match[2] or 0), path))
    names = sorted(parts, key=lambda name: (name != run_layout.METRICS, name))
    return {name: [path for _, path in sorted(parts[name])] for name in names}


def is_run(folder: Path) -> bool:
    """Return True if a folder has any file of a run."""
    abouts = (run_layout.parse_attempt(path.name) is not None for path in (folder / run_layout.ATTEMPTS).glob("*.json"))
    return bool(ledger_files(folder) or metrics_files(folder) or any(abouts))


def find_runs(folder: Path) -> list[str]:
    """Return the names of subfolders with runs."""
    try:
        return sorted(each.name for each in folder.iterdir() if each.is_dir() and is_run(each))
    except OSError:
        return []


def read_problems(path: Path, unreadable: int, folder: Path, malformed: int, kind: str) -> list[str]:
    """Describe the unreadable lines of a file."""
    name = path.relative_to(folder).as_posix()
    problems = []
    if unreadable:
        problems.append(f"{name}: {format_count(unreadable, 'line')} could not be read: cut short, or damaged")
    if malformed:
        problems.append(f"{name}: {format_count(malformed, 'line')} {'is' if malformed == 1 else 'are'} no {kind}")
    return problems


def ledger_problems(ledgers: Sequence[RankLedger], merged: Sequence[MergedAttempt], abouts: dict[int, Row]) -> list[str]:
    """Describe the missing parts of ledgers."""
    if not ledgers:
        return ["no ledger: where the time went, how it ended, speed, memory and checkpoints are not known"]
    if not merged:
        return ["the ledgers have no line that could be read: where the time went is not known"]
    missing = []
    for each in merged:
        size = world_size(each, abouts.get(each.number, {}))
        if absent := sorted(set(range(size)) - set(each.ranks)):
            missing.append(
                f"attempt {each.number}: nothing from rank {format_list(absent)} of {size}; means are over those there"
            )
        if lost := sorted(rank for rank, lines in each.ranks.items() if not lines.open_count):
            missing.append(f"attempt {each.number}: rank {format_list(lost)} has no line of when it began")
    numbers = {each.number for each in merged}
    if gone := sorted(set(range(1, max(numbers))) - numbers):
        missing.append(
            f"nothing in the ledgers of attempt {format_list(gone)}: it ended before its first line, or that is lost"
        )
    unknown_kinds: dict[str, int] = {}
    for ledger in ledgers:
        for kind, many in ledger.unknown_kinds.items():
            unknown_kinds[kind] = unknown_kinds.get(kind, 0) + many
    for kind, many in list(unknown_kinds.items())[:_MAX_PROBLEMS]:
        missing.append(
            f"ledger: {format_count(many, 'line')} of a kind that this version does not know, {kind[:60]!r}; left out"
        )
    unknown = sorted({cause for each in merged for lines in each.ranks.values() for cause in lines.unknown_causes})
    if unknown:
        missing.append(f"ledger: causes that this version does not know count as other: {', '.join(unknown[:_MAX_PROBLEMS])}")
    dropped = sum(lines.dropped_events for each in merged for lines in each.ranks.values())
    if dropped:
        missing.append(f"ledger: {format_count(dropped, 'event')} beyond the first many left out")
    return missing[: 4 * _MAX_PROBLEMS]


def metrics_problems(name: str, metrics: MetricTable, *, has_ledger: bool) -> list[str]:
    """Describe the missing parts of a metrics file."""
    missing = []
    for metric, many in sorted(metrics.non_numeric.items(), key=lambda item: -item[1])[:_MAX_PROBLEMS]:
        missing.append(
            f"{name}: {format_count(many, 'value')} of {metric[:60]!r} {'is' if many == 1 else 'are'} no number; left out"
        )
    if metrics.has_too_many_names:
        missing.append(f"{name}: there are more than two thousand metrics; further names are left out")
    if metrics.went_back and not has_ledger:
        missing.append(
            f"{name}: the steps go back {format_count(metrics.went_back, 'time')}: restarts, with which "
            f"{format_count(metrics.repeated, 'record')} no longer {'counts' if metrics.repeated == 1 else 'count'}"
        )
    if not metrics.count:
        missing.append(f"{name}: has no record that could be read")
    return missing


_MAX_FILE_BYTES = 4 << 20
_MAX_DIFFERENCES = 200
_TIME_FIELDS = ("format", "attempt", "pid", "started_at", "time", "at")
_MAX_METADATA_DEPTH = 6


def read_attempt_files(folder: Path) -> tuple[dict[int, Row], list[str]]:
    """Read the files of attempts by number, and list the problems."""
    contents: dict[int, Row] = {}
    problems = []
    paths = sorted((folder / run_layout.ATTEMPTS).glob("*.json"))
    for path in paths:
        number, where = run_layout.parse_attempt(path.name), f"{run_layout.ATTEMPTS}/{path.name[:100]}"
        if number is None:
            continue
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES >> 20} MiB")
            about = json.loads(path.read_bytes())
            if not isinstance(about, dict):
                raise ValueError("it is no object")
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{where}: cannot be read: {' '.join(str(error).split())[:200]}")
            continue
        version = about.get("format")
        if isinstance(version, int) and version > run_layout.FORMAT:
            problems.append(
                f"{where}: written by a newer version (format {version}, this reads {run_layout.FORMAT}): there may be more"
            )
        contents[number] = trim_data(about, _MAX_METADATA_DEPTH)
    return contents, problems


def attempt_differences(abouts: Mapping[int, Row]) -> list[AttemptDifference]:
    """Return the facts that differ between attempts, without times and process ids."""
    flat = {number: dict(_flatten(about)) for number, about in abouts.items()}
    names = sorted({name for each in flat.values() for name in each})
    changed = [name for name in names if len({repr(each.get(name)) for each in flat.values()}) > 1]
    return [
        AttemptDifference(name=name, values={number: each.get(name) for number, each in flat.items()})
        for name in changed[:_MAX_DIFFERENCES]
    ]


def _flatten(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if name in _TIME_FIELDS or name.endswith("_at"):
            continue
        if isinstance(each, dict):
            yield from _flatten(each, f"{before}{name}.")
        else:
            yield f"{before}{name}", each
