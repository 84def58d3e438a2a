"""Explain in at most twelve lines why a job hangs, write the full report, and query a running launcher: ``explain_hang``.

The report has the explanation, the last collectives of each process group by rank, and all stacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from dtrain import launch_protocol
from dtrain.errors import ConfigError, DistError
from dtrain.launch.failure import describe_exit
from dtrain.launch.processes import process_fields
from dtrain.launch.rank_records import (
    REPORT_NAME,
    CollectiveGroup,
    GroupHistory,
    IssuedCollective,
    RankEvidence,
    RankRecord,
    collect_evidence,
    find_recorded_ranks,
    find_user_frame,
    list_matching,
    merge_launcher_records,
    read_launcher_records,
    read_text,
    report_file_name,
    short_location,
)
from dtrain.run import run_files

_MAX_LINES_PER_KIND = 3
_MAX_RANKS_NAMED = 8
# A path may be long, and its end is the most useful part.
_MAX_LOCATION_CHARS = 200  # characters
# State letter in /proc/PID/stat.
_IN_KERNEL = "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledCollective:
    """Collective at which one process group stalled.

    Attributes:
        group: the process group.
        collective: the collective that stalled.
        waiting: ranks in the collective.
        missing: ranks that have not entered the collective.
        unknown: ranks without a record.
        mismatched: different collectives that ranks issued with the same number.
    """

    group: CollectiveGroup
    collective: IssuedCollective
    waiting: Sequence[int]
    missing: Sequence[int] = ()
    unknown: Sequence[int] = ()
    mismatched: Mapping[int, IssuedCollective] = field(default_factory=dict)


def find_stalled(records: Mapping[int, RankRecord]) -> list[StalledCollective]:
    """Find the stalled collective of each process group.

    The most conclusive stalls come first: mismatched collectives, missing ranks, ranks without a record, complete collectives.
    """
    groups = {group for record in records.values() for group in record.histories}
    stops = [stop for group in groups for stop in _find_group_stall(group, records)]
    return sorted(
        stops,
        key=lambda stop: (
            *(not stop.mismatched, not stop.missing, not stop.unknown),
            *(stop.group.id, stop.group.backend, stop.group.name),
        ),
    )


def _find_group_stall(group: CollectiveGroup, records: Mapping[int, RankRecord]) -> Iterator[StalledCollective]:
    empty = GroupHistory(last=0, collectives={})
    histories = {rank: records[rank].histories.get(group, empty) for rank in group.ranks if rank in records}
    issued = [item for history in histories.values() for item in history.collectives.values()]
    numbers = [item.number for item in issued if item.waits]
    if not numbers:
        return
    behind = min(history.last for history in histories.values())
    # A rank may have several pending collectives. The first collective that a rank lacks blocks all later collectives.
    number = min((number for number in numbers if number > behind), default=min(numbers))
    entered = {rank: history.collectives[number] for rank, history in histories.items() if number in history.collectives}
    first = entered[min(rank for rank, item in entered.items() if item.waits)]
    yield StalledCollective(
        group=group,
        collective=first,
        waiting=[rank for rank, item in entered.items() if item.waits and _is_same_operation(item, first)],
        missing=[rank for rank, history in histories.items() if history.last < number],
        unknown=[rank for rank in group.ranks if rank not in records],
        mismatched={rank: item for rank, item in entered.items() if not _is_same_operation(item, first)},
    )


def _is_same_operation(first: IssuedCollective, second: IssuedCollective) -> bool:
    """Return True if two ranks issued the same collective. Only all-reduce requires equal sizes on all ranks."""
    return first.op == second.op and (first.op != "all_reduce" or first.sizes == second.sizes)


def explain_stall(evidence: Collection[RankEvidence], *, world_size: int, timeout_s: float | None, report: Path) -> list[str]:
    """Explain a stall in lines for the launcher's output, as ``describe_stall``, with the path of the full report."""
    kind = "asked" if timeout_s is None else "hang"
    first, *details = describe_stall(evidence, world_size=world_size, timeout_s=timeout_s)
    return [_to_printable(f"dtrain: launch: {kind}: {first}; see {report}"), *details]


