"""A step reads and writes the gradients no more often than the loop by hand, and trains as the loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.dist.dtensor import to_local
from dtrain.monitors.tensor_norms import norms
from dtrain.step.compose import compose_step
from dtrain.step.optimizer import apply_gradients
from dtrain.step.transform import Transform
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.gradients.noise_scale import noise_scale
from dtrain.transforms.gradients.nonfinite import nonfinite
from dtrain.typing import LossSum
from gradient_passes import SIDES, by_hand, composed, count_sides, declared, list_cases, make_batch, total

# Relative to weights of about 0.1, in float64.
TOLERANCE = 1e-12
STEPS = 3
# The sum of the weights of two ranks is known after the last backward only, and an optimizer that is not fused does not divide.
# The loop by hand knows the weight before its first backward. dtrain does, too, if ``batch_spec`` declares the weight.
UNKNOWN = {("full_shard", 2, f"{count}, foreach, not clipped") for count in ("one microbatch", "2 microbatches")}


def assert_not_more_than_by_hand(rows: list[dict[str, Any]], strategy: str, world_size: int) -> None:
    for row in rows:
        counts = {side: total(row, side) for side in SIDES}
        limit = "by hand, summed" if (strategy, world_size, row["case"]) in UNKNOWN else "by hand"
        assert counts["dtrain"] <= counts[limit] + 1e-9, (row["case"], counts, row)
        assert counts["dtrain, declared"] <= counts["by hand"] + 1e-9, (row["case"], counts, row)


def test_step_passes_over_gradients_no_more_often_than_by_hand():
    assert_not_more_than_by_hand(count_sides("plain"), "plain", 1)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["replicate", "full_shard"])
def test_sharded_step_passes_over_gradients_no_more_often_than_by_hand(ranks, strategy, world_size):
    for rows in ranks(world_size).run(count_sides, strategy):
        assert_not_more_than_by_hand(rows, strategy, world_size)


def test_fused_update_divides_and_clips_without_a_pass():
    by_case = {row["case"]: row for row in count_sides("plain")}
    row = by_case["one microbatch, fused, clipped"]
    assert row["dtrain"] == row["dtrain, declared"] == [{"_foreach_norm": 1.0}, {"_fused_adamw_": 1.0}]


def largest_differences(strategy: str) -> dict[str, float]:
    """Return the largest difference of the parameters to those of the loop by hand after some float64 steps, by case."""
    differences = {}
    for case in list_cases(strategy):
        batch = make_batch(case, torch.float64)
        reached: list[list[Tensor]] = []
        for side in (by_hand, composed, declared):
            run = side(case, torch.float64)
            for _ in range(STEPS):
                params = run(batch)
            reached.append([to_local(param.detach()).clone() for param in params])
        for name, params in zip(("composed", "declared"), reached[1:], strict=True):
            pairs = zip(params, reached[0], strict=True)
            differences[f"{case}, {name}"] = max(float((ours - hand).abs().max()) for ours, hand in pairs)
    return differences


def assert_equal_to_by_hand(differences: dict[str, float]) -> None:
    assert {name: value for name, value in differences.items() if not value <= TOLERANCE} == {}


def test_step_trains_as_by_hand():
    assert_equal_to_by_hand(largest_differences("plain"))


@pytest.mark.costly
@pytest.mark.parametrize("strategy", ["replicate", "full_shard"])
def test_sharded_step_trains_as_by_hand(ranks, strategy):
    for differences in ranks(2).run(largest_differences, strategy):
        assert_equal_to_by_hand(differences)


# Whoever reads .grad sees the mean gradient

SAMPLES = 3  # no power of two, so that a division rounds
CLIP = 1e-3


def loss_fn(model: torch.nn.Module, batch: Tensor) -> LossSum:
    return LossSum(total=model(batch).square().sum(), weight=len(batch))


def mean_gradient(weight: Tensor, batch: Tensor) -> Tensor:
    weight = weight.detach().requires_grad_()
    (batch @ weight.T).square().sum().div(len(batch)).backward()
    return weight.grad


def train(transforms: list[Transform], *, fused: bool, update: Any = apply_gradients) -> Tensor:
    """Return the weight after some steps of two microbatches."""
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5, bias=False)
    step = compose_step(loss_fn, transforms, microbatch_size=2, update=update)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused, foreach=not fused)
    state = step.init(model, optimizer)
    for _ in range(STEPS):
        state, _ = step(state, torch.randn(SAMPLES, 7))
    return model.weight.detach()


class Reader:
    """Transforms that read the gradient, and the gradients that they have read."""

    def __init__(self, stage: str, *, read_only: bool) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.transform = Transform(name="reader", read_only=read_only, **{stage: getattr(self, f"wrap_{stage}")})

    def look(self, state: Any) -> None:
        weight = state.params["weight"]
        self.seen.append((weight.detach().clone(), weight.grad.clone()))

    def wrap_update(self, inner: Any) -> Any:
        def update_fn(state: Any, metrics: Any) -> Any:
            self.look(state)
            return inner(state, metrics)

        return update_fn

    def wrap_grad(self, inner: Any) -> Any:
        def grad_fn(state: Any, batch: Any, *, microbatch_size: int | None = None) -> Any:
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            self.look(state)
            return state, metrics

        return grad_fn

    def update(self, state: Any, metrics: Any) -> Any:
        self.look(state)
        return apply_gradients(state, metrics)

    def assert_saw_mean_gradients(self, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        torch.nn.Linear(7, 5, bias=False)
        assert len(self.seen) == STEPS
        for weight, grad in self.seen:
            expected = mean_gradient(weight, torch.randn(SAMPLES, 7))
            if factor != 1.0:
                expected = expected * min(1.0, factor / (float(expected.norm()) + 1e-6))
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("weight", [SAMPLES, 0.1, 2**24 + 1], ids=str)  # float32 has no 0.1, and no 2**24 + 1
@pytest.mark.parametrize("transforms", [(), (clip_by_norm(CLIP),)], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizer_trains_as_an_optimizer_that_does_not_divide(kind, transforms, weight):
    reached = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5, bias=False, dtype=torch.float64)
        step = compose_step(lambda model, batch: LossSum(total=model(batch).square().sum(), weight=weight), transforms)
        options = {} if kind is torch.optim.SGD else {"eps": 1e-3}
        state = step.init(model, kind(model.parameters(), lr=0.1, fused=fused, **options))
        for _ in range(STEPS):
            state, _ = step(state, torch.randn(SAMPLES, 7, dtype=torch.float64))
        reached.append(model.weight.detach())
        assert not hasattr(state.optimizer, "grad_scale")
    torch.testing.assert_close(*reached, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("stage", ["update", "grad"])
def test_transform_sees_the_mean_gradient_before_clipping(stage, read_only, fused):
    reader = Reader(stage, read_only=read_only)
    train([reader.transform, clip_by_norm(CLIP)], fused=fused)
    reader.assert_saw_mean_gradients()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("read_only", [False, True])
def test_transform_sees_the_clipped_gradient_after_clipping(read_only, fused):
    reader = Reader("update", read_only=read_only)
    train([clip_by_norm(CLIP), reader.transform], fused=fused)
    reader.assert_saw_mean_gradients(CLIP)


@pytest.mark.parametrize("transforms", [(), (clip_by_norm(CLIP),)], ids=["plain", "clipped"])
def test_own_update_function_sees_the_final_gradient(transforms):
    reader = Reader("update", read_only=False)
    train(list(transforms), fused=True, update=reader.update)
    reader.assert_saw_mean_gradients(CLIP if transforms else 1.0)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hook_of_a_fused_optimizer_sees_the_final_gradient(when):
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    seen: list[Tensor] = []
    getattr(optimizer, f"register_step_{when}_hook")(lambda *_: seen.append(model.weight.grad.clone()))
    step = compose_step(loss_fn, [clip_by_norm(CLIP)])
    weight, batch = model.weight.detach().clone(), torch.randn(SAMPLES, 7)
    step(step.init(model, optimizer), batch)
    expected = mean_gradient(weight, batch)
    torch.testing.assert_close(seen, [expected * (CLIP / (expected.norm() + 1e-6))], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("transforms", [(), (clip_by_norm(CLIP),)], ids=["plain", "clipped"])
def test_observers_do_not_change_a_bit_of_the_result(transforms, fused):
    alone = train(list(transforms), fused=fused)
    observers = [
        Reader("update", read_only=True).transform,
        Reader("grad", read_only=True).transform,
        norms(1, of=("grad", "cosine")),
        noise_scale(every=1),
        nonfinite("skip"),
    ]
    for observer in observers:
        for around in ([observer, *transforms], [*transforms, observer]):
            assert torch.equal(train(around, fused=fused), alone), observer.name
