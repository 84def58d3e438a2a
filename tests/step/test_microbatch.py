"""microbatch_step: one gradient, whatever the split; ragged and empty ranks; a step without weight is an error."""

import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.batch import batch_spec
from dtrain.data.sampler import rank_share
from dtrain.dist.init import current
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.losses import mean_loss, token_cross_entropy
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.state import new_state
from dtrain.step.microbatch import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.tensors import local
from dtrain.types import LossSum

TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64; rounding gives about 1e-15
SAMPLES, SEQ, VOCAB = 11, 6, 13


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCAB)).double()


def ragged_batch() -> dict:
    """Every sample has another number of targets that count, one of them none."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCAB, (2, SAMPLES, SEQ), generator=generator)
    for sample in range(SAMPLES):
        targets[sample, sample % (SEQ + 1) :] = -100
    return {"inputs": inputs, "targets": targets}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return token_cross_entropy(net(batch["inputs"]), batch["targets"])


def by_samples(net: nn.Module, batch: dict) -> LossSum:
    """The usual mistake: a mean over tokens, weighted by samples."""
    loss = loss_fn(net, batch)
    count = len(batch["inputs"])
    return LossSum(total=loss.total / max(float(loss.weight), 1.0) * count, weight=count)


def gradient(strategy: str, counts: list, microbatch_size: int | None, loss=loss_fn) -> torch.Tensor:
    """The flat global gradient when rank r holds ``counts[r]`` of the samples."""
    net = model()
    if strategy:
        net = shard_model(net, build_mesh(), strategy=strategy, blocks=(nn.Linear,))
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    first = sum(counts[: current().rank])
    batch = {key: value[first : first + counts[current().rank]] for key, value in ragged_batch().items()}
    state, _ = microbatch_step(state, batch, loss_fn=loss, microbatch_size=microbatch_size)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in state.params.values()]
    return torch.cat([grad.flatten() for grad in grads])


def reference() -> torch.Tensor:
    """Written without dtrain: one process, one batch, torch's own mean over the tokens that count."""
    net, batch = model(), ragged_batch()
    nn.functional.cross_entropy(net(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def difference(found: torch.Tensor) -> float:
    expected = reference()
    return ((found - expected).norm() / expected.norm()).item()


def differences(strategy: str, splits: list) -> list[float]:
    return [difference(gradient(strategy, counts, size)) for counts in splits for size in (1, 2, 3, 5, None)]


# How the samples lie on the ranks: even, ragged, with a rank that has one microbatch fewer, with a rank that has none.
SPLITS = {
    1: [[11]],
    2: [[6, 5], [10, 1], [11, 0], [0, 11]],
    3: [[4, 4, 3], [0, 11, 0], [1, 2, 8]],
    4: [[3, 3, 3, 2], [0, 0, 1, 10]],
}


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("world_size", SPLITS)
def test_gradient_is_that_of_the_global_mean_for_every_split(ranks, world_size, strategy):
    for found in ranks(world_size).run(differences, strategy, SPLITS[world_size]):
        assert max(found) <= TOLERANCE


def test_plain_model_in_one_process_has_the_same_gradient():
    assert max(differences("", [[11]])) <= TOLERANCE


def test_the_proof_can_fail_weighting_by_samples_is_wrong():
    assert difference(gradient("", [11], 2, loss=by_samples)) > 1e-3


class Explode(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("backward")


def retried_after(where: str, strategy: str, reduce: str) -> bool:
    """Whether the gradient after a failed try is bit for bit that before it; the second microbatch fails, on all ranks."""
    precision = Precision(param="bf16", reduce="fp32") if reduce == "wider" else None
    net = shard_model(model(), build_mesh(), strategy=strategy, blocks=(nn.Linear,), precision=precision)
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    first, last = rank_share(0, SAMPLES, current().rank, current().world_size)
    batch = {key: value[first:last] for key, value in ragged_batch().items()}
    calls = []

    def broken(net: nn.Module, part: dict) -> LossSum:
        calls.append(1)
        if len(calls) == 2 and where == "loss":
            raise MemoryError("loss")
        loss = loss_fn(net, part)
        return LossSum(total=Explode.apply(loss.total), weight=loss.weight) if len(calls) == 2 else loss

    def gradient_now() -> list[torch.Tensor]:
        microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=2)
        return [local(p.grad).clone() for p in state.params.values()]

    before = gradient_now()
    with pytest.raises(MemoryError, match=where):
        microbatch_step(state, batch, loss_fn=broken, microbatch_size=2)
    assert all(p.grad is None for p in state.params.values())
    return all(torch.equal(a, b) for a, b in zip(before, gradient_now(), strict=True))


# FSDP2 keeps gradients that wait for their reduction in one place, or, if they are reduced in a wider dtype, in another.
@pytest.mark.parametrize("reduce", ["same", "wider"])
@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_a_step_that_failed_in_the_middle_leaves_nothing_behind(ranks, where, strategy, reduce):
    assert ranks(2).run(retried_after, where, strategy, reduce) == [True, True]


def order_of_metrics(counts: list) -> list:
    from dtrain.observe.metrics import reduce_metrics

    net = shard_model(model(), build_mesh())
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    first = sum(counts[: current().rank])
    batch = {key: value[first : first + counts[current().rank]] for key, value in ragged_batch().items()}

    def with_aux(net: nn.Module, part: dict) -> LossSum:
        loss = loss_fn(net, part)
        return LossSum(total=loss.total, weight=loss.weight, aux={"samples": (float(len(part["inputs"])), 1.0)})

    spec = batch_spec({"inputs": "batch seq", "targets": "batch seq"})
    state, metrics = microbatch_step(state, batch, loss_fn=with_aux, microbatch_size=2, batch_spec=spec)
    state, metrics = optimizer_step(state, metrics)
    numbers = reduce_metrics(metrics)
    clock = state.clock
    return [numbers["loss"], numbers["samples"], [clock.step, clock.samples, clock.tokens]]


def test_metrics_and_clock_count_real_samples_only(ranks):
    alone = ranks(1).run(order_of_metrics, [11])[0]
    assert alone[1] == pytest.approx(11 / 6)  # six microbatches hold eleven samples
    for result in ranks(3).run(order_of_metrics, [7, 4, 0]):
        assert result[0] == pytest.approx(alone[0], rel=1e-12)
        assert result[1] == pytest.approx(11 / 6)
        assert result[2] == alone[2] == [1, 11, 66]


def all_masked() -> str:
    net = shard_model(model(), build_mesh())
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = {"inputs": torch.zeros(2, SEQ, dtype=torch.int64), "targets": torch.full((2, SEQ), -100)}
    try:
        microbatch_step(state, batch, loss_fn=loss_fn)
    except StepError as error:
        return f"{error} gradients left: {sum(p.grad is not None for p in net.parameters())}"
    return "no error"


def test_a_step_without_weight_raises_on_all_ranks_and_poisons_nothing(ranks):
    first, second = ranks(2).run(all_masked)
    assert "step 0: the weights of all ranks add up to 0" in first
    assert "gradients left: 0" in first
    assert first == second


def plain_state():
    net = model()
    return new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_gradients_of_before_are_dropped_and_parameters_stay():
    state = plain_state()
    before = [p.detach().clone() for p in state.params.values()]
    for _ in range(2):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn, microbatch_size=4)
    assert difference(torch.cat([p.grad.flatten() for p in state.params.values()])) <= TOLERANCE
    assert all(torch.equal(a, b) for a, b in zip(before, state.params.values(), strict=True))


def first_error(where: str) -> str:
    """What a loss that fails at the very first call is reported as."""
    net = shard_model(model(), build_mesh(), blocks=(nn.Linear,))
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def broken(net: nn.Module, part: dict) -> LossSum:
        if where == "after forward":
            loss_fn(net, part)
        raise KeyError("labels")

    try:
        microbatch_step(state, ragged_batch(), loss_fn=broken, microbatch_size=2)
    except KeyError as error:
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn, microbatch_size=2)
        return str(error)


