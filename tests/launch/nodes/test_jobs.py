"""Whole jobs on several hosts: ``dtrain launch`` in network namespaces, and started by a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hosts.network import ADDRS, Network, network
from hosts.slurm import LONG_S, Cluster, cluster, processes_with

LAUNCH = (sys.executable, "-m", "dtrain", "launch", "-n", "2", "--no-preload", "--grace", "1")
# Ranks that import torch and start again are forks, and a node has one of them.
LAUNCH_TORCH = (sys.executable, "-m", "dtrain", "launch", "--grace", "1", "--max-restarts", "1", "--log-ranks", "all")
UP = "import os, pathlib, time; pathlib.Path('up' + os.environ['RANK']).touch(); time.sleep(1000)"


@dataclass(kw_only=True)
class Job:
    """A launcher on each host; ``folder`` is where all of them run, ``mark`` is in the environment of all that they start."""

    network: Network
    folder: Path
    mark: str
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, place: int, *, nodes: int | str, source: str, options: tuple[str, ...] = (), launch: tuple[str, ...] = LAUNCH
    ) -> None:
        script = self.folder / "script.py"
        script.write_text(source)
        where = ("--nnodes", nodes, "--node-rank", place, "--master-addr", ADDRS[0], "--master-port", 29500)
        command = self.network.on(place, *launch, *where, "--run-dir", f"run{place}", *options, script)
        pipe, mark = subprocess.PIPE, {**os.environ, "JOB_MARK": self.mark}
        self.launchers.append(subprocess.Popen(command, cwd=self.folder, env=mark, stdout=pipe, stderr=pipe, text=True))

    def wait_for_ranks(self, count: int) -> None:
        deadline = time.monotonic() + LONG_S
        while len(list(self.folder.glob("up*"))) < count:
            assert time.monotonic() < deadline
            assert not any(launcher.poll() for launcher in self.launchers)
            time.sleep(0.02)

    def end(self, place: int) -> tuple[int, str]:
        """The exit code of a launcher, and its own lines."""
        _, err = self.launchers[place].communicate(timeout=LONG_S)
        return self.launchers[place].returncode, "\n".join(line for line in err.splitlines() if line.startswith("dtrain: "))

    def processes(self) -> list[int]:
        return processes_with(f"JOB_MARK={self.mark}")


@pytest.fixture(scope="module")
def built() -> Iterator[Network]:
    with network() as built:
        yield built


@pytest.fixture
def job(built: Network, tmp_path: Path) -> Iterator[Job]:
    """At the end of the test nothing of it is left."""
    for place in range(len(ADDRS)):
        built.plug(place, "up")
    job = Job(network=built, folder=tmp_path, mark=uuid.uuid4().hex)
    yield job
    deadline = time.monotonic() + LONG_S / 3
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for launcher in job.launchers:
        launcher.communicate(timeout=LONG_S)
    assert left == []


@pytest.mark.costly
def test_killed_launcher_of_one_host_ends_job_on_other_host(job):
    for place in range(2):
        job.start(place, nodes=2, source=UP)
    job.wait_for_ranks(4)
    job.launchers[1].kill()
    code, said = job.end(0)
    assert code == 1
    assert said.startswith("dtrain: launch: node 1 (host1) is lost: ")


@pytest.mark.costly
def test_ranks_use_network_interface_of_launchers(job):
    source = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
print(total.item(), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
dist.destroy_process_group()
"""
    for place in range(2):
        job.start(place, nodes=2, source=source, options=("--log-ranks", "all"))
    for launcher in job.launchers:
        out, err = launcher.communicate(timeout=LONG_S)
        assert launcher.returncode == 0, err
        assert {line.split("] ")[1] for line in out.splitlines()} == {"4.0 eth0 eth0"}


@pytest.mark.costly
def test_leaders_of_two_hosts_exchange_over_the_network(job):
    source = """
import dtrain as dt
from dtrain.dist.context import current_context
with dt.init_dist(device="cpu") as info:
    plane = current_context().control_plane
    ends = {connection.getpeername()[0] for connection in plane["control"]._connections.values() if connection.family != 1}
    ranks = dt.dist.all_gather_json(info.rank)
    print(plane.layout.node_size, sorted(ends), ranks, dt.dist.reduce_sum(float(info.rank)))
"""
    for place in range(2):
        job.start(place, nodes=2, source=source, options=("--log-ranks", "all"))
    lines = set()
    for launcher in job.launchers:
        out, err = launcher.communicate(timeout=LONG_S)
        assert launcher.returncode == 0, err
        lines |= {line.partition("] ")[2] for line in out.splitlines()}
    rest = "[0, 1, 2, 3] 6.0"
    assert lines == {f"2 [] {rest}", f"2 ['{ADDRS[1]}'] {rest}", f"2 ['{ADDRS[0]}'] {rest}"}


TRAINS = """
import os, pathlib, sys, time
import torch, dtrain as dt

def loss_fn(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=torch.tensor(float(len(batch))))

with dt.init_dist(device="cpu") as dist:
    torch.manual_seed(0)
    model = dt.shard_model(torch.nn.Linear(4, 4), dt.build_mesh(), strategy="full_shard")
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.Adam(model.parameters(), lr=0.1))
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    while state.step < 6:
        if state.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            pathlib.Path("up" + str(dist.rank)).touch()
            time.sleep(1000)
        state, _ = step(state, torch.full((2, 4), 1.0 + dist.rank))
        dt.save_sharded("ckpt", state, keep_last=2)
    print(dist.rank, "ends", [tensor.to_local().tolist() for tensor in model.parameters()])
"""


