"""Infer this node's ranks and the rendezvous of the nodes from the command line and the scheduler. No side effects.

``infer_topology`` merges the options with ``SchedulerInfo``: the facts of Slurm, OpenMPI, Kubernetes or plain variables.

Ranks are numbered node by node. If all nodes run the same number of ranks, node rank and base rank follow from each other.
Otherwise both are set, or they follow from the rendezvous.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import (
    DEFAULT_GRACE_S,
    DEFAULT_JOIN_TIMEOUT_S,
    DEFAULT_REPLACE_TIMEOUT_S,
    LOOPBACK_ADDRESS,
    NodeLayout,
    NodeRendezvous,
    check_nproc,
    is_launch_variable,
)

MAX_NODES = 4096
# Time for the launcher of a node whose ranks have ended to arrive at the next start.
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArgs:
    """Options of the command line about ranks and nodes; None and "" mark unset options."""

    nproc: int | None = None
    nnodes: str = ""
    world_size: int | None = None
    base_rank: int | None = None
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    join_timeout: float | None = None
    replace_timeout: float | None = None
    max_restarts: int = 0
    grace: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Either ``layout``, for one node, or ``rendezvous``, for several nodes."""

    layout: NodeLayout | None = None
    rendezvous: NodeRendezvous | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedArgs(LaunchArgs):
    """Options of the command line, completed by the scheduler, which is None if it was not needed."""

    nproc: int
    nodes: int | None
    min_nodes: int | None = None
    scheduler: SchedulerInfo | None = None


def infer_topology(args: LaunchArgs, scheduled: SchedulerInfo | None, *, gpus: int) -> Topology:
    """Infer the topology of the job and the position of this node.

    Args:
        scheduled: facts of the scheduler; options of the command line have precedence.
        gpus: ranks of this node if neither source sets them.

    Raises:
        ConfigError: the command line contradicts itself or the scheduler, or is incomplete.
    """
    if args.nproc is None and scheduled is not None and scheduled.nproc is not None:
        topology = infer_topology(replace(args, nproc=scheduled.nproc), scheduled, gpus=gpus)
        notice = f"launch: -n {scheduled.nproc}, as {launch_protocol.LOCAL_WORLD_SIZE} says"
        return replace(topology, notices=(notice, *topology.notices))
    nproc = check_nproc(gpus if args.nproc is None else args.nproc)
    min_nodes, nodes = _parse_nodes(args)
    resolved = _ResolvedArgs(**{**asdict(args), "nproc": nproc}, nodes=nodes, min_nodes=min_nodes)
    if scheduled is not None and _needs_scheduler(resolved, scheduled):
        resolved = _merge_scheduler(resolved, scheduled)
    if resolved.world_size is not None and resolved.nproc > resolved.world_size:
        _raise_config_error(
            f"-n {nproc} is more than all ranks, --world-size {resolved.world_size}", f"Pass -n {resolved.world_size} or less"
        )
    if resolved.scheduler is not None and resolved.nodes is None and resolved.world_size is None:
        conflict = f"{resolved.scheduler.name} says that this is node {resolved.scheduler.node_rank}, but not of how many"
        _raise_config_error(conflict, "Add --nnodes N, or --nnodes 1 to run on this node alone")
    if resolved.nodes == 1 or (resolved.nodes is None and resolved.world_size in (None, nproc)):
        return _single_node_topology(args, resolved)
    return _multi_node_topology(args, resolved)


