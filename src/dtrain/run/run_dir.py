"""``open_run``: the folder of a run, with what was run and a ledger of where the time of each rank goes."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from dtrain import __version__, launch_protocol, run_layout, spans, storage
from dtrain.dist import preemption
from dtrain.dist.collectives import all_gather_json, format_error_line
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.shutdown import exit_exception, register_shutdown_hook
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.run.ledger_writer import LedgerWriter
from dtrain.run.metadata import attempt_metadata, device_name, settings_to_plain
from dtrain.run.redact import Redactor, make_redactor
from dtrain.storage import RemotePath
from dtrain.typing import Plain

_CALLER = "open_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The folder of a run, as this rank writes into it.

    Args:
        path: absolute.
        attempt: which start of the run this is, from 1.
        rank: of this process.
        settings: what ``open_run`` was given, as plain data without secrets; None if nothing. For sinks:
            ``dt.loggers.tensorboard(run / "tb", settings=run.settings)``.
        uploaded: what ``upload_run`` has sent: where to, and of each file the size and the time of its last change.
    """

    path: Path
    attempt: int
    rank: int
    settings: dict[str, Plain] | None = field(default=None, repr=False, compare=False)
    uploaded: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict, repr=False, compare=False)

    def __truediv__(self, name: str) -> Path:
        return self.path / name


@dataclass(slots=True)
class _OpenRun:
    """The run that is open in this process; a fork has none."""

    pid: int = 0
    run: Run | None = None
    ledger: LedgerWriter | None = None
    redactor: Redactor = field(default_factory=Redactor)
    upload: str | None = None
    exit_registered: bool = False
    has_opened: bool = False  # a run, once


_OPEN_RUN = _OpenRun()


def open_run(
    path: str | Path,
    *,
    settings: Any = None,
    interval: Duration | int | str = "10sec",
    redact: Iterable[str] = (),
    upload: str | Path | None = None,
) -> Run:
    """The folder of this run: made where missing, and written into from now on. Call it first, right after ``init_dist``.

    Rank 0 writes down what is run (settings, command line, commit, versions, hosts, devices), as
    ``attempts/attempt-00001.json``; each later start is a further attempt. Every rank writes where its time goes, and what
    happens, into ``ledger/rank-00000.jsonl``. ``dtrain report`` makes a page of it, ``dtrain top`` shows it live. It ends with
    ``init_dist``'s block, or with the process::

        run = dt.open_run("runs/gpt", settings=vars(args))
        log = dt.loggers.multi(dt.loggers.jsonl(run / "metrics.jsonl"), dt.loggers.progress_bar(total))

    A disk that is full, or a folder that goes away, is one warning; training goes on.

    Args:
        path: of this machine, the same for all attempts; on several hosts on a file system that they share, else each host
            has its ranks' ledgers.
        settings: a mapping, a dataclass or argparse's Namespace. What is no plain data is written as its text.
        interval: steps or seconds from one line of sums in the ledger to the next.
        redact: patterns of names (``*`` is any text) whose values are not written down, besides those that look secret: names
            with words such as password, secret, token or key, passwords in URLs, and texts in the form of known tokens.
        upload: where ``upload_run`` sends the folder to when the run ends: the checkpoints' root.

    Returns:
        The run. Called again for the same folder while it is open: the same one, whatever the other arguments are.

    Mutates: files; what ``spans`` tells of, in this process.
    Collective: one exchange of JSON on the control group; every rank must call it.
    Host sync: none; a step costs nothing, and a line of sums some hundred microseconds.

    Raises:
        ConfigError: a folder that cannot be written on some rank, a URL, ranks with different folders, settings or an interval
            of another kind, or another run that is open; on all ranks.
    """
    if _OPEN_RUN.pid != os.getpid():
        _OPEN_RUN.pid, _OPEN_RUN.run, _OPEN_RUN.ledger = os.getpid(), None, None
        _OPEN_RUN.exit_registered = _OPEN_RUN.has_opened = False
    if _OPEN_RUN.run is not None:
        return _reuse_open_run(_OPEN_RUN.run, path)
    info, started_at = get_dist_info(), time.time()
    mine: dict[str, Any] = {"error": None, "kind": "", "host": os.uname().nodename, "device": device_name(info)}
    secret, ready = Redactor(), None
    try:
        secret = make_redactor(_check_redact_patterns(redact), os.environ)
        ready = _prepare_folder(path, info, settings, interval, upload, started_at)
        mine |= {"folder": str(ready.folder), "attempt": ready.attempt}
    except Exception as error:  # noqa: BLE001 - whatever it is (the settings are the user's), all ranks hear of it
        mine["error"] = _error_message(path, error)
    everyone = cast("list[dict[str, Any]]", all_gather_json(mine, caller=_CALLER))
    try:
        _check_ranks_agree(everyone)
        assert ready is not None, "an error of this rank's own is among those that were checked"
    except ConfigError:
        if ready is not None and info.rank == 0:
            (ready.folder / run_layout.ATTEMPTS / run_layout.attempt_name(ready.attempt)).unlink(missing_ok=True)
        raise
    settings = cast("dict[str, Plain] | None", secret.redact_data(ready.settings))
    run = Run(path=ready.folder, attempt=everyone[0]["attempt"], rank=info.rank, settings=settings)
    if info.rank == 0:
        _write_metadata(run, partial(attempt_metadata, run.attempt, started_at, everyone, settings, secret, info))
    return _start_ledger(run, ready, secret, info)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunSetup:
    """What this rank has found out and made; ``attempt`` is rank 0's, 0 on others."""

    folder: Path
    attempt: int
    settings: dict[str, Plain] | None
    interval: Duration
    upload: str | None


