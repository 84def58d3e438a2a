"""full_params and unshard_params."""

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params, unshard_params
from dtrain.state import init_state
from dtrain.testing import count_collectives
from shard.models import CASES, Block, batch, make


def sharded(name: str, strategy: str) -> nn.Module:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    return shard_model(make(name), mesh, strategy=strategy, **CASES[name].options)


def exported(name: str, strategy: str) -> list:
    net = sharded(name, strategy)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = dict(make(name).named_parameters())
    named = list(full_params(state))
    doubled = dict(full_params({key: p.detach() * 2 for key, p in state.params.items()}))
    return [
        [key for key, _ in named] == list(plain),
        all(torch.equal(tensor, plain[key]) and not tensor.requires_grad for key, tensor in named),
        all(torch.equal(doubled[key], plain[key] * 2) for key in plain),
    ]


STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["left out", "tied across blocks"])
def test_full_params_match_plain_model_names_and_values(ranks, name, strategy):
    assert ranks(2).run(exported, name, strategy) == [[True] * 3] * 2


def look_inside(strategy: str) -> list:
    net = sharded("called twice", strategy)
    plain = make("called twice")
    before = [full_tensor(p).clone() for p in net.parameters()]
    x = batch("called twice", [1.0] * 8)["x"]
    with unshard_params(net):
        equal = all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
        with count_collectives() as seen:
            for _ in range(get_dist_info().rank + 1):  # a different number of forwards on every rank
                out = net(x)
        close = torch.allclose(out, plain(x), rtol=1e-12)
        next(net.parameters()).zero_()
    after = [full_tensor(p) for p in net.parameters()]
    with count_collectives() as again:
        net(x)
    gathers = again.count(op="all_gather")
    return [equal, close, seen.count(), all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), gathers > 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unshard_params_needs_no_forward_collectives_and_discards_changes(ranks, strategy):
    shards = strategy in ("full_shard", "shard_grad_op")  # two ranks: the others' sharded axis has one
    # Whole parameters are the stored ones, so a change stays.
    discards = strategy != "replicate"
    assert ranks(2).run(look_inside, strategy) == [[True, True, 0, discards, shards]] * 2


def after_an_error() -> bool:
    net = sharded("called twice", "full_shard")
    with pytest.raises(KeyError), unshard_params(net):
        raise KeyError("x")
    net(batch("called twice", [1.0] * 8)["x"])
    return hasattr(net.blocks[1].up.weight, "full_tensor")


def test_blocks_reshard_after_forward_following_an_unshard_error(ranks):
    assert ranks(2).run(after_an_error) == [True, True]


def test_unshard_params_accepts_an_unsharded_model():
    net = Block()
    with unshard_params(net):
        assert not torch.is_grad_enabled()
    assert [name for name, _ in full_params(dict(net.named_parameters()))] == [name for name, _ in net.named_parameters()]
