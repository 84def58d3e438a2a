"""Blocks compiled one by one: the same gradients, with every strategy and with recomputed activations."""

import copy
import os
import shutil

import pytest
import torch
from torch import Tensor, nn

from dtrain.dist.init import DistInfo
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard import activations as home
from dtrain.shard.activations import checkpoint_activations, compile_blocks, offload_activations
from dtrain.shard.fsdp import shard_model
from shard import test_activation_checkpoint as memory
from shard.test_activation_checkpoint import Noisy, Quiet, made, same

pytestmark = [
    # dynamo looks at .grad of every value in a frame, and means to hide torch's warning about it
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # importing the compiler makes old modules of torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

TOLERANCE = 1e-12  # float64; a compiler may add in another order
ROUTES = {  # functions to apply before sharding, and after it
    "compiled before": (lambda net: compiled(net), same),
    "compiled after": (same, lambda net: compiled(net)),
    "checkpointed": (memory.again, lambda net: compiled(net)),
    "checkpointed, all before": (lambda net: compiled(memory.again(net)), same),
    "offloaded": (lambda net: memory.moved(memory.again(net)), lambda net: compiled(net)),
    "by hand": (memory.again, lambda net: by_hand(net)),
}


@pytest.fixture(autouse=True)
def forget():
    """Reset the compiler, because code compiled in other tests counts towards dynamo's limits.

    A default device doubles the variants of a block. Past dynamo's limit of 8, the forward of a block is compiled and its
    recomputation is not, which torch refuses.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def compiled(net: nn.Module, **options) -> nn.Module:
    return compile_blocks(net, blocks=(Noisy if isinstance(net.blocks[0], Noisy) else Quiet), backend="aot_eager", **options)


def by_hand(net: nn.Module) -> nn.Module:
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


def alone(net: nn.Module) -> list[Tensor]:
    grads, buffers, _ = memory.alone(net)
    return [*grads, *buffers]


def error(computed: list[Tensor], expected: list[Tensor]) -> float:
    assert len(computed) == len(expected) > 0
    return max((a - b).abs().max().item() for a, b in zip(computed, expected, strict=True))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("route", "block"),
    [
        pytest.param(route, kind, marks=() if kind is Noisy or route == "checkpointed" else pytest.mark.slow)
        for route in ROUTES
        for kind in memory.KINDS
    ],
)
def test_compiled_plain_model_matches_gradients_and_buffers(route, block):
    before, after = ROUTES[route]
    assert error(alone(after(before(made(block)))), alone(made(block))) <= TOLERANCE


@pytest.mark.costly
def test_kept_matmuls_are_not_recomputed():
    counts = {}
    for keep in ("nothing", "matmuls"):
        torch._dynamo.reset()
        net = checkpoint_activations(made(Quiet).eval(), blocks=Quiet, keep=keep)
        compile_blocks(net, blocks=Quiet, backend="aot_eager_decomp_partition")
        out = net(torch.randn(4, 6, dtype=torch.float64)).sum()
        with memory.Seen() as backward:
            out.backward()
        counts[keep] = backward.ops.count(torch.ops.aten.addmm.default)
    assert counts == {"nothing": 5, "matmuls": 0}


def sharded(strategy: str, routes: list[str]) -> dict[str, float]:
    errors = {}
    for block in memory.KINDS:
        expected = memory.stepped(made(block), strategy, blocks=(block,))
        for route in routes:
            torch._dynamo.reset()
            before, after = ROUTES[route]
            net = shard_model(before(made(block)), mesh_for(strategy), strategy=strategy, blocks=(block,))
            grads, buffers, _ = memory.trained(after(net))
            errors[f"{block.__name__} {route}"] = error([*grads, *buffers], [*expected[0], *expected[1]])
    return errors


def mesh_for(strategy: str):
    return build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()


@pytest.mark.slow
def test_compiled_sharded_model_matches_gradients_and_buffers(ranks):
    for errors in ranks(2).run(sharded, "full_shard", ["checkpointed"]):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.slow
@pytest.mark.parametrize("strategy", memory.STRATEGIES)
def test_compiled_sharded_model_matches_for_every_strategy_and_order(ranks, strategy):
    for errors in ranks(4 if strategy == "hybrid_shard" else 2).run(sharded, strategy, list(ROUTES), timeout_s=600.0):
        assert max(errors.values()) <= TOLERANCE, errors


def test_compiled_model_keeps_state_dict_names():
    net = compiled(made(Quiet))
    assert net.state_dict().keys() == made(Quiet).state_dict().keys()
    assert all(block._compiled_call_impl is not None for block in net.blocks)
    assert net.head._compiled_call_impl is None


@pytest.mark.costly
@pytest.mark.parametrize("change", [compiled, lambda net: compiled(memory.again(net))], ids=["whole", "inside"])
def test_deepcopy_of_a_compiled_model_has_its_own_parameters(change):
    net = change(made(Noisy))
    expected = alone(net)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    twin.zero_grad()
    twin.load_state_dict(made(Noisy).state_dict())
    assert error(alone(twin), expected) <= TOLERANCE


# The budget


def kept(budget: float) -> int:
    """Bytes that autograd holds after a forward of one long block."""
    net = nn.Sequential(Long())
    compile_blocks(net, blocks=Long, backend="aot_eager_decomp_partition", memory_budget=budget)
    return memory.saved_bytes(net)


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_smaller_activation_budget_saves_fewer_bytes():
    assert kept(0.0) < kept(1.0)
    assert torch._functorch.config.activation_memory_budget == 1.0, "the process's own setting is untouched"


# Places of compiled code


@pytest.mark.parametrize(("own", "expected"), [(None, "compiled"), ("mine", "mine")], ids=["not set", "the user's own"])
def test_inductor_cache_is_stored_in_the_run_folder(monkeypatch, tmp_path, own, expected):
    # Set first, so that the variable is restored afterwards.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / str(own)))
    if own is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(home, "get_dist_info", lambda: DistInfo(run_dir=tmp_path))
    compiled(made(Quiet))
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(tmp_path / expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compiled(made(Quiet), memory_budget=1.5), "must be a finite number at least 0 and at most 1, got 1.5"),
        (lambda: compiled(made(Quiet), memory_budget=True), "must be a finite number at least 0 and at most 1, got True"),
        (
            lambda: compiled(made(Quiet), memory_budget=0.5, mode="default"),
            "memory_budget cannot be combined with mode or options",
        ),
        (lambda: compile_blocks(made(Quiet), blocks=()), "compile_blocks: blocks=.* selects no module inside the model"),
        (lambda: compile_blocks(made(Quiet), blocks="x.*"), "compile_blocks: blocks names 'x"),
        (lambda: compiled(compiled(made(Quiet))), "blocks are compiled already. Call compile_blocks once."),
        (
            lambda: compiled(compiled(memory.again(made(Noisy)))),
            "compile_blocks: blocks are compiled already. Call compile_blocks once.",
        ),
        (
            lambda: compiled(checkpoint_activations(made(Noisy), blocks=Noisy, keep="matmuls")),
            "a Noisy has selective checkpointing and buffers, which cannot be compiled together. Pass keep='nothing'",
        ),
        (
            lambda: compiled(
                offload_activations(checkpoint_activations(made(Quiet), blocks=Quiet, keep="matmuls"), blocks=Quiet)
            ),
            "a Quiet has selective checkpointing and offloaded activations",
        ),
    ],
)
def test_unsupported_blocks_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gradients_match_the_plain_model(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for block in memory.KINDS:
        torch._dynamo.reset()
        net = compile_blocks(memory.again(made(block)).eval(), blocks=block)  # without dropout: inductor draws its own numbers
        assert error(alone(net), alone(made(block).eval())) <= TOLERANCE
    assert any(tmp_path.iterdir())
