"""Facts of the machine are read from files that look like those of other machines, and from programs that misbehave."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading

import pytest

from dtrain import machine
from dtrain.errors import ConfigError
from dtrain.machine import CommandOutput, Core, max_ranks, raise_open_file_limit, read_output, start_query


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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
    assert machine.assign_cores(usable, nproc) == expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_ranks_do_not_share_numa_nodes_or_cores_needlessly(nodes, threads):
    usable = cores_of(nodes=nodes, cores=6, threads=threads)
    of = {core.number: core for core in usable}
    for nproc in range(1, len(usable) + 1):
        shares = machine.assign_cores(usable, nproc)
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
    cores = machine.usable_cores(cpus=tmp_path, nodes=tmp_path)
    assert [(core.node, core.physical, core.number) for core in cores] == [
        *((0, 0, 0), (0, 0, 4), (0, 1, 1), (0, 1, 5), (0, 7, 7)),  # nothing is told of the last one
        *((1, 2, 2), (1, 2, 3), (1, 6, 6)),
    ]


def test_core_count_respects_cgroup_quota(monkeypatch):
    monkeypatch.setattr(machine, "core_quota", lambda: 0.5)
    assert machine.core_count() == 0.5
    monkeypatch.setattr(machine, "core_quota", lambda: None)
    assert machine.core_count() == len(os.sched_getaffinity(0))


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
    assert (machine.core_quota(root), machine.memory_limit(root)) == (cores, memory)


@pytest.mark.parametrize(("limit", "expected"), [("1024\n", 1024), (f"{2**50}\n", None)])
def test_memory_limit_below_total_memory_is_reported(tmp_path, limit, expected):
    files = {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n", "proc/self/cgroup": "0::/\n"}
    memory = machine.read_memory(write(tmp_path, files | {"sys/fs/cgroup/memory.max": limit}))
    assert memory == machine.HostMemory(total_bytes=2048 * 1024, available_bytes=1024 * 1024, limit_bytes=expected)


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
    assert machine.count_oom_kills(write(tmp_path, files)) == expected


def test_shm_size_is_none_without_dev_shm(tmp_path):
    assert machine.read_shm_bytes(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert machine.read_shm_bytes(tmp_path) > 0


def test_hardware_counts_gpu_device_files_and_names_os(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 2 kB\nMemAvailable: 1 kB\n",
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="Debian GNU/Linux 12"\n',
        "dev/nvidia0": "",
        "dev/nvidia11": "",
        "dev/nvidiactl": "",
    }
    hardware = machine.read_hardware(None, write(tmp_path, files))
    assert hardware.gpus == machine.Gpus(listed=(), device_files=2, problem=None)
    assert hardware.gpus.count == 2
    assert hardware.system.endswith(", Debian GNU/Linux 12")


SMI = {
    "no nvidia-smi": (None, (), None),
    "two": (
        CommandOutput(code=0, out="NVIDIA H200, 143771, 580.1\nTesla, 40, A, [N/A], 580.1\n", err=""),
        (
            machine.Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, driver="580.1"),
            machine.Gpu(name="Tesla, 40, A", memory_bytes=0, driver="580.1"),
        ),
        None,
    ),
    "fails": (CommandOutput(code=9, out="NVIDIA-SMI has failed\n", err=""), (), "exit code 9: NVIDIA-SMI has failed"),
    "hangs": (CommandOutput(code=None, out="", err=""), (), "it did not answer within 30 s"),
}


@pytest.mark.parametrize(("said", "listed", "problem"), SMI.values(), ids=SMI)
def test_nvidia_smi_output_is_parsed(said, listed, problem):
    assert machine.parse_gpus(said, 0) == machine.Gpus(listed=listed, device_files=0, problem=problem)


def test_resolve_names_gives_no_address_for_unknown_name():
    addresses = machine.resolve_names(["127.0.0.1", "no-such-host.invalid", "." * 3])
    assert addresses == {"127.0.0.1": ("127.0.0.1",), "no-such-host.invalid": (), "...": ()}


def test_resolve_names_does_not_wait_for_unresponsive_name_server(monkeypatch):
    answered, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    assert machine.resolve_names(["slow"], timeout_s=0.05) == {"slow": ()}
    (asking,) = set(threading.enumerate()) - before
    assert asking.daemon  # it does not hold up the end of the process
    answered.set()
    asking.join(60)


def test_hanging_program_is_killed():
    process = start_query([sys.executable, "-c", "import time; time.sleep(60)"])
    assert read_output(process, timeout_s=0.05) == CommandOutput(code=None, out="", err="")
    with process.stdout, process.stderr:
        assert process.wait(timeout=60) == -9


def test_invalid_utf8_output_is_replaced():
    said = read_output(start_query([sys.executable, "-c", "import os; os.write(2, b'\\xff end'); exit(3)"]), timeout_s=60)
    assert (said.code, said.out, said.last_line) == (3, "", "\ufffd end")


def test_only_harmless_variables_are_shown_with_values():
    environ = {"RANK": "1", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "PATH": "/bin", "MY_NCCL_KEY": "x", "http_proxy": "u:p@h"}
    assert machine.visible_variables(environ) == {"NCCL_DEBUG": "INFO", "RANK": "1"}
    assert machine.hidden_variable_names(environ) == ("HF_TOKEN", "http_proxy")


@pytest.fixture
def open_file_limits(monkeypatch):
    """A simulated limit, because a process cannot raise its hard limit again: ``open_file_limits[:] = [soft, hard]``."""
    values = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(values))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: values.__setitem__(slice(None), new))
    return values


@pytest.mark.parametrize(
    ("world_size", "before", "after"),
    [
        (2, (1024, 4096), (1024, 4096)),
        (512, (1024, 4096), (2120, 4096)),
        (512, (1024, 2000), (2000, 2000)),
        (4096, (1024, resource.RLIM_INFINITY), (12884, resource.RLIM_INFINITY)),
        (4096, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_soft_limit_is_raised_to_need_of_job(open_file_limits, world_size, before, after):
    open_file_limits[:] = before
    raise_open_file_limit("init_dist", world_size)
    assert tuple(open_file_limits) == after


def test_too_low_hard_limit_is_refused_with_numbers(open_file_limits):
    open_file_limits[:] = 1024, 1024
    with pytest.raises(ConfigError) as error:
        raise_open_file_limit("init_dist", 512)
    assert str(error.value) == (
        "init_dist: the hard limit of open files must be at least 1608 for 512 ranks, got 1024. "
        "Run `ulimit -n 1608` as root before the start, or use at most 317 ranks."
    )
    raise_open_file_limit("init_dist", 317)


def test_max_ranks_is_at_least_one():
    assert (max_ranks(1024), max_ranks(10)) == (317, 1)


def test_interfaces_of_this_machine_include_loopback():
    loopback = next(link for link in machine.list_interfaces() if link.name == "lo")
    assert loopback.loopback
    assert loopback.up
    assert "127.0.0.1" in loopback.addresses


def test_ipv6_addresses_by_interface(tmp_path):
    text = "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 02 40 00 80     eth0\n"
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/if_inet6").write_text(text)
    assert machine.read_ipv6_addresses(tmp_path) == {"lo": ["::1"], "eth0": ["fd00::2"]}
    assert machine.read_ipv6_addresses(tmp_path / "no ipv6") == {}
