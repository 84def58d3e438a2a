"""Check that the nodes of a job agree on ranks, versions, script and data, and assign their ranks.

All checks but ``collect_node_facts`` have no side effects: they compare the ``Hello`` messages of the nodes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtrain.launch.entrypoint import find_source
from dtrain.launch.launch_plan import NodeLayout, Target
from dtrain.launch.nodes.messages import Hello
from dtrain.packages import package_versions

# Users compare so many characters of a digest.
_DIGEST_CHARS = 16


def collect_node_facts(target: Target, paths: Iterable[str]) -> dict[str, str]:
    """Collect the facts of this node that must agree on all nodes, by name.

    Args:
        target: program whose source is compared by a digest.
        paths: files and folders, compared by size; the size of a folder is its number of entries.

    A missing path is a fact, too, so all nodes report the node on which the path is missing.
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


# items of a list in a message
_MAX_NAMED = 8
_MAX_VALUE = 80  # characters


def all_joined(hellos: Mapping[int, Hello]) -> bool:
    """Return True if all nodes have joined: by the number of nodes if known, otherwise by the number of ranks."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is not None:
        return len(hellos) >= nodes
    return world_size is not None and sum(hello.nproc for hello in hellos.values()) >= world_size


def describe_missing(hellos: Mapping[int, Hello], hosts: Sequence[str]) -> str:
    """List the known nodes that have not joined."""
    nodes, _ = _stated_sizes(hellos)
    missing = [rank for rank in range(nodes or 0) if rank not in hellos]
    return _join_limited(f"node {rank} ({hosts[rank]})" if rank < len(hosts) else f"node {rank}" for rank in missing)


def describe_progress(hellos: Mapping[int, Hello], hosts: Sequence[str], seconds: float) -> str:
    """Describe the state of the rendezvous: ``3 of 4 nodes joined in 60 s; missing: node 2``."""
    nodes, world_size = _stated_sizes(hellos)
    if nodes is None:
        joined = sum(hello.nproc for hello in hellos.values())
        members = _join_limited(f"node {rank}" for rank in sorted(hellos))
        return f"{joined} of {world_size} ranks joined in {seconds:.0f} s, with {members}"
    return f"{len(hellos)} of {nodes} nodes joined in {seconds:.0f} s; missing: {describe_missing(hellos, hosts)}"


def find_rank_conflict(hellos: Mapping[int, Hello], new: Hello) -> str | None:
    """Return the reason that ``new`` cannot belong to the job of ``hellos``; None without a conflict."""
    for value, option in (("nodes", "--nnodes"), ("world_size", "--world-size")):
        for hello in hellos.values():
            theirs, mine = getattr(hello, value), getattr(new, value)
            if None not in (theirs, mine) and theirs != mine:
                return (
                    f"{new.display_name} was started for {option} {mine}, {hello.display_name} for {theirs}. "
                    f"Pass the same {option} on every node."
                )
    nodes, _ = _stated_sizes({**hellos, new.node_rank: new})
    beyond = next((hello for hello in (*hellos.values(), new) if nodes is not None and hello.node_rank >= nodes), None)
    if beyond is not None:
        return f"{beyond.display_name} joined a job of {nodes} nodes, numbered from 0. Correct --node-rank or --nnodes there."
    return None


def find_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """Return the reason that the nodes cannot run one job, after all nodes have joined; None if they can."""
    return _find_fact_mismatch(hellos) or _find_rank_mismatch(hellos)


def assign_layouts(hellos: Mapping[int, Hello], addr: str) -> dict[int, NodeLayout]:
    """Assign ranks to each node. The nodes must agree."""
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
    """Return the first rank of each node: its own setting, or the rank after the previous node's last rank."""
    firsts, following = {}, 0
    for rank, hello in sorted(hellos.items()):
        firsts[rank] = following if hello.base_rank is None else hello.base_rank
        following = firsts[rank] + hello.nproc
    return firsts


def _find_rank_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    if sorted(hellos) != list(range(len(hellos))):
        joined = _join_limited(map(str, sorted(hellos)))
        return f"node ranks must be 0 to {len(hellos) - 1}, got {joined}. Correct --node-rank."
    ranks = sum(hello.nproc for hello in hellos.values())
    _, world_size = _stated_sizes(hellos)
    if world_size is not None and ranks != world_size:
        each = _join_limited(f"{hello.nproc} on {hello.display_name}" for _, hello in sorted(hellos.items()))
        return f"the nodes run {ranks} ranks ({each}), not --world-size {world_size}. Correct -n or --world-size."
    following = 0
    for rank, first in sorted(_first_ranks(hellos).items(), key=lambda item: item[1]):
        if first != following:
            node = f"{hellos[rank].display_name} begins at --base-rank {first}"
            return (
                f"{node}, but the ranks of the other nodes make it {following}. Correct --base-rank, or remove it on all nodes."
            )
        following += hellos[rank].nproc
    return None


def _find_fact_mismatch(hellos: Mapping[int, Hello]) -> str | None:
    """Describe the first fact that differs. A node is odd if most other nodes, or node 0 in a tie, have another value."""
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
        return f"nodes differ in {name}: {odd}, {others} {_truncate_value(usual)}. Make them the same."
    return None


def _truncate_value(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[:_MAX_VALUE] + "..."


def _join_limited(items: Iterable[str]) -> str:
    texts = list(items)
    return ", ".join(texts[:_MAX_NAMED]) + (f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else "")