def _reuse_open_run(run: Run, folder: str | Path) -> Run:
    if storage.resolve_path(folder) != run.path:
        raise ConfigError(
            f"{_CALLER}: {run.path} is open in this process, got {str(folder)!r}; a process has one run at a time"
        )
    return run


def _check_redact_patterns(redact: Iterable[str]) -> list[str]:
    patterns = [redact] if isinstance(redact, str) else list(redact) if isinstance(redact, Iterable) else [redact]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{_CALLER}: redact takes patterns of names, got {pattern!r}; as in redact=['db_*']")
    return patterns


def _prepare_folder(
    folder: str | Path, info: DistInfo, settings: Any, every: Duration | int | str, upload: str | Path | None, started_at: float
) -> _RunSetup:
    """The folders and this rank's ledger, and on rank 0 the number of the attempt.

    Raises:
        ConfigError: arguments that cannot be right.
        OSError: a folder or file that cannot be made.
    """
    length = Duration.parse(every)
    if length.unit not in ("ba", "sec") or (length.unit == "ba" and length.value < 1):
        raise ConfigError(f"{_CALLER}: every is a number of steps or seconds, got {every!r}; as in '100ba' or '10sec'")
    known = settings_to_plain(settings)
    place = storage.resolve_path(folder)
    if isinstance(place, RemotePath):
        raise ConfigError(f"{_CALLER}: the folder is one of this machine, got {place}; give that as upload=")
    if upload is not None:
        storage.resolve_path(upload)
    (place / run_layout.LEDGER).mkdir(parents=True, exist_ok=True)
    handle = os.open(
        place / run_layout.LEDGER / run_layout.ledger_name(info.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    os.close(handle)
    attempt = _claim_attempt(place, started_at) if info.rank == 0 else 0
    return _RunSetup(
        folder=place, attempt=attempt, settings=known, interval=length, upload=None if upload is None else str(upload)
    )


def _claim_attempt(folder: Path, started_at: float) -> int:
    """The number of this attempt, which nobody else gets: by a file that must not exist yet."""
    (folder / run_layout.ATTEMPTS).mkdir(exist_ok=True)
    attempt = max((run_layout.parse_attempt(name) or 0 for name in os.listdir(folder / run_layout.ATTEMPTS)), default=0)
    while True:
        attempt += 1
        path = folder / run_layout.ATTEMPTS / run_layout.attempt_name(attempt)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"format": run_layout.FORMAT, "attempt": attempt, "started_at": started_at}))
        except FileExistsError:
            continue
        except OSError:  # a full disk: an attempt that never was
            path.unlink(missing_ok=True)
            raise
        return attempt


