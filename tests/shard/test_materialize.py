"""materialize: the same initial weights on every mesh, buffers rebuilt, and nothing left uninitialised."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import seed_all
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize


class Rotary(nn.Module):
    """A table computed in ``__init__``, never written again."""

    def __init__(self, dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("table", base ** -(torch.arange(0, dim, 2) / dim), persistent=False)


class Scale(nn.Module):
    """A parameter without reset_parameters, and a mask beside children that hold weights."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.scale = nn.Parameter(torch.full((dim,), 0.5))
        self.register_buffer("mask", torch.tril(torch.ones(dim, dim, dtype=torch.bool)))
        self.child = nn.Linear(dim, dim)


class Own(nn.Module):
    """An initialiser of its own that writes a parameter and a buffer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.count.fill_(3)


class WritesChild(nn.Module):
    """An initialiser that draws its child's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(3))
        self.child = nn.Linear(3, 5)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)
        nn.init.normal_(self.child.weight, std=0.02)


class Container(nn.Module):
    """An initialiser of a module that owns nothing itself, drawn with NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 5, bias=False)

    def reset_parameters(self) -> None:
        self.child.weight.copy_(torch.from_numpy(np.random.randn(5, 3)) + random.random())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes = WritesChild()
        self.container = Container()
        self.rotary = Rotary(8)
        self.scale = Scale(7)
        self.own = Own((5, 3))
        self.norm = nn.BatchNorm1d(4)
        self.mixer = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(10, 4)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def values(model: nn.Module) -> dict:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for name, t in named}


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def initial_weights(strategy: str) -> dict:
    model = on_meta(Net)
    if strategy:
        model = shard_model(model, build_mesh(), strategy=strategy, blocks=(nn.Linear, Own))
    seed_all(99, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    before = draws()
    seed_all(99, torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model = materialize(model, seed=5)
    assert draws() == before, "the global streams go on as if nothing had been drawn"
    return values(model)


@pytest.fixture(scope="module")
def alone() -> dict:
    return initial_weights("")


QUICK = {(1, "replicate"), (2, "full_shard"), (3, "full_shard"), (4, "replicate")}


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        pytest.param(n, strategy, marks=() if (n, strategy) in QUICK else pytest.mark.slow)
        for n in (1, 2, 3, 4)
        for strategy in ("full_shard", "replicate")
    ],
)
def test_initial_weights_do_not_depend_on_the_mesh(ranks, alone, world_size, strategy):
    for result in ranks(world_size).run(initial_weights, strategy):
        assert result == alone


def test_materialized_values_equal_construction_values(alone):
    built = values(Net())
    assert alone.keys() == built.keys()
    for name in ("rotary.table", "scale.scale", "scale.mask", "norm.running_var", "mixer.out_proj.bias", "mixer.in_proj_bias"):
        assert alone[name] == built[name], name
    assert alone["own.count"] == 3
    assert torch.tensor(alone["writes.child.weight"]).std() < 0.05, "the parent has the last word"
    assert torch.tensor(alone["container.child.weight"]).std() > 0.5
    assert len({x for row in alone["own.weight"] for x in row}) == 15, "each element is drawn on its own"


def test_values_depend_on_seed_and_parameter_name(alone):
    assert values(materialize(on_meta(Net), seed=6))["embedding.weight"] != alone["embedding.weight"]

    twins = materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), seed=5)
    assert not twins[0].weight.equal(twins[1].weight)


class Nobody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Junk(nn.Module):
    """Memory as it is, by every name for it."""

    def __init__(self) -> None:
        super().__init__()
        like = torch.zeros(3)
        made = [torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))]
        for index, tensor in enumerate(made):
            self.register_buffer(f"b{index}", tensor)


class Scales(nn.Module):
    """An initialiser that changes the draws of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        self.child.weight.mul_(0.1)


class Half(Nobody):
    def reset_parameters(self) -> None:
        self.weight[:2].fill_(1.0)


