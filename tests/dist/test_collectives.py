import pytest

from dtrain.dist.collectives import all_gather_json, all_gather_numbers, broadcast_json, raise_together
from dtrain.dist.control import agree_before_step, post_batch
from dtrain.dist.init import current
from dtrain.errors import ConfigError, PeerError, StepError


def gather() -> list:
    rank = current().rank
    return [
        all_gather_json({"rank": rank, "pad": "é" * rank * 100}),
        all_gather_numbers([rank, 0.5]),
        broadcast_json(["from", rank], src=1, group="background"),
    ]


def test_every_rank_gets_every_ranks_json(ranks):
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
    raise_together(None, where="test")


def test_what_is_not_plain_is_refused():
    with pytest.raises(ConfigError, match="all_gather_json: takes plain data only: .*object is not JSON serializable"):
        all_gather_json({"a": object()})
    with pytest.raises(ConfigError, match="all_gather_json: takes plain data only: Out of range float"):
        all_gather_json(float("nan"))


def gather_bad_data_on_rank_1() -> str:
    try:
        all_gather_json(object() if current().rank == 1 else 1)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_is_not_plain_on_one_rank_raises_on_all(ranks):
    first, second = ranks(2).run(gather_bad_data_on_rank_1)
    assert first.startswith("PeerError: all_gather_json: rank 1 failed: ConfigError: all_gather_json: takes plain data only")
    assert second.startswith("ConfigError: all_gather_json: takes plain data only")


def fail_on_rank_1() -> str:
    error = ValueError("disk\nfull") if current().rank == 1 else None
    try:
        raise_together(error, where="save")
    except (ValueError, PeerError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "no error"


def test_a_failure_of_one_rank_is_raised_on_all(ranks):
    peer = "PeerError: save: rank 1 failed (1 of 3 ranks did): ValueError: disk full"
    assert ranks(3).run(fail_on_rank_1) == [peer, "ValueError: disk\nfull", peer]


def agree(samples_by_rank: list) -> list:
    tally = agree_before_step(
        samples=samples_by_rank[current().rank], tokens=7, microbatches=samples_by_rank[current().rank] // 2, weightless=False
    )
    return [tally.samples, tally.tokens, tally.microbatches, tally.end_of_epoch]


def test_the_step_record_sums_counts_and_takes_the_most_microbatches(ranks):
    assert ranks(3).run(agree, [4, 6, 0]) == [[10, 21, 3, False]] * 3


def agree_error(samples: int, weightless_rank: int, epoch_rank: int) -> str:
    rank = current().rank
    post_batch(epoch_ends=rank == epoch_rank)
    try:
        agree_before_step(samples=samples, tokens=0, microbatches=1, weightless=rank == weightless_rank)
    except StepError as error:
        return str(error)
    finally:
        post_batch()
    return "no error"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, -1, -1), "no rank has a sample"),
        ((1, 1, -1), "an earlier step had weight 0"),
        ((1, -1, 1), "only ranks [1] are at the end of their epoch"),
    ],
)
def test_the_step_record_raises_on_all_ranks_alike(ranks, args, message):
    first, second = ranks(2).run(agree_error, *args)
    assert message in first
    assert first == second
