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

from dtrain import heartbeats, launch_protocol
from dtrain.launch import multi_node, processes
from dtrain.launch.failure import HANG_EXIT_CODE, describe_exit
from dtrain.launch.host_resources import count_oom_kills
from dtrain.launch.job import Job, listen_on_loopback, open_store, start_ranks, take_store_listener, watch_starter
from dtrain.launch.launch_plan import LaunchPlan, build_common_environment, find_stale_variables
from dtrain.launch.output.job_output import JobOutput
from dtrain.launch.result import JobResult, describe_failures, summarize
from dtrain.launch.spawn.starter import ProcessStarter
from dtrain.launch.worker_group import RestartPolicy, WorkerGroup

_OUTPUT_TIMEOUT_S = 10.0  # for a reader that does not read, after the job
_REAP_S = 10.0  # for processes that were killed
_CHUNK = 1 << 16
_AGENT_EXIT_S = 3.0  # for the last words to the other nodes


def supervise(plan: LaunchPlan, *, launcher_alive: int) -> int:
    """Run the job to its end and return the launcher's exit code; no process of the job is left then.

    Args:
        plan: what to start.
        launcher_alive: read end of a pipe that reaches its end when the front process dies.

    Mutates: this process's signal handlers; it must be single-threaded and a process of its own.
    """
    processes.become_subreaper()
    wake = _open_signal_pipe()
    with selectors.PollSelector() as selector:
        job = Job(
            plan=plan,
            selector=selector,
            output=JobOutput(plan.output, plan.layout, plan.run_dir),
            starter=ProcessStarter(target=plan.target),
            worker_group=WorkerGroup(plan=plan, services=set()),
            restart_policy=RestartPolicy(max_fruitless=plan.max_restarts),
            progress_pipe=os.pipe(),
            progress_decoder=heartbeats.ProgressDecoder(),
            devnull_fd=os.open(os.devnull, os.O_RDONLY),
            initial_oom_kills=count_oom_kills(),
        )
        job.watch(wake, lambda: _read_signals(job, wake))
        job.watch(launcher_alive, lambda: _on_launcher_exit(job, launcher_alive))
        os.set_blocking(job.progress_pipe[0], False)
        job.watch(job.progress_pipe[0], lambda: _read_progress(job))
        _warn_stale_variables(job)
        if plan.rendezvous is not None:
            multi_node.join_nodes(job, plan.rendezvous, lambda wanted: _run_loop(job, wanted))
        if not job.worker_group.stopping:
            job.starter.common_environment = build_common_environment(job.plan, os.environ)
            job.starter.log_path = job.plan.run_dir / "logs" / "launcher.log"
            job.starter.preload(plan.preload)
            watch_starter(job)
        end = _run_attempts(job)
        _stop_services(job)
        words = _final_lines(job, end)
        job.output.finish(words, timeout_s=_OUTPUT_TIMEOUT_S, give_up=lambda: _should_stop_waiting(job, wake, launcher_alive))
    return end.code


def _should_stop_waiting(job: Job, wake: int, front_alive: int) -> bool:
    """Whether the user has had enough of waiting for a reader, or there is no front any more."""
    with contextlib.suppress(BlockingIOError):
        if any(number in launch_protocol.ENDING_SIGNALS for number in os.read(wake, _CHUNK)):
            return True
    return job.worker_group.force_requested or job.launcher_gone or bool(select.select([front_alive], [], [], 0)[0])


