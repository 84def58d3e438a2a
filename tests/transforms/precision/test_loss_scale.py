"""Loss scaling: the numbers of torch's GradScaler, one decision on all ranks, and unscaled gradients for other transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.shard.precision import Precision
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.optimizer import all_finite
from dtrain.step.transform import StepContext, Transform
from dtrain.testing import count_collectives, count_host_syncs
from dtrain.transforms.precision import LossScaleRule, autocast, loss_scale

DIM, SAMPLES = 4, 8
STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 2)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_fn(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(x).float().square().sum(), weight=len(x))


def begin(transforms: list[Transform], model: nn.Module | None = None, **parts: Any) -> tuple[dt.step.Step, dt.TrainState]:
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = dt.compose_step(parts.pop("loss", loss_fn), transforms, **parts)
    return step, step.init(model, optimizer, seed=3)


# ---- against torch's own ----------------------------------------------------------------------------------------------------


def spoiled(steps: set[int], value: float) -> Transform:
    """Makes one gradient infinite or NaN in some steps, before the scale is taken off."""

    def wrap(inner: Any) -> Any:
        def broken(state: Any, *given: Any, **options: Any) -> Any:
            after, metrics = inner(state, *given, **options)
            if state.step in steps:
                state.params["0.bias"].grad[1] = value
            return after, metrics

        return broken

    return Transform(name="spoiled", grad_step=wrap)


def peer(steps: int, spoiled_steps: set[int], value: float, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training by hand with ``torch.amp.GradScaler``: the scale of each step, and the parameters."""
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = torch.amp.GradScaler("cpu", **options), []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
            loss = loss_fn(model, x).total / SAMPLES
        scaled = scaler.scale(loss)
        scales.append(scaler.get_scale())
        scaled.backward()
        if step in spoiled_steps:
            model[0].bias.grad[1] = value
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [*scales, scaler.get_scale()], dict(model.named_parameters())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("growth", "backoff", "interval", "initial"), [(2.0, 0.5, 3, 2.0**10), (1.7, 0.3, 2, 1000.1), (2.0, 0.5, 1, 2.0**127)]
)
def test_scales_and_updates_match_torch_grad_scaler(growth, backoff, interval, initial, value):
    steps, spoiled_steps = 14, {2, 3, 9}
    names = {"init_scale": initial, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    scales, expected = peer(steps, spoiled_steps, value, **names)
    ours = loss_scale(initial, growth=growth, backoff=backoff, grow_every=interval)
    step, state = begin([autocast("fp16"), dt.transforms.clip_by_norm(0.5), ours, spoiled(spoiled_steps, value)])
    traced, skipped = [state.transform_states["loss_scale"]["scale"]], 0.0
    for _ in range(steps):
        state, metrics = step(state, batch())
        numbers = dt.reduce_metrics(metrics)
        assert numbers["loss_scale"] == traced[-1]
        traced.append(state.transform_states["loss_scale"]["scale"])
        skipped += numbers["skipped"]
    assert traced == scales
    assert skipped >= len(spoiled_steps)
    for name, param in state.params.items():
        assert torch.allclose(param, expected[name], rtol=1e-6, atol=1e-7), name  # one divides before backward, one after


def test_loss_scale_preserves_gradients_below_float16_range():
    def tiny(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        return dt.LossSum(total=1e-9 * model(x).float().square().sum(), weight=len(x))

    grads = []
    for transforms in ([autocast("fp16")], [autocast("fp16"), loss_scale(2.0**16)]):
        step, state = begin([*transforms, seen := watching()], loss=tiny)
        step(state, batch())
        grads.append(seen_of(seen)[0])
    exact = 1e-9 * exact_gradient()
    assert grads[0].norm() == 0.0
    assert (grads[1] - exact).norm() / exact.norm() < 0.01  # float16 has 11 bits


# ---- values that other transforms see -----------------------------------------------------------------------------------


SEEN: dict[str, list[torch.Tensor]] = {}


def watching(name: str = "watching") -> Transform:
    """Keeps the gradients and losses that it sees, at every seam that a transform may have."""
    SEEN[name] = []

    def keep(state: Any, metrics: Any) -> None:
        SEEN[name].append(torch.cat([full_tensor(p.grad).flatten().double() for p in state.params.values()]))
        SEEN[name].append((metrics["loss"].total / metrics["loss"].weight).reshape(1))

    def grad(inner: Any) -> Any:
        def kept(*given: Any, **options: Any) -> Any:
            state, metrics = inner(*given, **options)
            keep(state, metrics)
            return state, metrics

        return kept

    def update(inner: Any) -> Any:
        def kept(state: Any, metrics: Any) -> Any:
            keep(state, metrics)
            return inner(state, metrics)

        return kept

    return Transform(name=name, grad=grad, update=update)


def seen_of(transform: Transform) -> list[torch.Tensor]:
    return SEEN[transform.name]


def penalised() -> Transform:
    """A transform at the loss seam: adds a term that only the parameters decide."""

    def wrap(inner: Any, context: StepContext) -> Any:
        def loss(model: Any, x: Any) -> dt.LossSum:
            plain = inner(model, x)
            return replace(plain, total=plain.total + sum(p.square().sum() for p in model.parameters()))

        return loss

    return Transform(name="penalised", loss=wrap)


def exact_gradient(penalty: float = 0.0) -> torch.Tensor:
    model = net(torch.float64)
    total = loss_fn_double(model, batch(torch.float64))
    if penalty:
        total = total + penalty * sum(p.square().sum() for p in model.parameters())
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / SAMPLES


def loss_fn_double(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


ORDERS: dict[str, Callable[[], list[Transform]]] = {
    "first": lambda: [loss_scale(2.0**9), watching("a"), penalised(), watching("b")],
    "between": lambda: [watching("a"), loss_scale(2.0**9), penalised(), watching("b")],
    "last": lambda: [watching("a"), penalised(), watching("b"), loss_scale(2.0**9)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_other_transforms_see_unscaled_losses_and_gradients(order):
    step, state = begin(
        ORDERS[order](), net(torch.float64), loss=lambda m, x: dt.LossSum(total=loss_fn_double(m, x), weight=len(x))
    )
    step(state, batch(torch.float64))
    exact = exact_gradient(1.0)
    for name in ("a", "b"):
        first, loss, second, _ = SEEN[name]
        for grad in (first, second):
            assert (grad - exact).norm() / exact.norm() < 1e-12
        assert loss < 100.0  # not 512 times as much


def test_loss_terms_with_separate_weights_are_scaled_once():
    def with_terms(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        out = model(x)
        total = out.square().sum()
        # One term is made from the main loss: its gradient passes through it on its way.
        return dt.LossSum(
            total=total, weight=len(x), terms={"more": (0.5 * total, 2.0 * len(x))}, aux={"aux": (out.sum(), 1.0)}
        )

    grad = partial(
        dt.microbatch_step, microbatch_size=3, batch_spec=dt.batch_spec(weight=lambda x: {"loss": len(x), "more": 2.0 * len(x)})
    )
    results = []
    for transforms in ([], [loss_scale(2.0**9)]):
        step, state = begin([*transforms, seen := watching()], net(torch.float64), loss=with_terms, grad=grad)
        _, metrics = step(state, batch(torch.float64))
        results.append(
            (seen_of(seen)[0], {name: value for name, value in dt.reduce_metrics(metrics).items() if name != "loss_scale"})
        )
    (plain, numbers), (scaled, same) = results
    assert (plain - scaled).norm() / plain.norm() < 1e-12
    assert {**numbers, "skipped": 0.0} == same


@pytest.mark.parametrize(("first", "average"), [(True, 1.0), (False, 0.5)])
def test_overflow_skips_the_transforms_listed_after_loss_scale(first, average):
    transforms = [loss_scale(), dt.transforms.ema(0.5)]
    step, state = begin([*(transforms if first else transforms[::-1]), spoiled({0}, math.inf)])
    state.transform_states["ema"]["params"]["0.bias"].copy_(state.params["0.bias"].detach() + 1.0)
    state, metrics = step(state, batch())
    assert dt.reduce_metrics(metrics)["skipped"] == 1.0
    moved = state.transform_states["ema"]["params"]["0.bias"] - state.params["0.bias"].detach()
    assert torch.allclose(moved, torch.full((DIM,), average))
    assert (state.step, state.params["0.bias"].grad) == (1, None)


# ---- on several ranks -------------------------------------------------------------------------------------------------------


class Gained(nn.Module):
    """A scalar parameter, which stays whole, beside cut parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = net(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


def overflow_on_one_rank(strategy: str, accumulate: str) -> dict[str, Any]:
    """Step 1 overflows in the samples of the last rank alone; every rank leaves it out."""
    info = get_dist_info()
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    precision = Precision.preset("DEFAULT", "fp16")
    model = dt.shard_model(Gained(), mesh, strategy=strategy, accumulate=accumulate, precision=precision, blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    step = dt.compose_step(loss_fn, [loss_scale(2.0**10, grow_every=2)], grad=partial(dt.microbatch_step, microbatch_size=2))
    state = step.init(model, optimizer)
    trace = []
    for number in range(4):
        x = batch()[info.rank :: info.world_size]
        if number == 1 and info.rank == info.world_size - 1:
            x = x * 1e5
        before = [full_tensor(p).detach().clone() for p in state.params.values()]
        state, metrics = step(state, x)
        moved = any(not torch.equal(a, full_tensor(p)) for a, p in zip(before, state.params.values(), strict=True))
        trace.append([moved, dt.reduce_metrics(metrics)["skipped"], state.transform_states["loss_scale"]["scale"]])
    return {"trace": trace, "finite": all(bool(torch.isfinite(full_tensor(p)).all()) for p in state.params.values())}


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(ranks, strategy, accumulate):
    expected = [[True, 0.0, 1024.0], [False, 1.0, 512.0], [True, 0.0, 512.0], [True, 0.0, 1024.0]]
    for result in ranks(4 if strategy == "hybrid_shard" else 2).run(overflow_on_one_rank, strategy, accumulate):
        assert result == {"trace": expected, "finite": True}


def cost_of_a_step(scaled: bool) -> list[Any]:
    model = dt.shard_model(net(), dt.build_mesh(), blocks=(nn.Linear,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = dt.compose_step(loss_fn, [loss_scale()] if scaled else [], grad=partial(dt.microbatch_step, microbatch_size=2))
    state = step.init(model, optimizer, allow_equal_batches=True)
    state, _ = step(state, batch())
    with count_host_syncs() as syncs, count_collectives() as traffic:
        step(state, batch())
    return [[call.kind for call in syncs.calls], len(traffic.records), traffic.bytes()]


def test_step_costs_one_host_sync_and_one_small_all_reduce(ranks):
    plain, scaled = (ranks(2).run(cost_of_a_step, scaled)[0] for scaled in (False, True))
    assert plain[0] == []
    assert scaled == [["item"], plain[1] + 1, plain[2] + 4]


def broken_here_alone(where: float) -> list[bool]:
    tensor = torch.ones(3)
    if get_dist_info().rank == 1:
        tensor[0] = where
    others = [torch.ones(0), torch.ones(2, dtype=torch.float16), torch.full((), 1e300, dtype=torch.float64)]
    return [bool(all_finite([tensor, *others], torch.device("cpu")))]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_overflow_decision_is_shared_by_all_ranks(ranks, value):
    assert ranks(2).run(broken_here_alone, value) == [[False], [False]]
    assert ranks(2).run(broken_here_alone, 1e38) == [[True], [True]]


def tried_again(auto: bool) -> dict[str, Any]:
    """Rank 1 runs out of memory above 2 samples at a time; step 1 overflows."""
    fired = []

    def tight(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        if auto and get_dist_info().rank == 1 and len(x) > 2:
            fired.append(len(x))
            raise torch.OutOfMemoryError("injected")
        return loss_fn(model, x)

    model = dt.shard_model(net(), dt.build_mesh(), blocks=(nn.Linear,), precision=Precision.preset("DEFAULT", "fp16"))
    sized = [auto_microbatch()] if auto else []
    grad = dt.microbatch_step if auto else partial(dt.microbatch_step, microbatch_size=2)
    step = dt.compose_step(tight, [loss_scale(2.0**10, grow_every=2), *sized], grad=grad)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    slices = []
    for number in range(4):
        state, _ = step(state, batch() * (1e5 if number == 1 else 1.0))
        slices.append(state.transform_states["loss_scale"])
    params = {name: full_tensor(p).flatten().tolist() for name, p in state.params.items()}
    return {"slices": slices, "params": params, "fired": bool(fired)}


def test_retried_step_starts_from_its_previous_scale(ranks):
    (fixed, _), (first, second) = (ranks(2).run(tried_again, auto) for auto in (False, True))
    assert second["fired"]
    assert [content["scale"] for content in fixed["slices"]] == [1024.0, 512.0, 512.0, 1024.0]
    assert {**fixed, "fired": False} == first
    assert {**fixed, "fired": True} == second


# ---- resume, refusals -------------------------------------------------------------------------------------------------------


def test_resumed_run_keeps_the_scale_and_growth_count(tmp_path):
    def run(until: int, step: dt.step.Step, state: dt.TrainState) -> tuple[dt.TrainState, list[dict]]:
        slices = []
        while state.step < until:
            state, _ = step(state, batch())
            slices.append(state.transform_states["loss_scale"])
        return state, slices

    made = lambda: begin([loss_scale(1000.1, growth=1.3, grow_every=3), spoiled({4}, math.inf)])  # noqa: E731
    _, straight = run(9, *made())
    step, state = made()
    state, first = run(5, step, state)
    dt.save_sharded(str(tmp_path), state)
    step, state = made()
    _, second = run(9, step, dt.load_sharded(str(tmp_path), state))
    assert first + second == straight
    assert len({content["scale"] for content in straight}) == 4


def test_nonfinite_gradient_at_the_minimum_scale_raises():
    step, state = begin([loss_scale(4.0, min_scale=1.0), spoiled(set(range(9)), math.nan)])
    for _ in range(2):
        state, _ = step(state, batch())
    with pytest.raises(
        StepError, match=r"loss_scale: step 2: the gradient must be finite at scale 1, got .* min_scale=1\. Look"
    ):
        step(state, batch())


def test_float16_parameters_are_refused():
    model = net(torch.float16)
    step = dt.compose_step(loss_fn, [loss_scale()])
    with pytest.raises(
        ConfigError, match=r"loss_scale: parameters must not be stored in float16, got 4 \(first: 0.weight\)\. Store"
    ):
        step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_masked_loss_scale_is_refused():
    with pytest.raises(ConfigError, match="masked: 'loss_scale' acts on the whole gradient, not on a part"):
        dt.transforms.masked(loss_scale(), "0.*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_scale": 0.0}, r"loss_scale: initial_scale must be finite and at least min_scale, got initial_scale=0\.0"),
        ({"initial_scale": 1e39}, "loss_scale: initial_scale must be finite and at least min_scale, got initial_scale=1e[+]39"),
        ({"initial_scale": "1"}, "loss_scale: initial_scale must be finite and at least min_scale, got initial_scale='1'"),
        ({"initial_scale": True}, "loss_scale: initial_scale must be finite and at least min_scale, got initial_scale=True"),
        ({"growth": 1.0}, r"loss_scale: growth must be a finite number above 1, got 1\.0"),
        ({"backoff": 1.0}, r"loss_scale: backoff must be a finite number above 0 and below 1, got 1\.0"),
        ({"grow_every": 0}, "loss_scale: grow_every must be an integer of at least 1, got 0"),
        ({"grow_every": 2.5}, r"loss_scale: grow_every must be an integer of at least 1, got 2\.5"),
        ({"min_scale": -1.0}, r"loss_scale: min_scale must be a finite number above 0, got -1\.0"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        loss_scale(**options)


def test_scale_does_not_grow_beyond_the_float32_range():
    rule = LossScaleRule(growth=2.0, backoff=0.5, grow_every=1, min_scale=1.0)
    assert rule.next(2.0**127, 0, broken=False) == (2.0**127, 0)
