"""DiLoCo: outer steps by hand, against torch's optimizers, resumed, and begun late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import describe_placement, full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.losses import mean_loss
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.testing.counters import count_collectives
from dtrain.transforms.combinators import between, masked
from dtrain.transforms.weights.local_sgd import diloco, join_replicas, local_sgd, outer_step_
from shard.copies import (
    ADAMW,
    MOMENTUM,
    RAGGED,
    average_moments,
    begin,
    bits,
    expected,
    largest_difference,
    mean_of,
    net,
    numbers,
    put,
    simulated,
    train,
)

TOLERANCE = 1e-12  # float64, a few steps


class Weight(torch.nn.Module):
    """The loss is the weight times the batch's mean, so its gradient is that mean wherever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() / 2 * x


linear_loss = mean_loss(lambda model, x: model(x).mean(), weight=len)


def along_a_line(transforms: Any, steps: int, slopes: tuple[float, ...], lr: float = 0.1) -> list[float]:
    """The weight after each step; each rank's batch has a slope of its own."""
    model = Weight()
    if torch.distributed.is_initialized() and get_dist_info().world_size > 1:
        model = shard_model(model, build_mesh(dp_replicate=2), strategy="hybrid_shard")
    step = compose_step(linear_loss, transforms)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=lr))
    place = get_dist_info().rank if len(slopes) > 1 else 0
    values = []
    for _ in range(steps):
        state, _ = step(state, torch.full((3,), slopes[place], dtype=torch.float64))
        values.append(full_tensor(state.params["weight"].detach())[0].item())
    return values


def test_one_replica_applies_the_outer_lr_and_nesterov_momentum():
    # The inner rate for one of two equal weights: 0.1 / 2 a step. Two steps go 0.1.
    values = along_a_line([diloco(2)], 4, (1.0,))
    first = 1 - 0.7 * (0.1 + 0.9 * 0.1)
    m = 0.9 * 0.1 + 0.1
    assert values == pytest.approx([0.95, first, first - 0.05, first - 0.7 * (0.1 + 0.9 * m)], abs=1e-12)


def two_on_a_line() -> list[float]:
    return along_a_line([diloco(2)], 4, (1.0, 3.0))


def test_two_replicas_step_by_the_mean_of_their_updates(ranks):
    # Slopes 1 and 3: the copies go 0.1 and 0.3 in a round, 0.2 on average.
    first = 1 - 0.7 * (0.2 + 0.9 * 0.2)  # 0.734
    second = first - 0.7 * (0.2 + 0.9 * (0.9 * 0.2 + 0.2))  # 0.3546
    for slope, values in zip((0.05, 0.15), ranks(2).run(two_on_a_line), strict=True):
        assert values == pytest.approx([1 - slope, first, first - slope, second], abs=1e-12)
    assert (first, second) == pytest.approx((0.734, 0.3546), abs=1e-12)


def test_outer_schedules_are_read_at_round_end():
    values = along_a_line([diloco(2, lr=lambda step: [9, 1, 9, 0.5][step], momentum=lambda step: 0.0)], 4, (1.0,))
    assert values == pytest.approx([0.95, 0.9, 0.85, 0.85], abs=1e-12)


def test_outer_step_matches_torch_sgd_with_nesterov():
    torch.manual_seed(0)
    values = [torch.randn(3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)]
    params = [torch.nn.Parameter(value.clone()) for value in values]
    theirs = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
    momenta = [torch.zeros_like(value) for value in values]
    for _ in range(3):
        deltas = [torch.randn_like(value) for value in values]
        for param, delta in zip(params, deltas, strict=True):
            param.grad = delta.clone()
        theirs.step()
        outer_step_(values, momenta, deltas, lr=0.7, momentum=0.9)
    for value, param in zip(values, params, strict=True):
        assert torch.allclose(value, param, rtol=0, atol=1e-14)


def test_outer_step_of_an_empty_list_is_a_no_op():
    assert outer_step_([], [], [], lr=0.7, momentum=0.9) is None


def outer(interval: int, *, moments: bool) -> Any:
    """The outer optimizer of a simulation: torch's own."""
    kept = [p.detach().clone().requires_grad_() for p in net().parameters()]
    optimizer = torch.optim.SGD(kept, lr=0.7, momentum=0.9, nesterov=True)

    def end(step: int, nets: list, optimizers: list) -> None:
        if step % interval == 0:
            for param, mean in zip(kept, mean_of(nets), strict=True):
                param.grad = param.detach() - mean
            optimizer.step()
            put(nets, [param.detach() for param in kept])
            if moments:
                average_moments(nets, optimizers)

    return end


def trained(interval: int, strategy: str, kind: Any, steps: int, keep: bool) -> Any:
    transform = diloco(interval, optimizer_state="keep" if keep else "average")
    return numbers(train(*begin([transform], strategy, kind), steps))


@pytest.mark.parametrize("keep", [False, True], ids=["average", "keep"])
@pytest.mark.parametrize(("strategy", "kind"), [("hybrid_shard", ADAMW), ("replicate", MOMENTUM)], ids=["adamw", "momentum"])
def test_two_replicas_match_a_reference_with_torch_outer_optimizer(ranks, strategy, kind, keep):
    nets, optimizers = simulated(5, 2, kind=kind, sizes=RAGGED[2], end_of_round=outer(2, moments=not keep))
    for place, values in enumerate(ranks(2).run(trained, 2, strategy, kind, 5, keep)):
        assert largest_difference(values, expected(nets, optimizers, place)) <= TOLERANCE


