"""The loop that runs a job: starts the ranks, relays what they print, and ends all when one fails or somebody asks.

It waits in one ``select`` for everything that can happen: a child that ended and a signal (through the wake-up pipe),
output, room for output, the end of the front process (end of file on a pipe that only it holds open), and a deadline.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from functools import partial

from dtrain.launch import processes, verdict
from dtrain.launch.plan import LaunchPlan, rank_command, rank_environment
from dtrain.launch.relay import LineMarker, Outlet, PlainText, open_outlets
from dtrain.launch.spawn import RankProcess, start_rank
from dtrain.launch.verdict import Cause, Exit
from dtrain.wire import Failure

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_COLLECT_S = 0.5  # after the first failure: the culprit may still be in its exit handlers when a peer dies of it
_REPEAT_S = 0.3  # `timeout` and a terminal may deliver one request twice; a person takes longer to repeat it
_KILL_AGAIN_S = 0.05  # a process may fork while it is being killed
_GIVE_UP_S = 10.0  # after the first kill: what is left then sits in the kernel, and no signal reaches it
_PATIENCE_S = 10.0  # for a reader that does not read, after the job
_CHUNK = 1 << 16


@dataclass(slots=True, kw_only=True)
class _Job:
    """What is known about a running job. Times are seconds of the monotonic clock."""

    plan: LaunchPlan
    ranks: list[RankProcess] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    childless: bool = False  # nothing of the job is left, not even orphans
    asked_by: int | None = None  # the signal that asked us to end the job
    asked_at: float = 0.0
    cause: Cause | None = None
    trouble: str | None = None  # a rank that could not be started
    ending: bool = False  # ranks were asked to end: later exits say nothing
    orphans_asked: bool = False
    decide_at: float | None = None
    preempted_until: float | None = None
    kill_at: float | None = None
    give_up_at: float | None = None
    ended_ranks: frozenset[int] = frozenset()  # those that ran on until they were asked to end

    @property
    def alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.rank not in self.exits]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """One output stream of one rank and where it goes."""

    fd: int
    lines: LineMarker | PlainText
    outlet: Outlet


def supervise(plan: LaunchPlan, *, port: int, front_alive: int) -> int:
    """Run the job to its end and return the launcher's exit code; no process of the job is left then.

    Args:
        plan: what to start.
        port: where the ranks meet; held by the caller.
        front_alive: read end of a pipe that reaches its end when the front process dies.

    Mutates: this process's signal handlers; it must be single-threaded and a process of its own.
    """
    processes.become_subreaper()
    wake = _wake_up_pipe()
    stdout, stderr = open_outlets()
    job = _Job(plan=plan)
    with selectors.PollSelector() as selector:
        selector.register(wake, selectors.EVENT_READ, partial(_read_signals, job, wake))
        selector.register(front_alive, selectors.EVENT_READ, partial(_kill_all_now, job, selector, front_alive))
        _start_ranks(job, port)
        streams = _open_streams(job, stdout, stderr)
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ, partial(_relay_or_close, selector, streams, fd))
        while True:
            now = time.monotonic()
            _collect_exits(job, now)
            _advance(job, now)
            if job.childless or (job.give_up_at is not None and now >= job.give_up_at):
                break
            _watch_room(selector, {stdout, stderr})
            for key, _ in selector.select(_wait_s(job, now)):
                key.data()
    for stream in streams.values():
        while _relay(stream, until_empty=True):
            pass
        _close(stream)
    code, line = _conclude(job)
    if not job.childless:
        left = ", ".join(map(str, processes.descendants()))
        stderr.put(f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {left}\n".encode())
    if line is not None:
        stderr.put(line.encode(errors="backslashreplace") + b"\n")
    for outlet in {stdout, stderr}:
        outlet.flush(patience_s=_PATIENCE_S)
    return code


def _wake_up_pipe() -> int:
    """Have every signal we care about write its number into a pipe, and return the end to read from."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *ENDING_SIGNALS):
        signal.signal(number, lambda *_: None)  # a handler must exist, or nothing is written
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, *ENDING_SIGNALS))
    return read


