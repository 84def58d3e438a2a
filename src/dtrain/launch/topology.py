"""Which ranks this node runs, and where it meets the other nodes: from the command line and what a scheduler says. Pure.

Ranks are numbered node by node. Where all nodes run the same number, node rank and base rank follow from each other; where they
do not, either both are given, or they are learnt when the nodes meet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NoReturn

from dtrain import launch_protocol
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import NodeLayout, NodeRendezvous, check_nproc
from dtrain.launch.schedulers import SchedulerInfo

MAX_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArgs:
    """What the command line says about ranks and nodes; -1 and "" are what was not given."""

    nproc: int = -1
    nnodes: str = ""
    world_size: int = -1
    base_rank: int = -1
    node_rank: int = -1
    master_addr: str = ""
    master_port: int = -1
    rdzv_endpoint: str = ""
    rdzv_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """A job whose number of nodes may change while it runs: torch's own engine runs it."""

    min_nodes: int
    max_nodes: int
    nproc: int
    endpoint: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One of three: ``layout`` for one node, ``rendezvous`` for several, ``elastic`` for a number of them that may change."""

    nproc: int
    layout: NodeLayout | None = None
    rendezvous: NodeRendezvous | None = None
    elastic: ElasticConfig | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedArgs:
    """The command line with what the scheduler adds to it. None and "" are what nobody says."""

    nproc: int
    nodes: int | None
    world_size: int | None
    base_rank: int | None
    node_rank: int | None
    master_addr: str
    master_port: int | None
    scheduler: SchedulerInfo | None


def infer_topology(args: LaunchArgs, scheduled: SchedulerInfo | None, *, gpus: int) -> Topology:
    """The place of this node in the job.

    Args:
        scheduled: what the scheduler says; what the command line says goes before it.
        gpus: ranks of this node when neither of them says.

    Raises:
        ConfigError: the command line contradicts itself or the scheduler, or leaves something out.
    """
    _check_ranges(args)
    if args.nproc == -1 and scheduled is not None and scheduled.nproc is not None:
        said = infer_topology(replace(args, nproc=scheduled.nproc), scheduled, gpus=gpus)
        return replace(
            said, notices=(f"launch: -n {scheduled.nproc}, as {launch_protocol.LOCAL_WORLD_SIZE} says", *said.notices)
        )
    nproc = check_nproc(gpus if args.nproc == -1 else args.nproc)
    smallest, largest = _parse_nodes(args.nnodes)
    if smallest != largest or args.rdzv_endpoint:
        return _elastic_topology(args, nproc, smallest, largest)
    place = _merge_scheduler(args, scheduled, nproc=nproc, nodes=smallest)
    if place.world_size is not None and place.nproc > place.world_size:
        _raise_config_error(
            f"-n {nproc} is more than all ranks, --world-size {place.world_size}", f"say -n {place.world_size}, or less"
        )
    if _is_one_node(place):
        return _single_node_topology(args, place)
    return _multi_node_topology(args, place)


def _check_ranges(asked: LaunchArgs) -> None:
    rows = (
        ("--world-size", asked.world_size, 1, 10**6),
        ("--base-rank", asked.base_rank, 0, 10**6),
        ("--node-rank", asked.node_rank, 0, MAX_NODES - 1),
        ("--master-port", asked.master_port, 1, 65_535),
    )
    for option, value, least, most in rows:
        if value != -1 and not least <= value <= most:
            _raise_config_error(f"{option} must be from {least} to {most}, got {value}", "leave it out to have it inferred")


def _parse_nodes(text: str) -> tuple[int | None, int | None]:
    """The smallest and the largest number of nodes."""
    if text in ("", "-1"):
        return None, None
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    if match is None:
        _raise_config_error(f"--nnodes must be N or MIN:MAX, got {text!r}", "say how many nodes run the job")
    smallest, largest = int(match[1]), int(match[2] or match[1])
    if not 1 <= smallest <= largest <= MAX_NODES:
        _raise_config_error(
            f"--nnodes must be from 1 to {MAX_NODES}, the smaller number first, got {text}", "say how many nodes run the job"
        )
    return smallest, largest


def _elastic_topology(asked: LaunchArgs, nproc: int, smallest: int | None, largest: int | None) -> Topology:
    given = [
        option
        for option, value in (
            ("--world-size", asked.world_size),
            ("--base-rank", asked.base_rank),
            ("--node-rank", asked.node_rank),
        )
        if value != -1
    ]
    if smallest is None or largest is None:
        _raise_config_error(
            "--rdzv-endpoint needs --nnodes", "say --nnodes MIN:MAX, or --master-addr and --master-port instead"
        )
    if given:
        _raise_config_error(f"{given[0]} cannot be chosen with --rdzv-endpoint or --nnodes MIN:MAX", f"leave {given[0]} out")
    if not re.fullmatch(r".+:[0-9]{1,5}", asked.rdzv_endpoint):
        got = repr(asked.rdzv_endpoint) if asked.rdzv_endpoint else "none"
        _raise_config_error(
            f"--nnodes {asked.nnodes} needs --rdzv-endpoint HOST:PORT, got {got}", "name one node's host and a free port"
        )
    run_id = asked.rdzv_id or "dtrain"
    elastic = ElasticConfig(min_nodes=smallest, max_nodes=largest, nproc=nproc, endpoint=asked.rdzv_endpoint, run_id=run_id)
    return Topology(nproc=nproc, elastic=elastic)


def _merge_scheduler(asked: LaunchArgs, scheduled: SchedulerInfo | None, *, nproc: int, nodes: int | None) -> _ResolvedArgs:
    given = _ResolvedArgs(
        nproc=nproc,
        nodes=nodes,
        world_size=_none_if_unset(asked.world_size),
        base_rank=_none_if_unset(asked.base_rank),
        node_rank=_none_if_unset(asked.node_rank),
        master_addr=asked.master_addr,
        master_port=_none_if_unset(asked.master_port),
        scheduler=None,
    )
    if scheduled is None or not _needs_scheduler(given, scheduled):
        return given
    if scheduled.refusal:
        _raise_config_error(scheduled.refusal, "or --nnodes 1 to run each on its own")
    if nodes is not None and scheduled.nodes is not None and nodes != scheduled.nodes:
        what = f"--nnodes {nodes}, but {scheduled.name} started a launcher on {scheduled.nodes} nodes"
        _raise_config_error(what, f"say --nnodes {scheduled.nodes}, or leave it out")
    all_nodes, world_size = nodes or scheduled.nodes, given.world_size
    if all_nodes is not None and all_nodes > 1 and world_size is not None and world_size <= nproc:
        what = f"-n {nproc} makes --world-size {world_size} one node's, but {scheduled.name} says {all_nodes} nodes"
        _raise_config_error(
            what, f"say --world-size {nproc * all_nodes}" + _suggest_fewer_ranks(world_size, all_nodes) + ", or --nnodes 1"
        )
    return replace(
        given,
        nodes=all_nodes,
        world_size=world_size or scheduled.world_size,
        node_rank=scheduled.node_rank if _lacks_position(given) else given.node_rank,
        base_rank=scheduled.base_rank if _lacks_position(given) else given.base_rank,
        master_addr=given.master_addr or scheduled.master_addr,
        master_port=given.master_port or scheduled.master_port,
        scheduler=scheduled,
    )


def _needs_scheduler(given: _ResolvedArgs, scheduled: SchedulerInfo) -> bool:
    """Whether the scheduler has to say anything: not for one node, and not when the command line says everything."""
    if given.nodes == 1 or (scheduled.nodes == 1 and not scheduled.refusal):
        return False
    stated = given.nodes is not None or given.world_size is not None
    if scheduled.nodes is None and scheduled.world_size is None and not (stated or scheduled.master_addr or given.master_addr):
        return False  # Kubernetes with an index and nothing else: an array of jobs of one node each
    return not (stated and not _lacks_position(given) and given.master_addr and given.master_port)


def _lacks_position(given: _ResolvedArgs) -> bool:
    return given.node_rank is None and given.base_rank is None


def _is_one_node(place: _ResolvedArgs) -> bool:
    if place.nodes is not None:
        return place.nodes == 1
    if place.world_size is not None:
        return place.world_size == place.nproc
    if place.scheduler is not None:
        what = f"{place.scheduler.name} says that this is node {place.scheduler.node_rank}, but not of how many"
        _raise_config_error(what, "add --nnodes N, or --nnodes 1 to run on this node alone")
    return True


def _single_node_topology(asked: LaunchArgs, place: _ResolvedArgs) -> Topology:
    nproc, world_size = place.nproc, place.world_size
    if world_size is not None and world_size != nproc:
        what = f"--nnodes 1 with -n {nproc} is {nproc} ranks, not --world-size {world_size}"
        _raise_config_error(what, f"say -n {world_size}, or --nnodes {-(-world_size // nproc)}")
    for option, value, node in (
        ("--node-rank", place.node_rank, place.node_rank),
        ("--base-rank", place.base_rank, (place.base_rank or 0) // nproc),
    ):
        if value:
            what = f"{option} {value} means several nodes, but -n {nproc}"
            what += f" and --world-size {world_size} make this the only one" if world_size else " alone means one"
            _raise_config_error(what, _suggest_several_nodes(world_size, nproc, (node or 0) + 1, option))
    notices = []
    if asked.node_rank == 0 and asked.world_size != -1 and asked.nnodes != "1" and nproc > 1:
        more = f"; for two nodes of {nproc // 2} ranks say -n {nproc // 2}" if nproc % 2 == 0 else ""
        notices.append(f"launch: -n {nproc} and --world-size {asked.world_size} make this the only node{more}")
    if asked.master_port != -1 or asked.master_addr not in ("", "127.0.0.1", "localhost", "::1"):
        notices.append("launch: one node needs no --master-addr and --master-port; its ranks meet on loopback")
    return Topology(nproc=nproc, layout=NodeLayout.one_node(nproc), notices=tuple(notices))


def _suggest_several_nodes(world_size: int | None, nproc: int, nodes: int, option: str) -> str:
    """What to change when the ranks were meant for ``nodes`` nodes at least."""
    nodes = max(nodes, 2)
    if world_size is not None and world_size % nodes == 0:
        return f"for {nodes} nodes say -n {world_size // nodes}, or --world-size {nproc * nodes}"
    return f"for {nodes} nodes say --nnodes {nodes}, or leave {option} out"


def _suggest_fewer_ranks(world_size: int, nodes: int) -> str:
    return f", or -n {world_size // nodes}" if world_size % nodes == 0 else ""


def _multi_node_topology(asked: LaunchArgs, place: _ResolvedArgs) -> Topology:
    place = _with_ranks(place)
    node_rank, scheduler = place.node_rank, place.scheduler
    assert node_rank is not None
    if place.nodes is not None and node_rank >= place.nodes:
        ways = f"nodes are 0 to {place.nodes - 1}"
        _raise_config_error(
            f"--node-rank {node_rank} of {place.nodes} nodes", f"{ways}; say --nnodes {node_rank + 1} for one more"
        )
    if place.base_rank is not None and place.world_size is not None and place.base_rank + place.nproc > place.world_size:
        last, most = place.base_rank + place.nproc - 1, place.world_size - place.base_rank
        what = (
            f"--base-rank {place.base_rank} with -n {place.nproc} would make a rank {last} of --world-size {place.world_size}"
        )
        _raise_config_error(what, f"say -n {most}" if most > 0 else f"say --world-size {last + 1}")
    if not place.master_addr:
        _raise_config_error("several nodes need --master-addr", "name the host of node 0, the same on each node")
    if place.master_port is None:
        _raise_config_error("several nodes need --master-port", "choose a port that is free on node 0, the same on each node")
    if not 1 <= place.master_port <= 65_535:  # of a variable
        _raise_config_error(f"the master port must be from 1 to 65535, got {place.master_port}", "say --master-port")
    meeting = NodeRendezvous(
        node_rank=node_rank,
        nodes=place.nodes,
        nproc=place.nproc,
        base_rank=place.base_rank,
        world_size=place.world_size,
        addr=place.master_addr,
        port=place.master_port,
        token=asked.rdzv_id or (scheduler.token if scheduler else ""),
        fallback_addr=scheduler.fallback_addr if scheduler and not asked.master_addr else "",
        hosts=scheduler.hosts if scheduler else (),
    )
    notices: tuple[str, ...] = ()
    if scheduler is not None and scheduler.variables:
        *names, final = (
            name for name in scheduler.variables if name != launch_protocol.LOCAL_WORLD_SIZE
        )  # of which a notice tells
        notices = (f"launch: node {node_rank} of several, as {', '.join(names)} and {final} say",)
    return Topology(nproc=place.nproc, rendezvous=meeting, notices=notices)


def _with_ranks(place: _ResolvedArgs) -> _ResolvedArgs:
    """``place`` with node rank, base rank and number of nodes as far as they follow from what is known."""
    nproc, world_size, nodes = place.nproc, place.world_size, place.nodes
    if _lacks_position(place):
        _raise_config_error("several nodes need --node-rank", "say 0 on the node of --master-addr, 1 on the next, and so on")
    if nodes is not None and world_size is not None and world_size != nodes * nproc:  # they run different numbers of ranks
        if world_size - nproc < nodes - 1:
            what = f"-n {nproc} leaves {world_size - nproc} of --world-size {world_size} for {nodes - 1} more nodes"
            _raise_config_error(what, f"say -n {world_size // nodes}, or --world-size {nproc * nodes}")
        if place.node_rank is None:
            _raise_config_error("--base-rank alone does not tell the node where nodes differ", "say --node-rank too")
        return place
    both = place.node_rank is not None and place.base_rank is not None
    if nodes is None and world_size is not None and not both:
        if world_size % nproc:
            other = "--base-rank" if place.base_rank is None else "--node-rank"
            what = f"--world-size {world_size} is no multiple of -n {nproc}"
            _raise_config_error(what, f"say -n {_largest_divisor(world_size, nproc)}, or {other} too where nodes differ")
        nodes = world_size // nproc
    node_rank, base_rank = place.node_rank, place.base_rank
    if node_rank is None and base_rank is not None:
        if base_rank % nproc:
            _raise_config_error(
                f"--base-rank {base_rank} is no multiple of -n {nproc}", "say --node-rank too where nodes differ"
            )
        node_rank = base_rank // nproc
    if base_rank is None and node_rank is not None and world_size is not None:
        base_rank = node_rank * nproc
    if (
        nodes is not None
        and base_rank is not None
        and node_rank is not None
        and node_rank < nodes == (world_size or 0) // nproc
    ):
        _check_equal_nodes(node_rank, base_rank, nproc)
    return replace(place, nodes=nodes, node_rank=node_rank, base_rank=base_rank)


def _check_equal_nodes(node_rank: int, base_rank: int, nproc: int) -> None:
    if base_rank != node_rank * nproc:
        what = f"--base-rank {base_rank} with --node-rank {node_rank}, but all nodes before it run -n {nproc} ranks too"
        _raise_config_error(what, f"say --base-rank {node_rank * nproc}, or leave --nnodes out where nodes differ")


def _largest_divisor(world_size: int, nproc: int) -> int:
    """The largest number of ranks up to ``nproc`` that divides all of them evenly."""
    return max(number for number in range(1, nproc + 1) if world_size % number == 0)


def _none_if_unset(value: int) -> int | None:
    return None if value == -1 else value


def _raise_config_error(what: str, do: str) -> NoReturn:
    raise ConfigError(f"launch: {what}; {do}")
