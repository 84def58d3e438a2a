"""Faults that reviews found in ``auto_microbatch``: hangs, wrong messages, and memory that it did not free."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, OutOfMemoryError, PeerError
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.auto_microbatch import auto_microbatch, find_microbatch_size
from dtrain.step.compose import Step, compose_step
from dtrain.step.evaluate import auto_batch_eval
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.checks import memory_budget
from dtrain.testing.fault_injection import inject_fault
from dtrain.typing import LossSum
from step.abandoned import batches, fingerprint
from step.abandoned import start as start_small

WIDTH = 32
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def loss_fn(net: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=net(batch).square().sum(), weight=len(batch))


def sharded(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    return shard_model(net, build_mesh(), strategy="full_shard", blocks=("0", "1", "2"))


def start(*transforms, loss=loss_fn, grad=microbatch_step) -> tuple[Step, TrainState]:
    net = sharded()
    step = compose_step(loss, transforms, grad=grad)
    return step, step.init(net, torch.optim.AdamW(net.parameters(), lr=1e-3))


def size_of(state: TrainState) -> int | str:
    content = state.transform_states["auto_microbatch"]
    return "whole" if content["whole"] else content["size"]


def promised() -> int | str:
    step, state = start(auto_microbatch(), grad=partial(microbatch_step, batch_spec=batch_spec(weight=len)))
    with memory_budget(200_000, existing=state.params.values()):
        state, _ = step(state, torch.randn(512, WIDTH))
    return size_of(state)


def test_probing_ignores_the_declared_total(ranks):
    first, second = ranks(2).run(promised)
    assert first == second
    assert 1 < first < 512


def blamed() -> str:
    def loss(net: nn.Module, batch: torch.Tensor) -> LossSum:
        if len(batch) == 4 - 2 * get_dist_info().rank:
            raise torch.OutOfMemoryError(f"rank {get_dist_info().rank} refused {len(batch)}")
        return loss_fn(net, batch)

    step, state = start(auto_microbatch(initial_size=4, min_size=2), loss=loss)
    with pytest.raises(OutOfMemoryError) as error:
        step(state, torch.randn(8, WIDTH))
    return str(error.value)


def test_oom_error_names_the_rank_that_failed_last(ranks):
    first, second = ranks(2).run(blamed)
    assert first == second
    assert "a microbatch of 2 does not fit on rank 1: rank 1 refused 2" in first


def given_back() -> list:
    def broken(net: nn.Module, batch: torch.Tensor) -> LossSum:
        raise ValueError("of the loss")

    step, state = start(auto_microbatch(initial_size=4), loss=broken)
    with pytest.raises((ValueError, PeerError)):
        step(state, torch.randn(8, WIDTH))
    held = len(state._run_context.transform_cache["auto_microbatch"].reserved)
    step = compose_step(loss_fn, [auto_microbatch(initial_size=4)])
    state, _ = step(state, torch.randn(8, WIDTH))
    return [held, size_of(state)]


def test_failed_first_step_releases_reserved_memory_and_restarts(ranks):
    assert ranks(2).run(given_back) == [[0, 4]] * 2


def told_differently() -> int | str:
    step, state = start(auto_microbatch())
    place = "cpu, 2 ranks, full_shard, local" if get_dist_info().rank == 0 else "elsewhere"
    state = state.with_transform_state("auto_microbatch", {"size": 3, "whole": 0, "found_on": place})
    with memory_budget(200_000, existing=state.params.values()):
        state, _ = step(state, torch.randn(64, WIDTH))
    return size_of(state)


def test_ranks_with_different_saved_layouts_search_together(ranks):
    first, second = ranks(2).run(told_differently)
    assert first == second != 3


def loaded_between() -> list:
    step, state = start(auto_microbatch(initial_size=4, grow_every=None))
    batch, sizes = torch.randn(8, WIDTH), []
    state, _ = step(state, batch)
    for content in ({"size": 2, "whole": 0, "found_on": "elsewhere"}, {"size": 2, "whole": 0}):
        state = state.with_transform_state(
            "auto_microbatch", {"found_on": state.transform_states["auto_microbatch"]["found_on"], **content}
        )
        state, _ = step(state, batch)
        sizes.append(size_of(state))
    return sizes


def test_loaded_size_from_another_layout_is_ignored(ranks):
    assert ranks(2).run(loaded_between) == [[4, 2]] * 2


def collective_of_its_own() -> list:
    """A loss that gathers as many numbers from the other ranks as the microbatch has samples."""

    def loss(net: nn.Module, batch: torch.Tensor) -> LossSum:
        out = net(batch)
        others = [torch.empty_like(out) for _ in range(get_dist_info().world_size)]
        dist.all_gather(others, out.detach())
        return LossSum(total=(out - sum(other.mean() for other in others)).square().sum(), weight=len(batch))

    step, state = start(auto_microbatch(initial_size=4, grow_every=None), loss=loss)
    for samples in (8, 8, 8):
        state, _ = step(state, torch.randn(samples, WIDTH))
    with inject_fault("raise", at="forward", call=2, rank=1, error=OUT_OF_MEMORY):
        state, _ = step(state, torch.randn(3, WIDTH))
    return [state.step, size_of(state), len(state._run_context.transform_cache["auto_microbatch"].prober.traces)]


def test_loss_with_size_dependent_collectives_records_no_trace(ranks):
    assert ranks(2).run(collective_of_its_own) == [[4, 2, 0]] * 2


def with_a_critic(point: str, call: int) -> dict:
    """A loss through a second sharded model, frozen; memory runs out in the fourth step, when collectives are known."""

    def run(sizes: list[int], failing: bool) -> tuple[list, list]:
        net, critic = sharded(0), sharded(1).requires_grad_(False)

        def loss(net: nn.Module, batch: torch.Tensor) -> LossSum:
            return LossSum(total=critic(net(batch)).square().sum(), weight=len(batch))

        auto = [auto_microbatch(initial_size=4, min_size=2, divisor=2, grow_every=None)] if failing else []
        state = compose_step(loss, auto).init(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        generator, searched = torch.Generator().manual_seed(get_dist_info().rank), []
        for index in range(4):
            batch = torch.randn(8, WIDTH, generator=generator)
            if not failing:
                state, _ = compose_step(loss, grad=partial(microbatch_step, microbatch_size=sizes[index]))(state, batch)
                continue
            step = compose_step(loss, auto)
            if index < 3:
                state, _ = step(state, batch)
            else:
                with inject_fault("raise", at=point, call=call, rank=1, error=OUT_OF_MEMORY):
                    state, _ = step(state, batch)
            searched.append(size_of(state))
        return searched, [to_local(param).detach().flatten().tolist() for param in state.params.values()]

    sizes, params = run([], True)
    return {"sizes": sizes, "equal": run(sizes, False)[1] == params}


@pytest.mark.parametrize(("point", "call"), [("forward", 14), ("gather", 6), ("backward", 1)])
def test_second_sharded_model_in_the_loss_is_reset_after_oom(ranks, point, call):
    expected = {"sizes": [4, 4, 4, 2], "equal": True}
    assert ranks(2).run(with_a_critic, point, call) == [expected] * 2


def searched_alone() -> list:
    step, state = start(auto_microbatch(grow_every=None, headroom=0.0))
    batch = torch.randn(512, WIDTH)
    with memory_budget(200_000, existing=state.params.values()) as held:
        report = find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0)
        state, _ = step(state, batch)
        size = size_of(state)
        held.limit = held.live + 100
        with pytest.raises(OutOfMemoryError) as error:
            find_microbatch_size(state, batch, loss_fn=loss_fn)
    return [report.size, size, str(error.value)[:30]]


@pytest.mark.costly
def test_standalone_search_reserves_optimizer_state_memory(ranks):
    first, second = ranks(2).run(searched_alone)
    assert first == second
    alone, searched, said = first
    assert 0.9 * searched <= alone <= 1.1 * searched
    assert said.startswith("find_microbatch_size: step 1:")


def uncountable() -> str:
    _, state = start()
    batch = {"ids": "none"} if get_dist_info().rank == 1 else torch.randn(8, WIDTH)
    with pytest.raises((ConfigError, PeerError)) as error:
        auto_batch_eval(lambda net, inputs: net(inputs))(state.model, batch)
    return f"{type(error.value).__name__}: {error.value}"


def test_uncountable_batch_on_one_rank_raises_on_all_ranks(ranks):
    first, second = ranks(2).run(uncountable)
    assert first.startswith("PeerError: auto_batch_eval: rank 1 cannot count its batch")
    assert second.startswith("ConfigError: batch: found no tensor to split")


def in_eights() -> list:
    step, state = start(auto_microbatch(divisor=8, headroom=0.0))
    sizes: list[int] = []
    state.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    with memory_budget(80_000, existing=state.params.values()):
        state, _ = step(state, torch.randn(64, WIDTH))
    return [size_of(state), sorted({size % 8 for size in sizes})]


def test_all_probed_sizes_are_multiples_of_the_divisor(ranks):
    for size, rests in ranks(2).run(in_eights):
        assert rests == [0]
        assert size % 8 == 0


def test_initial_size_not_divisible_by_divisor_is_refused():
    with pytest.raises(ConfigError, match="initial_size must be a multiple of divisor, got initial_size=6 and divisor=4"):
        auto_microbatch(initial_size=6, divisor=4)


def no_memory_for_copies() -> list:
    """Memory runs out on rank 1 where the buffers are copied, before the step has begun."""
    step, state = start_small("full_shard", auto_microbatch(initial_size=4, min_size=2, divisor=2, grow_every=None))
    first, second, third = batches(3)
    state, _ = step(state, first)
    before = fingerprint(state)
    with inject_fault("raise", at="dtrain.shard.buffers.BufferVersions.changed", rank=1, error=OUT_OF_MEMORY):
        state, _ = step(state, second)
    state, _ = step(state, third)
    return [state.transform_states["auto_microbatch"]["size"], state.step, fingerprint(state) != before]


def test_oom_before_the_first_forward_reduces_size_on_all_ranks(ranks):
    assert ranks(2).run(no_memory_for_copies, timeout_s=90) == [[2, 3, True]] * 2
