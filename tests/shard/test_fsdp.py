"""shard_model: strategies, equal replicas, and invalid arguments, which raise on all ranks."""

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import units_of
from dtrain.shard.precision import Precision
from dtrain.shard.spec import get_spec
from dtrain.shard.unshard import eval_mode
from shard.models import as_in_a_step


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        return self.norm(self.inner(x))


def model(dim: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, dim), Block(dim), Block(dim), nn.Linear(dim, 3))


def full(tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


UNITS = ["FSDPSequential", "FSDPBlock", "FSDPBlock"]


def layout(strategy: str) -> dict:
    torch.manual_seed(get_dist_info().rank)  # replicas that start different
    sharded = shard_model(model(), build_mesh(), strategy=strategy, blocks=(Block,))
    spec = get_spec(sharded)
    return {
        "units": [type(unit).__name__ for unit in units_of(sharded)],
        "names": [name for name, _ in sharded.named_parameters()],
        "local": to_local(next(sharded.parameters())).numel(),
        "sum": [full(p).double().sum().item() for p in sharded.parameters()],
        "spec": [spec.strategy, spec.data_rank, spec.data_ranks],
    }


@pytest.mark.parametrize(
    ("strategy", "rows", "units"),
    [
        ("full_shard", [2, 2, 2], UNITS),
        ("shard_grad_op", [2, 2, 2], UNITS),
        ("replicate", [6, 6, 6], []),
        ("no_shard", [6, 6, 6], []),
    ],
)
def test_shard_model_sets_units_names_and_local_sizes(ranks, strategy, rows, units):
    results = ranks(3).run(layout, strategy)
    assert [r["local"] for r in results] == [5 * n for n in rows]
    assert results[0]["units"] == units
    assert results[0]["names"] == [name for name, _ in model().named_parameters()]
    assert results[0]["sum"] == results[1]["sum"] == results[2]["sum"], "rank 0's weights are everybody's"
    name = "replicate" if strategy == "no_shard" else strategy
    assert [r["spec"] for r in results] == [[name, rank, 3] for rank in range(3)]


def buffers_after_sharding() -> list:
    net = model()
    net[1].norm.running_mean.fill_(float(get_dist_info().rank) + 5)
    return shard_model(net, build_mesh())[1].norm.running_mean.tolist()


def test_buffers_start_equal(ranks):
    assert ranks(2).run(buffers_after_sharding) == [[5.0] * 6] * 2


def without_sync() -> list:
    """Each rank's own weights stay, in its shard."""
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, float(get_dist_info().rank))
    return full(shard_model(net, build_mesh(), sync=False).weight).tolist()


def test_sync_disabled_keeps_each_ranks_values(ranks):
    assert ranks(2).run(without_sync) == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def odd_buffers() -> list:
    """Buffers of unusual layout and dtype, after sharding."""
    rank = get_dist_info().rank
    net = nn.Linear(2, 2)
    net.register_buffer("strided", torch.arange(8.0)[::2] + rank)
    net.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T + rank)
    net.register_buffer("expanded", torch.tensor([float(rank)]).expand(3))
    net.register_buffer("short", torch.tensor([rank, 7], dtype=torch.int16))
    net.register_buffer("scalar", torch.tensor(rank == 1))
    net = shard_model(net, build_mesh())
    return [buffer.tolist() for buffer in net.buffers()]


def test_buffers_of_any_layout_and_dtype_equal_rank_0(ranks):
    expected = [[0, 2, 4, 6], [[0, 3], [1, 4], [2, 5]], [0, 0, 0], [0, 7], False]
    assert ranks(2).run(odd_buffers) == [expected] * 2


