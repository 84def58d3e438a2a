"""``estimate_memory`` against what can be counted by hand, and what it refuses."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.planning.estimate import estimate_memory
from dtrain.shard.precision import Precision
from planning.workloads import WIDTH, Linears, linears, rows

SIZE = 4  # bytes of a float32
BLOCKS = 3  # and a root with as many parameters as a block
UNITS = BLOCKS + 1
UNIT = WIDTH * WIDTH + WIDTH
PARAMS = UNITS * UNIT


def of(estimate, op: str) -> tuple[int, int]:
    found = [each for each in estimate.traffic if each.op == op]
    return sum(each.count for each in found), sum(each.bytes for each in found)


@pytest.mark.parametrize("world", [1, 3, 4096])
def test_estimate_uses_shard_sizes_of_the_fullest_rank(world):
    plan = estimate_memory(linears(), world_size=world)
    assert plan.max_by_part.parameters == SIZE * UNITS * (WIDTH + 1) * math.ceil(WIDTH / world)
    assert plan.max_by_part.optimizer >= 2 * plan.max_by_part.parameters
    assert plan.parameter_count == PARAMS
    assert plan.at_peak.total == plan.peak == max(plan.peaks.values()) == plan.peaks[plan.peak_phase]


def test_replicate_holds_all_parameters_and_reduces_once():
    plan = estimate_memory(linears(), world_size=8, strategy="replicate", microbatches=3)
    assert plan.max_by_part.parameters == PARAMS * SIZE
    assert plan.max_by_part.gradients == PARAMS * SIZE
    assert of(plan, "all_gather") == (0, 0)
    assert of(plan, "all_reduce") == (UNITS, PARAMS * SIZE)
    assert plan.bytes_sent == round(2 * PARAMS * SIZE * 7 / 8)


@pytest.mark.parametrize("microbatches", [1, 3, 64])
def test_traffic_scales_to_all_microbatches_from_three_runs(microbatches):
    ran = []

    def batch(n):
        ran.append(n)
        return rows(n)

    plan = estimate_memory(linears(batch=batch), world_size=4, microbatches=microbatches, microbatch_size=2)
    gathers = microbatches * (2 * BLOCKS + 1)  # blocks for forward and for backward, the root once
    assert of(plan, "all_gather") == (gathers, gathers * UNIT * SIZE)
    assert of(plan, "reduce_scatter") == (UNITS, PARAMS * SIZE)
    assert max(ran) <= 6


def test_low_precision_halves_all_gather_bytes():
    full, low = (estimate_memory(linears(), world_size=4, precision=p) for p in (None, Precision.preset("DEFAULT", "bf16")))
    assert of(low, "all_gather")[1] * 2 == of(full, "all_gather")[1]
    assert of(low, "reduce_scatter") == of(full, "reduce_scatter")  # summed in float32
    assert low.max_by_part.parameters == full.max_by_part.parameters


def test_checkpointing_reduces_activation_memory():
    deep = linears(model=lambda: nn.Sequential(*(Linears() for _ in range(3))), blocks=(Linears,))
    kept, again = (estimate_memory(deep, world_size=4, microbatch_size=512, checkpoint=c) for c in (None, "nothing"))
    assert again.max_by_part.activations < 0.7 * kept.max_by_part.activations


def test_transform_state_memory_is_counted():
    plain, averaged = (estimate_memory(linears(transforms=t), world_size=4) for t in ([], [dt.transforms.ema(0.9)]))
    assert plain.max_by_part.transforms == 0
    assert averaged.max_by_part.transforms == averaged.max_by_part.parameters


def test_training_after_an_estimate_has_real_metric_weights(monkeypatch):
    monkeypatch.setattr("dtrain.metrics._UNIT_WEIGHTS", {})  # no step has run in this process
    estimate_memory(linears(transforms=[dt.transforms.clip_by_norm(1.0)]), world_size=4)
    model = nn.Linear(2, 1)
    step = dt.compose_step(
        lambda net, x: dt.LossSum(total=net(x).sum(), weight=float(len(x))), [dt.transforms.clip_by_norm(1.0)]
    )
    _, metrics = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.ones(2, 2))
    assert {name: float(metric.weight) for name, metric in metrics.items()} == {"loss": 2.0, "grad_norm": 1.0}


def test_optimizer_temporaries_are_larger_on_cuda_than_cpu():
    cuda, cpu = (estimate_memory(linears(), world_size=1, device=device) for device in ("cuda", "cpu"))
    assert cuda.max_by_part.optimizer > cpu.max_by_part.optimizer


class Noisy(nn.Module):
    """One operation of each kind that CUDA runs in one kernel, and the CPU in several."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.drop, self.linear = kind, nn.RMSNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.kind == "attention":
            heads = x.view(1, 4, -1, WIDTH // 4)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).reshape(x.shape)
        return self.norm(x) if self.kind == "norm" else self.drop(x)


@pytest.mark.parametrize(
    ("kind", "least"), [("norm", 256 * WIDTH * SIZE), ("drop", 256 * WIDTH * 3), ("attention", 4 * 256**2)]
)
def test_cuda_kernels_save_fewer_activation_bytes(kind, least):
    noisy = linears(model=lambda: Noisy(kind), blocks=(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    kept = {d: estimate_memory(noisy, world_size=1, microbatch_size=256, device=d).peaks["forward"] for d in ("cuda", "cpu")}
    assert kept["cpu"] - kept["cuda"] >= least
    assert nn.functional.dropout.__module__ == "torch.nn.functional"


def test_model_larger_than_any_machine_can_be_estimated():
    giant = linears(model=lambda: nn.Linear(2**20, 2**20, bias=False), batch=lambda n: torch.zeros(n, 2**20), blocks=())
    assert estimate_memory(giant, world_size=4096).max_by_part.parameters == 2**40 * SIZE // 4096


def test_given_model_is_neither_copied_nor_changed():
    model = Linears()
    before = {name: (param, param.data_ptr(), param.clone()) for name, param in model.named_parameters()}
    given, made = estimate_memory(linears(model=model), world_size=4), estimate_memory(linears(), world_size=4)
    assert (given.peak, given.at_peak, given.traffic) == (made.peak, made.at_peak, made.traffic)
    for name, param in model.named_parameters():
        same, place, value = before[name]
        assert param is same
        assert param.data_ptr() == place
        assert torch.equal(param, value)


def test_meta_model_has_the_same_estimate():
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Linears()

    assert estimate_memory(linears(model=on_meta), world_size=4).peak == estimate_memory(linears(), world_size=4).peak


def test_estimate_restores_process_groups_and_rng_state():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    estimate_memory(linears(batch=lambda n: torch.randn(n, WIDTH)), world_size=4)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError):
        estimate_memory(linears(batch=lambda n: rows(n // 0)), world_size=4)
    assert not dist.is_initialized()


def distinct(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=torch.unique(model(batch)).sum(), weight=len(batch))


REFUSED = {
    "no ranks": ({"world_size": 0}, "world_size must be an integer from 1 to 4096, got 0"),
    "too many ranks": ({"world_size": 5000}, "world_size must be an integer from 1 to 4096, got 5000"),
    "ranks that do not divide": ({"world_size": 8, "dp_replicate": 3}, "must be a multiple of 3"),
    "strategy": ({"world_size": 2, "strategy": "zero3"}, "strategy must be 'full_shard', "),
    "hybrid without replicas": ({"world_size": 2, "strategy": "hybrid_shard"}, "hybrid_shard needs a mesh of two axes"),
    "checkpoint": ({"world_size": 2, "checkpoint": "all"}, "checkpoint must be None, 'nothing' or 'matmuls', got 'all'"),
    "device": ({"world_size": 2, "device": "tpu"}, "device must be 'cuda' or 'cpu', got 'tpu'"),
    "no samples": ({"world_size": 2, "microbatch_size": 0}, "microbatch_size must be an integer of at least 1, got 0"),
    "no microbatches": ({"world_size": 2, "microbatches": 1.5}, "microbatches must be an integer of at least 1, got 1.5"),
}


@pytest.mark.parametrize(("options", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_option_raises_one_line_error(options, expected):
    with pytest.raises(ConfigError) as error:
        estimate_memory(linears(), **options)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert not dist.is_initialized()


WRONG = {
    "model": ({"model": 3}, "Workload: model must be a function"),
    "loss": ({"loss_fn": None}, "Workload: loss_fn must be a function"),
    "batch": ({"batch": torch.zeros(3)}, "Workload: batch must be a function"),
    "optimizer": ({"optimizer": "adamw"}, "Workload: optimizer must be a function"),
    "what the model's function returns": ({"model": dict}, "model must return a torch.nn.Module, got dict"),
    "a search in the plan": ({"transforms": [dt.auto_microbatch()]}, "transforms must not contain auto_microbatch"),
    "shapes that depend on values": ({"loss_fn": distinct}, "depends on values, which a plan does not have"),
}


@pytest.mark.parametrize(("changes", "expected"), WRONG.values(), ids=WRONG)
def test_invalid_workload_is_refused(changes, expected):
    with pytest.raises(ConfigError, match=expected):
        estimate_memory(linears(**changes), world_size=2)


def with_groups() -> str:
    with pytest.raises(ConfigError, match="this process has process groups") as error:
        estimate_memory(linears(), world_size=2)
    assert dist.get_world_size() == 2
    return str(error.value)


def test_estimate_refuses_open_process_groups(ranks):
    assert all("before dt.init_dist()" in text for text in ranks(2).run(with_groups))