def describe_stall(evidence: Collection[RankEvidence], *, world_size: int, timeout_s: float | None) -> list[str]:
    """Describe a stall: one line with the rank that stopped and the reason, then indented lines with details.

    Args:
        evidence: facts about each rank of this node.
        world_size: number of ranks in the job.
        timeout_s: seconds without progress; None for a query by a user, which reports the time since the last progress.
    """
    by_rank = {item.rank: item for item in sorted(evidence, key=lambda item: item.rank)}
    stops = find_stalled({rank: item.record for rank, item in by_rank.items() if item.record is not None and not item.is_gone})
    culprits, reason = _find_culprits(by_rank, stops)
    subject = f"{format_ranks(culprits)} of {world_size}"
    # The time since the last progress of the culprits, or of all ranks if no time is known for the culprits.
    silences = {rank: item.silent_s for rank, item in by_rank.items() if item.silent_s is not None and not item.is_gone}
    silent_s = min((silences[rank] for rank in (silences.keys() & set(culprits)) or silences), default=None)
    duration = f" for {timeout_s:g} s" if timeout_s is not None else "" if silent_s is None else f" for {silent_s:.1f} s"
    lines = [f"{subject} {reason.format(time=duration)}"]
    # No rank is inside init_dist's block any more.
    after = all(item.is_gone for item in by_rank.values())
    lines += _indent_first(
        _group_locations([item for rank in culprits if not (item := by_rank[rank]).is_gone or (after and item.is_past_block)])
    )
    lines += _indent_first(_describe_stall(stop, by_rank, hang=timeout_s is not None) for stop in stops)
    lines += _indent_first(
        _group_locations([item for rank, item in by_rank.items() if rank not in culprits and not item.is_gone])
    )
    return list(map(_to_printable, lines))


def _to_printable(line: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in line)


def _find_culprits(by_rank: Mapping[int, RankEvidence], stops: Sequence[StalledCollective]) -> tuple[list[int], str]:
    """Return the ranks that caused the stall and the reason. Evidence from outside the process is most certain."""
    here = [item for item in by_rank.values() if not item.is_gone]
    # These ranks run on after ``init_dist``'s block, and no rank is inside the block.
    past_block = [] if here else [rank for rank, item in by_rank.items() if item.is_past_block]
    # At the end of a job all ranks exit, one after another.
    exited = [rank for rank, item in by_rank.items() if item.is_gone and any(not other.is_leaving for other in here)]
    silent = [item.rank for item in here if item.record is None]
    # The ranks disagree about a collective.
    mismatch = next((stop for stop in stops if stop.mismatched), None)
    sides: list[list[int]] = [] if mismatch is None else [list(mismatch.mismatched), list(mismatch.waiting)]
    smaller = min(sides, key=len) if sides else []
    minority = sorted(smaller)
    slowest = [item.rank for item in here if item.passed == min(other.passed for other in here)]
    for ranks, reason in (
        (past_block, "did not end after init_dist's block, no progress{time}"),
        (exited, "ended while the others went on, no progress{time}"),
        ([item.rank for item in here if item.is_stopped], "made no progress{time} (stopped, as by SIGSTOP)"),
        (_early_ranks(here), "returned early, to the end of init_dist's block, no progress{time}"),
        ([item.rank for item in here if item.progress is None], "never came to init_dist's block, no progress{time}"),
        (
            [item.rank for item in here if item.state == _IN_KERNEL],
            "made no progress{time} (in the kernel: disk or driver)",
        ),
        (silent if len(silent) < len(here) else [], "made no progress{time} (no answer: something holds the interpreter)"),
        (minority, "ran another collective than the others, no progress{time}"),
        (_missing_ranks(stops, wait=False), "made no progress{time}, and others wait in a collective"),
        (_missing_ranks(stops, wait=True), "wait for each other in different collectives, no progress{time}"),
        (slowest if len(slowest) < len(here) else [], "made no progress{time}, after fewer steps than the others"),
    ):
        if ranks:
            return ranks, reason
    return [item.rank for item in here], "made no progress{time}"


