"""local_rank_zero_first: order of the ranks, and failures of the first rank."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.dist.collectives import all_gather_numbers, local_rank_zero_first
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.errors import PeerError


def prepare(folder: str) -> list:
    """Return the files that each rank finds. Ranks 0 and 2 are local rank 0 of two nodes."""
    context = current_context()
    opened = context.info
    context.info = replace(opened, local_rank=opened.rank % 2)
    path = Path(folder)
    try:
        with local_rank_zero_first("prepare") as first:
            found = sorted(file.name for file in path.iterdir())
            if first:
                time.sleep(0.1)
                (path / f"by-{opened.rank}").touch()
        return [first, found if not first else None]
    finally:
        context.info = opened


def test_local_rank_zero_of_each_node_runs_first(ranks, tmp_path):
    answers = ranks(4).run(prepare, str(tmp_path))
    others = [False, ["by-0", "by-2"]]
    assert answers == [[True, None], others, [True, None], others]


ERRORS = {"ValueError": ValueError("disk\nfull"), "KeyboardInterrupt": KeyboardInterrupt(), "SystemExit": SystemExit(3)}


def fail_first(kind: str) -> list:
    entered, text = False, "no error"
    try:
        with local_rank_zero_first("prepare") as first:
            entered = True
            if first:
                raise ERRORS[kind]
    except BaseException as error:
        if get_dist_info().rank == 0 and error is not ERRORS[kind]:
            raise
        text = f"{type(error).__name__}: {error}"
    return [entered, text, all_gather_numbers([1.0]) == [[1.0]] * 3]  # the group is still in step


@pytest.mark.parametrize(("kind", "report"), [("ValueError", "disk full"), ("KeyboardInterrupt", ""), ("SystemExit", "3")])
def test_failure_of_the_first_rank_raises_on_the_other_ranks_before_the_block(ranks, kind, report):
    first, *others = ranks(3).run(fail_first, kind)
    assert first[0] is True
    assert first[1].startswith(kind)
    for entered, text, in_step in others:
        assert (entered, in_step) == (False, True)
        assert text == f"PeerError: prepare: rank 0, which goes first on its node, failed: {kind}: {report}"


def test_kill_of_the_first_rank_raises_on_the_other_ranks(forked, tmp_path):
    opened = tmp_path / "opened"

    def body(rank: int) -> None:
        with init_dist(device="cpu"):
            if rank == 1:
                opened.touch()
            with local_rank_zero_first("prepare"):
                # Rank 1 has left init_dist before rank 0 ends.
                while not opened.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    (text,) = forked.run(body, 2, results_of=[1]).values()
    assert text.startswith("DistError: prepare: ranks [0] of 2 did not arrive"), text


def test_first_rank_error_is_raised_when_other_ranks_died(forked):
    def body(rank: int) -> str:
        try:
            with init_dist(device="cpu"):
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                with local_rank_zero_first("prepare"):
                    raise ValueError("mine")
        except ValueError as error:
            return f"{error}; {error.__notes__[0]}"
        return "no error"

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith(
        "mine; prepare: could not report the error to the other ranks: prepare: ranks [1] of 2 did not arrive"
    ), text


def fail_later() -> str:
    try:
        with local_rank_zero_first("prepare") as first:
            if not first:
                raise ValueError("mine")
    except ValueError as error:
        return str(error)
    return "no error"


def test_error_on_a_later_rank_is_not_propagated(ranks):
    assert ranks(2).run(fail_later) == ["no error", "mine"]


def test_single_process_runs_as_the_first_rank():
    with local_rank_zero_first() as first:
        assert first
    with pytest.raises(ZeroDivisionError), local_rank_zero_first():
        _ = 1 / 0
    assert issubclass(PeerError, RuntimeError)
