"""Ranks share the cores of a node."""

from __future__ import annotations

import os

import pytest

from dtrain.cli import machine
from dtrain.launch import host_resources
from dtrain.launch.host_resources import Core


def cores_of(nodes=1, cores=4, threads=1):
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
        (cores_of(nodes=2), 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (cores_of(nodes=2), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (cores_of(nodes=2), 3, [[0, 1], [2, 3], [4, 5, 6, 7]]),
        (cores_of(nodes=2), 5, [[0], [1], [2, 3], [4, 5], [6, 7]]),
        (cores_of(nodes=3, cores=2), 2, [[0, 1], [2, 3, 4, 5]]),
        (cores_of(nodes=2, cores=2), 6, [[0], [1], [2], [3], [0], [1]]),
        (cores_of(cores=8, threads=2), 2, [[0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]),
        (cores_of(cores=3, threads=2), 2, [[0, 3], [1, 4, 2, 5]]),
        (cores_of(cores=2, threads=2), 3, [[0], [2], [1, 3]]),
        (cores_of(nodes=2, cores=2, threads=2), 3, [[0, 4], [1, 5], [2, 6, 3, 7]]),
        (cores_of(nodes=2, cores=3, threads=2)[:7], 3, [[0, 6], [1, 2], [3, 4, 5]]),
        ([*cores_of(cores=7), Core(node=1, physical=7, number=7)], 2, [[0, 1, 2], [3, 4, 5, 6]]),
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
    usable = cores_of(nodes=nodes, cores=6, threads=threads)
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


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CGROUPS = {
    "none": ({}, None, None),
    "version 2, no limits": (
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n", "sys/fs/cgroup/a/memory.max": "max\n"},
        None,
        None,
    ),
    "version 2": (
        {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/memory.max": "4096\n"},
        1.5,
        4096,
    ),
    "version 2, a parent's limit is smaller": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/a/memory.max": "8192\n",
        },
        2.0,
        8192,
    ),
    "version 2, the host's path in a container": (
        {"proc/self/cgroup": "0::/docker/123\n", "sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.max": "77\n"},
        0.5,
        77,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1048576\n",
        },
        3.0,
        1048576,
    ),
    "version 1, no limits": (
        {
            "proc/self/cgroup": "5:memory:/\n3:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        None,
        None,
    ),
}


@pytest.mark.parametrize(("files", "cores", "memory"), CGROUPS.values(), ids=CGROUPS)
def test_cgroup_limits_are_read(tmp_path, files, cores, memory):
    root = write(tmp_path, files)
    assert (host_resources.core_quota(root), host_resources.memory_limit(root)) == (cores, memory)


@pytest.mark.parametrize(("limit", "expected"), [("1024\n", 1024), (f"{2**50}\n", None)])
def test_memory_limit_below_total_memory_is_reported(tmp_path, limit, expected):
    files = {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n", "proc/self/cgroup": "0::/\n"}
    found = machine.read_memory(write(tmp_path, files | {"sys/fs/cgroup/memory.max": limit}))
    assert found == machine.HostMemory(total_bytes=2048 * 1024, available_bytes=1024 * 1024, limit_bytes=expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "5:memory:/x\n", "sys/fs/cgroup/memory/x/memory.oom_control": "under_oom 0\n"}, None),
    ],
    ids=["none", "version 2", "version 1", "an old kernel"],
)
def test_oom_kills_are_counted(tmp_path, files, expected):
    assert host_resources.count_oom_kills(write(tmp_path, files)) == expected
