"""microbatch_step: its counts, the state it leaves, and its refusals. Its gradient is proven in test_gradients."""

import time

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.losses import mean_loss
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.typing import LossSum
from step.ragged import SAMPLES, VOCAB, loss_fn, ragged_batch

TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64; rounding gives about 1e-15


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCAB)).double()


def reference() -> torch.Tensor:
    """Written without dtrain: one process, one batch, torch's own mean over the tokens that count."""
    net, batch = model(), ragged_batch()
    nn.functional.cross_entropy(net(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def difference(computed: torch.Tensor) -> float:
    expected = reference()
    return ((computed - expected).norm() / expected.norm()).item()


def order_of_metrics(counts: list) -> list:
    from dtrain.monitors.reduce_metrics import reduce_metrics

    net = shard_model(model(), build_mesh())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    first = sum(counts[: get_dist_info().rank])
    batch = {key: value[first : first + counts[get_dist_info().rank]] for key, value in ragged_batch().items()}

    def with_aux(net: nn.Module, batch: dict) -> LossSum:
        loss = loss_fn(net, batch)
        return LossSum(total=loss.total, weight=loss.weight, aux={"samples": (float(len(batch["inputs"])), 1.0)})

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


def plain_state():
    net = model()
    return init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))


def test_repeated_step_resets_gradients_and_keeps_parameters():
    state = plain_state()
    before = [p.detach().clone() for p in state.params.values()]
    for _ in range(2):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn, microbatch_size=4)
    assert difference(torch.cat([p.grad.flatten() for p in state.params.values()])) <= TOLERANCE
    assert all(torch.equal(a, b) for a, b in zip(before, state.params.values(), strict=True))


def test_second_gradient_call_replaces_batch_counts_and_gradients():
    state = plain_state()
    batch = ragged_batch()
    state, _ = microbatch_step(state, {key: value[:3] for key, value in batch.items()}, loss_fn=loss_fn, microbatch_size=3)
    with pytest.warns(UserWarning, match="microbatch_step drops the gradient of an earlier batch"):
        state, _ = microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=1)
    assert difference(torch.cat([p.grad.flatten() for p in state.params.values()])) <= TOLERANCE
    state, _ = optimizer_step(state, {})
    assert (state.step, state.clock.samples) == (1, SAMPLES)


class Arrived:
    """A weight that reached the host after its step, as on a GPU."""

    def __init__(self, value: float) -> None:
        self.value: float | None = value

    def try_read(self) -> float | None:
        return self.value

    def clear(self) -> None:
        self.value = None

    def copy_from(self, value: torch.Tensor) -> None:
        self.value = value.item()


def test_asynchronous_zero_weight_raises_once_in_the_next_step():
    state = plain_state()
    state._run_context.monitor.pending_weight = Arrived(0.0)
    with pytest.raises(StepError, match="an earlier step had weight 0"):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn)
    microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_nonpositive_weight_is_refused_once(weight):
    state = plain_state()

    def odd(net: nn.Module, batch: dict) -> LossSum:
        return LossSum(total=net(batch["inputs"]).sum(), weight=weight)

    with pytest.raises(StepError, match="the weights of all ranks add up to"):
        microbatch_step(state, ragged_batch(), loss_fn=odd)
    microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


def test_clock_records_elapsed_seconds():
    state = plain_state()
    for _ in range(2):
        state, _ = optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
        time.sleep(0.01)
    state, _ = optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
    assert state.clock.seconds - state.clock._previous.seconds >= 0.01


def test_stale_state_is_refused():
    state = plain_state()
    optimizer_step(*microbatch_step(state, ragged_batch(), loss_fn=loss_fn))
    with pytest.raises(StaleStateError, match=r"microbatch_step: this state was stepped already \(step 0\)"):
        microbatch_step(state, ragged_batch(), loss_fn=loss_fn)


def test_loss_independent_of_the_model_is_refused():
    outside = torch.ones((), requires_grad=True)
    with pytest.raises(StepError, match="no parameter got a gradient"):
        microbatch_step(plain_state(), ragged_batch(), loss_fn=lambda net, batch: LossSum(total=outside * 1, weight=1))


def test_empty_batch_is_refused():
    empty = {key: value[:0] for key, value in ragged_batch().items()}
    with pytest.raises(StepError, match="no rank has a sample"):
        microbatch_step(plain_state(), empty, loss_fn=loss_fn)


def unsharded_on_two_ranks() -> str:
    try:
        microbatch_step(plain_state(), ragged_batch(), loss_fn=loss_fn)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_unsharded_model_on_several_ranks_is_refused(ranks):
    for message in ranks(2).run(unsharded_on_two_ranks):
        assert "2 ranks run, but the model is on no mesh" in message


def test_loss_and_weight_may_be_plain_numbers():
    loss = mean_loss(lambda net, batch: net(batch["inputs"]).square().mean(), weight=lambda batch: len(batch["inputs"]))
    _, metrics = microbatch_step(plain_state(), ragged_batch(), loss_fn=loss, microbatch_size=3)
    assert metrics["loss"].weight == SAMPLES


def test_nested_step_in_the_loss_preserves_accumulated_gradients():
    plain = mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
    outer, inner = (nn.Linear(2, 1, bias=False).bfloat16() for _ in range(2))
    batch, inner_step = torch.ones(4, 2).bfloat16(), compose_step(plain)
    states = [inner_step.init(inner, torch.optim.SGD(inner.parameters(), lr=0.0))]

    def nested(model, microbatch):
        states[0], _ = inner_step(states[0], batch)
        return plain(model, microbatch)

    grads = []
    for loss in (plain, nested):
        state = compose_step(loss).init(outer, torch.optim.SGD(outer.parameters(), lr=0.0))
        microbatch_step(state, batch, loss_fn=loss, microbatch_size=1)
        grads.append(outer.weight.grad)
    assert torch.equal(*grads)