def _parse_nodes(args: LaunchArgs) -> tuple[int | None, int | None]:
    """Parse the smallest and the largest number of nodes. The smallest is None for a fixed number, both are None if unset."""
    text = args.nnodes.strip()
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None and text not in ("", "-1"):
        _raise_config_error(f"--nnodes must be a number or MIN:MAX, got {args.nnodes!r}", "Pass the number of nodes")
    smallest, largest = (int(match[1]), int(match[2] or match[1])) if match else (None, None)
    if smallest is not None and largest is not None and not 1 <= smallest <= largest <= MAX_NODES:
        order = ", with MIN at most MAX" if smallest > largest else ""
        _raise_config_error(f"--nnodes must be from 1 to {MAX_NODES}{order}, got {text}", "Pass the number of nodes")
    if args.rdzv_endpoint:
        torchrun = f"torchrun --nnodes {text or 'MIN:MAX'} --rdzv-backend c10d --rdzv-endpoint {args.rdzv_endpoint}"
        _raise_config_error(
            f"--rdzv-endpoint {args.rdzv_endpoint} is for torch's agents",
            f"Pass --master-addr and --master-port instead, or run {torchrun} with the same script",
        )
    if smallest == largest:
        if args.replace_timeout is not None:
            conflict = f"--replace-timeout {args.replace_timeout:g} is for --nnodes MIN:MAX"
            _raise_config_error(conflict, "Remove it, or pass the smallest number of nodes, too")
        return None, largest
    if args.max_restarts == 0:
        _raise_config_error(f"--nnodes {text} must have restarts, got none", "Add --max-restarts 3, for example")
    for option, value in (("--world-size", args.world_size), ("--base-rank", args.base_rank)):
        if value is not None:
            _raise_config_error(f"{option} {value} fixes the ranks, but --nnodes {text} does not", f"Remove {option}")
    return smallest, largest


def _merge_scheduler(resolved: _ResolvedArgs, scheduled: SchedulerInfo) -> _ResolvedArgs:
    nproc, nodes = resolved.nproc, resolved.nodes
    if scheduled.refusal:
        _raise_config_error(scheduled.refusal, "Or pass --nnodes 1 to run each on its own")
    if nodes is not None and scheduled.nodes is not None and nodes != scheduled.nodes:
        conflict = f"--nnodes {nodes}, but {scheduled.name} started a launcher on {scheduled.nodes} nodes"
        _raise_config_error(conflict, f"Pass --nnodes {scheduled.nodes}, or remove the option")
    all_nodes, world_size = nodes or scheduled.nodes, resolved.world_size
    if all_nodes is not None and all_nodes > 1 and world_size is not None and world_size <= nproc:
        conflict = f"-n {nproc} makes --world-size {world_size} one node's, but {scheduled.name} says {all_nodes} nodes"
        fewer = f", or -n {world_size // all_nodes}" if world_size % all_nodes == 0 else ""
        _raise_config_error(conflict, f"Pass --world-size {nproc * all_nodes}{fewer}, or --nnodes 1")
    return replace(
        resolved,
        nodes=all_nodes,
        world_size=world_size or scheduled.world_size,
        node_rank=scheduled.node_rank if _lacks_position(resolved) else resolved.node_rank,
        base_rank=scheduled.base_rank if _lacks_position(resolved) else resolved.base_rank,
        master_addr=resolved.master_addr or scheduled.master_addr,
        master_port=resolved.master_port or scheduled.master_port,
        scheduler=scheduled,
    )


def _needs_scheduler(resolved: _ResolvedArgs, scheduled: SchedulerInfo) -> bool:
    """Return True if facts of the scheduler are needed: not for one node, and not if the command line is complete."""
    if resolved.nodes == 1 or (scheduled.nodes == 1 and not scheduled.refusal):
        return False
    stated = resolved.nodes is not None or resolved.world_size is not None
    if (
        scheduled.nodes is None
        and scheduled.world_size is None
        and not (stated or scheduled.master_addr or resolved.master_addr)
    ):
        # An index of Kubernetes without an address belongs to an array of single-node jobs.
        return False
    return not (stated and not _lacks_position(resolved) and resolved.master_addr and resolved.master_port)


def _lacks_position(resolved: _ResolvedArgs) -> bool:
    return resolved.node_rank is None and resolved.base_rank is None


