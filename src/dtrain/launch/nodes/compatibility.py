"""What has to be the same on all nodes of a job: versions, the script, and the data that the user names.

Whether the nodes that met fit together, and who is missing. Pure: from what each of them said of itself."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import NodeLayout, Target
from dtrain.launch.nodes.messages import Hello
from dtrain.versions import package_versions

_DIGEST_CHARS = 16  # of a digest: told apart by people


def collect_node_facts(target: Target, paths: Iterable[str]) -> dict[str, str]:
    """The facts of this node, by what they are called.

    Args:
        target: its source is compared by a digest.
        paths: files and folders; compared by size, a folder by how many entries it has.

    A path that is not there is a fact, too: the meeting names the node on which it is missing, on all of them.
    """
    facts = dict(package_versions())
    source = None if target.kind == "command" else find_source(target)
    if source is not None:
        facts[f"the content of {target.name}"] = hashlib.sha256(source.read_bytes()).hexdigest()[:_DIGEST_CHARS]
    return facts | {path: _describe_size(path) for path in paths}


def _describe_size(path: str) -> str:
    try:
        if os.path.isdir(path):
            return f"a folder of {len(os.listdir(path))} entries"
        return f"{Path(path).stat().st_size} bytes"
    except OSError as error:
        return f"{error.strerror}"


_MAX_NAMED = 8  # in a list
_MAX_COUNT = 10**6  # of nodes, or ranks
_MAX_VALUE = 80  # characters of a fact


def all_joined(hellos: Mapping[int, Hello]) -> bool:
    """Whether nobody is missing: by the number of nodes where it is known, else by the number of ranks."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is not None:
        return len(hellos) >= nodes
    return world_size is not None and sum(hello.nproc for hello in hellos.values()) >= world_size


def describe_missing(hellos: Mapping[int, Hello], hosts: Sequence[str]) -> str:
    """The nodes that are not there, of those that are known by number."""
    nodes, _ = _stated_sizes(hellos)
    absent = [rank for rank in range(nodes or 0) if rank not in hellos]
    return _join_limited(f"node {rank} ({hosts[rank]})" if rank < len(hosts) else f"node {rank}" for rank in absent)


def describe_progress(hellos: Mapping[int, Hello], hosts: Sequence[str], seconds: float) -> str:
    """How far the meeting has come: ``3 of 4 nodes joined in 60 s; missing: node 2``."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is None:
        here = sum(hello.nproc for hello in hellos.values())
        who = _join_limited(f"node {rank}" for rank in sorted(hellos))
        return f"{here} of {world_size} ranks joined in {seconds:.0f} s, with {who}"
    return f"{len(hellos)} of {nodes} nodes joined in {seconds:.0f} s; missing: {describe_missing(hellos, hosts)}"


def is_plausible(hello: Hello) -> bool:
    """Whether its numbers can be those of a job: what is computed from them stays small."""
    counts = (hello.nodes or 1, hello.nproc, hello.world_size or 1)
    ranks = (hello.node_rank, hello.base_rank or 0)
    return all(1 <= count <= _MAX_COUNT for count in counts) and all(0 <= rank < _MAX_COUNT for rank in ranks)


def find_rank_conflict(hellos: Mapping[int, Hello], new: Hello) -> str | None:
    """Why ``new`` cannot belong to the nodes that are there, as soon as it comes; None when it may."""
    for value, option in (("nodes", "--nnodes"), ("world_size", "--world-size")):
        for hello in hellos.values():
            theirs, mine = getattr(hello, value), getattr(new, value)
            if None not in (theirs, mine) and theirs != mine:
                return f"{new.display_name} was started for {option} {mine}, {hello.display_name} for {theirs}; say the same on every node"
    nodes, _ = _stated_sizes({**hellos, new.node_rank: new})
    beyond = next((hello for hello in (*hellos.values(), new) if nodes is not None and hello.node_rank >= nodes), None)
    if beyond is not None:
        return f"{beyond.display_name} came to a job of {nodes} nodes, numbered from 0; correct --node-rank or --nnodes there"
    return None


def find_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """Why the nodes, all of them there, cannot run one job; None when they can."""
    return _find_fact_mismatch(hellos) or _find_rank_mismatch(hellos)


def assign_layouts(hellos: Mapping[int, Hello], addr: str) -> dict[int, NodeLayout]:
    """Which ranks each node runs. The nodes must agree."""
    firsts = _first_ranks(hellos)
    world_size = sum(hello.nproc for hello in hellos.values())
    return {
        rank: NodeLayout(
            nproc=hello.nproc,
            world_size=world_size,
            base_rank=firsts[rank],
            node_rank=rank,
            nodes=len(hellos),
            master_addr=addr,
        )
        for rank, hello in hellos.items()
    }


def _stated_sizes(hellos: Mapping[int, Hello]) -> tuple[int | None, int | None]:
    nodes = next((hello.nodes for hello in hellos.values() if hello.nodes is not None), None)
    return nodes, next((hello.world_size for hello in hellos.values() if hello.world_size is not None), None)


def _first_ranks(hellos: Mapping[int, Hello]) -> dict[int, int]:
    """The lowest rank of each node: as it was given, or after those of the node before it."""
    firsts, following = {}, 0
    for rank, hello in sorted(hellos.items()):
        firsts[rank] = following if hello.base_rank is None else hello.base_rank
        following = firsts[rank] + hello.nproc
    return firsts


def _find_rank_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    if sorted(hellos) != list(range(len(hellos))):
        return f"node ranks must be 0 to {len(hellos) - 1}, got {_join_limited(map(str, sorted(hellos)))}; correct --node-rank"
    ranks = sum(hello.nproc for hello in hellos.values())
    _, world_size = _stated_sizes(hellos)
    if world_size is not None and ranks != world_size:
        each = _join_limited(f"{hello.nproc} on {hello.display_name}" for _, hello in sorted(hellos.items()))
        return f"the nodes run {ranks} ranks ({each}), not --world-size {world_size}; correct -n or --world-size"
    following = 0
    for rank, first in sorted(_first_ranks(hellos).items(), key=lambda item: item[1]):
        if first != following:
            what = f"{hellos[rank].display_name} begins at --base-rank {first}, but the ranks of the other nodes make it {following}"
            return f"{what}; correct it, or leave it out on all nodes"
        following += hellos[rank].nproc
    return None


def _find_fact_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """The facts that are not the same everywhere. The odd nodes are those that most others, or node 0, contradict."""
    first = hellos[min(hellos)]
    for name in dict.fromkeys(name for hello in hellos.values() for name in hello.facts):
        values = {rank: hello.facts.get(name, "nothing") for rank, hello in sorted(hellos.items())}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual = max(counts, key=lambda value: (counts[value], value == values[first.node_rank]))
        odd = _join_limited(
            f"{hellos[rank].display_name} has {_truncate_value(value)}" for rank, value in values.items() if value != usual
        )
        having = [hellos[rank].display_name for rank, value in values.items() if value == usual]
        others = f"{having[0]} has" if len(having) == 1 else f"the other {len(having)} have"
        return f"nodes differ in {name}: {odd}, {others} {_truncate_value(usual)}; make them the same"
    return None


def _truncate_value(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[:_MAX_VALUE] + "..."


def _join_limited(items: Iterable[str]) -> str:
    shown = list(items)
    return ", ".join(shown[:_MAX_NAMED]) + (f" and {len(shown) - _MAX_NAMED} more" if len(shown) > _MAX_NAMED else "")
