"""Two launchers of one job, on one machine that stands for two: the exit code and the message of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import pytest
from torch.distributed import TCPStore

from jobs import wait_until


def place(port, *, of=2):
    return ["--nnodes", str(of), "--master-addr", "127.0.0.1", "--master-port", str(port)]


@pytest.fixture
def nodes(start, port):
    """``nodes(source, ...)`` starts the launchers of a job, one per node; settings that are lists differ between nodes."""

    def start_nodes(source, *args, count=2, options=(), own=((), ()), **settings):
        where = place(port, of=count)
        return [
            start(source, *args, options=[*where, "--node-rank", str(node), *options, *own[node]], **settings)
            for node in range(count)
        ]

    return start_nodes


WHO = """
    import json, os
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "DTRAIN_RUN_DIR"]
    print("WHO " + json.dumps({name: os.environ[name] for name in names}))
"""
READY_AND_STAY = """
    import os, sys, time
    rank = os.environ["RANK"]
    with open(f"{os.environ['FOLDER']}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(f"{os.environ['FOLDER']}/fail-{rank}"):
        time.sleep(0.01)
    raise ValueError("disk on fire")
"""


def test_ranks_are_numbered_by_node_and_share_run_dir(nodes):
    results = [job.wait() for job in nodes(WHO)]
    assert [result.code for result in results] == [0, 0], results
    seen = [json.loads(line.partition("WHO ")[2]) for result in results for line in result.out.splitlines()]
    seen.sort(key=lambda who: int(who["RANK"]))
    assert [(who["RANK"], who["LOCAL_RANK"], who["GROUP_RANK"]) for who in seen] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {who["WORLD_SIZE"] for who in seen} == {"4"}
    assert len({who["MASTER_PORT"] for who in seen}) == 1
    (folder,) = {who["DTRAIN_RUN_DIR"] for who in seen}
    assert {"launch.json", "launch-1.json"} <= set(os.listdir(folder))


def test_ranks_of_all_nodes_reduce_in_torch_and_dtrain(nodes):
    source = """
    import torch, dtrain as dt
    with dt.init_dist() as dist:
        total = dt.dist.reduce_sum(torch.tensor(float(dist.rank)))
        print("total", float(total), dist.world_size, dist.node_rank)
    """
    results = [job.wait() for job in nodes(source, shown="1,3")]
    assert [result.code for result in results] == [0, 0], results
    assert [result.out for result in results] == ["[rank 1] total 6.0 4 0\n", "[rank 3] total 6.0 4 1\n"]


@pytest.mark.costly
def test_nodes_can_run_different_numbers_of_ranks(start, nodes):
    first, second = nodes(WHO, n=None, own=(["-n", "1"], ["-n", "2"]))
    results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [0, 0], results
    seen = [json.loads(line.partition("WHO ")[2]) for result in results for line in result.out.splitlines()]
    assert sorted((int(who["RANK"]), who["LOCAL_WORLD_SIZE"], who["WORLD_SIZE"]) for who in seen) == [
        (0, "1", "3"),
        (1, "2", "3"),
        (2, "2", "3"),
    ]


@pytest.mark.parametrize("node", [0, 1])
def test_rank_failure_ends_all_nodes_and_is_named_on_each(nodes, node):
    jobs = nodes(READY_AND_STAY)
    jobs[0].wait_for("0", "1", "2", "3")
    rank = 2 * node + 1
    (jobs[0].folder / f"fail-{rank}").write_text("now")
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [1, 1]
    for result in results:
        assert len(result.summary) == 1
        assert f"rank {rank} of 4 failed with exit code 1" in result.summary[0]
        assert "ValueError: disk on fire" in result.summary[0]
    assert f"node {node}" in results[1 - node].summary[0]


@pytest.mark.costly
def test_killed_launcher_ends_other_nodes_and_is_named(nodes):
    first, second = nodes(READY_AND_STAY)
    first.wait_for("0", "1", "2", "3")
    os.kill(second.pid, signal.SIGKILL)
    result = first.wait()
    second.wait()
    second.wait_until_gone()
    assert result.code not in (0, 75)
    assert "node 1" in result.summary[0]


@pytest.mark.slow
def test_node_that_is_killed_with_all_its_processes_is_named_with_its_ranks(nodes):
    source = """
    import os, time, torch, dtrain as dt
    with dt.init_dist(device="cpu") as info:
        for step in range(10**6):
            dt.dist.all_gather_json(step)
            dt.dist.reduce_sum(torch.ones(4))
            if step == 3:
                with open(f"{os.environ['FOLDER']}/{info.rank}", "w") as file:
                    file.write(str(os.getpid()))
    """
    first, second = nodes(source)
    first.wait_for("0", "1", "2", "3")
    # The agent first, or it would say that its launcher has ended.
    for pid, _ in sorted(second.processes().items(), key=lambda item: "agent_main" not in item[1]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    result = first.wait()
    second.wait()
    assert result.code == 1
    (line,) = result.summary
    assert "is gone (ranks 2-3)" in line


def test_missing_node_is_named_on_join_timeout(start, port):
    job = start(WHO, options=[*place(port), "--node-rank", "0", "--join-timeout", "1"])
    result = job.wait()
    assert result.code == 1
    (line,) = result.summary
    assert "1 of 2 nodes joined in 1 s; missing: node 1" in line
    assert str(port) in line
    assert "GLOO_SOCKET_IFNAME" in line
    assert not (job.folder / "0").exists()


@pytest.mark.costly
def test_identical_data_on_nodes_is_accepted(nodes, tmp_path):
    (tmp_path / "data").write_text("some")
    assert [job.wait().code for job in nodes(WHO, n=1, options=["--check-path", "data"])] == [0, 0]


@pytest.mark.costly
def test_differing_script_is_refused_on_all_nodes(start, tmp_path, port):
    where = place(port)
    jobs = [
        start(
            source,
            n=1,
            options=[*where, "--node-rank", str(node)],
            name=f"{node}/train.py",
            target=["train.py"],
            cwd=tmp_path / str(node),
        )
        for node, source in enumerate((WHO, "pass"))
    ]
    for result in (job.wait() for job in jobs):
        assert result.code == 1
        assert "the content of train.py" in result.summary[0]


@pytest.mark.costly
def test_all_nodes_are_preempted_together(nodes):
    source = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: open(os.environ["FOLDER"] + "/stop", "w").close())
    with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
        file.write("ready")
    while not os.path.exists(os.environ["FOLDER"] + "/stop"):
        time.sleep(0.01)
    sys.exit(75)
    """
    first, second = nodes(source)
    first.wait_for("0", "1", "2", "3")
    second.process.terminate()
    results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [75, 75], results


def test_sigterm_on_unsaved_node_ends_other_nodes(nodes):
    first, second = nodes(READY_AND_STAY)
    first.wait_for("0", "1", "2", "3")
    second.process.terminate()
    results = [first.wait(), second.wait()]
    assert [result.code for result in results] == [143, 143]
    assert "node 1" in results[0].summary[0]


@pytest.mark.costly
def test_ranks_ending_early_wait_for_ranks_of_other_nodes(nodes):
    source = """
    import os, sys, time
    if os.environ["GROUP_RANK"] == "1":
        time.sleep(1.5)
        sys.exit(7)
    """
    first, second = nodes(source)
    begun = time.monotonic()
    assert [first.wait().code, second.wait().code] == [7, 7]
    assert time.monotonic() > begun + 1


RESTARTS = """
    import os, sys, time
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt, flush=True)
    open(f"{os.environ['FOLDER']}/{rank}-{attempt}", "w").write(str(os.getpid()))
    if rank == "3" and attempt in sys.argv[1:]:
        raise ValueError("disk on fire")
    if attempt in sys.argv[1:]:
        time.sleep(1000)
"""
AGAIN = "starting all ranks again"


def test_ranks_of_all_nodes_start_again(nodes):
    results = [job.wait() for job in nodes(RESTARTS, "0", options=["--max-restarts", "1"])]
    assert [result.code for result in results] == [0, 0], results
    assert [result.err.count(AGAIN) for result in results] == [1, 1]
    assert [sorted(result.out.split("] ")[-1].split()) for result in results] == [["1", "attempt"]] * 2


OLD_STORE = """
    import os, sys, time
    import torch.distributed as dist
    import dtrain as dt

    def seen(name):
        while not os.path.exists(f"{os.environ['FOLDER']}/{name}"):
            time.sleep(0.01)

    port, attempt = int(os.environ["MASTER_PORT"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "1":
        assert port != int(open(f"{os.environ['FOLDER']}/port-0").read())
        seen("old-store")
    with dt.init_dist() as info:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, wait_for_workers=False)
        assert not any(store.check([f"mark-{rank}"]) for rank in range(2)), "the store has keys of another attempt"
        dt.dist.all_gather_json(info.rank)
        store.set(f"mark-{info.rank}", attempt)
        if info.rank == 0 and attempt == "0":
            open(f"{os.environ['FOLDER']}/port-0", "w").write(str(port))
            raise ValueError("disk on fire")
        print("done", dt.dist.all_gather_json(info.rank))
"""


@pytest.mark.costly
@pytest.mark.parametrize("count", [1, 2])
def test_store_of_an_ending_attempt_cannot_serve_the_next_one(start, port, count):
    options = ["--max-restarts", "1"]
    jobs = [
        start(OLD_STORE, n=2 // count, options=[*options, *(place(port) if count == 2 else ()), "--node-rank", str(node)])
        for node in range(count)
    ]
    (old_port,) = map(int, jobs[0].wait_for("port-0"))
    stores = []

    def serve_old_port() -> bool:
        """Serve the keys of the first attempt at its address, as if its store had not ended."""
        with contextlib.suppress(RuntimeError):
            stores.append(TCPStore("127.0.0.1", old_port, is_master=True, wait_for_workers=False))
        return bool(stores)

    wait_until(serve_old_port)
    stores[0].set("mark-0", "0")
    (jobs[0].folder / "old-store").touch()
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0] * count, results
    assert sum(result.out.count("done [0, 1]") for result in results) == 2
    assert stores[0].num_keys() <= 2


@pytest.mark.costly
def test_job_ends_on_all_nodes_without_another_restart(nodes):
    results = [job.wait() for job in nodes(RESTARTS, "0", "1", options=["--max-restarts", "1"])]
    assert [result.code for result in results] == [1, 1], results
    assert [result.err.count(AGAIN) for result in results] == [1, 1]
    assert all("rank 3 of 4 failed with exit code 1" in result.summary[-1] for result in results)


@pytest.mark.costly
@pytest.mark.parametrize("lost", [0, 1])
def test_launcher_takes_the_place_of_a_lost_one(start, nodes, port, lost):
    options = ["--max-restarts", "1"]
    jobs = nodes(RESTARTS.replace('rank == "3"', "False"), "0", options=options)
    jobs[0].wait_for("0-0", "1-0", "2-0", "3-0")
    os.kill(jobs[lost].pid, signal.SIGKILL)
    jobs[lost].wait()
    where = [*place(port), "--node-rank", str(lost), *options]
    jobs.append(start(RESTARTS.replace('rank == "3"', "False"), "0", options=where))
    jobs.pop(lost).wait_until_gone()
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0, 0], results
    assert sorted(path.name for path in jobs[0].folder.glob("?-1")) == ["0-1", "1-1", "2-1", "3-1"]
    assert results[0].err.count(f"launch: waiting up to 300 s for node {lost}") == 1


