"""Keep steps in shared memory, where the newest step of a run outlives its ranks, and copy them between nodes.

The launcher makes and removes the memory of a launch. Steps have the layout, the digests and the commit of steps on disk. So a
kill during a copy leaves the step before, and a damaged copy is refused by its digest.

Of several nodes, each holds the files of its own ranks, and a copy of those of the node before. A step is complete if each of
its files is on some node, so the loss of a node loses no step. The leader of a node, its local rank 0, moves files over a gloo
group of the leaders. A load first brings the small files of a step to all nodes, and then the data that the ranks of a node
need.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from dtrain import launch_protocol, storage
from dtrain.arguments import format_bytes
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import read_manifest
from dtrain.checkpoint.data_file import as_bytes
from dtrain.checkpoint.reader import read_run_index
from dtrain.checkpoint.retention import remove_leftovers, remove_or_warn
from dtrain.dist.collectives import all_gather_json, broadcast_json, raise_on_all_ranks
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import LeaderGroup, leader_group
from dtrain.errors import CheckpointError, ConfigError
from dtrain.machine import read_memory
from dtrain.storage import AnyPath

_CHUNK_BYTES = 8 * 2**20
_PARTIAL = ".partial"
# A copy to the next node must not slow down the gradients of the next steps.
_COPY_BYTES_PER_S = 2**30


def find_memory_root(root: AnyPath) -> Path | None:
    """Return the folder in memory that belongs to a root; None if no launcher keeps memory for this process.

    A process may have the variable of a launch that has ended, whose folder must not be made again, or of another user.
    """
    folder = os.environ.get(launch_protocol.MEMORY_FOLDER)
    try:
        if folder is None or os.stat(folder).st_uid != os.getuid():
            return None
    except OSError:
        return None
    return Path(folder, hashlib.sha256(str(root).encode()).hexdigest()[:16])


def memory_root(root: AnyPath, caller: str) -> Path:
    """Return the folder in memory that belongs to a root.

    Raises:
        ConfigError: no launcher keeps memory for this process.
    """
    found = find_memory_root(root)
    if found is None:
        raise ConfigError(
            f"{caller}: mode must be 'sync' or 'async' here, got 'memory': nothing keeps the memory of a rank that dies. Start "
            "the job with `dtrain launch`, which needs /dev/shm."
        )
    return found


def check_free_memory(root: AnyPath, needed_bytes: int) -> None:
    """Raise unless shared memory has room for a step, and for a second one until the first one is removed.

    Args:
        root: folder of steps in memory, which need not exist.
        needed_bytes: size of a step.

    Raises:
        CheckpointError: too little memory, with both figures.
        OSError: a failed query.
    """
    # The first step needs room for the next one, too.
    names = storage.list_names(root) if storage.exists(root) else []
    copies = 1 if any(layout.step_of(name) is not None for name in names) else 2
    free = free_memory(root)
    if free < copies * needed_bytes:
        raise CheckpointError(
            f"save_sharded: free shared memory must be at least {format_bytes(copies * needed_bytes)} with mode='memory', got "
            f"{format_bytes(free)}. Enlarge /dev/shm (containers: --shm-size), or save with mode='async'."
        )


def free_memory(root: AnyPath) -> int:
    """Return the bytes that can be written below a folder in shared memory."""
    available = read_memory(Path("/")).available_bytes
    in_folder = storage.free_bytes(root)
    return available if in_folder is None else min(in_folder, available)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Files of a step that one node holds.

    Args:
        step: the step.
        serial: number of the commit in its root.
        run_id: run of the step.
        digest: digest of the manifest.
        sizes: sizes in bytes of all files of the step, by name.
        files: names of the files on this node that have their size.
    """

    step: int
    serial: int
    run_id: str
    digest: str
    sizes: dict[str, int]
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadStep:
    """Complete step in the memory of several nodes.

    Args:
        step: the step.
        run_id: run of the step.
        sizes: sizes in bytes of all files of the step, by name.
        files: names of the files on each node.
    """

    step: int
    run_id: str
    sizes: Mapping[str, int]
    files: Sequence[Collection[str]]

    @property
    def json_names(self) -> list[str]:
        """Names of the small files, which every rank may read."""
        return [name for name in self.sizes if name.endswith(".json")]


class FileCopy(NamedTuple):
    """Copy of a file from one node to another one."""

    source: int
    target: int
    name: str
    size: int


