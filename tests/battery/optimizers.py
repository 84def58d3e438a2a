"""The registry of optimizers: a new optimizer is a row, and every contract tests it from then on.

``BROKEN`` has one optimizer per way of breaking a contract, each with the contract that must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import dtrain as dt
from battery.matrices import EPS, Shampoo
from battery.row import Points
from battery.run import FIRST, GRAD, LENGTH, STEPS, TASKS, Run, differences, snapshot, train
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seed_all
from dtrain.optim.decoupled import DecoupledAdamW, DecoupledSGDW
from dtrain.optim.groups import ParamGroup, muon_groups, param_groups
from dtrain.optim.muon import Muon, orthogonalize
from dtrain.testing import Ranks, count_host_syncs

TOLERANCE = 1e-12  # norm of the difference over norm of all parameters, in float64; rounding gives about 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An optimizer under contract.

    Args:
        make: makes it for a model, as a new process would.
        of: the public names that it is an example of.
        points: a case whose numbers follow from the formula: at least two pairs (computed, expected).
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    of: tuple[str, ...] = ()
    points: Callable[[], Points] | None = None


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], start: Any, *grads: Any, factors: Any = None) -> Any:
    """A parameter after each of some steps, as lists; ``factors`` are those of the rate."""
    param = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = make([param])
    peaks, values = [group["lr"] for group in optimizer.param_groups], []
    for grad, factor in zip(grads, factors or [1.0] * len(grads), strict=True):
        param.grad = torch.tensor(grad, dtype=torch.float64)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        optimizer.step()
        values.append(param.tolist())
    return values


def _adamw_points() -> Points:
    """One element, gradients 1 and 3, the rate 0.5 and then half of it; eps is 0."""
    first, second = stepped(
        lambda p: DecoupledAdamW(p, lr=0.5, betas=(0.5, 0.75), eps=0.0, weight_decay=0.25),
        [8.0],
        [1.0],
        [3.0],
        factors=(1, 0.5),
    )
    # m = 0.5, v = 0.25; both corrected are 1: 8 * 0.75 - 0.5
    # m = 1.75 / (1 - 0.25), v = (0.1875 + 2.25) / (1 - 0.5625): 5.5 * 0.875 - 0.25 * m / sqrt(v)
    return [(first, [5.5]), (second, [5.5 * 0.875 - 0.25 * (1.75 / 0.75) / (2.4375 / 0.4375) ** 0.5])]


def _sgdw_points() -> Points:
    """The second decay is half of the first, as the rate is; the buffer has no decay in it."""
    plain = stepped(lambda p: DecoupledSGDW(p, lr=0.5, momentum=0.5, weight_decay=0.25), [8.0], [1.0], [3.0], factors=(1, 0.5))
    ahead = stepped(lambda p: DecoupledSGDW(p, lr=0.5, momentum=0.5, weight_decay=0.25, nesterov=True), [8.0], [1.0])
    return [(plain[0], [5.5]), (plain[1], [5.5 * 0.875 - 0.25 * 3.5]), (ahead[0], [8 * 0.75 - 0.5 * 1.5])]


def _muon_points() -> Points:
    """With the coefficients (1.5, -0.5, 0) and one step a singular value s becomes 1.5 s - 0.5 s^3."""
    options = {"ns_steps": 1, "ns_coefficients": (1.5, -0.5, 0.0), "ns_dtype": "param"}
    once = stepped(lambda p: Muon(p, lr=0.5, weight_decay=0.1, **options), [[2.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 4.0]])
    tall = stepped(lambda p: Muon(p, lr=0.5, weight_decay=0.0, **options), [[0.0]] * 4, [[1.0]] * 4)
    lower, upper = 1.5 * 0.6 - 0.5 * 0.6**3, 1.5 * 0.8 - 0.5 * 0.8**3
    return [
        (once[0], [[2 * 0.95 - 0.5 * lower, 0.0], [0.0, 2 * 0.95 - 0.5 * upper]]),
        (tall[0], [[-0.5 * 2 * 0.5]] * 4),  # a column of norm 1 stays as it is; four rows by one: twice the rate
    ]


def _matrix_points() -> Points:
    """A diagonal gradient is divided by the fourth root of the statistics of both sides; other parameters get AdamW."""
    values = stepped(lambda p: Shampoo(p, lr=0.5, weight_decay=0.1), [[2.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 4.0]])
    upper, lower = 3 / (9 + EPS) ** 0.5, 4 / (16 + EPS) ** 0.5
    adamw = stepped(lambda p: Shampoo([{"params": p, "method": "adamw", "lr": 0.5, "eps": 0.0}]), [8.0], [1.0])
    return [(values[0], [[2 * 0.95 - 0.5 * upper, 0.0], [0.0, 2 * 0.95 - 0.5 * lower]]), (adamw, [[7.5]])]


def _iteration_points() -> Points:
    """Apply the paper's quintic once to the singular values 0.6 and 0.8, and five times to many values."""
    a, b, c = 3.4445, -4.7750, 2.0315
    diagonal = orthogonalize(torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64)), ns_steps=1).diagonal()
    wide = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(wide))
    return [
        (diagonal.tolist(), [a * s + b * s**3 + c * s**5 for s in (0.6, 0.8)]),
        (bool((values > 0.6).all() and (values < 1.3).all()), True),
    ]