class Forgetful(nn.Module):
    """A buffer from an argument that is not kept: running __init__ again would have to guess it."""

    def __init__(self, dim: int, base: float = 10.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", base ** torch.arange(dim))


class Misleading(nn.Module):
    """An attribute of the argument's name that holds another object."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("table", torch.arange(2 * (dim // 2)) / dim)


@pytest.mark.parametrize("kind", [Nobody, Half, lambda: Forgetful(4, base=2.0), lambda: Misleading(8)])
def test_uninitialized_tensors_are_refused_by_name(kind):
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), kind()))
    name = "1.weight" if isinstance(model[1], Nobody) else "1.table"
    with pytest.raises(ConfigError, match=f"nothing initializes {name} \\(1 tensors\\). Write the tensors in reset_parameters"):
        materialize(model, seed=0)


def test_uninitialized_memory_is_refused():
    with pytest.raises(ConfigError, match=r"nothing initializes b0, b1, b2 \(3 tensors\)"):
        materialize(on_meta(Junk), seed=0)


def test_partial_write_of_a_child_tensor_is_refused():
    with pytest.raises(ConfigError, match=r"the initializer of 0 writes only a part of Linear.weight"):
        materialize(on_meta(lambda: nn.Sequential(Scales())), seed=0)


def test_init_writes_tensors_without_reset_parameters():
    def init(module: nn.Module) -> None:
        if isinstance(module, Nobody):
            module.weight.fill_(2.0)
        if isinstance(module, nn.Linear):
            module.weight.zero_()

    model = materialize(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Nobody())), seed=0, init=init)
    assert model[1].weight.tolist() == [2.0] * 3
    assert model[0].weight.eq(0).all()


def test_tensors_off_meta_do_not_change():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    real = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    model[0].weight = real
    materialize(model, seed=0)
    assert model[0].weight is real
    assert model[0].weight.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert not model[0].bias.is_meta


def test_tied_weights_stay_tied():
    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(9, 64), nn.Linear(64, 9, bias=False))
        model[1].weight = model[0].weight
        return model

    model = materialize(on_meta(make), seed=0)
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, Tensor)
    # The embedding was there first, so its draw (standard deviation 1) is the weight of both.
    assert model[0].weight.std() > 0.5


class LoraLinear(nn.Module):
    """An adapter in the form of peft's: plain layers in a ModuleDict, of which ``__init__`` writes the second to zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.r = base, {"default": rank}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.reset_lora_parameters("default", True)

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        if init_lora_weights == "gaussian":
            nn.init.normal_(self.lora_A[adapter_name].weight, std=1 / self.r[adapter_name])
        elif init_lora_weights is True:
            nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))
        if init_lora_weights is not False:
            nn.init.zeros_(self.lora_B[adapter_name].weight)


class Adapted(nn.Module):
    """A model with an adapter, and the configuration that peft leaves in it; None: another library made it."""

    def __init__(self, kind: object = None) -> None:
        super().__init__()
        self.first, self.adapted = nn.Linear(8, 64), LoraLinear(nn.Linear(64, 64), 16)
        if kind is not None:
            self.peft_config = {"default": SimpleNamespace(init_lora_weights=kind)}


def wide_init(module: nn.Module) -> None:
    """An initialiser of every layer, as that of a model of transformers, which knows nothing of adapters."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=5.0)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def adapters(kind: object, strategy: str) -> dict[str, float]:
    model = on_meta(lambda: Adapted(kind))
    if strategy:
        model = shard_model(model, build_mesh(), strategy=strategy, blocks=(LoraLinear,))
    made = values(materialize(model, seed=0, init=wide_init))
    return {name: torch.tensor(value).norm().item() for name, value in made.items() if "lora" in name or "base" in name}


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "norm"), [(True, 4 / 3**0.5), ("gaussian", 2.0)])  # of 1,024 elements
def test_peft_adapters_get_peft_initial_values(ranks, kind, norm):
    norms = adapters(kind, "")
    assert norms["adapted.lora_B.default.weight"] == 0.0
    assert norms["adapted.lora_A.default.weight"] == pytest.approx(norm, rel=0.1)
    assert norms["adapted.base_layer.weight"] == pytest.approx(5.0 * 64, rel=0.1)
    assert ranks(2).run(adapters, kind, "full_shard") == [pytest.approx(norms)] * 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pissa", "materialize: init_lora_weights of the adapter 'default' must be True, False or 'gaussian', got 'pissa'"),
        (
            None,
            r"materialize: adapted.lora_A.default.weight, adapted.lora_B.default.weight \(2 tensors\) were written again after "
            r"their reset_parameters during construction, probably by LoraLinear.reset_lora_parameters\. The meta",
        ),
    ],
)
@pytest.mark.parametrize("init", [None, wide_init])
def test_uninitializable_peft_adapters_are_refused_by_name(kind, message, init):
    with pytest.raises(ConfigError, match=message):
        materialize(on_meta(lambda: Adapted(kind)), seed=0, init=init)


class ZeroOut(nn.Module):
    """A residual branch that begins at zero, as its ``__init__`` says and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.out.weight)