def _early_ranks(here: Sequence[RankEvidence]) -> list[int]:
    """Return the ranks at the end of the block, if all other ranks wait inside the block for a collective."""
    inside = [item for item in here if not item.is_leaving]
    # Without records, assume that the other ranks wait.
    has_records = any(item.record is not None for item in here)
    waiting = all(item.record.is_waiting if item.record is not None else not has_records for item in inside)
    return [item.rank for item in here if item.is_leaving] if inside and waiting else []


def _missing_ranks(stops: Sequence[StalledCollective], *, wait: bool) -> list[int]:
    """Return the ranks that other ranks wait for, limited to ranks that wait themselves (``wait``) or to ranks that do not."""
    waiting = {rank for stop in stops if stop.missing for rank in stop.waiting}
    return sorted({rank for stop in stops for rank in stop.missing if (rank in waiting) == wait})


def _describe_stall(stop: StalledCollective, by_rank: Mapping[int, RankEvidence], *, hang: bool) -> str:
    pending, group = stop.collective, f"of group {stop.group.name}"
    waiting = f"{format_ranks(stop.waiting)} {_conjugate(stop.waiting, 'wait')}"
    if stop.mismatched:
        rank, other = min(stop.mismatched.items())
        ours, theirs = f"{pending.op} {list(pending.sizes)}", f"{format_ranks([rank])} {other.op} {list(other.sizes)}"
        run = _conjugate(stop.waiting, "run")
        return f"as collective #{pending.number} {group} {format_ranks(stop.waiting)} {run} {ours}, but {theirs}"
    if stop.missing:
        have = "has" if len(stop.missing) == 1 else "have"
        # Another line of the message has the path.
        locations = {short_location(by_rank[rank].stacks) for rank in stop.missing}
        location = locations.pop() if len(locations) == 1 else None
        pronoun = "it is" if len(stop.missing) == 1 else "they are"
        where = "" if location is None else f"; {pronoun} in {location}"
        return f"{format_ranks(stop.missing)} {have} not entered {pending} {group}, where {waiting}{where}"
    gone = [rank for rank in stop.unknown if rank in by_rank and by_rank[rank].is_gone]
    mute = [rank for rank in stop.unknown if rank in by_rank and not by_rank[rank].is_gone]
    if gone or mute:
        ended = f"; {format_ranks(gone)} ended" if gone else ""
        silent = f"; {format_ranks(mute)} wrote nothing down" if mute else ""
        return f"{waiting} in {pending} {group}{ended}{silent}"
    if stop.unknown:
        return f"{waiting} in {pending} {group} for ranks of other nodes; see what their launchers say"
    # A query by a user may see a collective in transit.
    doubt = ": is the network between them sound?" if hang else ""
    return f"{waiting} in {pending} {group}, and all its ranks have come{doubt}"


def _describe_location(evidence: RankEvidence) -> str:
    """Describe the location of a rank: its source line and its last progress point."""
    frame = find_user_frame(evidence.stacks)
    location = (
        ("..." + frame[-_MAX_LOCATION_CHARS:] if len(frame) > _MAX_LOCATION_CHARS else frame)
        if frame is not None
        else "its stack is not known"
    )
    # Without a record, only the reported progress points are known.
    later = "" if evidence.record is not None else " or later"
    activity = f" ({evidence.doing}, point of progress {evidence.passed}{later})" if evidence.doing else ""
    exited = (
        f"; it ended when it was asked ({describe_exit(evidence.exit_code_after_query)})"
        if evidence.exit_code_after_query is not None
        else ""
    )
    return f"{location}{activity}{exited}"


def _group_locations(ranks: Iterable[RankEvidence]) -> list[str]:
    """List the locations of ``ranks``. Ranks at the same location share a line, and the smallest groups come first."""
    by_location: dict[str, list[int]] = {}
    for evidence in ranks:
        by_location.setdefault(_describe_location(evidence), []).append(evidence.rank)
    ordered = sorted(by_location.items(), key=lambda item: len(item[1]))
    return [f"{format_ranks(members)}: {location}" for location, members in ordered]


