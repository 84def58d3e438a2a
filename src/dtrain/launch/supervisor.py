"""The loop that runs a job: starts the ranks, relays what they print, and ends all when one fails or somebody asks.

It waits in one ``select`` for everything that can happen: a child that ended and a signal (through the wake-up pipe),
output, room for output, what the preloaded process and the ranks report, the first client of the ranks' store, the end of the
front process (end of file on a pipe that only it holds open), and a deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from dtrain import pulse, wire
from dtrain.launch import companions, processes, verdict
from dtrain.launch.attempt import Attempt
from dtrain.launch.cgroup import oom_kills
from dtrain.launch.conclusion import End, conclude, describe_failures
from dtrain.launch.job import Job
from dtrain.launch.output.output import Output
from dtrain.launch.plan import LaunchPlan, common_environment, stale_variables
from dtrain.launch.restarts import Restarts
from dtrain.launch.start.starter import Starter
from dtrain.launch.starting import listen_on_loopback, open_store, start_ranks, unwatched_listener, watch_starter

_PATIENCE_S = 10.0  # for a reader that does not read, after the job
_REAP_S = 10.0  # for processes that were killed
_CHUNK = 1 << 16
_LEAVE_S = 3.0  # for the last words to the other nodes


def supervise(plan: LaunchPlan, *, front_alive: int) -> int:
    """Run the job to its end and return the launcher's exit code; no process of the job is left then.

    Args:
        plan: what to start.
        front_alive: read end of a pipe that reaches its end when the front process dies.

    Mutates: this process's signal handlers; it must be single-threaded and a process of its own.
    """
    processes.become_subreaper()
    wake = _wake_up_pipe()
    with selectors.PollSelector() as selector:
        job = Job(
            plan=plan,
            selector=selector,
            output=Output(plan.output, plan.layout, plan.run_dir),
            starter=Starter(target=plan.target),
            attempt=Attempt(plan=plan, services=set()),
            restarts=Restarts(most=plan.max_restarts),
            pulses=os.pipe(),
            decoder=pulse.Decoder(),
            null=os.open(os.devnull, os.O_RDONLY),
            oom_kills=oom_kills(),
        )
        job.watch(wake, lambda: _read_signals(job, wake))
        job.watch(front_alive, lambda: _on_front_gone(job, front_alive))
        os.set_blocking(job.pulses[0], False)
        job.watch(job.pulses[0], lambda: _read_pulses(job))
        _say_what_is_replaced(job)
        if plan.meeting is not None:
            companions.join(job, plan.meeting, lambda wanted: _loop(job, wanted))
        if not job.attempt.ending:
            job.starter.common = common_environment(job.plan, os.environ)
            job.starter.log = job.plan.run_dir / "logs" / "launcher.log"
            job.starter.preload(plan.preload)
            watch_starter(job)
        end = _run_attempts(job)
        _end_services(job)
        words = _last_words(job, end)
        job.output.finish(words, patience_s=_PATIENCE_S, give_up=lambda: _nobody_waits(job, wake, front_alive))
    return end.code


def _nobody_waits(job: Job, wake: int, front_alive: int) -> bool:
    """Whether the user has had enough of waiting for a reader, or there is no front any more."""
    with contextlib.suppress(BlockingIOError):
        if any(number in wire.ENDING_SIGNALS for number in os.read(wake, _CHUNK)):
            return True
    return job.attempt.insisted or job.front_gone or bool(select.select([front_alive], [], [], 0)[0])


def _wake_up_pipe() -> int:
    """Have every signal we care about write its number into a pipe, and return the end to read from."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # The front has handlers for all that were not ignored when it started.
    ending = [number for number in wire.ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    watched = (signal.SIGCHLD, *ending, *wire.PASSED_ON, wire.STACKS_SIGNAL)
    for number in watched:
        signal.signal(number, lambda *_: None)  # a handler must exist, or nothing is written
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    return read


def _say_what_is_replaced(job: Job) -> None:
    stale = stale_variables(os.environ)
    if stale and job.plan.meeting is None:  # on several nodes such variables may be what has told the place of this one
        job.output.say(f"dtrain: launch: {', '.join(stale)} in the environment are of another launch, and are replaced")


def _run_attempts(job: Job) -> End:
    """Start the ranks, and start them again as often as that is wanted; how the last attempt ended."""
    while True:
        if not job.attempt.ending:
            if job.agent is None:
                open_store(job, listen_on_loopback())
            start_ranks(job)
        _loop(job)
        end = _concluded(job)
        _close_attempt(job)
        companions.wait_for_all(job, end, lambda wanted: _loop(job, wanted))
        delay_s = job.restarts.delay_s
        if not end.may_start_again or delay_s is None or job.front_gone or job.agent is not None:
            return _concluded(job)
        for line in _last_words(job, end):
            job.output.say(line)
        job.output.say(f"dtrain: launch: {job.restarts.describe_next()}")
        job.restarts, job.lost_store = job.restarts.begun(), None
        job.attempt = Attempt(plan=job.plan, services=job.attempt.services)
        begin_at = time.monotonic() + delay_s
        _loop(job, lambda at=begin_at: time.monotonic() < at, wake_at=begin_at)  # type: ignore[misc]
        if job.attempt.asked_by is not None:  # while nothing ran
            return _concluded(job)


def _concluded(job: Job) -> End:
    codes = None if job.over is None else job.over.codes
    if job.store is not None and job.store in job.attempt.unclaimed:
        job.lost_store = job.attempt.unclaimed[job.store].code
    return conclude(
        job.attempt,
        host=socket.gethostname(),
        killed_for_memory=_killed_for_memory(job),
        codes=codes,
        lost_store=job.lost_store,
    )


def _last_words(job: Job, end: End) -> list[str]:
    """What is said about an attempt that has ended."""
    full, shows, tail = job.plan.output.full_traceback, job.output.shows, job.output.tail
    return [*describe_failures(job.attempt, end, shows=shows, tail=tail, full=full), *end.lines]


def _killed_for_memory(job: Job) -> bool:
    """Whether the kernel has killed a process of this control group for want of memory since the start."""
    now = oom_kills()
    return now is not None and job.oom_kills is not None and now > job.oom_kills


def _loop(job: Job, wanted: Callable[[], bool] = lambda: False, *, wake_at: float | None = None) -> None:
    """Handle what happens until nothing of the attempt runs, and while more is ``wanted``, or until somebody has had enough."""
    while True:
        now = time.monotonic()
        job.attempt.collect(processes.reap()[0], now)
        _look_for_store(job, now)
        job.attempt.advance(now)
        _look_for_hang(job, now)
        companions.tell_of_failure(job, lambda: _concluded(job))
        if job.attempt.ending and any(pid is None for pid in job.attempt.pids.values()):
            _forget_unborn(job)
        waiting = job.attempt.kill_at is None and wanted()
        if (job.attempt.over and not waiting) or job.attempt.gave_up(now):
            return
        _watch_room(job)
        for key, _ in job.selector.select(_wait_s(job, now, wake_at)):
            key.data()


def _look_for_store(job: Job, now: float) -> None:
    """End the job if the process that serves the ranks' store has ended: ranks would notice much later, each in its own way."""
    if job.store is None or job.store not in job.attempt.unclaimed or job.lost_store is not None:
        return
    job.lost_store = job.attempt.unclaimed[job.store].code
    how = verdict.describe_end(job.lost_store)
    line = f"dtrain: launch: the process that serves the ranks' store ended early ({how}, pid {job.store}); ranks were ended"
    if job.attempt.alive:
        job.attempt.fail([line], now)


def _look_for_hang(job: Job, now: float) -> None:
    attempt = job.attempt
    if job.guard is None or attempt.ending or attempt.decide_at is not None:
        return  # a failure explains more than the silence that follows it
    ended = {rank: exit_.code for rank, exit_ in attempt.exits.items()}
    answer = job.guard.step(now, pids=attempt.running(), ended=ended)
    attempt.hangs = job.guard.asking
    if answer is not None and answer.hang:
        attempt.fail(answer.lines, now, code=verdict.HUNG)
    elif answer is not None:
        for line in answer.lines:
            job.output.say(line)


def _forget_unborn(job: Job) -> None:
    """Ranks that are still to come must not. The few that the preloaded process is forking already are told when they come."""
    if job.starter.preloaded is not None and job.starter.preloaded.ready:
        job.attempt.forget(job.starter.withdraw())
        return
    if job.starter.preloaded is not None:  # it may import for long
        job.selector.unregister(job.starter.preloaded.channel)
        job.starter.abandon()
    job.attempt.forget([rank for rank, pid in job.attempt.pids.items() if pid is None])


def _wait_s(job: Job, now: float, wake_at: float | None) -> float | None:
    due = job.attempt.deadlines()
    if wake_at is not None:
        due.append(wake_at)
    if job.guard is not None and not job.attempt.ending and (at := job.guard.deadline()) is not None:
        due.append(at)
    return max(0.0, min(due) - now) if due else None


def _read_signals(job: Job, wake: int) -> None:
    for number in os.read(wake, _CHUNK):
        nobody_hears = number == job.plan.stop_signal and not job.attempt.running()
        if number in wire.ENDING_SIGNALS or nobody_hears:
            job.attempt.ask_to_end(number, time.monotonic())
        elif number in wire.PASSED_ON:
            job.attempt.forward(number)
        elif number == wire.STACKS_SIGNAL and job.guard is not None:
            job.guard.ask()


def _on_front_gone(job: Job, front_alive: int) -> None:
    """The front is gone, and with it everybody who could ask for anything more gentle."""
    job.selector.unregister(front_alive)
    job.front_gone = True
    job.attempt.kill_now()


def _read_pulses(job: Job) -> None:
    try:
        data = os.read(job.pulses[0], _CHUNK)
    except BlockingIOError:
        return
    for record in job.decoder.feed(data):
        if job.guard is not None:
            job.guard.feed(record)
        if record.kind == pulse.Kind.COMMITTED:
            job.restarts = job.restarts.saw_commit(record.value)
        if record.kind == pulse.Kind.FAILED:
            job.attempt.left_script(record.rank, record.value, time.monotonic())


def _watch_room(job: Job) -> None:
    """Watch the launcher's own streams for room while they have something to write, and no longer: they always have room."""
    watched = job.selector.get_map()
    for outlet in job.output.outlets:
        if outlet.waiting and outlet.fd not in watched:
            job.selector.register(outlet.fd, selectors.EVENT_WRITE, outlet.pump)
        elif not outlet.waiting and outlet.fd in watched:
            job.selector.unregister(outlet.fd)


def _close_attempt(job: Job) -> None:
    """After the last rank: pass on the last of the output, and end the store."""
    for fd in job.output.fds():
        job.selector.unregister(fd)
    job.output.drain()
    for failure in job.attempt.failures():
        if not failure.printed and failure.kind != "SystemExit":
            job.output.keep(failure.rank, failure.frames)
    _read_pulses(job)  # a rank's last commit may have come together with its end
    if job.guard is not None:
        job.guard.close()
        job.guard = None
    listener = unwatched_listener(job)
    if listener is not None:
        listener.close()
    if job.store is not None:
        _kill_service(job, job.store)
        job.store = None


def _end_services(job: Job) -> None:
    """At the end of the job: the preloaded process, and the one that talks to the other nodes."""
    if job.starter.preloaded is not None:
        pid = job.starter.preloaded.pid
        job.selector.unregister(job.starter.preloaded.channel)
        job.starter.abandon()
        _kill_service(job, pid)
    agent = companions.leave(job)
    if agent is not None:
        _wait_for_service(job, agent, _LEAVE_S)
        _kill_service(job, agent)


def _kill_service(job: Job, pid: int) -> None:
    if pid not in job.attempt.unclaimed:
        processes.send(pid, signal.SIGKILL)
        _wait_for_service(job, pid, _REAP_S)
    job.attempt.services.discard(pid)


def _wait_for_service(job: Job, pid: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while pid not in job.attempt.unclaimed and time.monotonic() < deadline:
        job.attempt.collect(processes.reap()[0], time.monotonic())
        time.sleep(0.001)
