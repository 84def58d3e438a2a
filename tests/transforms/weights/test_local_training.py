"""Copies that are made one: what may be saved and resumed, by hand, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import public
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.combinators import between, masked
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.testing.collective_counter import count_collectives
from dtrain.transforms.weights.diloco import diloco
from dtrain.transforms.weights.ema import ema
from dtrain.transforms.weights.local_sgd import local_sgd
from dtrain.transforms.weights.local_training import average_replicas_, join_replicas, split_replicas
from shard.copies import (
    ADAMW,
    MOMENTUM,
    RAGGED,
    averaging,
    begin,
    bits,
    expected,
    largest_difference,
    loss,
    net,
    numbers,
    part,
    simulated,
    small,
    train,
)

TOLERANCE = 1e-12  # float64, a few steps


# What may be saved, and what goes on from there.


def hand_written() -> float:
    """Without transforms: the same by the plain functions."""
    _, state = begin([], "hybrid_shard", MOMENTUM)
    step = compose_step(loss, grad=small)
    state = step.init(state.model, state.optimizer, seed=5)
    while state.step < 5:
        state, _ = step(split_replicas(state), part(state.step, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1))
        if state.crossed(3):
            state = join_replicas(state)
    return largest_difference(numbers(state), numbers(train(*begin([local_sgd(3)], "hybrid_shard", MOMENTUM), 5)))


def test_handwritten_loop_matches_local_sgd(ranks):
    assert ranks(2).run(hand_written) == [0.0, 0.0]


def with_average(where: str) -> Any:
    return [local_sgd(3), ema(0.5)] if where == "inside" else [ema(0.5), local_sgd("3ba")]


def resumed(root: str, first: int, where: str, kind: Any) -> list[bool]:
    """Saved at the step ``first``, joined where that is in the middle of a round: against a run that only joins there."""
    transforms = partial(with_average, where)
    state = join_replicas(train(*begin(transforms(), "hybrid_shard", kind), first))
    save_sharded(root, state)
    step, fresh = begin(transforms(), "hybrid_shard", kind)
    fresh = load_sharded(root, fresh).state
    same = bits(fresh) == bits(state)
    step_on, _ = begin(transforms(), "hybrid_shard", kind)
    return [same, bits(train(step, fresh, 8)) == bits(train(step_on, state, 8))]


@pytest.mark.parametrize("first", [3, 4], ids=["end-of-a-round", "in-the-middle"])
@pytest.mark.parametrize(("where", "kind"), [("inside", MOMENTUM), ("outside", ADAMW)], ids=["inside", "outside"])
def test_checkpoint_of_joined_replicas_resumes_bit_for_bit(ranks, tmp_path, where, kind, first):
    assert ranks(2).run(resumed, str(tmp_path), first, where, kind) == [[True, True]] * 2


def saved_at_a_boundary(root: str) -> bool:
    state = train(*begin([local_sgd(3)], "hybrid_shard", MOMENTUM), 3)
    save_sharded(root, state)
    return state.spec.replica_info is None


def loaded(root: str) -> Any:
    step, state = begin([local_sgd(3)], "hybrid_shard", MOMENTUM)
    state = load_sharded(root, state).state
    found = numbers(state)
    return found, train(step, state, 6).step


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoint_of_two_replicas_resumes_on_a_different_rank_count(ranks, tmp_path, world):
    assert ranks(2).run(saved_at_a_boundary, str(tmp_path)) == [True, True]
    nets, optimizers = simulated(3, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3))
    for found, steps in ranks(world).run(loaded, str(tmp_path)):
        assert largest_difference(found, expected(nets, optimizers, 0)) <= TOLERANCE
        assert steps == 6


def refused_save(root: str, keep: bool, steps: int) -> str:
    state = train(*begin([local_sgd(3, optimizer_state="keep" if keep else "average")], "hybrid_shard", MOMENTUM), steps)
    try:
        save_sharded(root, state)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("keep", "steps"), [(False, 4), (True, 3)], ids=["in-the-middle", "kept"])
def test_save_refuses_replicas_that_differ(ranks, tmp_path, keep, steps):
    for message in ranks(2).run(refused_save, str(tmp_path), keep, steps):
        assert message == (
            f"save_sharded: 2 copies of the model are training apart at step {steps}, so the run has no single state. "
            "Join the copies first: `state = dt.transforms.join_replicas(state)`."
        )
    assert not list(Path(tmp_path).glob("step-*"))


def loaded_over_copies(root: str) -> list[Any]:
    step, state = begin([local_sgd(3)], "hybrid_shard", MOMENTUM)
    save_sharded(root, state := train(step, state, 3))
    state = train(step, state, 4)
    with pytest.raises(ConfigError, match="load_sharded: 2 copies of the model are training apart at step 4"):
        load_sharded(root, state)
    state = load_sharded(root, join_replicas(state)).state
    return [state.step, state.spec.replica_info is None]


def test_load_refuses_replicas_that_differ(ranks, tmp_path):
    assert ranks(2).run(loaded_over_copies, str(tmp_path)) == [[3, True]] * 2


def spent() -> list[bool]:
    state = train(*begin([local_sgd(9)], "hybrid_shard", MOMENTUM), 2)
    one = join_replicas(state)
    with pytest.raises(StaleStateError, match="join_replicas: this state was stepped already"):
        join_replicas(state)
    return [one.spec.replica_info is None, join_replicas(one) is one, one.step == 2]


def test_join_replicas_spends_the_state_except_with_one_replica(ranks):
    assert ranks(2).run(spent) == [[True] * 3] * 2


def with_rows_and_columns() -> list[Any]:
    """All floating-point state of an optimizer that keeps sums over rows and columns, and a vector's in full, after joining."""
    model = shard_model(net(), build_mesh(), strategy="replicate", ignored_params=["**"])
    step = compose_step(loss, [local_sgd(9)])
    state = step.init(model, torch.optim.Adafactor(model.parameters(), lr=0.1, foreach=False))
    state = join_replicas(train(step, state, 2))
    kept = [tensor for content in state.optimizer.state.values() for tensor in content.values()]
    return [[tensor.tolist() for tensor in kept], sum(tensor.ndim > 0 for tensor in kept)]


