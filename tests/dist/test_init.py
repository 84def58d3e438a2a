"""init_dist: environment, rendezvous, missing ranks, closing, and meshes."""

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.dist import init, rendezvous
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, reduce_sum
from dtrain.dist.context import current_context
from dtrain.dist.init import DistInfo, get_dist_info, init_dist
from dtrain.dist.mesh import _fill_degrees, build_mesh
from dtrain.dist.rendezvous import select_device
from dtrain.errors import ConfigError, DistError

LONG_S = 300  # how long a busy test machine may take
fork = multiprocessing.get_context("fork")


@pytest.fixture
def alone(monkeypatch):
    """An environment without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTRAIN_LOOPBACK"):
        monkeypatch.delenv(name, raising=False)


class Stream(io.StringIO):
    """A stream that records its flushes."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def printed() -> list:
    info, own = init_dist(), Stream()
    with contextlib.redirect_stdout(Stream()) as out:
        info.print("step", reduce_sum(1.0), sep=" = ", end="!")
        info.print("to", "a stream", file=own)
        info.print()
    return [info.is_main, out.getvalue(), own.getvalue(), out.flushes, own.flushes]


@pytest.mark.parametrize("world_size", [1, 2])
def test_print_writes_and_flushes_on_the_main_rank_only(ranks, world_size):
    first, *others = ranks(world_size).run(printed)
    assert first == [True, f"step = {world_size}.0!\n", "to a stream\n", 2, 1]
    assert others == [[False, "", "", 0, 0]] * (world_size - 1)


def test_one_process_needs_no_environment(alone):
    with init_dist() as info:
        assert (info.rank, info.world_size, info.local_rank, info.device.type) == (0, 1, 0, "cpu")
        assert dist.is_initialized()
        assert get_dist_info() is info
    assert not dist.is_initialized()
    assert current_context().control_plane is None


