"""Define names and formats of the files in a run folder, for the writer (``run``) and the reader (``report``). No torch.

A run may be stopped and resumed. Each start is an *attempt*, numbered from 1. All attempts write into one folder::

    attempts/attempt-00001.json   settings, command line, versions, commit, ranks and hosts of an attempt; by rank 0, once
    ledger/rank-00000.jsonl       time spent and events, one file per rank for all attempts
    metrics.jsonl                 metrics logged by the loop; metrics.jsonl.1, .2, ... are older parts after rotation
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
           one process); step: first step
    sum    changes since the previous line: seconds (wall time), step, samples, tokens (after the last step, of all ranks),
           spans: {name: [count, seconds]}, causes: {name: category} of names that are not dtrain's own spans, and
           gauges: {name: number}, such as rss_bytes
    event  name, and its own fields: resumed (step, path), save (step, blocked_s), committed (step, seconds, bytes), evaluated
           (step, seconds), stop (step), out_of_memory (step, size), dropped (logger, error), desync (step, tensor, ranks), ...
    close  reason: done, stopped (on request, also by Ctrl-C), or failed; error: its text. A killed rank writes no close line
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

FORMAT = 1
"""Version of all files here. A reader of a newer version reads the known fields, and warns that there may be more."""

ATTEMPTS, LEDGER, TRACES, MEMORY = "attempts", "ledger", "traces", "memory"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
STEP, TIME = "step", "time"
"""Keys of a metrics record that are not metrics."""

_MAX_STEP = 10**15
_ATTEMPT_PATTERN = re.compile(r"attempt-(\d{5,})\.json")
_RANK_PATTERN = re.compile(r"rank-(\d{5,})\.jsonl")


def attempt_name(attempt: int) -> str:
    """Return the file name of an attempt, below ``attempts``."""
    return f"attempt-{attempt:05d}.json"


def parse_attempt(name: str) -> int | None:
    """Return the attempt of a file below ``attempts``, None for other files."""
    match = _ATTEMPT_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def ledger_name(rank: int) -> str:
    """Return the file name of a rank's ledger, below ``ledger``."""
    return f"rank-{rank:05d}.jsonl"


def parse_rank(name: str) -> int | None:
    """Return the rank of a file below ``ledger``, None for other files."""
    match = _RANK_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def step_from_record(record: Mapping[str, object]) -> int | None:
    """Return the step of a metrics record, None for other objects."""
    step = record.get(STEP)
    return step if type(step) is int and 0 <= step < _MAX_STEP else None


def is_rewind(step: int, names: Iterable[str], logged: Iterable[tuple[Collection[str], float]]) -> bool:
    """Return True if a record at ``step`` comes from a run that was resumed at an earlier step.

    A metric of the record was logged at a later step before. A metric without earlier records may come late, for example from
    an evaluation in the background, and is not a rewind.

    Args:
        step: step of the record.
        names: keys of the record.
        logged: names of metrics, and the last step at which they were logged.
    """
    metrics = set(names) - {STEP, TIME}
    return any(last > step and not metrics.isdisjoint(earlier) for earlier, last in logged)
