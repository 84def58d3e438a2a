"""Run a job from the user's process: fork a supervisor, forward signals to it, and return its exit code."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.launch import failure, processes
from dtrain.launch.launch_dir import choose_socket_prefix, remove_socket_folders
from dtrain.launch.launch_plan import LaunchPlan
from dtrain.launch.output.non_blocking_writer import NonBlockingWriter
from dtrain.launch.supervisor import supervise
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
