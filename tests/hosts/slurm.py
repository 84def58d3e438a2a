"""A real Slurm of two nodes on this machine: its own keys, ports and folder; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LONG_S = 300
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def srun(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a step to its end; the words are options of ``srun``, then the program."""
        return self.run("srun", *words)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands to its end."""
        command = [str(word) for word in words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=LONG_S, check=False)


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start it; skips the test where this machine lacks Slurm, or refuses to run it."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs Debian's slurm-wlm and munge: no {', '.join(missing)}" if missing else "slurmd needs root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket may have 107 characters
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        started = Cluster(folder=folder)
        _configure(folder)
        socket_, key = folder / "munge.sock", folder / "key"
        quiet = [f"--{name}={folder / name}" for name in ("pid-file", "log-file", "seed-file")]
        _start(daemons, started, "munged", "--foreground", "--force", f"--socket={socket_}", f"--key-file={key}", *quiet)
        _wait(daemons, socket_.exists, folder)
        _start(daemons, started, "slurmctld", "-D")
        for name in ("n1", "n2"):
            _start(daemons, started, "slurmd", "-D", "-N", name)
        _wait(daemons, lambda: _idle(started), folder)
        yield started
    finally:
        _end(daemons, folder)
        shutil.rmtree(folder)


def _end(daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """End the daemons, and then their remaining processes: those that watch over steps outlive them."""
    for daemon in reversed(daemons):
        daemon.terminate()
    deadline = time.monotonic() + 2  # the daemon of a node waits for its last job, which may have been killed
    while any(daemon.poll() is None for daemon in daemons) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in processes_with(f"SLURM_CONF={folder}/slurm.conf"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in daemons:
        daemon.wait(timeout=LONG_S)


def processes_with(variable: str) -> list[int]:
    """All processes in whose environment this is set."""
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pids.append(int(pid))
    return pids


def _configure(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, ports=_ports(), folder=folder))


def _ports() -> range:
    """Three free ports in a row."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            for following in (port + 1, port + 2):
                held.enter_context(socket.socket()).bind(("127.0.0.1", following))
            return range(port, port + 3)


def _start(daemons: list[subprocess.Popen[bytes]], of: Cluster, *command: str) -> None:
    null = subprocess.DEVNULL
    daemons.append(subprocess.Popen(command, env=of.environment, stdin=null, stdout=null, stderr=null))


def _wait(daemons: list[subprocess.Popen[bytes]], ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + LONG_S / 3
    while not ready():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "; ".join(path.read_text(errors="replace").strip()[-300:] for path in folder.glob("*log*"))
            pytest.skip(f"Slurm does not run on this machine: {ended or 'not ready in time'}: {logs}")
        time.sleep(0.05)


def _idle(of: Cluster) -> bool:
    listed = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=of.environment, capture_output=True, text=True, check=False)
    return listed.stdout.split() == ["idle", "idle"]
