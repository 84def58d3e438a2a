"""Each field of ``Precision`` has its own effect under every strategy, and no other effect."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.shard.precision import Precision
from dtrain.state import init_state
from dtrain.step.compose import optimizer_in_backward
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum
from step.states import state_of

STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DIM = 4


class Block(nn.Module):
    """A table that scales, and a count of forwards, which is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.linspace(0.1, 1.1, DIM), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.linear(x)
        return torch.tanh(x * self.table.to(x.dtype))


class Net(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), middle or nn.Identity(), nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def sharded(strategy: str, precision: Precision, middle: nn.Module | None = None, accumulate: str = "local") -> nn.Module:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    torch.manual_seed(0)
    net = Net(middle)
    return shard_model(net, mesh, strategy=strategy, blocks=("first", "last"), precision=precision, accumulate=accumulate)


def loss(net: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=net(batch).float().square().sum(), weight=len(batch))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seen_dtypes(strategy: str, precision: Precision, accumulate: str) -> dict[str, str]:
    """Return the dtypes of a step: compute, sums over ranks, buffers, output and storage."""
    net = sharded(strategy, precision, accumulate=accumulate)
    seen: dict[str, str] = {}
    net.first.linear.register_forward_hook(lambda module, args, out: seen.update(param=short(out.dtype)))
    net.register_forward_hook(lambda module, args, out: seen.update(output=short(out.dtype)))
    state = state_of(net)
    with count_collectives() as traffic:
        state, _ = microbatch_step(state, torch.ones(4, DIM), loss_fn=loss, microbatch_size=2)
    sums = traffic.select(op="reduce_scatter") + [r for r in traffic.select(op="all_reduce") if r.dtype != "float64"]
    assert sums
    return {
        **seen,
        "reduce": " ".join(sorted({r.dtype for r in sums if r.group_size > 1})),
        "buffer": short(net.first.table.dtype),
        "whole numbers": short(net.first.calls.dtype),
        "stored": " ".join(sorted({short(p.dtype) for p in net.parameters()})),
        "grad": " ".join(sorted({short(p.grad.dtype) for p in state.params.values()})),
    }


FIELDS = {
    "nothing": (Precision(), ("float32", "float32", "float32", "float32")),
    "param bf16": (Precision(param="bf16", buffer="bf16"), ("bfloat16", "float32", "bfloat16", "bfloat16")),
    "param fp16": (Precision(param="fp16", buffer="fp16"), ("float16", "float32", "float16", "float16")),
    "reduce": (Precision(reduce="bf16"), ("float32", "bfloat16", "float32", "float32")),
    "output": (Precision(output="fp16"), ("float32", "float32", "float32", "float16")),
    "buffer": (Precision(buffer="bf16"), ("float32", "float32", "bfloat16", "float32")),
    "DEFAULT bf16": (Precision.preset("DEFAULT", "bf16"), ("bfloat16", "float32", "float32", "bfloat16")),
    "DEFAULT fp16": (Precision.preset("DEFAULT", "fp16"), ("float16", "float32", "float32", "float16")),
    "PURE bf16": (Precision.preset("PURE", "bf16"), ("bfloat16", "bfloat16", "float32", "bfloat16")),
    "PURE fp16": (Precision.preset("PURE", "fp16"), ("float16", "float16", "float32", "float16")),
    "FULL": (Precision.preset("FULL", "fp16"), ("float32", "float32", "float32", "float32")),
}


def all_seen(strategy: str) -> dict[str, dict[str, str]]:
    return {
        f"{name} {accumulate}": seen_dtypes(strategy, precision, accumulate)
        for name, (precision, _) in FIELDS.items()
        for accumulate in ("local", "sharded")
    }


@pytest.mark.costly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_precision_field_changes_only_its_own_dtype(ranks, strategy):
    seen = ranks(4 if strategy == "hybrid_shard" else 2).run(all_seen, strategy)
    for name, (precision, (param, reduce, buffer, output)) in FIELDS.items():
        expected = {
            "param": param,
            "output": output,
            "reduce": reduce,
            "buffer": buffer,
            "whole numbers": "int64",
            "stored": "float32",
            "grad": "float32",
        }
        for accumulate in ("local", "sharded"):
            assert seen[0][f"{name} {accumulate}"] == expected, (name, accumulate, precision)