def _error_message(folder: str | Path, error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if not isinstance(error, OSError):
        return f"{_CALLER}: cannot take these arguments ({format_error_line(error)})"
    return f"{_CALLER}: cannot write {str(error.filename or folder)!r}: {error.strerror or error}; all ranks must be able to"


def _check_ranks_agree(everyone: list[dict[str, Any]]) -> None:
    """Raise what is wrong on any rank, the same on all.

    Raises:
        ConfigError: so.
    """
    failed = [(rank, told["error"]) for rank, told in enumerate(everyone) if told["error"] is not None]
    if failed:
        rank, error = failed[0]
        raise ConfigError(error if len(everyone) == 1 else f"{error} (rank {rank}, {len(failed)} of {len(everyone)} ranks)")
    for rank, told in enumerate(everyone):
        if told["folder"] != everyone[0]["folder"]:
            raise ConfigError(
                f"{_CALLER}: rank {rank} has the folder {told['folder']}, rank 0 {everyone[0]['folder']}; give all the same"
            )


def _write_metadata(run: Run, record: Callable[[], dict[str, Plain]]) -> None:
    """In place of the few words that took the number, whole or not at all. The other ranks have gone on: nothing is raised."""
    path = run.path / run_layout.ATTEMPTS / run_layout.attempt_name(run.attempt)
    try:
        storage.replace_file(path, (json.dumps(record(), indent=1) + "\n").encode())
    except Exception as error:  # noqa: BLE001 - of the disk, or of what was found out about this machine
        spans.record_event("dropped", sink="about", error=format_error_line(error))


def _start_ledger(run: Run, ready: _RunSetup, secret: Redactor, info: DistInfo) -> Run:
    path = run.path / run_layout.LEDGER / run_layout.ledger_name(run.rank)
    ledger = LedgerWriter(path, attempt=run.attempt, interval=ready.interval, redact=secret.redact_data)
    _OPEN_RUN.run, _OPEN_RUN.ledger, _OPEN_RUN.redactor, _OPEN_RUN.upload = run, ledger, secret, ready.upload
    ledger.open(
        rank=run.rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        version=__version__,
        setup_s=round(_seconds_since_process_start(), 3),
        step=spans.position()[0],
    )
    _OPEN_RUN.has_opened = True
    register_shutdown_hook("run", _close_run, last=True)
    if not _OPEN_RUN.exit_registered:
        _OPEN_RUN.exit_registered = True
        atexit.register(_close_at_exit, os.getpid())
    return run


def _seconds_since_process_start() -> float:
    """Seconds since this process was started (or made by a fork); 0 where that is not known.

    0 also in a notebook, which may have been open for days, and after an earlier run of this process.
    """
    if _OPEN_RUN.has_opened or hasattr(sys, "ps1"):
        return 0.0
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _close_run(error: BaseException | None) -> None:
    """At the end of ``init_dist``'s block."""
    run, ledger = _OPEN_RUN.run, _OPEN_RUN.ledger
    if run is None or ledger is None or _OPEN_RUN.pid != os.getpid():
        return
    _OPEN_RUN.run = _OPEN_RUN.ledger = None
    ledger.close(*_end_reason(error))
    if _OPEN_RUN.upload is not None:
        from dtrain.run.upload import upload_run  # it asks what a Run is

        upload_run(run, _OPEN_RUN.upload)


def _end_reason(error: BaseException | None) -> tuple[str, str | None]:
    """How it ended, and the error's text. Somebody's Ctrl-C is no failure, and neither is what a loop exits with when asked."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "KeyboardInterrupt"
    code = error.code if isinstance(error, SystemExit) else None
    if error is not None and (not isinstance(error, SystemExit) or code not in (None, 0, launch_protocol.PREEMPTED_EXIT_CODE)):
        return "failed", _OPEN_RUN.redactor.redact_text(format_error_line(error))
    return "stopped" if code == launch_protocol.PREEMPTED_EXIT_CODE or preemption.is_agreed() else "done", None


def _close_at_exit(pid: int) -> None:
    """At the end of a process that never left such a block. An exception that has ended it is known by now."""
    if pid == os.getpid():
        _close_run(exit_exception())