CANNOT_SHRINK = """
    import os, signal, time, dtrain as dt
    with dt.init_dist() as info:
        dt.build_mesh(dp_replicate=3)
        open(f"{os.environ['FOLDER']}/{info.rank}", "w").write("ready")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
"""


@pytest.mark.costly
def test_a_mesh_that_fewer_nodes_cannot_fill_ends_the_job_with_one_error(start, port):
    options = [*place(port, of="2:3"), "--max-restarts", "5", "--replace-timeout", "1", "--grace", "0.5", "--node-rank"]
    jobs = [start(CANNOT_SHRINK, n=1, options=[*options, str(node)]) for node in range(3)]
    jobs[0].wait_for("0", "1", "2")
    os.kill(jobs[1].pid, signal.SIGKILL)
    results = [job.wait() for job in jobs]
    jobs[1].wait_until_gone()
    assert [result.code for result in results] == [1, -signal.SIGKILL, 1]
    for result in (results[0], results[2]):
        assert result.err.count(AGAIN) == 1
        assert len([line for line in result.summary if "world_size=2 must be a multiple of 3" in line]) == 1, result.err


@pytest.mark.costly
def test_stopped_job_does_not_start_again(nodes):
    jobs = nodes(RESTARTS.replace('rank == "3"', "False"), "0", options=["--max-restarts", "5"])
    jobs[0].wait_for("0-0", "1-0", "2-0", "3-0")
    os.kill(jobs[1].pid, signal.SIGTERM)
    assert [job.wait().code for job in jobs] == [143, 143]


