"""Fused optimizers under every strategy: they train as the plain loop does, and a save and a load leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params
from dtrain.state import TrainState, init_state
from dtrain.step.compose import compose_step
from shard.models import CASES, SAMPLES, WEIGHTS, batch, make

NAME = "left out"  # cut and whole parameters, and a scalar
STEPS = 3
TOLERANCE = 1e-9  # float64; Adam's quotient of moments magnifies rounding in tiny gradients
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
}


def optimizer_for(net: nn.Module, kind: str, *, fused: bool) -> torch.optim.Optimizer:
    """Cut parameters and whole parameters are in groups of their own: a fused call takes no mix."""
    cut = [p for p in net.parameters() if is_dtensor(p)]
    whole = [p for p in net.parameters() if not is_dtensor(p)]
    return OPTIMIZERS[kind]([{"params": params} for params in (cut, whole) if params], fused=fused)


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    """torch alone, its plain loop, one process, the whole batch at once."""
    net = make(NAME)
    optimizer = optimizer_for(net, kind, fused=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = CASES[NAME].loss(net, batch(NAME, WEIGHTS))
        (loss.total / loss.weight).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def begun(strategy: str, kind: str, *, fused: bool) -> tuple[Callable[..., object], TrainState]:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = shard_model(make(NAME), mesh, strategy=strategy, **CASES[NAME].options)
    step = compose_step(CASES[NAME].loss)
    return step, step.init(net, optimizer_for(net, kind, fused=fused))


def stepped(step: Callable[..., object], state: TrainState, times: int) -> TrainState:
    rank, world = get_dist_info().rank, get_dist_info().world_size
    mine = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    for _ in range(times):
        state, _ = step(state, {key: value[mine] for key, value in batch(NAME, WEIGHTS).items()})
    return state


def far(state: TrainState, expected: dict[str, torch.Tensor]) -> float:
    return max((tensor - expected[name]).abs().max().item() for name, tensor in full_params(state))


def trained(strategy: str, folder: str) -> dict[str, list]:
    """Return by optimizer: the error, True if a loaded run has equal bits, and the error of a run begun by the plain loop."""
    results = {}
    for kind in OPTIMIZERS:
        root, expected = Path(folder) / kind, by_hand(kind)
        step, state = begun(strategy, kind, fused=True)
        state = stepped(step, state, STEPS - 1)
        save_sharded(root / "fused", state)
        state = stepped(step, state, 1)
        step, restored = begun(strategy, kind, fused=True)
        restored = stepped(step, load_sharded(root / "fused", restored), 1)
        same = all(torch.equal(to_local(p), to_local(restored.params[name])) for name, p in state.params.items())
        step, plain = begun(strategy, kind, fused=False)
        save_sharded(root / "plain", stepped(step, plain, STEPS - 1))
        step, taken_over = begun(strategy, kind, fused=True)
        taken_over = stepped(step, load_sharded(root / "plain", taken_over), 1)
        fused = all(group["fused"] for group in taken_over.optimizer.param_groups)
        results[kind] = [far(state, expected), same, far(taken_over, expected), fused]
    return results


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
def test_fused_optimizers_match_the_plain_loop_across_save_and_load(ranks, tmp_path, strategy):
    for results in ranks(4 if strategy == "hybrid_shard" else 2).run(trained, strategy, str(tmp_path)):
        for kind, (error, same, taken_over, fused) in results.items():
            assert max(error, taken_over) <= TOLERANCE, kind
            assert (same, fused) == (True, True), kind


def test_unsupported_fused_and_foreach_optimizers_are_refused_at_init(ranks):
    for sgd, adagrad, fused, foreach, torchs in ranks(2).run(refused):
        says = "holds sharded parameters, but torch has only fused Adam and AdamW for them. Use foreach=True."
        assert sgd == f"init: group 0 of SGD(fused=True) {says}"
        assert adagrad == f"init: group 0 of Adagrad(fused=True) {says}"
        says = "which this form does not take together. Give the whole parameters their own group."
        for message, name in ((fused, "AdamW(fused=True)"), (foreach, "SGD(foreach=True)")):
            assert message.startswith(f"init: group 0 of {name} holds ")
            assert message.endswith(f"whole ones (first: temperature), {says}")
        assert torchs == "NotImplementedError"  # when torch has it, our refusal may go


def refused() -> list[str]:
    net = shard_model(make(NAME), build_mesh(), **CASES[NAME].options)
    cut = [p for p in net.parameters() if is_dtensor(p)]
    messages = []
    for optimizer in (
        torch.optim.SGD(cut, fused=True),
        torch.optim.Adagrad(cut, fused=True),
        torch.optim.AdamW(net.parameters(), fused=True),
        torch.optim.SGD(net.parameters(), foreach=True),
    ):
        try:
            init_state(net, optimizer, missing_ok=True)
        except ConfigError as error:
            messages.append(str(error))
    for param in cut:
        param.grad = torch.zeros_like(param)
    try:
        torch.optim.SGD(cut, fused=True).step()
    except NotImplementedError:
        messages.append("NotImplementedError")
    return messages