def test_presets_match_their_documented_fields():
    assert Precision.preset("DEFAULT") == Precision(param="bf16", reduce="fp32")
    assert Precision.preset("PURE", "fp16") == Precision(param="fp16", reduce="fp16")
    assert Precision.preset("FULL") == Precision()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Precision(param="fp8"), "Precision: param must be 'fp32', 'bf16', 'fp16' or None, got 'fp8'"),
        (lambda: Precision(buffer=torch.float16), "Precision: buffer must be 'fp32', .* or None, got torch.float16"),
        (lambda: Precision(reduce=["fp32"]), r"Precision: reduce must be 'fp32', .* or None, got \['fp32'\]"),
        (lambda: Precision(output=16), "Precision: output must be 'fp32', .* or None, got 16"),
        (lambda: Precision.preset("default"), "Precision.preset: name must be 'DEFAULT', 'PURE' or 'FULL', got 'default'"),
        (lambda: Precision.preset("PURE", "fp32"), "Precision.preset: low must be 'bf16' or 'fp16', got 'fp32'"),
    ],
)
def test_invalid_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def with_statistics(strategy: str, low: str) -> dict[str, object]:
    net = sharded(strategy, Precision.preset("DEFAULT", low), nn.BatchNorm1d(DIM))
    seen = {}
    net.middle.register_forward_hook(
        lambda module, args, out: seen.update(
            weight=short(module.weight.dtype), given=short(args[0].dtype), out=short(out.dtype)
        )
    )
    state = state_of(net)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    microbatch_step(state, x, loss_fn=loss, microbatch_size=2)
    torch.manual_seed(0)
    plain = Net(nn.BatchNorm1d(DIM))
    for microbatch in x.split(2):
        plain(microbatch)
    error = (net.middle.running_mean - plain.middle.running_mean).abs().max().item()
    grad = state.params["middle.weight"].grad.dtype
    return {**seen, "statistics": short(net.middle.running_mean.dtype), "near": error < 0.01, "grad": short(grad)}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_running_statistics_are_computed_in_their_stored_dtype(ranks, strategy, low):
    expected = {
        "weight": "float32",
        "given": DTYPES[low],
        "out": DTYPES[low],
        "statistics": "float32",
        "near": True,
        "grad": "float32",
    }
    assert ranks(4 if strategy == "hybrid_shard" else 2).run(with_statistics, strategy, low)[0] == expected


def on_meta() -> list[object]:
    with torch.device("meta"):
        net = Net(nn.BatchNorm1d(DIM))
    net = shard_model(net, build_mesh(), blocks=(Block,), precision=Precision(param="bf16", buffer="bf16"))
    net = materialize(net, seed=0)
    return [short(net.first.table.dtype), net.first.table.tolist(), short(net.middle.running_var.dtype)]


def test_meta_buffers_are_computed_in_float32_before_rounding(ranks):
    table = torch.linspace(0.1, 1.1, DIM).bfloat16().tolist()
    assert ranks(2).run(on_meta)[0] == ["bfloat16", table, "float32"]


MICROBATCHES = 512
DTYPES_OF_SUMS = {
    "nothing said": (Precision(param="bf16"), torch.float32),
    "reduced in fp32": (Precision(param="bf16", reduce="fp32"), torch.float32),
    "reduced in bf16": (Precision.preset("PURE", "bf16"), torch.float32),
    "stored in bf16": (None, torch.bfloat16),
    "stored and reduced in bf16": (Precision(reduce="bf16"), torch.bfloat16),
    "only reduced in bf16": (Precision(reduce="bf16"), torch.float32),
}


