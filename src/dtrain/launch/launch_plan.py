"""Describe a launch and check its options before any process starts. No side effects, except for a search on ``PATH``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dtrain import launch_protocol
from dtrain.arguments import check_int, check_number
from dtrain.errors import ConfigError
from dtrain.launch.processes import inherited_flags
from dtrain.machine import count_gpu_files

# No machine has so many GPUs, and each rank costs the launcher two pipes and two files.
MAX_RANKS = 256  # per node
MAX_GRACE_S = 86_400.0
DEFAULT_GRACE_S = 5.0
SAVING_GRACE_S = 30.0
# A rank that waits for a dead rank in a collective cannot handle SIGTERM, as torch may not return, and delays the restart.
RESTART_GRACE_S = 1.0
# A step of a deep model has hundreds of collectives.
FLIGHT_RECORDER_ENTRIES = "2000"
DEFAULT_PREFIX = "[rank {rank}] "
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACES = (launch_protocol.GLOO_INTERFACE, launch_protocol.NCCL_INTERFACE)


TargetKind = Literal["script", "module", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Program of every rank: a Python file, a module as in ``python -m``, or another command."""

    kind: TargetKind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Ranks of this node: ``nproc`` ranks, from ``base_rank`` on.

    Attributes:
        nproc: ranks of this node.
        world_size: ranks of the job.
        base_rank: first rank of this node.
        node_rank: this node.
        nodes: number of nodes.
        master_addr: address of the ranks' store.
        interface: network interface to the other nodes; "" if unknown.
    """

    nproc: int
    world_size: int
    base_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    master_addr: str = LOOPBACK_ADDRESS
    interface: str = ""

    @classmethod
    def one_node(cls, nproc: int) -> NodeLayout:
        """Build the layout of a single-node job with ``nproc`` ranks."""
        return cls(nproc=nproc, world_size=nproc)

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        return range(self.base_rank, self.base_rank + self.nproc)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Destinations of the ranks' output.

    Templates may contain rank, local_rank, world_size, local_world_size, node_rank and host.

    Attributes:
        shown: global ranks on the terminal; None shows rank 0, and a rank that fails.
        prefix: prefix of each line on the terminal, if there are several ranks.
        stdout: template of the path of each rank's output; None writes into the run folder.
        stderr: template of the path of each rank's errors.
        full_traceback: if True, the terminal shows tracebacks unfolded; log files always do.
    """

    shown: frozenset[int] | None = None
    prefix: str = DEFAULT_PREFIX
    stdout: str | None = None
    stderr: str | None = None
    full_traceback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Options of one launch on one node.

    Attributes:
        target: program of the ranks.
        layout: ranks of this node.
        run_dir: absolute path of the launch folder.
        grace_s: seconds between the request to exit and SIGKILL; None uses the defaults.
        preload: modules that a fork server imports beside those of the program; None adds none, () disables the server.
        max_restarts: restarts without a new checkpoint.
        hang_timeout_s: seconds without progress that count as a hang; None disables the watchdog.
        stop_signal: signal besides SIGTERM that asks ranks to save and stop.
        bind: if True, each rank is bound to its own cores.
        rendezvous: rendezvous with launchers of other nodes, which completes the layout.
        output: destinations of the ranks' output.

    Raises:
        ConfigError: a number is out of range, or the run folder is not absolute.
    """

    target: Target
    layout: NodeLayout
    run_dir: Path
    grace_s: float | None = None
    preload: tuple[str, ...] | None = None
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    stop_signal: int | None = None
    bind: bool = False
    rendezvous: NodeRendezvous | None = None
    output: OutputPlan = field(default_factory=OutputPlan)

    def __post_init__(self) -> None:
        check_nproc(self.layout.nproc)
        if self.grace_s is not None:
            check_number("launch", "--grace", self.grace_s, minimum=0, maximum=MAX_GRACE_S)
        if not self.run_dir.is_absolute():
            raise ConfigError(
                f"launch: the run folder must be absolute, got {str(self.run_dir)!r}. Pass an absolute path, because a script "
                "may change the current folder."
            )

    @property
    def grace_after_failure_s(self) -> float:
        """Seconds for processes that go on after a failure of their script, or after all ranks."""
        return DEFAULT_GRACE_S if self.grace_s is None else self.grace_s

    @property
    def grace_of_others_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL for the other ranks after a failure; by default fewer if all may start again."""
        return RESTART_GRACE_S if self.grace_s is None and self.max_restarts else self.grace_after_failure_s

    @property
    def grace_after_signal_s(self) -> float:
        """Seconds between a stop request and SIGKILL for all ranks, which includes the time to save."""
        return SAVING_GRACE_S if self.grace_s is None else self.grace_s

    def failure_file(self, rank: int) -> Path:
        """Return the path of the failure record of ``rank``."""
        return launch_protocol.failure_file(self.run_dir, rank)


