"""Many launches at the same moment, in the same folder: each has its own port and its own run folder."""

from __future__ import annotations

import pytest

PORTS = """
    import os, sys, time
    folder, k = os.environ["FOLDER"], sys.argv[1]
    if os.environ["RANK"] == "0":
        with open(f"{folder}/port-{k}.partial", "w") as file:
            file.write(os.environ["MASTER_PORT"] + " " + os.environ["DTRAIN_RUN_DIR"])
        os.rename(f"{folder}/port-{k}.partial", f"{folder}/port-{k}")
    while not os.path.exists(folder + "/all-up"):
        time.sleep(0.05)
"""

SUMS = """
    import os, sys
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(sys.argv[1]) * (dist.get_rank() + 1)])
    for _ in range(20):
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    assert total.item() == 2 * float(sys.argv[1]), total
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.costly
@pytest.mark.parametrize("jobs", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_concurrent_launches_do_not_collide(start, jobs):
    started = [start(PORTS, str(k)) for k in range(jobs)]
    seen = [job.wait_for(f"port-{k}")[0].split(" ", 1) for k, job in enumerate(started)]
    (started[0].folder / "all-up").touch()
    results = [job.wait() for job in started]
    assert {(result.code, result.errors) for result in results} == {(0, "")}
    ports, folders = zip(*seen, strict=True)
    assert len(set(ports)) == jobs
    assert len(set(folders)) == jobs


@pytest.mark.costly
@pytest.mark.parametrize("jobs", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_concurrent_training_jobs_stay_separate(start, jobs):
    started = [start(SUMS, str(k + 1)) for k in range(jobs)]
    results = [job.wait() for job in started]
    assert [(result.code, result.errors) for result in results] == [(0, "")] * jobs
