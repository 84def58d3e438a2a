"""The way from a death to the next loss: its parts, and what a restarted rank does not import again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dtrain.launch.failure import RankExit, RootCause
from dtrain.launch.recovery import PARTS, Death, StepBoard, add_death
from dtrain.report.read_run import read_run

KILLED = RootCause(rank=1, code=-9, failure=None)
EXITS = {1: RankExit(rank=1, code=-9, at=7.0)}


def test_deaths_before_the_next_step_are_kept_together():
    first = add_death((), KILLED, (), EXITS, 12)
    assert first == (Death(rank=1, cause="killed by SIGKILL", at=7.0, step=12),)
    # The next attempt dies before its first step, and a later one after some steps.
    second = add_death(first, None, ("dtrain: launch: no progress for 5 s",), {}, None)
    assert second[0] == first[0]
    assert (second[1].rank, second[1].cause, second[1].step) == (-1, "no progress for 5 s", 12)
    assert [death.step for death in add_death(second, KILLED, (), EXITS, 15)] == [15]


def test_the_board_has_the_last_step_of_all_ranks():
    board = StepBoard()
    assert board.last_step(2) is None
    board.clear(2)
    assert board.last_step(2) is None


LOOP = """
    import json, os, signal, sys, time
    from pathlib import Path
    import torch
    from torch import nn
    import dtrain as dt

    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("start", restart, os.environ["RANK"], "xmlrpc.client" in sys.modules, flush=True)
    assert "DTRAIN_START" not in os.environ and "DTRAIN_STEPS_FD" not in os.environ
    with dt.init_dist() as info:
        import xmlrpc.client

        run = dt.open_run("run")
        mesh = dt.build_mesh()
        model = dt.shard_model(nn.Linear(4, 1), mesh)
        data = torch.utils.data.TensorDataset(torch.ones(48, 4))
        loader = dt.build_loader(data, mesh=mesh, global_batch_size=4, seed=0)
        step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch[0]).square().sum(1)))
        checkpoints = dt.Checkpointer("ckpt", memory_every="2ba")
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), loader=loader)
        state = checkpoints.load(state, missing_ok=True)
        for batch in loader.until("6ba"):
            state, metrics = step(state, batch)
            checkpoints.keep(state)
            if restart == 0 and state.step == 3 and info.rank == 1:
                log = Path(os.environ["DTRAIN_RUN_DIR"], "logs", "launcher.log")
                while not (log.exists() and "serves the next restart" in log.read_text()):
                    time.sleep(0.05)
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
"""


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "run" / "ledger" / "rank-00000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event.get("name") == name]


@pytest.mark.costly
def test_a_restart_tells_its_parts_and_imports_nothing_again(run, tmp_path):
    result = run(LOOP, options=["--max-restarts", "1"])
    assert result.code == 0, result.err
    assert sorted(line.split("start ")[1] for line in result.out.splitlines() if "start " in line) == [
        "0 0 False", "0 1 False", "1 0 True", "1 1 True",
    ]  # fmt: skip
    started = events(tmp_path, "started")
    assert [event["step"] for event in started] == [1, 3]
    for event in started:
        assert list(event["parts"]) == list(PARTS[1:])
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"], abs=0.01)
    (recovered,) = events(tmp_path, "recovered")
    assert (recovered["rank_died"], recovered["cause"], recovered["step"]) == (1, "killed by SIGKILL", 3)
    assert (recovered["last_step"], recovered["lost_steps"]) == (3, 1)
    assert list(recovered["parts"]) == list(PARTS)
    assert sum(recovered["parts"].values()) == pytest.approx(recovered["seconds"], abs=0.01)
    (resumed,) = events(tmp_path, "resumed")
    assert (resumed["step"], resumed["tier"]) == (2, "memory")
    (death,) = read_run(tmp_path / "run", now=time.time()).deaths
    assert (death["rank"], death["tier"], death["step"], death["lost_steps"]) == (1, "memory", 2, 1)