def _single_node_topology(args: LaunchArgs, resolved: _ResolvedArgs) -> Topology:
    nproc, world_size = resolved.nproc, resolved.world_size
    if world_size is not None and world_size != nproc:
        conflict = f"--nnodes 1 with -n {nproc} is {nproc} ranks, not --world-size {world_size}"
        _raise_config_error(conflict, f"Pass -n {world_size}, or --nnodes {-(-world_size // nproc)}")
    if resolved.node_rank:
        _refuse_position("--node-rank", resolved.node_rank, resolved, nodes=resolved.node_rank + 1)
    if resolved.base_rank:
        _refuse_position("--base-rank", resolved.base_rank, resolved, nodes=resolved.base_rank // nproc + 1)
    notices = []
    if args.node_rank == 0 and args.world_size is not None and args.nnodes != "1" and nproc > 1:
        more = f"; for two nodes of {nproc // 2} ranks pass -n {nproc // 2}" if nproc % 2 == 0 else ""
        notices.append(f"launch: -n {nproc} and --world-size {args.world_size} make this the only node{more}")
    if args.master_port is not None or args.master_addr not in ("", "127.0.0.1", "localhost", "::1"):
        notices.append("launch: one node needs no --master-addr and --master-port; its ranks use loopback")
    return Topology(layout=NodeLayout.one_node(nproc), notices=tuple(notices))


def _refuse_position(option: str, value: int, resolved: _ResolvedArgs, *, nodes: int) -> NoReturn:
    """Refuse a position on another node than the first one, in a job of one node that is meant for at least ``nodes`` nodes."""
    nproc, world_size, nodes = resolved.nproc, resolved.world_size, max(nodes, 2)
    reason = f" and --world-size {world_size} make this the only one" if world_size else " alone means one"
    advice = f"For {nodes} nodes pass --nnodes {nodes}, or remove {option}"
    if world_size is not None and world_size % nodes == 0:
        advice = f"For {nodes} nodes pass -n {world_size // nodes}, or --world-size {nproc * nodes}"
    _raise_config_error(f"{option} {value} means several nodes, but -n {nproc}{reason}", advice)


def _multi_node_topology(args: LaunchArgs, resolved: _ResolvedArgs) -> Topology:
    resolved = _with_ranks(resolved)
    node_rank, scheduler = resolved.node_rank, resolved.scheduler
    assert node_rank is not None
    if resolved.nodes is not None and node_rank >= resolved.nodes:
        conflict = f"--node-rank {node_rank} of {resolved.nodes} nodes, which are 0 to {resolved.nodes - 1}"
        _raise_config_error(conflict, f"Pass --nnodes {node_rank + 1} for one more")
    if (
        resolved.base_rank is not None
        and resolved.world_size is not None
        and resolved.base_rank + resolved.nproc > resolved.world_size
    ):
        last, most = resolved.base_rank + resolved.nproc - 1, resolved.world_size - resolved.base_rank
        options = f"--base-rank {resolved.base_rank} with -n {resolved.nproc}"
        conflict = f"{options} would make a rank {last} of --world-size {resolved.world_size}"
        _raise_config_error(conflict, f"Pass -n {most}" if most > 0 else f"Pass --world-size {last + 1}")
    if not resolved.master_addr:
        _raise_config_error("several nodes need --master-addr", "Pass the host of node 0, the same on each node")
    if resolved.master_port is None:
        _raise_config_error("several nodes need --master-port", "Pass a port that is free on node 0, the same on each node")
    # The port may come from a variable.
    if not 1 <= resolved.master_port <= 65_535:
        _raise_config_error(f"the master port must be from 1 to 65535, got {resolved.master_port}", "Pass --master-port")
    is_fixed = resolved.min_nodes is None
    join_timeout_s, replace_timeout_s = _choose_timeouts(args, is_elastic=not is_fixed)
    rendezvous = NodeRendezvous(
        node_rank=node_rank,
        nodes=resolved.nodes,
        nproc=resolved.nproc,
        base_rank=resolved.base_rank if is_fixed else None,
        world_size=resolved.world_size if is_fixed else None,
        min_nodes=resolved.min_nodes,
        addr=resolved.master_addr,
        port=resolved.master_port,
        token=args.rdzv_id or (scheduler.token if scheduler else ""),
        fallback_addr=scheduler.fallback_addr if scheduler and not args.master_addr else "",
        hosts=scheduler.hosts if scheduler else (),
        timeout_s=join_timeout_s,
        replace_timeout_s=replace_timeout_s,
        max_restarts=args.max_restarts,
    )
    notices: tuple[str, ...] = ()
    if scheduler is not None and scheduler.variables:
        # A separate notice mentions LOCAL_WORLD_SIZE.
        *names, final = (name for name in scheduler.variables if name != launch_protocol.LOCAL_WORLD_SIZE)
        notices = (f"launch: node {node_rank} of several, as {', '.join(names)} and {final} say",)
    return Topology(rendezvous=rendezvous, notices=notices)


def _choose_timeouts(args: LaunchArgs, *, is_elastic: bool) -> tuple[float, float]:
    """Return the times to wait for all nodes, and for a lost one, in seconds.

    They are longer than the time that the ranks of a living node have to end.
    """
    grace_s = DEFAULT_GRACE_S if args.grace is None else args.grace
    join_s = DEFAULT_JOIN_TIMEOUT_S if args.join_timeout is None else args.join_timeout
    replace_s = max(DEFAULT_REPLACE_TIMEOUT_S, grace_s + _START_S) if args.replace_timeout is None else args.replace_timeout
    waits = (("--replace-timeout", replace_s, _START_S, is_elastic), ("--join-timeout", join_s, DEFAULT_JOIN_TIMEOUT_S, True))
    for option, wait_s, margin_s, is_used in waits:
        if is_used and args.max_restarts and wait_s <= grace_s:
            _raise_config_error(
                f"{option} {wait_s:g} must be above --grace {grace_s:g}, the time that the ranks of a living node have to end",
                f"Pass {option} {grace_s + margin_s:g}, or a smaller --grace",
            )
    if is_elastic and args.replace_timeout is not None and replace_s > join_s:
        conflict = f"--replace-timeout {replace_s:g} is above --join-timeout {join_s:g}, which ends every wait for nodes"
        _raise_config_error(conflict, f"Pass --join-timeout {replace_s:g}, too")
    return join_s, replace_s


def _with_ranks(resolved: _ResolvedArgs) -> _ResolvedArgs:
    """Complete node rank, base rank and number of nodes as far as they follow from known values."""
    nproc, world_size, nodes = resolved.nproc, resolved.world_size, resolved.nodes
    if _lacks_position(resolved):
        _raise_config_error("several nodes need --node-rank", "Pass 0 on the node of --master-addr, 1 on the next, and so on")
    # The nodes run different numbers of ranks.
    if nodes is not None and world_size is not None and world_size != nodes * nproc:
        if world_size - nproc < nodes - 1:
            conflict = f"-n {nproc} leaves {world_size - nproc} of --world-size {world_size} for {nodes - 1} more nodes"
            _raise_config_error(conflict, f"Pass -n {world_size // nodes}, or --world-size {nproc * nodes}")
        if resolved.node_rank is None:
            _raise_config_error("--base-rank alone does not determine the node if nodes differ", "Pass --node-rank, too")
        return resolved
    both = resolved.node_rank is not None and resolved.base_rank is not None
    if nodes is None and world_size is not None and not both:
        if world_size % nproc:
            other = "--base-rank" if resolved.base_rank is None else "--node-rank"
            conflict = f"--world-size {world_size} is no multiple of -n {nproc}"
            divisor = max(number for number in range(1, nproc + 1) if world_size % number == 0)
            _raise_config_error(conflict, f"Pass -n {divisor}, or {other}, too, if nodes differ")
        nodes = world_size // nproc
    node_rank, base_rank = resolved.node_rank, resolved.base_rank
    if node_rank is None and base_rank is not None:
        if base_rank % nproc:
            _raise_config_error(
                f"--base-rank {base_rank} is no multiple of -n {nproc}", "Pass --node-rank, too, if nodes differ"
            )
        node_rank = base_rank // nproc
    if base_rank is None and node_rank is not None and world_size is not None:
        base_rank = node_rank * nproc
    if (
        nodes is not None
        and base_rank is not None
        and node_rank is not None
        and node_rank < nodes == (world_size or 0) // nproc
        and base_rank != node_rank * nproc
    ):
        conflict = f"--base-rank {base_rank} with --node-rank {node_rank}, but all nodes before it run -n {nproc} ranks too"
        _raise_config_error(conflict, f"Pass --base-rank {node_rank * nproc}, or remove --nnodes if nodes differ")
    return replace(resolved, nodes=nodes, node_rank=node_rank, base_rank=base_rank)


def _raise_config_error(problem: str, advice: str) -> NoReturn:
    raise ConfigError(f"launch: {problem}. {advice}.")


def find_stale_variables(inherited: Mapping[str, str]) -> list[str]:
    """Return variables of an outer launch, which this launch replaces, without the scheduler's variables of this launch."""
    rank_variables = launch_protocol.rank_environment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, addr=LOOPBACK_ADDRESS, port=1
    )
    scheduler = read_scheduler(inherited)
    ours = () if scheduler is None else scheduler.variables
    return sorted(name for name in inherited if (name in rank_variables or is_launch_variable(name)) and name not in ours)


