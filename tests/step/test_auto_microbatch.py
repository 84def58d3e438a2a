"""``auto_microbatch`` with budgets of memory: the size it finds, how it follows them, its cost, and its refusals."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, OutOfMemoryError, PeerError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.auto_microbatch import auto_microbatch, find_microbatch_size
from dtrain.step.compose import Step, compose_step
from dtrain.step.evaluate import auto_batch_eval, evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.oom_guard import MicrobatchProber, allocate_missing_state
from dtrain.testing.checks import memory_budget
from dtrain.testing.counters import count_collectives, count_host_syncs
from dtrain.testing.fault_injection import inject_fault
from dtrain.typing import LossSum
from step.abandoned import STRATEGIES, batches, fingerprint, start
from step.abandoned import loss_fn as small_loss

MIB = 2**20
WIDTH, SAMPLES = 32, 512
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def loss_fn(net: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=net(batch).square().sum(), weight=len(batch))


def wide(strategy: str, *transforms, optimizer=torch.optim.AdamW, grad=microbatch_step) -> tuple[Step, TrainState]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    net: nn.Module = nn.Sequential(*blocks)
    if strategy != "none":
        mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
        net = shard_model(net, mesh, strategy=strategy, blocks=("0", "1"))
    step = compose_step(loss_fn, transforms, grad=grad)
    return step, step.init(net, optimizer(net.parameters(), lr=1e-3))


def size_of(state: TrainState) -> int | str:
    content = state.transform_states["auto_microbatch"]
    return "whole" if content["whole"] else content["size"]


def by_budget(strategy: str) -> dict:
    """Ranks with different budgets, which shrink and then grow; and the largest size that works by hand."""
    auto = auto_microbatch(headroom=0.0, grow_every=2)
    budget = MIB + get_dist_info().rank * MIB // 8
    step, state = wide(strategy, auto)
    sizes, peaks = [], []
    with memory_budget(budget, existing=state.params.values()) as held:
        for index in range(6):
            held.limit = budget if index < 2 else budget * 3 // 4 if index < 4 else 20 * MIB
            state, _ = step(state, torch.randn(SAMPLES, WIDTH))
            sizes.append(size_of(state))
            peaks.append(held.peak <= held.limit)
    by_hand, low, high = [], 1, SAMPLES
    while low < high:  # an exhaustive search by hand, in a process of its own each time
        middle = (low + high + 1) // 2
        by_hand.append(middle)
        _, state = wide(strategy, auto_microbatch(initial_size=middle, min_size=middle, grow_every=None))
        step = compose_step(loss_fn, [auto_microbatch(initial_size=middle, min_size=middle, grow_every=None)])
        with memory_budget(budget, existing=state.params.values()):
            try:
                step(state, torch.randn(SAMPLES, WIDTH))
            except OutOfMemoryError:
                high = middle - 1
            else:
                low = middle
    return {"sizes": sizes, "within": all(peaks), "best": low}


@pytest.mark.parametrize("strategy", [pytest.param(s, marks=() if s == "full_shard" else pytest.mark.slow) for s in STRATEGIES])
def test_microbatch_size_follows_the_smallest_rank_budget(ranks, strategy):
    results = ranks(4 if strategy == "hybrid_shard" else 2).run(by_budget, strategy)
    (sizes,) = {tuple(result["sizes"]) for result in results}
    assert all(result["within"] for result in results)
    assert sizes[0] == sizes[1]
    assert 0.9 * results[0]["best"] <= sizes[0] <= results[0]["best"], (sizes, results[0]["best"])
    assert 1 <= sizes[2] < sizes[0]  # the budget shrank: found in the step that did not fit
    assert sizes[5] == "whole"  # it grew: found when the moment came


def ragged(strategy: str) -> list:
    """Sequences of changing length under one budget; the run equals a run with the same sizes."""
    step, state = wide(strategy, auto_microbatch(grow_every=3))
    generator = torch.Generator().manual_seed(get_dist_info().rank)
    data = [torch.randn(48, length, WIDTH, generator=generator) for length in (4, 8, 16, 16, 4, 4, 4, 4)]
    sizes = []
    with memory_budget(MIB, existing=state.params.values()) as held:
        for batch in data:
            state, _ = step(state, batch)
            sizes.append(size_of(state))
    before, refused = fingerprint(state), held.refused
    steps = {size: compose_step(loss_fn, grad=partial(microbatch_step, microbatch_size=size)) for size in range(1, 49)}
    _, state = wide(strategy)
    for size, batch in zip(sizes, data, strict=True):
        state, _ = steps[48 if size == "whole" else size](state, batch)
    return [sizes, refused > 0, fingerprint(state) == before]


@pytest.mark.costly
def test_ragged_lengths_shrink_and_grow_the_size(ranks):
    first, second = ranks(2).run(ragged, "full_shard")
    assert first == second
    sizes, refused, equal = first
    assert equal
    assert refused
    numbers = [48 if size == "whole" else size for size in sizes]
    assert numbers[2] < numbers[0]
    assert numbers[-1] > numbers[3]


def hopeless(strategy: str) -> list[str]:
    step, state = wide(strategy, auto_microbatch(min_size=4))
    budget = [240_000 if strategy == "replicate" else 120_000, 50 * MIB]
    batch = torch.randn(SAMPLES, WIDTH)
    with memory_budget(budget, existing=state.params.values()), pytest.raises(OutOfMemoryError) as error:
        step(state, batch)
    return [str(error.value), *[name for name, param in state.params.items() if param.grad is not None]]


def test_infeasible_microbatch_raises_one_line_error_on_all_ranks(ranks):
    first, second = ranks(2).run(hopeless, "replicate")
    assert first == second
    (message,) = first
    assert "\n" not in message
    for text in (
        "rank 0",
        "Tried to allocate",
        "MiB",
        "used by others",
        "shard_grad_op",
        "full_shard",
        "checkpoint",
        "offload",
    ):
        assert text in message
    (sharded, _) = ranks(2).run(hopeless, "full_shard")
    assert "shard_grad_op" not in sharded[0]


def leaks(rounds: int) -> list[int]:
    """Fail in turn at several places, and return the live tensors after each try."""
    step, state = start("full_shard", auto_microbatch(initial_size=4, min_size=4, grow_every=None))
    data = batches(1)[0]
    live = []
    deadline = time.monotonic() + 60
    with memory_budget(100 * MIB, existing=state.params.values()) as held:
        state, _ = step(state, data)
        for round_ in range(rounds):
            kept = state._run_context.transform_cache["auto_microbatch"]
            point, call = (("forward", 3), ("backward", 2), ("reduce", 2))[round_ % 3]
            with inject_fault("raise", at=point, call=call, rank=round_ % 2, error=OUT_OF_MEMORY):
                trial = kept.prober.run_guarded(step_of(state), state, data, 4)
            assert trial.output is None
            del trial
            # gloo's threads drop the tensors of a finished collective a moment after it.
            time.sleep(0.5 if not live else 0)
            while live and held.live > live[0] and time.monotonic() < deadline:
                time.sleep(0.01)
            live.append(held.live)
    return live


def step_of(state: TrainState):
    return partial(microbatch_step, loss_fn=small_loss)


@pytest.mark.parametrize("rounds", [9, pytest.param(100, marks=pytest.mark.slow)])
def test_failed_probes_leak_no_memory(ranks, rounds):
    for live in ranks(2).run(leaks, rounds):
        assert len(live) == rounds
        assert len(set(live)) == 1


def other_error() -> list:
    step, state = start("full_shard", auto_microbatch(initial_size=4, grow_every=None))
    first, second, third = batches(3)
    state, _ = step(state, first)
    said = ""
    try:
        with inject_fault("raise", at="forward", call=6, rank=1, error=ValueError("of this rank's own")):
            step(state, second)
    except (ValueError, PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    state, _ = step(state, third)
    return [said, state.step]


def test_non_oom_error_on_one_rank_raises_peer_error_promptly(ranks):
    first, second = ranks(2).run(other_error, timeout_s=90)  # and not the timeout of the group, of many minutes
    assert first[0].startswith("PeerError: step: rank 1 failed")
    assert second[0] == "ValueError: of this rank's own"
    assert first[1] == second[1] == 2


def writes_into_its_batch() -> str:
    def loss(net: nn.Module, batch: dict) -> LossSum:
        batch["x"].mul_(2)
        return small_loss(net, batch)

    step, state = start("full_shard", auto_microbatch(initial_size=4, min_size=2, grow_every=None))
    step = compose_step(loss, [auto_microbatch(initial_size=4, min_size=2, grow_every=None)])
    with inject_fault("raise", at="backward", call=1, rank=0, error=OUT_OF_MEMORY), pytest.raises(StepError) as error:
        step(state, batches(1)[0])
    return str(error.value)


def test_loss_modifying_its_batch_in_place_is_refused(ranks):
    assert all("wrote into its batch" in said for said in ranks(2).run(writes_into_its_batch))


def steady(strategy: str) -> dict:
    """Return the collectives and host syncs of the third step, and of a step with a fixed size."""
    seen = {}
    for name, transforms, grad in (
        ("auto", [auto_microbatch(initial_size=4, grow_every=None)], microbatch_step),
        ("fixed", [], partial(microbatch_step, microbatch_size=4)),
    ):
        step, state = wide(strategy, *transforms, grad=grad, optimizer=torch.optim.SGD)
        for _ in range(2):
            state, _ = step(state, torch.randn(8, WIDTH))
        exchange = current_context().control_plane["control"]
        before = exchange.num_records
        with count_collectives() as collectives, count_host_syncs() as syncs:
            step(state, torch.randn(8, WIDTH))
        records = exchange.num_records - before
        seen[name] = [collectives.counts(), syncs.count, [record.bytes for record in collectives.records], records]
    return seen


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_steady_state_step_matches_fixed_size_collectives_and_syncs(ranks, strategy):
    for seen in ranks(2).run(steady, strategy):
        assert seen["auto"] == seen["fixed"]
        assert "control" not in seen["auto"][0]
        assert seen["auto"][3] == 2


def resumed(folder: str) -> list:
    """The size that each run takes, and the number of sizes that it tried for that."""
    budget = MIB
    sizes = []
    for strategy in ("full_shard", "full_shard", "shard_grad_op"):
        step, state = wide(strategy, auto_microbatch(grow_every=None))
        state = load_sharded(folder, state, missing_ok=True)
        probe = MicrobatchProber.probe
        with (
            memory_budget(budget, existing=state.params.values()),
            patch.object(MicrobatchProber, "probe", autospec=True, side_effect=probe) as tried,
        ):
            state, _ = step(state, torch.randn(SAMPLES, WIDTH))
        sizes.append([size_of(state), tried.call_count])
        save_sharded(folder, state, keep_last=1)
    return sizes


def test_resumed_run_reuses_microbatch_size_only_for_the_same_layout(ranks, tmp_path):
    first, second = ranks(2).run(resumed, str(tmp_path))
    assert first == second
    (size, searched), (again, not_searched), (other, searched_again) = first
    assert again == size
    assert other != size
    assert (searched > 0, not_searched, searched_again > 0) == (True, 0, True)


def thrashes() -> list:
    """The allocator of rank 1 reports that it had to flush, in the second step."""
    step, state = start("full_shard", auto_microbatch(initial_size=4, min_size=2, divisor=2, grow_every=None))
    sizes, thrashed = [], MicrobatchProber.allocator_retried
    updates: list[int] = []
    state.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    for index, batch in enumerate(batches(4)):
        now = index == 1 and get_dist_info().rank == 1
        MicrobatchProber.allocator_retried = lambda trials, now=now: now
        try:
            state, _ = step(state, batch)
        finally:
            MicrobatchProber.allocator_retried = thrashed
        sizes.append(size_of(state))
    return [sizes, len(updates)]


def test_allocator_thrashing_halves_the_next_microbatch_without_step_retry(ranks):
    assert ranks(2).run(thrashes) == [[[4, 4, 2, 2], 4]] * 2


def searched() -> dict:
    step, state = wide("full_shard")
    batch = torch.randn(SAMPLES, WIDTH)
    before = fingerprint(state)
    with memory_budget(MIB, existing=state.params.values()):
        report = find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0)
    same = fingerprint(state) == before
    step(state, batch)
    return {
        "size": report.size,
        "largest": report.largest_batch,
        "fits": [t.fits for t in report.probes],
        "peaks": all(memory.before < memory.peak <= MIB for t in report.probes for memory in t.rank_memory),
        "seconds": report.seconds > 0,
        "same": same,
    }


def test_find_microbatch_size_reports_probes_and_keeps_state_unchanged(ranks):
    first, second = ranks(2).run(searched)
    assert first == second
    assert 1 < first["size"] < first["largest"] == SAMPLES
    assert len(first["fits"]) <= 5
    assert first["peaks"]
    assert first["seconds"]
    assert first["same"]


def in_parts(sizes: list[int]) -> list:
    """Evaluation of batches that differ between ranks, under a budget; then the same, whole."""
    _, state = wide("full_shard")
    generator = torch.Generator().manual_seed(get_dist_info().rank)
    data = [torch.randn(size + 3 * get_dist_info().rank, WIDTH, generator=generator) for size in sizes]
    calls: list[int] = []

    def forward(net: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        out = net(inputs)
        calls.append(len(inputs))
        return out

    run = auto_batch_eval(forward)
    with memory_budget(MIB, existing=state.params.values()) as held:
        outputs = [torch.cat(run(state.model, batch)) for batch in data]
    whole = auto_batch_eval(lambda net, inputs: net(inputs))
    expected = [whole(state.model, batch)[0] for batch in data]
    with memory_budget(MIB, existing=state.params.values()):
        metrics = evaluate(state.model, data, loss_fn, microbatch_size="auto")
    exact = evaluate(state.model, data, loss_fn)
    return [
        held.refused > 0,
        all(torch.allclose(a, b, atol=1e-6) for a, b in zip(outputs, expected, strict=True)),
        [float(means["loss"].weight) for means in (metrics, exact)],
        abs(float(metrics["loss"].total / exact["loss"].total) - 1) < 1e-5,
        len(calls),
    ]


def test_auto_batch_evaluation_counts_each_sample_once(ranks):
    first, second = ranks(2).run(in_parts, [600, 40, 800])
    for rank, (_, same, weights, equal, _) in enumerate((first, second)):
        assert same
        assert weights == [1440 + 9 * rank] * 2
        assert equal
    assert first[0] or second[0]
    assert first[4] == second[4] > 3


def no_room_for_state() -> str:
    step, state = wide("full_shard", auto_microbatch())
    batch = torch.randn(8, WIDTH)
    budget = {1: 2 * sum(p.to_local().numel() * 4 for p in state.params.values())}
    with memory_budget(budget, existing=state.params.values()), pytest.raises(OutOfMemoryError) as error:
        step(state, batch)
    return str(error.value)


def test_oversized_optimizer_state_is_reported_before_the_search(ranks):
    first, second = ranks(2).run(no_room_for_state)
    assert first == second
    assert "the optimizer's state does not fit on rank 1" in first


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (torch.optim.AdamW, 2),
        (partial(torch.optim.AdamW, amsgrad=True), 3),
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.5), 1),
        (torch.optim.Adagrad, 0),  # has its state from the beginning
    ],
)
def test_ballast_matches_optimizer_state_size_without_changing_the_optimizer(make, tensors):
    net = nn.Linear(30, 20)
    optimizer = make(net.parameters(), lr=0.1)
    kept = [param.detach().clone() for param in net.parameters()]
    ballast = allocate_missing_state(optimizer)
    assert sum(tensor.numel() for tensor in ballast) == tensors * (30 * 20 + 20)
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
    assert all(param.grad is None for param in net.parameters())
    net(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    assert allocate_missing_state(optimizer) == []


class Remembering(torch.optim.Optimizer):
    """A custom optimizer whose update depends on all that it keeps outside of its state."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "seen": []})
        self.steps, self.rates, self.scale = 0, [], torch.ones(())

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.steps += 1
        self.rates.append(0.1 / self.steps)
        self.scale.mul_(0.9)
        for group in self.param_groups:
            group["seen"].append(len(self.rates))
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 0.5)
                    param.sub_(average * group["lr"] * self.scale * sum(self.rates) * len(group["seen"]))