def test_join_replicas_averages_optimizer_state_of_any_shape(ranks):
    (one, many), (other, _) = ranks(2).run(with_rows_and_columns)
    assert one == other
    assert many >= 6


def ended() -> list[Any]:
    step, state = begin([between(2, 5, local_sgd(3))], "hybrid_shard")
    marks = []
    while state.step < 7:
        state = train(step, state, state.step + 1)
        marks.append(state.spec.replica_info is not None)
    state = join_replicas(state)
    return [marks, numbers(train(step, state, 8))]


def test_between_delays_rounds_and_replicas_differ_until_joined(ranks):
    (marks, one), (_, other) = ranks(2).run(ended)
    assert marks == [False, False, False, True, True, True, True]  # steps 3 to 5 begin a round that nobody ends
    assert one == other


def test_every_function_named_on_the_page_exists():
    page = (Path(__file__).parents[3] / "docs" / "local_training.md").read_text()
    named = public.named_in(page)
    ours = {function.__name__ for function in (local_sgd, diloco, split_replicas, join_replicas)}
    assert {f"dt.transforms.{name}" for name in ours} <= named
    assert public.unknown_in(page) == set()


# What is refused.


def refusals() -> list[str]:
    found = []
    for transforms, strategy, mesh in (
        ([local_sgd(2)], "full_shard", {"dp_replicate": 2}),
        ([local_sgd(2)], "replicate", {"cp": 2}),
        ([masked(local_sgd(2), "first.*")], "hybrid_shard", {"dp_replicate": 2}),
    ):
        model = shard_model(net(), build_mesh(**mesh), strategy=strategy)
        step = compose_step(loss, transforms)
        with pytest.raises(ConfigError) as raised:
            step.init(model, torch.optim.SGD(model.parameters()))
        found.append(str(raised.value))
    return found


def test_models_and_masks_without_replicas_are_refused(ranks):
    assert ranks(2).run(refusals)[0] == [
        "split_replicas: strategy must be 'hybrid_shard' with dp_replicate=2, got 'full_shard', which shards over dp_replicate "
        "too, so there is one replica.",
        "split_replicas: strategy must be 'hybrid_shard' with cp=2, got 'replicate', whose replicas have parts of samples "
        "only.",
        "local_sgd: the parameters must be all parameters of the model, got a part. List local_sgd without masked.",
    ]


def test_average_of_one_replica_is_unchanged():
    tensor = torch.tensor([0.1, 0.2])
    average_replicas_([tensor], None)
    assert tensor.tolist() == torch.tensor([0.1, 0.2]).tolist()


def averaged() -> list[Any]:
    """In buckets of several dtypes, with an empty tensor between them."""
    rank = get_dist_info().rank
    state = split_replicas(begin([], "replicate")[1])
    tensors = [
        torch.full((3,), float(rank)),
        torch.zeros(0),
        torch.full((2, 2), 4.0 * rank).bfloat16(),
        torch.tensor(2.0 + rank),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtrain.transforms.weights.local_training._BUCKET_BYTES", 12)
        with count_collectives() as seen:
            average_replicas_(tensors, state.spec.replica_info)
    return [tensor.tolist() for tensor in tensors] + [[r.dtype for r in seen.records]]


def test_averages_are_bucketed_by_dtype_and_computed_in_float32(ranks):
    expected_values = [[0.5] * 3, [], [[2.0, 2.0], [2.0, 2.0]], 2.5, ["float32"] * 3]
    assert ranks(2).run(averaged) == [expected_values] * 2
