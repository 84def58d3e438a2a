"""A trace that has become wrong is noticed before a collective is issued: the step is right all the same, or fails on all."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import StepError
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import Step, compose_step
from dtrain.step.gradient_run import GradientRun
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.counters import count_collectives
from dtrain.testing.fault_injection import inject_fault
from dtrain.typing import LossSum
from helpers.gpt import Block
from shard.parallel import PLANS, make
from shard.parallel import batch as whole_batch
from shard.parallel import loss_fn as token_loss
from step.test_auto_sweep import OUT_OF_MEMORY, Unit, bits, loss_fn


class Ordered(nn.Module):
    """Units of different sizes, which run in the order that is set."""

    def __init__(self) -> None:
        super().__init__()
        widths = (5, 7, 9)
        self.units = nn.ModuleList([Unit(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in widths])
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.units[index](x)
        return x


def start(*transforms, loss=loss_fn) -> tuple[Step, TrainState]:
    torch.manual_seed(0)
    net = shard_model(Ordered(), build_mesh(), blocks=(Unit,))
    step = compose_step(loss, transforms)
    return step, step.init(net, torch.optim.SGD(net.parameters(), lr=0.05))


def auto():
    return auto_microbatch(initial_size=4, min_size=1, grow_every=None)


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(get_dist_info().rank)
    return [torch.randn(12, 6, generator=generator) for _ in range(steps)]


def traces_of(state: TrainState):
    return state._run_context.transform_cache["auto_microbatch"].prober.traces


def by_hand(orders: list[list[int]]) -> list[Tensor]:
    """The parameters after steps whose units run in ``orders``, without ``auto_microbatch``."""
    _, state = start()
    step = compose_step(loss_fn, grad=partial(microbatch_step, microbatch_size=4))
    for order, batch in zip(orders, batches(len(orders)), strict=True):
        state.model.order = order
        state, _ = step(state, batch)
    return bits(state)


def same(state: TrainState, orders: list[list[int]]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(bits(state), by_hand(orders), strict=True))


def reordered_on_one_rank(checked: bool) -> list:
    step, state = start(auto())
    first, second, third, fourth = batches(4)
    for batch in (first, second):
        state, _ = step(state, batch)
    before = bits(state)
    if checked:
        traces_of(state).clear()
    if get_dist_info().rank == 1:
        state.model.order = [1, 0, 2]
    with pytest.raises(StepError) as error:
        step(state, third)
    untouched = all(torch.equal(now, then) for now, then in zip(bits(state), before, strict=True))
    state.model.order = [0, 1, 2]
    for batch in (third, fourth):
        state, _ = step(state, batch)
    return [str(error.value), untouched, same(state, [[0, 1, 2]] * 4)]


@pytest.mark.parametrize("checked", [False, True])
def test_reordered_units_on_one_rank_fail_before_any_collective(ranks, checked):
    first, second = ranks(2).run(reordered_on_one_rank, checked)
    assert first == second
    message, untouched, as_if_never = first
    assert message.startswith(
        "step: ranks were about to issue different collectives, and none was issued: rank 0 allgather_base"
    )
    assert message.endswith("Run the same modules in the same order on all ranks.")
    assert untouched
    assert as_if_never


def reordered_on_all() -> list:
    step, state = start(auto())
    orders = [[0, 1, 2], [0, 1, 2], [2, 1, 0], [2, 1, 0], [0, 0, 1]]
    exchanged = []
    for order, batch in zip(orders, batches(5), strict=True):
        state.model.order = order
        with count_collectives() as seen:
            state, _ = step(state, batch)
        exchanged.append(seen.count(group="control") > 0)
    return [exchanged, same(state, orders), traces_of(state).always_check]


def test_reordered_units_on_all_ranks_update_the_trace(ranks):
    assert ranks(2).run(reordered_on_all) == [[[True, False, True, False, True], True, False]] * 2


def never_twice_the_same() -> list:
    step, state = start(auto())
    orders = [[0, 1, 2], [2, 1, 0]] * 4
    for order, batch in zip(orders, batches(8), strict=True):
        state.model.order = order
        state, _ = step(state, batch)
    return [same(state, orders), traces_of(state).always_check]


@pytest.mark.costly
def test_repeatedly_changing_unit_order_enables_permanent_checks(ranks):
    assert ranks(2).run(never_twice_the_same) == [[True, True]] * 2


def another_number(change: int) -> list:
    """After the first steps rank 1 runs another number of microbatches than was agreed."""
    step, state = start(auto())
    first, second, third = batches(3)
    for batch in (first, second):
        state, _ = step(state, batch)
    agreed, here = GradientRun.num_microbatches.fget, get_dist_info().rank

    def num_microbatches(run: GradientRun) -> int:
        has_begun = run.guard.collective_guard is not None  # ranks have chosen the trace to follow
        return agreed(run) + (change * here if has_begun else 0)

    with (
        patch.object(GradientRun, "num_microbatches", property(num_microbatches)),
        pytest.raises(StepError) as error,
    ):
        step(state, third)
    state, _ = step(state, third)
    return [str(error.value)[:66], same(state, [[0, 1, 2]] * 3)]


@pytest.mark.parametrize("change", [-1, 1])
def test_different_microbatch_count_on_one_rank_fails_on_all_ranks(ranks, change):
    expected = ["step: ranks were about to issue different collectives, and none wa", True]
    assert ranks(2).run(another_number, change) == [expected] * 2


def forgetful() -> list:
    step, state = start(auto())
    exchanged = []
    for index, batch in enumerate(batches(4)):
        if index == 2 and get_dist_info().rank == 1:
            traces_of(state).clear()
        with count_collectives() as seen:
            state, _ = step(state, batch)
        exchanged.append(seen.count(group="control") > 0)
    return [exchanged, same(state, [[0, 1, 2]] * 4)]


def test_missing_trace_on_one_rank_restarts_the_check(ranks):
    assert ranks(2).run(forgetful) == [[[True, False, True, False], True]] * 2


def refuses_zeros() -> list:
    """While rank 1 stands in with zeros, rank 0 computes with them, and its loss refuses the result."""

    def loss(model: nn.Module, batch: Tensor) -> LossSum:
        out = model(batch)
        if (out == 0).any():
            raise ValueError("dead units")
        return LossSum(total=out.square().sum(), weight=len(batch))

    step, state = start(auto(), loss=loss)
    first, second, third = batches(3)
    for batch in (first, second):
        state, _ = step(state, batch)
    with inject_fault("raise", at="forward", call=1, rank=1, error=OUT_OF_MEMORY):
        state, _ = step(state, third)
    size = state.transform_states["auto_microbatch"]["size"]
    with inject_fault("raise", at="forward", call=1, rank=1, error=KeyError("of rank 1")), pytest.raises(Exception) as error:  # noqa: PT011
        step(state, first)
    return [0 < size < 4, type(error.value).__name__]


def test_errors_caused_by_a_peers_zero_filled_tensors_are_ignored(ranks):
    assert ranks(2).run(refuses_zeros) == [[True, "PeerError"], [True, "KeyError"]]


def catches_everything(point: str, steps: int) -> list:
    """A loss that replaces each error of the model by an error of its own."""

    def loss(model: nn.Module, batch: Tensor) -> LossSum:
        try:
            return loss_fn(model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError("the model failed") from error

    step, state = start(auto(), loss=loss)
    for batch in batches(steps):
        state, _ = step(state, batch)
    with inject_fault("raise", at=point, call=2, rank=1, error=OUT_OF_MEMORY):
        state, _ = step(state, batches(1)[0])
    return [0 < state.transform_states["auto_microbatch"]["size"] < 4, state.step]


@pytest.mark.parametrize(("point", "steps"), [("forward", 0), ("gather", 0), ("gather", 2)])
def test_oom_retry_works_when_the_loss_catches_exceptions(ranks, point, steps):
    assert ranks(2).run(catches_everything, point, steps) == [[True, steps + 1]] * 2


def start_tensor_parallel(*transforms, **options) -> tuple[Step, TrainState]:
    net = shard_model(make(), build_mesh(tp=2), blocks=(Block,), tp_plan=PLANS["sequence"]())
    step = compose_step(token_loss, transforms, **options)
    return step, step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))


def tensor_parallel(sequences: list[list[int]], fails_at: int) -> list:
    """Steps on batches of ``sequences[step][data_rank]`` tokens a sample; rank 1 runs out of memory in step ``fails_at``."""
    step, state = start_tensor_parallel(auto_microbatch(initial_size=2, min_size=1, grow_every=None))
    _, expected = start_tensor_parallel()
    exchanged = []
    for index, lengths in enumerate(sequences):
        mine = {key: value[:4, : lengths[state.spec.data_rank]] for key, value in whole_batch().items()}
        fault = inject_fault("raise", at="forward", call=2, rank=1, error=OUT_OF_MEMORY)
        with count_collectives() as seen, fault if index == fails_at else nullcontext():
            state, _ = step(state, mine)
        exchanged.append(seen.count(group="control") > 0)
        size = 1 if index >= fails_at else 2
        by_hand = compose_step(token_loss, grad=partial(microbatch_step, microbatch_size=size))
        expected, _ = by_hand(expected, mine)
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(bits(state), bits(expected), strict=True))
    return [exchanged, same, traces_of(state).always_check]


NEVER = 100


@pytest.mark.costly
def test_tensor_parallel_steps_exchange_records_only_until_the_shapes_are_known(ranks):
    sequences = [[8], [8], [4], [8], [4]]
    expected = [[True, False, True, False, False], True, False]
    assert ranks(2).run(tensor_parallel, sequences, NEVER) == [expected] * 2


@pytest.mark.costly
def test_tensor_parallel_groups_whose_batches_differ_in_shape_have_traces(ranks):
    sequences = [[8, 4], [8, 4], [4, 8], [8, 8], [8, 4], [8, 8]]
    expected = [[True, False, True, True, False, False], True, False]
    assert ranks(4).run(tensor_parallel, sequences, NEVER) == [expected] * 4


@pytest.mark.costly
@pytest.mark.parametrize("fails_at", [0, 1])
def test_tensor_parallel_step_that_runs_out_of_memory_is_repeated_on_all_ranks(ranks, fails_at):
    for _, same_as_by_hand, always_checked in ranks(4).run(tensor_parallel, [[8, 4]] * 3, fails_at):
        assert same_as_by_hand
        assert not always_checked
