"""Return values of a loss function: a wrong value raises one line on all ranks, with advice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from step.states import state_of

X = torch.ones(4, 3)


def loss_of(**options: Any) -> Callable[[nn.Module, torch.Tensor], Any]:
    return lambda net, x: LossSum(**{"total": net(x).sum(), "weight": len(x), **options})


WRONG = {
    "mean": (
        lambda net, x: net(x).mean(),
        r"loss_fn must return a LossSum, got Tensor \[\]. For a mean, wrap loss_fn in dt.mean",
    ),
    "nothing": (lambda net, x: None, "loss_fn must return a LossSum, got None"),
    "pair": (lambda net, x: (net(x).sum(), 1.0), "loss_fn must return a LossSum, got tuple"),
    "vector": (loss_of(total=torch.ones(4)), r"LossSum.total must be one number \(a tensor \[\]\), got shape \(4,\). Sum it."),
    "number": (loss_of(total=3.0), r"LossSum.total must be one number \(a tensor \[\]\), got 3.0"),
    "weights": (loss_of(weight=torch.ones(4)), r"LossSum.weight must be one number, got shape \(4,\). Sum it."),
    "no weight": (loss_of(weight=None), "LossSum.weight must be one number, got None"),
    "aux": (loss_of(aux={"a": 3.0}), r"LossSum.aux\['a'\] must be \(total, weight\), got 3.0"),
    "aux vector": (
        loss_of(aux={"a": (torch.ones(4), 1.0)}),
        r"LossSum.aux\['a'\] must be single numbers, got shape \(4,\). Sum it.",
    ),
    "aux called loss": (loss_of(aux={"loss": (1.0, 1.0)}), "the name 'loss' belongs to the main loss"),
    "term called loss": (loss_of(terms={"loss": (torch.ones(()), 1.0)}), "the name 'loss' belongs to the main loss"),
    "one name twice": (
        loss_of(terms={"a": (torch.ones(()), 1.0)}, aux={"a": (1.0, 1.0)}),
        "'a' names a term and an aux",
    ),
}


@pytest.mark.parametrize(("loss", "message"), WRONG.values(), ids=WRONG)
def test_invalid_loss_result_is_refused_in_training_and_evaluation(loss, message):
    state = state_of(nn.Linear(3, 1))
    weights = (
        {"batch_spec": batch_spec(weight=lambda x: {"loss": len(x), "a": 1.0})}
        if "terms" in message or "term" in message
        else {}
    )
    with pytest.raises(ConfigError, match=message):
        microbatch_step(state, X, loss_fn=loss, microbatch_size=2, **weights)
    assert all(p.grad is None for p in state.params.values())
    with pytest.raises(ConfigError, match=message):
        evaluate(state.model, [X], loss)


def learned_weight(net: nn.Module, x: torch.Tensor) -> LossSum:
    weight = net(x).exp()
    return LossSum(total=(weight * x).sum(), weight=weight.sum())


def test_weight_with_a_graph_is_refused_in_training_only():
    state = state_of(nn.Linear(3, 1))
    with pytest.raises(ConfigError, match=r"LossSum.weight must be a constant, got a tensor with a graph.*weight\.detach\(\)"):
        microbatch_step(state, X, loss_fn=learned_weight)
    assert all(p.grad is None for p in state.params.values())
    terms = loss_of(terms={"a": (torch.ones(()), torch.ones((), requires_grad=True))})
    spec = batch_spec(weight=lambda x: {"loss": len(x), "a": 1.0})
    with pytest.raises(ConfigError, match=r"the weight of LossSum.terms\['a'\] must be a constant"):
        microbatch_step(state, X, loss_fn=terms, batch_spec=spec)
    assert evaluate(state.model, [X], learned_weight)["loss"].weight > 0


def test_loss_detached_from_all_parameters_is_refused():
    with pytest.raises(StepError, match="the loss of a microbatch depends on no trainable parameter"):
        microbatch_step(state_of(nn.Linear(3, 1)), X, loss_fn=lambda net, x: LossSum(total=net(x).sum().detach(), weight=1))
    assert evaluate(nn.Linear(3, 1), [X], lambda net, x: LossSum(total=net(x).sum().detach(), weight=1))["loss"].weight == 1


def test_one_element_tensors_are_accepted_as_scalars():
    state = state_of(nn.Linear(3, 1))
    one = torch.ones(1)
    loss = lambda net, x: LossSum(total=net(x).sum()[None], weight=one * len(x), aux={"a": (one, one)})  # noqa: E731
    _, metrics = microbatch_step(state, X, loss_fn=loss, microbatch_size=2)
    assert (metrics["loss"].weight.item(), metrics["a"].total.shape) == (4, ())


def wrong_on_all_ranks(name: str) -> str:
    state = state_of(shard_model(nn.Linear(3, 1), build_mesh()))
    try:
        microbatch_step(state, X, loss_fn=WRONG[name][0], microbatch_size=2)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["mean", "no weight", "aux"])
def test_invalid_loss_raises_one_line_error_on_all_ranks(ranks, name):
    first, second = ranks(2).run(wrong_on_all_ranks, name)
    assert first == second
    assert first.startswith("microbatch_step: ")
    assert "\n" not in first


def test_aux_metric_is_copied_before_later_in_place_updates():
    """A float64 scalar needs no sum of one, but a copy: the function may add to it in place."""
    net, seen = nn.Linear(3, 1), torch.zeros((), dtype=torch.float64)

    def counting(net: nn.Module, x: torch.Tensor) -> LossSum:
        return LossSum(total=net(x).sum(), weight=len(x), aux={"seen": (seen.add_(len(x)), 1.0)})

    _, metrics = microbatch_step(state_of(net), X, loss_fn=counting)
    seen.add_(100)
    assert metrics["seen"].total.item() == len(X)
