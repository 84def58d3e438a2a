"""What a launch is to do, decided and checked before anything is started. Pure, but for the search of a program on ``PATH``.

Where and as what a node's launcher meets the others. Pure."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.schedulers import read_scheduler
from dtrain.launch.spawn.interpreter import inherited_flags

MAX_RANKS = 256  # of a node: no machine has so many GPUs, and each rank costs the launcher two pipes and two files
MAX_GRACE_S = 86_400.0
DEFAULT_GRACE_S = 5.0
SAVING_GRACE_S = 30.0
FLIGHT_RECORDER_ENTRIES = "2000"  # a step of a deep model has hundreds
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


TargetKind = Literal["script", "module", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What every rank runs: a Python file, a module as in ``python -m``, or a command that is no Python."""

    kind: TargetKind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Which ranks of the job this node runs: ``nproc`` of them, from ``base_rank`` on."""

    nproc: int
    world_size: int
    base_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    master_addr: str = LOOPBACK_ADDRESS  # where the ranks' store is served
    interface: str = ""  # by which this node reaches the others; "" where that is not known

    @classmethod
    def one_node(cls, nproc: int) -> NodeLayout:
        """``nproc`` ranks, all of them here."""
        return cls(nproc=nproc, world_size=nproc)

    @property
    def ranks(self) -> range:
        """The global ranks of this node."""
        return range(self.base_rank, self.base_rank + self.nproc)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Where the output of the ranks goes. Templates know rank, local_rank, world_size, local_world_size, node_rank, host."""

    shown: frozenset[int] | None = None  # global ranks on the terminal; None: rank 0, and a rank that fails
    prefix: str = "[rank {rank}] "  # of each line on the terminal, where there are several ranks
    stdout: str | None = None  # a template of the file for each rank's output; None: in the run folder
    stderr: str | None = None
    full_traceback: bool = False  # on the terminal; the files always have the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch, as one node sees it.

    Raises:
        ConfigError: a number out of range, or a run folder that is not absolute.
    """

    target: Target
    layout: NodeLayout
    run_dir: Path
    grace_s: float | None = None  # between asking a process to end and killing it; None: the usual ones
    preload: tuple[str, ...] | None = None  # modules to load once for all ranks; None: as the program needs; (): none
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    stop_signal: int | None = None  # asks ranks to save and stop, besides SIGTERM
    bind: bool = False
    reports_own_exit: bool = False  # the only process is a launcher itself, and says how it ended
    rendezvous: NodeRendezvous | None = None  # with the launchers of other nodes: the layout is only known after it
    output: OutputPlan = field(default_factory=OutputPlan)

    def __post_init__(self) -> None:
        check_nproc(self.layout.nproc)
        if self.grace_s is not None:
            _check_seconds("--grace", self.grace_s)
        if not self.run_dir.is_absolute():
            raise ConfigError(f"launch: the run folder must be absolute, got {str(self.run_dir)!r}; a script may change folder")

    @property
    def grace_after_failure_s(self) -> float:
        """Seconds that the other ranks get when one has failed: they cannot train on."""
        return DEFAULT_GRACE_S if self.grace_s is None else self.grace_s

    @property
    def grace_after_signal_s(self) -> float:
        """Seconds that all ranks get when somebody asks the job to end: time to save."""
        return SAVING_GRACE_S if self.grace_s is None else self.grace_s

    def failure_file(self, rank: int) -> Path:
        """Where ``rank`` records the exception that leaves its script."""
        return launch_protocol.failure_file(self.run_dir, rank)


def parse_nproc(text: str) -> int:
    """The number of ranks asked for.

    Raises:
        ConfigError: not a whole number, or out of range.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ConfigError(f"launch: -n must be a whole number, got {text!r}; one rank per GPU is usual")
    return check_nproc(int(text))


def parse_seconds(option: str, text: str) -> float:
    """The number of seconds given to ``option``.

    Raises:
        ConfigError: not a number, or out of range.
    """
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"launch: {option} must be a number of seconds, got {text!r}; 5 is usual") from None
    return _check_seconds(option, seconds)


def check_nproc(nproc: int) -> int:
    if not 1 <= nproc <= MAX_RANKS:
        raise ConfigError(f"launch: -n must be from 1 to {MAX_RANKS}, got {nproc}; one rank per GPU is usual")
    return nproc


def _check_seconds(option: str, seconds: float) -> float:
    if not 0 <= seconds <= MAX_GRACE_S:  # false for nan, too
        raise ConfigError(f"launch: {option} must be from 0 to {MAX_GRACE_S:.0f} seconds, got {seconds:g}; 5 is usual")
    return seconds


def count_gpus(device_names: Iterable[str], visible: str | None) -> int:
    """Count the GPUs that a process may use.

    Args:
        device_names: names found in ``/dev``; ``nvidia0``, ``nvidia1`` and so on are GPUs.
        visible: ``CUDA_VISIBLE_DEVICES``, or None. As in CUDA, the first entry that names no GPU ends the list.
    """
    gpus = sum(re.fullmatch(r"nvidia[0-9]+", name) is not None for name in device_names)
    if gpus and visible is not None:
        count = 0
        for entry in visible.split(","):
            entry = entry.strip()
            if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < gpus)):
                break
            count += 1
        gpus = count
    return gpus


