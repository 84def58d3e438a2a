"""Measure the way from the death of a rank to the next loss. Imports no torch.

Each rank writes its last step into memory that the launcher owns. So the launcher knows the step at a death, and the next
attempt can tell how long the way to its first loss took, part by part, and how many steps were lost.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dtrain
from dtrain import launch_protocol, spans
from dtrain.launch import heartbeats
from dtrain.launch.failure import RankExit, RootCause, describe_cause

# step, and time on the host's monotonic clock; zero before the first step
_SLOT = struct.Struct("<qd")
# Pages that no rank writes take no memory.
_MAX_RANKS = 4096
# Behind the slots of the ranks: number of restarts, once a rank was replaced while the others stayed; and number of answers to
# ranks that ask for such a replacement.
_NUMBER = struct.Struct("<q")
_RESTARTS_AT = _MAX_RANKS * _SLOT.size
_ANSWERS_AT = _RESTARTS_AT + _NUMBER.size
_BOARD_BYTES = _ANSWERS_AT + _NUMBER.size

PARTS = ("ending", "start", "import", "rendezvous", "build", "shard", "load", "batch", "step")
"""Parts of the way to the next loss, in order of time. The launcher ends the other ranks and starts processes; a rank imports,
joins the others, builds its model and optimizer, shards, loads, waits for the first batch, and computes the first step."""
# Spans of a part; the time outside of these spans is spent building.
_SPANS = {
    "rendezvous": ("rendezvous",),
    "shard": ("shard",),
    "load": ("load",),
    "batch": ("data",),
    "step": ("step", "agree", "search"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Failure that ended an attempt.

    Args:
        rank: rank that failed first; -1 if no rank did, as in a hang.
        cause: cause in words.
        at: time on the host's monotonic clock, in seconds.
        step: last step that a rank of this host had completed; 0 for none.
    """

    rank: int
    cause: str
    at: float
    step: int