def refused(case: str) -> str:
    net, mesh, rank = model(), build_mesh(), get_dist_info().rank
    options: dict = {
        "strategy": {"strategy": "zero3"},
        "accumulate": {"accumulate": "never"},
        "buffers": {"buffers": "total"},
        "hybrid": {"strategy": "hybrid_shard"},
        "block": {"blocks": (nn.Conv2d,)},
        "other options": {"blocks": (Block,) if rank == 0 else ()},
        "other strategy": {"strategy": "full_shard" if rank == 0 else "replicate"},
        "one bad option": {"strategy": "full_shard" if rank == 0 else "zero3"},
        "one bad predicate": {"blocks": lambda name, module: rank == 0 or fail()},
        "left out on one rank": {"ignored_params": lambda name, p: rank == 0 and name == "0.bias"},
        "list": {"strategy": ["full_shard"]},
        "precision": {"precision": "bf16"},
        "no blocks": {"blocks": None},
        "nothing to leave out": {"ignored_params": None},
        "methods": {"forward_methods": (3,)},
        "no methods": {"forward_methods": None},
    }.get(case, {})
    if case == "twice":
        net = shard_model(net, mesh)
    elif case == "inside":
        net = nn.Sequential(shard_model(net, mesh))
    elif case == "other model":
        net = model(6 + rank)
    elif case == "more layers":
        net = net if rank == 0 else nn.Sequential(*net, nn.Linear(3, 3))
    elif case == "frozen":
        net[0].requires_grad_(rank == 0)
    elif case == "block of a sharded model":
        net = shard_model(net, mesh)[1]
    elif case == "two dtypes":
        net[2].inner.weight.data = net[2].inner.weight.data.double()
    elif case == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif case == "no model":
        net = net.parameters()
    elif case == "no mesh":
        mesh = None
    try:
        shard_model(net, mesh, **options)
    except (ValueError, KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail() -> bool:
    raise KeyError("no such module")


SAME = [
    (
        "strategy",
        "ConfigError: shard_model: strategy must be 'full_shard', 'shard_grad_op', 'hybrid_shard', 'replicate' or "
        "'no_shard', got 'zero3'.",
    ),
    ("accumulate", "ConfigError: shard_model: accumulate must be 'local' or 'sharded', got 'never'."),
    ("buffers", "ConfigError: shard_model: buffers must be 'broadcast', 'mean', 'sum' or 'own', got 'total'."),
    (
        "hybrid",
        "hybrid_shard needs a mesh of two axes with dp_replicate > 1, got shape [1, 2]. "
        "Pass for example dt.build_mesh(dp_replicate=2",
    ),
    ("twice", "is sharded already (full_shard). Call shard_model once."),
    ("inside", "a FSDPSequential inside the model is sharded already. Shard the whole model once."),
    ("block", "blocks names Conv2d, but the model has no such module"),
    (
        "other model",
        "the model of rank 1 must equal the model of rank 0 ('0.weight [6, 5] float32'), got '0.weight [7, 5] float32'",
    ),
    (
        "more layers",
        "the model of rank 1 must equal the model of rank 0 ('1.norm.running_mean [6]",
    ),
    ("frozen", "('0.weight [6, 5] float32'), got '0.weight [6, 5] frozen float32'. Build the model from the same config"),
    ("other options", "must equal the model of rank 0 (\"unit ['1']\"), got"),
    ("other strategy", "the model of rank 1 must equal the model of rank 0 ('option full_shard'), got 'option replicate'"),
    ("left out on one rank", "the model of rank 1 must equal the model of rank 0 (\"ignored ['0.bias']\"), got 'ignored []'"),
    ("block of a sharded model", "the parameters of the Block are DTensors already. Shard the whole model once."),
    ("ddp", "model must not be wrapped in DistributedDataParallel, which also reduces gradients. Pass the inner model."),
    (
        "two dtypes",
        "the unit of the model has trainable parameters of several dtypes (0.weight float32, 2.inner.weight float64). "
        "Convert the parameters, put each dtype in a separate unit (blocks=), or ignore parameters (ignored_params=).",
    ),
    ("no model", "ConfigError: shard_model: model must be a torch.nn.Module, got generator"),
    ("no mesh", "ConfigError: shard_model: mesh must be a DeviceMesh, got NoneType. Use dt.build_mesh."),
    (
        "list",
        "ConfigError: shard_model: strategy must be 'full_shard', 'shard_grad_op', 'hybrid_shard', 'replicate' or 'no_shard', "
        "got ['full_shard'].",
    ),
    (
        "precision",
        "ConfigError: shard_model: precision must be a Precision or None, got 'bf16'. "
        "Pass for example dt.Precision(param='bf16').",
    ),
    ("no blocks", "blocks must be module classes, names or a function of (name, module), got None"),
    ("nothing to leave out", "ignored_params must be names or a function of (name, parameter), got None"),
    ("methods", "forward_methods must be a sequence of names, got (3,)"),
    ("no methods", "forward_methods must be a sequence of names, got None"),
]


@pytest.mark.parametrize(("case", "message"), SAME)
def test_refusals_raise_the_same_one_line_error_on_all_ranks(ranks, case, message):
    first, second = ranks(2).run(refused, case)
    assert message in first
    assert first == second
    assert "\n" not in first


@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        (
            "one bad option",
            "ConfigError: shard_model: strategy must be 'full_shard', 'shard_grad_op', 'hybrid_shard', 'replicate' or "
            "'no_shard', got 'zero3'.",
            "PeerError: shard_model: rank 1 failed (1 of 2",
        ),
        (
            "one bad predicate",
            "KeyError: 'no such module'",
            "PeerError: shard_model: rank 1 failed (1 of 2 ranks did): KeyError",
        ),
    ],
)
def test_error_of_one_rank_raises_on_all_ranks(ranks, case, own, others):
    first, second = ranks(2).run(refused, case)
    assert others in first
    assert own in second


