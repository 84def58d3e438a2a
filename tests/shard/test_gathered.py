"""Forwards outside of a step leave unsharded parameters and a record of units, which no step may use."""

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.unshard import eval_mode, unshard_params
from dtrain.state import TrainState, init_state
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients, optimizer_step, tick
from dtrain.typing import LossSum
from shard.models import CASES, SAMPLES, WEIGHTS, Block, batch, difference, make, squared

NAME = "called twice"
LR = 0.1
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")


def sharded(strategy: str, **options) -> nn.Module:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    return shard_model(make(NAME), mesh, strategy=strategy, **{**CASES[NAME].options, **options})


def state_of(net: nn.Module) -> TrainState:
    return init_state(net, torch.optim.SGD(net.parameters(), lr=LR))


def share() -> dict:
    rank, world = get_dist_info().rank, get_dist_info().world_size
    return {key: value[rank * SAMPLES // world : (rank + 1) * SAMPLES // world] for key, value in batch(NAME, WEIGHTS).items()}


def step(state: TrainState) -> TrainState:
    return microbatch_step(state, share(), loss_fn=squared, microbatch_size=2)[0]


def plain_outputs(steps: int) -> list[torch.Tensor]:
    """Return the outputs of plain torch after each step."""
    net, whole, outputs = make(NAME), batch(NAME, WEIGHTS), []
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = squared(net, whole)
        (loss.total / loss.weight).backward()
        optimizer.step()
        outputs.append(net(whole["x"]).detach())
    return outputs


def with_a_look_in_between(strategy: str, grad: bool, by_hand: bool) -> list[float]:
    """A forward between the gradient and the update: its gathered parameters are not those after the update."""
    state, whole, errors = state_of(sharded(strategy)), batch(NAME, WEIGHTS), []
    for expected in plain_outputs(3):
        state = step(state)
        with torch.set_grad_enabled(grad):
            state.model(whole["x"])
        if by_hand:
            state.optimizer.step()
            state = tick(state)
            with eval_mode(state.model):
                out = state.model(whole["x"])
        else:
            state, _ = optimizer_step(state, {})
            with torch.no_grad():
                out = state.model(whole["x"])
        errors.append((out - expected).abs().max().item())
    return errors


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer_step", "by hand"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_after_an_update_uses_the_updated_parameters(ranks, strategy, grad, by_hand):
    for errors in ranks(2).run(with_a_look_in_between, strategy, grad, by_hand):
        assert max(errors) <= 1e-12


def changed_by_hand(strategy: str) -> float:
    """Parameters are written between a forward and a step, as by an average that is swapped in."""
    state, reference = state_of(sharded(strategy)), make(NAME)
    with torch.no_grad():
        state.model(batch(NAME, WEIGHTS)["x"])
        for param, plain in zip(state.params.values(), reference.parameters(), strict=True):
            to_local(param).mul_(0.5)
            plain.mul_(0.5)
    step(state)
    loss = squared(reference, batch(NAME, WEIGHTS))
    (loss.total / loss.weight).backward()
    pairs = zip(state.params.values(), reference.parameters(), strict=True)
    return max((full_tensor(p.grad) - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_uses_parameters_changed_by_hand(ranks, strategy):
    assert max(ranks(2).run(changed_by_hand, strategy)) <= 1e-12


def clipped_after_a_forward(strategy: str, grad: bool, data: bool) -> float:
    """Weights are clipped after a step and a forward, by code that knows no shards."""
    state, reference = state_of(sharded(strategy)), make(NAME)
    optimizer, whole = torch.optim.SGD(reference.parameters(), lr=LR), batch(NAME, WEIGHTS)
    for _ in range(2):
        state, _ = optimizer_step(step(state), {})
        loss = squared(reference, whole)
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.set_grad_enabled(grad):
            state.model(whole["x"])
        with torch.no_grad():
            for param in (*state.model.parameters(), *reference.parameters()):
                (param.data if data else param).clamp_(-0.1, 0.1)
    pairs = zip(state.params.values(), reference.parameters(), strict=True)
    return max((full_tensor(p) - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("data", [False, True], ids=["parameter", ".data"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_write_of_parameters_after_a_forward_is_kept(ranks, strategy, grad, data):
    assert max(ranks(2).run(clipped_after_a_forward, strategy, grad, data)) <= 1e-12


def written_in_eval_mode(strategy: str) -> str:
    net, x = sharded(strategy), batch(NAME, WEIGHTS)["x"]
    try:
        with eval_mode(net):
            net(x)
            net.get_parameter("head.weight").clamp_(-0.1, 0.1)
    except StepError as error:
        return str(error)
    step(state_of(net))
    return "no error"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_write_of_a_copy_in_eval_mode_is_refused_by_name(ranks, strategy):
    for message in ranks(2).run(written_in_eval_mode, strategy):
        assert ("'head.weight' was written" in message) != (strategy == "replicate"), message


def written_after_the_loss_of_another_model(strategy: str, under_eval_mode: bool) -> str:
    """The teacher of a loss is clipped after the step. Its forward has left copies for the next microbatch."""
    teacher = sharded(strategy)
    state, run = state_of(sharded(strategy)), eval_mode if under_eval_mode else lambda net: torch.no_grad()

    def distilled(net: nn.Module, part: dict) -> LossSum:
        with run(teacher):
            target = teacher(part["x"])
        return LossSum(total=(net(part["x"]) - target).square().sum(), weight=len(target))

    try:
        for _ in range(2):
            state = optimizer_step(microbatch_step(state, share(), loss_fn=distilled)[0], {})[0]
            with torch.no_grad():
                teacher.get_parameter("head.weight").fill_(0.25)
    except StepError as error:
        return str(error)
    return str([float(full_tensor(teacher.get_parameter("head.weight")).mean())])


@pytest.mark.parametrize("under_eval_mode", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_write_after_the_loss_of_another_model_is_kept_or_refused(ranks, strategy, under_eval_mode):
    for message in ranks(2).run(written_after_the_loss_of_another_model, strategy, under_eval_mode):
        kept = under_eval_mode or strategy == "replicate"
        assert message == "[0.25]" if kept else "dt.eval_mode(model)" in message, message


def begun_after_a_forward(strategy: str, before_optimizer: bool) -> float:
    net = sharded(strategy)
    optimizer = None if before_optimizer else torch.optim.SGD(net.parameters(), lr=LR)
    with torch.no_grad():
        net(batch(NAME, WEIGHTS)["x"])
    state = init_state(net, optimizer or torch.optim.SGD(net.parameters(), lr=LR))
    step(state)
    return difference(NAME, state.params)


@pytest.mark.parametrize("before_optimizer", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_before_init_changes_nothing(ranks, strategy, before_optimizer):
    assert max(ranks(2).run(begun_after_a_forward, strategy, before_optimizer)) <= 1e-12


def begun_in_unshard_params(strategy: str) -> str:
    net = sharded(strategy)
    try:
        with unshard_params(net):
            init_state(net, torch.optim.SGD(net.parameters(), lr=LR))
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_init_with_gathered_parameter_copies_is_refused(ranks, strategy):
    for message in ranks(2).run(begun_in_unshard_params, strategy):
        if strategy == "replicate":
            assert message == "no error"  # nothing is gathered
            continue
        assert "are whole tensors in a sharded model" in message
        assert "dt.unshard_params is open" in message


def begun_with_a_late_layer() -> str:
    net = sharded("full_shard")
    net.late = nn.Linear(2, 2)
    try:
        init_state(net, torch.optim.SGD(net.parameters(), lr=LR))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_layer_added_between_shard_model_and_init_is_refused_by_name(ranks):
    for message in ranks(2).run(begun_with_a_late_layer):
        assert "are whole tensors in a sharded model (first: late.weight): its module was added after shard_model" in message


def one_rank_alone(strategy: str) -> float:
    """Rank 0 runs a block alone, whose record would make its next backward gather a unit that other ranks do not gather."""
    state = state_of(sharded(strategy, blocks=(Block, nn.Linear)))
    with unshard_params(state.model):
        if get_dist_info().rank == 0:
            state.model(batch(NAME, WEIGHTS)["x"])
            state.model.head(batch(NAME, WEIGHTS)["x"])
            state.model.blocks[0](batch(NAME, WEIGHTS)["x"])
    step(state)
    return difference(NAME, state.params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_on_one_rank_does_not_affect_the_next_step(ranks, strategy):
    assert max(ranks(2).run(one_rank_alone, strategy)) <= 1e-12


def inside_each_other() -> list[bool]:
    net = sharded("full_shard")
    x = batch(NAME, WEIGHTS)["x"]
    with unshard_params(net):
        with unshard_params(net):
            pass
        evaluate(net, [batch(NAME, WEIGHTS)], squared)
        if get_dist_info().rank == 0:
            net(x)
        whole = not any(hasattr(p, "full_tensor") for p in net.parameters())
    return [whole, all(hasattr(p, "full_tensor") for p in net.parameters())]


def test_unshard_params_survives_nested_unshard_and_evaluation(ranks):
    assert ranks(2).run(inside_each_other) == [[True, True]] * 2


def backward_by_hand(strategy: str) -> dict:
    """A backward outside of a step, twice, gradients of inputs, and a step, which none of them changes."""
    state, alone, x = state_of(sharded(strategy)), make(NAME), batch(NAME, WEIGHTS)["x"]
    for _ in range(2):
        state.model(x * (1 + get_dist_info().rank)).square().sum().backward()
        for rank in range(2):
            (alone(x * (1 + rank)).square().sum() / 2).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(state.params.values(), alone.parameters(), strict=True)]
    means = max((full_tensor(mine) - mean).abs().max().item() for mine, mean in pairs)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for net, leaf in zip((state.model, make(NAME)), inputs, strict=True):
        (leaf.grad,) = torch.autograd.grad(net(leaf).square().sum(), leaf)
    step(state)
    return {
        "means": means,
        "inputs": (inputs[0].grad - inputs[1].grad).abs().max().item(),
        "step": difference(NAME, state.params),
        "records": len(grad_sync_of(state.model).reduction_order),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_outside_of_a_step_is_the_mean_over_ranks_and_changes_no_later_step(ranks, strategy):
    for found in ranks(2).run(backward_by_hand, strategy):
        assert max(found["inputs"], found["step"]) <= 1e-12
        # Local under replicate, where apply_gradients refuses it.
        assert (found["means"] <= 1e-12) == (strategy != "replicate")


def backward_on_one_rank(strategy: str) -> float:
    net, alone, x = sharded(strategy), make(NAME), batch(NAME, WEIGHTS)["x"]
    for model in (net, alone):
        model(x).square().sum().backward()
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    return max((full_tensor(p.grad) - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "replicate"])
def test_backward_outside_of_a_step_on_one_rank_is_that_of_torch(ranks, strategy):
    assert ranks(1).run(backward_on_one_rank, strategy) == [pytest.approx(0, abs=1e-12)]


def trained_through_another_model(strategy: str) -> float:
    """The gradient of a generator goes through a discriminator that is sharded, too, and not trained by this step."""
    judge, state = sharded(strategy), state_of(sharded(strategy))

    def judged(net: nn.Module, part: dict) -> LossSum:
        return LossSum(total=judge(part["x"] + net(part["x"]).sum(-1, keepdim=True)).square().sum(), weight=len(part["x"]))

    state, _ = microbatch_step(state, share(), loss_fn=judged)
    alone, other, whole = make(NAME), make(NAME), batch(NAME, WEIGHTS)
    (other(whole["x"] + alone(whole["x"]).sum(-1, keepdim=True)).square().sum() / SAMPLES).backward()
    pairs = zip(state.params.values(), alone.parameters(), strict=True)
    return max((full_tensor(p.grad) - q.grad).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_of_a_step_goes_through_another_model(ranks, strategy):
    assert max(ranks(2).run(trained_through_another_model, strategy)) <= 1e-12


def skipped_update() -> list[bool]:
    """An update that is skipped frees the copies all the same."""
    state = step(state_of(sharded("shard_grad_op")))
    with torch.no_grad():
        state.model(batch(NAME, WEIGHTS)["x"])
    apply_gradients(state, {}, nonfinite="skip")
    return [hasattr(p, "full_tensor") for p in state.model.parameters()]


def test_model_is_resharded_after_an_update(ranks):
    assert all(all(flags) for flags in ranks(2).run(skipped_update))
