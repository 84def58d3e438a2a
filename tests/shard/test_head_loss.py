"""``linear_cross_entropy`` with the head of a sharded model: where the head is stored, and how it is cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtrain.dist.dtensor import to_local
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.losses import linear_cross_entropy, linear_token_log_probs, sum_loss
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.shard.snapshots import snapshot
from dtrain.shard.unshard import eval_mode
from dtrain.state import init_state
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from helpers.gpt import GPT, Block, GPTConfig
from shard.parallel import PLANS, Tied, difference, make, reference, share

TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64


class Biased(GPT):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.dim, config.vocab)


class Tail(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor, *, logits: bool) -> Tensor:
        return self.head(self.norm(x)) if logits else self.norm(x)


class WithTail(GPT):
    """The head is inside of another unit, and the loss outside of it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.tail = Tail(self.norm, self.head)
        del self.norm, self.head

    def forward(self, input_ids: Tensor, *, logits: bool = True) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.tail(x, logits=logits)


def head_loss(net: nn.Module, batch: dict) -> LossSum:
    head = net.tail.head if isinstance(net, WithTail) else net.head
    return linear_cross_entropy(net(batch["inputs"], logits=False), head, batch["targets"])


def log_probs_loss(net: nn.Module, batch: dict) -> LossSum:
    head = net.tail.head if isinstance(net, WithTail) else net.head
    counted = batch["targets"] != -100
    log_probs = linear_token_log_probs(net(batch["inputs"], logits=False), head, batch["targets"].where(counted, 0))
    return sum_loss(-log_probs, counted)


KINDS = {"gpt": GPT, "biased": Biased, "with tail": WithTail, "tied": Tied}


def gradient(
    name: str, units: list[str], strategy: str, plan: str | None, microbatch_size: int | None = 1, log_probs: bool = False
) -> list:
    """The largest error of two steps, the mean loss, and the mean loss of an evaluation. Ranks have 2 and 3 samples."""
    kind = KINDS[name]
    net = shard_model(
        make(kind),
        build_mesh(tp=2 if plan else 1),
        strategy=strategy,
        blocks=(Block, *units),
        tp_plan=PLANS[plan]() if plan else None,
    )
    state = init_state(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    loss_fn = log_probs_loss if log_probs else head_loss
    mine, errors = share(state.spec.data_rank, state.spec.data_ranks), []
    for _ in range(2):
        for param in net.parameters():
            param.grad = None
        state, metrics = microbatch_step(state, mine, loss_fn=loss_fn, microbatch_size=microbatch_size)
        errors.append(difference(state.params, reference(kind)))
    losses = [reduce_metrics(metrics)["loss"], reduce_metrics(evaluate(net, [mine], loss_fn))["loss"]]
    return [max(errors), *losses]


def mean_loss(name: str) -> float:
    whole = share(0, 1)
    logits = make(KINDS[name])(whole["inputs"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), whole["targets"].flatten()).item()


CASES = {
    "replicate": ("gpt", [], "replicate", None),
    "root": ("gpt", [], "full_shard", None),
    "unit": ("gpt", ["head"], "full_shard", None),
    "unit with bias": ("biased", ["head"], "full_shard", None),
    "gathered unit": ("gpt", ["head"], "shard_grad_op", None),
    "another unit": ("with tail", ["tail"], "full_shard", None),
    "tied": ("tied", [], "full_shard", None),
    "tied unit": ("tied", ["head"], "full_shard", None, None),
    "vocabulary": ("gpt", [], "full_shard", "vocabulary"),
    "tied vocabulary and sequence": ("tied", [], "full_shard", "sequence"),
}


@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_all_logits(ranks, case, log_probs):
    expected = mean_loss(CASES[case][0])
    options = (*CASES[case], 1)[:5]
    for error, loss, evaluated in ranks(2).run(gradient, *options, log_probs):
        assert error <= TOLERANCE
        assert loss == pytest.approx(expected, rel=1e-12)
        assert evaluated == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("units", [[], ["head"]], ids=["root", "unit"])
@pytest.mark.parametrize("plan", ["vocabulary", "sequence"])
def test_gradient_matches_on_shard_and_tp_axes(ranks, plan, units):
    for error, *_ in ranks(4).run(gradient, "gpt", units, "full_shard", plan):
        assert error <= TOLERANCE


def low_precision() -> list:
    net = shard_model(make(GPT, dtype=torch.float32), build_mesh(), blocks=(Block, "head"), precision=Precision(param="bf16"))
    mine = share(0, 1)
    with eval_mode(net):
        loss = head_loss(net, mine)
        full = nn.functional.cross_entropy(
            net(mine["inputs"]).float().flatten(0, 1), mine["targets"].flatten(), reduction="sum"
        )
    return [str(loss.total.dtype), float(loss.total), float(full), to_local(net.head.weight).shape[0]]


def test_head_computes_in_the_dtype_of_its_unit_and_is_resharded(ranks):
    for dtype, total, full, rows in ranks(2).run(low_precision):
        assert dtype == "torch.float32"
        assert total == pytest.approx(full, rel=1e-4)
        assert rows == 6  # half of the vocabulary


def foreign_shard() -> str:
    layer = fully_shard(nn.Sequential(nn.Linear(4, 6)), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    with pytest.raises(
        ConfigError, match=r"linear_cross_entropy: the parameters must be gathered, .* got shards of \(6, 4\)"
    ) as info:
        linear_cross_entropy(torch.ones(3, 4), layer[0], torch.zeros(3, dtype=torch.int64))
    return type(info.value).__name__


def test_shards_of_an_unknown_unit_are_refused(ranks):
    assert ranks(2).run(foreign_shard) == ["ConfigError"] * 2


def resharded_before_backward() -> str:
    net, mine = shard_model(make(GPT), build_mesh(), blocks=(Block,)), share(0, 1)

    def loss_fn(net: nn.Module, batch: dict) -> LossSum:
        loss = log_probs_loss(net, batch)
        snapshot(net)
        return loss

    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="linear_token_log_probs: the head must stay gathered until backward") as info:
        microbatch_step(state, mine, loss_fn=loss_fn)
    return type(info.value).__name__


def test_head_of_the_root_that_was_resharded_before_backward_is_refused(ranks):
    assert ranks(2).run(resharded_before_backward) == ["ConfigError"] * 2
