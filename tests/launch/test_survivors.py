"""Ranks that stay when another rank is killed: real jobs with real kills, and the decisions about them."""

from __future__ import annotations

import json
import os
import threading
import time
from mmap import mmap
from pathlib import Path

import pytest

from dtrain import launch_protocol
from dtrain.dist import reconfigure
from dtrain.dist.context import current_context
from dtrain.dist.init import DistInfo
from dtrain.dist.reconfigure import open_joining_plane, setup_file
from dtrain.errors import DistError
from dtrain.launch import heartbeats
from dtrain.launch.failure import RankExit
from dtrain.launch.heartbeats import ProgressKind, ProgressRecord
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout, OutputPlan, Target
from dtrain.launch.processes import descendants
from dtrain.launch.recovery import Death, StepBoard, add_killed
from dtrain.launch.worker_group import RestartPolicy, WorkerGroup
from dtrain.launch_protocol import RankFailure
from old_torch import torch_before

needs_reconfigure = pytest.mark.skipif(torch_before("2.14"), reason="torch connects no process group anew before 2.14")

LOOP = """
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import dtrain as dt

    DEATHS = json.loads(sys.argv[1])  # [step, rank]
    SETUP, MEMORY = sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "1ba"
    torch.set_default_dtype(torch.float64)

    def loss_of(model, batch):
        mark = Path(f"died-{state_step[0]}-{info.rank}")
        if [state_step[0], info.rank] in DEATHS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return dt.sum_loss(model(batch[0]).square().sum(1))

    state_step = [0]
    with dt.init_dist(survive=True) as info:
        run = dt.open_run("run")
        mesh = dt.build_mesh()
        dt.seed_all(0)
        layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        model = dt.shard_model(layers, mesh, strategy="replicate")
        if SETUP == "barrier":
            torch.distributed.barrier()
        data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
        loader = dt.build_loader(data, mesh=mesh, global_batch_size=12, seed=0)
        step = dt.compose_step(loss_of)
        checkpoints = dt.Checkpointer("ckpt", mode="async", memory_every=None if MEMORY == "none" else MEMORY)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader=loader)
        state = checkpoints.load(state, missing_ok=True)

        def train(state):
            for batch in loader.until("10ba"):
                state_step[0] = state.step + 1
                state, metrics = step(state, batch)
                with open(f"losses-{info.rank}.jsonl", "a") as file:
                    file.write(json.dumps([os.getpid(), state.step, dt.reduce_metrics(metrics)["loss"]]) + "\\n")
                checkpoints.keep(state)
            return state

        state = checkpoints.retry(train, state)
        weights = torch.cat([param.detach().flatten() for param in [*model.parameters(), *model.buffers()]])
        Path(f"weights-{info.rank}.txt").write_text(weights.numpy().tobytes().hex())
"""


def outcome(folder: Path, ranks: int) -> tuple[list[dict[int, float]], list[str]]:
    """Return the loss of each step and the final weights, by rank. A step that was run again must have the same loss."""
    losses = []
    for rank in range(ranks):
        of_step: dict[int, float] = {}
        for _, step, loss in rows(folder, rank):
            assert of_step.setdefault(step, loss) == loss
        losses.append(of_step)
    return losses, [(folder / f"weights-{rank}.txt").read_text() for rank in range(ranks)]


def rows(folder: Path, rank: int) -> list[list]:
    return [json.loads(line) for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines()]


def pids(folder: Path, rank: int) -> list[int]:
    return list(dict.fromkeys(pid for pid, _, _ in rows(folder, rank)))