def _start_ranks(job: _Job, port: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = rank_command(job.plan)
    for rank in range(job.plan.nproc):
        environment = rank_environment(job.plan, rank, port=port, cores=cores, inherited=os.environ)
        try:
            job.ranks.append(start_rank(rank, command, environment, keep_stdin=job.plan.nproc == 1))
        except OSError as error:
            job.trouble = f"dtrain: launch: rank {rank} of {job.plan.nproc} could not be started: {error.strerror}; use fewer"
            _end_ranks(job, time.monotonic(), signal.SIGTERM)
            return


def _open_streams(job: _Job, stdout: Outlet, stderr: Outlet) -> dict[int, _Stream]:
    streams = {}
    for rank in job.ranks:
        for fd, outlet in ((rank.stdout, stdout), (rank.stderr, stderr)):
            lines = PlainText() if job.plan.nproc == 1 else LineMarker(f"[rank {rank.rank}] ")
            streams[fd] = _Stream(fd=fd, lines=lines, outlet=outlet)
    return streams


def _collect_exits(job: _Job, now: float) -> None:
    ended, left = processes.reap()
    ranks = {rank.pid: rank.rank for rank in job.alive}
    for pid, code in ended:
        if pid in ranks:
            job.exits[ranks[pid]] = Exit(rank=ranks[pid], code=code, at=now)
    job.childless = not left


def _advance(job: _Job, now: float) -> None:
    """Take every step that is due: decide about a failure, ask to end, kill."""
    alive = job.alive
    if not job.ending:
        _decide(job, now)
    if not alive and not job.childless and not job.orphans_asked:
        job.orphans_asked = True
        processes.send_all(signal.SIGTERM, _pids(job))
        if job.kill_at is None:
            job.kill_at = now + job.plan.grace_s
    if job.kill_at is not None and now >= job.kill_at and not job.childless:
        processes.send_all(signal.SIGKILL, _pids(job))
        job.kill_at = now + _KILL_AGAIN_S
        if job.give_up_at is None:
            job.give_up_at = now + _GIVE_UP_S


def _decide(job: _Job, now: float) -> None:
    """Find out whether the job has failed; if so, name the cause and ask the other ranks to end."""
    exits, alive = job.exits.values(), job.alive
    if job.decide_at is None and any(map(verdict.is_failure, exits)):
        job.decide_at = now + _COLLECT_S
    if job.preempted_until is None and any(exit_.code == verdict.PREEMPTED for exit_ in exits):
        job.preempted_until = now + job.plan.grace_s
    if job.decide_at is not None and (now >= job.decide_at or not alive):
        records = [Failure.read(job.plan.failure_file(rank.rank)) for rank in job.ranks]
        job.cause = verdict.first_failure(list(exits), [record for record in records if record is not None])
        _end_ranks(job, now, signal.SIGTERM)
    elif job.decide_at is None and job.preempted_until is not None and now >= job.preempted_until and alive:
        _end_ranks(job, now, signal.SIGTERM)


def _end_ranks(job: _Job, now: float, number: int) -> None:
    job.ending = True
    job.ended_ranks = frozenset(rank.rank for rank in job.alive)
    for rank in job.alive:
        processes.send(rank.pid, number)
    job.kill_at = now + job.plan.grace_s


def _read_signals(job: _Job, wake: int) -> None:
    for number in os.read(wake, _CHUNK):
        if number in ENDING_SIGNALS:
            _on_signal(job, number, time.monotonic())


def _on_signal(job: _Job, number: int, now: float) -> None:
    """Somebody asks us to end: pass it on the first time, kill at once the second time."""
    if job.asked_by is None and job.alive:
        job.asked_by, job.asked_at = number, now
        if not job.ending:
            _end_ranks(job, now, number)
            return
        job.kill_at = now  # already ending because of a failure, and somebody does not want to wait for it
    elif job.asked_by is None or now - job.asked_at > _REPEAT_S:
        job.kill_at = now


def _kill_all_now(job: _Job, selector: selectors.BaseSelector, front_alive: int) -> None:
    """The front is gone, and with it everybody who could ask for anything more gentle."""
    selector.unregister(front_alive)
    job.ending, job.kill_at = True, 0.0


def _wait_s(job: _Job, now: float) -> float | None:
    deadlines = [job.kill_at, job.give_up_at]
    if not job.ending:
        deadlines += [job.decide_at, job.preempted_until]
    due = [deadline for deadline in deadlines if deadline is not None]
    return max(0.0, min(due) - now) if due else None


def _watch_room(selector: selectors.BaseSelector, outlets: set[Outlet]) -> None:
    """Be woken when there is room for output that waits, and only while some does."""
    for outlet in outlets:
        watched = outlet.fd in selector.get_map()
        if outlet.waiting and not watched:
            selector.register(outlet.fd, selectors.EVENT_WRITE, outlet.pump)
        elif watched and not outlet.waiting:
            selector.unregister(outlet.fd)


def _relay_or_close(selector: selectors.BaseSelector, streams: dict[int, _Stream], fd: int) -> None:
    if not _relay(streams[fd]):
        selector.unregister(fd)
        _close(streams.pop(fd))


def _relay(stream: _Stream, *, until_empty: bool = False) -> bool:
    """Pass on one chunk; whether more may come: later, or at once when ``until_empty``."""
    try:
        chunk = os.read(stream.fd, _CHUNK)
    except BlockingIOError:
        return not until_empty
    stream.outlet.put(stream.lines.feed(chunk))
    return bool(chunk)


def _close(stream: _Stream) -> None:
    stream.outlet.put(stream.lines.close())
    os.close(stream.fd)


def _pids(job: _Job) -> list[int]:
    return [rank.pid for rank in job.ranks]


def _conclude(job: _Job) -> tuple[int, str | None]:
    """The launcher's exit code and its last line, if it has something to say."""
    world_size = job.plan.nproc
    if verdict.all_preempted(job.exits.values(), world_size):
        return verdict.PREEMPTED, None
    if job.trouble is not None:
        return 1, job.trouble
    if job.cause is not None:
        line = verdict.describe_failure(
            job.cause,
            world_size=world_size,
            pid=job.ranks[job.cause.rank].pid,
            others_ended=bool(job.ended_ranks - {job.cause.rank}),
        )
        return verdict.exit_code(job.cause.code), line
    if job.asked_by is not None:
        return verdict.exit_code(-job.asked_by), verdict.describe_interrupt(job.asked_by)
    codes = {exit_.rank: None if exit_.rank in job.ended_ranks else exit_.code for exit_ in job.exits.values()}
    if verdict.PREEMPTED in codes.values():
        return 1, verdict.describe_partial_preemption(codes)
    return 0, None
