"""Run a job: start the ranks, relay their output, and end all ranks when a rank fails or a stop is requested.

The loop waits in one ``select`` for all events: child exits and signals (through the wake-up pipe), output of ranks, space for
output, messages of the fork server and of ranks, the first client of the ranks' store, the exit of the launcher (end of file on
a pipe that only the launcher holds open), and a deadline.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.launch import failure, heartbeats, processes
from dtrain.launch.failure import HANG_EXIT_CODE, describe_exit
from dtrain.launch.host_resources import count_oom_kills
from dtrain.launch.job import (
    Job,
    join_nodes,
    leave_nodes,
    listen_on_loopback,
    open_store,
    report_failure_to_nodes,
    start_ranks,
    take_store_listener,
    wait_for_all_nodes,
    watch_starter,
)
from dtrain.launch.job_output import JobOutput
from dtrain.launch.launch_dir import choose_socket_prefix, remove_socket_folders
from dtrain.launch.launch_plan import DEFAULT_SILENCE_S, LaunchPlan, build_common_environment
from dtrain.launch.result import JobResult, describe_failures, summarize
from dtrain.launch.starter import ProcessStarter
from dtrain.launch.terminal import NonBlockingWriter
from dtrain.launch.topology import find_stale_variables
from dtrain.launch.worker_group import REPEATED_SIGNAL_S, RestartPolicy, WorkerGroup

# seconds to wait for a slow reader of the output, after the job
_OUTPUT_TIMEOUT_S = 10.0
# seconds to wait for killed processes
_REAP_S = 10.0
_CHUNK = 1 << 16
# seconds for the last messages to other nodes, which read them at once or are lost
_AGENT_EXIT_S = DEFAULT_SILENCE_S + 3.0


def supervise(plan: LaunchPlan, *, launcher_alive: int, socket_prefix: str) -> int:
    """Run the job and return the launcher's exit code. No process of the job is left.

    Args:
        plan: options of the launch.
        launcher_alive: read end of a pipe that is closed when the launcher exits.
        socket_prefix: beginning of the paths of the ranks' folders for sockets.

    Mutates: this process's signal handlers; the process must be single-threaded and of its own.
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
            join_nodes(job, plan.rendezvous, lambda condition: _run_loop(job, condition))
        if not job.worker_group.stopping:
            # A single node has a secret of its own.
            secret = {launch_protocol.JOB_SECRET: secrets.token_hex(16)} if job.plan.layout.nodes == 1 else {}
            extra = {launch_protocol.SOCKET_FOLDER_PREFIX: socket_prefix}
            if job.output.has_live_line:
                extra[launch_protocol.LIVE_LINE] = "1"
            job.starter.common_environment = build_common_environment(job.plan, {**os.environ, **secret}) | extra
            job.starter.log_path = job.plan.run_dir / "logs" / "launcher.log"
            job.starter.preload(plan.preload)
            watch_starter(job)
        result = _run_attempts(job)
        _stop_services(job)
        remove_socket_folders(socket_prefix)
        lines = _final_lines(job, result)
        job.output.finish(lines, timeout_s=_OUTPUT_TIMEOUT_S, give_up=lambda: _should_stop_waiting(job, wake, launcher_alive))
    return result.code


def _should_stop_waiting(job: Job, wake: int, launcher_alive: int) -> bool:
    """Return True if the user sent another ending signal, or the launcher exited."""
    with contextlib.suppress(BlockingIOError):
        if any(number in launch_protocol.ENDING_SIGNALS for number in os.read(wake, _CHUNK)):
            return True
    return job.worker_group.force_requested or job.launcher_gone or bool(select.select([launcher_alive], [], [], 0)[0])


