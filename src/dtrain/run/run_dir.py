"""Open the folder of a run (``open_run``): metadata of each attempt and a ledger of time per rank. ``upload_run`` copies it.

The ledger has periodic lines of time totals and a line per event, and no line per step. Each line is one ``write`` at the end
of the file, so a kill leaves at most one partial line, the last one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from dtrain import __version__, launch_protocol, spans, storage
from dtrain.arguments import format_error_line, warn
from dtrain.device import counts_memory, device_name, started_accelerator
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.context import current_context, exit_exception, register_shutdown_hook
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.reconfigure import is_joining
from dtrain.errors import ConfigError
from dtrain.run import run_files
from dtrain.run.metadata import Redactor, attempt_metadata, make_redactor, settings_to_plain, to_plain_data
from dtrain.schedules.durations import Duration
from dtrain.storage import AnyPath, RemotePath
from dtrain.typing import Plain

# Folder below the root of checkpoints, and folder of a run that is not copied there.
_TARGET_FOLDER = "run"
_EXCLUDED_FOLDER = "checkpoints"
# Totals are written before these events.
_FLUSH_BEFORE = frozenset({"resumed", "stop", "committed"})
# largest number of unwritten events
_MAX_WAITING = 200
_NEVER_S = 1e9
_STATM = "/proc/self/statm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Folder of a run, as returned by ``open_run``. ``run / name`` is a path in the folder.

    Args:
        path: absolute path of the folder.
        attempt: number of this start of the run, from 1.
        rank: rank of this process.
        settings: settings given to ``open_run``, as plain data without secrets; None without settings. Pass to loggers:
            ``dt.loggers.tensorboard(run / "tb", settings=run.settings)``.
    """

    path: Path
    attempt: int
    rank: int
    settings: dict[str, Plain] | None = field(default=None, repr=False, compare=False)
    # Files sent by ``upload_run``: by target, size and modification time of each file.
    _uploaded: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict, repr=False, compare=False)

    def __truediv__(self, name: str) -> Path:
        return self.path / name


@dataclass(slots=True)
class _OpenRun:
    """Open run of this process. A fork has no open run."""

    pid: int = 0
    run: Run | None = None
    ledger: LedgerWriter | None = None
    setup: _RunSetup | None = None
    # True after the first open_run of this process
    has_opened: bool = False


# A fact of the process: the ledger hears all spans of the process, and the end of the process must close the ledger.
_OPEN_RUN = _OpenRun()


