"""Errors of failed collectives name the missing ranks: late, stopped, killed, or gone after an error."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dtrain.dist import incident
from dtrain.dist.collectives import (
    all_gather_json,
    all_gather_numbers,
    broadcast_json,
    gather_json,
    local_rank_zero_first,
    raise_if_any_failed,
    reduce_max,
    reduce_mean,
    reduce_sum,
)
from dtrain.dist.incident import call_with_timeout, is_collective_error, report_missing_ranks
from dtrain.dist.incident_protocol import ArrivalReport, format_missing_ranks
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.dist.ragged import all_gather_with_grad
from dtrain.errors import DistError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

TIMEOUT_S = 2.0
NEVER_S = 600
NODES = {0: range(2), 1: range(2, 4)}


def in_turn() -> None:
    with local_rank_zero_first("prepare"):
        pass


def sharded_forward() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=build_mesh())
    with report_missing_ranks("step 7"):
        model(torch.ones(1, 4))


def squared(model: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=model(batch).square().sum(), weight=len(batch))


CALLS = {
    "all_gather_json": lambda: all_gather_json(1),
    "gather_json": lambda: gather_json(1),
    "broadcast_json": lambda: broadcast_json(1, src=1),
    "all_gather_numbers": lambda: all_gather_numbers([1.0]),
    "save": lambda: raise_if_any_failed(None, caller="save"),
    "reduce_sum": lambda: reduce_sum(torch.ones(3)),
    "reduce_max": lambda: reduce_max(torch.ones(3), dst=1),
    "reduce_mean": lambda: reduce_mean(1.0),
    "reduce_metrics": lambda: reduce_metrics({"loss": (torch.ones(()), torch.ones(()))}),
    "all_gather_with_grad": lambda: all_gather_with_grad(torch.ones(1)),
    "prepare": in_turn,
    "step 7": sharded_forward,
    "leaving init_dist": lambda: None,
}


@pytest.mark.parametrize("where", CALLS)
def test_dead_rank_is_named_by_every_collective(forked, where):
    def body(rank: int) -> str:
        with init_dist(device="cpu", timeout_s=NEVER_S):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            CALLS[where]()
        return "no error"

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith(f"DistError: {where}: ranks [1] of 2 did not arrive, connection lost after"), text
    assert "\n" not in text


def vote(rank: int, victim: int, fate) -> list[float]:
    """A first vote that succeeds, and one in which ``victim`` meets its ``fate`` before it comes."""
    with init_dist(device="cpu", timeout_s=TIMEOUT_S):
        all_gather_numbers([1.0])
        if rank == victim:
            fate()
        return all_gather_numbers([2.0], caller="vote")[0]


def test_sleeping_rank_is_named(forked):
    answers = forked.run(lambda rank: vote(rank, 1, lambda: time.sleep(NEVER_S)), 3, results_of=[0, 2])
    for text in answers.values():
        assert text.startswith("DistError: vote: ranks [1] of 3 did not arrive within 2"), text
        assert text.endswith("or raise timeout_s of init_dist if they are only slow.")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_missing_store_server_rank_0_is_named(forked, number):
    answers = forked.run(lambda rank: vote(rank, 0, lambda: os.kill(os.getpid(), number)), 3, results_of=[1, 2])
    for text in answers.values():
        assert text.startswith("DistError: vote: ranks [0] of 3 did not arrive"), text
        assert "this rank serves the store" in text


def test_two_stopped_ranks_are_both_named(forked):
    def body(rank: int) -> list[float]:
        return vote(rank, max(1, rank), lambda: os.kill(os.getpid(), signal.SIGSTOP))

    (text,) = forked.run(body, 3, results_of=[0]).values()
    assert text.startswith("DistError: vote: ranks [1, 2] of 3 did not arrive within 2"), text


def test_late_rank_is_named_on_all_ranks_before_it_comes(forked, monkeypatch):
    monkeypatch.setattr(incident, "GRACE_S", 20.0)
    answers = forked.run(lambda rank: vote(rank, 2, lambda: time.sleep(TIMEOUT_S + 1)), 3, results_of=[0, 1, 2])
    for text in answers.values():
        assert text.startswith("DistError: vote: ranks [2] of 3 did not arrive within 2"), text


def test_error_of_a_departed_rank_is_included_in_peer_errors(forked):
    def fail() -> None:
        raise ValueError("disk\nfull")

    first, second, third = forked.run(lambda rank: vote(rank, 1, fail), 3, results_of=[0, 1, 2]).values()
    assert second == "ValueError: disk\nfull"
    for text in (first, third):
        assert text.startswith("DistError: vote: ranks [1] of 3 did not arrive, connection lost"), text
        assert ". Rank 1 left with ValueError: disk full. Look" in text


def test_missing_rank_in_a_user_group_is_named(forked):
    def body(rank: int) -> object:
        dist.init_process_group("gloo")
        return vote(rank, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith("DistError: vote: ranks [1] of 2 did not arrive, connection lost"), text


def test_rank_death_during_group_setup_is_named(forked, monkeypatch):
    real = dist.init_process_group

    def body(rank: int) -> str:
        if rank == 1:
            monkeypatch.setattr(dist, "init_process_group", lambda **_: os.kill(os.getpid(), signal.SIGKILL))
        with init_dist(device="cpu", timeout_s=TIMEOUT_S):
            return "opened"

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith("DistError: init_dist: ranks [1] of 2 did not arrive"), text
    assert dist.init_process_group is real


def errors_of_rank_1() -> list:
    """Return local errors that a block raises on rank 1. No error may name the other rank."""
    if get_dist_info().rank == 0:
        for _ in range(5):
            with report_missing_ranks("step"):
                pass
        return []
    seen: list = []
    for error in (RuntimeError("mine"), ValueError("bad"), DistError("ours"), KeyError("x")):
        try:
            with report_missing_ranks("step"):
                raise error
        except (RuntimeError, ValueError, KeyError) as caught:
            seen.append([type(caught).__name__, caught is error])
    try:
        with report_missing_ranks("step"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    except RuntimeError as caught:
        seen.append(str(caught)[:30])
    return seen


def test_errors_raised_in_the_block_are_unchanged(ranks):
    own = [[name, True] for name in ("RuntimeError", "ValueError", "DistError", "KeyError")]
    assert ranks(2).run(errors_of_rank_1) == [[], [*own, "mat1 and mat2 shapes cannot be"]]


def same_mistake() -> str:
    try:
        reduce_sum(torch.ones(2, dtype=torch.int16))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_identical_error_on_all_ranks_names_no_missing_rank(ranks):
    assert ranks(2).run(same_mistake) == ["RuntimeError: Invalid scalar type"] * 2


def test_single_process_errors_are_unchanged():
    with pytest.raises(ZeroDivisionError), report_missing_ranks("step"):
        _ = 1 / 0


def test_collective_errors_are_recognized_by_class_and_module():
    assert is_collective_error(dist.DistNetworkError("x"))
    assert not is_collective_error(RuntimeError("Connection closed by peer"))
    assert not is_collective_error(DistError("ours"))
    with pytest.raises(ValueError, match="Default process group") as caught:
        dist.all_reduce(torch.ones(1))
    assert not is_collective_error(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"waited_s": 9.5, "arrivals": ArrivalReport(missing=[1, 3], timed_out=True)},
            "w: ranks [1, 3] of 4 did not arrive within 9.5 s. Look at their output, or raise",
        ),
        (
            {"waited_s": 0.2, "arrivals": ArrivalReport(missing=[1, 2, 3], notes={3: "E: x"})},
            "w: ranks [1, 2, 3] of 4 did not arrive, connection lost after 0.2 s. Rank 3 left",
        ),
        (
            {"waited_s": 0.0, "arrivals": ArrivalReport(late=[3], timed_out=True)},
            "w: ranks [3] of 4 came too late. The first rank gave up after 10 s. Look",
        ),
        (
            {"waited_s": 10.0, "arrivals": ArrivalReport(timed_out=True)},
            "w: all 4 ranks arrived, but no data passed between them for 10 s. Check",
        ),
        (
            {"waited_s": 10.0, "arrivals": ArrivalReport(timed_out=True, callers={0: "w", 1: "leaving init_dist"})},
            "w: rank 1 was at 'leaving init_dist' instead, and the ranks waited for each other for 10 s. Let all ranks take",
        ),
        ({"waited_s": 10.0, "arrivals": None}, "w: ranks [0] of 4 did not arrive within 10 s (this rank serves the store"),
        (
            {"waited_s": 10.0, "arrivals": None, "server_rank": None},
            "w: some ranks did not arrive within 10 s. The rendezvous store",
        ),
        ({"waited_s": 0.1, "arrivals": ArrivalReport()}, None),
        (
            {"waited_s": 0.2, "arrivals": ArrivalReport(missing=[2, 3], silent=[2, 3]), "nodes": NODES},
            "w: node 1 is gone (ranks 2, 3): its ranks of 4 did not arrive, connection lost after 0.2 s. Look",
        ),
        (
            {"waited_s": 0.2, "arrivals": ArrivalReport(missing=[0, 2, 3], silent=[2, 3], notes={0: "E: x"}), "nodes": NODES},
            "w: node 1 is gone (ranks 2, 3), and ranks [0] of 4 did not arrive, connection lost after 0.2 s. Rank 0 left",
        ),
        (
            {"waited_s": 0.2, "arrivals": ArrivalReport(missing=[2, 3], silent=[3], notes={2: "E: x"}), "nodes": NODES},
            "w: ranks [2, 3] of 4 did not arrive, connection lost",
        ),
        (
            {"waited_s": 4.0, "arrivals": ArrivalReport(pairs=[(1, 2)])},
            "w: the connection between ranks 1 and 2 of 4 was lost after 4 s, and all ranks live. Check the network",
        ),
        (
            {"waited_s": 4.0, "arrivals": ArrivalReport(broken={2: "RuntimeError: no."})},
            "w: a collective failed on ranks [2] of 4, and all ranks live. Rank 2: RuntimeError: no.",
        ),
    ],
)
def test_missing_rank_message_depends_on_store_contents(given, text):
    line = format_missing_ranks("w", world_size=4, timeout_s=10, **given)
    assert line is None if text is None else line.startswith(text)


def test_call_with_timeout_raises_when_the_call_hangs():
    with pytest.raises(DistError, match="no answer"):
        call_with_timeout(lambda: time.sleep(NEVER_S), timeout_s=0.05, message="no answer")
    with pytest.raises(KeyError, match="x"):
        call_with_timeout(lambda: {}["x"], timeout_s=NEVER_S, message="no answer")
    assert call_with_timeout(lambda: 3, timeout_s=NEVER_S, message="no answer") == 3


@pytest.mark.parametrize("where", ["before forward", "before backward"])
def test_rank_death_during_a_step_is_named(forked, where):
    def body(rank: int) -> str:
        def loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
            if rank == 1 and where == "before forward":
                os.kill(os.getpid(), signal.SIGKILL)
            losses = squared(model, batch)
            if rank == 1 and where == "before backward":
                os.kill(os.getpid(), signal.SIGKILL)
            return losses

        with init_dist(device="cpu", timeout_s=NEVER_S):
            model = shard_model(nn.Linear(4, 4), build_mesh())
            state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
            microbatch_step(state, torch.ones(2, 4), loss_fn=loss)
        return "no error"

    (text,) = forked.run(body, 2, results_of=[0]).values()
    assert text.startswith("DistError: microbatch_step: ranks [1] of 2 did not arrive, connection lost after"), text
