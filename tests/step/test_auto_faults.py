"""Memory runs out on one rank, at every point of a step: no rank hangs, and the step equals one begun with the final size."""

from __future__ import annotations

import pytest

from step.abandoned import BUCKETS, STRATEGIES, compare

# The place of the fault, and the number of the call: two microbatches have two forwards, two backwards, and so on.
FORWARD, RECOMPUTED, INSIDE = "forward", "recomputed", "inside_backward"
POINTS = {
    "first-forward": (FORWARD, 1),
    "inside-the-first-forward": (FORWARD, 5),
    "second-forward": (FORWARD, 12),
    "first-backward": ("backward", 1),
    "second-backward": ("backward", 2),
    "inside-the-first-backward": (INSIDE, 1),
    "inside-the-second-backward": (INSIDE, 4),
    "recomputation-in-the-first-backward": (RECOMPUTED, 3),
    "recomputation-in-the-second-backward": (RECOMPUTED, 8),
    "first-reduction": ("reduce", 1),
    "last-reduction": ("reduce", 3),
    "after-the-last-backward": ("dtrain.step.gradient_run._check_reduction_memory", 1),
}
GATHERED = {"first-gather": ("gather", 1), "later-gather": ("gather", 4)}
QUICK = ("inside-the-first-forward", "recomputation-in-the-second-backward", "last-reduction", "later-gather")


def points(strategy: str) -> dict[str, tuple[str, int]]:
    # Nothing is gathered where nothing is cut, and no more than once a step where it is kept.
    if strategy == "replicate":
        # Each parameter is a bucket here, and the last one of a step is not reduced by FSDP2.
        return {**POINTS, "first-reduction": ("reduce_bucket", 1), "last-reduction": ("reduce_bucket", BUCKETS)}
    gathered = {"shard_grad_op": {"first-gather": ("gather", 1), "later-gather": ("gather", 3)}}
    return {**POINTS, **gathered.get(strategy, GATHERED)}


def check(ranks, world_size: int, strategy: str, name: str, rank: int, when: int) -> None:
    point, call = points(strategy)[name]
    results = ranks(world_size).run(compare, strategy, point, call, rank, when)
    assert results == [{"updates": 3, "sizes": [4] * when + [2] * (3 - when), "equal": True}] * world_size


IN_FIRST = {("full_shard", "inside-the-first-forward"), ("full_shard", "last-reduction")}
IN_THIRD = {
    ("full_shard", "later-gather"),
    ("full_shard", "recomputation-in-the-second-backward"),
    ("shard_grad_op", "later-gather"),
    ("shard_grad_op", "recomputation-in-the-second-backward"),
    ("hybrid_shard", "inside-the-first-forward"),
    ("hybrid_shard", "last-reduction"),
    ("replicate", "inside-the-first-forward"),
    ("replicate", "last-reduction"),
}


# The first step warns before each collective, the third step has recorded them. Each strategy and each point is quick in one.
@pytest.mark.parametrize(
    ("strategy", "name", "when"),
    [
        pytest.param(s, name, when, marks=() if (s, name) in (IN_THIRD if when else IN_FIRST) else pytest.mark.slow)
        for s in STRATEGIES
        for name in QUICK
        if name in points(s)
        for when in (0, 2)
    ],
)
def test_oom_on_one_rank_recovers_on_all_ranks(ranks, strategy, name, when):
    check(ranks, 4 if strategy == "hybrid_shard" else 2, strategy, name, rank=1, when=when)


@pytest.mark.slow
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("strategy", "name"), [(s, name) for s in STRATEGIES for name in points(s)])
def test_oom_at_every_point_on_every_rank_recovers(ranks, strategy, name, world_size, when):
    if strategy == "hybrid_shard" and world_size == 2:
        world_size = 4
    for rank in range(world_size):
        check(ranks, world_size, strategy, name, rank, when)


@pytest.mark.parametrize("name", ["inside-the-first-forward", "recomputation-in-the-second-backward"])
def test_oom_in_one_unsharded_process_is_retried(ranks, name):
    point, call = POINTS[name]
    (result,) = ranks(1).run(compare, "none", point, call, 0, 1)
    assert result == {"updates": 3, "sizes": [4, 2, 2], "equal": True}
