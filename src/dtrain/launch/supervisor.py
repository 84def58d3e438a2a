"""Run a job from the user's process: fork a supervisor, forward signals to it, and return its exit code.

The supervisor is a process that runs one ``Job``: the event loop is ``Job.run_loop``, and ``WorkerGroup`` ends the other
ranks when a rank fails. The launcher's exit reaches the supervisor as the end of file on a pipe that only the launcher holds
open.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.launch import failure, processes
from dtrain.launch.job import Job
from dtrain.launch.launch_dir import SharedFolders, make_shared_folders
from dtrain.launch.launch_plan import LaunchPlan
from dtrain.launch.terminal import NonBlockingWriter
from dtrain.launch.topology import find_stale_variables
from dtrain.launch.worker_group import REPEATED_SIGNAL_S

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
    folders = make_shared_folders()
    launcher_alive, write_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(write_end)
        _run_supervisor(plan, launcher_alive, folders)
    os.close(launcher_alive)
    code, ending_signal = _wait_for_supervisor(supervisor, watched)
    processes.kill_descendants(timeout_s=_KILL_TIMEOUT_S, exclude_sessions=foreign_sessions)
    folders.remove()
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


def _run_supervisor(plan: LaunchPlan, launcher_alive: int, folders: SharedFolders) -> NoReturn:
    code = 1
    try:
        # Ctrl-C in a terminal reaches only the launcher, which forwards the signal.
        os.setsid()
        processes.set_process_title([_SUPERVISOR_TITLE], comm=_SUPERVISOR_TITLE)
        code = supervise(plan, launcher_alive=launcher_alive, folders=folders)
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
        if kill_at is None:
            number: int | None = signal.sigwait(watched)
        else:
            info = signal.sigtimedwait(watched, max(0.0, kill_at - time.monotonic()))
            number = None if info is None else info.si_signo
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


# seconds to wait for a slow reader of the output, after the job
_OUTPUT_TIMEOUT_S = 10.0
_CHUNK = 1 << 16


def supervise(plan: LaunchPlan, *, launcher_alive: int, folders: SharedFolders) -> int:
    """Run the job and return the launcher's exit code. No process of the job is left.

    Args:
        plan: options of the launch.
        launcher_alive: read end of a pipe that is closed when the launcher exits.
        folders: folders that the ranks share.

    Mutates: this process's signal handlers; the process must be single-threaded and of its own.
    """
    processes.become_subreaper()
    wake = _open_signal_pipe()
    job = Job.of_plan(plan)

    def read_signals() -> None:
        for number in os.read(wake, _CHUNK):
            job.handle_signal(number)

    def end_at_once() -> None:
        # The launcher has exited, and no softer request can arrive.
        job.events.unwatch(launcher_alive)
        job.launcher_gone = True
        job.worker_group.kill_now()

    def should_stop_waiting() -> bool:
        """Return True if the user sent another ending signal, or the launcher exited."""
        with contextlib.suppress(BlockingIOError):
            if any(number in launch_protocol.ENDING_SIGNALS for number in os.read(wake, _CHUNK)):
                return True
        is_gone = job.launcher_gone or bool(select.select([launcher_alive], [], [], 0)[0])
        return is_gone or job.worker_group.ending.force_requested

    job.events.watch(wake, read_signals)
    job.events.watch(launcher_alive, end_at_once)
    stale = find_stale_variables(os.environ)
    # In a multi-node job, such variables may contain this node's position.
    if stale and plan.rendezvous is None:
        job.output.write_line(f"dtrain: launch: ignoring {', '.join(stale)} in the environment, set by another launch")
    if plan.rendezvous is not None:
        job.join_nodes(plan.rendezvous)
    if not job.worker_group.stopping:
        job.preload(folders)
    result = job.run_attempts()
    job.stop_services()
    folders.remove()
    job.output.finish(job.final_lines(result), timeout_s=_OUTPUT_TIMEOUT_S, give_up=should_stop_waiting)
    return result.code


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
