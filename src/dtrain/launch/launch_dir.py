"""Create and lock the folder of a launch, and write ``launch.json``.

``launch.json`` has the program, the layout, the host and the versions, without values of environment variables."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import LaunchPlan
from dtrain.packages import git_commit, package_versions

RUNS_FOLDER = "runs"
# The path of a socket may have 107 bytes. A rank adds up to 24 characters for its folder, and 18 for the socket.
_MAX_SOCKET_PARENT_BYTES = 60
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY_PREFIX, _LOCK_SUFFIX = "dtrain-", ".lock"


def create_run_dir(path: str | None, *, now: datetime, name: str | None = None) -> Path:
    """Create the folder of a launch and return its absolute path.

    ``path`` may exist already: ``claim_run_dir`` detects another launch in the folder. The default is a new folder,
    ``runs/<date and time>`` in the current folder.

    Args:
        path: the folder that the user names, or None.
        now: the time for the default name.
        name: node 0's name of the run in a multi-node job; the folder below ``runs`` may exist already, created by another node
            on the same disk.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    if path is not None and not path.strip():
        raise ConfigError("launch: --run-dir must not be empty. Name a folder, or remove the option.")
    if name is not None and (os.path.basename(name) != name or name in ("", ".", "..")):
        raise ConfigError(
            f"launch: the run name of node 0 must be a folder name, got {name!r}. Pass the same --run-dir on every node."
        )
    wanted = Path(RUNS_FOLDER) / (name or _timestamp_name(now)) if path is None else Path(path)
    try:
        run_dir = _make_folder(wanted.absolute(), reuse=path is not None or name is not None)
        failures = run_dir / "failures"
        failures.mkdir(exist_ok=True)
        if not os.access(failures, os.W_OK | os.X_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise ConfigError(
            f"launch: cannot use {str(wanted)!r} as the run folder: {error.strerror}. Choose a folder with --run-dir."
        ) from None
    return run_dir


def claim_run_dir(run_dir: Path, node_rank: int) -> int | None:
    """Lock an existing folder for this launch, and remove the failure records of an earlier launch.

    Two launches in one folder would remove each other's records and mix their logs. Launchers of several nodes share a folder.

    Returns:
        A descriptor that holds the lock while it is open here or in a fork of this process. None on a file system without
        locks.

    Raises:
        ConfigError: another launch uses the folder, or the folder cannot be written.
    """
    try:
        lock = os.open(run_dir / f"lock-{node_rank}", os.O_RDWR | os.O_CREAT, 0o666)
        held_lock: int | None = lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"launch: another launch runs in {str(run_dir)!r}. Choose another folder with --run-dir."
            ) from None
        except OSError:
            os.close(lock)
            held_lock = None
        failures = run_dir / "failures"
        opened_run = launch_protocol.opened_run_file(run_dir)
        for stale in (*failures.glob("rank-*.json"), *failures.glob("rank-*.partial"), opened_run) if node_rank == 0 else ():
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"launch: cannot use {str(run_dir)!r}: {error.strerror}. Choose another folder with --run-dir."
        ) from None
    return held_lock


def default_run_dir(now: datetime) -> Path:
    """Return the absolute path of the default folder of a launch that began at ``now``."""
    return (Path(RUNS_FOLDER) / _timestamp_name(now)).absolute()