def check_nproc(nproc: int) -> int:
    """Return the number of ranks of a node, if it is in range.

    Raises:
        ConfigError: out of range.
    """
    return check_int("launch", "-n", nproc, minimum=1, maximum=MAX_RANKS, advice="Use one rank per GPU.")


def count_gpus(device_names: Iterable[str], visible: str | None) -> int:
    """Count the GPUs that a process may use.

    Args:
        device_names: names of files in ``/dev``; ``nvidia0``, ``nvidia1`` and so on are GPUs.
        visible: ``CUDA_VISIBLE_DEVICES``, or None. As in CUDA, the first invalid entry ends the list.
    """
    gpus = count_gpu_files(device_names)
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
    """Build the environment of all ranks: inherited variables without variables of an outer launch, and our own variables."""
    ours = {
        launch_protocol.RUN_ID: plan.run_dir.name or "run",
        launch_protocol.MAX_RESTARTS: str(plan.max_restarts),
        # The launcher's store process serves the store, and every rank is a client.
        launch_protocol.AGENT_STORE: "True",
        launch_protocol.RUN_DIR: os.fspath(plan.run_dir),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.rendezvous is None and plan.layout.nodes == 1:
        ours |= {launch_protocol.LOOPBACK: "1", **dict.fromkeys(_INTERFACES, LOOPBACK_INTERFACE)}
    if plan.stop_signal is not None:
        ours[launch_protocol.STOP_SIGNAL] = str(plan.stop_signal)
    if plan.hang_timeout_s is not None:
        # torch reads this number of recorded collectives when a process group is created.
        ours |= {name: inherited.get(name) or FLIGHT_RECORDER_ENTRIES for name in launch_protocol.FLIGHT_RECORDER}
    return {name: value for name, value in inherited.items() if not is_launch_variable(name)} | ours


def build_rank_environment(
    plan: LaunchPlan, rank: int, *, port: int, cores: float, inherited: Mapping[str, str], restart_count: int = 0
) -> dict[str, str]:
    """Build the variables of one rank. ``OMP_NUM_THREADS`` is inherited if set; otherwise the ranks share the cores."""
    layout = plan.layout
    rank_variables = launch_protocol.rank_environment(
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
    # By default gloo uses the interface of the host name, which is often the loopback. A restart may find another interface.
    interfaces = {name: inherited.get(name) or layout.interface for name in _INTERFACES} if layout.interface else {}
    return {
        **rank_variables,
        **interfaces,
        launch_protocol.OMP_THREADS: threads,
        launch_protocol.FAILURE_FILE: os.fspath(plan.failure_file(rank)),
        launch_protocol.RESTART_COUNT: str(restart_count),
    }


def find_binding_variable(plan: LaunchPlan, inherited: Mapping[str, str]) -> str | None:
    """Return the variable with which OpenMP binds the threads of each rank to the first cores; None if ranks do not collide."""
    if plan.layout.nproc == 1 or plan.bind:
        return None
    binds = inherited.get("OMP_PROC_BIND", "").strip().lower()
    if binds == "false":
        return None
    names = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
    return next((name for name in names if inherited.get(name)), None)


def is_launch_variable(name: str) -> bool:
    """Return True if a launcher sets the variable for its ranks."""
    # Whoever starts the launchers of several nodes gives all of them one secret.
    return name.startswith(launch_protocol.OWNED_PREFIXES) and name != launch_protocol.JOB_SECRET


def build_rank_command(target: Target) -> list[str]:
    """Return the command line of every rank: this interpreter with its flags, the bootstrap, and the script with its arguments.

    For a target of kind ``command``, return the command. The bootstrap is a file path, because ``-m`` would put the current
    folder in front of the standard library, unlike ``python script.py``.
    """
    if target.kind == "command":
        return [shutil.which(target.name) or target.name, *target.args]
    bootstrap = Path(__file__).parent / "rank_main.py"
    return [sys.executable, *inherited_flags(), os.fspath(bootstrap), target.kind, target.name, *target.args]


DEFAULT_JOIN_TIMEOUT_S = 300.0
# A new container of a lost node starts within a minute, if at all.
DEFAULT_REPLACE_TIMEOUT_S = 60.0
# A node that is silent for so long is lost.
DEFAULT_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLayout:
    """Layout of a node as its command line and its scheduler state it. None: unknown before all nodes have joined.

    Attributes:
        node_rank: the node.
        nodes: number of nodes; the largest number if ``min_nodes`` is set.
        nproc: ranks of the node.
        base_rank: first rank of the node.
        world_size: ranks of the job.
        min_nodes: smallest number of nodes; None if the number is fixed.
    """

    node_rank: int
    nodes: int | None
    nproc: int
    base_rank: int | None = None
    world_size: int | None = None
    min_nodes: int | None = None

    @property
    def nnodes(self) -> str | None:
        """Number of nodes, as on a command line."""
        return None if self.nodes is None else f"{self.nodes}" if self.min_nodes is None else f"{self.min_nodes}:{self.nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRendezvous(StatedLayout):
    """This node's entry to the rendezvous of the job's launchers.

    Either ``nodes`` or ``world_size`` must be known, because the rendezvous ends when all nodes have joined.

    Attributes:
        addr: address of node 0.
        port: port of the rendezvous on node 0.
        token: identifier of the job, equal on all its nodes; separates jobs at the same address.
        timeout_s: seconds until all nodes have joined.
        replace_timeout_s: seconds of a restart after which at least ``min_nodes`` nodes go on without the others.
        silence_s: seconds without a message until a node is lost.
        fallback_addr: address for a name ``addr`` that does not resolve.
        hosts: hosts by node rank, if a scheduler lists them; only for messages.
        facts: versions and settings that must be equal on all nodes, by name.
        run_name: name of the run, only on node 0.
        store_port: port of the ranks' store, only on node 0.
        max_restarts: as in ``LaunchPlan``. Above 0, all nodes join again after a failure.
        restarts: restarts of this launcher so far; 0 in a launcher that takes the place of a lost one.
        fruitless_restarts: restarts without a new checkpoint since.
        members: nodes of the last attempt, and nodes that waited for the next one; empty in a new launcher.
    """

    addr: str
    port: int
    token: str = ""
    timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    replace_timeout_s: float = DEFAULT_REPLACE_TIMEOUT_S
    silence_s: float = DEFAULT_SILENCE_S
    fallback_addr: str = ""
    hosts: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    run_name: str = ""
    store_port: int = 0
    max_restarts: int = 0
    restarts: int = 0
    fruitless_restarts: int = 0
    members: tuple[int, ...] = ()

    def expected_layout(self) -> NodeLayout:
        """Return the layout of this node as far as it is known before the rendezvous, which may change it."""
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
        assert self.nodes is not None or self.world_size is not None, "the rendezvous needs nodes or world_size"
