"""Steps in memory outlive ranks that die: real jobs, whose restarted ranks go on from memory or from disk."""

from __future__ import annotations

import functools
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dtrain.checkpoint.node_memory import check_free_memory
from dtrain.errors import CheckpointError
from dtrain.launch import launch_dir
from jobs import LONG_S, Job, wait_until

SLOW = pytest.mark.slow
LOOP = """
    import json, os, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import dtrain as dt

    DEATHS = json.loads(sys.argv[1])  # [restart, step, rank]
    MODE = sys.argv[2] if len(sys.argv) > 2 else "memory"
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_default_dtype(torch.float64)
    with dt.init_dist() as info:
        Path("memory_folder.txt").write_text(os.environ["DTRAIN_MEMORY_FOLDER"])
        mesh = dt.build_mesh()
        dt.seed_all(0)
        model = dt.shard_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), mesh)
        data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
        loader = dt.build_loader(data, mesh=mesh, global_batch_size=12, seed=0)
        step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().sum(1)))
        checkpoints = dt.Checkpointer("ckpt", memory_every=None if MODE == "none" else "1ba")
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader=loader)
        state = checkpoints.load(state, missing_ok=True)
        for batch in loader.until("12ba"):
            state, metrics = step(state, batch)
            loss = dt.reduce_metrics(metrics)["loss"]
            if info.rank == 0:
                with open("losses.jsonl", "a") as file:
                    file.write(json.dumps([restart, state.step, loss, info.world_size]) + "\\n")
            if state.crossed("5ba"):
                checkpoints.save(state)
            kept = checkpoints.keep(state)
            assert kept == (MODE != "none")
            if [restart, state.step, info.rank] in DEATHS:
                BEFORE_DEATH
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(state)
        whole = [param.full_tensor().detach().flatten() for param in model.parameters()]
        if info.rank == 0:
            Path("weights.txt").write_text(torch.cat(whole).numpy().tobytes().hex())
"""


def loop(before_death: str = "pass") -> str:
    return LOOP.replace("BEFORE_DEATH", before_death)