class StepBoard:
    """Last step of each rank of this node, in memory that outlives the ranks."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dtrain-steps") if sys.platform == "linux" else -1
        self._slots: mmap.mmap | None = None
        if self.fd >= 0:
            os.ftruncate(self.fd, _BOARD_BYTES)
            self._slots = mmap.mmap(self.fd, _BOARD_BYTES)

    @property
    def fds(self) -> dict[str, int]:
        """Descriptor for the ranks by the name of its variable; empty outside of Linux."""
        return {launch_protocol.STEPS_FD: self.fd} if self.fd >= 0 else {}

    def clear(self, ranks: int) -> None:
        """Forget the steps of the local ranks."""
        if self._slots is not None:
            self._slots[: ranks * _SLOT.size] = bytes(ranks * _SLOT.size)

    def announce(self, restarts: int, run_dir: Path, deaths: Sequence[Death], survivors: int) -> dict[str, str]:
        """Tell the ranks that this restart replaces dead ranks only, and that they stay. Return the variables of the new ranks.

        Mutates: the folder of the launch.
        """
        assert self._slots is not None, "ranks that cannot read the board do not stay"
        start = start_environment(deaths, survivors=survivors)
        file = launch_protocol.rejoin_file(run_dir)
        # A full disk costs the events of the ranks that stay.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            launch_protocol.replace_text(file, start[launch_protocol.START])
        _NUMBER.pack_into(self._slots, _RESTARTS_AT, restarts)
        return {**start, launch_protocol.JOINS: "1"}

    def answer(self) -> None:
        """Tell the ranks that asked before this call that no rank is replaced."""
        if self._slots is not None:
            (answers,) = _NUMBER.unpack_from(self._slots, _ANSWERS_AT)
            _NUMBER.pack_into(self._slots, _ANSWERS_AT, answers + 1)

    def last_step(self, ranks: int) -> int | None:
        """Return the last step that any of the local ranks has completed since ``clear``; None for none."""
        if self._slots is None:
            return None
        slots = _SLOT.iter_unpack(self._slots[: ranks * _SLOT.size])
        return max((step for step, at in slots if at > 0), default=None)


def add_death(
    deaths: Sequence[Death],
    cause: RootCause | None,
    lines: Sequence[str],
    exits: Mapping[int, RankExit],
    last_step: int | None,
) -> tuple[Death, ...]:
    """Return the deaths since the last loss, with the death that ended the last attempt.

    Args:
        deaths: deaths before the last attempt, which are over if the attempt has completed a step.
        cause: the rank that failed first, if a rank did.
        lines: description of a failure that is no rank's exit.
        exits: exits by rank.
        last_step: last step of the attempt; None if it has completed none.
    """
    now = time.monotonic()
    before = tuple(deaths) if last_step is None else ()
    step = last_step if last_step is not None else before[-1].step if before else 0
    if cause is not None:
        at = exits[cause.rank].at if cause.rank in exits else now
        return (*before, Death(rank=cause.rank, cause=describe_cause(cause), at=at, step=step))
    text = lines[0].removeprefix("dtrain: launch: ") if lines else "unknown"
    return (*before, Death(rank=-1, cause=text, at=now, step=step))


def add_killed(
    deaths: Sequence[Death], dead_ranks: Iterable[int], exits: Mapping[int, RankExit], last_step: int | None
) -> tuple[Death, ...]:
    """Return the deaths since the last loss, with those of ranks that are replaced while the others stay."""
    for rank in dead_ranks:
        cause = RootCause(rank=rank, code=exits[rank].code, failure=None)
        deaths, last_step = add_death(deaths, cause, (), exits, last_step), None
    return tuple(deaths)


def start_environment(deaths: Sequence[Death], *, survivors: int = 0) -> dict[str, str]:
    """Return the variable that tells a rank of its start: now, after which deaths, and how many ranks have stayed."""
    start = {"started_at": time.monotonic(), "deaths": [asdict(death) for death in deaths], "survivors": survivors}
    return {launch_protocol.START: json.dumps(start)}


def watch_steps(environment: MutableMapping[str, str]) -> None:
    """Write each step of this rank to the launcher, and record the way to the first one. Do nothing without a launcher.

    The first step records an event ``started``, and an event ``recovered`` for each death before it.

    Mutates: ``environment``, in which processes of this process must not find the variables; the observer of ``spans``.
    """
    fd, start = environment.pop(launch_protocol.STEPS_FD, None), environment.pop(launch_protocol.START, None)
    if fd is None or start is None:
        return
    slots = mmap.mmap(int(fd), 0)
    os.close(int(fd))
    restarts = memoryview(slots)[_RESTARTS_AT:].cast("q")
    heartbeats.watch_replacements(restarts, int(environment.get(launch_protocol.RESTART_COUNT, "0")))
    spans.set_observer(_StepObserver(slots, int(environment[launch_protocol.LOCAL_RANK]), environment, json.loads(start)))


class _StepObserver:
    """Observer of the steps of this process. A fork of the process writes nothing."""

    def __init__(self, slots: mmap.mmap, local_rank: int, environment: Mapping[str, str], start: dict[str, Any]) -> None:
        self._slots, self._offset = slots, local_rank * _SLOT.size
        self._pid, self._began_at, self._began_ns = os.getpid(), time.monotonic(), time.perf_counter_ns()
        self._modules, self._spans = frozenset(sys.modules), spans.totals()
        self._is_first, self._start, self._followed = True, start, heartbeats.followed()
        self._run_dir = Path(environment[launch_protocol.RUN_DIR])
        self._has_stayed = False
        # Only a restart needs the modules, from one rank.
        self._modules_file: Path | None = None
        if local_rank == 0 and environment.get(launch_protocol.MAX_RESTARTS, "0") != "0":
            self._modules_file = launch_protocol.modules_file(self._run_dir)

    def __call__(self, step: int) -> None:
        if self._pid != os.getpid():
            return
        _SLOT.pack_into(self._slots, self._offset, step, time.monotonic())
        if self._is_first:
            self._is_first = False
            self._record_start(step)
            self._spans = spans.totals()
        elif heartbeats.followed() != self._followed:
            self._followed, self._has_stayed = heartbeats.followed(), True
            self._record_rejoin(step)

    def _record_rejoin(self, step: int) -> None:
        """Record the events of the first step with a rank that has taken the place of a dead one."""
        try:
            self._start = json.loads(launch_protocol.rejoin_file(self._run_dir).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self._began_at = self._start["started_at"]
        self._record_deaths(step, {"start": 0.0, **self._measure_parts(time.monotonic() - self._began_at)})
        self._spans = spans.totals()

    def _record_start(self, step: int) -> None:
        """Record the events of the first step, and report the modules that a restart would import again, if there are any."""
        now = time.monotonic()
        parts = self._measure_parts(now - self._began_at)
        start_s = self._began_at - self._start["started_at"]
        parts = {"start": start_s, **parts}
        spans.record_event("started", step=step, seconds=now - self._start["started_at"], parts=_rounded(parts))
        self._record_deaths(step, parts)
        if self._modules_file is not None and (names := _library_modules(self._modules)):
            try:
                self._modules_file.write_text("\n".join(names), encoding="utf-8")
            except OSError:
                # A full disk costs the next restart its imports, and nothing else.
                return
            heartbeats.report(heartbeats.ProgressKind.STARTED, step)

    def _record_deaths(self, step: int, parts: Mapping[str, float]) -> None:
        now = time.monotonic()
        deaths = [Death(**death) for death in self._start["deaths"]]
        for death in deaths:
            earlier = {"failed attempts": deaths[-1].at - death.at} if death is not deaths[-1] else {}
            ending = {"ending": self._start["started_at"] - deaths[-1].at}
            spans.record_event(
                "recovered",
                step=step,
                rank_died=death.rank,
                cause=death.cause,
                last_step=death.step,
                lost_steps=max(0, death.step - (step - 1)),
                seconds=round(now - death.at, 4),
                survivors=self._start["survivors"],
                parts=_rounded({**earlier, **ending, **parts}),
            )

    def _measure_parts(self, all_s: float) -> dict[str, float]:
        totals = spans.totals()
        since = {name: total.seconds - before.seconds for name, total in totals.items() if (before := self._spans.get(name))}
        seconds = {name: total.seconds for name, total in totals.items()} | since
        rendezvous_ns = spans.first_entry_ns("rendezvous")
        is_start = rendezvous_ns is not None and not self._has_stayed
        parts = {"import": (rendezvous_ns - self._began_ns) / 1e9 if is_start and rendezvous_ns is not None else 0.0}
        parts |= {part: sum(seconds.get(name, 0.0) for name in names) for part, names in _SPANS.items()}
        parts["build"] = max(0.0, all_s - sum(parts.values()))
        return {part: parts[part] for part in PARTS if part in parts}


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: round(seconds, 4) for part, seconds in parts.items()}


def _library_modules(before: frozenset[str]) -> list[str]:
    """Return the modules that this process has imported from installed libraries, in order, except those of ``before``.

    The script's own modules are not among them: they run in each rank, as they would without a launcher.
    """
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], os.path.dirname(dtrain.__path__[0])}
    roots = tuple(folder + os.sep for folder in folders)
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if name in before or spec is None or spec.name != name or "\n" in name:
            continue
        if origin == "built-in" or (isinstance(origin, str) and origin.startswith(roots)):
            names.append(name)
    return names