def open_run(
    path: str | Path,
    *,
    settings: Any = None,
    every: Duration | int | str = "10sec",
    redact: Iterable[str] = (),
    upload: str | Path | None = None,
) -> Run:
    """Open the folder of a run, created if missing, and record the run there. Call this function right after ``init_dist``.

    Rank 0 writes settings, command line, commit, versions, hosts and devices to ``attempts/attempt-00001.json``; each later
    start is a further attempt. Every rank writes its time by category and events to ``ledger/rank-00000.jsonl``. ``dtrain
    report`` renders a page, ``dtrain top`` shows the run live. Recording ends with ``init_dist``'s block or with the process::

        run = dt.open_run("runs/gpt", settings=vars(args))
        log = dt.loggers.multi(
            dt.loggers.jsonl(run / "metrics.jsonl"), dt.loggers.progress_bar(total)
        )

    A full disk or a missing folder causes one warning, and training continues.

    Args:
        path: local folder, the same for all attempts. Several hosts share the folder on a common file system; else each host
            has the ledgers of its ranks.
        settings: mapping, dataclass or ``argparse.Namespace``; values without plain data are written as text.
        every: steps or seconds between two lines of totals in the ledger.
        redact: patterns of further secret names (``*`` is any text). Always redacted: names with words such as password,
            secret, token or key, passwords in URLs, and texts in the format of known tokens.
        upload: target of ``upload_run`` at the end of the run, usually the checkpoint root; None uploads nothing.

    Returns:
        The run. A second call for the same folder returns the open run, with any arguments.

    Mutates: files; what ``spans`` tells of, in this process.
    Collective: one exchange of JSON on the control channel; every rank must call it.
    Host sync: none; a step costs nothing, and a line of totals some hundred microseconds.

    Raises:
        ConfigError: on all ranks: a folder that is not writable on some rank, a URL, different folders on ranks, invalid
            ``settings`` or ``every``, or another open run.
    """
    if _OPEN_RUN.pid != os.getpid():
        _OPEN_RUN.pid, _OPEN_RUN.run, _OPEN_RUN.ledger, _OPEN_RUN.has_opened = os.getpid(), None, None, False
    if _OPEN_RUN.run is not None:
        if storage.resolve_path(path) != _OPEN_RUN.run.path:
            raise ConfigError(
                f"open_run: path must be the open run {_OPEN_RUN.run.path}, got {str(path)!r}. A process can have one open run."
            )
        return _OPEN_RUN.run
    info, started_at = get_dist_info(), time.time()
    local: dict[str, Any] = {"error": None, "kind": "", "host": os.uname().nodename, "device": device_name(info.device)}
    setup = None
    try:
        setup = _prepare_folder(path, info, settings, every, redact, upload, started_at)
        local |= {"folder": str(setup.folder), "attempt": setup.attempt}
    except ConfigError as error:
        local["error"] = str(error)
    except OSError as error:
        name, reason = str(error.filename or path), error.strerror or error
        local["error"] = f"open_run: cannot write {name!r}: {reason}. All ranks must be able to write."
    except Exception as error:  # noqa: BLE001 - all ranks must learn of any error, also in the user's settings
        local["error"] = f"open_run: arguments must be readable, got {format_error_line(error)}."
    all_ranks = cast("list[dict[str, Any]]", all_gather_json(local, caller="open_run"))
    try:
        _check_ranks_agree(all_ranks)
        assert setup is not None, "an error of this rank has been raised"
    except ConfigError:
        if setup is not None and info.rank == 0 and not is_joining():
            _attempt_path(setup.folder, setup.attempt).unlink(missing_ok=True)
        raise
    run = Run(path=setup.folder, attempt=all_ranks[0]["attempt"], rank=info.rank, settings=setup.settings)
    if info.rank == 0 and not is_joining():
        if info.run_dir is not None:
            # The launcher names the folder at the end of the job, and may run without the file.
            with suppress(OSError):
                launch_protocol.opened_run_file(info.run_dir).write_bytes(str(run.path).encode(errors="surrogateescape"))
        try:
            # The file of the attempt is a placeholder so far, and is replaced atomically.
            record = attempt_metadata(run.attempt, started_at, all_ranks, run.settings, setup.redactor, info)
            storage.replace_file(_attempt_path(run.path, run.attempt), (json.dumps(record, indent=1) + "\n").encode())
        except Exception as error:  # noqa: BLE001 - the other ranks have continued
            spans.record_event("dropped", logger="about", error=format_error_line(error))
    _start_ledger(run, setup)
    return run


def _attempt_path(folder: Path, attempt: int) -> Path:
    return folder / run_files.ATTEMPTS / run_files.attempt_name(attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunSetup:
    """Prepared folder of this rank. ``attempt`` is the number on rank 0, and 0 on other ranks; ``settings`` has no secrets."""

    folder: Path
    attempt: int
    settings: dict[str, Plain] | None
    interval: Duration
    redactor: Redactor
    upload: str | None


def _prepare_folder(
    path: str | Path,
    info: DistInfo,
    settings: Any,
    interval: Duration | int | str,
    redact: Iterable[str],
    upload: str | Path | None,
    started_at: float,
) -> _RunSetup:
    """Create the folders and this rank's ledger, and on rank 0 claim the number of the attempt.

    Raises:
        ConfigError: invalid arguments.
        OSError: a folder or file cannot be created.
    """
    length = Duration.parse(interval)
    if length.unit not in ("ba", "sec") or (length.unit == "ba" and length.value < 1):
        raise ConfigError(f"open_run: every must be in steps or seconds, got {interval!r}. Pass '100ba' or '10sec'.")
    patterns = [redact] if isinstance(redact, str) else list(redact) if isinstance(redact, Iterable) else [redact]
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"open_run: redact must be patterns of names, got {pattern!r}. Pass redact=['db_*'], for example."
            )
    redactor = make_redactor(patterns, os.environ)
    plain_settings = cast("dict[str, Plain] | None", redactor.redact_data(settings_to_plain(settings)))
    folder = storage.resolve_path(path)
    if isinstance(folder, RemotePath):
        raise ConfigError(f"open_run: path must be a local folder, got {folder}. Pass the server as upload=.")
    if upload is not None:
        storage.resolve_path(upload)
    (folder / run_files.LEDGER).mkdir(parents=True, exist_ok=True)
    ledger_path = folder / run_files.LEDGER / run_files.ledger_name(info.rank)
    handle = os.open(ledger_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.close(handle)
    attempt = 0
    if info.rank == 0:
        # A rank that takes the place of a dead one goes on with the attempt of the others.
        attempt = max(run_files.attempt_files(folder)) if is_joining() else _claim_attempt(folder, started_at)
    return _RunSetup(
        folder=folder,
        attempt=attempt,
        settings=plain_settings,
        interval=length,
        redactor=redactor,
        upload=None if upload is None else str(upload),
    )


def _claim_attempt(folder: Path, started_at: float) -> int:
    """Claim the number of this attempt with a file that must not exist yet, so that no other process gets the number."""
    (folder / run_files.ATTEMPTS).mkdir(exist_ok=True)
    attempt = max(run_files.attempt_files(folder), default=0)
    while True:
        attempt += 1
        path = _attempt_path(folder, attempt)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"format": run_files.FORMAT, "attempt": attempt, "started_at": started_at}))
        except FileExistsError:
            continue
        # After a failed write the attempt must not exist.
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return attempt


