"""Methods other than forward, and generation in lockstep."""

import pytest
import torch
from torch import nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import eval_mode
from shard.models import Coder, Tools, batch, make


class Counter(nn.Module):
    """Generates until the next number would not be smaller: samples end at different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, ids):
        return self.out(self.table(ids))

    def generate(self, first: int, unfinished) -> list[int]:
        ids, done = [first], False
        while unfinished(not done):
            follows = int(self(torch.tensor(ids[-1:])).argmax())
            done = done or follows >= ids[-1]
            if not done:
                ids.append(follows)
        return ids


def counter() -> nn.Module:
    net = Counter()
    with torch.no_grad():
        net.table.weight.copy_(torch.eye(8))
        net.out.weight.copy_(torch.eye(8).roll(-1, 0))  # n is followed by n - 1, and 0 by 7
        net.out.bias.zero_()
    return net


def generated(strategy: str) -> list[int]:
    from dtrain.dist.collectives import reduce_max

    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = shard_model(counter(), mesh, strategy=strategy, forward_methods=("generate",), blocks=(nn.Linear,))
    with eval_mode(net):
        return net.generate(3 * get_dist_info().rank + 1, lambda unfinished: bool(reduce_max(float(unfinished))))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
def test_generation_with_uneven_lengths_runs_in_lockstep(ranks, strategy):
    expected = [counter().generate(first, lambda unfinished: unfinished) for first in (1, 4)]
    assert expected == [[1, 0], [4, 3, 2, 1, 0]]
    assert ranks(2).run(generated, strategy) == expected


def a_block_before_the_model() -> list[bool]:
    """A block's own method, and its forward, run before the model's forward ever did."""
    net = shard_model(make("methods"), build_mesh(), blocks=(Tools,), forward_methods=("tools.once",))
    plain = make("methods")
    x = batch("methods", [1.0] * 8)["x"]
    with torch.no_grad():
        return [
            torch.allclose(net.tools.once(x), plain.tools.once(x), rtol=1e-12),
            torch.allclose(net.tools(x), plain.tools(x), rtol=1e-12),
            torch.allclose(net(x), plain(x), rtol=1e-12),
        ]


def test_block_can_run_before_the_first_model_forward(ranks):
    assert ranks(2).run(a_block_before_the_model) == [[True] * 3] * 2


def refused(methods) -> str:
    try:
        shard_model(Coder(), build_mesh(), forward_methods=methods)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("encode", "forward_methods must be a sequence of names, got 'encode'. Pass for example forward_methods=('encode',)."),
        (["dream"], "forward_methods names 'dream', but Coder has no method 'dream'"),
        (["tools.once"], "forward_methods names 'tools.once', but 'tools' is not a unit. Add 'tools' to blocks."),
        (["toys.once"], "forward_methods names 'toys.once', but the model has no module 'toys'"),
    ],
)
def test_invalid_forward_method_is_refused_on_all_ranks(ranks, methods, message):
    for error in ranks(2).run(refused, methods):
        assert message in error