def _timestamp_name(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H-%M-%S")


def _make_folder(wanted: Path, *, reuse: bool) -> Path:
    if reuse:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    # Another launch may have begun in the same second.
    for attempt in count(1):
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable: count() has no end")


RECORD_NAME = "launch.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolders:
    """Folders of one launch that its ranks share, outside of the folder of the launch. They end with the launch.

    Args:
        socket_prefix: beginning of the paths of the ranks' folders for sockets.
        memory: folder in shared memory for copies of states; None without shared memory.
        memory_lock: descriptor that keeps the folder in memory from being removed as a leftover; None without a folder.
    """

    socket_prefix: str
    memory: Path | None = None
    memory_lock: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that tell the ranks of the folders."""
        variables = {launch_protocol.SOCKET_FOLDER_PREFIX: self.socket_prefix}
        return variables if self.memory is None else variables | {launch_protocol.MEMORY_FOLDER: str(self.memory)}

    def remove(self) -> None:
        """Remove the folders, also those of ranks that were killed. Call this function after the last rank has ended."""
        remove_socket_folders(self.socket_prefix)
        if self.memory is not None:
            _remove_memory(self.memory)


def make_shared_folders() -> SharedFolders:
    """Make the folders of a launch. Leftovers in memory of launches that were killed are removed.

    Mutates: files in shared memory.
    """
    prefix = choose_socket_prefix()
    try:
        if not _SHARED_MEMORY.is_dir():
            return SharedFolders(socket_prefix=prefix)
        for lock in _SHARED_MEMORY.glob(f"{_MEMORY_PREFIX}*{_LOCK_SUFFIX}"):
            # Another user's folder cannot be opened.
            with suppress(OSError), open(lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_memory(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)))
        folder = _SHARED_MEMORY / f"{_MEMORY_PREFIX}{secrets.token_hex(8)}"
        lock = folder.with_name(f"{folder.name}{_LOCK_SUFFIX}")
        # The file gets its name once it is locked. Else another launch could take it for a leftover.
        fd, unnamed = tempfile.mkstemp(dir=_SHARED_MEMORY, prefix=_MEMORY_PREFIX)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unnamed, lock)
        folder.mkdir(mode=0o700)
    except OSError:
        # The ranks say so when they want to use it.
        return SharedFolders(socket_prefix=prefix)
    return SharedFolders(socket_prefix=prefix, memory=folder, memory_lock=fd)


def _remove_memory(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.with_name(f"{folder.name}{_LOCK_SUFFIX}").unlink(missing_ok=True)


def choose_socket_prefix() -> str:
    """Choose the beginning of the paths of the ranks' folders for sockets, below the temporary folder. It is not created."""
    try:
        parent = tempfile.gettempdir()
    except OSError:
        # No temporary folder can be written, so ranks use the folder that Python chooses.
        parent = "/tmp"
    if len(os.fsencode(parent)) > _MAX_SOCKET_PARENT_BYTES:
        parent = "/tmp"
    return os.path.join(parent, f"pymp-{secrets.token_hex(3)}-")


def remove_socket_folders(prefix: str) -> None:
    """Remove the folders of ranks that were killed. Call this function after the last rank has ended."""
    parent = Path(prefix).parent
    with suppress(OSError):
        for folder in parent.glob(f"{Path(prefix).name}*"):
            shutil.rmtree(folder, ignore_errors=True)


def write_launch_record(plan: LaunchPlan, *, command: Sequence[str], variables: Iterable[str], now: datetime) -> str | None:
    """Write ``launch.json`` into the folder of the launch, atomically.

    Args:
        command: this process's command line.
        variables: names of environment variables. Values may be secrets and are not written.
        now: start time, with its time zone.

    Returns:
        A warning if the file cannot be written, because training can continue without the file.
    """
    path = plan.run_dir / RECORD_NAME if plan.layout.node_rank == 0 else plan.run_dir / f"launch-{plan.layout.node_rank}.json"
    text = json.dumps(_build_record(plan, command, variables, now), indent=2)
    try:
        launch_protocol.replace_text(path, text + "\n")
    except OSError as error:
        return f"launch: cannot write {str(path)!r}: {error.strerror}; going on without a record of the launch"
    return None


def _build_record(plan: LaunchPlan, command: Sequence[str], variables: Iterable[str], now: datetime) -> dict[str, Any]:
    options = {name: value for name, value in asdict(plan).items() if name not in ("target", "layout", "run_dir", "output")}
    shown = plan.output.shown
    folder = ""
    # The current folder may be deleted.
    with suppress(OSError):
        folder = os.getcwd()
    return {
        "target": asdict(plan.target),
        "layout": asdict(plan.layout),
        "options": options | {"output": {**asdict(plan.output), "shown": None if shown is None else sorted(shown)}},
        "command": list(command),
        "started_at": now.isoformat(timespec="seconds"),
        "host": platform.node(),
        "folder": folder,
        "git_commit": git_commit(Path(folder)),
        "versions": {**package_versions(), "interpreter": sys.executable},
        "environment": sorted(variables),
    }