# below the range of ports for outgoing connections
_PORT_RANGE = range(12_000, 28_000)
# limit of the expansion of a node list
_MAX_HOSTS = 65_536
_PLAIN_NAME = "the environment"
_NODE_RANK, _BASE_RANK, _PET_NODE_RANK, _PET_NODES = "NODE_RANK", "BASE_RANK", "PET_NODE_RANK", "PET_NNODES"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerInfo:
    """Facts of a scheduler about the job. Unknown facts are None or "".

    Attributes:
        name: the scheduler.
        node_rank: this node.
        base_rank: first rank of this node.
        nproc: ranks of this node.
        nodes: number of nodes.
        world_size: ranks of the job.
        master_addr: address of the first node.
        fallback_addr: address of the first node if the name ``master_addr`` does not resolve.
        master_port: port on the first node.
        token: identifier of the job, equal on all its nodes.
        hosts: hosts by node rank, if listed.
        refusal: reason that the facts cannot be used; only an error if the command line needs the facts.
        variables: variables with the facts, if they may be left over from another program.
    """

    name: str
    node_rank: int | None = None
    base_rank: int | None = None
    nproc: int | None = None
    nodes: int | None = None
    world_size: int | None = None
    master_addr: str = ""
    fallback_addr: str = ""
    master_port: int | None = None
    token: str = ""
    hosts: tuple[str, ...] = ()
    refusal: str = ""
    variables: tuple[str, ...] = ()


