"""The process that the user started: hands the job to a supervisor, forwards signals, and reports how it ended."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.launch import failure, processes
from dtrain.launch.launch_plan import LaunchPlan
from dtrain.launch.output.non_blocking_writer import NonBlockingWriter
from dtrain.launch.supervisor import supervise
from dtrain.launch.worker_group import REPEATED_SIGNAL_S

_FORCE_KILL_S = 1.0  # what the supervisor has to end everything in, once it was asked twice
_KILL_TIMEOUT_S = 10.0  # what does not die of SIGKILL in this time sits in the kernel
# For ps, and none of the words that people give to pkill -f: what kills the front by its name must leave who ends the ranks.
_SUPERVISOR_TITLE = "rank-supervisor"


def launch_job(plan: LaunchPlan) -> int:
    """Run the job and return what this process should exit with. Nothing of the job is left then.

    Mutates: the signal handling and the subreaper attribute of this process, for good: it should exit with the result.
    It must have a single thread.
    """
    # A shell that became this process has left its children: `exec dtrain launch ... > >(tee log)`. They are not of the job.
    strangers = processes.list_sessions()
    processes.become_subreaper()
    # With nohup, or in sh -c '... &', some are ignored.
    heeded = {number for number in launch_protocol.ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    watched = {signal.SIGCHLD, *heeded, *launch_protocol.FORWARDED_SIGNALS}
    for number in watched:
        signal.signal(number, lambda *_: None)  # an ignored signal might never become pending
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    front_alive, held = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(held)
        _run_supervisor(plan, front_alive)
    os.close(front_alive)
    code, insisted = _wait_for_supervisor(supervisor, watched)
    processes.kill_descendants(timeout_s=_KILL_TIMEOUT_S, exclude_sessions=strangers)
    os.close(held)
    if code == -signal.SIGKILL and insisted is not None:
        _write_stderr(failure.describe_interrupt(insisted))
        return failure.shell_exit_code(-insisted)
    if code < 0:
        _write_stderr(
            f"dtrain: launch: the supervisor was killed by {failure.signal_name(-code)} (pid {supervisor}); ranks ended"
        )
    return failure.shell_exit_code(code)


def _write_stderr(text: str) -> None:
    """As far as there is room for it: the exit code is worth more than the line."""
    stderr = NonBlockingWriter(2, "standard error")
    stderr.write(text.encode(errors="backslashreplace") + b"\n")
    stderr.close()


def _run_supervisor(plan: LaunchPlan, front_alive: int) -> NoReturn:
    code = 1
    try:
        os.setsid()  # Ctrl-C in a terminal reaches the front alone, which forwards it
        processes.set_process_title([_SUPERVISOR_TITLE], comm=_SUPERVISOR_TITLE)
        code = supervise(plan, launcher_alive=front_alive)
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers; the front ends what is left
        _write_stderr(traceback.format_exc().rstrip("\n"))
    finally:
        os._exit(code)


def _wait_for_supervisor(supervisor: int, watched: set[signal.Signals]) -> tuple[int, int | None]:
    """Forward signals until the supervisor has ended; kill it when it does not obey in time.

    Returns:
        Its exit code, or the negative signal that ended it; and the signal that had asked for the end of the job, if the
        supervisor was killed here: it was stopped, or waited for a disk or a network file system.
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
    """The next signal, or None when there was none in time."""
    if until is None:
        return signal.sigwait(watched)
    info = signal.sigtimedwait(watched, max(0.0, until - time.monotonic()))
    return None if info is None else info.si_signo
