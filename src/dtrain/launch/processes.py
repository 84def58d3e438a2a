"""Start processes; find, signal, kill and reap all processes below this process. Complete on Linux, best effort elsewhere.

A *child subreaper* becomes the parent of every orphan below it, including orphans that left their session or process group.
So a subreaper without children has no process of the job left, and needs no list of pids.

A rank inherits the flags of this interpreter, and imports the modules of its program, whatever this process has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import Literal

from dtrain import launch_protocol

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A process may fork while it is being killed. Its child is found in the next round.
_KILL_RETRY_S = 0.02
_KILL_ROUNDS = 3


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it. No effect outside Linux."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when ``parent`` dies; exit at once if ``parent`` is dead. No effect outside Linux.

    The setting survives ``exec``, but not ``fork``: it covers direct children only.
    """
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died between the fork and the call.
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)


def reset_signal_handlers(*, ignore: Collection[int] = (), block: Collection[int] = ()) -> None:
    """Restore Python's default handling of every signal in a fork, whatever the parent's handling.

    Args:
        ignore: signals to ignore.
        block: signals to block; all other signals are unblocked.

    Mutates: this process's signal handling.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # None marks signals that the C library reserves.
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, block)


def fork_process(run: Callable[[], int]) -> int:
    """Fork a process that exits with the exit code that ``run`` returns, and return its pid.

    ``run`` starts with all signals blocked, because the handlers of this process must not run in the fork.

    Raises:
        OSError: the limit of processes is reached.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run()
            except BaseException:  # noqa: BLE001 - a fork must not return into its parent's callers
                traceback.print_exc()
            finally:
                os._exit(code)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, for example between the start of a process and the record of its pid.

    No effect outside the main thread, because only the main thread is interrupted, or if SIGINT has no Python handler.

    Mutates: this process's handler of SIGINT, within the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    delayed: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: delayed.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if delayed:
            handler(signal.SIGINT, delayed[-1])


def reap_children() -> tuple[list[tuple[int, int]], bool]:
    """Reap every child that has exited, without waiting.

    Returns:
        ``(pid, code)`` of each exited child, where a negative code is a signal; and True if any child still runs.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def set_process_title(command: Sequence[str], *, comm: str | None = None) -> None:
    """Set the command line that ``ps`` and ``pkill -f`` show for this process, and its name ``comm``. Linux only.

    The kernel shows the memory of the original arguments, so a command longer than the original has no effect.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        if comm is not None:
            Path("/proc/self/comm").write_bytes(os.fsencode(comm))
        stat = Path("/proc/self/stat").read_bytes()
        begin, end = (int(word) for word in stat[stat.rindex(b")") + 2 :].split()[45:47])
        text = b"\0".join(map(os.fsencode, command)) + b"\0"
        if 0 < begin < end and len(text) <= end - begin:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def descendants(*, exclude_sessions: Collection[int] = ()) -> list[int]:
    """Return the pids of all processes below this process, children before grandchildren; empty outside Linux.

    Children in ``exclude_sessions`` are omitted, with all processes below them.
    """
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    excluded = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # The process may have exited meanwhile.
        if fields := process_fields(pid):
            children.setdefault(int(fields[1]), []).append(pid)
            if int(fields[3]) in exclude_sessions:
                excluded.add(pid)
    pids = [pid for pid in children.get(os.getpid(), ()) if pid not in excluded]
    # The list grows during the loop.
    for pid in pids:
        pids.extend(children.get(pid, ()))
    return pids


