"""How ranks share the cores of a node, and that they do."""

from __future__ import annotations

import os

import pytest

from dtrain.launch import cores


@pytest.mark.parametrize(
    ("usable", "nproc", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 2, 1, 3], 2, [[0, 2], [1, 3]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]]),
        ([4, 7], 2, [[4], [7]]),
        ([4, 7], 5, [[4], [7], [4], [7], [4]]),
        ([3], 1, [[3]]),
    ],
)
def test_ranks_get_neighbouring_cores(usable, nproc, expected):
    assert cores.share_cores(usable, nproc) == expected


def test_cores_of_one_memory_node_are_next_to_each_other(tmp_path):
    for node, cpus in {"node0": "0-1,4-5", "node1": "2-3,6", "node2": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    assert cores._numa_nodes(tmp_path) == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1}


def test_quota_of_the_control_group_counts(monkeypatch):
    monkeypatch.setattr(cores, "core_quota", lambda: 0.5)
    assert cores.core_count() == 0.5
    monkeypatch.setattr(cores, "core_quota", lambda: None)
    assert cores.core_count() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("preload", [["--preload", "json"], ["--no-preload"]], ids=["preloaded", "plain"])
def test_bound_ranks_run_on_their_share(run, preload):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", options=["--bind", *preload])
    assert result.code == 0, result.err
    shares = cores.share_cores(cores.usable_cores(), 2)
    assert sorted(result.out.splitlines()) == [f"[rank {rank}] {sorted(share)}" for rank, share in enumerate(shares)]


def test_ranks_that_are_not_bound_may_run_anywhere(run):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", n=1)
    assert result.out == f"{sorted(os.sched_getaffinity(0))}\n"
