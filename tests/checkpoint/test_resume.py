"""20 steps equal 7 + 13, bit for bit: dropout, shuffling, momentum, EMA, and all three random generators."""

import random
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seed_all

TOTAL, FIRST = 20, 7


class Noisy:
    """Samples that draw from all three global generators: a resume that leaves one of them out sees other numbers."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict:
        noise = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return {"x": torch.full((4,), index / 50 + 0.01 * noise), "y": torch.tensor([index % 3 / 3])}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))


def begin(strategy: str):
    mesh = dt.build_mesh()
    with torch.device("meta"):
        net = model()
    net = dt.materialize(dt.shard_model(net, mesh, strategy=strategy, blocks=(nn.Linear,)), seed=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = dt.build_loader(Noisy(), mesh=mesh, global_batch_size=6, seed=2)
    loss = dt.mean_loss(lambda m, b: (m(b["x"]) - b["y"]).square().mean(), weight=lambda b: len(b["x"]))
    schedule = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, TOTAL), 3)
    transforms = [dt.transforms.scale_lr(schedule), dt.transforms.clip_by_norm(0.05), dt.transforms.ema(0.9)]
    step = dt.compose_step(loss, transforms, grad=partial(dt.microbatch_step, microbatch_size=2))
    return step, step.init(net, optimizer, seed=3, loader=loader), loader


def train(step, state, loader, until: int):
    trace = []
    for batch in loader.until(until):
        state, metrics = step(state, batch)
        numbers = dt.reduce_metrics(metrics)
        trace.append([numbers["loss"], numbers["grad_norm"], numbers["lr"]])
    return state, trace


def everything(state, trace) -> list:
    """Return the trace, all tensors of this rank, and the next draw of every generator, which must be equal at the end."""
    local = [*state.params.values(), *state.transform_states["ema"]["params"].values()]
    local += [s["momentum_buffer"] for s in state.optimizer.state.values()]
    values = [to_local(t).flatten().tolist() for t in local]
    draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    return [trace, values, draws, state.clock.step, state.clock.epoch, state.clock.samples]


def straight(strategy: str) -> list:
    seed_all(4, get_dist_info().rank)
    step, state, loader = begin(strategy)
    return everything(*train(step, state, loader, TOTAL))


def interrupted(strategy: str, root: str) -> list:
    seed_all(4, get_dist_info().rank)
    step, state, loader = begin(strategy)
    state, first = train(step, state, loader, FIRST)
    dt.save_sharded(root, state)
    seed_all(99)  # as if in a new process
    step, state, loader = begin(strategy)
    restored = dt.load_sharded(root, state)
    assert restored.step == FIRST
    state, second = train(step, restored, loader, TOTAL)
    return everything(state, first + second)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_resumed_run_equals_uninterrupted_run(ranks, tmp_path, world_size, strategy):
    expected = ranks(world_size).run(straight, strategy)
    assert ranks(world_size).run(interrupted, strategy, str(tmp_path)) == expected
    assert [result[3:] for result in expected] == [[20, 2, 112]] * world_size  # two epochs of 50 samples, and two batches


class Indices:
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def samples_of(root: str, first: int, until: int) -> list:
    """Return the samples of each step until then, the weights, and the next draw of each generator.

    Args:
        root: of the checkpoint that is loaded, unless ``first`` is 0, and of the one that is saved.
        first: the step to begin at.
        until: the step to end at.
    """
    mesh = dt.build_mesh()
    torch.manual_seed(1)
    net = dt.shard_model(nn.Linear(4, 1), mesh)
    loader = dt.build_loader(Indices(), mesh=mesh, global_batch_size=6, seed=2)
    step = dt.compose_step(dt.mean_loss(lambda m, x: m(x / 50).square().mean(), weight=len))
    state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.1), seed=3, loader=loader)
    seed_all(99, get_dist_info().rank)
    if first:
        state = dt.load_sharded(root, state)
    assert state.step == first
    draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    seen = []
    for batch in loader.until(until):
        seen.append(batch[:, 0].tolist())
        state, _ = step(state, batch)
    if until > first:
        dt.save_sharded(root, state)
    return [seen, [full.flatten().tolist() for full in map(full_tensor, state.params.values())], draws]


def steps_of(results: list) -> list[list[float]]:
    """The samples of each step on all ranks, in order."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*(seen for seen, _, _ in results), strict=True)]


