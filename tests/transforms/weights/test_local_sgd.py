"""Replicas that train apart: their computations, and their messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import public
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.data.batch import batch_spec
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step, optimizer_in_backward
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients
from dtrain.testing.counters import count_collectives, count_host_syncs
from dtrain.transforms.combinators import between, masked
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.weights.averaging import ema
from dtrain.transforms.weights.local_sgd import average_replicas_, diloco, join_replicas, local_sgd, split_replicas
from dtrain.typing import LossSum
from shard.copies import (
    ADAMW,
    MOMENTUM,
    RAGGED,
    SGD,
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
from shard.models import as_in_a_step

STRATEGIES = ("hybrid_shard", "replicate")
TOLERANCE = 1e-12  # float64, a few steps
EVEN = (4, 4)


# Computations of replicas.


def trained(transforms: Any, strategy: str, kind: Any, steps: int, sizes: tuple[int, ...] = (), **options: Any) -> Any:
    return numbers(train(*begin(transforms, strategy, kind, **options), steps, sizes))


def every_step(strategy: str) -> float:
    one, other = trained([], strategy, SGD, 4, EVEN), trained([local_sgd(1)], strategy, SGD, 4, EVEN)
    return largest_difference(one, other)


def test_local_sgd_with_one_replica_equals_plain_sgd_exactly():
    def run(transforms: list[Any]) -> list[Any]:
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        step = compose_step(lambda model, x: LossSum(total=model(x).square().sum(), weight=len(x)), transforms)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(5):
            state, _ = step(state, torch.tensor([[1.0, 2.0, 3.0], [0.1, -0.2, 0.3]]))
        return [param.tolist() for param in state.params.values()]

    assert run([local_sgd(2)]) == run([])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaging_after_every_step_of_sgd_equals_data_parallel_training(ranks, strategy):
    assert max(ranks(2).run(every_step, strategy)) <= TOLERANCE


CASES = {
    "sgd-hybrid": ("hybrid_shard", SGD, 7, {}),
    "momentum-replicate": ("replicate", MOMENTUM, 6, {}),
    "adamw-hybrid": ("hybrid_shard", ADAMW, 7, {"accumulate": "sharded"}),
    "left-out-hybrid": ("hybrid_shard", MOMENTUM, 5, {"ignored_params": ["last.weight"]}),
}


def apart(strategy: str, kind: Any, steps: int, options: dict[str, Any]) -> Any:
    return trained([local_sgd(3)], strategy, kind, steps, **options)


@pytest.mark.parametrize(("strategy", "kind", "steps", "options"), CASES.values(), ids=CASES)
def test_two_replicas_with_ragged_batches_match_two_reference_models(ranks, strategy, kind, steps, options):
    nets, optimizers = simulated(steps, 2, kind=kind, sizes=RAGGED[2], end_of_round=averaging(3))
    for place, values in enumerate(ranks(2).run(apart, strategy, kind, steps, options)):
        assert largest_difference(values, expected(nets, optimizers, place)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_two_replicas_of_two_ranks_match_two_reference_models(ranks, kind):
    nets, optimizers = simulated(5, 2, kind=kind, sizes=RAGGED[4], end_of_round=averaging(3))
    for rank, values in enumerate(ranks(4).run(apart, "hybrid_shard", kind, 5, {})):
        assert largest_difference(values, expected(nets, optimizers, rank // 2)) <= TOLERANCE


def tensor_parallel(strategy: str) -> Any:
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    step, state = begin([local_sgd(3)], strategy, MOMENTUM, tp=2, tp_plan=plan)
    while state.step < 5:
        state, _ = step(state, part(state.step, RAGGED[2], get_dist_info().rank // 2, get_dist_info().rank // 2 + 1))
    return numbers(state)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replicas_with_tensor_sharded_layers_match_the_reference(ranks, strategy):
    nets, optimizers = simulated(5, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3))
    for rank, values in enumerate(ranks(4).run(tensor_parallel, strategy)):
        assert largest_difference(values, expected(nets, optimizers, rank // 2)) <= TOLERANCE


def kept() -> tuple[Any, bool]:
    state = train(*begin([local_sgd(3, optimizer_state="keep")], "hybrid_shard", MOMENTUM), 6)
    return numbers(state), state.spec.replica_info is not None


def test_optimizer_state_without_averaging_stays_local_to_each_replica(ranks):
    nets, optimizers = simulated(6, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3, moments=False))
    for place, (values, still) in enumerate(ranks(2).run(kept)):
        assert still
        assert largest_difference(values, expected(nets, optimizers, place)) <= TOLERANCE


def clipped() -> list[float]:
    step, state = begin([local_sgd(9), clip_by_norm(0.01)], "hybrid_shard")
    _, metrics = step(state, part(0, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1))
    return [metrics["grad_norm"].total.item(), reduce_metrics(metrics)["loss"]]


def test_clipping_uses_the_replica_norm_and_metrics_cover_all_replicas(ranks):
    losses, norms = [], []
    for place in range(2):
        model, batch = net(), part(0, RAGGED[2], place, place + 1)
        mean = (model(batch["x"]) - batch["y"]).square().mean()
        mean.backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        losses.append(mean.item() * RAGGED[2][place] / 8)
    results = ranks(2).run(clipped)
    assert [norm for norm, _ in results] == pytest.approx(norms, rel=1e-12)
    assert [value for _, value in results] == pytest.approx([sum(losses)] * 2, rel=1e-12)


def in_backward() -> float:
    step = optimizer_in_backward(loss, [local_sgd(3)], batch_spec=batch_spec(weight=lambda batch: len(batch["x"])))
    _, state = begin([], "hybrid_shard", MOMENTUM)
    state = step.init(state.model, state.optimizer, seed=5)
    return largest_difference(numbers(train(step, state, 4)), trained([local_sgd(3)], "hybrid_shard", MOMENTUM, 4))


def test_step_in_backward_matches_a_separate_step(ranks):
    assert max(ranks(2).run(in_backward)) <= TOLERANCE


def fitted() -> tuple[float, int]:
    failures = []

    def greedy(model: nn.Module, batch: Any) -> Any:
        if get_dist_info().rank == 1 and len(batch["x"]) > 2:
            failures.append(len(batch["x"]))
            raise torch.OutOfMemoryError("made up")
        return loss(model, batch)

    _, state = begin([], "hybrid_shard", MOMENTUM)
    step = compose_step(greedy, [local_sgd(2), auto_microbatch(initial_size=8)])
    state = train(step, step.init(state.model, state.optimizer), 5)
    values = numbers(state)
    return largest_difference(values, trained([local_sgd(2)], "hybrid_shard", MOMENTUM, 5)), len(failures)


@pytest.mark.costly
def test_replicas_agree_on_a_microbatch_size_after_out_of_memory(ranks):
    results = ranks(2).run(fitted)
    assert max(difference for difference, _ in results) <= TOLERANCE
    assert [failures > 0 for _, failures in results] == [False, True]


# A replica without weight, or with a broken gradient.


def masked_loss(weights: tuple[float, float]) -> Any:
    def weighted(model: nn.Module, batch: Any) -> Any:
        plain = loss(model, batch)
        return replace(
            plain, total=plain.total * weights[get_dist_info().rank], weight=plain.weight * weights[get_dist_info().rank]
        )

    return weighted


def weightless(weights: tuple[float, float], promised: bool) -> list[float]:
    _, state = begin([], "hybrid_shard")
    weigh = (lambda batch: len(batch["x"]) * weights[get_dist_info().rank]) if promised else None
    step = compose_step(
        masked_loss(weights), [local_sgd(9)], grad=partial(microbatch_step, batch_spec=batch_spec(weight=weigh))
    )
    state = step.init(state.model, state.optimizer)
    before = numbers(state)
    return largest_difference(before, numbers(train(step, state, 1)))


@pytest.mark.parametrize("promised", [False, True], ids=["after", "promised"])
def test_replica_with_zero_weight_does_not_change(ranks, promised):
    moved = ranks(2).run(weightless, (0.0, 1.0), promised)
    assert moved[0] == 0.0
    assert moved[1] > 1e-3


def refused_step(what: str, *args: Any) -> str:
    try:
        {"weightless": weightless, "broken": broken}[what](*args)
    except StepError as error:
        return str(error)
    return ""


def test_zero_weight_in_all_replicas_raises_on_all_ranks(ranks):
    for message in ranks(2).run(refused_step, "weightless", (0.0, 0.0), False):
        assert "the weights of all ranks add up to 0" in message


def broken(what: str) -> list[bool]:
    _, state = begin([], "hybrid_shard")
    step = compose_step(masked_loss((1.0, float("inf"))), [local_sgd(9)], update=partial(apply_gradients, nonfinite=what))
    state = step.init(state.model, state.optimizer)
    before = numbers(state)
    state = train(step, state, 1)
    return [numbers(state) == before]


def test_nonfinite_gradient_in_one_replica_is_refused_by_all(ranks):
    for message in ranks(2).run(refused_step, "broken", "raise"):
        assert "apply_gradients: step 0: a gradient is not finite" in message
    assert ranks(2).run(broken, "skip") == [[True], [True]]


def failing() -> float:
    """A step of copies that fails, and then one of all."""
    step, state = begin([], "hybrid_shard")

    def raising(model: nn.Module, batch: Any) -> Any:
        loss(model, batch).total.backward()
        raise ValueError("made up")

    batch = part(0, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1)
    with pytest.raises(ValueError, match="made up"):
        microbatch_step(split_replicas(state), batch, loss_fn=raising)
    state, _ = step(state, batch)
    return largest_difference(numbers(state), trained([], "hybrid_shard", SGD, 1))


def test_gradient_all_reduce_is_restored_after_a_failed_local_step(ranks):
    assert ranks(2).run(failing) == [0.0, 0.0]


def own_backward() -> float:
    """A backward of all ranks, after a step of copies."""
    step, state = begin([local_sgd(9)], "hybrid_shard", accumulate="sharded")
    state = train(step, state, 1)
    batch = part(1, RAGGED[2], get_dist_info().rank, get_dist_info().rank + 1)
    with as_in_a_step(state.model):
        loss(state.model, batch).total.backward()
    both = state.params["first.bias"].grad.to_local().clone()
    torch.distributed.all_reduce(both)
    return (both - 2 * state.params["first.bias"].grad.to_local()).abs().max().item()


def test_backward_after_a_step_of_copies_reduces_over_all_ranks(ranks):
    assert max(ranks(2).run(own_backward)) <= TOLERANCE


# Messages.


def sent(interval: int) -> list[dict[str, int]]:
    step, state = begin([local_sgd(interval)], "hybrid_shard", MOMENTUM)
    messages = []
    for number in range(2 * interval):
        with count_collectives() as seen:
            state = train(step, state, number + 1)
        across = [r for r in seen.records if r.op == "all_reduce" and r.group in ("training", "dp_replicate")]
        messages.append({"count": len(across), "bytes": sum(record.bytes for record in across)})
    return messages


def test_replicas_communicate_only_at_round_end(ranks):
    weights = 2 * 8  # one number of each copy
    params = sum(p.numel() for p in net().parameters()) * 8
    local = {"count": 1, "bytes": weights}
    rounds = {"count": 3, "bytes": weights + 2 * params}  # parameters, momenta
    for messages in ranks(2).run(sent, 3):
        assert messages == [local, local, rounds] * 2


def waits() -> list[int]:
    counts = []
    for transforms in ([], [local_sgd(2)]):
        step, state = begin(transforms, "hybrid_shard", MOMENTUM)
        state = train(step, state, 2)
        with count_host_syncs() as seen:
            train(step, state, 4)
        counts.append(seen.count)
    return counts


def test_local_step_adds_no_host_sync(ranks):
    for plain, local in ranks(2).run(waits):
        assert local == plain


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every": "3 cats"}, "duration: unknown unit 'cats'"),
        ({"every": 0}, "duration: needs at least 1 ba, got 0"),
        ({"every": 2, "optimizer_state": "reset"}, "local_sgd: optimizer_state must be 'average' or 'keep', got 'reset'"),
    ],
    ids=["interval", "no-interval", "optimizer-state"],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        local_sgd(**arguments)


# Saves, and resumes from them.


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
    fresh = load_sharded(root, fresh)
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
    state = load_sharded(root, state)
    values = numbers(state)
    return values, train(step, state, 6).step


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoint_of_two_replicas_resumes_on_a_different_rank_count(ranks, tmp_path, world):
    assert ranks(2).run(saved_at_a_boundary, str(tmp_path)) == [True, True]
    nets, optimizers = simulated(3, 2, kind=MOMENTUM, sizes=RAGGED[2], end_of_round=averaging(3))
    for values, steps in ranks(world).run(loaded, str(tmp_path)):
        assert largest_difference(values, expected(nets, optimizers, 0)) <= TOLERANCE
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
    state = load_sharded(root, join_replicas(state))
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
    assert marks == [False, False, False, True, True, True, True]  # steps 3 to 5 begin a round that does not end
    assert one == other


def test_every_function_named_on_the_page_exists():
    page = (Path(__file__).parents[3] / "docs" / "local_training.md").read_text()
    named = public.named_in(page)
    ours = {function.__name__ for function in (local_sgd, diloco, split_replicas, join_replicas)}
    assert {f"dt.transforms.{name}" for name in ours} <= named
    assert public.unknown_in(page) == set()


# Refusals.


def refusals() -> list[str]:
    messages = []
    for transforms, strategy, mesh in (
        ([local_sgd(2)], "full_shard", {"dp_replicate": 2}),
        ([local_sgd(2)], "replicate", {"cp": 2}),
        ([masked(local_sgd(2), "first.*")], "hybrid_shard", {"dp_replicate": 2}),
    ):
        model = shard_model(net(), build_mesh(**mesh), strategy=strategy)
        step = compose_step(loss, transforms)
        with pytest.raises(ConfigError) as raised:
            step.init(model, torch.optim.SGD(model.parameters()))
        messages.append(str(raised.value))
    return messages


def test_models_and_masks_without_replicas_are_refused(ranks):
    assert ranks(2).run(refusals)[0] == [
        "split_replicas: strategy must be 'hybrid_shard' with dp_replicate=2, got 'full_shard', which shards over dp_replicate "
        "too, so there is one replica. Use strategy='hybrid_shard'.",
        "split_replicas: strategy must be 'hybrid_shard' with cp=2, got 'replicate', whose replicas have parts of samples "
        "only. Use strategy='hybrid_shard', or cp=1.",
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
        patch.setattr("dtrain.transforms.weights.local_sgd._BUCKET_BYTES", 12)
        with count_collectives() as seen:
            average_replicas_(tensors, state.spec.replica_info)
    return [tensor.tolist() for tensor in tensors] + [[r.dtype for r in seen.records]]


def test_averages_are_bucketed_by_dtype_and_computed_in_float32(ranks):
    expected_values = [[0.5] * 3, [], [[2.0, 2.0], [2.0, 2.0]], 2.5, ["float32"] * 3]
    assert ranks(2).run(averaged) == [expected_values] * 2
