"""Gradients that a loss function takes by itself: those of inputs are right, all others end in one line."""

import copy

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

BATCH = torch.arange(16.0, dtype=torch.float64).reshape(4, 4) / 10
CUT = ("full_shard", "shard_grad_op")
STRATEGIES = (*CUT, "replicate")


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def squares(net, x):
    return LossSum(total=net(x).square().sum(), weight=len(x))


def with_backward(net, x):
    loss = squares(net, x)
    loss.total.backward()
    return loss


def with_two_forwards(net, x):
    """The backward is of another graph, so torch does not complain: the gradient would be counted twice."""
    with_backward(net, x)
    return squares(net, x)


def with_penalty(net, x):
    x = x.clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return LossSum(total=out.square().sum() + slope.square().sum(), weight=len(x))


def adversarial(net, x):
    """A gradient with respect to the input, of which the loss takes the sign."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(squares(net, x).total, x)
    return squares(net, x.detach() + 0.1 * slope.sign())


def gradient(net, loss_fn, size) -> torch.Tensor:
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    microbatch_step(state, BATCH, loss_fn=loss_fn, microbatch_size=size)
    return torch.cat([full_tensor(param.grad).flatten() for param in state.params.values()])


def by_hand(loss_fn) -> torch.Tensor:
    net = make()
    loss_fn(net, BATCH).total.backward()
    return torch.cat([param.grad.flatten() for param in net.parameters()]) / len(BATCH)


def said(net, loss_fn, size) -> str:
    try:
        gradient(net, loss_fn, size)
    except ConfigError as error:
        assert all(param.grad is None for param in net.parameters())
        return str(error).partition(". ")[0]
    return "nothing"


def in_every_way() -> dict[str, object]:
    messages: dict[str, object] = {}
    for strategy in STRATEGIES:
        for accumulate in ("local", "sharded"):
            for size in (None, 1):
                allowed = (adversarial, with_penalty) if strategy == "replicate" else (adversarial,)
                for loss_fn in (with_backward, with_two_forwards, with_penalty, adversarial):
                    net = shard_model(make(), build_mesh(), strategy=strategy, blocks=(nn.Linear,), accumulate=accumulate)
                    if loss_fn not in allowed:
                        messages.setdefault(loss_fn.__name__, set()).add(said(net, loss_fn, size))
                        continue
                    error = (gradient(net, loss_fn, size) - by_hand(loss_fn)).norm().item()
                    messages["largest error"] = max(error, messages.get("largest error", 0.0))
    return {name: sorted(said) if isinstance(said, set) else said for name, said in messages.items()}


def test_backward_in_a_sharded_loss_raises_one_line_error(ranks):
    messages = ranks(2).run(in_every_way)[0]
    assert messages.pop("largest error") <= 1e-12
    own = "microbatch_step: loss_fn must not call backward(), because the step calls backward itself"
    twice = "microbatch_step: the loss must not use create_graph=True, because FSDP2 frees weights between the two backwards"
    assert messages == {"with_backward": [own], "with_two_forwards": [own], "with_penalty": [twice]}


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("loss_fn", [with_backward, with_two_forwards])
def test_backward_in_an_unsharded_loss_is_refused(loss_fn, size):
    with pytest.raises(
        ConfigError, match=r"loss_fn must not call backward\(\), because the step calls backward itself. Return"
    ):
        gradient(make(), loss_fn, size)


@pytest.mark.parametrize("size", [None, 1])
def test_backward_in_a_grad_cache_loss_is_refused(size):
    net = make()
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"grad_cache_step: loss_fn must not call backward\(\), because the step calls"):
        grad_cache_step(state, BATCH, loss_fn=with_backward, microbatch_size=size)


def test_unsharded_model_supports_double_backward():
    torch.testing.assert_close(gradient(make(), with_penalty, None), by_hand(with_penalty))


def copied() -> list[str]:
    messages = []
    for strategy in CUT:
        first, second = (shard_model(make(), build_mesh(), strategy=strategy, blocks=(nn.Linear,)) for _ in range(2))
        for value in (first, first[0], {"teacher": first}):
            with pytest.raises(ConfigError) as caught:
                copy.deepcopy(value)
            messages.append(str(caught.value).partition(", and")[0])
        with torch.no_grad():
            for param in second.parameters():
                param.zero_()
        second.load_state_dict(first.state_dict())
        assert second(BATCH).equal(first(BATCH))
    return messages


def test_deepcopy_of_a_sharded_model_is_refused_with_a_workaround(ranks):
    kinds = ["Sequential", "Linear", "Sequential"] * len(CUT)
    assert ranks(2).run(copied)[0] == [f"deepcopy: the {kind} is sharded" for kind in kinds]
