"""The folder of a training run: what is in it, by name. Writer (``observe``) and reader (``report``) agree here. No torch.

A run is killed and resumed; each start is an *attempt*, numbered from 1. All attempts write into one folder::

    attempts/attempt-00001.json   what was run: settings, command line, versions, commit, ranks and hosts; by rank 0, once
    ledger/rank-00000.jsonl       one file a rank, all attempts: where the time went, and what happened
    metrics.jsonl                 what the loop logged, and metrics.jsonl.1, .2, ...: older parts, if it was rotated
    traces/, memory/              the profiler's, if it was used
    checkpoints/                  where the examples keep them; a report does not need them

The file of an attempt is one JSON object::

    format, attempt, started_at   numbers; started_at in seconds since 1970
    world_size                    how many ranks
    hosts, devices                {name: [ranks]}: which ranks are on a host, and on a kind of device ("cpu", "NVIDIA H200")
    command, python, folder       the command line, the interpreter, the current folder; secrets are "[redacted]" here and below
    settings                      {name: plain data}: what the loop gave; null if it gave nothing
    git                           {commit, dirty} of the script's folder (dirty is null where it is not known), or null
    versions                      {"dtrain": "1.0", "python": ..., "torch": ..., "cuda": ..., ...}
    environment                   {name: value}: variables that change how a run behaves
    launch                        {folder, restarts} of the launcher's; null without one

A line of a ledger is a JSON object with ``kind``, ``attempt``, and ``at`` (seconds since 1970, at the end of what it tells of):

    open   rank, host, pid, version; setup_s: seconds since the process was started (0 in a notebook, and for a later run of
           one process); step: where it begins
    sum    what has passed since the line before: seconds (of wall time), step, samples, tokens (after the last step; of all
           ranks), spans: {name: [count, seconds]}, causes: {name: cause} of names that are no spans of dtrain's own, and
           gauges: {name: number}, such as rss_bytes
    event  name, and fields of its own: resumed (step, path), save (step, held_s), committed (step, seconds, bytes), evaluated
           (step, seconds), stop (step), out_of_memory (step, size), dropped (sink, error), desync (step, tensor, ranks), ...
    close  reason: done, stopped (asked to, also by Ctrl-C), or failed; error: its text. A rank that was killed writes none
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

FORMAT = 1
"""Of all files here. A reader that meets a higher one reads what it knows, and says that there may be more."""

ATTEMPTS, LEDGER, TRACES, MEMORY = "attempts", "ledger", "traces", "memory"
METRICS = "metrics.jsonl"
STEP, TIME = "step", "time"
"""Keys of a record of metrics that are no metrics."""

_MAX_STEP = 10**15
_ATTEMPT_PATTERN = re.compile(r"attempt-(\d{5,})\.json")
_RANK_PATTERN = re.compile(r"rank-(\d{5,})\.jsonl")


def attempt_name(attempt: int) -> str:
    """The file about an attempt, below ``attempts``."""
    return f"attempt-{attempt:05d}.json"


def parse_attempt(name: str) -> int | None:
    """Which attempt a file below ``attempts`` is about; None for other files."""
    found = _ATTEMPT_PATTERN.fullmatch(name)
    return int(found[1]) if found else None


def ledger_name(rank: int) -> str:
    """The file of a rank, below ``ledger``."""
    return f"rank-{rank:05d}.jsonl"


def parse_rank(name: str) -> int | None:
    """Whose ledger a file below ``ledger`` is; None for other files."""
    found = _RANK_PATTERN.fullmatch(name)
    return int(found[1]) if found else None


def step_from_record(record: Mapping[str, object]) -> int | None:
    """The step of a record of metrics; None for an object that is no record."""
    step = record.get(STEP)
    return step if type(step) is int and 0 <= step < _MAX_STEP else None


def is_rewind(step: int, names: Iterable[str], logged: Iterable[tuple[Collection[str], float]]) -> bool:
    """Return True if a record at ``step`` comes from a run that was resumed at an earlier step than it had reached.

    A metric was logged at a later step before. A metric that was not comes late, such as that of an evaluation in the
    background, and goes back to nothing.

    Args:
        step: the step of the record.
        names: the keys of the record.
        logged: names of metrics, and the last step that they were logged at.
    """
    metrics = set(names) - {STEP, TIME}
    return any(last > step and not metrics.isdisjoint(known) for known, last in logged)
