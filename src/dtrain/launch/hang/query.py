"""Asking by hand what the ranks of a job do: from one of them, from a notebook or a terminal, while it runs or afterwards."""

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
from dtrain.launch.hang.launcher_record import (
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
"""How long a launcher has to answer: it gives the ranks three seconds, and may have to wait for its first ones."""

_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherAddress:
    """Where a launcher can be asked: a process of ``host``, which began ``start_ticks`` ticks after the machine."""

    pid: int
    start_ticks: str
    host: str
    report: str  # the file in which it answers

    @property
    def is_here(self) -> bool:
        """Whether it runs, on this machine: another process may have got its number."""
        return (
            self.host == socket.gethostname() and self.start_ticks != "" and _process_start_ticks(self.pid) == self.start_ticks
        )


def explain_hang(path: str | os.PathLike[str] | None = None) -> str:
    """What the ranks of a job do, and which of them the others wait for: a text of at most twelve lines.

    While the job runs, its launcher asks the ranks as it does when they hang, and the job goes on. So it can be called from any
    rank (from any thread, a debugger, a handler of a signal), from a notebook, or by ``dtrain hang RUN_DIR`` in a terminal, on
    a machine on which a launcher of the job runs. Afterwards it reads what was written down then, and says when that was. All
    stacks, and the last collectives of every rank by group, are in ``hang/report.txt`` of the run folder.

    Args:
        path: the launcher's run folder, the ``hang`` folder in it, or that of ``open_run``, which knows its launcher; None:
            that of the launcher which has started this process.

    Returns:
        What the launcher says of a hang, such as ``rank 3 has not entered all_reduce #41 of group dp_shard, where ranks 0, 1, 2
        wait; it is in loader.py:88``.

    Mutates: the files below ``hang``. No rank is sent a signal, so one that holds the interpreter shows no stack.

    Raises:
        ConfigError: no such folder, no launcher runs there and nothing was written down, or it is another user's.
        DistError: the launcher does not answer, or has ended before it did.
    """
    records = _find_record_folder(path)
    launchers = [
        one for path in list_matching(records, "launcher-*.pid") if (one := _parse_announcement(read_text(path))) is not None
    ]
    here = [one for one in launchers if one.is_here]
    if here:
        _query_launchers(records, here)
    text, at = _read_answer(records, launchers)
    return text if here else f"{text}\n  as of {format_time(at)}: no launcher of the job can be asked here"


def announce_launcher(run_dir: Path, node_rank: int, *, single_node: bool) -> None:
    """Say where this process, a launcher, can be asked. A full disk or a read-only folder costs just that.

    Args:
        run_dir: the folder of the launch.
        node_rank: of this launcher.
        single_node: whether it has all ranks of the job.

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
    """Nobody can ask any more. Mutates: the run folder."""
    with contextlib.suppress(OSError):
        _announcement_path(run_dir, node_rank).unlink()


def _announcement_path(run_dir: Path, node_rank: int) -> Path:
    return launch_protocol.stacks_file(run_dir, 0).with_name(f"launcher-{node_rank:05d}.pid")


def _find_record_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder with the ranks' records."""
    own = os.environ.get(launch_protocol.RUN_DIR)
    if folder is None and not own:
        raise ConfigError(
            "explain_hang: `dtrain launch` has not started this process, so there is nobody to ask; give the folder of a run"
        )
    run_dir = Path(folder if folder is not None else own or "").absolute()
    if not run_dir.is_dir():
        raise ConfigError(f"explain_hang: there is no folder {str(run_dir)!r}; give the run folder of `dtrain launch`")
    for below in (_hang_folder(run_dir), *([_hang_folder(Path(launch))] if (launch := _find_launch_folder(run_dir)) else [])):
        if below.is_dir():
            return below
    return run_dir


def _hang_folder(run_dir: Path) -> Path:
    return launch_protocol.stacks_file(run_dir, 0).parent


def _find_launch_folder(folder: Path) -> str | None:
    """The run folder of the launcher that started the last attempt of a training run which keeps its files in ``folder``."""
    about = sorted(
        list_matching(folder / run_layout.ATTEMPTS, "attempt-*.json"), key=lambda path: run_layout.parse_attempt(path.name) or 0
    )
    try:
        launch = json.loads(read_text(about[-1]))["launch"]["folder"] if about else None
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
    """When a process began; empty when it is gone. Together with its number it is one process and no other."""
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _query_launchers(records: Path, launchers: Sequence[LauncherAddress]) -> None:
    """Have these launchers ask their ranks, and wait until they have written what they found."""
    before = {one: _file_version(records / one.report) for one in launchers}
    for one in launchers:
        try:
            os.kill(one.pid, launch_protocol.STACKS_SIGNAL)
        except ProcessLookupError:
            continue  # noticed below
        except PermissionError:
            raise ConfigError(f"explain_hang: the launcher, process {one.pid}, is another user's; ask as that user") from None
    deadline = time.monotonic() + PATIENCE_S
    while waiting := [one for one in launchers if _file_version(records / one.report) == before[one]]:
        gone = [one for one in waiting if not one.is_here]
        if gone and all(_file_version(records / one.report) == before[one] for one in gone):  # not even just before it ended
            raise DistError(f"explain_hang: the launcher, process {gone[0].pid}, ended before it answered; see what it said")
        if time.monotonic() > deadline:
            raise DistError(
                f"explain_hang: the launcher, process {waiting[0].pid}, did not answer within {PATIENCE_S:g} s: no rank of it "
                "runs, or it is stopped; ask again"
            )
        time.sleep(_POLL_INTERVAL_S)


def _file_version(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read_answer(records: Path, launchers: Sequence[LauncherAddress]) -> tuple[str, float]:
    """The message about the records in this folder, the launcher's own, unless there are several; and when ranks were asked."""
    accounts = read_launcher_records(records)
    if len(accounts) == 1 and (message := extract_message(read_text(records / accounts[0].report))):
        return message, accounts[0].at  # its ranks may have been started again since, and have emptied their files
    account, report = merge_launcher_records(accounts), records / REPORT_NAME
    ranks = account.ranks if account is not None else tuple(find_recorded_ranks(records))
    if not ranks:
        raise ConfigError(_describe_no_records(records, launchers))
    evidence = collect_evidence(records, ranks)
    world_size, timeout_s = (account.world_size, account.timeout_s) if account is not None else (len(ranks), None)
    lines = explain_stall(evidence, world_size=world_size, timeout_s=timeout_s, report=report)
    at = _answer_time(records, account)
    write_hang_report(report, lines, evidence, queried_at=at)
    return "\n".join(lines), at


def _answer_time(records: Path, account: LauncherRecord | None) -> float:
    """When the ranks were asked."""
    if account is not None:
        return account.at
    written = [version[1] for path in list_matching(records, "rank-*") if (version := _file_version(path)) is not None]
    return max(written) / 1e9 if written else time.time()  # removed since they were read


def _describe_no_records(records: Path, launchers: Sequence[LauncherAddress]) -> str:
    away = sorted({one.host for one in launchers if one.host != socket.gethostname()})
    what = f"no rank has written anything down in {str(records)!r}, and no launcher that uses it runs on this machine"
    return f"explain_hang: {what}; " + (f"ask on {', '.join(away)}" if away else "give the run folder of `dtrain launch`")