def _check_ranks_agree(all_ranks: list[dict[str, Any]]) -> None:
    """Raise the first error of any rank, the same error on all ranks.

    Raises:
        ConfigError: a rank failed, or ranks have different folders.
    """
    failed = [(rank, facts["error"]) for rank, facts in enumerate(all_ranks) if facts["error"] is not None]
    if failed:
        rank, error = failed[0]
        raise ConfigError(error if len(all_ranks) == 1 else f"{error} (rank {rank}, {len(failed)} of {len(all_ranks)} ranks)")
    for rank, facts in enumerate(all_ranks):
        if facts["folder"] != all_ranks[0]["folder"]:
            raise ConfigError(
                f"open_run: path must be equal on all ranks, got {facts['folder']} on rank {rank} and "
                f"{all_ranks[0]['folder']} on rank 0. "
                "Compute the path from settings that all ranks share, without a time or a rank."
            )


def _start_ledger(run: Run, setup: _RunSetup) -> None:
    path = run.path / run_files.LEDGER / run_files.ledger_name(run.rank)
    ledger = LedgerWriter(path, attempt=run.attempt, interval=setup.interval, redact=setup.redactor.redact_data)
    _OPEN_RUN.run, _OPEN_RUN.ledger, _OPEN_RUN.setup = run, ledger, setup
    ledger.open(
        rank=run.rank,
        host=os.uname().nodename,
        pid=os.getpid(),
        version=__version__,
        setup_s=round(_seconds_since_process_start(), 3),
        step=spans.position()[0],
        **({"joins": True} if is_joining() else {}),
    )
    _OPEN_RUN.has_opened = True
    register_shutdown_hook("run", _close_run, last=True)
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


def _seconds_since_process_start() -> float:
    """Return the seconds since this process was started or forked; 0 if unknown.

    In a notebook, which may have been open for days, and after an earlier run of this process, the result is 0, too.
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
    """Close the run at the end of ``init_dist``'s block. Ctrl-C and the exit code of a preemption are not failures."""
    run, ledger, setup = _OPEN_RUN.run, _OPEN_RUN.ledger, _OPEN_RUN.setup
    if run is None or ledger is None or setup is None or _OPEN_RUN.pid != os.getpid():
        return
    _OPEN_RUN.run = _OPEN_RUN.ledger = _OPEN_RUN.setup = None
    code = error.code if isinstance(error, SystemExit) else None
    if isinstance(error, KeyboardInterrupt):
        ledger.close("stopped", "KeyboardInterrupt")
    elif code == launch_protocol.PREEMPTED_EXIT_CODE:
        ledger.close("stopped")
    elif error is not None and not (isinstance(error, SystemExit) and code in (None, 0)):
        ledger.close("failed", setup.redactor.redact_text(format_error_line(error)))
    else:
        ledger.close("stopped" if current_context().preemption.is_agreed() else "done")
    if setup.upload is not None:
        upload_run(run, setup.upload)


def _close_at_exit() -> None:
    """Close the run at exit if no ``init_dist`` block did. The exception that ended the process is known here."""
    _close_run(exit_exception())


