"""Optimizers of users: each trains every layout as it trains one process, or is refused in one line that names it."""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.checkpoint.state_dict import collect_contents
from dtrain.errors import ConfigError, DesyncError, DistError
from dtrain.step.optimizer_state import check_storable

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
# Replicas of shards need two ranks, and are cut on four.
LAYOUTS = [(strategy, world) for strategy in STRATEGIES for world in (1, 2) if (strategy, world) != ("hybrid_shard", 1)]
LAYOUTS.append(("hybrid_shard", 4))
each_layout = pytest.mark.parametrize(("strategy", "world"), LAYOUTS)
ROUNDING = 1e-10  # float64; quotients of norms and moments magnify it
BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LOSS = dt.mean_loss(lambda model, batch: (model(batch) - batch.sum(-1, keepdim=True)).square().mean(), weight=len)
STEP = dt.compose_step(LOSS)


def net() -> nn.Module:
    """Five rows are not even on two ranks, and one row leaves a rank without any."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def laid_out(strategy: str | None) -> nn.Module:
    """The model in a layout; without a strategy, plain in one process."""
    if strategy is None:
        return net()
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    return dt.shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,))


def own_batch(strategy: str | None) -> Tensor:
    return BATCH if strategy is None else BATCH.chunk(dist.get_world_size())[dist.get_rank()]


def trained(make: Callable[[Any], torch.optim.Optimizer], strategy: str | None, steps: int = 4) -> list[float]:
    """All parameters after a few steps."""
    model = laid_out(strategy)
    state = STEP.init(model, make(model.parameters()))
    for _ in range(steps):
        state, _ = STEP(state, own_batch(strategy))
    return [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]


def distance(values: Sequence[float], expected: Sequence[float]) -> float:
    here, there = torch.tensor(values, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return ((here - there).norm() / there.norm()).item()


class Numbers(torch.optim.Optimizer):
    """SGD whose rate is a number that Python reads from each parameter and gradient."""

    def __init__(self, params: Any, rate: Callable[[Tensor, Tensor], float]) -> None:
        self.rate = rate
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * (group["lr"] * self.rate(param, param.grad)))


class Adapted(torch.optim.Optimizer):
    """The distance of D-Adaptation: a number of the group, from sums over all of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = 0.0
            for param in group["params"]:
                total = self.state[param].setdefault("s", torch.zeros_like(param))
                group["numerator"] += group["lr"] * group["d"] * (param.grad * total).sum().item()
                total.add_(param.grad, alpha=group["lr"] * group["d"])
                norm += total.abs().sum().item()
            group["d"] = max(group["d"], group["numerator"] / norm)
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["d"])


READS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "lars": lambda p, g: p.norm().item() / (g.norm().item() + 1e-9),
    "lamb": lambda p, g: min(10.0, float(p.data.norm()) / float(torch.linalg.vector_norm(g) + 1e-9)),
    "largest": lambda p, g: 2.0 if p.abs().max() > 0.5 else p.abs().max().item(),
    "sum": lambda p, g: abs(p.sum().item()),
    "integer": lambda p, g: int(p.square().sum() * 1000) / 1000,
    "all": lambda p, g: 2.0 if bool((p < 0.4).all()) else 1.0,
    "spread": lambda p, g: float(p.square().mean() + p.min()),
}


def found_in(strategy: str) -> dict[str, list[float]]:
    by_name = {name: trained(lambda params, rate=rate: Numbers(params, rate), strategy) for name, rate in READS.items()}
    return {**by_name, "adapted": trained(Adapted, strategy)}


@pytest.mark.costly
@each_layout
def test_a_number_read_in_a_step_is_that_of_the_whole_parameter(ranks, strategy, world):
    expected = {name: trained(lambda params, rate=rate: Numbers(params, rate), None) for name, rate in READS.items()}
    expected["adapted"] = trained(Adapted, None)
    for by_name in ranks(world).run(found_in, strategy):
        apart = {name: distance(by_name[name], expected[name]) for name in expected}
        assert {name: error for name, error in apart.items() if error > ROUNDING} == {}


