"""Whether the nodes that met fit together, and who is missing. Pure: from what each of them said of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dtrain.launch.nodes.messages import Hello
from dtrain.launch.plan import Layout

_MAX_NAMED = 8  # in a list
_MAX_COUNT = 10**6  # of nodes, or ranks
_MAX_VALUE = 80  # characters of a fact


def all_here(hellos: Mapping[int, Hello]) -> bool:
    """Whether nobody is missing: by the number of nodes where it is known, else by the number of ranks."""
    nodes, world_size = _stated(hellos)
    if nodes is not None:
        return len(hellos) >= nodes
    return world_size is not None and sum(hello.nproc for hello in hellos.values()) >= world_size


def missing(hellos: Mapping[int, Hello], hosts: Sequence[str]) -> str:
    """The nodes that are not there, of those that are known by number."""
    nodes, _ = _stated(hellos)
    absent = [rank for rank in range(nodes or 0) if rank not in hellos]
    return _list(f"node {rank} ({hosts[rank]})" if rank < len(hosts) else f"node {rank}" for rank in absent)


def progress(hellos: Mapping[int, Hello], hosts: Sequence[str], seconds: float) -> str:
    """How far the meeting has come: ``3 of 4 nodes joined in 60 s; missing: node 2``."""
    nodes, world_size = _stated(hellos)
    if nodes is None:
        here = sum(hello.nproc for hello in hellos.values())
        who = _list(f"node {rank}" for rank in sorted(hellos))
        return f"{here} of {world_size} ranks joined in {seconds:.0f} s, with {who}"
    return f"{len(hellos)} of {nodes} nodes joined in {seconds:.0f} s; missing: {missing(hellos, hosts)}"


def is_possible(hello: Hello) -> bool:
    """Whether its numbers can be those of a job: what is computed from them stays small."""
    counts = (hello.nodes or 1, hello.nproc, hello.world_size or 1)
    ranks = (hello.node_rank, hello.base_rank or 0)
    return all(1 <= count <= _MAX_COUNT for count in counts) and all(0 <= rank < _MAX_COUNT for rank in ranks)


def clash(hellos: Mapping[int, Hello], new: Hello) -> str | None:
    """Why ``new`` cannot belong to the nodes that are there, as soon as it comes; None when it may."""
    for value, option in (("nodes", "--nnodes"), ("world_size", "--world-size")):
        for hello in hellos.values():
            theirs, mine = getattr(hello, value), getattr(new, value)
            if None not in (theirs, mine) and theirs != mine:
                return f"{new.who} was started for {option} {mine}, {hello.who} for {theirs}; say the same on every node"
    nodes, _ = _stated({**hellos, new.node_rank: new})
    beyond = next((hello for hello in (*hellos.values(), new) if nodes is not None and hello.node_rank >= nodes), None)
    if beyond is not None:
        return f"{beyond.who} came to a job of {nodes} nodes, numbered from 0; correct --node-rank or --nnodes there"
    return None


def disagreement(hellos: Mapping[int, Hello]) -> str | None:
    """Why the nodes, all of them there, cannot run one job; None when they can."""
    return _different_facts(hellos) or _misfit(hellos)


def layouts(hellos: Mapping[int, Hello], addr: str) -> dict[int, Layout]:
    """Which ranks each node runs. The nodes must agree."""
    firsts = _first_ranks(hellos)
    world_size = sum(hello.nproc for hello in hellos.values())
    return {
        rank: Layout(
            nproc=hello.nproc,
            world_size=world_size,
            base_rank=firsts[rank],
            node_rank=rank,
            nodes=len(hellos),
            master_addr=addr,
        )
        for rank, hello in hellos.items()
    }


def _stated(hellos: Mapping[int, Hello]) -> tuple[int | None, int | None]:
    nodes = next((hello.nodes for hello in hellos.values() if hello.nodes is not None), None)
    return nodes, next((hello.world_size for hello in hellos.values() if hello.world_size is not None), None)


def _first_ranks(hellos: Mapping[int, Hello]) -> dict[int, int]:
    """The lowest rank of each node: as it was given, or after those of the node before it."""
    firsts, following = {}, 0
    for rank, hello in sorted(hellos.items()):
        firsts[rank] = following if hello.base_rank is None else hello.base_rank
        following = firsts[rank] + hello.nproc
    return firsts


def _misfit(hellos: Mapping[int, Hello]) -> str | None:
    if sorted(hellos) != list(range(len(hellos))):
        return f"node ranks must be 0 to {len(hellos) - 1}, got {_list(map(str, sorted(hellos)))}; correct --node-rank"
    ranks = sum(hello.nproc for hello in hellos.values())
    _, world_size = _stated(hellos)
    if world_size is not None and ranks != world_size:
        each = _list(f"{hello.nproc} on {hello.who}" for _, hello in sorted(hellos.items()))
        return f"the nodes run {ranks} ranks ({each}), not --world-size {world_size}; correct -n or --world-size"
    following = 0
    for rank, first in sorted(_first_ranks(hellos).items(), key=lambda item: item[1]):
        if first != following:
            what = f"{hellos[rank].who} begins at --base-rank {first}, but the ranks of the other nodes make it {following}"
            return f"{what}; correct it, or leave it out on all nodes"
        following += hellos[rank].nproc
    return None


def _different_facts(hellos: Mapping[int, Hello]) -> str | None:
    """The facts that are not the same everywhere. The odd nodes are those that most others, or node 0, contradict."""
    first = hellos[min(hellos)]
    for name in dict.fromkeys(name for hello in hellos.values() for name in hello.facts):
        values = {rank: hello.facts.get(name, "nothing") for rank, hello in sorted(hellos.items())}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], value == values[first.node_rank]))
        odd = _list(f"{hellos[rank].who} has {_short(value)}" for rank, value in values.items() if value != usual)
        having = [hellos[rank].who for rank, value in values.items() if value == usual]
        others = f"{having[0]} has" if len(having) == 1 else f"the other {len(having)} have"
        return f"nodes differ in {name}: {odd}, {others} {_short(usual)}; make them the same"
    return None


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[:_MAX_VALUE] + "..."


def _list(items: Iterable[str]) -> str:
    shown = list(items)
    return ", ".join(shown[:_MAX_NAMED]) + (f" and {len(shown) - _MAX_NAMED} more" if len(shown) > _MAX_NAMED else "")