def build_common_environment(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of a launch have in common: what the launcher inherited, less what an outer launch left, and our own."""
    ours = {
        launch_protocol.RUN_ID: plan.run_dir.name or "run",
        launch_protocol.MAX_RESTARTS: str(plan.max_restarts),
        launch_protocol.AGENT_STORE: "True",  # a process of the launcher's serves the store: every rank is a client of it
        launch_protocol.RUN_DIR: os.fspath(plan.run_dir),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.layout.nodes == 1:
        ours |= {
            launch_protocol.LOOPBACK: "1",
            launch_protocol.GLOO_INTERFACE: LOOPBACK_INTERFACE,
            launch_protocol.NCCL_INTERFACE: LOOPBACK_INTERFACE,
        }
    elif plan.layout.interface:  # gloo would take the one that the host name points to, which is often the loopback
        interface = plan.layout.interface
        ours |= {
            name: inherited.get(name) or interface for name in (launch_protocol.GLOO_INTERFACE, launch_protocol.NCCL_INTERFACE)
        }
    if plan.stop_signal is not None:
        ours[launch_protocol.STOP_SIGNAL] = str(plan.stop_signal)
    if plan.hang_timeout_s is not None:
        # Read by torch when a process group is made: how many collectives are remembered for the report of a hang.
        ours |= {name: inherited.get(name) or FLIGHT_RECORDER_ENTRIES for name in launch_protocol.FLIGHT_RECORDER}
    return {name: value for name, value in inherited.items() if not _is_launch_variable(name)} | ours


def build_rank_environment(
    plan: LaunchPlan, rank: int, *, port: int, cores: float, inherited: Mapping[str, str], restart_count: int = 0
) -> dict[str, str]:
    """What tells a rank of one attempt from others. ``OMP_NUM_THREADS`` is kept when given; else the ranks share the cores."""
    layout = plan.layout
    who = launch_protocol.rank_environment(
        rank=rank,
        world_size=layout.world_size,
        local_rank=rank - layout.base_rank,
        local_world_size=layout.nproc,
        node_rank=layout.node_rank,
        nodes=layout.nodes,
        addr=layout.master_addr,
        port=port,
    )
    threads = inherited.get(launch_protocol.OMP_THREADS) or str(max(1, int(cores) // layout.nproc))
    return {
        **who,
        launch_protocol.OMP_THREADS: threads,
        launch_protocol.FAILURE_FILE: os.fspath(plan.failure_file(rank)),
        launch_protocol.RESTART_COUNT: str(restart_count),
    }


def find_stale_variables(inherited: Mapping[str, str]) -> list[str]:
    """Variables of an outer launch, which those of this one replace; not those that tell this launch where it is."""
    who = launch_protocol.rank_environment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, addr=LOOPBACK_ADDRESS, port=1
    )
    told = read_scheduler(inherited)
    ours = () if told is None else told.variables
    return sorted(name for name in inherited if (name in who or _is_launch_variable(name)) and name not in ours)


def _is_launch_variable(name: str) -> bool:
    return name.startswith(launch_protocol.OWNED_PREFIXES)


def build_rank_command(target: Target) -> list[str]:
    """The command line of every rank: this interpreter, its own options, the bootstrap, and the script with its arguments.

    Or the command.

    The bootstrap is named by its file: ``-m`` would put the current folder in front of the standard library, which
    ``python script.py`` does not do.
    """
    if target.kind == "command":
        return [shutil.which(target.name) or target.name, *target.args]
    bootstrap = Path(__file__).parent / "start" / "rank.py"
    return [sys.executable, *inherited_flags(), os.fspath(bootstrap), target.kind, target.name, *target.args]


DEFAULT_JOIN_TIMEOUT_S = 300.0
DEFAULT_SILENCE_S = 10.0  # a node that is not heard of for so long is lost: its machine, its network, or its launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRendezvous:
    """What this node brings to the meeting of a job's launchers. None: not known before all of them are there.

    Either ``nodes`` or ``world_size`` is known: it tells when everybody has come.
    """

    node_rank: int
    nodes: int | None
    nproc: int
    addr: str
    port: int
    base_rank: int | None = None
    world_size: int | None = None
    token: str = ""  # the same for all nodes of a job; another job at the same address is told by it
    timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    silence_s: float = DEFAULT_SILENCE_S
    fallback_addr: str = ""  # used when ``addr`` is a name that does not resolve
    hosts: tuple[str, ...] = ()  # by node rank, where a scheduler says them: they only improve messages
    facts: Mapping[str, str] = field(default_factory=dict)  # what has to be the same on all nodes, by what it is called
    run_name: str = ""  # of node 0 only: it names the run for all
    store_port: int = 0  # of node 0 only: where the ranks' store listens

    def expected_layout(self) -> NodeLayout:
        """The place of this node as far as it is known before the meeting, which may correct it."""
        nodes = self.nodes if self.nodes is not None else max(2, (self.world_size or 0) // self.nproc)
        return NodeLayout(
            nproc=self.nproc,
            world_size=self.world_size if self.world_size is not None else nodes * self.nproc,
            base_rank=self.base_rank if self.base_rank is not None else self.node_rank * self.nproc,
            node_rank=self.node_rank,
            nodes=nodes,
            master_addr=self.addr,
        )

    def __post_init__(self) -> None:
        assert self.nodes is not None or self.world_size is not None, "nobody could tell when all nodes are there"