class Reaching(torch.optim.SGD):
    """A custom optimizer that reaches the model through a closure, and changes the model in a step."""

    def __init__(self, params, lr: float, *, model: nn.Module) -> None:
        super().__init__(params, lr=lr, momentum=0.9)

        def decay() -> None:
            for param in model.parameters():
                param.data.mul_(0.99)

        self.decay = decay

    def step(self, closure=None) -> None:
        self.decay()
        super().step()


@pytest.mark.parametrize("kind", ["remembering", "reaching"])
def test_custom_optimizer_training_is_unaffected_by_the_probe(kind):
    runs = []
    for transforms, grad in (
        ([auto_microbatch(headroom=0.0)], microbatch_step),
        ([], partial(microbatch_step, microbatch_size=4)),
    ):
        torch.manual_seed(0)
        net = nn.Linear(6, 2).double()
        optimizer = Remembering(net.parameters(), 0.1) if kind == "remembering" else Reaching(net.parameters(), 0.1, model=net)
        step, sizes = compose_step(loss_fn, transforms, grad=grad), []
        state = step.init(net, optimizer)
        generator = torch.Generator().manual_seed(1)
        with memory_budget(MIB, existing=state.params.values()):
            for _ in range(3):
                state, _ = step(state, torch.randn(4, 6, generator=generator, dtype=torch.float64))
                sizes.append(size_of(state) if transforms else "whole")
        attributes = (optimizer.steps, optimizer.rates, optimizer.scale) if kind == "remembering" else ()
        runs.append([fingerprint(state)[0], sizes, attributes])
    assert runs[0] == runs[1]
    assert runs[0][1] == ["whole"] * 3


