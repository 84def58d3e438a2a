"""Units that a rank skips where parameters are cut: zeros after the first step, one error on all ranks in the first."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import RankError, StepError
from dtrain.shard import skipped_units
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives

DIM = 4


class Leaf(nn.Module):
    """A unit without others inside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Nest(nn.Module):
    """A unit with two others inside it, each of which may be skipped, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.left, self.right = nn.Linear(DIM, DIM), Leaf(5), Leaf(11)

    def forward(self, x: Tensor, plan: set[str]) -> Tensor:
        x = torch.tanh(self.own(x))
        x = self.left(x) if "left" in plan else x
        return self.right(x) if "right" in plan else x


class Net(nn.Module):
    """Units of different sizes: tables with whole numbers as input, a nest, a unit that runs twice, a unit without a graph."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.table, self.second = nn.Embedding(7, DIM), nn.Embedding(9, DIM)
        self.first, self.nest, self.last = Leaf(3), Nest(), Leaf(8)
        self.teacher = Leaf(6)
        if root:
            self.scale = nn.Parameter(torch.ones(DIM))
        self.plan: set[str] = set()

    def forward(self, tokens: Tensor) -> Tensor:
        plan = self.plan
        x = self.table(tokens % 7) if "table" in plan else torch.ones(*tokens.shape, DIM, dtype=torch.float64)
        x = x + self.second(tokens % 9) if "second" in plan else x
        x = self.first(x) if "first" in plan else x
        if "teacher" in plan:
            with torch.no_grad():
                target = self.teacher(x)
            x = x + target
        x = self.nest(x, plan) if "nest" in plan else x
        x = self.first(x) if "again" in plan else x
        x = x * self.scale if hasattr(self, "scale") else x
        return self.last(x) if "last" in plan else x


PARTS = ("table", "second", "first", "teacher", "nest", "left", "right", "again", "last")
BLOCKS = (Leaf, Nest, nn.Embedding)


def make(root: bool) -> Net:
    torch.manual_seed(0)
    return Net(root).double()


def loss_of(net: nn.Module, tokens: Tensor) -> dt.LossSum:
    out = net(tokens)
    return dt.LossSum(total=out.square().sum(), weight=len(tokens), aux={})


def tokens_of(rank: int) -> Tensor:
    return torch.randint(0, 63, (4, 3), generator=torch.Generator().manual_seed(rank))


def error_of(state: dt.TrainState, alone: Net, plans: list[set[str]]) -> float:
    """The largest difference of a gradient from that of one process, relative to the largest gradient; None must meet None."""
    alone.zero_grad()
    for rank, plan in enumerate(plans):
        alone.plan = plan
        total = loss_of(alone, tokens_of(rank)).total
        if total.requires_grad:
            (total / (4 * len(plans))).backward()
    theirs, errors, largest = dict(alone.named_parameters()), [0.0], 1e-3
    for name, param in state.params.items():
        expected = theirs[name].grad
        assert (param.grad is None) == (expected is None), (name, plans)
        if expected is not None:
            errors.append((full_tensor(param.grad) - expected).abs().max().item())
            largest = max(largest, expected.abs().max().item())
    return max(errors) / largest


def swept(root: bool, strategy: str, steps: int, special: str) -> float:
    """Return the largest error in steps of which each rank skips parts at random, after a whole step."""
    world, rng = get_dist_info().world_size, random.Random(7)
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    net = make(root)
    precision = dt.Precision(param="bf16", reduce="fp32") if special == "bf16" else None
    if special == "checkpointed":
        dt.shard.checkpoint_activations(net, blocks=(Leaf,))
    net = dt.shard_model(net, mesh, strategy=strategy, blocks=BLOCKS, precision=precision)
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.01))
    alone, worst = make(root), 0.0
    for step in range(steps):
        plans = [set(PARTS) if step == 0 else {unit for unit in PARTS if rng.random() < 0.6} for _ in range(world)]
        if step == steps - 1:
            plans[0] = set()
        if step and not any(plan & {"first", "nest", "last", "table"} for plan in plans):
            plans[-1] = set(PARTS)
        state.model.plan = plans[get_dist_info().rank]
        state, _ = microbatch_step(state, tokens_of(get_dist_info().rank), loss_fn=loss_of, microbatch_size=2)
        worst = max(worst, error_of(state, alone, plans))
    return worst