def mixed_precision() -> list[str]:
    net = shard_model(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), build_mesh(), precision=Precision(param="bf16", reduce="fp32")
    )
    seen = []
    net[0].register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
    with as_in_a_step(net):
        net(torch.ones(2, 4)).float().sum().backward()
    return [*seen, *{str(p.dtype) for p in net.parameters()}, *{str(p.grad.dtype) for p in net.parameters()}]


def test_precision_applies_to_compute_and_not_to_storage(ranks):
    assert ranks(2).run(mixed_precision)[0] == ["torch.bfloat16", "torch.float32", "torch.float32"]


def output_dtypes() -> list[str]:
    precision = Precision(param="bf16", output="fp32")
    net = shard_model(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), build_mesh(), precision=precision, blocks=(nn.Linear,))
    seen = []
    net[0].register_forward_hook(lambda module, args, out: seen.append(str(out.dtype)))
    return [str(net(torch.ones(2, 4)).dtype), *seen]


def test_output_dtype_applies_only_to_the_root(ranks):
    assert ranks(2).run(output_dtypes)[0] == ["torch.float32", "torch.bfloat16"]


def gathered_after_forward(strategy: str) -> list[bool]:
    """Return True for a block and for the root that hold gathered parameters after a forward within a step."""
    net = shard_model(model(), build_mesh(), strategy=strategy, blocks=(Block,))
    with as_in_a_step(net):
        net(torch.ones(2, 5))
    return [not hasattr(net[index].inner.weight if index == 1 else net[index].weight, "full_tensor") for index in (1, 0)]


@pytest.mark.parametrize(
    ("strategy", "gathered"), [("full_shard", [False, True]), ("shard_grad_op", [True, True]), ("replicate", [True, True])]
)
def test_only_full_shard_reshards_blocks_after_forward(ranks, strategy, gathered):
    assert ranks(2).run(gathered_after_forward, strategy) == [gathered] * 2


def test_precision_refuses_an_unknown_dtype():
    with pytest.raises(ValueError, match="Precision: param must be 'fp32', 'bf16', 'fp16' or None, got 'fp8'"):
        Precision(param="fp8")


def evaluate_then_look() -> list:
    net = shard_model(model(), build_mesh(), blocks=(Block,))
    net[1].eval()
    with eval_mode(net):
        inside = [module.training for module in net.modules()]
        net(torch.ones(2, 5))
    return [any(inside), net.training, net[1].training, all(hasattr(p, "full_tensor") for p in net.parameters())]


def test_eval_mode_restores_module_modes_and_reshards(ranks):
    assert ranks(2).run(evaluate_then_look) == [[False, True, False, True]] * 2
