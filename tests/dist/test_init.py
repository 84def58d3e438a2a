"""Process groups: who is here, who is missing, and opening and closing in one process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from dtrain.dist.init import DistInfo, current, init_dist
from dtrain.dist.mesh import _fill, build_mesh
from dtrain.errors import ConfigError, DistError


@pytest.fixture
def alone(monkeypatch):
    """An environment without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTRAIN_LOOPBACK"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_environment(alone):
    with init_dist() as info:
        assert (info.rank, info.world_size, info.local_rank, info.device.type) == (0, 1, 0, "cpu")
        assert dist.is_initialized()
        assert current() is info
    assert not dist.is_initialized()
    assert current().control is None


def test_init_again_returns_the_open_one_which_the_first_closes(alone):
    with init_dist() as first:
        with init_dist() as second:
            assert second.control is first.control
        assert dist.is_initialized(), "the inner context did not make the groups, so it does not close them"
    assert not dist.is_initialized()


def test_init_after_closing_opens_new_groups(alone):
    for _ in range(3):
        with init_dist() as info:
            assert dist.get_world_size(info.control) == 1
            dist.barrier()
        assert not dist.is_initialized()


def test_a_group_of_the_users_own_is_adopted_and_left_open(alone):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with init_dist() as info:
            dist.barrier(group=info.control)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def adopt_without_environment() -> list[int]:
    import dtrain.dist.init as init

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    saved = {name: os.environ.pop(name) for name in names}
    before, init._PROCESS.info = init._PROCESS.info, None  # as if the user had opened the default group
    try:
        with init_dist(device="cpu") as info:
            return [info.rank, info.world_size]
    finally:
        os.environ.update(saved)
        init._PROCESS.info = before


def test_an_adopted_group_says_which_rank_this_is(ranks):
    assert ranks(2).run(adopt_without_environment) == [[0, 2], [1, 2]]


def test_an_environment_that_contradicts_the_open_group_is_refused(alone, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="WORLD_SIZE=2, but the open process group says 1"):
            init_dist()
    finally:
        dist.destroy_process_group()


def test_exception_inside_closes_the_groups(alone):
    with pytest.raises(KeyError), init_dist():
        raise KeyError("x")
    assert not dist.is_initialized()


def test_info_is_frozen():
    with pytest.raises(AttributeError):
        DistInfo().rank = 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set but its partner is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set but its partner is"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "needs 0 <= RANK < WORLD_SIZE, got RANK=2 WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "2 ranks need MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_contradictory_environment_is_refused(alone, monkeypatch, env, message):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        init_dist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"init_timeout_s": -1}, "init_timeout_s must be a positive number"),
    ],
)
def test_bad_options_are_refused(alone, options, message):
    with pytest.raises(ConfigError, match=message):
        init_dist(**options)


def test_asking_for_gpus_that_are_not_there_is_refused(alone, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda' needs a GPU per rank, but this node has 0 for 1 ranks"):
        init_dist(device="cuda")


def test_more_ranks_than_gpus_run_on_the_cpu_with_one_notice(alone, monkeypatch):
    from dtrain.dist.init import _choose_device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.warns(UserWarning, match="2 ranks but 1 GPUs on this node: running on the CPU"):
        assert _choose_device(None, {"local_rank": 0, "local_world_size": 2}).type == "cpu"
    assert _choose_device(None, {"local_rank": 1, "local_world_size": 2}).type == "cpu"  # without a second notice


def run_script(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def error_of_init(rank: int, world_size: int, port: str) -> str:
    """What init_dist raises in a process that is alone, though it was told of others."""
    body = """
        import dtrain as dt
        try:
            dt.init_dist(init_timeout_s=2)
        except dt.DistError as error:
            print(error)
    """
    out = run_script(body, RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_missing_ranks_are_named():
    assert "init_dist: 2 of 3 ranks did not arrive within 2 s: missing [1, 2]" in error_of_init(0, 3, free_port())


def test_unreachable_rank_0_is_named():
    port = free_port()
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 2 s" in error_of_init(1, 2, port)


def listening_beyond_loopback() -> list[str]:
    """This process's listening TCP sockets that are not on a loopback address, from the kernel's own table."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            loopback = fields[1].startswith("0100007F") or fields[1].startswith("00000000000000000000000001000000")
            if fields[9] in inodes and fields[3] == "0A" and not loopback:
                found.append(fields[1])
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_listens_beyond_loopback(ranks):
    assert ranks(2).run(listening_beyond_loopback) == [[], []]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_loopback_check_can_fail():
    import socket

    with socket.socket() as open_to_all:
        open_to_all.bind(("0.0.0.0", 0))
        open_to_all.listen()
        assert len(listening_beyond_loopback()) == 1


def close_and_open_again() -> list[int]:
    import dtrain.dist.init as init

    counts = []
    for _ in range(2):
        first = init._PROCESS.info
        init._close(first, failed=False)
        with init.init_dist(device="cpu") as info:
            dist.barrier(group=info.control)
            counts.append(info.world_size)
    init.init_dist(device="cpu")  # the pool's own context closes this one
    return counts


def test_ranks_can_close_and_open_again():
    from dtrain.testing import run_ranks

    assert run_ranks(close_and_open_again, 2) == [[2, 2], [2, 2]]


def test_mesh_degrees_are_filled():
    assert _fill({"dp_replicate": 2, "dp_shard": -1}, 8) == {"dp_replicate": 2, "dp_shard": 4}
    assert _fill({"dp_replicate": 2, "dp_shard": 4}, 8) == {"dp_replicate": 2, "dp_shard": 4}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((3, -1), "world_size=8 is not a multiple of 3"),
        ((2, 2), r"dp_replicate=2 \* dp_shard=2 = 4, world_size=8; set one to -1"),
        ((-1, -1), "at most one of them -1"),
        ((0, 8), "must be at least 1"),
    ],
)
def test_mesh_degrees_that_cannot_be_right_are_refused(degrees, message):
    with pytest.raises(ConfigError, match=message):
        _fill({"dp_replicate": degrees[0], "dp_shard": degrees[1]}, 8)


def test_mesh_before_init_is_refused():
    with pytest.raises(DistError, match=r"call dt.init_dist\(\) first"):
        build_mesh()


def ranks_of_mesh() -> list[int]:
    from dtrain.dist.mesh import data_rank

    return list(data_rank(build_mesh(dp_replicate=2)))


def test_data_ranks_run_through_the_whole_mesh(ranks):
    assert ranks(4).run(ranks_of_mesh) == [[0, 4], [1, 4], [2, 4], [3, 4]]