def clear(folder: Path) -> None:
    for path in folder.glob("[lw]*-*"):
        path.unlink()
    for path in sorted([*(folder / "ckpt").rglob("*"), *(folder / "run").rglob("*")], reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.costly
@needs_reconfigure
def test_the_other_ranks_keep_their_process_and_the_run_is_equal(run, tmp_path):
    result = run(LOOP, "[]", "plain", n=3)
    assert result.code == 0, result.err
    undisturbed = outcome(tmp_path, 3)
    clear(tmp_path)
    # The others wait in the backward of a step that is half finished.
    result = run(LOOP, "[[4, 0], [7, 1]]", "plain", n=3, options=["--max-restarts", "2"])
    assert result.code == 0, result.err
    assert outcome(tmp_path, 3) == undisturbed
    assert [len(pids(tmp_path, rank)) for rank in range(3)] == [2, 2, 1]
    stayed = [line for line in result.err.splitlines() if "the other ranks stay" in line]
    assert [line.partition(" was ")[0] for line in stayed] == ["dtrain: launch: rank 0", "dtrain: launch: rank 1"]
    events = [json.loads(line) for line in (tmp_path / "run" / "ledger" / "rank-00002.jsonl").read_text().splitlines()]
    recovered = [event for event in events if event.get("name") == "recovered"]
    assert [(event["rank_died"], event["survivors"], event["lost_steps"]) for event in recovered] == [(0, 2, 0), (1, 2, 0)]
    assert [event["step"] for event in recovered] == [4, 7]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("setup", "memory"),
    [("plain", "none"), pytest.param("barrier", "1ba", marks=needs_reconfigure)],
    ids=["no step", "barrier"],
)
def test_ranks_that_cannot_stay_all_start_again(run, tmp_path, setup, memory):
    result = run(LOOP, "[[3, 1]]", setup, memory, options=["--max-restarts", "1"])
    assert result.code == 0, result.err
    assert "starting all ranks again" in result.err
    losses, weights = outcome(tmp_path, 2)
    assert [sorted(of_rank) for of_rank in losses] == [list(range(1, 11))] * 2
    assert weights[0] == weights[1]
    assert [len(pids(tmp_path, rank)) for rank in range(2)] == [2, 2]


OBJECTS = """
    import json, os, signal, subprocess, sys, threading, time, warnings
    from pathlib import Path
    import torch
    import dtrain as dt
    from dtrain.checkpoint import commit
    from dtrain.errors import CheckpointError

    ENDS = sys.argv[1:]  # of each call of retry; rank 1 dies in the last one, at step 4

    def check_free_memory(root, needed):
        if Path("full").exists():
            raise CheckpointError("save_sharded: no room")

    commit.check_free_memory = check_free_memory
    warnings.filterwarnings("ignore", message="(?!retry: )")
    with dt.init_dist(survive=True) as info:
        helper = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
        mesh = dt.build_mesh()
        model = dt.shard_model(torch.nn.Linear(8, 1), mesh, strategy="replicate")
        data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
        loader = dt.build_loader(data, mesh=mesh, global_batch_size=12, seed=0)
        step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().sum(1)))
        checkpoints = dt.Checkpointer("ckpt", memory_every="1ba")
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), loader=loader)
        if ENDS[0] == "teacher":
            other = torch.nn.Linear(8, 1)
            teacher = step.init(other, torch.optim.SGD(other.parameters(), lr=0.01))
            dt.load_sharded("teacher", teacher, missing_ok=True)
            del ENDS[0]
        count = {"n": 0}
        state = checkpoints.load(state, missing_ok=True, extra={"count": count})

        def die():
            Path("full").unlink()
            Path("died").write_text(str(helper.pid))
            os.kill(os.getpid(), signal.SIGKILL)

        def train_until(end):
            def train(state):
                for batch in loader.until(end):
                    state, metrics = step(state, batch)
                    count["n"] += 1
                    with open(f"losses-{info.rank}.jsonl", "a") as file:
                        file.write(json.dumps([os.getpid(), state.step, count["n"]]) + "\\n")
                    kept = checkpoints.keep(state, extra={"count": count})
                    assert kept == (state.step != 4)
                    if state.step == 3 and info.rank == 1 and not Path("died").exists():
                        Path("full").touch()
                    if state.step == 4:
                        checkpoints.save(state, extra={"count": count})
                        if end == ENDS[-1] and info.rank == 1 and not Path("died").exists():
                            die()
                return state
            return train

        for number, end in enumerate(ENDS):
            if number:
                torch.distributed.all_reduce(torch.ones(1))
            state = checkpoints.retry(train_until(end), state)
        # A thread that is in the store at the exit of the process would abort it.
        assert not [thread for thread in threading.enumerate() if thread.name == "dtrain-store"]
        dead = Path(f"/proc/{Path('died').read_text()}/stat")
        while dead.exists() and dead.read_text().split()[2] != "Z":
            time.sleep(0.01)
        helper.kill()
"""


