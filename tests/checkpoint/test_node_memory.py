"""Which step in the memory of several nodes is complete, and which files move where."""

from __future__ import annotations

from dtrain.checkpoint.node_memory import FileCopy, Holding, SpreadStep, choose_spread_step, plan_transfers

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
