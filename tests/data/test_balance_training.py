"""Training on balanced batches: the gradients of the unbalanced loop, on any number of ranks, and exact evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.testing import memory_budget
from samples import Texts, pad

# Float64: only the order of sums differs. Relative to the largest value.
TOLERANCE = 1e-12
LENGTHS = np.random.default_rng(0).integers(1, 60, 37)
MODES: dict[str, dict[str, Any]] = {
    "unbalanced": {"lengths": None, "balance": None},
    "tokens": {"balance": "tokens"},
    "squared, microbatches": {"balance": "squared_tokens", "max_tokens": 70},
    "microbatches alone": {"balance": None, "max_tokens": 70},
    "concatenated": {"balance": lambda tokens: tokens * (10 + tokens), "max_tokens": 70, "padded": False},
}


class Net(nn.Module):
    """A model whose result for a token does not depend on padding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.down = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.block(self.up(x)))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
    tokens = batch["tokens"]
    assert len(tokens) > 0, "a loss must see real samples only"
    counted = tokens > 0
    error = (model(tokens[..., None])[..., 0] - tokens.sin()).square() * counted
    return dt.LossSum(total=error.sum(), weight=counted.sum(), aux={"samples": (torch.tensor(float(len(tokens))), 1)})


def make(mode: str, mesh: Any, **options: Any) -> dt.data.Loader:
    chosen = {"lengths": LENGTHS, "collate": pad} | MODES[mode] | options
    return dt.build_loader(Texts(LENGTHS), mesh=mesh, global_batch_size=16, seed=3, **chosen)


def shard(mesh: Any, strategy: str) -> nn.Module:
    torch.manual_seed(0)
    return dt.shard_model(Net().double(), mesh, strategy=strategy, blocks=(nn.Sequential,))


def trained(mode: str, strategy: str, auto: bool, length: str = "2ep", resume: str | None = None) -> dict[str, Any]:
    """Return the losses, the gradient of the first step, and the final parameters."""
    mesh = dt.build_mesh()
    model, loader = shard(mesh, strategy), make(mode, mesh)
    transforms = [dt.auto_microbatch(initial_size=3)] if auto else []
    step = dt.compose_step(loss_fn, transforms)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loader=loader)
    if resume is not None:
        state = dt.load_sharded(resume, state, missing_ok=True)
    losses = []
    for batch in loader.until(length):
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    if resume is not None:
        dt.save_sharded(resume, state)
    params = {name: value.tolist() for name, value in dt.full_params(state)}
    return {"losses": losses, "params": params, "samples": state.clock.samples}


def gradient(mode: str, strategy: str, microbatch_size: int | None) -> dict[str, Any]:
    """Return the gradient of each of the three batches of an epoch at the initial parameters."""
    mesh = dt.build_mesh()
    model, loader = shard(mesh, strategy), make(mode, mesh)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0), loader=loader)
    found = []
    for batch in loader.until("1ep"):
        state, _ = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=microbatch_size)
        grads = [full(param.grad) for param in state.params.values()]
        found.append(torch.cat([grad.reshape(-1) for grad in grads]).tolist())
        state, _ = dt.optimizer_step(state, {})
    return {"grads": found}


def full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def assert_close(found: Any, expected: Any) -> None:
    found, expected = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "unbalanced"])
def test_gradient_equals_that_of_the_unbalanced_loop(ranks, mode, strategy):
    expected = ranks(1).run(gradient, "unbalanced", strategy, None)[0]["grads"]
    assert len(expected) == 3
    for world in (1, 2, 4):
        for size in (None, 2):
            for found in ranks(world).run(gradient, mode, strategy, size):
                for grads, reference in zip(found["grads"], expected, strict=True):
                    assert_close(grads, reference)


@pytest.mark.parametrize("auto", [False, True], ids=["as dealt", "auto"])
@pytest.mark.parametrize("mode", ["tokens", "squared, microbatches"])
def test_training_equals_the_unbalanced_loop(ranks, mode, auto):
    expected = ranks(1).run(trained, "unbalanced", "full_shard", False)[0]
    for world in (2, 4):
        found = ranks(world).run(trained, mode, "full_shard", auto)[world - 1]
        assert found["samples"] == 2 * len(LENGTHS)
        assert_close(found["losses"], expected["losses"])
        for name, value in expected["params"].items():
            assert_close(found["params"][name], value)


def test_chain_of_resumes_on_other_numbers_of_ranks_equals_one_run(ranks, tmp_path):
    expected = ranks(1).run(trained, "unbalanced", "full_shard", False, "3ep")[0]
    losses, path = [], str(tmp_path / "ckpt")
    for world, length, mode in ((4, "2ba", "tokens"), (1, "4ba", "squared, microbatches"), (2, "3ep", "tokens")):
        found = ranks(world).run(trained, mode, "full_shard", False, length, path)[0]
        losses += found["losses"]
    assert_close(losses, expected["losses"])
    for name, value in expected["params"].items():
        assert_close(found["params"][name], value)


