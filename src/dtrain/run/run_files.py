"""Define names and formats of the files in a run folder, and read the files. Imports neither torch nor NumPy.

All code that reads a run uses this module: reports, loggers, the writer of a run, and the explanation of a hang.

A run may be stopped and resumed. Each start is an *attempt*, numbered from 1. All attempts write into one folder::

    attempts/attempt-00001.json   settings, command line, versions, commit, ranks and hosts of an attempt; by rank 0, once
    ledger/rank-00000.jsonl       time spent and events, one file per rank for all attempts
    metrics.jsonl                 metrics logged by the loop; metrics.jsonl.1, .2, ... are older parts after rotation
    media/NAME/step-00000120.png  pictures; texts end in .txt, tables in .json: {"columns": [...], "data": [[...], ...]}
    traces/, memory/              files of the profiler
    checkpoints/                  checkpoints of the examples, not needed for a report

The file of an attempt is one JSON object::

    format, attempt, started_at   numbers; started_at in seconds since 1970
    world_size                    number of ranks
    hosts, devices                {name: [ranks]}: ranks by host, and by kind of device ("cpu", "NVIDIA H200")
    command, python, folder       command line, interpreter, current folder; secrets are "[redacted]" in all fields
    settings                      {name: plain data} passed by the loop, or null
    git                           {commit, dirty} of the script's folder (dirty is null if unknown), or null
    versions                      {"dtrain": "1.0", "python": ..., "torch": ..., "cuda": ..., ...}
    environment                   {name: value}: variables that change the behavior of a run
    launch                        {folder, restarts} of the launcher, or null

A line of a ledger is a JSON object with ``kind``, ``attempt``, and ``at`` (end time in seconds since 1970):

    open   rank, host, pid, version; setup_s: seconds since the start of the process (0 in a notebook, and for further runs of
           one process); step: first step; joins: true if the rank takes the place of a dead one of this attempt
    sum    changes since the previous line: seconds (wall time), step, samples, tokens (after the last step, of all ranks),
           spans: {name: [count, seconds]}, causes: {name: category} of names that are not dtrain's own spans, and
           gauges: {name: number}, such as rss_bytes
    event  name, and its own fields: resumed (step, path, tier: memory or disk), started (step, seconds, parts) at the first
           step, recovered (step, rank_died, cause, last_step, lost_steps, seconds, survivors: ranks that have stayed, parts)
           at the first step after a death, save (step, blocked_s), committed (step, seconds, bytes), evaluated (step,
           seconds), stop (step), out_of_memory (step, size), dropped (logger, error), desync (step, tensor, ranks), ...
    close  reason: done, stopped (on request, also by Ctrl-C), or failed; error: its text. A killed rank writes no close line
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import msgspec

FORMAT = 1
"""Version of all files here. A reader of a newer version reads the known fields, and warns that there may be more."""

ATTEMPTS, LEDGER, TRACES, MEMORY, MEDIA = "attempts", "ledger", "traces", "memory", "media"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
STEP, TIME = "step", "time"
"""Keys of a metrics record that are not metrics."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers by their text in a metrics record, since JSON has no numbers that are not finite."""

Row = dict[str, Any]
"""JSON object: a line of a ledger, a record of metrics, or the file of an attempt."""

_MAX_STEP = 10**15
_ATTEMPT_PATTERN = re.compile(r"attempt-(\d{5,})\.json")
_MEDIA_PATTERN = re.compile(r"step-(\d{8,15})\.([a-z]+)")
_RANK_PATTERN = re.compile(r"rank-(\d{5,})\.jsonl")
_METRICS_PATTERN = re.compile(r"(metrics[^/]*\.jsonl)(\.\d{1,9})?")
_MAX_ATTEMPT_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16
# A file without line ends must not fill the memory.
_MAX_LINE_BYTES = 16 << 20


MEDIA_SUFFIXES = {"image": "png", "text": "txt", "table": "json"}
"""Endings of the files of pictures, texts and tables."""


def media_name(name: str, step: int, suffix: str) -> str:
    """Return the file of a picture, text or table, below ``media``: ``val%2Fsamples/step-00000120.png``."""
    # A folder must not be "." or "..".
    return f"{quote(name, safe='').replace('.', '%2E')}/step-{step:08d}.{suffix}"


def newest_media(folder: Path) -> list[Row]:
    """Return the picture, text or table of the last step of each name: ``name``, ``kind``, ``step`` and ``file``."""
    kinds = {suffix: kind for kind, suffix in MEDIA_SUFFIXES.items()}
    newest: dict[tuple[str, str], Row] = {}
    for file in sorted((folder / MEDIA).glob("*/step-*.*")):
        match = _MEDIA_PATTERN.fullmatch(file.name)
        if match is None or match[2] not in kinds:
            continue
        name, kind = unquote(file.parent.name), kinds[match[2]]
        row = {"name": name, "kind": kind, "step": int(match[1]), "file": str(file)}
        if (known := newest.get((name, kind))) is None or known["step"] <= row["step"]:
            newest[name, kind] = row
    return [newest[key] for key in sorted(newest)]


def attempt_name(attempt: int) -> str:
    """Return the file name of an attempt, below ``attempts``."""
    return f"attempt-{attempt:05d}.json"