@pytest.mark.costly
def test_nodes_must_agree_on_restarts(nodes):
    results = [job.wait() for job in nodes(WHO, own=(["--max-restarts", "2"], []))]
    assert [result.code for result in results] == [1, 1]
    assert all("nodes differ in --max-restarts: node 1" in result.summary[0] for result in results), results


TRAINS = """
    import os, sys, time
    import torch, dtrain as dt

    def loss_fn(model, batch):
        return dt.LossSum(total=model(batch).square().sum(), weight=torch.tensor(float(len(batch))))

    last = int(sys.argv[1])
    with dt.init_dist() as dist:
        torch.manual_seed(0)
        model = dt.shard_model(torch.nn.Linear(4, 4), dt.build_mesh(), strategy="full_shard")
        step = dt.compose_step(loss_fn)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        print("from", state.step, "on", dist.world_size, flush=True)
        while state.step < last:
            state, _ = step(state, torch.ones(2, 4))
            dt.save_sharded("ckpt", state, keep_last=2)
        if dist.world_size == 2:
            open(f"{os.environ['FOLDER']}/{dist.rank}", "w").write("trained")
            time.sleep(600)
"""


def test_job_with_one_node_fewer_resumes_from_checkpoint(start, nodes):
    first, second = nodes(TRAINS, "3", n=1)
    first.wait_for("0", "1")
    os.kill(second.pid, signal.SIGKILL)
    assert first.wait().out == "[rank 0] from 0 on 2\n"
    second.wait()
    second.wait_until_gone()
    result = start(TRAINS, "5", n=1).wait()
    assert (result.code, result.out) == (0, "from 3 on 1\n"), result.err