@pytest.mark.parametrize("where", ["before forward", "after forward"])
def test_an_error_in_the_very_first_call_is_reported_as_it_is(ranks, where):
    assert ranks(2).run(first_error, where) == ["'labels'"] * 2


def reductions(microbatch_size: int, strategy: str) -> int:
    """Reductions of gradients in one step."""
    net = shard_model(model(), build_mesh(), strategy=strategy, blocks=(nn.Linear,))
    state = new_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.name():
                seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Count():
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn, microbatch_size=microbatch_size)
    return len(seen)


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_gradients_are_reduced_once_a_step_however_many_microbatches(ranks, strategy):
    once = ranks(2).run(reductions, SAMPLES, strategy)
    assert once[0] >= 4  # two linear units, the root with the embedding, and the weight
    assert ranks(2).run(reductions, 1, strategy) == once


def test_a_second_call_on_the_returned_state_takes_its_own_batch_and_size():
    state = plain_state()
    batch = ragged_batch()
    state, _ = microbatch_step(state, {key: value[:3] for key, value in batch.items()}, loss_fn=loss_fn, microbatch_size=3)
    state, _ = microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=1)
    assert difference(torch.cat([p.grad.flatten() for p in state.params.values()])) <= TOLERANCE
    state, _ = optimizer_step(state, {})
    assert (state.step, state.clock.samples) == (1, SAMPLES)


