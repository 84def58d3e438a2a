"""A job that a real Slurm starts. Skipped without Slurm; the skip has the reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from hosts import task
from hosts.slurm import LONG_S, Cluster, cluster

TASK = (sys.executable, task.__file__)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.mark.costly
def test_launchers_on_all_nodes_of_step_join(slurm):
    step = slurm.srun("-N2", "--ntasks-per-node=1", "--label", *TASK)
    assert step.returncode == 0, step
    lines = sorted(line for line in step.stdout.splitlines() if "range" in line)
    assert lines == ["0: range(0, 2) 4 run of node 0", "1: range(2, 4) 4 run of node 0"]


@pytest.mark.costly
def test_two_steps_of_one_job_stay_separate(slurm):
    both = f"srun -N2 -n2 --overlap {TASK[0]} {TASK[1]} & srun -N2 -n2 --overlap {TASK[0]} {TASK[1]}; wait $!"
    script = slurm.folder / "both.sh"
    script.write_text(f"#!/bin/bash\n{both}\n")
    script.chmod(0o755)
    step = slurm.run("salloc", "-Q", "-N2", script)
    assert step.returncode == 0, step
    assert step.stdout.count("range(2, 4) 4 run of node 0") == 2


def test_launcher_per_rank_is_refused_with_one_line(slurm):
    step = slurm.srun("-N1", "-n3", *TASK)
    assert step.returncode != 0
    said = {line for line in step.stderr.splitlines() if line.startswith("launch: ")}
    assert said == {
        "launch: srun started 3 tasks on 1 node. Start one launcher per node, with srun --ntasks-per-node=1 --ntasks=1. "
        "Or pass --nnodes 1 to run each on its own."
    }


def test_step_with_one_task_is_single_node(slurm):
    assert slurm.srun("-N1", "-n1", *TASK).stdout == "one node\n"


def test_batch_script_outside_step_is_single_node(slurm):
    out = slurm.folder / "batch.out"
    script = slurm.folder / "batch.sh"
    script.write_text(f"#!/bin/bash\n{TASK[0]} {TASK[1]}\n")
    assert slurm.run("sbatch", "-Q", "-N2", "-o", out, script).returncode == 0
    deadline = time.monotonic() + LONG_S
    while not out.exists() or not out.read_text():  # --wait asks every ten seconds only
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert out.read_text() == "one node\n"
