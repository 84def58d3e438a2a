"""``spawn``: several real ranks of a function, from a script or a notebook.

The ranks are forks of this process, so a closure or a function typed into a notebook works, and nothing is imported twice.
They are supervised as by the launcher: the first failure ends them all, and none outlives the call or this process.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtrain import wire
from dtrain.errors import ConfigError, RankError
from dtrain.launch.forked import ForkedRank, Task, fork_rank
from dtrain.launch.plan import MAX_RANKS
from dtrain.launch.port import hold_port
from dtrain.launch.processes import interrupts_held, send
from dtrain.launch.verdict import Cause, first_failure, is_failure, signal_name

GRACE_S = 5.0
"""Between asking a rank to end and killing it, in seconds."""

_LOOK_S = 0.05  # how often ends of processes are looked for; what they report wakes the loop at once
_ASK_AGAIN_S = 2.5
_COLLECT_S = 0.5  # after the first failure: a peer may die of it before the culprit's own report is here


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    name: str
    nproc: int
    ranks: list[ForkedRank] = field(default_factory=list)

    def alive(self) -> list[ForkedRank]:
        return [rank for rank in self.ranks if rank.end is None]

    def collect(self) -> None:
        with interrupts_held():
            for rank in self.alive():
                rank.collect(time.monotonic())

    def failed(self) -> bool:
        return any(rank.end is not None and is_failure(rank.end) for rank in self.ranks)


def spawn(fn: Callable[..., Any], *args: Any, nproc: int, timeout_s: float | None = None) -> list[Any]:
    """The results of ``fn(*args)`` on ``nproc`` real ranks of this machine, by rank.

    Each rank is a fork of this process with the environment of a launched rank, so ``fn`` calls ``init_dist`` as a script
    would. It sees copies of everything here, the random streams too (``seed_all(seed, rank)`` tells ranks apart). What it
    changes is lost; its result comes back as JSON holds it (tuples become lists). Ranks print where this process does.

        def train(steps):
            with dt.init_dist() as info:
                ...
            return {"rank": info.rank, "loss": loss}

        results = dt.spawn(train, 100, nproc=2)

    A fork has none of its parent's threads: where torch was loaded here before, it computes with one thread in each rank.

    Args:
        fn: any callable, also a closure; its result is plain data.
        args: anything; nothing is serialised on the way in.
        nproc: number of ranks, 1 to 256.
        timeout_s: after so many seconds all ranks are ended; None waits as long as they run.

    Raises:
        ConfigError: ``nproc`` or ``timeout_s`` out of range, a process group is open here, CUDA has started here (a fork could
            use neither), or a result is not plain data.
        RankError: a rank could not be started, raised (its traceback follows), exited, was killed, or did not finish in time.
            All ranks are ended then, as they are on Ctrl-C, and when this process dies.
    """
    _check(nproc, timeout_s)
    job = _Job(name=getattr(fn, "__qualname__", repr(fn)), nproc=nproc)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        gc.collect()  # process groups that wait in garbage are freed here, where their threads are
        with hold_port() as held:
            task = Task(fn=fn, args=args, nproc=nproc, held=held)
            for rank in range(nproc):
                with interrupts_held():
                    job.ranks.append(_started(task, rank))
            _watch(job, deadline)
            return _results(job)
    finally:
        _end(job)


def _check(nproc: int, timeout_s: float | None) -> None:
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= MAX_RANKS:
        raise ConfigError(f"spawn: nproc must be a whole number from 1 to {MAX_RANKS}, got {nproc!r}; 2 is a start")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"spawn: timeout_s must be a positive number of seconds, or None, got {timeout_s!r}")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("spawn: a process group is open in this process; call it before init_dist, or after its block")
    if torch.cuda.is_initialized():
        raise ConfigError("spawn: CUDA has started in this process, and a fork cannot use it; call it before any use of a GPU")


def _started(task: Task, rank: int) -> ForkedRank:
    try:
        return fork_rank(task, rank)
    except OSError as error:
        raise RankError(f"spawn: rank {rank} of {task.nproc} could not be started: {error.strerror}; use fewer") from None


def _watch(job: _Job, deadline: float | None) -> None:
    """Until every rank has ended; or one has failed, and what the others had to say about it is in; or the time is up."""
    decide_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank in job.ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while job.alive():
            for key, _ in selector.select(_LOOK_S):
                if not key.data.read():
                    selector.unregister(key.fd)
            job.collect()
            now = time.monotonic()
            if decide_at is None and job.failed():
                decide_at = now + _COLLECT_S
            if decide_at is not None and now >= decide_at:
                return
            if deadline is not None and now >= deadline and (late := [rank.rank for rank in job.alive()]):
                raise RankError(
                    f"spawn: {job.name}: ranks {late} of {job.nproc} did not finish within timeout_s and were ended; "
                    "do they wait for each other?"
                )
            if not selector.get_map():
                time.sleep(_LOOK_S)  # all has been said, but not everybody has ended


def _results(job: _Job) -> list[Any]:
    """The results by rank.

    Raises:
        ConfigError: one that is not plain data.
        RankError: a rank failed; the one that the others followed.
    """
    reports = {rank.rank: rank.report() for rank in job.ranks}
    for rank, report in reports.items():
        if "not_plain" in report:
            raise ConfigError(f"spawn: {job.name}: rank {rank} returned what JSON cannot hold ({report['not_plain']})")
    cause = _cause(job, reports)
    if cause is not None:
        raise RankError(f"spawn: {job.name}: rank {cause.rank} of {job.nproc} {_how(cause)}")
    for ended in job.ranks:
        if "result" not in reports[ended.rank] and ended.end is not None:
            who = f"rank {ended.rank} of {job.nproc}"
            raise RankError(f"spawn: {job.name}: {who} exited with code {ended.end.code} before it returned")
    return [reports[rank.rank]["result"] for rank in job.ranks]


def _cause(job: _Job, reports: dict[int, dict[str, Any]]) -> Cause | None:
    """The first failure; a rank that only lost its peers is blamed when there is no other."""
    failures = {rank: wire.Failure(**report["failure"]) for rank, report in reports.items() if "failure" in report}
    echoes = {rank for rank in failures if reports[rank]["of_a_peer"]}
    exits = [rank.end for rank in job.ranks if rank.end is not None]
    first = first_failure(
        [exit_ for exit_ in exits if exit_.rank not in echoes],
        [failure for rank, failure in failures.items() if rank not in echoes],
    )
    return first if first is not None or not echoes else first_failure(exits, list(failures.values()))


def _how(cause: Cause) -> str:
    failure = cause.failure
    if failure is not None and failure.kind != "SystemExit":
        return f"failed: {failure.kind}: {failure.message}\n{failure.frames}".rstrip()
    if cause.code < 0:
        hint = "; often the kernel, out of memory" if cause.code == -signal.SIGKILL else ""
        return f"was killed by {signal_name(-cause.code)}{hint}"
    said = f": {failure.message}" if failure is not None and not failure.message.isdecimal() else ""
    return f"exited with code {cause.code}{said}"


def _end(job: _Job) -> None:
    """End every rank that runs, gently first; no process of the job is left, nor a zombie. Ctrl-C makes it shorter."""
    try:
        # Asked twice: a rank that could save takes the first signal for a request to do so, and the second one for the end.
        for patience_s in (_ASK_AGAIN_S, GRACE_S - _ASK_AGAIN_S):
            for rank in job.alive():
                send(rank.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience_s
            while job.alive() and time.monotonic() < deadline:
                job.collect()
                time.sleep(_LOOK_S / 5)
    finally:
        with interrupts_held():
            for rank in job.alive():
                rank.kill_family()
            for rank in job.alive():
                os.waitpid(rank.pid, 0)
            for rank in job.ranks:
                os.close(rank.pipe)