@pytest.mark.costly
def test_custom_optimizer_state_is_estimated_then_size_searched_again():
    sizes, net = [], nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))
    step = compose_step(loss_fn, [auto_microbatch()])
    optimizer = Remembering(net.parameters(), 1e-4)
    assert sum(tensor.numel() for tensor in allocate_missing_state(optimizer)) == 2 * sum(
        param.numel() for param in net.parameters()
    )
    state = step.init(net, optimizer)
    with memory_budget(MIB, existing=state.params.values()):
        for _ in range(2):
            state, _ = step(state, torch.randn(1024, 64))
            sizes.append(size_of(state))
    assert 0 < sizes[0] < sizes[1]  # it has one tensor for each parameter, not two


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"initial_size": 0}, "initial_size must be an integer of at least 1"),
        ({"min_size": 2.5}, "min_size must be an integer of at least 1"),
        ({"divisor": -1}, "divisor must be an integer of at least 1"),
        ({"initial_size": 2, "min_size": 4}, "initial_size must be at least min_size"),
        ({"headroom": 1.0}, "headroom must be a finite number at least 0 and below 1"),
        ({"probe": 1}, "probe must be an integer of at least 2"),
        ({"grow_every": "1 fortnight"}, "duration"),
    ],
)
def test_invalid_arguments_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        auto_microbatch(**options)