def upload_run(run: Run, root: str | Path) -> int:
    """Copy the changed files of the run's folder to ``run/`` below ``root``, and return the number of copied files.

    Rank 0 copies everything except ``checkpoints/``; every rank copies its own ledger. Rank 0 also copies ledgers of earlier
    attempts with more ranks. On a new machine, restore the files of earlier attempts first; else they are replaced.

    Call this function after a checkpoint, or let ``open_run(upload=...)`` do so at the end. A failure causes one warning and
    an event in the ledger.

    Args:
        run: result of ``open_run``.
        root: root of the checkpoints, a folder or a URL.

    Mutates: files below ``root``; ``run.uploaded``.
    Collective: none.

    Example:
        import dtrain as dt

        run = dt.open_run("runs/gpt")
        if state.crossed("1000ba"):
            dt.save_sharded("s3://bucket/gpt", state)
            dt.run.upload_run(run, "s3://bucket/gpt")

    Raises:
        ConfigError: ``root`` is not a valid target.
    """
    root_path = storage.resolve_path(root)
    target = root_path / _TARGET_FOLDER
    if isinstance(target, Path) and (target == run.path or target in run.path.parents):
        raise ConfigError(f"upload_run: root must be outside of the run's folder, got {run.path} as target. Pass another root.")
    sent, created, count = run._uploaded.setdefault(str(root_path), {}), set[AnyPath](), 0
    try:
        for path in _iter_files(run):
            name = path.relative_to(run.path).as_posix()
            try:
                status = path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if sent.get(name) == state:
                    continue
                content = path.read_bytes()[: status.st_size]
            # The thread of a logger may remove or rename files.
            except FileNotFoundError:
                continue
            destination = target / name
            if destination.parent not in created:
                storage.make_folders(destination.parent)
                created.add(destination.parent)
            storage.replace_file(destination, content)
            sent[name] = state
            count += 1
    except Exception as error:  # noqa: BLE001 - any error of a server's library must not stop training
        spans.record_event("dropped", logger="upload", error=str(error)[:500])
        warn(f"upload_run: cannot copy {run.path} to {target}: {error}. Training continues.", RuntimeWarning)
    return count


def _iter_files(run: Run) -> Iterator[Path]:
    """Yield the files that this rank copies, without copies inside the folder itself."""
    ledger = run.path / run_files.LEDGER
    excluded = {ledger, run.path / _EXCLUDED_FOLDER, *(Path(root) / _TARGET_FOLDER for root in run._uploaded)}
    if run.rank == 0:
        for folder, subfolders, names in os.walk(run.path):
            parent = Path(folder)
            subfolders[:] = sorted(each for each in subfolders if parent / each not in excluded)
            yield from (parent / name for name in sorted(names) if (parent / name).is_file())
    own_ledger = ledger / run_files.ledger_name(run.rank)
    if own_ledger.is_file():
        yield own_ledger
    if run.rank == 0:
        ranks = get_dist_info().world_size
        yield from (path for rank, path in run_files.ledger_files(run.path).items() if rank >= ranks)