def evaluated(mode: str, size: Any) -> dict[str, float]:
    mesh = dt.build_mesh()
    model, loader = shard(mesh, "full_shard"), make(mode, mesh)
    return dt.reduce_metrics(dt.evaluate(model, loader, loss_fn, microbatch_size=size))


@pytest.mark.parametrize("size", [None, "auto", 2])
@pytest.mark.parametrize("mode", ["tokens", "squared, microbatches"])
def test_evaluation_equals_that_of_unbalanced_batches(ranks, mode, size):
    expected = ranks(1).run(evaluated, "unbalanced", None)[0]["loss"]
    for world in (1, 4):
        for found in ranks(world).run(evaluated, mode, size):
            assert found["loss"] == pytest.approx(expected, rel=TOLERANCE)


def evaluated_in_parts() -> list[int]:
    mesh = dt.build_mesh()
    model, loader = shard(mesh, "full_shard"), make("squared, microbatches", mesh)
    count = dt.step.auto_batch_eval(
        lambda model, part: (model(part["tokens"][..., None]), part["index"].tolist())[1], initial_size=2
    )
    return [index for batch in loader.one_epoch() for part in count(model, batch) for index in part]


def test_auto_batch_eval_runs_each_sample_of_the_microbatches_once(ranks):
    found = ranks(2).run(evaluated_in_parts)
    assert sorted(found[0] + found[1]) == list(range(len(LENGTHS)))


def counted(mode: str) -> tuple[list[int], list[float]]:
    """Return the samples of this rank's microbatches in the first batch, and the numbers of the meter."""
    mesh = dt.build_mesh()
    loader = make(mode, mesh)
    batch = next(loader.until("1ep"))
    numbers = dt.monitors.batch_balance(loader)(None)
    return [len(part["index"]) for part in batch], list(numbers.values())


def test_ranks_have_as_many_microbatches_and_equal_numbers_of_the_meter(ranks):
    found = ranks(4).run(counted, "squared, microbatches")
    assert len({len(sizes) for sizes, _ in found}) == 1
    assert all(numbers == found[0][1] for _, numbers in found)


def deal_differently() -> str:
    mesh = dt.build_mesh()
    lengths = LENGTHS + (dt.dist.data_rank(mesh)[0] == 1) * np.arange(len(LENGTHS))
    loader = make("tokens", mesh, lengths=lengths)
    model = shard(mesh, "full_shard")
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    try:
        step(state, next(loader.until("1ep")))
    except dt.errors.StepError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_lengths_are_refused_because_they_would_lose_samples(ranks):
    for message in ranks(2).run(deal_differently):
        assert "rank 1 is at another place in its data than rank 0, or in other data" in message


def fit(budget: int, fails_at: int) -> dict[str, Any]:
    """Train with little memory, and list the rows and tokens of all microbatches that ran, by step."""
    mesh, ran, losses, shapes = dt.build_mesh(), list[list[int]](), [], []

    def watched_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
        ran.append(list(batch["tokens"].shape))
        if len(ran) == fails_at and dt.dist.data_rank(mesh)[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss_fn(model, batch)

    with memory_budget(budget):
        model, loader = shard(mesh, "full_shard"), make("squared, microbatches", mesh, max_tokens=120)
        step = dt.compose_step(watched_loss, [dt.auto_microbatch()])
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loader=loader)
        for batch in loader.until("2ep"):
            begin = len(ran)
            state, metrics = step(state, batch)
            losses.append(dt.reduce_metrics(metrics)["loss"])
            shapes.append(ran[begin:])
    return {"auto": state.transform_states["auto_microbatch"], "losses": losses, "shapes": shapes}


@pytest.mark.costly
@pytest.mark.parametrize("fails_at", [0, 12], ids=["fits", "injected"])
def test_auto_microbatch_searches_the_limit_of_tokens(ranks, fails_at):
    expected = ranks(1).run(trained, "unbalanced", "full_shard", False)[0]
    results = ranks(2).run(fit, 28_000, fails_at)
    for found in results:
        assert_close(found["losses"], expected["losses"])
        limit = found["auto"]["size"]
        assert 50 < limit < 120
        # The last step with a full batch has no search.
        shapes = found["shapes"][-2]
        assert all(rows * tokens <= limit or rows == 1 for rows, tokens in shapes)
        assert shapes[0][0] == 1
    # A limit of samples would run the short samples one by one.
    assert max(rows for found in results for rows, _ in found["shapes"][-2]) > 1


def changed() -> list[list[int]]:
    """Apply transforms of batches to microbatches."""
    mesh = dt.build_mesh()
    seen: list[list[int]] = []

    def double(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
        seen.append(list(batch["tokens"].shape))
        return {**batch, "tokens": batch["tokens"] * 2}

    model, loader = shard(mesh, "full_shard"), make("squared, microbatches", mesh)
    step = dt.compose_step(loss_fn, [dt.transforms.on_batch(double, name="double")])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    batch = next(loader.until("1ep"))
    step(state, batch)
    assert seen == [list(part["tokens"].shape) for part in batch]
    return seen


def test_on_batch_receives_the_microbatches_one_by_one(ranks):
    assert all(len(seen) > 1 for seen in ranks(2).run(changed))