def _group_points() -> Points:
    """Only the matrix decays among an embedding, a matrix with a bias, and a norm."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    groups = {group["name"]: group for group in param_groups(model, weight_decay=0.5)}
    return [
        ([tuple(p.shape) for p in groups["all"]["params"]], [(2, 2)]),
        ([groups["all"]["weight_decay"], groups["all.no_decay"]["weight_decay"]], [0.5, 0.0]),
        ([tuple(p.shape) for p in groups["all.no_decay"]["params"]], [(3, 2), (2,), (2,), (2,)]),
    ]


def _muon_group_points() -> Points:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 4), nn.Linear(4, 3))
    groups = {group["name"]: group for group in muon_groups(model, head="2.*", lr=0.5)}
    return [
        ([tuple(p.shape) for p in groups["matrices"]["params"]], [(4, 2)]),
        ([tuple(p.shape) for p in groups["adamw"]["params"]], [(3, 4)]),
        ([group["lr"] for group in groups.values()], [0.5, 3e-4, 3e-4]),
    ]


def _by_group(model: nn.Module) -> torch.optim.Optimizer:
    head = ParamGroup("head", "head.**", {"lr": 0.02})
    return torch.optim.AdamW(param_groups(model, head, ParamGroup("rest"), weight_decay=0.1), lr=0.05, fused=True)


def _shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(muon_groups(model, head="head.*", lr=0.05, adamw_lr=0.02, method="matrix"))


def _muon(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return Muon(muon_groups(model, head="head.*", lr=0.05, adamw_lr=0.02, ns_dtype="param", **options))


ROWS: dict[str, Row] = {
    "adamw": Row(
        make=lambda model: DecoupledAdamW(param_groups(model, weight_decay=0.05), lr=0.05),
        of=("DecoupledAdamW",),
        points=_adamw_points,
    ),
    "adamw-foreach-amsgrad": Row(make=lambda model: DecoupledAdamW(model.parameters(), lr=0.05, amsgrad=True, foreach=True)),
    "sgdw": Row(
        make=lambda model: DecoupledSGDW(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.05, nesterov=True),
        of=("DecoupledSGDW",),
        points=_sgdw_points,
    ),
    "groups": Row(make=_by_group, of=("param_groups", "ParamGroup"), points=_group_points),
    "matrix": Row(make=_shampoo, of=("MatrixOptimizer",), points=_matrix_points),
    "muon": Row(make=_muon, of=("Muon",), points=_muon_points),
    "muon-groups": Row(
        make=lambda model: _muon(model, matrices=["middle.weight"]), of=("muon_groups",), points=_muon_group_points
    ),
    "muon-match-rms": Row(
        make=lambda model: _muon(model, adjust_lr_fn="match_rms_adamw", nesterov=False),
        of=("orthogonalize",),
        points=_iteration_points,
    ),
}

# ---- broken on purpose ------------------------------------------------------------------------------------------------------


class Remembering(torch.optim.SGD):
    """Counts its steps in the process, so a new process counts from zero."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for param in (p for group in self.param_groups for p in group["params"]):
            param.grad.mul_(1.0 / self.steps)
        super().step()


class OfTheShard(torch.optim.SGD):
    """Makes this rank's rows orthogonal, as if they were the matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.ndim == 2):
            grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            grad.copy_(orthogonalize(grad))
        super().step()


class Looking(torch.optim.SGD):
    """An optimizer that reads a value of the device to decide about the step."""

    def step(self, closure: Any = None) -> None:
        if all(float(p.grad.sum()) == 0.0 for group in self.param_groups for p in group["params"]):
            return
        super().step()


BROKEN: dict[str, tuple[str, Row]] = {
    "memory outside the state": ("resume", Row(make=lambda model: Remembering(model.parameters(), lr=0.2))),
    "update of the shard": ("ranks", Row(make=lambda model: OfTheShard(model.parameters(), lr=0.2))),
    "looks at values": ("syncs", Row(make=lambda model: Looking(model.parameters(), lr=0.2, foreach=True))),
}


def row(name: str) -> Row:
    """A row, sound or broken: ranks find it by name."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]