def list_holdings(root: AnyPath) -> list[Holding]:
    """List what this node holds of the steps below a root in memory. Steps without a valid manifest do not count."""
    holdings = []
    for name in storage.list_names(root) if storage.exists(root) else []:
        if layout.step_of(name) is None:
            continue
        try:
            manifest = read_manifest(root / name)
            index = read_run_index(root / name, manifest)
            present = storage.list_sizes(root / name)
        except (CheckpointError, OSError):
            continue
        data = layout.encode_manifest(manifest)
        sizes = {layout.MANIFEST: len(data), layout.INDEX: manifest.index_bytes, **index.sizes}
        holdings.append(
            Holding(
                step=manifest.step,
                serial=manifest.serial,
                run_id=manifest.run_id,
                digest=hashlib.sha256(data).hexdigest(),
                sizes=sizes,
                files=[name for name, size in sizes.items() if present.get(name) == size],
            )
        )
    return holdings


def choose_spread_step(holdings: Sequence[Sequence[Holding]]) -> SpreadStep | None:
    """Return the newest step of which each file is on some node; None without one. Pure.

    Args:
        holdings: what each node holds.
    """
    steps: dict[tuple[int, int, str], list[set[str]]] = {}
    of_key: dict[tuple[int, int, str], Holding] = {}
    for node, of_node in enumerate(holdings):
        for holding in of_node:
            key = holding.serial, holding.step, holding.digest
            of_key[key] = holding
            steps.setdefault(key, [set() for _ in holdings])[node] |= set(holding.files)
    for key in sorted(steps, reverse=True):
        holding = of_key[key]
        if set(holding.sizes) <= set().union(*steps[key]):
            return SpreadStep(step=holding.step, run_id=holding.run_id, sizes=holding.sizes, files=steps[key])
    return None


def plan_transfers(step: SpreadStep, wanted: Sequence[Collection[str]]) -> list[FileCopy]:
    """Plan the copies of files that nodes want and do not hold, each from the first node that holds it. Pure.

    Args:
        step: the step and its holders.
        wanted: names that each node wants.
    """
    transfers = []
    for target, names in enumerate(wanted):
        for name in sorted(set(names) - set(step.files[target])):
            source = next(node for node, files in enumerate(step.files) if name in files)
            transfers.append(FileCopy(source, target, name, step.sizes[name]))
    return sorted(transfers)


def find_spread_step(root: AnyPath) -> SpreadStep | None:
    """Return the newest complete step in the memory of all nodes that belongs to a root on disk; None on one node.

    Collective: one exchange of JSON on the control group, on several nodes of ``dtrain launch``.
    """
    folder = find_memory_root(root)
    leaders = None if folder is None else leader_group()
    if folder is None or leaders is None:
        return None
    own: Any = [asdict(holding) for holding in list_holdings(folder)] if leaders.is_leader else None
    gathered = cast(list[Any], all_gather_json(own, caller="load_sharded"))
    return choose_spread_step([[Holding(**holding) for holding in of_rank] for of_rank in gathered if of_rank is not None])


def bring_files(root: AnyPath, step: SpreadStep, names: Iterable[str]) -> str:
    """Bring files of a step to the nodes whose ranks name them, and return "", or why the memory does not suffice.

    Args:
        root: root on disk.
        step: step in memory.
        names: names that this rank needs.

    Mutates: files in the memory of this node.
    Collective: exchanges of JSON on the control group, and copies between the leaders of nodes; every rank must call it.
    """
    leaders = leader_group()
    assert leaders is not None, "a spread step is in the memory of several nodes"
    gathered = cast(list[list[str]], all_gather_json([*sorted(names)], caller="load_sharded"))
    wanted = [set().union(*(gathered[rank] for rank in leaders.ranks_of(node))) for node in range(len(leaders.ranks))]
    transfers = plan_transfers(step, wanted)
    needed = sum(transfer.size for transfer in transfers if transfer.target == leaders.node)
    folder = find_memory_root(root)
    assert folder is not None, "the launchers of all nodes keep memory, or none"
    free = free_memory(folder)
    problem = f"needs {format_bytes(needed)} of shared memory, and {format_bytes(free)} are free" if needed > free else ""
    problems = cast(list[str], all_gather_json(problem, caller="load_sharded"))
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        return f"node {leaders.node_of(rank)} {problems[rank]}"
    with raise_on_all_ranks("load_sharded"):
        run_transfers(transfers, folder / layout.step_name(step.step), leaders)
    return ""


def prepare_node(root: AnyPath, staging: AnyPath, total_bytes: int) -> None:
    """Make the staging folder of a node that does not have rank 0. Call this function on its leader.

    Raises:
        CheckpointError: too little memory for the files of two nodes, twice.
        OSError: a failed file operation.
    """
    check_free_memory(root, total_bytes)
    storage.make_folders(root)
    remove_leftovers(root)
    storage.make_folder(staging)