def test_resharded_resume_continues_samples_and_reseeds_generators(ranks, tmp_path):
    """Three parts on 2, 3 and 1 ranks are the run on 1, up to the order of sums: no sample twice, none left out."""
    (straight,) = ranks(1).run(samples_of, str(tmp_path / "straight"), 0, 17)
    root = str(tmp_path / "parts")
    parts = [
        ranks(2).run(samples_of, root, 0, 6),
        ranks(3).run(samples_of, root, 6, 11),
        ranks(1).run(samples_of, root, 11, 17),
    ]
    assert list(chain.from_iterable(map(steps_of, parts))) == steps_of([straight])
    torch.testing.assert_close(torch.tensor(parts[-1][0][1][0]), torch.tensor(straight[1][0]), rtol=1e-5, atol=1e-6)
    draws = [tuple(drawn) for history in parts[1:] for _, _, drawn in history]
    assert len(set(draws)) == 4, "each rank of each part has a stream of its own"
    again = ranks(3).run(samples_of, str(tmp_path / "parts" / "step-00000006"), 6, 6)
    assert [drawn for _, _, drawn in again] == [drawn for _, _, drawn in parts[1]], "which is the same every time"


def with_an_idle_rank(root: str | None) -> list:
    """Two epochs of five samples in batches of four: each epoch ends with a batch in which rank 1 has nothing."""
    seed_all(4, get_dist_info().rank)
    mesh = dt.build_mesh()

    def begin():
        seed_all(4, get_dist_info().rank)
        net = dt.shard_model(model(), mesh)
        data = torch.linspace(0, 1, 20).reshape(5, 4)
        loader = dt.build_loader(data, mesh=mesh, global_batch_size=4, seed=0)
        loss = dt.mean_loss(lambda m, x: m(x).square().mean(), weight=len)
        step = dt.compose_step(loss)
        return step, step.init(net, torch.optim.SGD(net.parameters(), lr=0.1), loader=loader), loader

    step, state, loader = begin()
    state, trace = train_losses(step, state, loader, 1 if root else 4)
    if root:
        dt.save_sharded(root, state)
        step, state, loader = begin()
        state = dt.load_sharded(root, state)
        state, rest = train_losses(step, state, loader, 4)
        trace += rest
    return [trace, torch.rand(3).tolist(), [p.to_local().flatten().tolist() for p in state.params.values()]]


def train_losses(step, state, loader, until: int):
    trace = []
    for batch in loader.until(until):
        state, metrics = step(state, batch)
        trace.append(dt.reduce_metrics(metrics)["loss"])
    return state, trace


def test_resume_restores_generators_of_rank_without_samples(ranks, tmp_path):
    assert ranks(2).run(with_an_idle_rank, str(tmp_path)) == ranks(2).run(with_an_idle_rank, None)


@pytest.mark.parametrize("left_out", ["python", "numpy", "torch", "loader", "momentum", "ema"])
def test_omitting_any_state_part_changes_result(ranks, tmp_path, left_out):
    """Each part is needed, so the comparison above would notice if it were lost."""
    expected = ranks(1).run(straight, "full_shard")
    (steps,) = ranks(1).run(interrupted_without, str(tmp_path), left_out)
    assert len(steps) == len(expected[0])
    assert steps != expected[0]


def interrupted_without(root: str, left_out: str) -> list:
    seed_all(4, get_dist_info().rank)
    step, state, loader = begin("full_shard")
    state, first = train(step, state, loader, FIRST)
    dt.save_sharded(root, state)
    seed_all(99)
    step, state, loader = begin("full_shard")
    parts: dict[str, Any] = {"ignore": ["loader"]} if left_out == "loader" else {}
    state = dt.load_sharded(root, state, **parts)
    if left_out == "loader":
        loader.load_state_dict({**loader.state_dict(), "batches": FIRST})
    spoil = {
        "python": lambda: random.seed(0),
        "numpy": lambda: np.random.seed(0),
        "torch": lambda: torch.manual_seed(0),
        "loader": lambda: None,
        "momentum": lambda: [s["momentum_buffer"].zero_() for s in state.optimizer.state.values()],
        "ema": lambda: [t.zero_() for t in state.transform_states["ema"]["params"].values()],
    }
    spoil[left_out]()
    state, second = train(step, state, loader, TOTAL)
    return everything(state, first + second)
