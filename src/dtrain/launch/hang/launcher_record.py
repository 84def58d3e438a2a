"""Save the launcher's knowledge of its ranks as JSON, and load the records of all launchers and ranks of a hang."""

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
_SAME_HANG_S = 600.0  # seconds between the records of several launchers about the same hang


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRank:
    """State of one rank as its launcher saw it.

    Attributes:
        rank: the global rank.
        pid: the process; None after its end.
        progress: the last reported progress; None before ``init_dist``'s block.
        silent_s: seconds between the last progress and the query.
        exit_code: exit code, negative for a signal; None while the process runs.
        exit_code_after_query: exit code of a process that exited during the query.
        state: state letter of the process in ``/proc``.
        is_incomplete: if True, the rank exited while dumping stacks, so the dump may be incomplete.
    """

    rank: int
    pid: int | None = None
    progress: RankProgress | None = None
    silent_s: float | None = None
    exit_code: int | None = None
    exit_code_after_query: int | None = None
    state: str = ""
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRecord:
    """State of all ranks of one node, as the node's launcher saw them.

    Attributes:
        node_rank: the node.
        at: time of the query, in seconds since 1970.
        world_size: number of ranks in the job.
        timeout_s: seconds without progress; None for a query by a user.
        ranks: the ranks of the node.
    """

    node_rank: int
    at: float
    world_size: int
    timeout_s: float | None
    ranks: tuple[ObservedRank, ...]

    @property
    def report(self) -> str:
        """File name of the report about these ranks: ``report.txt``, unless other nodes have ranks, too."""
        return report_file_name(self.node_rank, single_node=len(self.ranks) == self.world_size)


def report_file_name(node_rank: int, *, single_node: bool) -> str:
    """Return the file name of a launcher's report."""
    return REPORT_NAME if single_node else f"report-node-{node_rank}.txt"


def write_launcher_record(folder: Path, record: LauncherRecord) -> None:
    """Write the launcher's record into ``folder`` atomically.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    path = folder / f"launcher-{record.node_rank:05d}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    os.replace(partial, path)


def read_launcher_records(folder: Path) -> list[LauncherRecord]:
    """Read the records of all launchers about the latest query in ``folder``, ordered by node. Skip damaged records."""
    records = [
        record
        for path in list_matching(folder, "launcher-*.json")
        if (record := _parse_launcher_record(read_text(path))) is not None
    ]
    last = max(records, key=lambda record: record.at, default=None)
    if last is None:
        return []
    # Older records belong to an earlier launch in the same folder, perhaps on more nodes.
    return [record for record in records if record.world_size == last.world_size and last.at - record.at <= _SAME_HANG_S]


def _parse_launcher_record(text: str) -> LauncherRecord | None:
    try:
        fields = json.loads(text)
        return LauncherRecord(**{**fields, "ranks": tuple(_parse_observed_rank(item) for item in fields["ranks"])})
    except (ValueError, KeyError, TypeError):
        return None


def _parse_observed_rank(fields: Mapping[str, Any]) -> ObservedRank:
    progress = fields["progress"]
    return ObservedRank(**{**fields, "progress": None if progress is None else RankProgress(**progress)})


def find_recorded_ranks(folder: Path) -> list[ObservedRank]:
    """Return the ranks that wrote a record into ``folder``, without the launcher's knowledge of the ranks."""
    names = {path.stem for pattern in ("rank-*.json", "rank-*.stacks") for path in list_matching(folder, pattern)}
    numbers = sorted(int(number) for name in names if (number := name.removeprefix("rank-")).isdecimal())
    return [ObservedRank(rank=number) for number in numbers]


def collect_evidence(folder: Path, ranks: Collection[ObservedRank]) -> list[RankEvidence]:
    """Combine the launcher's knowledge of ``ranks`` with the records that the ranks wrote into ``folder``."""
    return [
        RankEvidence(
            rank=item.rank,
            pid=item.pid,
            progress=item.progress,
            silent_s=item.silent_s,
            exit_code=item.exit_code,
            exit_code_after_query=item.exit_code_after_query,
            state=item.state,
            record=parse_rank_record(read_text(folder / launch_protocol.flight_record_file(Path(), item.rank).name)),
            stacks="" if item.is_incomplete else read_text(folder / launch_protocol.stacks_file(Path(), item.rank).name),
        )
        for item in ranks
    ]


def merge_launcher_records(records: Collection[LauncherRecord]) -> LauncherRecord | None:
    """Merge the records of several nodes into one record of all ranks; None without records."""
    last = max(records, key=lambda record: record.at, default=None)
    if last is None:
        return None
    timeouts = [record.timeout_s for record in records if record.timeout_s is not None]
    ranks = sorted((item for record in records for item in record.ranks), key=lambda item: item.rank)
    return replace(last, ranks=tuple(ranks), timeout_s=max(timeouts, default=None))


def clear_rank_records(folder: Path, ranks: Collection[int]) -> None:
    """Remove the earlier records of ``ranks``, so that later records are new.

    The stack files are truncated and kept: a rank holds its stack file open, because a signal handler cannot open files.
    """
    for rank in ranks:
        with contextlib.suppress(OSError):
            (folder / launch_protocol.flight_record_file(Path(), rank).name).unlink()
        with contextlib.suppress(OSError):
            os.truncate(folder / launch_protocol.stacks_file(Path(), rank).name, 0)


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty text if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""


def list_matching(folder: Path, pattern: str) -> list[Path]:
    """List the files of a folder that match ``pattern``, sorted by name; empty if the folder does not exist."""
    try:
        return sorted(folder / name for name in fnmatch.filter(os.listdir(folder), pattern))
    except OSError:
        return []