# ---- the run, and the contracts ---------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """An embedding, two hidden matrices, a norm and a head; few of its sizes are even."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.norm = nn.Embedding(11, 5), nn.Linear(5, 7), nn.LayerNorm(7)
        self.last, self.head = nn.Linear(7, 3, bias=False), nn.Linear(3, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.last(self.norm(torch.tanh(self.middle(self.embed(ids)))))))


def begin(name: str, *transforms: dt.Transform) -> tuple[Run, dt.TrainState]:
    """A run of a row and its first state; sharded where there are process groups."""
    seed_all(7, get_dist_info().rank)
    torch.manual_seed(11)
    model: nn.Module = Deep().double()
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), blocks=(nn.Linear,))
    wraps = transforms or (
        dt.transforms.scale_lr(dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, STEPS), 2)),
        dt.transforms.clip_by_norm(1.0),
    )
    step = dt.compose_step(TASKS["text"].loss, wraps, grad=GRAD)
    return Run(step=step, task="text"), step.init(model, row(name).make(model), seed=5, run_length=LENGTH)


def check_resume_equals_straight(name: str, root: str) -> None:
    """Interrupted in the middle, saved, loaded into a fresh state and continued: every bit is that of the run in one piece."""
    expected, trace = train(*begin(name), STEPS)
    straight = snapshot(expected)
    state, first = train(*begin(name), FIRST)
    dt.save_sharded(root, state)
    run, state = begin(name)
    state, second = train(run, dt.load_sharded(root, state), STEPS)
    changed = differences({**straight, "metrics": trace}, {**snapshot(state), "metrics": first + second})
    assert changed == [], f"resume: {name}: differs from the straight run at {changed}"


def numbers_at_the_end(name: str, root: str | None = None) -> list[float]:
    """Return all parameters after a whole run, or after the rest of the run that is saved in ``root``."""
    run, state = begin(name)
    if root is not None:
        state = dt.load_sharded(root, state)
        assert state.step == FIRST
    state, _ = train(run, state, STEPS)
    return [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]


def save_in_the_middle(name: str, root: str) -> None:
    """Save a run after its first part."""
    dt.save_sharded(root, train(*begin(name), FIRST)[0])


def check_ranks_equal_one(name: str, ranks: Callable[[int], Ranks]) -> None:
    """Two ranks that share each batch, rows of every matrix and the work end where one does."""
    alone, *pair = ranks(1).run(numbers_at_the_end, name) + ranks(2).run(numbers_at_the_end, name)
    for params in pair:
        check_close(params, alone, f"ranks: {name}: parameters on two ranks are")


def check_other_world_size(name: str, root: str, ranks: Callable[[int], Ranks], first: int, then: int) -> None:
    """Saved on ``first`` ranks and continued on ``then``, it ends where one rank does."""
    alone = ranks(1).run(numbers_at_the_end, name)[0]
    ranks(first).run(save_in_the_middle, name, root)
    for params in ranks(then).run(numbers_at_the_end, name, root):
        check_close(params, alone, f"world size: {name}: parameters of {first} ranks and then {then} are")


def check_close(params: list[float], expected: list[float], what: str) -> None:
    """Refuse numbers that are further apart than rounding."""
    here, there = torch.tensor(params, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    apart = ((here - there).norm() / there.norm()).item()
    assert apart <= TOLERANCE, f"{what} {apart:.1e} from those on one"


def syncs_of_a_step(name: str) -> list[str]:
    """Return the causes of host syncs in a step of the optimizer alone, once it has its state."""
    run, state = begin(name)
    state, _ = run.take(state)
    for param in state.params.values():
        param.grad = torch.ones_like(param)
    with count_host_syncs() as seen:
        state.optimizer.step()
    return [str(call) for call in seen.calls]


def check_no_host_sync(name: str) -> None:
    """A step never waits for a device."""
    syncs = syncs_of_a_step(name)
    assert syncs == [], f"syncs: {name}: {syncs[0]}"


def check_points(points: Points) -> None:
    """Require at least two numbers that equal those of the formula."""
    assert len(points) >= 2
    for computed, expected in points:
        if computed != expected:
            numbers = [torch.tensor(value, dtype=torch.float64) for value in (computed, expected)]
            torch.testing.assert_close(*numbers, rtol=1e-12, atol=1e-15)
