"""What a launch is to do, decided and checked before anything is started. Pure, but for the search of a program on ``PATH``."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dtrain import wire
from dtrain.errors import ConfigError
from dtrain.launch.schedulers import scheduled
from dtrain.launch.start.interpreter import flags_to_pass_on

if TYPE_CHECKING:
    from dtrain.launch.nodes.meeting import Meeting  # its room knows the layout from here

MAX_RANKS = 256  # of a node: no machine has so many GPUs, and each rank costs the launcher two pipes and two files
MAX_GRACE_S = 86_400.0
DEFAULT_GRACE_S = 5.0
SAVING_GRACE_S = 30.0
FLIGHT_RECORDER_ENTRIES = "2000"  # a step of a deep model has hundreds
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


Kind = Literal["script", "module", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What every rank runs: a Python file, a module as in ``python -m``, or a command that is no Python."""

    kind: Kind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which ranks of the job this node runs: ``nproc`` of them, from ``base_rank`` on."""

    nproc: int
    world_size: int
    base_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    master_addr: str = LOOPBACK_ADDRESS  # where the ranks' store is served
    interface: str = ""  # by which this node reaches the others; "" where that is not known

    @classmethod
    def one_node(cls, nproc: int) -> Layout:
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
    layout: Layout
    run_dir: Path
    grace_s: float | None = None  # between asking a process to end and killing it; None: the usual ones
    preload: tuple[str, ...] | None = None  # modules to load once for all ranks; None: as the program needs; (): none
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    stop_signal: int | None = None  # asks ranks to save and stop, besides SIGTERM
    bind: bool = False
    says_own_end: bool = False  # the only process is a launcher itself, and says how it ended
    meeting: Meeting | None = None  # with the launchers of other nodes: the layout is only known after it
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
        return wire.failure_file(self.run_dir, rank)


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


def common_environment(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """What all ranks of a launch have in common: what the launcher inherited, less what an outer launch left, and our own."""
    ours = {
        wire.RUN_ID: plan.run_dir.name or "run",
        wire.MAX_RESTARTS: str(plan.max_restarts),
        wire.AGENT_STORE: "True",  # a process of the launcher's serves the store: every rank is a client of it
        wire.RUN_DIR: os.fspath(plan.run_dir),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.layout.nodes == 1:
        ours |= {wire.LOOPBACK: "1", wire.GLOO_INTERFACE: LOOPBACK_INTERFACE, wire.NCCL_INTERFACE: LOOPBACK_INTERFACE}
    elif plan.layout.interface:  # gloo would take the one that the host name points to, which is often the loopback
        interface = plan.layout.interface
        ours |= {name: inherited.get(name) or interface for name in (wire.GLOO_INTERFACE, wire.NCCL_INTERFACE)}
    if plan.stop_signal is not None:
        ours[wire.STOP_SIGNAL] = str(plan.stop_signal)
    if plan.hang_timeout_s is not None:
        # Read by torch when a process group is made: how many collectives are remembered for the report of a hang.
        ours |= {name: inherited.get(name) or FLIGHT_RECORDER_ENTRIES for name in wire.FLIGHT_RECORDER}
    return {name: value for name, value in inherited.items() if not _is_of_a_launch(name)} | ours


def own_environment(
    plan: LaunchPlan, rank: int, *, port: int, cores: float, inherited: Mapping[str, str], restarts: int = 0
) -> dict[str, str]:
    """What tells a rank of one attempt from others. ``OMP_NUM_THREADS`` is kept when given; else the ranks share the cores."""
    layout = plan.layout
    who = wire.rank_environment(
        rank=rank,
        world_size=layout.world_size,
        local_rank=rank - layout.base_rank,
        local_world_size=layout.nproc,
        node_rank=layout.node_rank,
        nodes=layout.nodes,
        addr=layout.master_addr,
        port=port,
    )
    threads = inherited.get(wire.THREADS) or str(max(1, int(cores) // layout.nproc))
    return {
        **who,
        wire.THREADS: threads,
        wire.FAILURE_FILE: os.fspath(plan.failure_file(rank)),
        wire.RESTART_COUNT: str(restarts),
    }


def stale_variables(inherited: Mapping[str, str]) -> list[str]:
    """Variables of an outer launch, which those of this one replace; not those that tell this launch where it is."""
    who = wire.rank_environment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, addr=LOOPBACK_ADDRESS, port=1
    )
    told = scheduled(inherited)
    ours = () if told is None else told.variables
    return sorted(name for name in inherited if (name in who or _is_of_a_launch(name)) and name not in ours)


def _is_of_a_launch(name: str) -> bool:
    return name.startswith(wire.OWNED_PREFIXES)


def rank_command(target: Target) -> list[str]:
    """The command line of every rank: this interpreter, its own options, the bootstrap, and the script with its arguments.

    Or the command.

    The bootstrap is named by its file: ``-m`` would put the current folder in front of the standard library, which
    ``python script.py`` does not do.
    """
    if target.kind == "command":
        return [shutil.which(target.name) or target.name, *target.args]
    bootstrap = Path(__file__).parent / "start" / "rank.py"
    return [sys.executable, *flags_to_pass_on(), os.fspath(bootstrap), target.kind, target.name, *target.args]