def read_scheduler(env: Mapping[str, str]) -> SchedulerInfo | None:
    """Read the scheduler's facts in ``env``; None without a scheduler, or in a rank of another launch."""
    if launch_protocol.RUN_ID in env:
        return None
    results = (read(env) for read in _READERS)
    return next((result for result in results if result is not None), None)


def _read_openmpi(env: Mapping[str, str]) -> SchedulerInfo | None:
    """Read the variables of ``mpirun``, one process per node. Its ``..._NODE_RANK`` counts processes on a node."""
    rank, size = _read_number(env, "OMPI_COMM_WORLD_RANK"), _read_number(env, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    on_node = _read_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    several = on_node is not None and on_node > 1
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    return SchedulerInfo(
        name="OpenMPI",
        node_rank=rank,
        nodes=size,
        master_addr=env.get(launch_protocol.MASTER_ADDR, ""),
        master_port=_read_master_port(env) or (_derive_port(f"openmpi {job}") if job else None),
        token=job and f"openmpi {job}",
        refusal=f"mpirun started {on_node} launchers on this node. Start one, with --map-by ppr:1:node" if several else "",
    )


def _read_slurm(env: Mapping[str, str]) -> SchedulerInfo | None:
    """Read the variables of a Slurm step (``srun``). A batch script has no step and runs on one node."""
    listed, rank = env.get("SLURM_STEP_NODELIST"), _read_number(env, "SLURM_NODEID")
    if not listed or rank is None:
        return None
    hosts = tuple(expand_hostlist(listed))
    nodes = _read_number(env, "SLURM_STEP_NUM_NODES") or _read_number(env, "SLURM_NNODES") or len(hosts)
    tasks = _read_number(env, "SLURM_STEP_NUM_TASKS") or _read_number(env, "SLURM_NTASKS") or nodes
    job = f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return SchedulerInfo(
        name="Slurm",
        node_rank=rank,
        nodes=nodes,
        master_addr=env.get(launch_protocol.MASTER_ADDR, "") or (hosts[0] if hosts else ""),
        fallback_addr=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        master_port=_read_master_port(env) or _derive_port(job),
        token=job,
        hosts=hosts if len(hosts) == nodes else (),
        refusal=f"srun started {tasks} tasks on {nodes} node{'s' * (nodes > 1)}. Start one launcher per node, "
        f"with srun --ntasks-per-node=1 --ntasks={nodes}"
        if tasks != nodes
        else "",
    )


def _read_kubernetes(env: Mapping[str, str]) -> SchedulerInfo | None:
    """Read the variables of an Indexed Job, or of Kubeflow's trainer.

    An Indexed Job has neither the number of nodes nor an address, so the job's author sets them. Without an address, the job is
    an array of independent jobs.
    """
    kubeflow, index = _read_number(env, _PET_NODE_RANK), _read_number(env, "JOB_COMPLETION_INDEX")
    rank = index if kubeflow is None else kubeflow
    if rank is None:
        return None
    host = env.get("HOSTNAME", "")
    job = host.removesuffix(f"-{rank}") if host.endswith(f"-{rank}") else ""
    return SchedulerInfo(
        name="Kubernetes",
        node_rank=rank,
        nodes=_read_number(env, _PET_NODES),
        master_addr=env.get("PET_MASTER_ADDR", "") or env.get(launch_protocol.MASTER_ADDR, ""),
        master_port=_read_number(env, "PET_MASTER_PORT")
        or _read_master_port(env)
        or (_derive_port(f"kubernetes {job}") if job else None),
        token=job and f"kubernetes {job}",
    )


def _read_plain_variables(env: Mapping[str, str]) -> SchedulerInfo | None:
    """Read the variables of other launchers. With a variable that only ranks have, they are left over from a rank.

    A multi-node job needs all variables: a position, the number of ranks, address and port. The ranks per node may be set
    alone.
    """
    if env.keys() & {launch_protocol.RANK, launch_protocol.LOCAL_RANK}:
        return None
    node_rank, base_rank, world_size = (
        _read_number(env, name) for name in (_NODE_RANK, _BASE_RANK, launch_protocol.WORLD_SIZE)
    )
    # The variable is 0 on a node without GPUs.
    nproc = _read_number(env, launch_protocol.LOCAL_WORLD_SIZE) or None
    here = (launch_protocol.LOCAL_WORLD_SIZE,) if nproc else ()
    addr, port = env.get(launch_protocol.MASTER_ADDR, ""), _read_master_port(env)
    if (node_rank is None and base_rank is None) or not world_size or not addr or port is None:
        return SchedulerInfo(name=_PLAIN_NAME, nodes=1, nproc=nproc, variables=here) if nproc else None
    position = (name for name, value in ((_NODE_RANK, node_rank), (_BASE_RANK, base_rank)) if value is not None)
    return SchedulerInfo(
        name=_PLAIN_NAME,
        node_rank=node_rank,
        base_rank=base_rank,
        nproc=nproc,
        world_size=world_size,
        master_addr=addr,
        master_port=port,
        variables=(*here, *position, launch_protocol.WORLD_SIZE, launch_protocol.MASTER_ADDR, launch_protocol.MASTER_PORT),
    )


_READERS: tuple[Callable[[Mapping[str, str]], SchedulerInfo | None], ...] = (
    # mpirun may itself have been started by Slurm, so OpenMPI comes first.
    _read_openmpi,
    _read_slurm,
    _read_kubernetes,
    _read_plain_variables,
)


def expand_hostlist(nodes: str) -> Iterator[str]:
    """Yield the names in a node list of Slurm.

    >>> list(expand_hostlist("n[1-3,07],m5"))
    ['n1', 'n2', 'n3', 'n07', 'm5']
    """
    entries = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    yield from islice((name for entry in entries for name in _expand_hostlist_entry(entry.strip())), _MAX_HOSTS)


def _expand_hostlist_entry(entry: str) -> Iterator[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        yield entry
        return
    inside, _, after = rest.partition("]")
    for span in inside.split(","):
        first, dash, last = span.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            numbers: Iterator[str] = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        else:
            numbers = iter((first,))
        for number in numbers:
            for tail in _expand_hostlist_entry(after):
                yield f"{before}{number}{tail}"


def _derive_port(job: str) -> int:
    """Return a port for ``job``: the same port on every node, and very likely another port for another job."""
    return _PORT_RANGE[zlib.crc32(job.encode()) % len(_PORT_RANGE)]


def _read_master_port(env: Mapping[str, str]) -> int | None:
    return _read_number(env, launch_protocol.MASTER_PORT)


def _read_number(env: Mapping[str, str], name: str) -> int | None:
    """Return a non-negative integer of ``env``; None if the variable is missing or not an integer."""
    text = env.get(name, "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
