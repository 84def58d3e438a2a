"""Activations computed again or moved: the same numbers, bit for bit, with every strategy, and fewer bytes."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import rng_state
from dtrain.errors import ConfigError
from dtrain.shard import activations
from dtrain.shard.activations import ActivationOffloader, checkpoint_activations, compile_blocks, offload_activations
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from shard import models

DIM, SAMPLES = 6, 16
STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"]


class Noisy(nn.Module):
    """Draws random numbers, counts batches, and starts each power iteration from where the last one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, 9))
        self.down = nn.Linear(9, DIM)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = x + self.down(torch.dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training))
        return torch.dropout(x, 0.1, self.training) * scale


class Quiet(nn.Module):
    """Draws random numbers; has no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 9), nn.Linear(9, DIM)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.down(torch.dropout(torch.tanh(self.up(x)), 0.3, self.training)) * scale


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.9)
        return self.head(self.blocks[0](x))


KINDS = (Noisy, Quiet)


def made(block: type[nn.Module]) -> Net:
    torch.manual_seed(0)
    return Net(block).double()


def moved(net: nn.Module) -> nn.Module:
    """As ``offload_activations``, but also on the CPU, where the copies are real copies in the same memory."""
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    for module in net.modules():
        if isinstance(module, KINDS):
            activations._update_settings(module, offloaded=offloader)
    return net


def keep_tanh(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE


def keep_draws(context, op, *args, **kwargs):
    return op in (torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default, torch.ops.aten.addmm.default)


def same(net: nn.Module) -> nn.Module:
    return net


def again(net: nn.Module, **options) -> nn.Module:
    return checkpoint_activations(net, blocks=KINDS[0] if isinstance(net.blocks[0], Noisy) else Quiet, **options)


def compiled(net: nn.Module) -> nn.Module:
    return compile_blocks(net, blocks=KINDS[0] if isinstance(net.blocks[0], Noisy) else Quiet, backend="aot_eager")


BEFORE = {  # edits of the model before it is sharded
    "checkpointed": again,
    "every second": lambda net: again(net, every=2),
    "matmuls kept": lambda net: again(net, keep="matmuls"),
    "own policy": lambda net: again(net, keep=keep_tanh),
    "a policy that keeps draws": lambda net: again(net, keep=keep_draws),
    "offloaded": moved,
    "checkpointed and offloaded": lambda net: moved(again(net)),
}


POLICIES = ("matmuls kept", "own policy", "a policy that keeps draws")


def numbers(net: nn.Module) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients, buffers, and where the random numbers are."""
    grads = [full_tensor(p.grad).clone() for p in net.parameters() if p.grad is not None]
    return grads, [buffer.clone() for buffer in net.buffers()], torch.get_rng_state()


def equal(a, b) -> list[bool]:
    return [
        len(a[0]) == len(b[0]) > 0 and all(map(torch.equal, a[0], b[0])),
        all(map(torch.equal, a[1], b[1])),
        torch.equal(a[2], b[2]),
    ]


def alone(net: nn.Module) -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(1)
    for _ in range(2):
        net(torch.randn(4, DIM, dtype=torch.float64)).square().sum().backward()
    return numbers(net)


