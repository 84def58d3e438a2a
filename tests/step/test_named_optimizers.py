"""Several optimizers in one state: as a loop by hand, with one clip, saved and loaded on other ranks, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import ConfigError

# float64; Muon's iteration magnifies the rounding of small singular values
TOLERANCE = 1e-11
BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
STEPS = 4
MAX_NORM = 0.5


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def optimizers(model: nn.Module, *, fused: bool) -> dict[str, torch.optim.Optimizer]:
    """Muon for two matrices, AdamW with two groups, SGD for the last layer."""
    matrices, head = [model[0].weight, model[2].weight], list(model[4].parameters())
    groups = [{"params": [model[0].bias], "name": "first"}, {"params": [model[2].bias], "lr": 0.005}]
    return {
        "matrices": dt.optim.Muon(matrices, lr=0.02),
        "rest": torch.optim.AdamW(groups, lr=0.01, fused=fused),
        "head": torch.optim.SGD(head, lr=0.1, momentum=0.9),
    }


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()


STEP = dt.compose_step(
    dt.mean_loss(loss, weight=len),
    [
        dt.transforms.clip_by_norm(MAX_NORM),
        dt.transforms.scale_lr({"matrices": lambda t: 1.0 / (1 + t), "rest": lambda t: 0.5 + t}),
        dt.transforms.scale_option("momentum", {"head": lambda t: 0.9 + 0.01 * t}),
    ],
)


def by_hand() -> Tensor:
    """A plain loop of torch, with one clip over all parameters."""
    model = net()
    each = optimizers(model, fused=False)
    for number in range(STEPS):
        model.zero_grad()
        loss(model, BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=False)
        for group in each["matrices"].param_groups:
            group["lr"] = 0.02 / (1 + number)
        for group, rate in zip(each["rest"].param_groups, (0.01, 0.005), strict=True):
            group["lr"] = rate * (0.5 + number)
        each["head"].param_groups[0]["momentum"] = 0.9 * (0.9 + 0.01 * number)
        for optimizer in each.values():
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def trained(strategy: str, root: str, first: int, saves: bool, fused: bool = False) -> list[float]:
    """All parameters at the end of a run that is saved at step ``first``, or that begins there."""
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    model = dt.shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,))
    state = STEP.init(model, optimizers(model, fused=fused))
    if not saves and first:
        state = dt.load_sharded(root, state)
    for _ in range(first if saves else STEPS - first):
        state, _ = STEP(state, BATCH.chunk(dist.get_world_size())[dist.get_rank()])
    if saves:
        dt.save_sharded(root, state)
    return [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]


def assert_as_by_hand(results: list[list[float]]) -> None:
    for result in results:
        assert (torch.tensor(result, dtype=torch.float64) - by_hand()).norm() <= TOLERANCE


LAYOUTS = [("full_shard", 2), ("shard_grad_op", 2), ("replicate", 2), ("hybrid_shard", 4), ("full_shard", 1)]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
def test_several_optimizers_train_as_a_loop_by_hand(ranks, tmp_path, strategy, world, fused):
    assert_as_by_hand(ranks(world).run(trained, strategy, str(tmp_path), 0, False, fused))


@pytest.mark.parametrize(("before", "after"), [(("full_shard", 2), ("full_shard", 4)), (("full_shard", 4), ("replicate", 2))])
def test_saved_and_loaded_on_other_ranks(ranks, tmp_path, before, after):
    ranks(before[1]).run(trained, before[0], str(tmp_path), 2, True)
    assert_as_by_hand(ranks(after[1]).run(trained, after[0], str(tmp_path), 2, False))


def plain(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return optimizers(model, fused=False)


def begun(members: Callable[[nn.Module], object] = plain) -> dt.TrainState:
    model = net()
    return dt.compose_step(dt.mean_loss(loss, weight=len)).init(model, members(model))


def test_groups_have_the_names_of_their_optimizers_and_members_are_found_by_name():
    state = begun()
    assert [group["name"] for group in state.optimizer.param_groups] == ["matrices", "rest.first", "rest.1", "head"]
    assert type(state.optimizer["head"]) is torch.optim.SGD
    assert "matrices (Muon) and rest (AdamW) and head (SGD)" in repr(state)
    assert sorted(dt.monitors.learning_rates(state)) == ["lr/head", "lr/matrices", "lr/rest.1", "lr/rest.first"]


def test_a_second_init_keeps_names_and_finds_the_newest_state():
    model = net()
    members = optimizers(model, fused=False)
    STEP.init(model, members)
    state = STEP.init(model, members)
    assert [group["name"] for group in state.optimizer.param_groups] == ["matrices", "rest.first", "rest.1", "head"]
    state, _ = STEP(state, BATCH)
    assert dt.TrainState.newest(model, members["rest"]).step == 1


def test_state_dicts_and_copies_keep_members_together():
    state, _ = STEP(STEP.init(model := net(), optimizers(model, fused=False)), BATCH)
    twin = copy.deepcopy(state.optimizer)
    assert twin["rest"].param_groups[0] is twin.param_groups[1]
    assert twin.state is twin["head"].state
    state.optimizer.load_state_dict(twin.state_dict())
    assert state.optimizer["head"].param_groups[0] is state.optimizer.param_groups[3]
    assert state.optimizer["matrices"].state is state.optimizer.state


def test_in_backward_and_composed_steps_are_equal():
    spec = dt.batch_spec(weight=len)
    results = []
    for make in (partial(dt.step.optimizer_in_backward, batch_spec=spec), dt.compose_step):
        model = net()
        step = make(dt.mean_loss(loss, weight=len))
        state = step.init(model, optimizers(model, fused=True))
        for _ in range(3):
            state, _ = step(state, BATCH)
        results.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert (results[0] - results[1]).abs().max() <= TOLERANCE


def test_only_the_gradients_of_other_optimizers_are_divided_before_a_fused_update():
    """The sum of a batch of four is divided by 4 in the kernel of AdamW and before SGD."""
    model, peer = net(), net()

    def halves(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
        return {
            "fused": torch.optim.AdamW(net[0].parameters(), lr=0.01, fused=True),
            "plain": torch.optim.SGD([*net[2].parameters(), *net[4].parameters()], lr=0.1),
        }

    step = dt.compose_step(lambda model, batch: dt.LossSum(total=4 * loss(model, batch), weight=torch.tensor(4.0)))
    step(step.init(model, halves(model)), BATCH)
    loss(peer, BATCH).backward()
    for optimizer in halves(peer).values():
        optimizer.step()
    for ours, theirs in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def without_head(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {"first": torch.optim.SGD(model[:4].parameters(), lr=0.1)}


def twice(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(model[2:][index:].parameters(), lr=0.1) for index, name in enumerate(("all", "some"))}


REFUSED = {
    "missing": (
        without_head,
        r"first \(SGD\) holds 4 of 6 trainable parameters, so these would never train: 4\.weight, 4\.bias",
    ),
    "twice": (twice, r"each parameter must be in one optimizer, got 4\.weight in 'all' and 'some' \(2 such parameters\)"),
    "none": (lambda model: {}, "must hold at least one optimizer, got {}"),
    "dots": (lambda model: {"a.b": torch.optim.SGD(model.parameters())}, "names of optimizers must be texts without"),
    "not an optimizer": (lambda model: {"a": 1}, "optimizer must be a torch.optim.Optimizer, got a int"),
    "text twice": (
        lambda model: {name: with_text(list(model[at].parameters())) for name, at in (("a", 0), ("b", 2))},
        "optimizers must keep state of no parameter under different texts, got 'total' twice",
    ),
}


def with_text(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state["total"] = {"steps": 0}
    return optimizer


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    members, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        begun(members)


def test_a_group_for_all_optimizers_is_refused():
    state = begun()
    with pytest.raises(ConfigError, match="a group must be added to one of the optimizers"):
        state.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
