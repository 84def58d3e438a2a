"""A step that fails in the middle leaves no flag, hook, gathered parameter or gradient behind."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.losses import cross_entropy
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.state import TrainState, init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

VOCAB, SEQ, SAMPLES = 13, 6, 8
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")


def sharded(strategy: str, **options) -> TrainState:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCAB)).double()
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    whole = () if options.get("precision") else ("3.bias",)  # left out is left uncast
    net = shard_model(net, mesh, strategy=strategy, blocks=(nn.Linear,), ignored_params=whole, **options)
    return init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))


def batch() -> dict:
    generator = torch.Generator().manual_seed(get_dist_info().rank)
    inputs, targets = torch.randint(VOCAB, (2, SAMPLES // 2, SEQ), generator=generator)
    return {"inputs": inputs, "targets": targets}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return cross_entropy(net(batch["inputs"]), batch["targets"])


class Explode(torch.autograd.Function):
    """The identity; its backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("backward")


def fail(*args: object):
    raise MemoryError("forward")


def broken(where: str, nth: int):
    """A loss whose ``nth`` call fails: before the model runs, inside a unit's forward, or at either end of backward."""
    calls = []

    def loss(net: nn.Module, batch: dict) -> LossSum:
        calls.append(1)
        if len(calls) != nth:
            return loss_fn(net, batch)
        if where == "loss":
            raise MemoryError("loss")
        hook = {
            "forward": lambda: net[3].register_forward_pre_hook(fail),
            "backward": lambda: net[3].register_forward_hook(lambda module, args, out: Explode.apply(out)),
            "inner backward": lambda: net[1].register_forward_hook(lambda module, args, out: Explode.apply(out)),
        }[where]()
        try:
            return loss_fn(net, batch)
        finally:
            hook.remove()

    return loss


def left_over(state: TrainState) -> list[str]:
    """Return all values that a failed step must not change."""
    net = state.model
    leftovers = [f"gradient of {name}" for name, p in state.params.items() if p.grad is not None]
    for module in net.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                flags = (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)
                leftovers += [] if flags == (True, True, True) else [f"flags {flags}"]
                leftovers += [] if group.is_sharded else ["gathered parameters"]
                leftovers += [] if group._partial_reduce_output is None else ["half a reduction"]
    return leftovers


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in net.modules())


def after_failures(strategy: str, accumulate: str, wider: bool, by_hand: bool) -> dict[str, list]:
    """Return by kind of failure: the leftovers, and True if the next gradient is bit for bit that of before."""
    reset_of_torch = vars(FSDPModule).get("reset_iter_state")
    if by_hand and reset_of_torch:  # as torch does it that has no reset_iter_state of its own
        del FSDPModule.reset_iter_state
    try:
        precision = Precision(param="bf16", reduce="fp32") if wider else None
        state = sharded(strategy, accumulate=accumulate, precision=precision)
        clean, results = hooks(state.model), {}

        def gradient_now() -> list[torch.Tensor]:
            microbatch_step(state, batch(), loss_fn=loss_fn, microbatch_size=1)
            return [to_local(p.grad).clone() for p in state.params.values()]

        before = gradient_now()
        for where in ("loss", "forward", "backward", "inner backward"):
            for nth in (1, 2, 4):
                with pytest.raises(MemoryError, match=where.split()[-1]):
                    microbatch_step(state, batch(), loss_fn=broken(where, nth), microbatch_size=1)
                left = left_over(state) + ([] if hooks(state.model) == clean else ["hooks"])
                same = all(torch.equal(a, b) for a, b in zip(before, gradient_now(), strict=True))
                results[f"{where} in microbatch {nth}"] = [left, same]
        return results
    finally:
        if by_hand and reset_of_torch:
            FSDPModule.reset_iter_state = reset_of_torch


# FSDP2 keeps gradients that wait for their reduction in one list, or, for a wider dtype of reductions, in another list.
def is_quick(strategy: str, accumulate: str, wider: bool, by_hand: bool) -> bool:
    """The other variants of a strategy are quick where parameters are cut and gradients are reduced in every microbatch."""
    return not wider or (accumulate == "sharded" and strategy == ("full_shard" if by_hand else "hybrid_shard"))


VARIANTS = {"": (False, False), "wider": (True, False), "by hand": (True, True)}
CASES = [
    pytest.param(s, a, *how, id=f"{s}-{a}-{name}", marks=() if is_quick(s, a, *how) else pytest.mark.slow)
    for s in STRATEGIES
    for a in ("local", "sharded")
    for name, how in VARIANTS.items()
]


@pytest.mark.parametrize(("strategy", "accumulate", "wider", "by_hand"), CASES)
def test_failed_step_leaves_no_residue_in_later_steps(ranks, strategy, accumulate, wider, by_hand):
    for result in ranks(2).run(after_failures, strategy, accumulate, wider, by_hand):
        assert len(result) == 12
        assert {case: outcome for case, outcome in result.items() if outcome != [[], True]} == {}


def first_error(where: str) -> str:
    """Return the error of a loss that fails in its first call."""
    state = sharded("full_shard")
    with pytest.raises(MemoryError) as error:
        microbatch_step(state, batch(), loss_fn=broken(where, 1), microbatch_size=2)
    microbatch_step(state, batch(), loss_fn=loss_fn, microbatch_size=2)
    return str(error.value)


@pytest.mark.parametrize("where", ["loss", "forward", "backward"])
def test_first_call_error_is_raised_unchanged(ranks, where):
    assert ranks(2).run(first_error, where) == [where] * 2


def all_masked() -> str:
    state = sharded("full_shard")
    masked = {**batch(), "targets": torch.full((SAMPLES // 2, SEQ), -100)}
    with pytest.raises(Exception, match="weights of all ranks add up to 0") as error:
        microbatch_step(state, masked, loss_fn=loss_fn)
    return f"{type(error.value).__name__} {left_over(state)}"


def test_zero_weight_step_raises_on_all_ranks_without_gradients(ranks):
    assert ranks(2).run(all_masked) == ["StepError []"] * 2


def plain_gradients_survive() -> list:
    """Parameters are equal on all ranks after failures and a good step."""
    state = sharded("full_shard")
    with pytest.raises(MemoryError):
        microbatch_step(state, batch(), loss_fn=broken("backward", 1))
    microbatch_step(state, batch(), loss_fn=loss_fn)
    return [full_tensor(p.grad).sum().item() for p in state.params.values()]


def test_gradients_match_across_ranks_after_a_failure(ranks):
    first, second = ranks(2).run(plain_gradients_survive)
    assert first == second