def numbers_after_a_step() -> list[float]:
    """A number outside of the step is torch's again: a read on one rank alone must not wait for the other ranks."""
    model = laid_out("full_shard")
    state = STEP.init(model, Numbers(model.parameters(), READS["lars"]))
    STEP(state, own_batch("full_shard"))
    weight = model[0].weight.detach()
    return [weight.norm().item() if dist.get_rank() == 0 else 0.0, weight.to_local().norm().item()]


def test_numbers_outside_of_a_step_need_no_other_rank(ranks):
    (read, own), _ = ranks(2).run(numbers_after_a_step)
    assert read == own


class Ahead(torch.optim.Optimizer):
    """Lookahead, as it is usually written: around another optimizer, with its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Ascent(torch.optim.SGD):
    """A step that cannot be taken without the loss."""

    def step(self, closure: Any) -> None:
        closure()
        super().step()


def postponed(params: Any) -> torch.optim.Optimizer:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = PeriodicModelAverager(period=1, process_group=dist.group.WORLD)
    return PostLocalSGDOptimizer(torch.optim.SGD(params, lr=0.1), averager)


def zero(params: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(params), torch.optim.AdamW, lr=0.1)


REFUSED_AT_INIT: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "lbfgs": (torch.optim.LBFGS, "init: optimizer must step without arguments, got LBFGS, whose step needs 'closure'. Use an"),
    "ascent": (Ascent, "init: optimizer must step without arguments, got Ascent, whose step needs 'closure'. Use an"),
    "ahead": (
        lambda params: Ahead(torch.optim.AdamW(params)),
        "init: optimizer must keep its state in its own .state, got Ahead, which wraps AdamW with a state of its own.",
    ),
    "zero": (zero, "init: optimizer must keep its whole state on every rank, got ZeroRedundancyOptimizer, whose state"),
    "postponed": (postponed, "init: optimizer must keep its whole state on every rank, got PostLocalSGDOptimizer, whose state"),
}
NEEDS_RANKS = {"zero", "postponed"}


def refusals_at_init(strategy: str | None) -> dict[str, str]:
    messages = {}
    for name, (make, _) in REFUSED_AT_INIT.items():
        if strategy is None and name in NEEDS_RANKS:
            continue
        # torch's wrappers for ranks take no DTensors.
        model = laid_out("replicate" if name in NEEDS_RANKS else strategy)
        with pytest.raises(ConfigError) as refused:
            STEP.init(model, make(model.parameters()))
        messages[name] = str(refused.value)
    return messages


def refused_as_told(messages: dict[str, str], cases: dict[str, tuple[Any, str]]) -> bool:
    assert {name: line for name, line in messages.items() if not line.startswith(cases[name][1]) or "\n" in line} == {}
    return len(messages) > 0


@each_layout
def test_optimizers_with_a_closure_or_a_hidden_state_are_refused_at_init(ranks, strategy, world):
    assert all(refused_as_told(messages, REFUSED_AT_INIT) for messages in ranks(world).run(refusals_at_init, strategy))


def test_optimizers_with_a_closure_or_a_hidden_state_are_refused_at_init_of_a_plain_model():
    assert refused_as_told(refusals_at_init(None), REFUSED_AT_INIT)


def test_an_outer_optimizer_that_shares_the_inner_state_is_taken():
    model = net()
    outer = Ahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    outer.inner.state = outer.state
    state = STEP.init(model, outer)
    state, _ = STEP(state, BATCH)
    assert len(state.optimizer.state) == 4


def test_an_optimizer_with_a_scheduler_of_torch_is_taken():
    model = net()
    optimizer = Numbers(model.parameters(), READS["lars"])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert STEP(STEP.init(model, optimizer), BATCH)[0].step == 1


# ---- state of every shape -------------------------------------------------------------------------------------------------


class Custom(torch.optim.Optimizer):
    """An optimizer whose ``step`` is a function of the optimizer, a parameter, its gradient and its state."""

    def __init__(self, params: Any, one: Callable[..., None], **options: Any) -> None:
        self.one = one
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.one(self, group, param, param.grad, self.state[param])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nested(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Moments below other keys, with numbers, texts, None and tuples beside them."""
    if not state:
        state.update(moments={"first": torch.zeros_like(p), "rest": [torch.zeros_like(p), 0]}, mode="warm", parts=(0.9, None))
    moments = state["moments"]
    moments["first"].mul_(state["parts"][0]).add_(g)
    moments["rest"][0].add_(g * g)
    moments["rest"][1] += 1
    state["mode"] = "warm" if moments["rest"][1] < 3 else "cold"
    p.sub_(moments["first"] / (moments["rest"][0].sqrt() + 1), alpha=0.1 if state["mode"] == "warm" else 0.05)