@pytest.mark.costly
@needs_reconfigure
@pytest.mark.parametrize("ends", [["7ba"], ["2ba", "7ba"], ["teacher", "7ba"]], ids=["one call", "two calls", "teacher"])
def test_a_new_rank_and_the_others_go_on_alike(run, tmp_path, ends):
    """Extra objects are loaded, memory is used again, children of the dead rank end, and no rank stays in a second call."""
    result = run(OBJECTS, *ends, options=["--max-restarts", "2"])
    assert result.code == 0, result.err
    stays = len(ends) == 1
    assert ("the other ranks stay" in result.err, "starting all ranks again" in result.err) == (stays, not stays)
    assert ("retry: " in result.err) is not stays
    assert [len(pids(tmp_path, rank)) for rank in range(2)] == [1 if stays else 2, 2]
    assert all([(step, n) for _, step, n in rows(tmp_path, rank)] == [(n, n) for n in range(1, 8)] for rank in range(2))


# The launcher.


@pytest.fixture
def attempt(tmp_path):
    plan = LaunchPlan(
        target=Target(kind="script", name="a.py"), layout=NodeLayout.one_node(3), run_dir=tmp_path, output=OutputPlan()
    )
    (tmp_path / "failures").mkdir()
    # Pids that no process has: the kernel's highest is 2**22.
    pids = {0: 2**22 + 1, 1: 2**22 + 2, 2: 2**22 + 3}
    group = WorkerGroup(plan=plan, services=set(descendants()), pids=pids, may_replace=True)
    for rank in range(3):
        group.record_progress(ProgressRecord(kind=ProgressKind.STAYS, rank=rank, value=1, at=0.0), 0.0)
    return group


def test_a_killed_rank_is_replaced_once_and_the_others_must_say_again_that_they_stay(attempt):
    attempt.record_exits([(attempt.pids[1], -9)], 10.0)
    attempt.advance(10.0)
    assert (attempt.dead_ranks, attempt.stopping, attempt.root_cause) == ((1,), False, None)
    attempt.forget_dead_ranks()
    attempt.record_start(1, 2**22 + 4, 10.1)
    assert sorted(attempt.running_pids()) == [0, 1, 2]
    attempt.advance(10.2)
    assert not attempt.stopping
    # The second death comes before all ranks are together again.
    attempt.record_exits([(2**22 + 3, -9)], 10.3)
    attempt.advance(10.3)
    assert (attempt.dead_ranks, attempt.stopping, attempt.root_cause.rank) == ((), True, 2)


def breaks_policy(group):
    group.may_replace = False


def leaves(group):
    group.record_progress(ProgressRecord(kind=ProgressKind.STAYS, rank=2, value=0, at=0.0), 0.0)


def fails(group):
    RankFailure.from_exception(0, ValueError("x")).write(group.plan.failure_file(0))


def has_not_started(group):
    group.pids[2] = None


@pytest.mark.parametrize("change", [breaks_policy, leaves, fails, has_not_started])
def test_all_ranks_end_if_one_cannot_stay(attempt, change):
    change(attempt)
    attempt.record_exits([(attempt.pids[1], -9)], 10.0)
    attempt.advance(10.0)
    attempt.advance(20.0)
    assert (attempt.dead_ranks, attempt.stopping) == ((), True)


def test_a_rank_that_exits_by_itself_is_not_replaced(attempt):
    attempt.record_exits([(attempt.pids[1], 1)], 10.0)
    attempt.advance(10.0)
    attempt.advance(20.0)
    assert (attempt.dead_ranks, attempt.stopping) == ((), True)


def test_a_replacement_that_fails_does_not_count_but_several_without_a_checkpoint_do():
    policy = RestartPolicy(max_fruitless=1).after_replacement()
    assert (policy.total, policy.delay_s) == (1, 0.0)
    assert policy.after_replacement().delay_s is None
    everyone = policy.after_restart()
    assert (everyone.total, everyone.delay_s) == (2, None)
    assert everyone.after_commit(7).delay_s == 0.0
    assert policy.after_commit(7) == RestartPolicy(max_fruitless=1, total=1, last_committed_step=7)