@pytest.mark.parametrize("root", [True, False], ids=["root with parameters", "root without"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_units_skipped_on_some_ranks_count_as_zero(ranks, strategy, root, request):
    steps = 200 if request.config.getoption("--slow") else 12
    for error in ranks(4 if strategy == "hybrid_shard" else 2).run(swept, root, strategy, steps, ""):
        assert error <= 1e-12


@pytest.mark.parametrize(("special", "at_most"), [("checkpointed", 1e-12), ("bf16", 0.03)])
def test_skipped_units_count_as_zero_with_checkpointing_and_bf16(ranks, special, at_most):
    for error in ranks(2).run(swept, True, "full_shard", 12, special):
        assert error <= at_most


def collectives_by_part(root: bool, strategy: str, most: int) -> list[list[str]]:
    """Return the subsets of at most ``most`` parts whose omission changes the collectives of a step."""
    net = dt.shard_model(make(root), dt.build_mesh(), strategy=strategy, blocks=BLOCKS)
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.0))
    subsets = [set(subset) for size in range(most + 1) for subset in itertools.combinations(PARTS, size)]
    whole, names = [], []
    for missing in [set(), *subsets]:  # the first step is lazy about some of its set-up
        net.plan = set(PARTS) - missing
        with count_collectives() as seen:
            state, _ = microbatch_step(state, tokens_of(get_dist_info().rank), loss_fn=loss_of)
        issued = [(record.op, record.bytes) for record in seen.records if record.group != "control"]
        whole = whole if missing else issued
        if issued != whole:
            names.append(sorted(missing))
    return names


@pytest.mark.costly
@pytest.mark.parametrize(
    ("strategy", "root"),
    [
        pytest.param("full_shard", True),
        pytest.param("full_shard", False, marks=pytest.mark.slow),
        pytest.param("shard_grad_op", True, marks=pytest.mark.slow),
        pytest.param("shard_grad_op", False),
    ],
)
def test_step_issues_equal_collectives_for_any_skipped_units(ranks, strategy, root, request):
    most = 5 if request.config.getoption("--slow") else 2  # one of the units that have a gradient must be left
    assert ranks(2).run(collectives_by_part, root, strategy, most) == [[], []]