class ZeroOutAgain(ZeroOut):
    """The same, in a function that materialize calls."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.out.weight)


class ZeroLinear(nn.Linear):
    """A layer whose own ``__init__`` has the last word."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        nn.init.zeros_(self.weight)


class Applied(nn.Module):
    """An initialiser that a part of the model applies, and then the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4)).apply(wide_init)
        self.apply(wide_init)


@pytest.mark.parametrize(("make", "name"), [(ZeroOut, "out.weight"), (lambda: ZeroLinear(3, 3), "weight")])
def test_repeated_construction_writes_are_refused_by_name(make, name):
    message = rf" {name} \(1 tensors\) were written again after their reset_parameters during construction. The meta"
    with pytest.raises(ConfigError, match=message):
        materialize(on_meta(make), seed=0)


def test_parent_write_to_a_child_tensor_is_refused_when_sharded(ranks):
    assert ranks(2).run(zero_out_sharded) == ["materialize: 0.out.weight"] * 2


def zero_out_sharded() -> str:
    model = shard_model(on_meta(lambda: nn.Sequential(ZeroOut())), build_mesh(), blocks=(nn.Linear,))
    try:
        materialize(model, seed=0)
    except ConfigError as error:
        return str(error).partition(" (")[0]
    return "no error"


def test_zeros_rewritten_by_reset_parameters_are_kept():
    assert not materialize(on_meta(ZeroOutAgain), seed=0).out.weight.any()


def test_init_that_was_applied_twice_is_accepted():
    assert materialize(on_meta(Applied), seed=0, init=wide_init).part[0].weight.std() > 2


class Branch(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)


class Residual(nn.Module):
    """A model that gives the ends of its branches smaller values, after it has initialised all layers, as nanoGPT does."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(bias) for _ in range(2))
        self.apply(wide_init)
        for branch in self.branches:
            nn.init.normal_(branch.out.weight, std=0.01)


@pytest.mark.parametrize("bias", [True, False])
def test_writes_after_the_model_initializer_warn_by_name(bias):
    told = r"materialize: branches.0.out.weight, branches.1.out.weight \(2 tensors\) were written again"
    with pytest.warns(UserWarning, match=told):
        materialize(on_meta(lambda: Residual(bias)), seed=0, init=wide_init)


class Scaled(nn.Module):
    """A model whose initialiser writes the layers of a branch from the branch, as those of GPT-2 and T5 do."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.Sequential(*[Branch(True) for _ in range(2)])

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=100.0)
            nn.init.ones_(module.bias)
        if isinstance(module, Branch):
            nn.init.normal_(module.out.weight, std=0.01)


def scaled() -> dict[str, list]:
    model = shard_model(on_meta(Scaled), build_mesh(), blocks=(Branch,))
    model = materialize(model, seed=0, init=model.init_weights)
    return {name: value.full_tensor().tolist() for name, value in model.named_parameters()}


def test_initializer_method_writes_tensors_of_descendants(ranks):
    two, one = ranks(2).run(scaled)[0], ranks(1).run(scaled)[0]
    assert two == one
    for name, value in two.items():
        tensor = torch.tensor(value)
        expected = (1.0, 1.0) if "bias" in name else (0.005, 0.02) if "out" in name else (50.0, 200.0)
        assert expected[0] <= tensor.square().mean().sqrt() <= expected[1], name


def test_initializer_keeps_descendant_tensors_that_are_off_meta():
    model = on_meta(Scaled)
    real = nn.Parameter(torch.ones_like(model.branches[0].out.weight, device="cpu"))
    model.branches[0].out.weight = real
    materialize(model, seed=0, init=model.init_weights)
    assert model.branches[0].out.weight is real
    assert real.eq(1).all()


def test_transformers_model_without_init_argument_is_refused():
    config = GPTNeoXConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    with pytest.raises(
        ConfigError, match=r"GPTNeoXForCausalLM of transformers does not initialize .*. Pass init=model._init_weights"
    ):
        materialize(on_meta(lambda: GPTNeoXForCausalLM(config)), seed=0)