def lines_of(job: Job) -> list[str]:
    """The output of all ranks. A job that hangs is ended, so that its launchers say how far they came."""
    watchdog = threading.Timer(LONG_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in job.processes()])
    watchdog.start()
    outputs = [launcher.communicate(timeout=2 * LONG_S) for launcher in job.launchers]
    watchdog.cancel()
    assert not any(launcher.returncode for launcher in job.launchers), "\n".join(err for _, err in outputs)
    return sorted(line for out, _ in outputs for line in out.splitlines())


@pytest.mark.costly
@pytest.mark.parametrize("lost", [0, 1])
def test_host_in_the_place_of_a_lost_one_ends_with_the_same_weights(built, job, tmp_path, lost):
    plain = Job(network=built, folder=tmp_path / "plain", mark=job.mark)
    plain.folder.mkdir()
    plain.start(0, nodes=1, source=TRAINS.replace("== 3 and", "< 0 and"), launch=(*LAUNCH_TORCH, "-n", "2"))
    expected = lines_of(plain)
    assert [" ends " in line for line in expected] == [True] * 2
    one_rank = (*LAUNCH_TORCH, "-n", "1")
    for place in range(2):
        job.start(place, nodes=2, source=TRAINS, launch=one_rank)
    job.wait_for_ranks(2)
    killed = job.launchers.pop(lost)
    killed.kill()
    job.start(lost, nodes=2, source=TRAINS, launch=one_rank)
    assert lines_of(job) == expected
    killed.communicate(timeout=LONG_S)


KEEPS = """
import os, pathlib, time
import torch, dtrain as dt

torch.set_default_dtype(torch.float64)
with dt.init_dist(device="cpu") as dist:
    torch.manual_seed(0)
    mesh = dt.build_mesh()
    model = dt.shard_model(torch.nn.Linear(4, 4), mesh, strategy="full_shard")
    loader = dt.build_loader(torch.randn(24, 4), mesh=mesh, global_batch_size=4, seed=0, collate=torch.stack)
    step = dt.compose_step(lambda model, batch: dt.sum_loss(model(batch).square().sum(1)))
    checkpoints = dt.Checkpointer("ckpt", memory_every=1)
    state = step.init(model, torch.optim.Adam(model.parameters(), lr=0.1), loader=loader)
    state = checkpoints.load(state, missing_ok=True)
    begun_at = state.step
    for batch in loader.until(6):
        state, _ = step(state, batch)
        checkpoints.keep(state)
        if state.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            pathlib.Path("up" + str(dist.rank)).touch()
            time.sleep(1000)
    weights = [param.full_tensor().flatten() for param in model.parameters()]
    print("from", begun_at, dist.world_size, *torch.cat(weights).tolist())
"""


def numbers(line: str) -> list[float]:
    return [float(number) for number in line.partition("from ")[2].split()]


@pytest.mark.costly
def test_job_goes_on_smaller_from_the_memory_of_the_host_that_is_left(built, job, tmp_path):
    plain = Job(network=built, folder=tmp_path / "plain", mark=job.mark)
    plain.folder.mkdir()
    plain.start(0, nodes=1, source=KEEPS.replace("== 3 and", "< 0 and"), launch=(*LAUNCH_TORCH, "-n", "2"))
    _, _, *expected = numbers(lines_of(plain)[0])
    for place in range(2):
        job.start(place, nodes="1:2", source=KEEPS, launch=(*LAUNCH_TORCH, "-n", "1", "--replace-timeout", "2"))
    job.wait_for_ranks(2)
    built.plug(1, "down")
    alone = job.launchers.pop()
    (line,) = lines_of(job)
    begun_at, world_size, *weights = numbers(line)
    # The copy of step 3 on the other host may not have been complete. Nothing is on disk.
    assert begun_at in (2, 3)
    assert world_size == 1
    assert weights == pytest.approx(expected, rel=0, abs=1e-12)
    # It waits for the other host, to which it has no link.
    alone.terminate()
    alone.communicate(timeout=LONG_S)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.mark.costly
def test_srun_starts_a_job_on_all_its_nodes(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')), flush=True)")
    step = slurm.srun("-N2", "--ntasks-per-node=1", "-D", tmp_path, *LAUNCH, "--log-ranks", "all", script)
    assert step.returncode == 0, step
    said = sorted(step.stdout.splitlines())
    assert said == ["[rank 0] 0 4 0", "[rank 1] 1 4 0", "[rank 2] 2 4 1", "[rank 3] 3 4 1"]


@pytest.mark.costly
def test_srun_exits_with_the_code_of_the_rank_that_failed(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time; sys.exit(3) if os.environ['RANK'] == '2' else time.sleep(1000)")
    step = slurm.srun("-N2", "--ntasks-per-node=1", "-D", tmp_path, *LAUNCH, script)
    assert step.returncode == 3, step
    assert "rank 2 of 4 failed with exit code 3" in step.stderr


@pytest.mark.costly
def test_scancel_ends_all_ranks(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UP)
    slurm.run("sbatch", "-Q", "-N2", "-D", tmp_path, "-o", "out", "-J", "victim", _batch(tmp_path, script))
    deadline = time.monotonic() + LONG_S
    while len(list(tmp_path.glob("up*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert slurm.run("scancel", "-n", "victim").returncode == 0
    while processes_with("SLURM_JOB_NAME=victim"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in (tmp_path / "out").read_text()


def _batch(folder: Path, script: Path) -> Path:
    batch = folder / "batch.sh"
    batch.write_text(f"#!/bin/bash\nexec srun --ntasks-per-node=1 {' '.join(LAUNCH)} {script}\n")
    return batch