def _open_signal_pipe() -> int:
    """Make every watched signal write its number into a pipe, and return the read end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # The launcher has handlers for all signals that were not ignored at its start.
    ending = [number for number in launch_protocol.ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    watched = (signal.SIGCHLD, *ending, *launch_protocol.FORWARDED_SIGNALS, launch_protocol.STACKS_SIGNAL)
    for number in watched:
        # Without a handler, nothing is written to the pipe.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    return read


def _warn_stale_variables(job: Job) -> None:
    stale = find_stale_variables(os.environ)
    # In a multi-node job, such variables may contain this node's position.
    if stale and job.plan.rendezvous is None:
        job.output.write_line(f"dtrain: launch: ignoring {', '.join(stale)} in the environment, set by another launch")


def _run_attempts(job: Job) -> JobResult:
    """Start the ranks, restart them as the restart policy allows, and return the result of the last attempt."""
    while True:
        if not job.worker_group.stopping:
            if job.agent is None:
                open_store(job, listen_on_loopback())
            start_ranks(job)
        _run_loop(job, lambda: job.worker_group.awaits_news and not job.worker_group.stopping)
        result = _summarize_group(job)
        _close_worker_group(job)
        wait_for_all_nodes(job, result, lambda condition: _run_loop(job, condition))
        delay_s = job.restart_policy.delay_s
        if not result.may_restart or delay_s is None or job.launcher_gone or job.agent is not None:
            return _summarize_group(job)
        for line in _final_lines(job, result):
            job.output.write_line(line)
        job.output.write_line(f"dtrain: launch: {job.restart_policy.describe_next()}")
        job.restart_policy, job.store_exit_code = job.restart_policy.after_restart(), None
        job.worker_group = WorkerGroup(plan=job.plan, services=job.worker_group.services)
        begin_at = time.monotonic() + delay_s
        _run_loop(job, lambda at=begin_at: time.monotonic() < at, wake_at=begin_at)  # type: ignore[misc]
        # A stop was requested between two attempts.
        if job.worker_group.requested_signal is not None:
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


def _final_lines(job: Job, result: JobResult) -> list[str]:
    """Return the lines about a finished attempt: exceptions, then the summary."""
    full, is_shown, read_tail = job.plan.output.full_traceback, job.output.is_shown, job.output.read_tail
    lines = describe_failures(job.worker_group, result, is_shown=is_shown, read_tail=read_tail, full=full)
    return [*lines, *result.lines]


def _is_oom_killed(job: Job) -> bool:
    """Return True if the control group has counted an out-of-memory kill since the start of the job."""
    now = count_oom_kills()
    return now is not None and job.initial_oom_kills is not None and now > job.initial_oom_kills


def _run_loop(job: Job, condition: Callable[[], bool] = lambda: False, *, wake_at: float | None = None) -> None:
    """Handle events until no process of the attempt runs and ``condition`` is false, or until the end is forced."""
    while True:
        now = time.monotonic()
        job.worker_group.record_exits(processes.reap_children()[0], now)
        _check_store(job, now)
        job.worker_group.advance(now)
        _check_hang(job, now)
        report_failure_to_nodes(job, lambda: _summarize_group(job))
        if job.worker_group.stopping and any(pid is None for pid in job.worker_group.pids.values()):
            _drop_unstarted_ranks(job)
        waiting = job.worker_group.kill_at is None and condition()
        if (job.worker_group.is_finished and not waiting) or job.worker_group.has_given_up(now):
            return
        _watch_writable(job)
        for key, _ in job.selector.select(_select_timeout_s(job, now, wake_at)):
            key.data()


def _check_store(job: Job, now: float) -> None:
    """End the job if the store process has exited, because ranks would notice much later, with unrelated errors."""
    if job.store_pid is None or job.store_pid not in job.worker_group.unclaimed or job.store_exit_code is not None:
        return
    job.store_exit_code = job.worker_group.unclaimed[job.store_pid].code
    exit_text = describe_exit(job.store_exit_code)
    line = (
        "dtrain: launch: the process that serves the ranks' store ended early "
        f"({exit_text}, pid {job.store_pid}); ranks were ended"
    )
    if job.worker_group.alive:
        job.worker_group.fail([line], now)


def _check_hang(job: Job, now: float) -> None:
    group = job.worker_group
    if job.watchdog is None or group.stopping or group.decide_at is not None:
        # A failure explains more than the silence that follows it.
        return
    exit_codes = {rank: exit_.code for rank, exit_ in group.exits.items()}
    report = job.watchdog.poll(now, pids=group.running_pids(), exit_codes=exit_codes)
    group.hung = job.watchdog.is_hang_found
    if report is not None and report.is_hang:
        group.fail(report.lines, now, code=HANG_EXIT_CODE)
    elif report is not None:
        for line in report.lines:
            job.output.write_line(line)


def _drop_unstarted_ranks(job: Job) -> None:
    """Drop the ranks that have not started. Ranks that the fork server is forking get SIGTERM on arrival."""
    if job.starter.forkserver is not None and job.starter.forkserver.is_ready:
        job.worker_group.drop_ranks(job.starter.withdraw_pending())
        return
    # The fork server may import modules for a long time.
    if job.starter.forkserver is not None:
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
        has_no_receiver = number == job.plan.stop_signal and not job.worker_group.running_pids()
        if number in launch_protocol.ENDING_SIGNALS or has_no_receiver:
            job.worker_group.request_stop(number, time.monotonic())
        elif number in launch_protocol.FORWARDED_SIGNALS:
            job.worker_group.forward_signal(number)
        elif number == launch_protocol.STACKS_SIGNAL and job.watchdog is not None:
            job.watchdog.request_dump()


def _on_launcher_exit(job: Job, launcher_alive: int) -> None:
    """Kill all processes at once, because the launcher has exited and no softer request can arrive."""
    job.selector.unregister(launcher_alive)
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
        if record.kind == heartbeats.ProgressKind.CLOSED:
            job.worker_group.closed_ranks.add(record.rank)
        if record.kind == heartbeats.ProgressKind.FAILED:
            job.worker_group.record_script_exit(record.rank, record.value, time.monotonic())


def _watch_writable(job: Job) -> None:
    """Watch the launcher's own streams for space only while output is pending, because otherwise they are always writable."""
    watched = job.selector.get_map()
    for writer in job.output.writers:
        if writer.has_pending and writer.fd not in watched:
            job.selector.register(writer.fd, selectors.EVENT_WRITE, writer.flush_some)
        elif not writer.has_pending and writer.fd in watched:
            job.selector.unregister(writer.fd)