class Halves(nn.Module):
    """Check a gradient of 1 for each sample, of a parameter in a unit and of a parameter outside of sharding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.cut, self.whole = (nn.Linear(1, 4, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x.to(self.cut.weight.dtype)) + self.whole(x.to(self.whole.weight.dtype))


def ones_of(net: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=net(x).float().sum(), weight=len(x))


def mean_of_ones(net: nn.Module, how: str) -> list[float]:
    """The mean of as many gradients of 1 as there are microbatches on all ranks, as the step or the update has it."""
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = {name: full_tensor(param.detach()).float().clone() for name, param in state.params.items()}
    batch = torch.ones(MICROBATCHES, 1)
    if how == "in backward":
        optimizer_in_backward(ones_of, batch_spec=batch_spec(weight=len), microbatch_size=1)(state, batch)
        return [(before[name] - full_tensor(param.detach()).float()).mean().item() for name, param in state.params.items()]
    step = grad_cache_step if how == "cached" else microbatch_step
    step(state, batch, loss_fn=ones_of, microbatch_size=1)
    return [full_tensor(param.grad).float().mean().item() for param in state.params.values()]


def means(strategies: list[str], named: list[str], hows: list[str]) -> dict[str, list[float]]:
    by_case = {}
    for strategy in strategies:
        mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
        for name in named:
            precision, stored = DTYPES_OF_SUMS[name]
            for accumulate in ("local", "sharded"):
                for how in hows:
                    net = shard_model(
                        zeroed(Halves(stored)),
                        mesh,
                        strategy=strategy,
                        blocks=("cut",),
                        precision=precision,
                        accumulate=accumulate,
                        ignored_params="whole.weight",
                    )
                    by_case[f"{strategy}, {name}, {accumulate}, {how}"] = mean_of_ones(net, how)
    return by_case


def zeroed(net: nn.Module) -> nn.Module:
    """Without weights, so that bfloat16 holds an update of 1 exactly."""
    for param in net.parameters():
        nn.init.zeros_(param)
    return net


def assert_all_one(by_case: dict[str, list[float]]) -> None:
    assert {name: value for name, value in by_case.items() if value != [1.0, 1.0]} == {}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("named", "strategy"),
    [("reduced in bf16", "full_shard"), ("stored in bf16", "replicate"), ("only reduced in bf16", "full_shard")],
)
def test_mean_of_many_microbatches_is_exact(ranks, named, strategy):
    """bfloat16 holds 256, but not 257: a sum of 512 gradients of 1 in bfloat16 has a mean of 0.5."""
    assert_all_one(ranks(2).run(means, [strategy], [named], ["step"])[0])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("named", DTYPES_OF_SUMS)
@pytest.mark.parametrize("how", ["step", "cached", "in backward"])
def test_mean_of_many_microbatches_is_exact_for_every_strategy(ranks, strategy, named, how):
    assert_all_one(ranks(4 if strategy == "hybrid_shard" else 2).run(means, [strategy], [named], [how])[0])


@pytest.mark.parametrize("how", ["step", "cached", "in backward"])
def test_unsharded_model_accumulates_microbatches_in_float32(how):
    assert mean_of_ones(zeroed(Halves(torch.bfloat16)), how) == [1.0, 1.0]


def summed_over_ranks(reduce: str | None) -> float:
    """256 on one rank and 1 on the others, of which bfloat16 loses each."""
    net = shard_model(
        nn.Sequential(nn.Linear(1, 4, bias=False)), build_mesh(), precision=Precision(param="bf16", reduce=reduce)
    )
    state = state_of(net)
    batch = torch.tensor([[256.0 if get_dist_info().rank == 0 else 1.0]])
    microbatch_step(state, batch, loss_fn=lambda net, x: LossSum(total=net(x).float().sum(), weight=0.5))
    return state.params["0.weight"].grad.full_tensor()[0].item()


@pytest.mark.parametrize(("reduce", "expected"), [(None, 257.0), ("fp32", 257.0), ("bf16", 256.0)])
def test_ranks_are_summed_in_float32_unless_another_dtype_is_named(ranks, reduce, expected):
    assert ranks(2).run(summed_over_ranks, reduce)[0] == expected