def attempt_files(folder: Path) -> dict[int, Path]:
    """Return the files of attempts by number, in order; empty without the folder."""
    return _numbered_files(folder / ATTEMPTS, _ATTEMPT_PATTERN)


def read_attempt(path: Path) -> Row:
    """Read the file of an attempt.

    Raises:
        OSError: the file is missing or unreadable.
        ValueError: the file is too large or no JSON object.
    """
    if path.stat().st_size > _MAX_ATTEMPT_BYTES:
        raise ValueError(f"it has more than {_MAX_ATTEMPT_BYTES >> 20} MiB")
    try:
        about = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(about, dict):
        raise ValueError("it is no object")
    return about


def ledger_name(rank: int) -> str:
    """Return the file name of a rank's ledger, below ``ledger``."""
    return f"rank-{rank:05d}.jsonl"


def ledger_files(folder: Path) -> dict[int, Path]:
    """Return the ledgers by rank, in order; empty without the folder."""
    return _numbered_files(folder / LEDGER, _RANK_PATTERN)


def _numbered_files(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    matches = [(pattern.fullmatch(path.name), path) for path in folder.glob("*.json*")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match is not None and path.is_file()))


def metrics_files(folder: Path) -> dict[str, list[Path]]:
    """Return the metrics files, each with its rotated files, oldest first. The file of the loop comes first."""
    matches = [_METRICS_PATTERN.fullmatch(path.name) for path in folder.glob("metrics*.jsonl*") if path.is_file()]
    names = sorted({match[1] for match in matches if match is not None}, key=lambda name: (name != METRICS, name))
    return {name: [path for _, path in rotated_files(folder / name)] for name in names}


def rotated_files(path: Path) -> list[tuple[int, Path]]:
    """Return a metrics file (number 0) and its rotated files with their numbers, oldest first; without missing files."""
    suffixes = [(each, each.name.removeprefix(path.name)) for each in path.parent.glob(f"{glob.escape(path.name)}*")]
    numbered = [
        (int(suffix[1:] or 0), each) for each, suffix in suffixes if re.fullmatch(r"(\.[1-9]\d*)?", suffix) and each.is_file()
    ]
    return sorted(numbered, reverse=True)


class JsonlReader:
    """Reader of a file of JSON lines. Continues at the last position after the file has grown.

    Attributes:
        path: file.
        unreadable: number of lines so far that are not JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        self._read_bytes = 0
        self._partial_line = b""
        # True inside a line that is too long
        self._skipping_line = False

    def read_batches(self, *, whole_file: bool = False) -> Iterator[list[Row]]:
        """Yield the new objects in batches.

        Args:
            whole_file: if True, the writer has finished, and a last line without end counts; else the line stays for the next
                call.

        Raises:
            OSError: the file is missing or unreadable.
        """
        with self.path.open("rb", buffering=0) as file:
            # A smaller file is a new file.
            if os.fstat(file.fileno()).st_size < self._read_bytes:
                self._read_bytes, self._partial_line, self._skipping_line = 0, b"", False
            file.seek(self._read_bytes)
            yield from self._read_from(file)
        if whole_file and (self._partial_line or self._skipping_line):
            yield self._parse_lines(self._partial_line)
            self._partial_line = b""

    def _read_from(self, file: BinaryIO) -> Iterator[list[Row]]:
        while chunk := file.read(_CHUNK_BYTES):
            self._read_bytes += len(chunk)
            whole, end, rest = chunk.rpartition(b"\n")
            if end:
                lines, self._partial_line = self._partial_line + whole, rest
                yield self._parse_lines(lines)
            else:
                self._partial_line += rest
                if len(self._partial_line) > _MAX_LINE_BYTES:
                    self._partial_line, self._skipping_line = b"", True

    def _parse_lines(self, lines: bytes) -> list[Row]:
        """Parse whole lines. A batch with a line that is not an object is parsed line by line."""
        if self._skipping_line:
            self._skipping_line = False
            self.unreadable += 1
            lines = lines.partition(b"\n")[2]
        try:
            return _OBJECTS.decode_lines(lines)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
        rows = []
        # A later attempt ends the partial line of an earlier attempt.
        for line in filter(bytes.strip, lines.split(b"\n")):
            try:
                # Accepts NaN, too.
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.unreadable += 1
        return rows


_OBJECTS = msgspec.json.Decoder(Row)


def step_from_record(record: Mapping[str, object]) -> int | None:
    """Return the step of a metrics record, None for other objects."""
    step = record.get(STEP)
    return step if type(step) is int and 0 <= step < _MAX_STEP else None


def is_rewind(step: int, names: Iterable[str], last_steps: Mapping[str, float]) -> bool:
    """Return True if a record at ``step`` comes from a run that was resumed at an earlier step.

    A metric of the record was logged at a later step before. A metric without earlier records may come late, for example from
    an evaluation in the background, and is not a rewind.

    Args:
        step: step of the record.
        names: keys of the record.
        last_steps: last step at which each metric was logged.
    """
    return any(last_steps.get(name, step) > step for name in names if name not in (STEP, TIME))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by dotted name. An empty mapping is a value.

    >>> dict(flatten({"lr": 0.1, "model": {"width": 64}}))
    {'lr': 0.1, 'model.width': 64}
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, value
