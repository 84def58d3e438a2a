"""Find the newest complete step in the memory of several nodes, and plan which files move where."""

from __future__ import annotations

import pytest

from dtrain.checkpoint.node_memory import (
    FileCopy,
    Holding,
    SpreadStep,
    choose_spread_step,
    plan_ring_copies,
    plan_transfers,
)

SIZES = {"manifest.json": 1, "index.json": 2, **{f"rank-{rank:05d}.safetensors": 10 + rank for rank in range(3)}}


def holding(step: int, *files: str, serial: int = 0, digest: str = "a") -> Holding:
    names = [f"rank-{file}.safetensors" if file.isdigit() else f"{file}.json" for file in files]
    return Holding(step=step, serial=serial or step, run_id="run", digest=digest, sizes=SIZES, files=names)


OLD = [holding(4, "manifest", "index", "00000", "00002"), holding(4, "manifest", "index", "00001", "00000")]


def test_newest_step_with_each_file_on_some_node_is_chosen():
    new = [[OLD[0], holding(5, "manifest", "index", "00000")], [OLD[1], holding(5, "manifest", "index", "00001")], []]
    assert choose_spread_step(new).step == 4
    new[2] = [holding(5, "manifest", "index", "00002")]
    assert choose_spread_step(new).step == 5
    assert choose_spread_step([[], [OLD[1]], []]) is None


def test_steps_with_other_contents_do_not_complete_each_other():
    parts = [
        [holding(5, "manifest", "index", "00000", "00001", digest="a")],
        [holding(5, "manifest", "index", "00002", digest="b")],
    ]
    assert choose_spread_step(parts) is None


def test_last_commit_comes_before_a_higher_step_of_an_abandoned_lineage():
    whole = ("manifest", "index", "00000", "00001", "00002")
    chosen = choose_spread_step([[holding(9, *whole, serial=3), holding(7, *whole, serial=4)]])
    assert chosen is not None
    assert chosen.step == 7


def test_a_node_gets_the_files_that_it_lacks_from_the_first_node_with_them():
    step = SpreadStep(step=4, run_id="run", sizes=SIZES, files=[{"index.json"}, {"index.json", "manifest.json"}, set()])
    assert plan_transfers(step, [["index.json", "manifest.json"], [], ["manifest.json", "index.json"]]) == [
        FileCopy(0, 2, "index.json", 2),
        FileCopy(1, 0, "manifest.json", 1),
        FileCopy(1, 2, "manifest.json", 1),
    ]


def test_three_nodes_copy_their_files_around_the_ring():
    files = {f"rank-{rank:05d}.{kind}": 10 + rank for rank in range(3) for kind in ("json", "safetensors")}
    copies = plan_ring_copies(files, [0, 1, 2])
    assert [(copy.source, copy.target) for copy in copies] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 0), (2, 0)]


@pytest.mark.parametrize("node_of", [[0, 1], [0, 1, 2], [0, 0, 1, 2, 2], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]])
def test_files_of_any_lost_node_are_on_another_one(node_of):
    sizes = {"manifest.json": 1, "index.json": 2}
    own = {f"rank-{rank:05d}.safetensors": 10 for rank in range(len(node_of))}
    held = [{name for name in own if node_of[int(name[5:10])] == node} | set(sizes) for node in range(node_of[-1] + 1)]
    for copy in plan_ring_copies(own, node_of):
        assert copy.name in held[copy.source]
        held[copy.target].add(copy.name)
    steps = [Holding(step=4, serial=4, run_id="run", digest="a", sizes=sizes | own, files=sorted(names)) for names in held]
    for lost in range(len(held)):
        chosen = choose_spread_step([[] if node == lost else [step] for node, step in enumerate(steps)])
        assert chosen is not None
        # Each node that is left reads the files that it lacks.
        for copy in plan_transfers(chosen, [own] * len(held)):
            assert copy.name in held[copy.source]
            assert copy.source != lost