def _indent_first(lines: Iterable[str]) -> list[str]:
    """Indent the first ``_MAX_LINES_PER_KIND`` lines, and count the omitted lines in the last line."""
    indented = [f"  {line}" for line in lines]
    return (
        indented
        if len(indented) <= _MAX_LINES_PER_KIND
        else [*indented[: _MAX_LINES_PER_KIND - 1], f"  ... and {len(indented) - _MAX_LINES_PER_KIND + 1} more like these"]
    )


def format_ranks(ranks: Collection[int]) -> str:
    """Format ranks as ``rank 1``, ``ranks 0, 2``, or ``ranks 0, 1, 2 and 61 more``."""
    first = sorted(ranks)[:_MAX_RANKS_NAMED]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, first))}{more}"


def _conjugate(ranks: Collection[int], verb: str) -> str:
    return verb if len(ranks) != 1 else f"{verb}s"


def write_hang_report(path: Path, lines: Collection[str], evidence: Collection[RankEvidence], *, queried_at: float) -> None:
    """Write the report to ``path`` atomically. If the folder is gone or the disk is full, no report is written.

    Args:
        path: path of the report.
        lines: explanation, the first paragraph of the report.
        evidence: facts about each rank of this node.
        queried_at: time of the query, in seconds since 1970.
    """
    text = "\n".join(
        (*lines, "", f"as of {format_time(queried_at)}", "", *_format_groups(evidence), *_format_ranks_section(evidence), "")
    )
    with contextlib.suppress(OSError):
        launch_protocol.replace_text(path, text)


def format_time(seconds: float) -> str:
    """Format a time in seconds since 1970 in the local time zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _format_groups(evidence: Collection[RankEvidence]) -> Iterator[str]:
    """Yield each process group and the last collectives of its ranks."""
    records = {item.rank: item.record for item in evidence if item.record is not None}
    groups = {group for record in records.values() for group in record.histories}
    for group in sorted(groups, key=lambda group: (group.id, group.backend)):
        yield f"group {group.name} ({group.backend}): {format_ranks(group.ranks)}"
        for rank in group.ranks:
            history = records[rank].histories.get(group) if rank in records else None
            missing = "no collective yet" if rank in records else "wrote nothing down"
            yield f"  rank {rank}: {missing if history is None else history.format_last()}"
        yield ""


def _format_ranks_section(evidence: Collection[RankEvidence]) -> Iterator[str]:
    for item in sorted(evidence, key=lambda item: item.rank):
        yield f"rank {item.rank}: {', '.join(_describe_state(item))}"
        for group, history in item.record.histories.items() if item.record is not None else ():
            yield f"  last collectives of group {group.name} ({group.backend})"
            for _, collective in sorted(history.collectives.items()):
                yield f"    {collective} {list(collective.sizes)}{' waits' if collective.waits else ''}"
        yield "  stacks" if item.stacks.strip() else "  its stacks are not known"
        yield from (f"    {line}" for line in item.stacks.splitlines())
        yield ""


def _describe_state(item: RankEvidence) -> Iterator[str]:
    if item.exit_code is not None:
        yield describe_exit(item.exit_code)
    elif item.progress is None:
        yield "has not come to init_dist's block" if item.record is None else "its launcher wrote nothing about it"
    else:
        yield {
            "open": "in init_dist's block",
            "leaving": "at the end of init_dist's block",
            "closed": "has left init_dist's block",
        }[item.progress.phase]
    if item.doing:
        yield f"{item.doing}, point of progress {item.passed}"
    if item.silent_s is not None:
        yield f"last heard of {item.silent_s:.1f} s before"
    if item.pid is not None:
        yield f"process {item.pid}"
    if item.state:
        yield f"its state {item.state}"
    if item.exit_code_after_query is not None:
        yield f"ended when it was asked ({describe_exit(item.exit_code_after_query)})"


PATIENCE_S = 30.0
"""Seconds until a launcher must answer. A launcher gives the ranks three seconds, and may wait for its first ranks."""

_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherAddress:
    """Launcher process that answers queries: ``pid`` on ``host``, started ``start_ticks`` ticks after boot, and its report."""

    pid: int
    start_ticks: str
    host: str
    report: str

    @classmethod
    def parse(cls, text: str) -> LauncherAddress | None:
        """Parse an announcement; None if the text is damaged."""
        try:
            launcher = cls(**json.loads(text))
            return launcher if launcher.pid > 0 else None
        except (ValueError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Return True if the launcher runs on this machine. The start time excludes another process with the same pid."""
        return (
            self.host == socket.gethostname() and self.start_ticks != "" and _process_start_ticks(self.pid) == self.start_ticks
        )


