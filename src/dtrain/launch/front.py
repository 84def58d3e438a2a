"""The process that the user started: hands the job to a supervisor, forwards signals, and reports how it ended."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import NoReturn

from dtrain.launch import processes, verdict
from dtrain.launch.plan import LaunchPlan
from dtrain.launch.supervisor import ENDING_SIGNALS, PASSED_ON, supervise

_WITHIN_S = 10.0  # what does not die of SIGKILL in this time sits in the kernel


def launch(plan: LaunchPlan) -> int:
    """Run the job and return what this process should exit with. Nothing of the job is left then.

    Mutates: the signal handling and the subreaper attribute of this process, for good: it should exit with the result.
    It must have a single thread.
    """
    processes.become_subreaper()
    watched = {signal.SIGCHLD, *ENDING_SIGNALS, *PASSED_ON}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        watched.remove(signal.SIGHUP)  # started by nohup
    for number in watched:
        signal.signal(number, lambda *_: None)  # an ignored signal might never become pending
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    front_alive, held = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(held)
        _be_supervisor(plan, front_alive)
    os.close(front_alive)
    code = _wait_for(supervisor, watched)
    processes.end_descendants(within_s=_WITHIN_S)
    os.close(held)
    if code < 0:
        name = verdict.signal_name(-code)
        print(f"dtrain: launch: the supervisor was killed by {name} (pid {supervisor}); ranks ended", file=sys.stderr)
    return verdict.exit_code(code)


def occupy_standard_streams() -> None:
    """Open what of the descriptors 0, 1 and 2 is closed, so that no pipe or socket of ours takes its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _be_supervisor(plan: LaunchPlan, front_alive: int) -> NoReturn:
    code = 1
    try:
        os.setsid()  # Ctrl-C in a terminal reaches the front alone, which forwards it
        code = supervise(plan, front_alive=front_alive)
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers; the front ends what is left
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait_for(supervisor: int, watched: set[signal.Signals]) -> int:
    """Forward signals until the supervisor has ended; its exit code, or the negative signal that ended it."""
    while True:
        number = signal.sigwait(watched)
        if number != signal.SIGCHLD:
            processes.send(supervisor, number)
            continue
        for pid, code in processes.reap()[0]:
            if pid == supervisor:
                return code