@pytest.mark.slow
def test_two_replicas_of_two_ranks_match_the_reference(ranks):
    nets, optimizers = simulated(5, 2, kind=ADAMW, sizes=RAGGED[4], end_of_round=outer(2, moments=True))
    for rank, values in enumerate(ranks(4).run(trained, 2, "hybrid_shard", ADAMW, 5, False)):
        assert largest_difference(values, expected(nets, optimizers, rank // 2)) <= TOLERANCE


def as_local_sgd() -> float:
    one = train(*begin([diloco(3, lr=1, momentum=0)], "hybrid_shard", MOMENTUM), 6)
    return largest_difference(numbers(one), numbers(train(*begin([local_sgd(3)], "hybrid_shard", MOMENTUM), 6)))


def test_diloco_with_lr_1_and_no_momentum_equals_local_sgd(ranks):
    assert max(ranks(2).run(as_local_sgd)) <= TOLERANCE


def sent() -> list[int]:
    step, state = begin([diloco(2)], "hybrid_shard", MOMENTUM)
    sizes = []
    for number in range(4):
        with count_collectives() as seen:
            state = train(step, state, number + 1)
        sizes.append(sum(r.bytes for r in seen.records if r.op == "all_reduce" and r.group != "control"))
    return sizes


def test_round_communicates_parameters_and_inner_state_once(ranks):
    weights, params = 2 * 8, sum(p.numel() for p in net().parameters()) * 8
    assert ranks(2).run(sent) == [[weights, weights + 2 * params] * 2] * 2


def laid_out() -> list[bool]:
    _, state = begin([diloco(2)], "hybrid_shard")
    content = state.transform_states["diloco"]
    return [
        describe_placement(content[group][name]) == describe_placement(param)
        for group in ("params", "momentum")
        for name, param in state.params.items()
    ]


def test_transform_state_has_the_layout_of_the_parameters(ranks):
    assert ranks(2).run(laid_out) == [[True] * 10] * 2


def resumed(root: str, first: int) -> list[bool]:
    """Saved at the step ``first``, joined in the middle of a round: against a run that only joins there."""
    runs = [begin([diloco(3)], "hybrid_shard", ADAMW) for _ in range(2)]
    state = join_replicas(train(*runs[0], first))
    save_sharded(root, state)
    fresh = load_sharded(root, runs[1][1])
    same = bits(fresh) == bits(state)
    return [same, bits(train(runs[1][0], fresh, 7)) == bits(train(runs[0][0], state, 7))]


@pytest.mark.parametrize("first", [3, 4], ids=["end-of-a-round", "in-the-middle"])
def test_checkpoint_resumes_bit_for_bit(ranks, tmp_path, first):
    assert ranks(2).run(resumed, str(tmp_path), first) == [[True, True]] * 2


def saved(root: str) -> Any:
    state = train(*begin([diloco(3)], "hybrid_shard", ADAMW), 3)
    save_sharded(root, state)
    return {**numbers(state), **whole_slice(state)}


def loaded(root: str) -> Any:
    step, state = begin([diloco(3)], "hybrid_shard", ADAMW)
    state = load_sharded(root, state)
    values = {**numbers(state), **whole_slice(state)}
    return values, train(step, state, 6).step


def whole_slice(state: Any) -> Any:
    content = state.transform_states["diloco"]
    return {
        f"{group} {name}": full_tensor(t).flatten().tolist()
        for group in ("params", "momentum")
        for name, t in content[group].items()
    }


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_checkpoint_of_two_replicas_resumes_on_a_different_rank_count(ranks, tmp_path, world):
    one, other = ranks(2).run(saved, str(tmp_path))
    assert one == other
    for values, steps in ranks(world).run(loaded, str(tmp_path)):
        assert values == one
        assert steps == 6


def test_late_first_round_starts_from_the_current_parameters():
    values = along_a_line([between(2, 6, diloco(2, lr=0.5, momentum=0))], 6, (1.0,))
    assert values == pytest.approx([0.95, 0.9, 0.85, 0.85, 0.8, 0.8], abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every": 2, "lr": -0.1}, r"diloco: lr must be in \[0, inf\), got -0\.1\."),
        ({"every": 2, "lr": float("inf")}, "diloco: lr must be a finite number or a schedule"),
        ({"every": 2, "momentum": 1.0}, r"diloco: momentum must be in \[0, 1\), got 1\.0\."),
        ({"every": 2, "momentum": "0.9"}, "diloco: momentum must be a finite number or a schedule"),
        ({"every": "2"}, "duration: cannot read '2'"),
        ({"every": 2, "optimizer_state": None}, "diloco: optimizer_state must be 'average' or 'keep', got None"),
    ],
    ids=["lr", "infinite", "momentum", "text", "interval", "optimizer-state"],
)
def test_invalid_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        diloco(**arguments)


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("momentum", 1.0)])
def test_invalid_scheduled_value_is_refused_in_the_step(name, value):
    with pytest.raises(ConfigError, match=rf"diloco: {name} must be in .*, got {value} from its schedule at step 0"):
        along_a_line([diloco(2, **{name: lambda step: value})], 1, (1.0,))


def test_masked_diloco_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="diloco: the parameters must be all parameters of the model, got a part"):
        compose_step(linear_loss, [masked(diloco(2), "weight")]).init(model, torch.optim.SGD(model.parameters()))