def explain_hang(path: str | os.PathLike[str] | None = None) -> str:
    """Explain the state of a job's ranks, and which rank the other ranks wait for, in at most twelve lines.

    While the job runs, its launcher queries the ranks as in a hang, and the job continues. Call the function from any rank (any
    thread, a debugger, a signal handler) or from a notebook, or run ``dtrain hang RUN_DIR`` on a machine with a launcher of the
    job. After the job the function reads the last records and adds their time. All stacks, and the last collectives of every
    rank by process group, are in ``hang/report.txt`` of the run folder.

    Args:
        path: the launcher's run folder, its ``hang`` folder, or the folder of ``open_run``; None uses the launcher of this
            process.

    Returns:
        The launcher's explanation, such as ``rank 3 has not entered all_reduce #41 of group dp_shard, where ranks 0, 1, 2
        wait; it is in loader.py:88``.

    Mutates: the files below ``hang``. Ranks get no signal, so a rank that holds the interpreter's lock shows no stack.

    Example:
        import dtrain as dt

        # The job runs in another terminal: dtrain launch -n 8 --run-dir runs/1 train.py
        text = dt.launch.explain_hang("runs/1")
        print(text)

    Raises:
        ConfigError: the folder does not exist, or no launcher runs there and no record exists, or the launcher belongs to
            another user.
        DistError: the launcher does not answer, or exited before its answer.
    """
    records = _find_record_folder(path)
    launchers = [
        launcher
        for path in list_matching(records, "launcher-*.pid")
        if (launcher := LauncherAddress.parse(read_text(path))) is not None
    ]
    here = [launcher for launcher in launchers if launcher.is_here]
    if here:
        _query_launchers(records, here)
    text, queried_at = _read_answer(records, launchers)
    return text if here else f"{text}\n  as of {format_time(queried_at)}: no launcher of the job can be asked here"


def announce_launcher(run_dir: Path, node_rank: int, *, single_node: bool) -> None:
    """Write the address of this launcher into the run folder. If the disk is full or read-only, queries are not possible.

    Args:
        run_dir: folder of the launch.
        node_rank: node of this launcher.
        single_node: if True, this launcher has all ranks of the job.

    Mutates: the run folder.
    """
    pid, path = os.getpid(), _announcement_path(run_dir, node_rank)
    launcher = LauncherAddress(
        pid=pid,
        start_ticks=_process_start_ticks(pid),
        host=socket.gethostname(),
        report=report_file_name(node_rank, single_node=single_node),
    )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(launcher)), encoding="utf-8")


def withdraw_launcher(run_dir: Path, node_rank: int) -> None:
    """Remove the address of this launcher from the run folder. Mutates: the run folder."""
    with contextlib.suppress(OSError):
        _announcement_path(run_dir, node_rank).unlink()


def _announcement_path(run_dir: Path, node_rank: int) -> Path:
    return launch_protocol.hang_folder(run_dir).joinpath(f"launcher-{node_rank:05d}.pid")


