"""Ranks share the cores of a node."""

from __future__ import annotations

import os

import pytest

from dtrain.launch import host_resources
from dtrain.launch.host_resources import Core


def machine(nodes=1, cores=4, threads=1):
    """``cores`` physical ones on each node, numbered as the kernel does: the second threads of all come after the first."""
    total = nodes * cores
    return [
        Core(node=core // cores, physical=core, number=core + thread * total)
        for thread in range(threads)
        for core in range(total)
    ]


def alone(*numbers):
    return [Core(physical=number, number=number) for number in numbers]


@pytest.mark.parametrize(
    ("usable", "nproc", "expected"),
    [
        (alone(0, 1, 2, 3), 2, [[0, 1], [2, 3]]),
        (alone(0, 1, 2, 3, 4), 2, [[0, 1], [2, 3, 4]]),
        (alone(4, 7), 2, [[4], [7]]),
        (alone(4, 7), 5, [[4], [7], [4], [7], [4]]),
        (alone(3), 1, [[3]]),
        (machine(nodes=2), 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (machine(nodes=2), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (machine(nodes=2), 3, [[0, 1], [2, 3], [4, 5, 6, 7]]),
        (machine(nodes=2), 5, [[0], [1], [2, 3], [4, 5], [6, 7]]),
        (machine(nodes=3, cores=2), 2, [[0, 1], [2, 3, 4, 5]]),
        (machine(nodes=2, cores=2), 6, [[0], [1], [2], [3], [0], [1]]),
        (machine(cores=8, threads=2), 2, [[0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]),
        (machine(cores=3, threads=2), 2, [[0, 3], [1, 4, 2, 5]]),
        (machine(cores=2, threads=2), 3, [[0], [2], [1, 3]]),
        (machine(nodes=2, cores=2, threads=2), 3, [[0, 4], [1, 5], [2, 6, 3, 7]]),
        (machine(nodes=2, cores=3, threads=2)[:7], 3, [[0, 6], [1, 2], [3, 4, 5]]),
        ([*machine(cores=7), Core(node=1, physical=7, number=7)], 2, [[0, 1, 2], [3, 4, 5, 6]]),
    ],
    ids=[
        "even",
        "uneven",
        "one each",
        "fewer cores than ranks",
        "one",
        "two nodes, one rank",
        "two nodes",
        "two nodes, uneven",
        "two nodes, five ranks",
        "more nodes than ranks",
        "nodes with fewer cores than ranks",
        "threads",
        "threads, uneven",
        "threads, more ranks than physical cores",
        "threads and nodes",
        "some threads are not usable",
        "node with one usable core",
    ],
)
def test_ranks_get_adjacent_cores(usable, nproc, expected):
    assert host_resources.assign_cores(usable, nproc) == expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_ranks_do_not_share_numa_nodes_or_cores_needlessly(nodes, threads):
    usable = machine(nodes=nodes, cores=6, threads=threads)
    of = {core.number: core for core in usable}
    for nproc in range(1, len(usable) + 1):
        shares = host_resources.assign_cores(usable, nproc)
        assert len(shares) == nproc
        assert sorted(number for share in shares for number in share) == sorted(of)
        if nproc >= nodes:
            assert all(len({of[number].node for number in share}) == 1 for share in shares)
        if nproc <= 6 * nodes:
            assert sum(len({of[number].physical for number in share}) for share in shares) == 6 * nodes
        assert min(map(len, shares)) >= threads * (6 * nodes // nproc) / 2


def test_core_topology_matches_sysfs(tmp_path, monkeypatch):
    for node, cpus in {"node0": "0-1,4-5", "node1": "2-3,6", "node2": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    for number, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3", 6: "\n"}.items():
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = host_resources.usable_cores(cpus=tmp_path, nodes=tmp_path)
    assert [(core.node, core.physical, core.number) for core in found] == [
        *((0, 0, 0), (0, 0, 4), (0, 1, 1), (0, 1, 5), (0, 7, 7)),  # nothing is told of the last one
        *((1, 2, 2), (1, 2, 3), (1, 6, 6)),
    ]


def test_core_count_respects_cgroup_quota(monkeypatch):
    monkeypatch.setattr(host_resources, "core_quota", lambda: 0.5)
    assert host_resources.core_count() == 0.5
    monkeypatch.setattr(host_resources, "core_quota", lambda: None)
    assert host_resources.core_count() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("preload", [["--preload", "json"], ["--no-preload"]], ids=["preloaded", "plain"])
def test_bound_ranks_run_on_assigned_cores(run, preload):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", options=["--bind", *preload])
    assert result.code == 0, result.err
    shares = host_resources.assign_cores(host_resources.usable_cores(), 2)
    assert sorted(result.out.splitlines()) == [f"[rank {rank}] {sorted(share)}" for rank, share in enumerate(shares)]


def test_unbound_ranks_can_run_on_any_core(run):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", n=1)
    assert result.out == f"{sorted(os.sched_getaffinity(0))}\n"
