"""Limits and counts of control groups, read from files like those of other machines."""

from __future__ import annotations

import pytest

from dtrain.cli import machine
from dtrain.launch import host_resources


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
