"""Read node rank, number of nodes and master address from Slurm, OpenMPI, Kubernetes or plain variables. No side effects.

A scheduler must start one launcher per node. One launcher per rank is refused, because only a launcher that owns all ranks of a
node can end them together.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dtrain import launch_protocol

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
    found = (name for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes) for name in _expand_hostlist_entry(entry.strip()))
    for count, name in enumerate(found):
        if count == _MAX_HOSTS:
            return
        yield name


def _expand_hostlist_entry(entry: str) -> Iterator[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        yield entry
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.strip().partition("-")
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