class Generating(nn.Module):
    """A model that runs its blocks without a graph ``tokens`` times, first without those in ``without``, then with a graph."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.net = Ordered()
        if root:
            self.scale = nn.Parameter(torch.ones(DIM))
        self.tokens, self.without = 0, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for token in range(self.tokens):
                self.net.order = [index for index in range(3) if token != 0 or index not in self.without]
                x = self.net(x)
        self.net.order = [0, 1, 2]
        return self.net(x) * getattr(self, "scale", 1.0)


def generated(root: bool, tokens: list[int], without: list[list[int]]) -> list[int]:
    """The gathers of each step; both ranks generate as many tokens, and rank 1 leaves blocks out for the first of them."""
    net = dt.shard_model(Generating(root), dt.build_mesh(), blocks=(Leaf,))
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.0))
    counts = []
    for number, left in zip(tokens, without, strict=True):
        net.tokens, net.without = number, set(left) if get_dist_info().rank else set()
        with count_collectives() as seen:
            state, _ = microbatch_step(state, torch.randn(4, DIM), loss_fn=loss_of)
        counts.append(len([record for record in seen.records if record.op == "all_gather" and record.group != "control"]))
    return counts


@pytest.mark.parametrize("root", [True, False], ids=["root with parameters", "root without"])
def test_no_grad_forwards_gather_once_per_loss_forward(ranks, root):
    first, second = ranks(2).run(generated, root, [9, 1, 3, 12, 2], [[], [], [], [], [1]])
    assert first == second
    per_token = (first[3] - first[1]) / 11
    assert per_token >= 3  # three blocks, and the units that backward gathers ahead of them
    assert first[2] - first[1] == 2 * per_token
    assert first[4] - first[1] == per_token


def first_step(missing: str) -> list:
    net = dt.shard_model(make(True), dt.build_mesh(), blocks=BLOCKS)
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.01))
    net.plan = set(PARTS) - {missing} if get_dist_info().rank else set(PARTS)
    with pytest.raises(StepError) as error:
        microbatch_step(state, tokens_of(0), loss_fn=loss_of)
    clean = all(param.grad is None for param in state.params.values())
    net.plan = set(PARTS)
    state, _ = microbatch_step(state, tokens_of(get_dist_info().rank), loss_fn=loss_of)
    return [
        str(error.value),
        clean,
        error_of(state, make(True), [set(PARTS)] * 2),
    ]


@pytest.mark.parametrize(
    ("missing", "comes_to"),
    [
        ("first", ["'first'", "'teacher'"]),
        ("right", ["'nest.right'", "'first'"]),
        ("last", ["'last'", "the end of its microbatch"]),
    ],
)
def test_unit_skipped_in_first_step_is_named_on_all_ranks(ranks, missing, comes_to):
    first, second = ranks(2).run(first_step, missing)
    assert first == second
    message, clean, error = first
    assert message == (
        f"step: ranks must run the same units in the first step, got {comes_to[0]} on rank 0 and {comes_to[1]} on rank 1. Call "
        "a unit that a rank does not need on zero rows, too, or leave it out of blocks. Later steps may skip units."
    )
    assert clean
    assert error <= 1e-12


def under_auto() -> float:
    net = dt.shard_model(make(True), dt.build_mesh(), blocks=BLOCKS)
    step = dt.compose_step(loss_of, [dt.auto_microbatch(initial_size=2, min_size=1, grow_every=None)])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.0))
    alone, worst = make(True), 0.0
    rng = random.Random(3)
    for index in range(10):
        plans = [set(PARTS) if index == 0 else {unit for unit in PARTS if rng.random() < 0.6} | {"last"} for _ in range(2)]
        net.plan = plans[get_dist_info().rank]
        kept: dict[str, Tensor | None] = {}

        def update(state: dt.TrainState, metrics: dt.typing.Metrics, kept=kept) -> tuple[dt.TrainState, dt.typing.Metrics]:
            kept.update({name: param.grad for name, param in state.params.items()})
            return dt.apply_gradients(state, metrics)

        step = dt.compose_step(loss_of, [dt.auto_microbatch(initial_size=2, min_size=1, grow_every=None)], update=update)
        state, _ = step(state, tokens_of(get_dist_info().rank))
        for name, param in state.params.items():
            param.grad = kept[name]
        worst = max(worst, error_of(state, alone, plans))
        for param in state.params.values():
            param.grad = None
    return worst


def test_skipped_units_count_as_zero_with_auto_microbatch(ranks):
    for error in ranks(2).run(under_auto):
        assert error <= 1e-12


def frozen_part() -> tuple[list[int], float]:
    """Gathers of a step in which both ranks skip a unit; then of the same step after the unit was frozen."""
    net = dt.shard_model(make(True), dt.build_mesh(), blocks=BLOCKS)
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.0))
    counts = []
    for index in range(4):
        net.plan = set(PARTS) if index == 0 else set(PARTS) - {"last"}
        if index == 2:
            net.last.requires_grad_(False)
        with count_collectives() as seen:
            state, _ = microbatch_step(state, tokens_of(get_dist_info().rank), loss_fn=loss_of)
        counts.append(seen.count(op="all_gather") - seen.count(op="all_gather", group="control"))
    alone = make(True)
    alone.last.requires_grad_(False)
    return counts, error_of(state, alone, [set(PARTS) - {"last"}] * 2)


def test_unit_order_is_recorded_again_after_freezing_parameters(ranks):
    for counts, error in ranks(2).run(frozen_part):
        assert counts[0] == counts[1]
        assert counts[2] == counts[3] < counts[0]
        assert error <= 1e-12


class Ordered(nn.Module):
    """Units that run in the order which is set."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Leaf(5) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.units[index](x)
        return x


def swapped_later(orders: list[list[list[int]]], seconds: float = skipped_units._REORDER_TIMEOUT_S) -> None:
    skipped_units._REORDER_TIMEOUT_S = seconds
    net = dt.shard_model(Ordered(), dt.build_mesh(), blocks=(Leaf,))
    state = dt.compose_step(loss_of).init(net, torch.optim.SGD(net.parameters(), lr=0.0))
    for order in orders:
        net.order = order[get_dist_info().rank]
        state, _ = microbatch_step(state, torch.randn(4, DIM), loss_fn=loss_of)


def test_later_unit_reordering_is_reported_by_the_reordered_rank(ranks):
    with pytest.raises(
        RankError, match=r"rank 1 of 2 raised[^$]*StepError: step: this rank runs 'units.1' later than in the first"
    ):
        ranks(2).run(swapped_later, [[[0, 1, 2]] * 2, [[0, 1, 2], [0, 2, 1]]], 2.0)


def test_new_or_reordered_units_on_all_ranks_are_accepted(ranks):
    orders = [[0, 1], [0, 2, 1], [0, 1, 1, 2], [2, 1, 0], [2, 1, 0], [1, 0, 2]]
    ranks(2).run(swapped_later, [[order] * 2 for order in orders])
