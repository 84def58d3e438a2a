"""Ranks share the cores of a node."""

from __future__ import annotations

import os

import pytest

from dtrain.machine import assign_cores, usable_cores


@pytest.mark.parametrize("preload", [["--preload", "json"], ["--no-preload"]], ids=["preloaded", "plain"])
def test_bound_ranks_run_on_assigned_cores(run, preload):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", options=["--bind", *preload])
    assert result.code == 0, result.err
    shares = assign_cores(usable_cores(), 2)
    assert sorted(result.out.splitlines()) == [f"[rank {rank}] {sorted(share)}" for rank, share in enumerate(shares)]


def test_unbound_ranks_can_run_on_any_core(run):
    result = run("import os; print(sorted(os.sched_getaffinity(0)))", n=1)
    assert result.out == f"{sorted(os.sched_getaffinity(0))}\n"
