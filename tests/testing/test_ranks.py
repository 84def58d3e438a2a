"""The test tool itself: results, errors and stuck ranks come back, and nothing is left behind."""

import functools
import os
import time

import pytest
import torch.distributed as dist

from dtrain.dist.init import current
from dtrain.errors import ConfigError, RankError
from dtrain.testing import Ranks, run_ranks


def describe(greeting: str) -> dict:
    return {"rank": current().rank, "world": dist.get_world_size(), "said": greeting, "pid": os.getpid()}


def raise_on_rank_1() -> None:
    if current().rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def die_on_rank_1() -> None:
    if current().rank == 1:
        os._exit(7)
    dist.barrier()


def sleep_on_rank_1() -> None:
    if current().rank == 1:
        time.sleep(600)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_by_rank_and_processes_end():
    results = run_ranks(describe, 3, "hello")
    assert [(r["rank"], r["world"], r["said"]) for r in results] == [(rank, 3, "hello") for rank in range(3)]
    assert not any(alive(r["pid"]) for r in results)


def test_one_pool_serves_many_functions():
    with Ranks(2) as ranks:
        pids = [r["pid"] for r in ranks.run(describe, "a")]
        assert [r["pid"] for r in ranks.run(describe, "b")] == pids
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (raise_on_rank_1, "raise_on_rank_1: rank 1 of 2 raised\n.*ValueError: rank one is unhappy"),
        (die_on_rank_1, "die_on_rank_1: rank 1 of 2 died with exit code 7"),
    ],
)
def test_a_failing_rank_is_named_and_the_pool_starts_again(fn, message):
    with Ranks(2) as ranks:
        pids = [r["pid"] for r in ranks.run(describe, "a")]
        with pytest.raises(RankError, match=f"(?s){message}"):
            ranks.run(fn)
        assert not any(alive(pid) for pid in pids)
        assert len(ranks.run(describe, "again")) == 2


def test_a_stuck_rank_is_named_with_its_stack():
    with pytest.raises(RankError, match=r"(?s)sleep_on_rank_1: ranks \[1\] of 2 did not finish.*in sleep_on_rank_1"):
        run_ranks(sleep_on_rank_1, 2, timeout_s=5)


def end_soon() -> None:
    import threading

    threading.Timer(0.2, os._exit, (9,)).start()


def test_a_rank_that_dies_between_two_runs_is_named():
    with Ranks(2) as ranks:
        ranks.run(end_soon)
        for process in ranks._processes:
            process.join(60)
        with pytest.raises(RankError, match=r"describe: rank 0 of 2 died with exit code 9"):
            ranks.run(describe, "a")
        assert len(ranks.run(describe, "again")) == 2


def test_functions_that_other_processes_cannot_find_are_refused():
    def inner() -> None: ...

    for fn in (lambda: None, inner, functools.partial(describe, "a")):
        with pytest.raises(ConfigError, match="run_ranks: needs a function at the top level of a file, got"):
            run_ranks(fn, 2)


def test_needs_a_rank():
    with pytest.raises(ConfigError, match="at least one rank, got world_size=0"):
        Ranks(0)
