"""The ledgers of all ranks: large ones on all processors, by processes of their own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dtrain.report.reading.folder import damage
from dtrain.report.reading.ledger import RankLedger
from dtrain.report.reading.lines import Lines
from dtrain.report.reading.metrics import Metrics
from dtrain.report.reading.parcel import packed, unpacked

_WORTH = 24 << 20  # bytes, which take a second: ten times what a process takes to start
_MOST = 16  # processes
_HEAD = 40  # bytes of a line, in which its kind is
_PROGRAM = "from dtrain.report.reading.ledgers import _serve; _serve()"

Answer = tuple[RankLedger, int, list[str]]
"""A ledger, how many lines could not be read, and why the file could not."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Reading makes millions of small objects and no cycles: looking for those takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def fill(into: RankLedger | Metrics, lines: Lines) -> list[str]:
    """Read a file to its end. Returns why that failed, if it did."""
    try:
        for rows in lines.batches():
            into.add(rows)
        into.add(lines.last())
    except OSError as error:
        return [f"{lines.path.name}: cannot be read: {error.strerror or error}"]
    return []


def resumes(files: Mapping[int, Path]) -> list[float]:
    """The steps that attempts went on from: looked for in the first ledger, without reading all of it."""
    steps: list[float] = []
    for path in [files[min(files)]] if files else []:
        try:
            with path.open("rb") as file:
                for line in file:
                    kind = line[:_HEAD]
                    if b'"open"' in kind or (b'"event"' in kind and b'"resumed"' in line):
                        steps += _step_of(line)
        except OSError:
            continue
    return steps


def _step_of(line: bytes) -> list[float]:
    try:
        step = json.loads(line)["step"]
        return [float(step)] if step > 0 else []  # a run is opened before its checkpoint is loaded, at step 0
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


class reading:
    """Begin to read ledgers, in processes of their own if that is worth it, while something else is done in this one.

    A context; ``result`` is what was read. Whatever is wrong with such a process, what it should have read is read here.
    """

    def __init__(self, files: Mapping[int, Path]) -> None:
        self._files = dict(files)
        self._at_work: list[tuple[list[tuple[int, Path]], subprocess.Popen[bytes]]] = []

    def __enter__(self) -> reading:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        many = min(processors, len(self._files), _MOST)
        if many > 1 and sum(_size(path) for path in self._files.values()) > _WORTH:
            rows = sorted(self._files.items(), key=lambda row: -_size(row[1]))
            self._at_work = [(part, process) for at in range(many) if (process := _started(part := rows[at::many]))]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, process in self._at_work:
            process.kill()
            process.communicate()

    def result(self, folder: Path) -> tuple[list[RankLedger], list[str]]:
        """The ledgers by rank, and what could not be read."""
        read: dict[int, Answer] = {}
        while self._at_work:
            part, process = self._at_work.pop()
            # Fewer answers than questions if the process failed; then the rest is read here.
            read |= dict(zip([rank for rank, _ in part], _answer(process), strict=False))
        ledgers, wrong = [], []
        for rank, path in self._files.items():
            ledger, unreadable, failed = read.get(rank) or _read(rank, path)
            wrong += [*failed, *damage(path, unreadable, folder, ledger.malformed, "line of a ledger")]
            ledgers.append(ledger)
        return ledgers, wrong


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(rank: int, path: Path) -> Answer:
    ledger, lines = RankLedger(rank), Lines(path)
    failed = fill(ledger, lines)
    return ledger, lines.unreadable, failed


def _started(part: list[tuple[int, Path]]) -> subprocess.Popen[bytes] | None:
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
        pass  # it has ended, so its answer is empty
    return process


def _answer(process: subprocess.Popen[bytes]) -> list[Answer]:
    process.stdin = None
    out, _ = process.communicate()
    if process.returncode:
        return []
    return [unpacked(line) for line in out.decode().splitlines()]


def _serve() -> None:
    """What such a process does: paths from standard input, ledgers to standard output.

    All of them at the end: nobody reads them before, and who writes into a full pipe does not go on.
    """
    with without_collection():
        answers = [packed(*_read(rank, Path(path))) for rank, path in json.load(sys.stdin)]
    sys.stdout.write("\n".join(answers))