def _close_worker_group(job: Job) -> None:
    """Relay the rest of the output and stop the store process, after the exit of the last rank."""
    for fd in job.output.fds():
        job.selector.unregister(fd)
    job.output.drain()
    for record in job.worker_group.read_failures():
        if not record.already_printed and record.error_type != "SystemExit":
            job.output.append_to_log(record.rank, record.traceback_text)
    # The last commit of a rank may arrive together with its exit.
    _read_progress(job)
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
    """Stop the fork server and the agent at the end of the job."""
    if job.starter.forkserver is not None:
        pid = job.starter.forkserver.pid
        job.selector.unregister(job.starter.forkserver.channel)
        job.starter.stop_forkserver()
        _kill_service(job, pid)
    agent = leave_nodes(job)
    if agent is not None:
        _wait_for_service(job, agent, _AGENT_EXIT_S)
        _kill_service(job, agent)


def _kill_service(job: Job, pid: int) -> None:
    if pid not in job.worker_group.unclaimed:
        processes.send_signal(pid, signal.SIGKILL)
        _wait_for_service(job, pid, _REAP_S)
    job.worker_group.services.discard(pid)


def _wait_for_service(job: Job, pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while pid not in job.worker_group.unclaimed and time.monotonic() < deadline:
        job.worker_group.record_exits(processes.reap_children()[0], time.monotonic())
        time.sleep(0.001)


# seconds for the supervisor to end all processes after a repeated stop request
_FORCE_KILL_S = 1.0
# A process that survives SIGKILL for so long waits in the kernel.
_KILL_TIMEOUT_S = 10.0
# Title for ps. Avoid "dtrain" and "python", so that `pkill -f dtrain` does not kill the process that cleans up.
_SUPERVISOR_TITLE = "rank-supervisor"


def launch_job(plan: LaunchPlan) -> int:
    """Run the job and return the exit code for this process. No process of the job is left.

    Mutates: the signal handling and the subreaper attribute of this process permanently, so the process should exit afterwards.
    It must have a single thread.
    """
    # A shell that exec'ed this process may have left children, as in `exec dtrain launch ... > >(tee log)`.
    foreign_sessions = processes.list_sessions()
    processes.become_subreaper()
    # nohup and sh -c '... &' start this process with ignored signals.
    handled = {number for number in launch_protocol.ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    watched = {signal.SIGCHLD, *handled, *launch_protocol.FORWARDED_SIGNALS}
    for number in watched:
        # An ignored signal might never become pending.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    socket_prefix = choose_socket_prefix()
    launcher_alive, write_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(write_end)
        _run_supervisor(plan, launcher_alive, socket_prefix)
    os.close(launcher_alive)
    code, ending_signal = _wait_for_supervisor(supervisor, watched)
    processes.kill_descendants(timeout_s=_KILL_TIMEOUT_S, exclude_sessions=foreign_sessions)
    remove_socket_folders(socket_prefix)
    os.close(write_end)
    if code == -signal.SIGKILL and ending_signal is not None:
        _write_stderr(failure.describe_interrupt(ending_signal))
        return failure.shell_exit_code(-ending_signal)
    if code < 0:
        _write_stderr(
            f"dtrain: launch: the supervisor was killed by {failure.signal_name(-code)} (pid {supervisor}); ranks ended"
        )
    return failure.shell_exit_code(code)


def _write_stderr(text: str) -> None:
    """Write as much of ``text`` as stderr accepts without blocking, because the exit code is more important."""
    stderr = NonBlockingWriter(2)
    stderr.write(text.encode(errors="backslashreplace") + b"\n")
    stderr.close()


def _run_supervisor(plan: LaunchPlan, launcher_alive: int, socket_prefix: str) -> NoReturn:
    code = 1
    try:
        # Ctrl-C in a terminal reaches only the launcher, which forwards the signal.
        os.setsid()
        processes.set_process_title([_SUPERVISOR_TITLE], comm=_SUPERVISOR_TITLE)
        code = supervise(plan, launcher_alive=launcher_alive, socket_prefix=socket_prefix)
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers; the launcher ends the ranks
        _write_stderr(traceback.format_exc().rstrip("\n"))
    finally:
        os._exit(code)


def _wait_for_supervisor(supervisor: int, watched: set[signal.Signals]) -> tuple[int, int | None]:
    """Forward signals until the supervisor exits; kill the supervisor if it does not react to repeated stop requests.

    Returns:
        The exit code of the supervisor, negative for a signal. And the signal that requested the end of the job, if the
        supervisor was killed here because it was stopped, or waited for a disk or a network file system.
    """
    first: tuple[float, int] | None = None
    kill_at: float | None = None
    killed = False
    while True:
        number = _next_signal(watched, kill_at)
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            processes.send_signal(supervisor, signal.SIGKILL)
            killed, kill_at = True, None
        if number == signal.SIGCHLD:
            for pid, code in processes.reap_children()[0]:
                if pid == supervisor:
                    return code, first[1] if killed and first is not None else None
        elif number is not None:
            processes.send_signal(supervisor, number)
            if number not in launch_protocol.ENDING_SIGNALS:
                continue
            if first is None:
                first = now, number
            elif now - first[0] > REPEATED_SIGNAL_S and kill_at is None and not killed:
                kill_at = now + _FORCE_KILL_S


def _next_signal(watched: set[signal.Signals], until: float | None) -> int | None:
    """Return the next signal, or None if no signal arrives in time."""
    if until is None:
        return signal.sigwait(watched)
    info = signal.sigtimedwait(watched, max(0.0, until - time.monotonic()))
    return None if info is None else info.si_signo
