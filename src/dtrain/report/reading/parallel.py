"""Read the ledgers of all ranks, large ledgers in parallel processes. Results are exchanged as JSON, not pickle."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from dtrain.report.reading.cumulative_curve import CumulativeCurve
from dtrain.report.reading.jsonl_reader import JsonlReader
from dtrain.report.reading.metric_table import MetricTable
from dtrain.report.reading.rank_ledger import AttemptLedger, RankLedger
from dtrain.report.reading.run_files import read_problems


def encode_ledger(ledger: RankLedger, unreadable: int, failed: list[str]) -> str:
    """Encode a ledger as one line of text."""
    attempts = []
    for lines in ledger.attempts.values():
        lines.flush_gauges()
        attempts.append(vars(lines))
    facts = {"rank": ledger.rank, "malformed": ledger.malformed, "strange": ledger.unknown_kinds, "mixed": ledger.interleaved}
    return json.dumps(facts | {"attempts": attempts, "unreadable": unreadable, "failed": failed}, default=_encode_value)


def _encode_value(value: Any) -> Any:
    if isinstance(value, array):
        return b64encode(value.tobytes()).decode()
    if isinstance(value, CumulativeCurve):
        return {"at": value.at, "step": value.step, "rows": value.rows}
    # a set
    return sorted(value)


def decode_ledger(text: str) -> tuple[RankLedger, int, list[str]]:
    """Decode the text of ``encode_ledger``."""
    facts = json.loads(text)
    ledger = RankLedger(facts["rank"])
    ledger.malformed, ledger.unknown_kinds, ledger.interleaved = facts["malformed"], facts["strange"], set(facts["mixed"])
    for each in facts["attempts"]:
        lines = ledger.attempts[each["number"]] = AttemptLedger(each["number"])
        for name, known in list(vars(lines).items()):
            setattr(lines, name, _decode_value(known, each[name]))
        lines.set_gauges({name: _decode_array(value) for name, value in each["_gauges"].items()})
    return ledger, facts["unreadable"], facts["failed"]


def _decode_value(known: Any, value: Any) -> Any:
    """Convert a decoded value to the type of the attribute."""
    if isinstance(known, array):
        return _decode_array(value)
    if isinstance(known, CumulativeCurve):
        curve = CumulativeCurve()
        curve.at, curve.step, curve.rows = (_decode_array(value[name]) for name in ("at", "step", "rows"))
        return curve
    return type(known)(value) if isinstance(known, set | tuple) else value


def _decode_array(text: str) -> array[float]:
    numbers = array("d")
    numbers.frombytes(b64decode(text))
    return numbers


# Reading takes a second, ten times the start of a process.
_MIN_PARALLEL_BYTES = 24 << 20
_MAX_PROCESSES = 16
# prefix of a line that contains its kind
_KIND_BYTES = 40
_PROGRAM = "from dtrain.report.reading.parallel import _serve; _serve()"

LedgerResult = tuple[RankLedger, int, list[str]]
"""Ledger, number of unreadable lines, and errors of the file."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector. Collection would take a third of the time, and the millions of objects have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_into(into: RankLedger | MetricTable, lines: JsonlReader) -> list[str]:
    """Read a file to its end. Return the error, if any."""
    try:
        for rows in lines.read_batches():
            into.add(rows)
        into.add(lines.read_last_line())
    except OSError as error:
        return [f"{lines.path.name}: cannot be read: {error.strerror or error}"]
    return []


def resume_steps(files: Mapping[int, Path]) -> list[float]:
    """Return the first steps of attempts from the first ledger, without parsing every line."""
    steps: list[float] = []
    for path in [files[min(files)]] if files else []:
        try:
            with path.open("rb") as file:
                for line in file:
                    kind = line[:_KIND_BYTES]
                    if b'"open"' in kind or (b'"event"' in kind and b'"resumed"' in line):
                        steps += _step_of(line)
        except OSError:
            continue
    return steps


def _step_of(line: bytes) -> list[float]:
    try:
        step = json.loads(line)["step"]
        # open_run precedes loading the checkpoint, at step 0.
        return [float(step)] if step > 0 else []
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


class ParallelLedgerReader:
    """Context manager that reads large ledgers in processes while this process continues.

    ``result`` returns the ledgers. If a process fails, this process reads the remaining ledgers.
    """

    def __init__(self, files: Mapping[int, Path]) -> None:
        self._files = dict(files)
        self._workers: list[tuple[list[tuple[int, Path]], subprocess.Popen[bytes]]] = []

    def __enter__(self) -> ParallelLedgerReader:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        many = min(processors, len(self._files), _MAX_PROCESSES)
        if many > 1 and sum(_file_size(path) for path in self._files.values()) > _MIN_PARALLEL_BYTES:
            rows = sorted(self._files.items(), key=lambda row: -_file_size(row[1]))
            self._workers = [(part, process) for at in range(many) if (process := _start_worker(part := rows[at::many]))]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, process in self._workers:
            process.kill()
            process.communicate()

    def result(self, folder: Path) -> tuple[list[RankLedger], list[str]]:
        """Return the ledgers by rank, and the problems."""
        read: dict[int, LedgerResult] = {}
        while self._workers:
            part, process = self._workers.pop()
            # A failed process returns fewer ledgers; this process reads the rest.
            read |= dict(zip([rank for rank, _ in part], _read_results(process), strict=False))
        ledgers, problems = [], []
        for rank, path in self._files.items():
            ledger, unreadable, failed = read.get(rank) or _read_ledger(rank, path)
            problems += [*failed, *read_problems(path, unreadable, folder, ledger.malformed, "line of a ledger")]
            ledgers.append(ledger)
        return ledgers, problems


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_ledger(rank: int, path: Path) -> LedgerResult:
    ledger, lines = RankLedger(rank), JsonlReader(path)
    failed = read_into(ledger, lines)
    return ledger, lines.unreadable, failed


def _start_worker(part: list[tuple[int, Path]]) -> subprocess.Popen[bytes] | None:
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(json.dumps([[rank, str(path.absolute())] for rank, path in part]).encode())
    except OSError:
        # The process has ended, so its output is empty.
        pass
    return process


def _read_results(process: subprocess.Popen[bytes]) -> list[LedgerResult]:
    process.stdin = None
    out, _ = process.communicate()
    if process.returncode:
        return []
    return [decode_ledger(line) for line in out.decode().splitlines()]


def _serve() -> None:
    """Serve as a worker process: read paths from standard input, write ledgers to standard output.

    All ledgers are written at the end, because writing to a full pipe would block.
    """
    with gc_paused():
        answers = [encode_ledger(*_read_ledger(rank, Path(path))) for rank, path in json.load(sys.stdin)]
    sys.stdout.write("\n".join(answers))