def losses(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Return the steps and losses of each start."""
    starts: dict[int, list[tuple[int, float]]] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        restart, step, loss, _ = json.loads(line)
        starts.setdefault(restart, []).append((step, loss))
    return starts


def world_sizes(folder: Path) -> list[int]:
    """Return the number of ranks of each start."""
    lines = map(json.loads, (folder / "losses.jsonl").read_text().splitlines())
    return list({restart: world_size for restart, _, _, world_size in lines}.values())


def numbers(weights: str) -> tuple[float, ...]:
    return struct.unpack(f"{len(weights) // 16}d", bytes.fromhex(weights))


def memory_folder(folder: Path) -> Path:
    """Return the folder in shared memory of the last launch. Other launches on this machine have folders beside it."""
    return Path((folder / "memory_folder.txt").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """``undisturbed(ranks)`` returns losses and weights of a run that nothing disturbs."""

    @functools.cache
    def run_undisturbed(ranks: int = 2) -> tuple[dict[int, float], str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        (folder / "script.py").write_text(textwrap.dedent(loop()))
        command = [sys.executable, "-m", "dtrain", "launch", "-n", str(ranks), "script.py", "[]", "none"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.returncode == 0, done.stderr
        return dict(losses(folder)[0]), (folder / "weights.txt").read_text()

    return run_undisturbed


@pytest.mark.costly
def test_a_restarted_job_loses_no_step_that_is_in_memory(run, tmp_path, undisturbed):
    expected, weights = undisturbed()
    result = run(loop(), "[[0, 3, 1], [1, 8, 0]]", options=["--max-restarts", "3"])
    assert result.code == 0, result.err
    starts = losses(tmp_path)
    assert [[step for step, _ in starts[restart]] for restart in sorted(starts)] == [
        [1, 2, 3],
        [4, 5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    assert {step: loss for steps in starts.values() for step, loss in steps} == expected
    assert (tmp_path / "weights.txt").read_text() == weights
    assert "loaded /dev/shm/dtrain-" in result.err
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir() if path.is_dir()) == [
        f"step-{step:08d}" for step in (5, 10, 12)
    ]
    assert not memory_folder(tmp_path).exists()


FLIPS_A_BIT = """
                for path in Path(os.environ["DTRAIN_MEMORY_FOLDER"]).rglob("*"):
                    if path.is_file() and path.stat().st_size > 500 and "lock" not in path.name and "manifest" not in path.name:
                        content = bytearray(path.read_bytes())
                        content[len(content) // 2] ^= 1
                        path.write_bytes(content)
"""


@pytest.mark.costly
@pytest.mark.parametrize(("died_at", "from_disk"), [(8, 5), (3, 0)], ids=["disk", "nothing"])
def test_a_flipped_bit_in_memory_is_found_and_the_disk_is_used(run, tmp_path, undisturbed, died_at, from_disk):
    expected, weights = undisturbed()
    result = run(loop(FLIPS_A_BIT.strip()), f"[[0, {died_at}, 0]]", options=["--max-restarts", "1"])
    assert result.code == 0, result.err
    starts = losses(tmp_path)
    assert [step for step, _ in starts[1]] == list(range(from_disk + 1, 13))
    assert "in memory is corrupt" in result.err
    assert dict(starts[1]) == {step: loss for step, loss in expected.items() if step > from_disk}
    assert (tmp_path / "weights.txt").read_text() == weights


def place(port: int, node: int, nodes: int | str = 2) -> list[str]:
    return ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]


@pytest.mark.costly
def test_a_rank_that_dies_on_one_of_two_nodes_costs_no_step(start, port, tmp_path, undisturbed):
    expected, weights = undisturbed()
    options = ["--max-restarts", "2"]
    jobs = [start(loop(), "[[0, 8, 1]]", n=1, options=[*place(port, node), *options]) for node in range(2)]
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0, 0], results
    starts = losses(tmp_path)
    assert [step for step, _ in starts[1]] == [9, 10, 11, 12]
    assert {step: loss for steps in starts.values() for step, loss in steps} == expected
    assert (tmp_path / "weights.txt").read_text() == weights
    assert "loaded /dev/shm/dtrain-" in results[0].err


@pytest.mark.costly
@pytest.mark.parametrize(("nodes", "lost"), [(2, 0), (3, 1), pytest.param(4, 3, marks=SLOW)])
def test_the_step_of_a_lost_node_comes_from_the_memory_of_the_others(start, port, tmp_path, undisturbed, nodes, lost):
    expected, weights = undisturbed(nodes)
    waits = "Path(f'ready-{info.rank}').write_text('ready'); import time; time.sleep(600)"
    deaths = json.dumps([[0, 8, rank] for rank in range(nodes)])

    def launch(node: int) -> Job:
        return start(loop(waits), deaths, n=1, options=[*place(port, node, nodes), "--max-restarts", "2"])

    jobs = [launch(node) for node in range(nodes)]
    jobs[0].wait_for(*(f"ready-{rank}" for rank in range(nodes)))
    os.kill(jobs[lost].pid, signal.SIGKILL)
    jobs[lost].wait()
    jobs[lost].wait_until_gone()
    jobs[lost] = launch(lost)
    results = [job.wait() for job in jobs]
    assert [result.code for result in results] == [0] * nodes, results
    starts = losses(tmp_path)
    # The copy of step 8 may not have been complete. The disk had step 5.
    assert [step for step, _ in starts[1]][-4:] == [9, 10, 11, 12]
    assert len(starts[1]) in (4, 5)
    assert dict(starts[1]) == {step: expected[step] for step in dict(starts[1])}
    assert (tmp_path / "weights.txt").read_text() == weights
    assert "loaded /dev/shm/dtrain-" in results[0].err


FEWER = """
                Path(f"ready-{info.rank}").write_text("ready")
                import time
                while restart == 0 or not Path("return").exists():
                    time.sleep(0.01)
"""


@pytest.mark.costly
@pytest.mark.parametrize(("nodes", "lost"), [(3, 1), pytest.param(2, 1, marks=SLOW), pytest.param(4, 2, marks=SLOW)])
def test_a_job_goes_on_with_fewer_nodes_and_takes_back_the_lost_one(start, port, tmp_path, undisturbed, nodes, lost):
    expected, weights = undisturbed(nodes)
    deaths = json.dumps([[0, 8, rank] for rank in range(nodes)] + [[1, 9, 0]])

    def launch(node: int, **settings: object) -> Job:
        where = place(port, node, f"{nodes - 1}:{nodes}")
        return start(loop(FEWER.strip()), deaths, n=1, options=[*where, "--max-restarts", "3", *timeout], **settings)

    timeout = ["--replace-timeout", "10", "--grace", "0.5"]
    with open(tmp_path / "err-0", "w") as err:
        jobs = [launch(node, **({"stderr": err} if node == 0 else {})) for node in range(nodes)]
    jobs[0].wait_for(*(f"ready-{rank}" for rank in range(nodes)))
    os.kill(jobs[lost].pid, signal.SIGKILL)
    jobs[lost].wait()
    jobs[lost].wait_until_gone()
    wait_until(lambda: 1 in losses(tmp_path))
    jobs[lost] = launch(lost)
    wait_until(lambda: "it joins at the next restart" in (tmp_path / "err-0").read_text())
    (tmp_path / "return").touch()
    results = [job.wait() for job in jobs]
    said = (tmp_path / "err-0").read_text()
    assert [result.code for result in results] == [0] * nodes, (said, results)
    starts = losses(tmp_path)
    # The copy of step 8 may not have been complete. The disk had step 5.
    assert [step for step, _ in starts[1]] in ([9], [8, 9])
    assert [step for step, _ in starts[2]] in ([10, 11, 12], [9, 10, 11, 12])
    assert world_sizes(tmp_path) == [nodes, nodes - 1, nodes]
    for steps in starts.values():
        for step, loss in steps:
            assert loss == pytest.approx(expected[step], rel=0, abs=1e-12)
    assert numbers((tmp_path / "weights.txt").read_text()) == pytest.approx(numbers(weights), rel=0, abs=1e-12)
    assert said.count("loaded /dev/shm/dtrain-") == 2
    assert said.count(f"{nodes - 1} of {nodes} nodes run {nodes - 1} rank") == 1


@pytest.mark.costly
def test_memory_is_given_back_however_the_job_ends(start, tmp_path):
    waits = "Path('ready').write_text('ready'); import time; time.sleep(600)"
    job = start(loop(waits), "[[0, 2, 0]]")
    job.wait_for("ready")
    folder = memory_folder(tmp_path)
    assert any(path.is_file() for path in folder.rglob("*"))
    os.kill(job.pid, signal.SIGTERM)
    job.wait()
    assert not folder.exists()
    assert not folder.with_name(f"{folder.name}.lock").exists()


def test_memory_of_a_killed_launch_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_dir, "_SHARED_MEMORY", tmp_path)
    first = launch_dir.make_shared_folders()
    (first.memory / "step").write_text("a copy")
    live = launch_dir.make_shared_folders()
    assert first.memory.exists()
    # The end of a process gives its locks back.
    os.close(first.memory_lock)
    launch_dir.make_shared_folders().remove()
    assert not first.memory.exists()
    assert live.memory.exists()
    live.remove()
    assert list(tmp_path.iterdir()) == [] or all(path.suffix == ".lock" for path in tmp_path.iterdir())


@pytest.mark.parametrize(("names", "copies"), [(["run.lock"], 2), (["run.lock", "step-00000004"], 1)], ids=["first", "later"])
def test_the_first_step_in_memory_needs_room_for_the_next_one(tmp_path, monkeypatch, names, copies):
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr("dtrain.storage.free_bytes", lambda path: 1500)
    if copies == 1:
        check_free_memory(tmp_path, 1000)
        return
    with pytest.raises(CheckpointError, match=r"free shared memory must be at least .* with mode='memory', got"):
        check_free_memory(tmp_path, 1000)


NO_ROOM = """
    import warnings
    import torch
    from torch import nn
    import dtrain as dt

    with dt.init_dist() as info:
        model = dt.shard_model(nn.Linear(4, 4), dt.build_mesh())
        loader = dt.build_loader(torch.ones(16, 4), mesh=dt.build_mesh(), global_batch_size=4, seed=0, collate=torch.stack)
        step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch).sum(1)))
        checkpoints = dt.Checkpointer("ckpt", memory_every=1)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
        kept = []
        for batch in loader.until("4ba"):
            state, metrics = step(state, batch)
            if state.step == 3:
                # Another program has taken the memory.
                dt.storage.free_bytes = lambda path: 100 if str(path).startswith("/dev/shm") else 10**12
            kept.append(checkpoints.keep(state))
        checkpoints.save(state)
        info.print(kept)
