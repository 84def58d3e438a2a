"""Methods on gradients beside tensor parallelism, where one dim may be cut twice and tensors lie on several meshes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.transforms.gradients.clipping import centralize_gradients_, clip_grad_adaptive_
from dtrain.transforms.gradients.sam import perturb_params_, restore_params_
from helpers.gpt import Block
from shard.parallel import PLANS, degrees, loss_fn, make, share

ROUNDING = 1e-14  # of float64 numbers up to ten
METHODS = {
    "adaptive_clip": lambda params: clip_grad_adaptive_(params, 0.01),
    "centralize": centralize_gradients_,
    "sam": lambda params: perturb_params_(params, 0.7),
    "sam-adaptive": lambda params: perturb_params_(params, 0.7, adaptive=True),
}


def differences(plan: str, strategy: str) -> dict[str, float]:
    """Return by method the distance of a model cut over ranks from a whole model with the same parameters and gradients."""
    net = shard_model(make(), build_mesh(**degrees(strategy, 2)), strategy=strategy, blocks=(Block,), tp_plan=PLANS[plan]())
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    state, _ = microbatch_step(state, share(state.spec.data_rank, state.spec.data_ranks), loss_fn=loss_fn)
    grads = {name: param.grad for name, param in state.params.items()}
    largest = {}
    for method, act in METHODS.items():
        whole = {name: nn.Parameter(full_tensor(param.detach()).clone()) for name, param in state.params.items()}
        before = {name: to_local(param).detach().clone() for name, param in state.params.items()}
        for name, param in state.params.items():
            param.grad = grads[name].clone()
            whole[name].grad = full_tensor(param.grad).clone()
        kept = act(state.params)
        act(whole)
        pairs = [(full_tensor(state.params[name].detach()), param.detach()) for name, param in whole.items()]
        pairs += [(full_tensor(state.params[name].grad), param.grad) for name, param in whole.items()]
        largest[method] = max((here - there).abs().max().item() for here, there in pairs)
        restore_params_(state.params, kept or {})
        assert all(torch.equal(to_local(param), before[name]) for name, param in state.params.items())
    return largest


SLOW = pytest.mark.slow
CASES = [
    ("vocabulary", "full_shard"),
    pytest.param("layers", "full_shard", marks=SLOW),
    pytest.param("sequence", "full_shard", marks=SLOW),
    pytest.param("layers", "replicate", marks=SLOW),
    pytest.param("layers", "hybrid_shard", marks=SLOW),
]


@pytest.mark.parametrize(("plan", "strategy"), CASES)
def test_gradient_transforms_match_unsharded_results_under_tensor_parallelism(ranks, plan, strategy):
    for largest in ranks(4).run(differences, plan, strategy):
        assert largest.keys() == METHODS.keys()
        assert max(largest.values()) <= ROUNDING, largest