def test_microbatch_size_from_another_transform_is_refused():
    net = nn.Linear(WIDTH, 1)
    sized = auto_microbatch().grad(partial(microbatch_step, loss_fn=loss_fn))
    step = compose_step(loss_fn, [auto_microbatch()])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="from another transform"):
        sized(state, torch.ones(4, WIDTH), microbatch_size=2)


def test_whole_batch_is_used_without_a_memory_gauge():
    net = nn.Linear(WIDTH, 1)
    step = compose_step(loss_fn, [auto_microbatch()])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    calls: list[int] = []
    net.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    state, _ = step(state, torch.ones(7, WIDTH))
    state, _ = step(state, torch.ones(9, WIDTH))
    assert calls == [7, 9]
    assert size_of(state) == "whole"


def test_custom_grad_function_is_retried_in_one_process():
    asked: list[int | None] = []

    def grad(state, batch, *, loss_fn, microbatch_size=None):
        asked.append(microbatch_size)
        if microbatch_size is None or microbatch_size > 3:
            raise OUT_OF_MEMORY
        return microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=microbatch_size)

    net = nn.Linear(WIDTH, 1)
    step = compose_step(loss_fn, [auto_microbatch(grow_every=None)], grad=grad)
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    state, _ = step(state, torch.ones(8, WIDTH))
    assert size_of(state) == 3
    assert asked[0] is None
    assert state.step == 1


def snapshots(folder: str) -> list[str]:
    step, state = wide("full_shard", auto_microbatch(min_size=4, snapshot_path=f"{folder}/memory-{{rank}}.json"))
    batch = torch.randn(SAMPLES, WIDTH)
    with memory_budget([180_000, 50 * MIB], existing=state.params.values()), pytest.raises(OutOfMemoryError):
        step(state, batch)
    return sorted(path.name for path in Path(folder).iterdir())


def test_out_of_memory_rank_writes_the_snapshot(ranks, tmp_path):
    assert "memory-0.json" in ranks(2).run(snapshots, str(tmp_path))[0]
    written = json.loads((tmp_path / "memory-0.json").read_text())
    assert written["live"] > 100_000
    assert written["storages"]
    assert [path.name for path in tmp_path.iterdir()] == ["memory-0.json"]