def _open_signal_pipe() -> int:
    """Have every signal we care about write its number into a pipe, and return the end to read from."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # The front has handlers for all that were not ignored when it started.
    ending = [number for number in launch_protocol.ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    watched = (signal.SIGCHLD, *ending, *launch_protocol.FORWARDED_SIGNALS, launch_protocol.STACKS_SIGNAL)
    for number in watched:
        signal.signal(number, lambda *_: None)  # a handler must exist, or nothing is written
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    return read


def _warn_stale_variables(job: Job) -> None:
    stale = find_stale_variables(os.environ)
    if stale and job.plan.rendezvous is None:  # on several nodes such variables may be what has told the place of this one
        job.output.write_line(f"dtrain: launch: {', '.join(stale)} in the environment are of another launch, and are replaced")


def _run_attempts(job: Job) -> JobResult:
    """Start the ranks, and start them again as often as that is wanted; how the last attempt ended."""
    while True:
        if not job.worker_group.stopping:
            if job.agent is None:
                open_store(job, listen_on_loopback())
            start_ranks(job)
        _run_loop(job)
        end = _summarize_group(job)
        _close_worker_group(job)
        multi_node.wait_for_all_nodes(job, end, lambda wanted: _run_loop(job, wanted))
        delay_s = job.restart_policy.delay_s
        if not end.may_restart or delay_s is None or job.launcher_gone or job.agent is not None:
            return _summarize_group(job)
        for line in _final_lines(job, end):
            job.output.write_line(line)
        job.output.write_line(f"dtrain: launch: {job.restart_policy.describe_next()}")
        job.restart_policy, job.store_exit_code = job.restart_policy.after_restart(), None
        job.worker_group = WorkerGroup(plan=job.plan, services=job.worker_group.services)
        begin_at = time.monotonic() + delay_s
        _run_loop(job, lambda at=begin_at: time.monotonic() < at, wake_at=begin_at)  # type: ignore[misc]
        if job.worker_group.requested_signal is not None:  # while nothing ran
            return _summarize_group(job)


def _summarize_group(job: Job) -> JobResult:
    codes = None if job.job_finished is None else job.job_finished.exit_codes
    if job.store_pid is not None and job.store_pid in job.worker_group.unclaimed:
        job.store_exit_code = job.worker_group.unclaimed[job.store_pid].code
    return summarize(
        job.worker_group,
        host=socket.gethostname(),
        oom_killed=_is_oom_killed(job),
        exit_codes=codes,
        store_exit_code=job.store_exit_code,
    )


def _final_lines(job: Job, end: JobResult) -> list[str]:
    """What is said about an attempt that has ended."""
    full, shows, tail = job.plan.output.full_traceback, job.output.is_shown, job.output.read_tail
    return [*describe_failures(job.worker_group, end, is_shown=shows, read_tail=tail, full=full), *end.lines]


def _is_oom_killed(job: Job) -> bool:
    """Whether the kernel has killed a process of this control group for want of memory since the start."""
    now = count_oom_kills()
    return now is not None and job.initial_oom_kills is not None and now > job.initial_oom_kills


def _run_loop(job: Job, wanted: Callable[[], bool] = lambda: False, *, wake_at: float | None = None) -> None:
    """Handle what happens until nothing of the attempt runs, and while more is ``wanted``, or until somebody has had enough."""
    while True:
        now = time.monotonic()
        job.worker_group.record_exits(processes.reap_children()[0], now)
        _check_store(job, now)
        job.worker_group.advance(now)
        _check_hang(job, now)
        multi_node.report_failure_to_nodes(job, lambda: _summarize_group(job))
        if job.worker_group.stopping and any(pid is None for pid in job.worker_group.pids.values()):
            _drop_unstarted_ranks(job)
        waiting = job.worker_group.kill_at is None and wanted()
        if (job.worker_group.is_finished and not waiting) or job.worker_group.has_given_up(now):
            return
        _watch_writable(job)
        for key, _ in job.selector.select(_select_timeout_s(job, now, wake_at)):
            key.data()


def _check_store(job: Job, now: float) -> None:
    """End the job if the process that serves the ranks' store has ended: ranks would notice much later, each in its own way."""
    if job.store_pid is None or job.store_pid not in job.worker_group.unclaimed or job.store_exit_code is not None:
        return
    job.store_exit_code = job.worker_group.unclaimed[job.store_pid].code
    how = describe_exit(job.store_exit_code)
    line = (
        f"dtrain: launch: the process that serves the ranks' store ended early ({how}, pid {job.store_pid}); ranks were ended"
    )
    if job.worker_group.alive:
        job.worker_group.fail([line], now)


def _check_hang(job: Job, now: float) -> None:
    attempt = job.worker_group
    if job.watchdog is None or attempt.stopping or attempt.decide_at is not None:
        return  # a failure explains more than the silence that follows it
    ended = {rank: exit_.code for rank, exit_ in attempt.exits.items()}
    answer = job.watchdog.poll(now, pids=attempt.running_pids(), exit_codes=ended)
    attempt.hung = job.watchdog.is_hang_found
    if answer is not None and answer.is_hang:
        attempt.fail(answer.lines, now, code=HANG_EXIT_CODE)
    elif answer is not None:
        for line in answer.lines:
            job.output.write_line(line)


