"""What a launcher knows about its ranks when it has asked them, kept beside what they wrote down, and both read again later."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtrain import launch_protocol
from dtrain.launch.hang.explain import RankEvidence
from dtrain.launch.hang.progress_timer import RankProgress
from dtrain.launch.hang.rank_records import parse_rank_record

REPORT_NAME = "report.txt"
_SAME_HANG_S = 600.0  # between what launchers of several nodes write about the same hang


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """What the launcher has seen of one rank, from outside."""

    rank: int
    pid: int | None = None  # None: its process has ended
    progress: RankProgress | None = None  # what it reported; None: it has not come to init_dist's block
    silent_s: float | None = None  # since then, when it was asked
    exit_code: int | None = None
    exit_code_after_query: int | None = None
    state: str = ""
    is_incomplete: bool = False  # it ended while it wrote its stacks, perhaps of it: what it wrote tells of the wrong thread


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRecord:
    """What one launcher knows about the ranks of its node. ``at`` is in seconds since 1970."""

    node_rank: int
    at: float
    world_size: int
    timeout_s: float | None  # None: somebody has asked
    ranks: tuple[ObservedRank, ...]

    @property
    def report(self) -> str:
        """The file about these ranks: the only one, unless there are ranks on other nodes."""
        return report_file_name(self.node_rank, single_node=len(self.ranks) == self.world_size)


def report_file_name(node_rank: int, *, single_node: bool) -> str:
    """The file, in the folder of the records, in which a launcher writes the whole."""
    return REPORT_NAME if single_node else f"report-node-{node_rank}.txt"


def write_launcher_record(folder: Path, account: LauncherRecord) -> None:
    """Write what the launcher knows into ``folder``, atomically.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    path = folder / f"launcher-{account.node_rank:05d}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(account)), encoding="utf-8")
    os.replace(partial, path)


def read_launcher_records(folder: Path) -> list[LauncherRecord]:
    """What launchers have written into ``folder`` about the last time they asked, by node; damaged ones are left out."""
    found = [
        account
        for path in list_matching(folder, "launcher-*.json")
        if (account := _parse_launcher_record(read_text(path))) is not None
    ]
    last = max(found, key=lambda account: account.at, default=None)
    if last is None:
        return []
    # What is older is of an earlier launch in the same folder, perhaps on more nodes.
    return [one for one in found if one.world_size == last.world_size and last.at - one.at <= _SAME_HANG_S]


def _parse_launcher_record(text: str) -> LauncherRecord | None:
    try:
        fields = json.loads(text)
        return LauncherRecord(**{**fields, "ranks": tuple(_parse_observed_rank(one) for one in fields["ranks"])})
    except (ValueError, KeyError, TypeError):
        return None


def _parse_observed_rank(fields: Mapping[str, Any]) -> ObservedRank:
    seen = fields["seen"]
    return ObservedRank(**{**fields, "seen": None if seen is None else RankProgress(**seen)})


def find_recorded_ranks(folder: Path) -> list[ObservedRank]:
    """The ranks that wrote something into ``folder``; of what their launcher knew, nothing."""
    names = {path.stem for pattern in ("rank-*.json", "rank-*.stacks") for path in list_matching(folder, pattern)}
    numbers = sorted(int(number) for name in names if (number := name.removeprefix("rank-")).isdecimal())
    return [ObservedRank(rank=number) for number in numbers]


def collect_evidence(folder: Path, ranks: Collection[ObservedRank]) -> list[RankEvidence]:
    """All that is known about these ranks: what they wrote into ``folder``, and what was seen from outside."""
    return [
        RankEvidence(
            rank=one.rank,
            pid=one.pid,
            progress=one.progress,
            silent_s=one.silent_s,
            exit_code=one.exit_code,
            exit_code_after_query=one.exit_code_after_query,
            state=one.state,
            record=parse_rank_record(read_text(folder / launch_protocol.flight_record_file(Path(), one.rank).name)),
            stacks="" if one.is_incomplete else read_text(folder / launch_protocol.stacks_file(Path(), one.rank).name),
        )
        for one in ranks
    ]


def merge_launcher_records(accounts: Collection[LauncherRecord]) -> LauncherRecord | None:
    """One account of the ranks of all nodes; None without any."""
    last = max(accounts, key=lambda account: account.at, default=None)
    if last is None:
        return None
    timeouts = [account.timeout_s for account in accounts if account.timeout_s is not None]
    ranks = sorted((one for account in accounts for one in account.ranks), key=lambda one: one.rank)
    return replace(last, ranks=tuple(ranks), timeout_s=max(timeouts, default=None))


def clear_rank_records(folder: Path, ranks: Collection[int]) -> None:
    """Remove what these ranks wrote down before, so that what is found afterwards is new.

    Their files of stacks are emptied and stay: a rank has its own open, since the handler of a signal can open none.
    """
    for rank in ranks:
        with contextlib.suppress(OSError):
            (folder / launch_protocol.flight_record_file(Path(), rank).name).unlink()
        with contextlib.suppress(OSError):
            os.truncate(folder / launch_protocol.stacks_file(Path(), rank).name, 0)


def read_text(path: Path) -> str:
    """The text of a file; empty when it was never written, or its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""


def list_matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder by name; none of one that is not there, or that its launcher is removing at this moment."""
    try:
        return sorted(folder / name for name in fnmatch.filter(os.listdir(folder), pattern))
    except OSError:
        return []
