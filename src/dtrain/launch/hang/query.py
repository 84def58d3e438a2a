"""Query the launcher of a job for the state of its ranks, while the job runs or afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain import launch_protocol, run_layout
from dtrain.errors import ConfigError, DistError
from dtrain.launch.hang.explain import explain_stall, extract_message, format_time, write_hang_report
from dtrain.launch.hang.rank_records import (
    REPORT_NAME,
    LauncherRecord,
    collect_evidence,
    find_recorded_ranks,
    list_matching,
    merge_launcher_records,
    read_launcher_records,
    read_text,
    report_file_name,
)

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
        if (launcher := _parse_announcement(read_text(path))) is not None
    ]
    here = [launcher for launcher in launchers if launcher.is_here]
    if here:
        _query_launchers(records, here)
    text, at = _read_answer(records, launchers)
    return text if here else f"{text}\n  as of {format_time(at)}: no launcher of the job can be asked here"


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
    launch = _find_launch_folder(run_dir)
    for folder_of_launch in (run_dir, *([Path(launch)] if launch else [])):
        records = launch_protocol.hang_folder(folder_of_launch)
        if records.is_dir():
            return records
    return run_dir


def _find_launch_folder(folder: Path) -> str | None:
    """Return the launcher's run folder of the last attempt of a training run in ``folder``."""
    metadata = sorted(
        list_matching(folder / run_layout.ATTEMPTS, "attempt-*.json"), key=lambda path: run_layout.parse_attempt(path.name) or 0
    )
    try:
        launch = json.loads(read_text(metadata[-1]))["launch"]["folder"] if metadata else None
    except (ValueError, KeyError, TypeError):
        return None
    return launch if isinstance(launch, str) else None


def _parse_announcement(text: str) -> LauncherAddress | None:
    try:
        launcher = LauncherAddress(**json.loads(text))
        return launcher if launcher.pid > 0 else None
    except (ValueError, TypeError):
        return None


def _process_start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks, empty if the process exited. A pid and its start time are unique."""
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


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
    if len(launcher_records) == 1 and (message := extract_message(read_text(records / launcher_records[0].report))):
        # A restart of the ranks may have emptied their files.
        return message, launcher_records[0].at
    merged, report = merge_launcher_records(launcher_records), records / REPORT_NAME
    ranks = merged.ranks if merged is not None else tuple(find_recorded_ranks(records))
    if not ranks:
        raise ConfigError(_describe_no_records(records, launchers))
    evidence = collect_evidence(records, ranks)
    world_size, timeout_s = (merged.world_size, merged.timeout_s) if merged is not None else (len(ranks), None)
    lines = explain_stall(evidence, world_size=world_size, timeout_s=timeout_s, report=report)
    at = _answer_time(records, merged)
    write_hang_report(report, lines, evidence, queried_at=at)
    return "\n".join(lines), at


def _answer_time(records: Path, merged: LauncherRecord | None) -> float:
    """Return the time of the query, from the merged record or from the files of the ranks."""
    if merged is not None:
        return merged.at
    written = [version[1] for path in list_matching(records, "rank-*") if (version := _file_version(path)) is not None]
    # Files may be removed after they were read.
    return max(written) / 1e9 if written else time.time()


def _describe_no_records(records: Path, launchers: Sequence[LauncherAddress]) -> str:
    hosts = sorted({launcher.host for launcher in launchers if launcher.host != socket.gethostname()})
    advice = f"Query on {', '.join(hosts)}." if hosts else "Pass the run folder of `dtrain launch`."
    return f"explain_hang: {str(records)!r} has no records of ranks, and none of its launchers runs on this machine. {advice}"