def test_several_deaths_at_once_have_one_last_step():
    exits = {rank: RankExit(rank=rank, code=-9, at=7.0) for rank in (0, 2)}
    before = (Death(rank=1, cause="killed by SIGKILL", at=1.0, step=3),)
    assert [(death.rank, death.step) for death in add_killed(before, (0, 2), exits, 12)] == [(0, 12), (2, 12)]
    assert [(death.rank, death.step) for death in add_killed(before, (2,), exits, None)] == [(1, 3), (2, 3)]


# The ranks.


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the board is in memory of Linux")
def test_a_rank_sees_a_replacement_once(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "_STATE", heartbeats._HeartbeatState())
    board, read, write = StepBoard(), *os.pipe()
    heartbeats.connect(write, 0)
    assert not heartbeats.can_see_replacements()
    heartbeats.watch_replacements(memoryview(mmap(board.fd, 0))[-16:].cast("q"), 1)
    assert heartbeats.can_see_replacements()
    assert heartbeats.replacement() is None
    variables = board.announce(2, tmp_path, (), 3)
    assert variables[launch_protocol.JOINS] == "1"
    assert json.loads(launch_protocol.rejoin_file(tmp_path).read_text())["survivors"] == 3
    assert heartbeats.replacement() == 2
    heartbeats.follow(2)
    assert (heartbeats.replacement(), heartbeats.followed()) == (None, 2)
    os.close(read)
    os.close(write)
    os.close(board.fd)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the board is in memory of Linux")
@pytest.mark.parametrize("dies", [False, True])
def test_a_failed_collective_waits_for_the_launchers_word(tmp_path, monkeypatch, dies):
    monkeypatch.setattr(heartbeats, "_STATE", heartbeats._HeartbeatState())
    # Without an answer the test would take forever.
    monkeypatch.setattr(reconfigure, "_ANNOUNCEMENT_S", 1e6)
    membership = reconfigure.Membership(is_joining=False, connect_timeout_s=1.0, in_setup=False)
    monkeypatch.setattr(current_context(), "membership", membership)
    board, files = StepBoard(), heartbeats.SharedFiles()
    heartbeats.connect(files.pulse, 0)
    heartbeats.watch_replacements(memoryview(mmap(board.fd, 0))[-16:].cast("q"), 1)

    def launcher():
        while not any(record.kind == ProgressKind.ASKS for record in files.read_progress()):
            time.sleep(0.01)
        board.announce(2, tmp_path, (), 1) if dies else board.answer()

    # An earlier answer, to another rank.
    board.answer()
    thread = threading.Thread(target=launcher)
    thread.start()
    assert reconfigure.await_replacement(ValueError(), is_collective=True) == (2 if dies else None)
    thread.join()
    assert reconfigure.await_replacement(ValueError(), is_collective=False) == (2 if dies else None)
    for fd in (board.fd, files.pulse, files.progress_fd, files.devnull):
        os.close(fd)


def test_a_new_rank_gets_the_exchanges_of_the_setup_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv(launch_protocol.MEMORY_FOLDER, str(tmp_path))
    info = DistInfo(rank=1, world_size=2, local_world_size=2)
    with pytest.raises(DistError, match="cannot be read"):
        open_joining_plane(info)
    setup_file().write_text(json.dumps([["open_run", ["YQ==", "Yg=="]], ["shard_model", ["Yw==", "Yw=="]]]))
    channel = open_joining_plane(info)["control"]
    assert channel.all_gather(b"new", caller="open_run") == [b"a", b"new"]
    with pytest.raises(DistError, match=r"^reduce_sum: rank 1 takes the place of a dead rank"):
        channel.all_gather(b"x", caller="reduce_sum")
    with pytest.raises(DistError, match=r"^step: rank 1 takes the place"):
        channel.reduce_rows([1.0], None, caller="step")
    with pytest.raises(DistError, match=r"^gather_json: rank 1 takes the place"):
        channel.gather(b"x", 0, caller="gather_json")
    assert channel.all_gather(b"new", caller="shard_model") == [b"c", b"new"]
    with pytest.raises(DistError, match=r"^init_dist: rank 1"):
        open_joining_plane(info)["background"].all_gather(b"x", caller="init_dist")