"""


@pytest.mark.costly
def test_a_run_goes_on_with_the_disk_when_memory_has_no_room(run, tmp_path):
    result = run(NO_ROOM)
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["[rank 0] [True, True, False, False]"]
    warned = [line for line in result.err.splitlines() if "keep: going on without copies in memory" in line]
    assert len(warned) == 1
    assert "free shared memory must be at least" in warned[0]
    assert [path.name for path in (tmp_path / "ckpt").iterdir() if path.is_dir()] == ["step-00000004"]


REFUSED = """
    import torch
    from torch import nn
    import dtrain as dt

    with dt.init_dist():
        model = dt.shard_model(nn.Linear(4, 4), dt.build_mesh())
        step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch).sum(1)))
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for arguments in ARGUMENTS:
            try:
                dt.save_sharded("ckpt", state, **arguments)
                print("saved")
            except dt.errors.DtrainError as error:
                print(type(error).__name__, error)
"""


@pytest.mark.costly
def test_saves_in_memory_that_cannot_be(run, tmp_path):
    arguments = "({'mode': 'memory', 'keep_last': 2}, {'mode': 'memory', 'scope': 'weights'})"
    result = run(REFUSED.replace("ARGUMENTS", arguments), n=1, shown="0")
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "ConfigError save_sharded: keep_last must not be set with mode='memory', got 2. Leave it out: memory holds one step, "
        "and the next one until it is complete.",
        "ConfigError save_sharded: scope must be 'all' with mode='memory', got 'weights'. Save the whole state.",
    ]