def of_group(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """A number and a tensor of the group, and pieces of code, which are no state."""
    group.setdefault("seen", torch.zeros(2, dtype=torch.float64))[0] += g.square().sum().item()
    group["d"] = group.get("d", 0.0) + 0.01
    p.sub_(g.to(group["dtype"]) / (1 + group["seen"][0].item()), alpha=group["rate"](group["d"]))


def of_the_optimizer(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """State below a text, which belongs to no parameter."""
    shared = own.state["all"]
    shared["count"] = shared.get("count", 0) + 1
    shared["sum"] = shared.get("sum", torch.zeros(3, dtype=torch.float64)) + g.abs().sum().item()
    p.sub_(g, alpha=1 / (shared["count"] + shared["sum"][1].item()))


def factored(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Second moments of rows and of columns, as in Adafactor."""
    if p.ndim < 2:
        p.sub_(g, alpha=0.1)
        return
    rows, columns = (g * g).mean(1, keepdim=True), (g * g).mean(0, keepdim=True)
    state["rows"] = rows if "rows" not in state else state["rows"] * 0.9 + rows * 0.1
    # A sum of parts may not stay in the state, and an update in place has the placement of the parameter.
    columns = placed(columns, [replicated()] * 2)
    state["columns"] = columns if "columns" not in state else state["columns"] * 0.9 + columns * 0.1
    scale = (state["rows"] * state["columns"] / state["columns"].mean()).sqrt().add(1e-8)
    p.sub_(placed(g / scale, getattr(p, "placements", ())), alpha=0.01)


def placed(tensor: Tensor, placements: Sequence[Any]) -> Tensor:
    return tensor.redistribute(placements=placements[: tensor.device_mesh.ndim]) if hasattr(tensor, "placements") else tensor


def replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def quantized(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Momentum in 8 bits, with a scale of each row."""
    momentum = g if not state else state["codes"].double() * state["scale"] * 0.9 + g
    state["scale"] = momentum.abs().amax(-1, keepdim=True) / 127 + 1e-12 if p.ndim > 1 else momentum.abs() / 127 + 1e-12
    state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
    p.sub_(placed(momentum, getattr(p, "placements", ())), alpha=0.1)


def anchored(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """A whole plain copy of the first value on every rank."""
    if not state:
        state["start"] = (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
    p.sub_(g, alpha=state["start"].norm().item() / 10)


KEPT: dict[str, Callable[[Any], Custom]] = {
    "nested": lambda params: Custom(params, nested),
    "of group": lambda params: Custom(params, of_group, dtype=torch.float64, rate=lambda d: 0.1 * d),
    "of the optimizer": lambda params: Custom(params, of_the_optimizer),
    "factored": lambda params: Custom(params, factored),
    "quantized": lambda params: Custom(params, quantized),
    "anchored": lambda params: Custom(params, anchored),
}


def kept(strategy: str | None, root: str, begin: bool) -> dict[str, list[float]]:
    """Parameters after three steps, which are saved, or after three more of the saved run."""
    params = {}
    for name, make in KEPT.items():
        model = laid_out(strategy)
        state = STEP.init(model, make(model.parameters()))
        if not begin:
            state = dt.load_sharded(f"{root}/{name}", state)
        for _ in range(3):
            state, _ = STEP(state, own_batch(strategy))
        if begin:
            dt.save_sharded(f"{root}/{name}", state)
        params[name] = [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]
    return params


@pytest.mark.costly
@each_layout
def test_state_of_any_shape_goes_on_after_a_resume(ranks, tmp_path, strategy, world):
    """On the same ranks, and on one after two."""
    expected = {name: trained(make, None, steps=6) for name, make in KEPT.items()}
    ranks(world).run(kept, strategy, str(tmp_path), True)
    again = [ranks(world).run(kept, strategy, str(tmp_path), False)]
    if world > 1:
        again.append(ranks(1).run(kept, "full_shard", str(tmp_path), False))
    for params in (params for run in again for params in run):
        apart = {name: distance(params[name], expected[name]) for name in KEPT}
        assert {name: error for name, error in apart.items() if error > ROUNDING} == {}


# ---- state that no checkpoint can hold ----------------------------------------------------------------------------------


def owns_part(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Each rank keeps the momentum of its own rows, as nanochat's optimizer does."""
    momentum = state.setdefault("momentum", torch.zeros_like(local(g)))
    momentum.mul_(0.9).add_(local(g), alpha=1.0 + dist.get_rank())
    local(p).sub_(local(g), alpha=0.1)


def local_norm(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["norm"] = local(p).norm() + dist.get_rank()
    p.sub_(g, alpha=0.1)


def number_of_rank(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    group["rank"] = dist.get_rank()
    p.sub_(g, alpha=0.1)


def on_one_rank(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        state["momentum"] = torch.zeros(3)
    p.sub_(g, alpha=0.1)


def reads_own_part(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=0.1 * (local(p).norm() + dist.get_rank()).item())


def keeps_a_set(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["seen"] = {1, 2}
    p.sub_(g, alpha=0.1)


def by_another_key(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    own.state[0]["count"] = 1
    p.sub_(g, alpha=0.1)


def fails_on_one_rank(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ConfigError("no rows")
    p.sub_(g, alpha=0.1)


DIFFERS = "must be equal on all ranks or a DTensor, but rank 1 has another value than rank 0, and a checkpoint holds one."
ON_RANKS = {
    owns_part: f"DesyncError: apply_gradients: optimizer state 'momentum' of 0.bias of Custom {DIFFERS}",
    local_norm: f"DesyncError: apply_gradients: optimizer state 'norm' of 0.bias of Custom {DIFFERS}",
    number_of_rank: (
        "DesyncError: apply_gradients: the option 'rank' of group 0 of Custom must be equal on all ranks, got 0 on ranks [0]"
    ),
    on_one_rank: f"DesyncError: apply_gradients: optimizer state 'momentum' of 0.bias of Custom {DIFFERS}",
    reads_own_part: "DesyncError: apply_gradients: Custom.step must read equal numbers on all ranks, but rank 1 has read ",
}
UNSTORABLE = {
    keeps_a_set: "ConfigError: Custom: state 'seen' of 0.bias must be a tensor or plain data, got set.",
    by_another_key: "ConfigError: Custom: optimizer state must belong to a parameter of the model or to a text, got state for",
}


def first_steps(strategy: str) -> dict[str, str]:
    """The error of the first step of each optimizer, on this rank."""
    messages = {}
    for one in (*ON_RANKS, fails_on_one_rank):
        model = laid_out(strategy)
        state = STEP.init(model, Custom(model.parameters(), one))
        try:
            STEP(state, own_batch(strategy))
            messages[one.__name__] = ""
        except (ConfigError, DistError) as error:
            messages[one.__name__] = f"{type(error).__name__}: {error}"
    return messages


def noisy_update() -> str:
    """The error of the first step with gradient noise that each rank draws for itself."""

    def update(inner):
        def noisy(state, metrics):
            for param in state.params.values():
                param.grad += torch.full_like(param.grad, 0.1 * dist.get_rank())
            return inner(state, metrics)

        return noisy

    model = laid_out("replicate")
    step = dt.compose_step(LOSS, [dt.Transform(name="noise", update=update)])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(DistError) as raised:
        step(state, own_batch("replicate"))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_gradients_that_differ_between_ranks_are_named_before_the_state_of_the_optimizer(ranks):
    for line in ranks(2).run(noisy_update):
        assert line.startswith(
            "DesyncError: apply_gradients: the gradient of '0.weight' must be equal on all ranks before the "
        )
        assert "but rank 1 has another gradient than rank 0" in line
        assert "dt.step.random_like" in line
        assert "\n" not in line


@each_layout
def test_state_that_differs_between_ranks_is_refused_in_the_first_step(ranks, strategy, world):
    for rank, messages in enumerate(ranks(world).run(first_steps, strategy)):
        for one, line in ON_RANKS.items():
            told, expected = messages[one.__name__], line if world > 1 else ""
            assert told[: len(expected) or None] == expected
            assert "\n" not in told
        if world > 1:
            read = re.search(r"rank 1 has read (\S+) and rank 0 (\S+) \(number 1 of the step\)", messages["reads_own_part"])
            assert read is not None
            assert float(read[1]) != float(read[2])
        last = world - 1
        named = f"PeerError: apply_gradients: rank {last} failed (1 of {world} ranks did): ConfigError: no rows"
        assert messages["fails_on_one_rank"] == ("ConfigError: no rows" if rank == last else named)


class Packed(Tensor):
    """A tensor that keeps its data in another tensor, as quantized state and weights do. It knows few operations."""

    data_tensor: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self.data_tensor = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_tensor"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Packed(func(args[0].data_tensor, *args[1:]))
        raise NotImplementedError(f"{func} of Packed")


def packs(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Momentum in tensors that wrap other tensors, as in torchao's optimizers of 8 bits: of a shard in a DTensor."""
    from torch.distributed.tensor import DTensor

    if "momentum" not in state:
        packed = Packed(torch.zeros_like(local(p)))
        state["momentum"] = DTensor.from_local(packed, p.device_mesh, p.placements) if isinstance(p, DTensor) else packed
    kept = local(state["momentum"]).data_tensor
    kept.mul_(0.9).add_(local(g))
    local(p).sub_(kept, alpha=0.1)


def partial_sum(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["sum"] = g.sum()
    p.sub_(g, alpha=0.1)


UNSTORABLE[packs] = (
    "ConfigError: Custom: state 'momentum' of 0.bias must be a plain tensor, got Packed, which wraps other tensors"
)
PARTIAL = "ConfigError: Custom: state 'sum' of 0.bias must hold values, not partial sums, got placements (Partial(sum),)"


def unstorable(strategy: str | None, root: str) -> dict[str, tuple[list[str], str, int]]:
    """The warnings of two steps of each optimizer, the error of the save, and the number of steps."""
    reports = {}
    for one in (*UNSTORABLE, *([partial_sum] if strategy == "full_shard" else [])):
        model = laid_out(strategy)
        state = STEP.init(model, Custom(model.parameters(), one))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                state, _ = STEP(state, own_batch(strategy))
        try:
            dt.save_sharded(f"{root}/{one.__name__}", state)
            refused = ""
        except (ConfigError, DistError) as error:
            refused = f"{type(error).__name__}: {error}"
        reports[one.__name__] = (
            [str(warning.message) for warning in seen if "save_sharded" in str(warning.message)],
            refused,
            state.step,
        )
    return reports


def warned_and_refused(reports: dict[str, tuple[list[str], str, int]], rank: int = 0) -> bool:
    for one, line in {**UNSTORABLE, **({partial_sum: PARTIAL} if "partial_sum" in reports else {})}.items():
        warned, refused, steps = reports[one.__name__]
        assert refused.startswith(line)
        assert "\n" not in refused
        assert len(warned) == (rank == 0)
        assert all(text.startswith(line.removeprefix("ConfigError: ")) and "save_sharded refuses" in text for text in warned)
        assert steps == 2
    return len(reports) >= len(UNSTORABLE)


@each_layout
def test_state_that_no_checkpoint_can_hold_trains_and_is_refused_at_the_save(ranks, tmp_path, strategy, world):
    for rank, reports in enumerate(ranks(world).run(unstorable, strategy, str(tmp_path))):
        assert warned_and_refused(reports, rank)


def test_state_that_no_checkpoint_can_hold_trains_and_is_refused_at_the_save_of_a_plain_model(tmp_path):
    assert warned_and_refused(unstorable(None, str(tmp_path)))


def draws(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Seeds and noise of this rank, as stochastic rounding draws them, which move the last bits of its shard only."""
    seed = torch.randint(2**40, ()).item()
    noise = torch.rand_like(local(p))
    assert noise.numel() == 0 or noise.sum().item() >= 0
    assert torch.empty_like(local(p)).uniform_().sum().item() >= 0
    count = local(p).numel() + int(torch.tensor(dist.get_rank()))
    p.sub_(g, alpha=0.1 if seed >= 0 and count >= 0 else 0.2)


def draws_on_ranks(strategy: str) -> int:
    torch.manual_seed(dist.get_rank())
    model = laid_out(strategy)
    state = STEP.init(model, Custom(model.parameters(), draws))
    for _ in range(3):
        torch.manual_seed(dist.get_rank() + 10)
        state, _ = STEP(state, own_batch(strategy))
    return state.step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_numbers_of_each_rank_are_no_difference(ranks, strategy):
    assert ranks(2).run(draws_on_ranks, strategy) == [3, 3]


def compiled_graphs(strategy: str | None) -> list[int]:
    """The number of compiled graphs that have run after each step."""
    run = []

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            run.append(1)
            return graph(*args)

        return call

    torch._dynamo.reset()
    update = torch.compile(lambda p, g: p.sub_(g * g.abs().sqrt(), alpha=0.1), backend=backend, dynamic=True)

    def one(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
        update(p, g)

    model = laid_out(strategy)
    state, totals = STEP.init(model, Custom(model.parameters(), one)), []
    for _ in range(3):
        state, _ = STEP(state, own_batch(strategy))
        totals.append(len(run))
    return totals


@pytest.mark.parametrize("world", [1, 2])
def test_the_check_of_the_first_update_leaves_compiled_updates_compiled(ranks, world):
    for first, second, third in ranks(world).run(compiled_graphs, "replicate"):
        assert (second - first, third - second) == (4, 4)


def test_the_update_of_a_plain_model_stays_compiled():
    assert compiled_graphs(None) == [4, 8, 12]


def mixes(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(g * torch.ones(p.shape, dtype=p.dtype), alpha=0.1)


def on_dtensors() -> str:
    model = laid_out("full_shard")
    state = STEP.init(model, Custom(model.parameters(), mixes))
    with pytest.raises(ConfigError) as refused:
        STEP(state, own_batch("full_shard"))
    return str(refused.value)


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_that_cannot_run_on_dtensors_is_told_what_to_do(ranks, world):
    for mixed in ranks(world).run(on_dtensors):
        assert mixed.startswith(
            "apply_gradients: the optimizer must run on sharded parameters (DTensors), but Custom.step failed: "
        )
        assert "dt.optim.MatrixOptimizer" in mixed
        assert "\n" not in mixed


def late_part(own: Custom, group: dict[str, Any], p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    """Equal in the first five steps."""
    state["count"] = state.get("count", 0) + 1
    state.setdefault("rows", torch.zeros(2))[1] = float(state["count"] > 5) * dist.get_rank()
    p.sub_(g, alpha=0.1)


def saved_late(strategy: str, root: str) -> list[str]:
    model = laid_out(strategy)
    state = STEP.init(model, Custom(model.parameters(), late_part))
    for _ in range(5):
        state, _ = STEP(state, own_batch(strategy))
    dt.save_sharded(root, state)
    state, _ = STEP(state, own_batch(strategy))
    with pytest.raises(DesyncError) as refused:
        dt.save_sharded(root, state, mode="async")
    return [str(refused.value), *sorted(path.name for path in Path(root).glob("step-*"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_that_comes_to_differ_later_is_refused_at_the_save(ranks, tmp_path, strategy):
    for line, *steps in ranks(2).run(saved_late, strategy, str(tmp_path)):
        assert line.startswith(f"save_sharded: optimizer state 'rows' of 0.bias of Custom {DIFFERS}")
        assert steps == ["step-00000005"]


class Size(IntEnum):
    """A subclass of int, which a checkpoint would give back as another type."""

    ONE = 1


def test_state_is_checked_at_the_save_and_the_load_alike():
    """Check that a save takes the state that the first step takes, and refuses the state that it warns about."""
    kept = (1, "a", None, math.inf, {1: [None, 2.0]}, OrderedDict(a=(True,)))
    refused = ({1}, 1j, b"a", defaultdict(int), {(1, 2): 1}, Size(1), np.int64(1))
    for value, storable in (*((value, True) for value in kept), *((value, False) for value in refused)):
        state = STEP.init(model := net(), Custom(model.parameters(), lambda *_: None))
        state.optimizer.state[model[0].weight]["value"] = value
        for check in (check_storable, lambda state: collect_contents({"": state}, {})):
            if storable:
                check(state)
            else:
                with pytest.raises(ConfigError, match=r"tensors|keys must be strings"):
                    check(state)
