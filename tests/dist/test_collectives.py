from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

import dtrain.dist.collectives as collectives
from dtrain.dist.batch_info import BatchInfo
from dtrain.dist.collectives import (
    all_gather_json,
    all_gather_numbers,
    broadcast_json,
    gather_json,
    local_rank_zero_first,
    raise_if_any_failed,
)
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info, init_dist
from dtrain.dist.step_sync import ForwardRecord, sync_before_forward
from dtrain.errors import ConfigError, PeerError, StepError
from dtrain.schedules.clock import EpochPosition
from dtrain.testing import count_host_syncs


def gather() -> list:
    rank = get_dist_info().rank
    return [
        all_gather_json({"rank": rank, "pad": "é" * rank * 100}),
        all_gather_numbers([rank, 0.5]),
        broadcast_json(["from", rank], src=1, group="background"),
    ]


def test_all_gather_and_broadcast_return_the_same_on_all_ranks(ranks):
    expected = [
        [{"rank": rank, "pad": "é" * rank * 100} for rank in range(3)],
        [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]],
        ["from", 1],
    ]
    assert ranks(3).run(gather) == [expected] * 3


def test_one_process_needs_no_groups():
    assert all_gather_json({"a": [1, None]}) == [{"a": [1, None]}]
    assert all_gather_numbers([1.5]) == [[1.5]]
    assert broadcast_json("x") == "x"
    assert gather_json({"a": 1}) == [{"a": 1}]
    raise_if_any_failed(None, caller="test")


def test_non_json_data_is_refused():
    with pytest.raises(ConfigError, match=r"all_gather_json: takes plain data only: .*object is not JSON serializable"):
        all_gather_json({"a": object()})
    with pytest.raises(ConfigError, match="all_gather_json: takes plain data only: Out of range float"):
        all_gather_json(float("nan"))


def gather_bad_data_on_rank_1() -> str:
    try:
        all_gather_json(object() if get_dist_info().rank == 1 else 1)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_non_json_data_on_one_rank_raises_on_all_ranks(ranks):
    first, second = ranks(2).run(gather_bad_data_on_rank_1)
    assert first.startswith("PeerError: all_gather_json: rank 1 failed: ConfigError: all_gather_json: takes plain data only")
    assert second.startswith("ConfigError: all_gather_json: takes plain data only")


def gather_on_rank_1() -> list | None:
    rank = get_dist_info().rank
    return gather_json({"rank": rank, "pad": "é" * rank * 100}, dst=1)


def test_gather_json_returns_data_only_on_the_destination_rank(ranks):
    expected = [{"rank": rank, "pad": "é" * rank * 100} for rank in range(3)]
    assert ranks(3).run(gather_on_rank_1) == [None, expected, None]


FROM_RANK_1 = {
    "gather_json": lambda bad: gather_json(bad),
    "broadcast_json": lambda bad: broadcast_json(bad, src=1),
    "all_gather_json": lambda bad: all_gather_json(bad),
}


def too_large_on_rank_1(name: str) -> list:
    collectives.MAX_JSON_BYTES, before = 1000, collectives.MAX_JSON_BYTES
    try:
        FROM_RANK_1[name]("x" * 1000 if get_dist_info().rank == 1 else 1)
        text = "no error"
    except (ConfigError, PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        collectives.MAX_JSON_BYTES = before
    return [text, all_gather_numbers([1.0]) == [[1.0]] * 3]  # the group is still in step


@pytest.mark.parametrize("name", FROM_RANK_1)
def test_oversized_json_on_one_rank_raises_on_all_ranks(ranks, name):
    reason = f"ConfigError: {name}: JSON must have at most 1000 bytes, got 1002. Put the data into a file."
    peer = [f"PeerError: {name}: rank 1 failed: {reason}", True]
    assert ranks(3).run(too_large_on_rank_1, name) == [peer, [reason, True], peer]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_json(1, dst=1), "gather_json: dst must be from 0 to 0 .the ranks., got 1"),
        (lambda: broadcast_json(1, src=-1), "broadcast_json: src must be from 0 to 0 .the ranks., got -1"),
    ],
)
def test_out_of_range_rank_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def records_of_two_lengths() -> list:
    """Buffers are reused: returned values must not change, and records of other lengths must not mix."""
    rank = get_dist_info().rank
    first, other = all_gather_numbers([rank, 1.0]), all_gather_numbers([float("inf")] * 3)
    second = all_gather_numbers([rank, True])
    third = all_gather_numbers([rank, 7.0], group="background")
    return [first, second, third, len(other[1])]


def test_gathered_number_records_do_not_share_buffers(ranks):
    rows = [[[0.0, x], [1.0, x]] for x in (1.0, 1.0, 7.0)]
    assert ranks(2).run(records_of_two_lengths) == [[*rows, 3]] * 2


def syncs_of_a_vote() -> int:
    with count_host_syncs() as seen:
        all_gather_numbers([1.0, 2.0])
    return seen.count


def test_vote_needs_no_host_sync(ranks):
    assert ranks(2).run(syncs_of_a_vote) == [0, 0]


def fail_on_rank_1() -> str:
    error = ValueError("disk\nfull") if get_dist_info().rank == 1 else None
    try:
        raise_if_any_failed(error, caller="save")
    except (ValueError, PeerError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "no error"


def test_failure_on_one_rank_raises_on_all_ranks(ranks):
    peer = "PeerError: save: rank 1 failed (1 of 3 ranks did): ValueError: disk full"
    assert ranks(3).run(fail_on_rank_1) == [peer, "ValueError: disk\nfull", peer]


def agree(samples_by_rank: list) -> list:
    samples = samples_by_rank[get_dist_info().rank]
    tally = sync_before_forward(ForwardRecord(samples=samples, tokens=7, microbatches=samples // 2))
    return [tally.samples, tally.tokens, tally.microbatches, tally.position]


def test_step_record_sums_counts_and_takes_maximum_microbatches(ranks):
    assert ranks(3).run(agree, [4, 6, 0]) == [[10, 21, 3, None]] * 3


def agree_error(samples: int, weightless_rank: int, epoch_rank: int) -> str:
    rank = get_dist_info().rank
    origin = BatchInfo(
        loader=0, begin=EpochPosition(0, 3), end=EpochPosition(1, 0) if rank == epoch_rank else EpochPosition(0, 4)
    )
    try:
        late_failure = -1 if rank == weightless_rank else 0
        record = ForwardRecord(samples=samples, tokens=0, microbatches=1, late_failure=late_failure)
        sync_before_forward(record, batch_info=origin)
    except StepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, -1, -1), "no rank has a sample"),
        ((1, 1, -1), "an earlier step had weight 0"),
        ((1, -1, 1), "only ranks [1] are at the end of their epoch"),
    ],
)
def test_step_record_raises_the_same_error_on_all_ranks(ranks, args, message):
    first, second = ranks(2).run(agree_error, *args)
    assert message in first
    assert first == second


def prepare(folder: str) -> list:
    """Return the files that each rank finds. Ranks 0 and 2 are local rank 0 of two nodes."""
    context = current_context()
    opened = context.info
    context.info = replace(opened, local_rank=opened.rank % 2)
    path = Path(folder)
    try:
        with local_rank_zero_first("prepare") as first:
            names = sorted(file.name for file in path.iterdir())
            if first:
                time.sleep(0.1)
                (path / f"by-{opened.rank}").touch()
        return [first, names if not first else None]
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