class Arrived:
    """A weight that reached the host after its step, as on a GPU."""

    def __init__(self, value: float) -> None:
        self.value: float | None = value

    def peek(self) -> float | None:
        return self.value

    def clear(self) -> None:
        self.value = None

    def post(self, value: torch.Tensor) -> None:
        self.value = value.item()


def test_a_weight_of_zero_that_arrives_late_raises_in_the_next_step_once():
    state = plain_state()
    state.shared.weight = Arrived(0.0)
    with pytest.raises(StepError, match="an earlier step had weight 0"):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn)
    microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_not_positive_is_refused_once(weight):
    state = plain_state()

    def odd(net: nn.Module, batch: dict) -> LossSum:
        return LossSum(total=net(batch["inputs"]).sum(), weight=weight)

    with pytest.raises(StepError, match="the weights of all ranks add up to"):
        microbatch_step(state, ragged_batch(), loss_fn=odd)
    microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


def test_the_clock_counts_seconds():
    state = plain_state()
    for _ in range(2):
        state, _ = optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
        time.sleep(0.01)
    state, _ = optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
    assert state.clock.seconds - state.clock.before.seconds >= 0.01


def test_a_spent_state_is_refused():
    state = plain_state()
    optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
    with pytest.raises(StaleStateError, match=r"microbatch_step: this state was stepped already \(step 0\)"):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


def test_a_loss_without_the_model_is_refused():
    outside = torch.ones((), requires_grad=True)
    with pytest.raises(StepError, match="no parameter got a gradient"):
        microbatch_step(plain_state(), ragged_batch(), loss_fn=lambda net, batch: LossSum(total=outside * 1, weight=1))


def test_a_batch_without_samples_is_refused():
    empty = {key: value[:0] for key, value in ragged_batch().items()}
    with pytest.raises(StepError, match="no rank has a sample"):
        microbatch_step(plain_state(), empty, loss_fn=loss_fn)


def unsharded_on_two_ranks() -> str:
    try:
        microbatch_step(plain_state(), ragged_batch(), loss_fn=loss_fn)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_plain_model_on_several_ranks_is_refused(ranks):
    for message in ranks(2).run(unsharded_on_two_ranks):
        assert "2 ranks, but the model is on none of their meshes" in message


def test_loss_and_weight_may_be_plain_numbers():
    loss = mean_loss(lambda net, batch: net(batch["inputs"]).square().mean(), weight=lambda batch: len(batch["inputs"]))
    _, metrics = microbatch_step(plain_state(), ragged_batch(), loss_fn=loss, microbatch_size=3)
    assert metrics["loss"].weight == SAMPLES