def commit_on_nodes(staging: AnyPath, final: AnyPath) -> None:
    """Give each other node the index and the manifest of a step that rank 0 has committed, and its name.

    Mutates: files in the memory of this node.
    Collective: two exchanges of JSON on the background group.
    """
    leaders = leader_group()
    assert leaders is not None, "several nodes have leaders"
    info, names = get_dist_info(), (layout.INDEX, layout.MANIFEST)
    own: Any = None
    if info.rank == 0:
        own = [storage.read_file(final / name, limit=layout.MAX_JSON_BYTES).decode() for name in names]
    texts = cast(list[str], broadcast_json(own, group="background", caller="save_sharded"))
    with raise_on_all_ranks("save_sharded", group="background"):
        if leaders.is_leader and info.rank != 0:
            for name, text in zip(names, texts, strict=True):
                storage.write_file(staging / name, text.encode())
            remove_or_warn(final, "save_sharded")
            storage.rename(staging, final)


def copy_to_next_node(root: AnyPath, step: int) -> None:
    """Copy the files of this node's ranks to the next node, and then remove older steps. Runs while training continues.

    Mutates: files in the memory of the next node and of this node.
    Collective: one exchange of JSON on the background group, and copies between the leaders of nodes.
    """
    leaders = leader_group()
    assert leaders is not None, "several nodes have leaders"
    folder = root / layout.step_name(step)
    with raise_on_all_ranks("save_sharded", group="background"):
        if leaders.is_leader:
            node_of = [leaders.node_of(rank) for rank in range(leaders.world_size)]
            transfers = plan_ring_copies(read_run_index(folder, read_manifest(folder)).sizes, node_of)
            run_transfers(transfers, folder, leaders, bytes_per_s=_COPY_BYTES_PER_S)
    if leaders.is_leader:
        for name in storage.list_names(root):
            if layout.step_of(name) not in (None, step):
                remove_or_warn(root / name, "save_sharded")


def plan_ring_copies(sizes: Mapping[str, int], node_of: Sequence[int]) -> list[FileCopy]:
    """Plan the copies of the files of each node's ranks on the next node. Pure.

    Neighbours in the ring send in turns, so that all pairs are busy at once.

    Args:
        sizes: sizes in bytes of the ranks' files, by name.
        node_of: node of each rank.
    """
    count = node_of[-1] + 1
    transfers = []
    for name, size in sizes.items():
        node = node_of[int(name[5:10])]
        transfers.append(FileCopy(node, (node + 1) % count, name, size))
    return sorted(transfers, key=lambda copy: (2 if copy.target == 0 and count % 2 else copy.source % 2, copy))


def run_transfers(
    transfers: Iterable[FileCopy], folder: AnyPath, leaders: LeaderGroup, *, bytes_per_s: float | None = None
) -> None:
    """Send and receive files of a step, in an order that is equal on all nodes. Ranks that are no leaders do nothing.

    A failure of a file is raised at the end, because the other node waits for the bytes.

    Raises:
        OSError: the first failure of a file.
    """
    if not leaders.is_leader:
        return
    failures: list[OSError] = []
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu")
    for transfer in transfers:
        if leaders.node == transfer.source:
            _send(transfer, folder, buffer, leaders, failures)
        elif leaders.node == transfer.target:
            _receive(transfer, folder, buffer, leaders, failures, bytes_per_s)
    if failures:
        raise failures[0]


def _send(transfer: FileCopy, folder: AnyPath, buffer: torch.Tensor, leaders: LeaderGroup, failures: list[OSError]) -> None:
    memory, file = as_bytes(buffer), None
    try:
        file = storage.FileReader(folder / transfer.name, size=transfer.size)
    except OSError as error:
        failures.append(error)
    for begin in range(0, transfer.size, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, transfer.size - begin)
        try:
            if file is not None:
                file.read_into(begin, memory[:count])
        except OSError as error:
            failures.append(error)
        dist.send(buffer[:count], leaders.ranks[transfer.target], group=leaders.group)
    if file is not None:
        file.close()


def _receive(
    transfer: FileCopy,
    folder: AnyPath,
    buffer: torch.Tensor,
    leaders: LeaderGroup,
    failures: list[OSError],
    bytes_per_s: float | None,
) -> None:
    assert isinstance(folder, Path), "memory is a folder of this machine"
    memory, file = as_bytes(buffer), None
    partial = folder / (transfer.name + _PARTIAL)
    try:
        storage.make_folders(folder)
        # A killed load may have left a part.
        if storage.exists(partial):
            storage.remove_file(partial)
        file = storage.FileWriter(partial)
    except OSError as error:
        failures.append(error)
    for begin in range(0, transfer.size, _CHUNK_BYTES):
        started_at, count = time.monotonic(), min(_CHUNK_BYTES, transfer.size - begin)
        dist.recv(buffer[:count], leaders.ranks[transfer.source], group=leaders.group)
        try:
            if file is not None and not failures:
                file.write(memory[:count])
        except OSError as error:
            failures.append(error)
        if bytes_per_s is not None:
            time.sleep(max(0.0, started_at + count / bytes_per_s - time.monotonic()))
    if file is not None:
        file.close()
        if not failures:
            storage.rename(partial, folder / transfer.name)