def _drop_unstarted_ranks(job: Job) -> None:
    """Ranks that are still to come must not. The few that the preloaded process is forking already are told when they come."""
    if job.starter.forkserver is not None and job.starter.forkserver.is_ready:
        job.worker_group.drop_ranks(job.starter.withdraw_pending())
        return
    if job.starter.forkserver is not None:  # it may import for long
        job.selector.unregister(job.starter.forkserver.channel)
        job.starter.stop_forkserver()
    job.worker_group.drop_ranks([rank for rank, pid in job.worker_group.pids.items() if pid is None])


def _select_timeout_s(job: Job, now: float, wake_at: float | None) -> float | None:
    due = job.worker_group.deadlines()
    if wake_at is not None:
        due.append(wake_at)
    if job.watchdog is not None and not job.worker_group.stopping and (at := job.watchdog.deadline()) is not None:
        due.append(at)
    return max(0.0, min(due) - now) if due else None


def _read_signals(job: Job, wake: int) -> None:
    for number in os.read(wake, _CHUNK):
        nobody_hears = number == job.plan.stop_signal and not job.worker_group.running_pids()
        if number in launch_protocol.ENDING_SIGNALS or nobody_hears:
            job.worker_group.request_stop(number, time.monotonic())
        elif number in launch_protocol.FORWARDED_SIGNALS:
            job.worker_group.forward_signal(number)
        elif number == launch_protocol.STACKS_SIGNAL and job.watchdog is not None:
            job.watchdog.request_dump()


def _on_launcher_exit(job: Job, front_alive: int) -> None:
    """The front is gone, and with it everybody who could ask for anything more gentle."""
    job.selector.unregister(front_alive)
    job.launcher_gone = True
    job.worker_group.kill_now()


def _read_progress(job: Job) -> None:
    try:
        data = os.read(job.progress_pipe[0], _CHUNK)
    except BlockingIOError:
        return
    for record in job.progress_decoder.feed(data):
        if job.watchdog is not None:
            job.watchdog.record_progress(record)
        if record.kind == heartbeats.ProgressKind.COMMITTED:
            job.restart_policy = job.restart_policy.after_commit(record.value)
        if record.kind == heartbeats.ProgressKind.FAILED:
            job.worker_group.record_script_exit(record.rank, record.value, time.monotonic())


def _watch_writable(job: Job) -> None:
    """Watch the launcher's own streams for room while they have something to write, and no longer: they always have room."""
    watched = job.selector.get_map()
    for outlet in job.output.writers:
        if outlet.has_pending and outlet.fd not in watched:
            job.selector.register(outlet.fd, selectors.EVENT_WRITE, outlet.flush_some)
        elif not outlet.has_pending and outlet.fd in watched:
            job.selector.unregister(outlet.fd)


def _close_worker_group(job: Job) -> None:
    """After the last rank: pass on the last of the output, and end the store."""
    for fd in job.output.fds():
        job.selector.unregister(fd)
    job.output.drain()
    for failure in job.worker_group.read_failures():
        if not failure.already_printed and failure.error_type != "SystemExit":
            job.output.append_to_log(failure.rank, failure.traceback_text)
    _read_progress(job)  # a rank's last commit may have come together with its end
    if job.watchdog is not None:
        job.watchdog.close()
        job.watchdog = None
    listener = take_store_listener(job)
    if listener is not None:
        listener.close()
    if job.store_pid is not None:
        _kill_service(job, job.store_pid)
        job.store_pid = None


def _stop_services(job: Job) -> None:
    """At the end of the job: the preloaded process, and the one that talks to the other nodes."""
    if job.starter.forkserver is not None:
        pid = job.starter.forkserver.pid
        job.selector.unregister(job.starter.forkserver.channel)
        job.starter.stop_forkserver()
        _kill_service(job, pid)
    agent = multi_node.leave_nodes(job)
    if agent is not None:
        _wait_for_service(job, agent, _AGENT_EXIT_S)
        _kill_service(job, agent)


def _kill_service(job: Job, pid: int) -> None:
    if pid not in job.worker_group.unclaimed:
        processes.send_signal(pid, signal.SIGKILL)
        _wait_for_service(job, pid, _REAP_S)
    job.worker_group.services.discard(pid)


def _wait_for_service(job: Job, pid: int, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while pid not in job.worker_group.unclaimed and time.monotonic() < deadline:
        job.worker_group.record_exits(processes.reap_children()[0], time.monotonic())
        time.sleep(0.001)