class LedgerWriter:
    """Writer of the totals and events of ``spans``. Listens from ``open`` to ``close``; a fork of the process writes nothing.

    A failed write causes one warning. The totals and the last two hundred events are kept and written later, after an event
    ``dropped``.

    Args:
        path: existing file; lines are appended.
        attempt: number of the attempt, written in every line.
        interval: steps (``ba``) or seconds between two lines of totals.
        redact: function that removes secrets from plain data, such as a server address in the error of a logger.
    """

    def __init__(
        self, path: Path, *, attempt: int, interval: Duration, redact: Callable[[Plain], Plain] = lambda value: value
    ) -> None:
        self.path, self._redact = path, redact
        self._attempt, self._interval = attempt, interval
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._partial_line = False
        # The file may be missing or unreadable.
        with suppress(OSError):
            self._partial_line = _has_partial_line(path)
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._missed, self._warned, self._closed = 0, False, False
        self._last_totals = spans.totals()

    def open(self, **facts: Any) -> None:
        """Write the first line and the events so far. Mutates: the listener of ``spans``."""
        with self._lock:
            self._write(self._line("open", **facts))
            for event in spans.set_listener(self):
                self._write(self._event_line(event))
            self._schedule_next_line()

    def on_step(self) -> None:
        """See ``spans.SpanListener``."""
        if self._pid == os.getpid():
            self.flush()
            self._schedule_next_line()

    def on_event(self, event: Mapping[str, object]) -> None:
        """See ``spans.SpanListener``."""
        if self._pid != os.getpid():
            return
        if event["name"] in _FLUSH_BEFORE:
            if threading.current_thread() is threading.main_thread():
                self.flush()
                # A loaded state may have an earlier step.
                self._schedule_next_line()
            # Only the main thread knows the time of the open spans.
            else:
                spans.schedule_next_check(step=0, in_s=0.0)
        with self._lock:
            if not self._closed:
                self._write(self._event_line(event))

    def flush(self) -> None:
        """Write the totals since the last line of totals."""
        with self._lock:
            now = spans.totals()
            passed = {name: total for name, total in now.items() if total != self._last_totals.get(name)}
            if not self._closed and passed and self._write(self._sum_line(passed)):
                self._last_totals = now

    def close(self, reason: str, error: str | None = None) -> None:
        """Write the last line. Mutates: the listener and the position of ``spans``."""
        if self._pid != os.getpid() or self._closed:
            return
        spans.set_listener(None)
        self.flush()
        with self._lock:
            self._write(self._line("close", reason=reason, **({} if error is None else {"error": error})))
            self._closed = True
        # Another run of this process begins at step 0.
        spans.set_position(0, samples=0, tokens=0)

    def _schedule_next_line(self) -> None:
        step = spans.position()[0]
        if self._interval.unit == "sec":
            spans.schedule_next_check(step=step + 10**15, in_s=float(self._interval.value))
        else:
            steps = int(self._interval.value)
            spans.schedule_next_check(step=(step // steps + 1) * steps, in_s=_NEVER_S)

    def _sum_line(self, passed: Mapping[str, spans.SpanTime]) -> str:
        rows: dict[str, tuple[int, float]] = {}
        for name, (count, seconds) in passed.items():
            counted, spent = self._last_totals.get(name, spans.SpanTime(0, 0.0))
            rows[name] = (count - counted, round(seconds - spent, 6))
        step, samples, tokens = spans.position()
        facts: dict[str, Any] = {
            "seconds": round(sum(seconds for _, seconds in rows.values()), 6),
            "step": step,
            "samples": samples,
            "tokens": tokens,
            "spans": rows,
        }
        if causes := {name: spans.category_of(name) for name in rows if not spans.is_library_span(name)}:
            facts["causes"] = causes
        return self._line("sum", **facts, gauges=_read_gauges())

    def _event_line(self, event: Mapping[str, object]) -> str:
        """Format an event. Fields without plain data become text, and the keys of the ledger win over equal names."""
        fields = self._redact({name: to_plain_data(value) for name, value in event.items() if name not in ("kind", "attempt")})
        assert isinstance(fields, dict), "redaction keeps the type"
        return self._line("event", **fields)

    def _line(self, kind: str, /, **fields: Any) -> str:
        return json.dumps(
            {"kind": kind, "attempt": self._attempt, "at": round(time.time(), 3), **fields}, separators=(",", ":")
        )

    def _write(self, line: str) -> bool:
        """Write a line and return True on success. After a failure, totals are computed again later and events wait."""
        lines = [*self._waiting, line]
        if self._missed:
            error = f"{self._missed} lines came late or never"
            lines.insert(0, self._line("event", name="dropped", logger="ledger", error=error))
        data = ("\n" * self._partial_line + "".join(f"{each}\n" for each in lines)).encode()
        try:
            # The file is opened each time, so that a removed folder is noticed.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("the disk took only a part of a line")
            finally:
                os.close(handle)
        except OSError as error:
            # The state of a missing file is unknown.
            with suppress(OSError):
                self._partial_line = _has_partial_line(self.path)
            self._missed += 1
            if not line.startswith('{"kind":"sum"'):
                self._waiting.append(line)
            if not self._warned:
                self._warned = True
                warn(
                    f"open_run: cannot write {self.path}: {error}. Training continues, and the ledger is written later.",
                    RuntimeWarning,
                )
            return False
        self._partial_line, self._missed = False, 0
        self._waiting.clear()
        return True


def _has_partial_line(path: Path) -> bool:
    """Return True if the file ends in a partial line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return size > 0 and (file.seek(size - 1), file.read(1))[1] != b"\n"


def _read_gauges() -> dict[str, int]:
    gauges: dict[str, int] = {}
    # /proc exists only on Linux.
    with suppress(OSError, ValueError, IndexError), open(_STATM, "rb") as file:
        gauges["rss_bytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    accelerator = started_accelerator()
    if accelerator is not None and counts_memory(accelerator):
        gauges["device_bytes"] = torch.accelerator.memory_allocated()
        gauges["device_peak_bytes"] = torch.accelerator.max_memory_allocated()
    return gauges
