"""Wrappers of modules or of the whole model: gradients, names and layout equal those of the plain model."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dtrain.fqn import unwrap_module
from dtrain.shard.buffers import buffer_sync_of
from dtrain.shard.fsdp import shard_model
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.spec import get_spec
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from shard.models import WEIGHTS, Block, Stack, batch, difference, make, squared
from shard.test_models import mesh_for, share

NAME = "called twice"


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")


def with_checkpointed_blocks(net: Stack) -> Stack:
    net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
    return net


def with_compiled_blocks(net: Stack) -> Stack:
    for block in net.blocks:
        block.compile(backend="eager")
    return net


def same(net: nn.Module) -> nn.Module:
    return net


WRAPPED = {  # before shard_model, and after it
    "checkpointed blocks": (with_checkpointed_blocks, same),
    "checkpointed model": (checkpoint_wrapper, same),
    "compiled blocks": (with_compiled_blocks, same),
    "compiled blocks after": (same, with_compiled_blocks),
    "compiled model": (compiled, same),
    "compiled model after": (same, compiled),
}


def trained(kind: str, strategy: str) -> list:
    before, after = WRAPPED[kind]
    net = after(shard_model(before(make(NAME)), mesh_for(strategy), strategy=strategy, blocks=(Block,)))
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for size in (2, None):
        microbatch_step(state, share(batch(NAME, WEIGHTS)), loss_fn=squared, microbatch_size=size)
    steered = grad_sync_of(net) is not grad_sync_of(nn.Identity()) and buffer_sync_of(net) is not buffer_sync_of(nn.Identity())
    return [difference(NAME, state.params), get_spec(net).strategy == strategy == state.spec.strategy, steered]


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "replicate"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_model_training_matches_the_plain_model(ranks, kind, strategy):
    for error, recognized, steered in ranks(2).run(trained, kind, strategy):
        assert error <= 1e-12
        assert (recognized, steered) == (True, True)


def test_unwrap_module_removes_all_outer_wrappers():
    net = Block()
    assert unwrap_module(net) is net
    assert unwrap_module(checkpoint_wrapper(compiled(net))) is net