@pytest.fixture
def user_group(alone):
    """A default group that the program has opened itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_user_process_group_is_adopted_and_not_closed(user_group):
    with init_dist() as info:
        assert info.backend == "gloo"
        assert all_gather_numbers([1.0]) == [[1.0]]
    assert dist.is_initialized()


def test_environment_that_contradicts_the_open_group_is_refused(user_group, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE must match the open process group .1., got 2"):
        init_dist()


def adopt_without_environment() -> list[int]:
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with init_dist(device="cpu") as info:
        return [info.rank, info.world_size]


def test_adopted_group_defines_rank_and_world_size(forked):
    assert forked.run(lambda _: adopt_without_environment(), 2, results_of=[0, 1]) == {0: [0, 2], 1: [1, 2]}


def test_collectives_without_init_dist_raise_with_advice(alone):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        for collective in (lambda: reduce_sum(1.0), lambda: all_gather_json([])):
            with pytest.raises(DistError, match=r"torch.distributed is initialized, .*\. Call dt.init_dist\(\) first"):
                collective()
    finally:
        dist.destroy_process_group()


def test_info_is_frozen():
    with pytest.raises(AttributeError):
        DistInfo().rank = 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "must be set together, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "must be set together, but RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1, got RANK=2 WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "must be whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT must be set for 2 ranks"),
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
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or None, got 'tpu'"),
        ({"backend": "mpi"}, "backend must be 'gloo', 'nccl' or None, got 'mpi'"),
        ({"backend": "nccl", "device": "cpu"}, "backend='nccl' needs GPUs, but this rank runs on the CPU"),
        ({"timeout_s": 0}, "timeout_s must be a finite number above 0, got 0"),
        ({"init_timeout_s": -1}, "init_timeout_s must be a finite number above 0, got -1"),
    ],
)
def test_bad_options_are_refused(alone, options, message):
    with pytest.raises(ConfigError, match=message):
        init_dist(**options)


def test_missing_gpus_are_refused(alone, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device='cuda' needs one GPU per rank, got 0 GPUs for 1 ranks on this node"):
        init_dist(device="cuda")


def test_more_ranks_than_gpus_run_on_the_cpu_with_one_notice(alone, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    with pytest.warns(UserWarning, match="2 ranks but 1 GPUs on this node: running on the CPU"):
        assert select_device(None, {"local_rank": 0, "local_world_size": 2}).type == "cpu"
    assert select_device(None, {"local_rank": 1, "local_world_size": 2}).type == "cpu"  # without a second notice


def run_script(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )


def error_of_init(rank: int, world_size: int, port: int, **environment: str) -> str:
    """Return the error of init_dist in a process whose environment names further ranks that do not exist."""
    body = """
        import dtrain as dt
        try:
            dt.init_dist(init_timeout_s=2)
        except dt.errors.DistError as error:
            print(error)
    """
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = run_script(body, **place, **environment)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_missing_ranks_are_named(port):
    assert "init_dist: 2 of 3 ranks did not arrive within 2 s: missing [1, 2]" in error_of_init(0, 3, port)


def test_unreachable_rank_0_is_named(port):
    assert f"rank 1 could not reach rank 0 at 127.0.0.1:{port} within 2 s" in error_of_init(1, 2, port)


def test_unreachable_launcher_store_is_named(port):
    text = error_of_init(0, 2, port, TORCHELASTIC_USE_AGENT_STORE="True")
    assert f"rank 0 could not reach the launcher at 127.0.0.1:{port} within 2 s" in text


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
    addresses = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            loopback = fields[1].startswith("0100007F") or fields[1].startswith("00000000000000000000000001000000")
            if fields[9] in inodes and fields[3] == "0A" and not loopback:
                addresses.append(fields[1])
    return addresses


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sockets_listen_only_on_loopback(ranks):
    assert ranks(2).run(listening_beyond_loopback) == [[], []]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loopback_check_detects_an_external_socket():
    import socket

    with socket.socket() as open_to_all:
        open_to_all.bind(("0.0.0.0", 0))
        open_to_all.listen()
        assert len(listening_beyond_loopback()) == 1


def open_and_close() -> list:
    """Open and close groups repeatedly, with and without an error, and return observations of one rank."""
    seen = []
    for _ in range(2):
        with init_dist(device="cpu") as info:
            dist.barrier()
            seen.append(info.world_size)
    try:
        with init_dist(device="cpu") as info:
            all_gather_numbers([1.0])
            raise KeyError("x")
    except KeyError:
        seen.append(dist.is_initialized())
    with init_dist(backend="gloo", timeout_s=50) as info:
        with init_dist(device="cpu") as again:
            seen.append([info.timeout_s, again.rank == info.rank])
        assert dist.is_initialized(), "the inner context did not make the groups, so it does not close them"
        seen.append(all_gather_numbers([info.rank]))
    assert not dist.is_initialized()
    return seen


def test_ranks_can_close_and_reopen_groups(forked):
    expected = [2, 2, False, [50, True], [[0.0], [1.0]]]
    assert forked.run(lambda _: open_and_close(), 2, results_of=[0, 1]) == {0: expected, 1: expected}


def test_single_process_can_close_and_reopen_groups(alone):
    assert open_and_close() == [1, 1, False, [50, True], [[0.0]]]


@pytest.mark.parametrize(("name", "current", "value"), [("device", "cpu", "cuda"), ("backend", "gloo", "nccl")])
def test_arguments_that_contradict_the_open_groups_are_refused(alone, name, current, value):
    message = (
        f"init_dist: {name} must be '{current}' like the open groups, got '{value}'. Close the groups first or omit {name}."
    )
    with init_dist(device="cpu"):
        with pytest.raises(ConfigError, match=message):
            init_dist(**{name: value})
        assert init_dist(device="cpu", backend="gloo").world_size == 1


def test_failed_opening_leaves_no_group_open(alone, monkeypatch):
    def no_more_groups(**_: object) -> None:
        raise RuntimeError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", no_more_groups)
        with pytest.raises(RuntimeError, match="too many open files"):
            init_dist()
    assert not dist.is_initialized()
    with init_dist() as info:
        assert info._opened_group


def test_nccl_groups_of_a_failed_run_are_not_reused(alone):
    with init_dist() as info:
        pass
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(KeyError), replace(info, device=torch.device("cuda", 0), world_size=2):
            raise KeyError("x")
        with pytest.raises(DistError, match=r"init_dist: NCCL groups of a failed run are still open in this process. Start a"):
            init_dist()
    finally:
        dist.destroy_process_group()


def test_late_rank_joins_a_later_attempt(forked):
    """Rank 0 gives up once, and tries again; rank 1 comes between, finds the first try failed, and waits in the second."""
    gave_up = fork.Event()

    def body(rank: int) -> list:
        texts = []
        if rank == 1:
            assert gave_up.wait(LONG_S)
        for _ in range(20):
            try:
                with init_dist(device="cpu", init_timeout_s=1 if rank == 0 else 60) as info:
                    return [texts[:1], len(all_gather_numbers([info.rank]))]
            except DistError as error:
                texts.append(str(error))
                gave_up.set()
        return texts

    missing = "init_dist: 1 of 2 ranks did not arrive within 1 s: missing [1]. Look at their output, or raise init_timeout_s."
    assert forked.run(body, 2, results_of=[0, 1]) == {0: [[missing], 2], 1: [[], 2]}


def test_waiting_rank_detects_a_failed_attempt(forked):
    """Rank 0 gives up and leaves for good; rank 1, which has much more time, does not open groups with it."""

    def body(rank: int) -> str:
        try:
            with init_dist(device="cpu", init_timeout_s=0.5 if rank == 0 else 5):
                return "opened"
        except DistError as error:
            if rank == 0:
                time.sleep(LONG_S)  # its store is still there
            return str(error)

    (text,) = forked.run(lambda rank: body(rank) if rank < 2 else time.sleep(LONG_S), 3, results_of=[1]).values()
    assert text == (
        "init_dist: 2 of 3 ranks did not arrive within 5 s: missing [0, 2]. Look at their output, or raise init_timeout_s."
    )


def test_interrupted_rank_does_not_count_as_arrived(forked):
    interrupted = fork.Event()

    def body(rank: int) -> list:
        if rank == 1:
            assert interrupted.wait(LONG_S)
        else:
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                init_dist(device="cpu")
            interrupted.set()
            time.sleep(1)  # rank 1 has come by now, and waits
        with init_dist(device="cpu") as info:
            return all_gather_numbers([info.rank])

    assert forked.run(body, 2, results_of=[0, 1]) == {0: [[0.0], [1.0]], 1: [[0.0], [1.0]]}


def test_two_processes_of_one_rank_are_refused(forked):
    together = fork.Barrier(3)

    def body(rank: int) -> str:
        os.environ["RANK"] = str(min(rank, 1))
        # On a busy machine the timeout of a rank would begin long before that of the others.
        together.wait(LONG_S)
        with init_dist(device="cpu", init_timeout_s=3):
            return "opened"

    answers = sorted(forked.run(body, 3, results_of=[0, 1, 2]).values())
    same_rank = "ConfigError: init_dist: each process must have its own RANK, but two processes have RANK=1 of 3. "
    assert answers[0].startswith(same_rank)
    # The last one may have begun to wait so much later that rank 0 has given up, and is gone.
    said = ["1 of 3 ranks did not arrive within 3 s: missing [2]", "rank 0, which serves the store of 3 ranks, has ended"]
    assert [any(text in answer for text in said) for answer in answers[1:]] == [True, True], answers
    assert said[0] in answers[1] + answers[2]


@pytest.fixture
def impatient(monkeypatch):
    """Calls to the store that give up soon after their own timeout."""
    monkeypatch.setattr(rendezvous, "_STORE_MARGIN_S", 0.5)
    monkeypatch.setattr(rendezvous, "_TORCH_RETRY_S", 0.0)


@pytest.mark.parametrize(("number", "text"), [(signal.SIGSTOP, "stopped answering"), (signal.SIGKILL, "has ended")])
def test_loss_of_store_server_rank_0_is_reported(forked, impatient, monkeypatch, number, text):
    connect, served, connected = rendezvous.connect_store, fork.Event(), fork.Event()

    def serve_and_die(*args, **options):
        store = connect(*args, **options)
        served.set()
        assert connected.wait(LONG_S)
        os.kill(os.getpid(), number)
        return store

    def connect_and_tell(*args, **options):
        assert served.wait(LONG_S)
        store = connect(*args, **options)
        connected.set()
        return store

    def body(rank: int) -> str:
        monkeypatch.setattr(init, "connect_store", [serve_and_die, connect_and_tell][rank])
        with init_dist(device="cpu", init_timeout_s=5):
            return "opened"

    (answer,) = forked.run(body, 2, results_of=[1]).values()
    assert answer == f"DistError: init_dist: rank 0, which serves the store of 2 ranks, {text}. Look at its output."


def test_stopped_rank_0_does_not_block_connecting_ranks(forked, impatient, monkeypatch):
    def body(rank: int) -> str:
        if rank == 0:
            connect = rendezvous.connect_store
            monkeypatch.setattr(
                init,
                "connect_store",
                lambda *args, **options: [connect(*args, **options), os.kill(os.getpid(), signal.SIGSTOP)],
            )
        else:
            time.sleep(1)
        with init_dist(device="cpu", init_timeout_s=1):
            return "opened"

    (answer,) = forked.run(body, 2, results_of=[1]).values()
    assert answer.startswith("DistError: init_dist: rank 0 at 127.0.0.1:")
    assert answer.endswith("does not answer rank 1 within 1 s. Check that rank 0 is not stopped.")


def test_mesh_is_cached_until_groups_close(forked):
    def body(_: int) -> list:
        with init_dist(device="cpu"):
            first = build_mesh(dp_replicate=2)
            seen = [build_mesh(dp_replicate=2) is first, build_mesh(dp_replicate=1) is first]
        with init_dist(device="cpu"):
            x = torch.ones(1)
            dist.all_reduce(x, group=build_mesh(dp_replicate=2).get_group("dp_replicate"))
            return [*seen, build_mesh(dp_replicate=2) is first, x.item()]

    assert forked.run(body, 2, results_of=[0, 1]) == {rank: [True, False, False, 2.0] for rank in (0, 1)}


def time_outs_of_mesh() -> list[float]:
    mesh = build_mesh(dp_replicate=2)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mesh.get_all_groups()]


def test_mesh_groups_use_the_init_dist_timeout(forked):
    def body(_: int) -> list[float]:
        with init_dist(device="cpu", timeout_s=7):
            return time_outs_of_mesh()

    assert forked.run(body, 4, results_of=[0]) == {0: [7.0, 7.0]}


def test_missing_mesh_degree_is_inferred():
    assert _fill_degrees({"dp_replicate": 2, "dp_shard": -1}, 8) == {"dp_replicate": 2, "dp_shard": 4}
    assert _fill_degrees({"dp_replicate": 2, "dp_shard": 4}, 8) == {"dp_replicate": 2, "dp_shard": 4}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp_replicate": 3, "dp_shard": -1}, r"world_size=8 must be a multiple of 3, got dp_replicate=3 \* dp_shard=-1"),
        ({"dp_replicate": 2, "dp_shard": 2}, r"dp_replicate=2 \* dp_shard=2 = 4. Set one degree to -1"),
        ({"dp_replicate": -1, "dp_shard": -1}, "at most one degree may be -1"),
        ({"dp_replicate": 0, "dp_shard": 8}, "must be at least 1"),
        (
            {"dp_replicate": 1, "dp_shard": 3, "tp": 2},
            r"dp_replicate \* dp_shard \* tp must be world_size=8, got dp_replicate=1 .*Set one degree to",
        ),
    ],
)
def test_invalid_mesh_degrees_are_refused(degrees, message):
    with pytest.raises(ConfigError, match=message):
        _fill_degrees(degrees, 8)


def test_mesh_before_init_is_refused():
    with pytest.raises(DistError, match=r"Call dt.init_dist\(\) first"):
        build_mesh()


def ranks_of_mesh(degrees: dict) -> list:
    from dtrain.dist.mesh import axis_size, data_rank, data_shape, tp_rank

    mesh = build_mesh(**degrees)
    axes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    assert (axis_size(mesh, "tp"), axis_size(mesh, "cp")) == (axes.get("tp", 1), axes.get("cp", 1))
    return [list(data_rank(mesh)), tp_rank(mesh), axes, list(data_shape(mesh)), build_mesh(**degrees) is mesh]


AXES = {"dp_replicate": 1, "dp_shard": 2}
MESHES = {
    "data": ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, [[0, 4], [1, 4], [2, 4], [3, 4]], [0, 0, 0, 0]),
    "degrees of one": ({"dp_replicate": 2, "tp": 1, "cp": 1}, {"dp_replicate": 2, "dp_shard": 2}, None, [0, 0, 0, 0]),
    "tp": ({"tp": 2}, {**AXES, "tp": 2}, [[0, 2], [0, 2], [1, 2], [1, 2]], [0, 1, 0, 1]),
    "cp": ({"cp": 2}, {**AXES, "cp": 2}, [[0, 2], [0, 2], [1, 2], [1, 2]], [0, 0, 0, 0]),
    "both": ({"cp": 2, "tp": 2}, {**AXES, "dp_shard": 1, "cp": 2, "tp": 2}, [[0, 1]] * 4, [0, 1, 0, 1]),
    "tp filled": ({"dp_shard": 1, "tp": -1}, {**AXES, "dp_shard": 1, "tp": 4}, [[0, 1]] * 4, [0, 1, 2, 3]),
    "tp filled with one": ({"dp_shard": 4, "tp": -1}, {**AXES, "dp_shard": 4}, [[0, 4], [1, 4], [2, 4], [3, 4]], [0] * 4),
}


@pytest.mark.parametrize("case", MESHES)
def test_ranks_along_cp_and_tp_share_one_data_rank(ranks, case):
    degrees, axes, places, tensor = MESHES[case]
    for rank, actual in enumerate(ranks(4).run(ranks_of_mesh, degrees)):
        place = [rank, 4] if places is None else places[rank]
        assert actual == [place, tensor[rank], axes, [axes["dp_replicate"], axes["dp_shard"]], True]