@pytest.mark.parametrize("block", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", BEFORE)
def test_checkpointed_plain_model_matches_gradients_buffers_and_rng(kind, block):
    assert equal(alone(BEFORE[kind](made(block))), alone(made(block))) == [True] * 3


def loss_fn(net: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    return LossSum(total=net(batch["x"]).square().sum(), weight=float(len(batch["x"])))


def stepped(net: nn.Module, strategy: str, **options):
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    return trained(shard_model(net, mesh, strategy=strategy, **options))


def trained(net: nn.Module):
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.manual_seed(1 + get_dist_info().rank)
    share = SAMPLES // get_dist_info().world_size
    data = torch.randn(SAMPLES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    batch = {"x": data[get_dist_info().rank * share : (get_dist_info().rank + 1) * share]}
    for _ in range(2):  # the second begins with the state that the first has left
        microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=2 if get_dist_info().world_size > 2 else 4)
    return numbers(net)


def sharded(strategy: str, names: list[str], cuts: list[str]) -> dict[str, list[bool]]:
    results = {}
    for block in KINDS:
        for cut in cuts:
            layout = {"blocks": (block,), "units inside": (block, nn.Linear), "some blocks": ("blocks.1", "head")}[cut]
            plain = stepped(made(block), strategy, blocks=layout)
            for kind in names:
                net = BEFORE[kind](made(block))
                results[f"{block.__name__}, {cut}, {kind}"] = equal(stepped(net, strategy, blocks=layout), plain)
    return results


def check_sharded(ranks, strategy: str, names, cuts) -> None:
    for results in ranks(4 if strategy == "hybrid_shard" else 2).run(
        sharded, strategy, list(names), list(cuts), timeout_s=600.0
    ):
        assert {kind: outcome for kind, outcome in results.items() if outcome != [True] * 3} == {}
        assert len(results) == len(KINDS) * len(cuts) * len(names)


@pytest.mark.costly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpointed_sharded_model_matches_gradients_buffers_and_rng(ranks, strategy):
    check_sharded(ranks, strategy, ("matmuls kept", "checkpointed and offloaded"), ("blocks",))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_option_supports_every_unit(ranks, strategy):
    check_sharded(ranks, strategy, BEFORE, ("blocks", "some blocks"))
    check_sharded(ranks, strategy, [kind for kind in BEFORE if kind not in POLICIES], ("units inside",))


def refused_inside() -> str:
    net = shard_model(again(made(Quiet), keep="matmuls"), build_mesh(), blocks=(Quiet, nn.Linear))
    try:
        net(torch.randn(2, DIM, dtype=torch.float64))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_selective_checkpointing_around_sharded_units_is_refused(ranks):
    for message in ranks(2).run(refused_inside):
        assert "a FSDPQuiet with selective checkpointing contains a sharded unit" in message


def awkward(strategy: str) -> dict[str, float]:
    """The models that are hard to cut, their blocks checkpointed: the error of the gradient."""
    errors = {}
    mesh = build_mesh()
    for name in ("called twice", "methods", "tied", "frozen", "left out", "some unused"):
        net = checkpoint_activations(models.make(name), blocks=models.Fork if name == "some unused" else models.Block)
        net = shard_model(net, mesh, strategy=strategy, **models.CASES[name].options)
        state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
        size = models.SAMPLES // get_dist_info().world_size
        mine = slice(get_dist_info().rank * size, (get_dist_info().rank + 1) * size)
        batch = {key: value[mine] for key, value in models.batch(name, models.WEIGHTS).items()}
        microbatch_step(state, batch, loss_fn=models.CASES[name].loss, microbatch_size=2)
        errors[name] = models.difference(name, state.params)
    return errors


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_unusual_models_match_the_single_process_gradient(ranks, strategy):
    for errors in ranks(2).run(awkward, strategy):
        assert max(errors.values()) <= 1e-12, errors


# Kept and saved memory


def saved_bytes(net: nn.Module) -> int:
    """Return the bytes that autograd holds after a forward, without parameters, each storage once."""
    held = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(torch.randn(32, DIM, dtype=torch.float64))
        assert out.requires_grad
        return sum(size for size, _ in held.values())


def test_saved_bytes_decrease_with_more_recomputation():
    full, half, none = saved_bytes(again(made(Quiet))), saved_bytes(again(made(Quiet), every=2)), saved_bytes(made(Quiet))
    assert full < half < none


class Seen(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "products"), [("nothing", True), ("matmuls", False)])
def test_matmuls_are_recomputed_unless_kept(keep, products):
    out = again(made(Quiet), keep=keep)(torch.randn(4, DIM, dtype=torch.float64)).sum()
    with Seen() as backward:
        out.backward()
    assert torch.ops.aten.tanh.default in backward.ops
    assert (torch.ops.aten.addmm.default in backward.ops) is products


def test_attention_is_kept_only_without_dropout():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    keeps = partial(activations._recompute_random_ops, activations._keep_matmuls, None, attention)
    assert keeps(None, None, None) is True
    assert keeps(None, None, None, 0.0) is True
    assert keeps(None, None, None, 0.1) is keeps(None, None, None, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


def test_checkpointed_eval_without_gradients_matches_the_plain_model():
    net = again(made(Noisy)).eval()
    with torch.no_grad():
        x = torch.randn(4, DIM, dtype=torch.float64)
        assert torch.equal(net(x), made(Noisy).eval()(x))


def test_retained_graph_recomputes_in_each_backward():
    net, plain = again(made(Noisy)), made(Noisy)
    for model in (net, plain):
        torch.manual_seed(3)
        out = model(torch.randn(4, DIM, dtype=torch.float64)).sum()
        out.backward(retain_graph=True)
        out.backward()
    assert equal(numbers(net), numbers(plain)) == [True] * 3


class Broken(RuntimeError):
    pass


def test_exception_during_recomputation_keeps_buffers_unchanged():
    net = again(made(Noisy))
    out = net(torch.randn(4, DIM, dtype=torch.float64)).sum()
    before = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    calls = []

    def fail(module, args):
        calls.append(module)
        raise Broken

    net.blocks[1].down.register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        out.backward()
    assert len(calls) == 1
    assert all(buffer is before[name][0] and torch.equal(buffer, before[name][1]) for name, buffer in net.named_buffers())


def test_checkpointed_model_keeps_names_and_supports_deepcopy():
    net = moved(again(made(Noisy)))
    assert net.state_dict().keys() == made(Noisy).state_dict().keys()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert not equal(alone(twin), alone(net))[0], "the copy computes with parameters of its own"
    assert equal(alone(copy.deepcopy(net)), alone(net))[2]


def test_rng_state_after_recomputation_matches_the_plain_model():
    states = []
    for net in (again(made(Quiet)), made(Quiet)):
        alone(net)
        states.append(rng_state())
    assert str(states[0]) == str(states[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: checkpoint_activations(net, blocks=nn.Conv2d), "checkpoint_activations: blocks names Conv2d, but the"),
        (lambda net: checkpoint_activations(net, blocks=()), "checkpoint_activations: blocks=.* selects no module inside the"),
        (lambda net: checkpoint_activations(net, blocks=Net), "selects no module inside the model"),
        (lambda net: again(net, every=0), "every must be an integer of at least 1, got 0"),
        (lambda net: again(net, every=True), "every must be an integer of at least 1, got True"),
        (lambda net: again(net, keep="all"), "keep must be 'nothing', 'matmuls' or a function"),
        (
            lambda net: again(again(net)),
            "4 of the blocks are checkpointed already .first: a Quiet.. Call checkpoint_activations once",
        ),
        (
            lambda net: offload_activations(net, blocks=Quiet, min_bytes=-1),
            "offload_activations: min_bytes must be an integer of at least 0, got -1",
        ),
        (lambda net: offload_activations(net, blocks="x"), "offload_activations: blocks names 'x'"),
        (lambda net: offload_activations(offload_activations(net, blocks=Quiet), blocks=Quiet), "are offloaded already"),
        (lambda net: again(compiled(net)), "blocks are compiled already. Call checkpoint_activations before compile_blocks"),
    ],
)
def test_invalid_options_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(made(Quiet))
