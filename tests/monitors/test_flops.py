"""FLOPs: the formula by hand, torch's count against the formula, and a measurement that leaves nothing behind."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.monitors.flops import count_flops, transformer_flops
from dtrain.shard.activations import checkpoint_activations
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.typing import LossSum

LAYERS, DIM, SEQ, WORDS = 2, 16, 8, 50


class Block(nn.Module):
    def __init__(self, *, fused: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.fused, self.reentrant = fused, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = (projection.unflatten(-1, (2, -1)).transpose(1, 2) for projection in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


class Net(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.blocks = nn.Sequential(*(Block(**options) for _ in range(LAYERS)))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.blocks(self.embedding(x)))


PARAMS = LAYERS * 12 * DIM**2 + DIM * WORDS  # all but the embedding
A_SAMPLE = SEQ * transformer_flops(params=PARAMS, layers=LAYERS, dim=DIM, seq=SEQ)


def loss(model: nn.Module, x: Tensor) -> LossSum:
    return LossSum(total=F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum"), weight=x.numel())


def batch(samples: int = 3) -> Tensor:
    return torch.arange(samples * SEQ).view(samples, SEQ) % WORDS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"params": 10, "layers": 0, "dim": 0, "seq": 1}, 60.0, id="weights-alone"),
        # 6 * 100 + 3 * (2 * 2 * 4 * 5) in each of 2 layers
        pytest.param({"params": 100, "layers": 2, "dim": 4, "seq": 5}, 600.0 + 480.0, id="attention"),
        # a token sees 3 of 5 keys on average
        pytest.param({"params": 100, "layers": 2, "dim": 4, "seq": 5, "causal": True}, 600.0 + 288.0, id="causal"),
    ],
)
def test_transformer_flops_match_expected_values(options, expected):
    assert transformer_flops(**options) == expected


@pytest.mark.parametrize("name", ["params", "layers", "dim", "seq"])
def test_transformer_flops_refuses_invalid_sizes(name):
    with pytest.raises(ConfigError, match=rf"transformer_flops: {name} must be an integer of at least \d, got 1\.5"):
        transformer_flops(**{"params": 1, "layers": 1, "dim": 1, "seq": 1, name: 1.5})


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "checkpointed"])
def test_counted_flops_match_formula_with_and_without_recomputation(fused, reentrant):
    assert count_flops(Net(fused=fused, reentrant=reentrant), batch(), loss) == A_SAMPLE


@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_dtrain_activation_checkpointing_is_not_counted_twice(keep):
    net = checkpoint_activations(Net(fused=False), blocks=[Block], keep=keep)
    assert count_flops(net, batch(), loss) == A_SAMPLE


def test_count_is_independent_of_batch_size():
    assert count_flops(Net(), batch(1), loss) == count_flops(Net(), batch(5), loss) == A_SAMPLE


def test_frozen_parameters_reduce_flops():
    net = Net()
    net.head.requires_grad_(False)
    assert count_flops(net, batch(), loss) == A_SAMPLE - SEQ * 2 * DIM * WORDS  # the gradient of its weight


def test_models_without_storage_are_countable():
    with torch.device("meta"):
        assert count_flops(Net(), batch(), loss) == A_SAMPLE
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert count_flops(Net(), batch(), loss) == A_SAMPLE


def test_compiled_blocks_are_counted_uncompiled():
    net = Net(fused=False)
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    net.blocks[0].compile(backend=backend)
    assert count_flops(net, batch(), loss) == A_SAMPLE
    assert calls == []


def test_count_flops_restores_model_and_random_state():
    net = Net()
    for param in net.parameters():
        param.grad = torch.full_like(param, 2.0)
    net.embedding.weight.grad = None
    before = [(param.grad, param.clone()) for param in net.parameters()]
    calls, random = net.calls, torch.get_rng_state()
    count_flops(net, batch(), loss)
    assert all(
        param.grad is grad and torch.equal(param, value) for param, (grad, value) in zip(net.parameters(), before, strict=True)
    )
    assert torch.equal(net.head.weight.grad, torch.full_like(net.head.weight, 2.0))
    assert net.calls is calls
    assert net.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_count_flops_restores_state_after_error():
    net = Net()

    def fails(model: nn.Module, x: Tensor) -> LossSum:
        torch.rand(3)
        model(x)
        raise ZeroDivisionError("in the loss")

    random = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        count_flops(net, batch(), fails)
    assert net.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("x", "of", "message"),
    [
        pytest.param(batch(0), loss, "count_flops: batch must have at least 1 sample", id="empty"),
        pytest.param(batch(), lambda model, x: model(x).sum(), "count_flops: loss_fn must return a LossSum", id="no-loss"),
        pytest.param(
            batch(),
            lambda model, x: LossSum(total=model(x).sum().detach(), weight=1),
            "count_flops: loss must depend on a trainable parameter, got none. Unfreeze the model.",
            id="detached",
        ),
    ],
)
def test_invalid_input_is_refused(x, of, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        count_flops(Net(), x, of)


def on_shards(strategy: str, measured: bool) -> tuple[float | None, bool, list[float]]:
    """FLOPs, whether gradients are as they were, and the losses of steps after it; ranks have different samples."""
    torch.manual_seed(0)
    net = shard_model(Net(), build_mesh(), strategy=strategy, blocks=[Block])
    step = compose_step(loss)
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    flops = count_flops(net, batch(2 + get_dist_info().rank), loss) if measured else None
    clean, losses = all(param.grad is None for param in state.params.values()), []
    for _ in range(3):
        state, metrics = step(state, batch(3 + get_dist_info().rank))
        losses.append(float(metrics["loss"].total / metrics["loss"].weight))
        if measured:
            count_flops(net, batch(), loss)
    return flops, clean, losses


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_sharded_models_are_counted_without_changing_training(ranks, strategy):
    measured, plain = (ranks(2).run(on_shards, strategy, which) for which in (True, False))
    assert [flops for flops, _, _ in measured] == [A_SAMPLE] * 2
    assert all(clean for _, clean, _ in measured)
    assert [losses for _, _, losses in measured] == [losses for _, _, losses in plain]


def after_a_failure() -> list[float]:
    torch.manual_seed(0)
    net = shard_model(Net(), build_mesh(), strategy="full_shard", blocks=[Block])
    step = compose_step(loss)
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def fails(model: nn.Module, x: Tensor) -> LossSum:
        model(x)
        raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError):
        count_flops(net, batch(), fails)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch(3 + get_dist_info().rank))
        losses.append(float(metrics["loss"].total / metrics["loss"].weight))
    return losses


def test_sharded_model_trains_after_failed_count(ranks):
    assert ranks(2).run(after_a_failure) == [losses for _, _, losses in ranks(2).run(on_shards, "full_shard", False)]


def test_grouped_query_attention_counts_query_heads():
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Parameter(torch.ones(1, 4, SEQ, DIM)), nn.Parameter(torch.ones(1, 2, SEQ, DIM))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q, self.kv, self.kv, enable_gqa=True) * x

    def total(model: nn.Module, x: Tensor) -> LossSum:
        return LossSum(total=model(x).sum(), weight=1)

    assert count_flops(Grouped(), torch.ones(1, 1), total) == 3 * 2 * 2 * 4 * SEQ * SEQ * DIM