def _find_record_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder that contains the records of the ranks."""
    own = os.environ.get(launch_protocol.RUN_DIR)
    if folder is None and not own:
        raise ConfigError(
            "explain_hang: path must be set in a process that `dtrain launch` did not start. Pass the folder of a run."
        )
    run_dir = Path(folder if folder is not None else own or "").absolute()
    if not run_dir.is_dir():
        raise ConfigError(
            f"explain_hang: path must be an existing folder, got {str(run_dir)!r}. Pass the run folder of `dtrain launch`."
        )
    attempts = run_files.attempt_files(run_dir)
    launch = None
    # The folder may belong to a training run, whose last attempt names the folder of its launch.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        launch = run_files.read_attempt(attempts[max(attempts)])["launch"]["folder"] if attempts else None
    for folder_of_launch in (run_dir, *([Path(launch)] if isinstance(launch, str) and launch else [])):
        records = launch_protocol.hang_folder(folder_of_launch)
        if records.is_dir():
            return records
    return run_dir


def _process_start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks, empty if the process exited. A pid and its start time are unique."""
    fields = process_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _query_launchers(records: Path, launchers: Sequence[LauncherAddress]) -> None:
    """Make ``launchers`` query their ranks, and wait for their reports."""
    before = {launcher: _file_version(records / launcher.report) for launcher in launchers}
    for launcher in launchers:
        try:
            os.kill(launcher.pid, launch_protocol.STACKS_SIGNAL)
        except ProcessLookupError:
            # The loop below reports the exited launcher.
            continue
        except PermissionError:
            raise ConfigError(
                f"explain_hang: the launcher, process {launcher.pid}, belongs to another user. Run the query as that user."
            ) from None
    deadline = time.monotonic() + PATIENCE_S
    while waiting := [launcher for launcher in launchers if _file_version(records / launcher.report) == before[launcher]]:
        gone = [launcher for launcher in waiting if not launcher.is_here]
        # A launcher may write its report just before its exit.
        if gone and all(_file_version(records / launcher.report) == before[launcher] for launcher in gone):
            raise DistError(
                f"explain_hang: the launcher, process {gone[0].pid}, exited before its answer. Read the output of the launcher."
            )
        if time.monotonic() > deadline:
            raise DistError(
                f"explain_hang: the launcher, process {waiting[0].pid}, did not answer within {PATIENCE_S:g} s. Its ranks "
                "do not run, or the launcher is stopped. Query again."
            )
        time.sleep(_POLL_INTERVAL_S)


def _file_version(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read_answer(records: Path, launchers: Sequence[LauncherAddress]) -> tuple[str, float]:
    """Return the explanation and the time of the query. One launcher's own explanation is used; several records are merged."""
    launcher_records = read_launcher_records(records)
    if len(launcher_records) == 1:
        # The explanation is the first paragraph of the report. A restart of the ranks may have emptied their files.
        message = read_text(records / launcher_records[0].report).partition("\n\n")[0]
        if message:
            return message, launcher_records[0].at
    merged, report = merge_launcher_records(launcher_records), records / REPORT_NAME
    ranks = merged.ranks if merged is not None else tuple(find_recorded_ranks(records))
    if not ranks:
        hosts = sorted({launcher.host for launcher in launchers if launcher.host != socket.gethostname()})
        advice = f"Query on {', '.join(hosts)}." if hosts else "Pass the run folder of `dtrain launch`."
        raise ConfigError(
            f"explain_hang: {str(records)!r} has no records of ranks, and none of its launchers runs on this machine. {advice}"
        )
    evidence = collect_evidence(records, ranks)
    world_size, timeout_s = (merged.world_size, merged.timeout_s) if merged is not None else (len(ranks), None)
    lines = explain_stall(evidence, world_size=world_size, timeout_s=timeout_s, report=report)
    versions = map(_file_version, list_matching(records, "rank-*"))
    written = [version[1] / 1e9 for version in versions if version is not None]
    # Files may be removed after they were read.
    queried_at = merged.at if merged is not None else max(written, default=time.time())
    write_hang_report(report, lines, evidence, queried_at=queried_at)
    return "\n".join(lines), queried_at
