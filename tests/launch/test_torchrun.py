"""A training loop under torch's own agents: two nodes on this machine, one of which is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LONG_S = 120
STEPS = 400
LOOP = f"""
import pathlib, time
import torch
import dtrain as dt

def loss_fn(model, batch):
    return dt.sum_loss(model(batch).square())

with dt.init_dist() as dist:
    mesh = dt.build_mesh()
    model = dt.materialize(dt.shard_model(torch.nn.Linear(2, 1), mesh), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dt.build_loader(torch.ones(2 * {STEPS}, 2), mesh=mesh, global_batch_size=2, seed=0)
    step = dt.compose_step(loss_fn, [])
    state = step.init(model, optimizer, loader=loader)
    checkpoints = dt.Checkpointer("checkpoints", memory_every=1, keep_last=2)
    state = checkpoints.load(state, missing_ok=True)
    began = state.step
    for batch in loader.until("1ep"):
        state, metrics = step(state, batch)
        assert not checkpoints.keep(state)  # memory that outlives ranks is the launcher's
        if state.step % 10 == 0:
            checkpoints.save(state)
        pathlib.Path(f"world-{{dist.world_size}}").write_text(str(state.step))
        if dist.world_size == 2:
            time.sleep(0.1)  # the node is killed long before the end
    print("done", dist.world_size, began, state.step)
"""


def processes_of(agent: subprocess.Popen[str]) -> list[int]:
    """Return the agent and all processes below it, which have sessions of their own."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    pids = [agent.pid] if agent.pid in parents else []
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


@pytest.mark.costly
def test_loop_continues_from_its_checkpoint_with_one_node_fewer(tmp_path, port):
    (tmp_path / "loop.py").write_text(textwrap.dedent(LOOP))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "3"]
    command += ["--rdzv-conf", "last_call_timeout=1,is_host={}", "loop.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # torch's agents leave a folder behind
    agents = []
    try:
        for is_host in ("true", "false"):
            words = [word.format(is_host) for word in command]
            pipe = subprocess.PIPE
            agents.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True))
        both, deadline = tmp_path / "world-2", time.monotonic() + LONG_S
        while not both.exists() or int(both.read_text() or 0) < 12:
            assert time.monotonic() < deadline
            assert agents[0].poll() is None
            time.sleep(0.05)
        for pid in processes_of(agents[1]):
            os.kill(pid, signal.SIGKILL)
        out, err = agents[0].communicate(timeout=LONG_S)
    finally:
        for agent in agents:
            for pid in processes_of(agent):
                os.kill(pid, signal.SIGKILL)
            agent.communicate(timeout=LONG_S)
    assert agents[0].returncode == 0, err
    (_, world_size, began, last) = out.split()
    assert (int(world_size), int(last)) == (1, STEPS)
    assert 10 <= int(began) < STEPS