def list_sessions() -> frozenset[int]:
    """Return the sessions of this process and of all processes below it.

    A process can create a session but not join one. So a later process with a session of its own, and all processes below it,
    are in none of these sessions.
    """
    sessions = set()
    for pid in (os.getpid(), *descendants()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            sessions.add(os.getsid(pid))
    return frozenset(sessions)


def process_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process has exited, or outside of Linux.

    The first field is the state, then follow parent, process group and session. The start time in clock ticks has index 19.
    """
    try:
        # The name in parentheses may contain any character, including parentheses.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def send_signal(pid: int, number: int) -> None:
    """Send a signal to one process; ignore a process that exited or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_descendants(number: int, leaders: Iterable[int], *, exclude: Collection[int] = ()) -> None:
    """Send a signal to all processes below this process but ``exclude``; outside Linux, to the groups of ``leaders``."""
    for pid in descendants():
        if pid not in exclude:
            send_signal(pid, number)
    if not _LINUX:
        for pid in leaders:
            send_signal(-pid, number)


def kill_sessions(sessions: Collection[int]) -> None:
    """Kill all processes of ``sessions`` below this process, and all processes below them. Linux only."""
    # A process may fork while it is being killed.
    for _ in range(_KILL_ROUNDS):
        found: set[int] = set()
        for pid in descendants():
            fields = process_fields(pid)
            if fields and fields[0] != "Z" and (int(fields[3]) in sessions or int(fields[1]) in found):
                found.add(pid)
        if not found:
            return
        for pid in found:
            send_signal(pid, signal.SIGKILL)


def kill_descendants(*, timeout_s: float, exclude_sessions: Collection[int] = ()) -> list[int]:
    """Kill all processes below this process and wait up to ``timeout_s`` seconds; return the pids of the survivors.

    Children in ``exclude_sessions`` are not killed and not waited for, with all processes below them.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        _, has_children = reap_children()
        remaining = descendants(exclude_sessions=exclude_sessions) if has_children else []
        if not remaining or time.monotonic() > deadline:
            return remaining
        for pid in remaining:
            send_signal(pid, signal.SIGKILL)
        time.sleep(_KILL_RETRY_S)


SUCCESSOR_ID = -(1 << 16)
"""Request id of the next fork server. The ids of rank processes are their global ranks, and the id of a store is its port,
negated, so that the store of an attempt that ends is not taken for the store of the next attempt."""

FD_VARIABLES = (launch_protocol.HEARTBEAT_FD, launch_protocol.DUMP_REQUEST_FD, launch_protocol.STEPS_FD)
"""Names of descriptors that are also the environment variables in which a process finds their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRequest:
    """Process to start.

    Attributes:
        id: the global rank, the negated port of a store, or ``SUCCESSOR_ID``.
        kind: the program.
        fds: descriptors by name: ``stdin``, ``stdout``, ``stderr``, ``listener``, ``channel``, or a name in ``FD_VARIABLES``.
        owned: names of descriptors that the parent closes once the process has them.
        environment: variables besides the common environment of all ranks.
        cores: allowed CPU cores; empty uses the parent's cores.
        address: address of the listener.
        port: port of the listener.
        modules: file with the modules that a fork server imports, one a line.
    """

    id: int
    kind: Literal["rank", "store", "server"]
    fds: Mapping[str, int]
    owned: frozenset[str] = frozenset()
    environment: Mapping[str, str]
    cores: Sequence[int] = ()
    address: str = ""
    port: int = 0
    modules: str = ""


# exit code of a shell for a command that cannot run
_EXEC_FAILED_EXIT_CODE = 127
_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def start_process(
    request: ProcessRequest, command: Sequence[str], common_environment: Mapping[str, str], *, block_interrupts: bool = False
) -> int:
    """Start ``command`` in a new session and return its pid. The process is killed when this process dies.

    The process gets Python's default signal handling, whatever this process ignores or blocks.

    An interrupt during interpreter startup prints a long traceback of the interpreter. ``block_interrupts`` therefore blocks
    SIGINT until the program unblocks the signal (``rank_main.run_target`` does).

    Args:
        request: descriptors, cores, and part of the environment.
        command: path and arguments of the program.
        common_environment: rest of the environment.
        block_interrupts: if True, SIGINT is blocked at the start of the program.

    Raises:
        OSError: the process limit is reached.
    """
    parent = os.getpid()

    def run() -> int:
        try:
            os.setsid()
            die_with_parent(parent)
            # Ctrl-C may arrive when the other signals are unblocked, so block SIGINT first.
            reset_signal_handlers(block={signal.SIGINT} if block_interrupts else ())
            for name, fd in request.fds.items():
                if name in _STREAMS:
                    os.dup2(fd, _STREAMS[name])
                else:
                    os.set_inheritable(fd, True)
            if request.cores:
                os.sched_setaffinity(0, request.cores)
            numbers = {name: str(fd) for name, fd in request.fds.items() if name in FD_VARIABLES}
            os.execve(command[0], list(command), {**common_environment, **request.environment, **numbers})
        except Exception as error:  # noqa: BLE001 - the program's own output has the reason
            os.write(2, f"cannot start {command[0]!r}: {error}\n".encode(errors="backslashreplace"))
        return _EXEC_FAILED_EXIT_CODE

    # Until the child resets the handlers of this process, they would write into this process's wake-up pipe.
    return fork_process(run)


_FLAGS_WITH_VALUE = "WX"
_PROGRAM_FLAGS = "cm"
# flags for a prompt after the script, and for a first line that is not Python
_LAUNCHER_ONLY_FLAGS = "ix"
_IGNORE_ENVIRONMENT_FLAGS = {"-E", "-I"}


def inherited_flags() -> list[str]:
    """Return the flags of this interpreter, which the interpreters of the ranks inherit."""
    flags = parse_flags(sys.orig_argv)
    # Flags that ignore the environment also ignore PYTHONUNBUFFERED, and the output of ranks would be delayed.
    return [*flags, "-u"] if _IGNORE_ENVIRONMENT_FLAGS & set(flags) and "-u" not in flags else flags


def parse_flags(command: Sequence[str]) -> list[str]:
    """Return the flags in an interpreter's command line, before the program. No side effects.

    >>> parse_flags(["python", "-OB", "-Xdev", "-W", "error", "-m", "dtrain", "-W"])
    ['-O', '-B', '-X', 'dev', '-W', 'error']
    """
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            flags += [word, next(words, "")]
            continue
        if len(word) < 2 or word[0] != "-" or word[1] == "-":
            break
        # Several flags may share a word, the last flag with its value.
        for place, letter in enumerate(word[1:], start=2):
            if letter in _PROGRAM_FLAGS:
                return flags
            if letter in _FLAGS_WITH_VALUE:
                flags += [f"-{letter}", word[place:] or next(words, "")]
                break
            if letter not in _LAUNCHER_ONLY_FLAGS:
                flags.append(f"-{letter}")
    return flags


def first_import_folder(kind: str, target: str) -> Path | None:
    """Return the folder that a plain interpreter searches first for modules: the script's folder, or with ``-m`` the current.

    None if Python's safe-path mode is on, and for a zip archive, in which Python searches first.

    Raises:
        OSError: the current folder was removed.
    """
    if sys.flags.safe_path or (kind == "script" and zipfile.is_zipfile(target)):
        return None
    return Path(os.path.realpath(target)).parent if kind == "script" else Path.cwd()


def find_shadowed_modules(folder: Path) -> list[str]:
    """Return the names of loaded modules that ``folder`` would shadow.

    Raises:
        OSError: the folder cannot be read.
    """
    # Built-in modules always come first.
    loaded = sys.modules.keys() - set(sys.builtin_module_names)
    # Check names first, because the folder may contain many files that are not modules.
    names = loaded & {entry.partition(".")[0] for entry in os.listdir(folder)}
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sorted(names)}
    others = [name for name, file in files.items() if file is None or folder not in Path(os.path.realpath(file)).parents]
    specs = {name: PathFinder.find_spec(name, [os.fspath(folder)]) for name in others}
    # A folder without __init__.py has no origin, and shadows nothing.
    return [name for name, spec in specs.items() if spec is not None and spec.origin is not None]
