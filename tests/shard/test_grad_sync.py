"""Collectives of a step, with bytes, and gradients that FSDP2 alone would reduce wrongly without an error."""

from functools import partial

import pytest
import torch
from torch import nn

from dtrain.dist.context import current_context
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import StepError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard import grad_sync
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.state import TrainState, init_state
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum
from shard.models import DIM, SAMPLES, WEIGHTS, Block, Fork, Forked, Stack, batch, difference, make, squared

BLOCKS = 3


class Row(nn.Module):
    """Three equal blocks, each called once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_BYTES = 8 * (DIM * 9 + 9 + 9 * DIM + DIM)
HEAD_BYTES = 8 * (DIM * 4 + 4)


def state_of(net: nn.Module) -> TrainState:
    return init_state(net, torch.optim.SGD(net.parameters(), lr=0.01))


def traffic(strategy: str, accumulate: str, microbatches: int) -> dict[str, list]:
    """Collectives of the second step (the first one's lazy set-up is over), those among one rank left out."""
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    torch.manual_seed(0)
    net = shard_model(Row().double(), mesh, strategy=strategy, accumulate=accumulate, blocks=(Block,))
    state = state_of(net)
    whole = batch("called twice", WEIGHTS)
    exchange = current_context().control_plane["control"]
    for _ in range(2):
        before = exchange.num_records
        with count_collectives() as seen:
            state, metrics = microbatch_step(state, whole, loss_fn=squared, microbatch_size=SAMPLES // microbatches)
            state, metrics = optimizer_step(state, metrics)
    with count_collectives() as logged:
        reduce_metrics(metrics)
    rows = [r for r in seen.records if r.group_size > 1]
    weights = [r for r in rows if (r.op, r.bytes, r.dtype) == ("all_reduce", 8, "float64")]
    grads = [r for r in rows if r.group != "control" and r not in weights]
    return {
        **{
            op: [len(same := [r for r in grads if r.op == op]), sum(r.bytes for r in same)]
            for op in ("all_gather", "reduce_scatter", "all_reduce")
        },
        "other": len([r for r in grads if r.op not in ("all_gather", "reduce_scatter", "all_reduce")]),
        "control": [len([r for r in rows if r.group == "control"]), len(weights)],
        "records": exchange.num_records - before,
        "logging": logged.count(),
    }


MODEL_BYTES = BLOCKS * BLOCK_BYTES + HEAD_BYTES
UNITS = BLOCKS + 1


def padded(world: int) -> int:
    """Return the bytes of the whole model in a collective, with the rows of every tensor padded to a multiple of the ranks."""
    up = lambda n: -(-n // world) * world  # noqa: E731
    block = up(9) * DIM + up(9) + up(DIM) * 9 + up(DIM)
    return 8 * (BLOCKS * block + up(4) * DIM + up(4))


def expected(strategy: str, accumulate: str, microbatches: int) -> dict[str, list]:
    """By op: how often, and bytes, for four ranks.

    A gather is per unit, and twice for blocks that are freed after forward; a reduction is per unit and step, or microbatch.
    """
    shards = {"full_shard": 4, "shard_grad_op": 4, "hybrid_shard": 2, "replicate": 1}[strategy]
    frees = strategy in ("full_shard", "hybrid_shard")
    reductions = 1 if accumulate == "local" else microbatches
    # The gradients of this small model fit into one bucket.
    all_reduces = 1 if strategy == "replicate" else UNITS
    whole = padded(shards)
    head = 8 * (-(-4 // shards) * shards) * (DIM + 1)
    gathers = microbatches * (2 * BLOCKS + 1) if frees else UNITS
    gathered = microbatches * (2 * whole - head) if frees else whole
    return {
        "all_gather": [gathers, gathered] if shards > 1 else [0, 0],
        "reduce_scatter": [UNITS * reductions, whole * reductions] if shards > 1 else [0, 0],
        "all_reduce": [all_reduces, whole // shards] if shards < 4 else [0, 0],
        "other": 0,
        "control": [0, 0],
        "records": 2,
        "logging": 1,
    }


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
def test_step_issues_the_collectives_of_its_strategy_only(ranks, strategy, accumulate, microbatches):
    for counts in ranks(4).run(traffic, strategy, accumulate, microbatches):
        assert counts == expected(strategy, accumulate, microbatches)


def uneven(fill: bool) -> list:
    """Ranks use different branches inside a unit; without zeros for missing gradients, the shapes do not fit together."""
    if not fill:
        grad_sync.zero_fill_missing_grads = lambda group: ([], [])
    try:
        # With ``offload`` FSDP2 replicates the model.
        net = shard_model(make("some unused"), build_mesh(), strategy="replicate", blocks=(Fork,), offload="params")
        state = state_of(net)
        half = SAMPLES // 2
        mine = slice(get_dist_info().rank * half, (get_dist_info().rank + 1) * half)
        microbatch_step(state, {key: value[mine] for key, value in batch("some unused", WEIGHTS).items()}, loss_fn=squared)
        return [difference("some unused", state.params), net.fork.never.weight.grad is None]
    finally:
        from dtrain.shard.fsdp2_private import zero_fill_missing_grads

        grad_sync.zero_fill_missing_grads = zero_fill_missing_grads


def test_parameters_unused_on_some_ranks_are_reduced_correctly(ranks):
    assert [[error <= 1e-12, unused] for error, unused in ranks(2).run(uneven, True)] == [[True, True]] * 2
    assert min(error for error, _ in ranks(2).run(uneven, False)) > 1e-3


def late_branch(accumulate: str) -> float:
    """In the wider dtype of reductions: a parameter used in the last microbatch only meets sums of earlier microbatches."""
    net = shard_model(
        make("some unused").float(),
        build_mesh(),
        accumulate=accumulate,
        blocks=(Fork,),
        precision=Precision(param="bf16", reduce="fp32"),
    )
    state = state_of(net)
    whole = {key: value.float() for key, value in batch("some unused", WEIGHTS).items()}
    microbatch_step(state, whole, loss_fn=squared, microbatch_size=2)
    return difference("some unused", state.params)


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_parameter_used_only_in_later_microbatches_accumulates_in_float32(ranks, accumulate):
    assert max(ranks(2).run(late_branch, accumulate)) < 0.05  # bfloat16 has 8 bits


class Skipping(Stack):
    """Rank 1 runs two equal blocks in another order."""

    def forward(self, x):
        order = (0, 1, 2) if get_dist_info().rank == 0 else (0, 2, 1)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


def other_order() -> str:
    net = shard_model(Skipping().double(), build_mesh(), blocks=(Block,))
    state = state_of(net)
    try:
        microbatch_step(state, batch("called twice", WEIGHTS), loss_fn=squared)
    except StepError as error:
        return f"{error} left: {sum(p.grad is not None for p in net.parameters())}"
    return "no error"


def test_reordered_units_on_one_rank_raise_on_all_ranks(ranks):
    first, second = ranks(2).run(other_order)
    assert first.startswith(
        "step: ranks must run the same units in the first step, got 'blocks.1' on rank 0 and 'blocks.2' on rank 1"
    )
    assert first == second
    assert first.endswith("left: 0")


def forked_on_one_rank() -> bool:
    net = shard_model(Forked().double(), build_mesh(), blocks=(Fork,))
    state = state_of(net)
    microbatch_step(state, batch("some unused", WEIGHTS), loss_fn=squared, microbatch_size=3)
    return net.fork.never.weight.grad is None


def test_parameter_unused_on_all_ranks_has_no_gradient(ranks):
    assert ranks(1).run(forked_on_one_rank) == [True]


class Choosing(nn.Module):
    """Three units of different sizes; each rank runs the units that its samples name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.wide, self.narrow = (nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, 4)) for size in (16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which, x = int(x[0, -1]), x[:, :4]  # a microbatch is of one kind
        x = self.first(x)
        for bit, unit in ((1, self.wide), (2, self.narrow)):
            if which & bit:
                x = x + unit(x)
        return self.head(x)


def chosen_loss(net: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=net(x).square().sum(), weight=len(x))


def choosing() -> nn.Module:
    torch.manual_seed(0)
    return Choosing().double()


# By rank, which units each microbatch of a step runs: 1 is the wide one, 2 the narrow one, 3 both; and steps one after another.
SKIPS = {
    "on one rank": [[[0, 0], [3, 3]]],
    "another one on each rank": [[[1, 1], [2, 2]]],
    "on all ranks": [[[0, 0], [0, 0]]],
    "one unit on all ranks": [[[2, 2], [2, 2]]],
    "in the first of several microbatches": [[[0, 3], [3, 3]]],
    "in the last of several microbatches": [[[3, 0], [3, 3]]],
    "in a later step": [[[3, 3], [3, 3]], [[3, 3], [3, 3]], [[0, 0], [3, 3]], [[3, 3], [3, 3]]],
    "in the first step": [[[3, 3], [0, 1]], [[3, 3], [3, 3]]],
}


WHOLE = [[3, 3], [3, 3]]  # where parameters are cut, the first step learns which units there are


def skipping(strategy: str, accumulate: str) -> dict[str, float]:
    """Return the largest error of any step's gradients, relative to one process; unused parameters have no gradient."""
    largest, world = {}, get_dist_info().world_size
    grad = partial(microbatch_step, microbatch_size=1)
    for name, steps in SKIPS.items():
        net = shard_model(choosing(), mesh_of(strategy), strategy=strategy, blocks=BLOCKS_OF_CHOOSING, accumulate=accumulate)
        state, alone, errors = state_of(net), choosing(), []
        for kinds in steps if strategy == "replicate" else [WHOLE, *steps]:
            x = torch.randn(world, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            x[..., -1] = torch.tensor(kinds).repeat(world // 2, 1)
            alone.zero_grad()
            for sample in x.flatten(0, 1).split(1):
                (chosen_loss(alone, sample).total / (2 * world)).backward()
            grad(state, x[get_dist_info().rank], loss_fn=chosen_loss)
            theirs = dict(alone.named_parameters())
            for key, param in state.params.items():
                expected = theirs[key].grad
                assert (param.grad is None) == (expected is None), (name, key)
                if expected is not None:
                    errors.append((full_tensor(param.grad) - expected).abs().max().item())
        largest[name] = max(errors)
    return largest


def mesh_of(strategy: str):
    return build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()


BLOCKS_OF_CHOOSING = ("wide", "narrow", "first")


SKIPPED_QUICKLY = {("replicate", "local"), ("full_shard", "sharded"), ("shard_grad_op", "local"), ("hybrid_shard", "sharded")}


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        pytest.param(strategy, accumulate, marks=() if (strategy, accumulate) in SKIPPED_QUICKLY else pytest.mark.slow)
        for strategy in ("replicate", "full_shard", "shard_grad_op", "hybrid_shard")
        for accumulate in ("local", "sharded")
    ],
)
def test_units_skipped_on_one_rank_count_as_zero(ranks, strategy, accumulate):
    for largest in ranks(4 if strategy == "hybrid_shard" else 2).run(skipping, strategy, accumulate):
        assert {name: error for name, error in largest.items() if error > 1e-12} == {}


def skipped_in_the_first_step(strategy: str) -> str:
    """Return the error of the first step of a run if one rank skips units."""
    net = shard_model(choosing(), mesh_of(strategy), strategy=strategy, blocks=BLOCKS_OF_CHOOSING)
    step = compose_step(chosen_loss, [auto_microbatch()])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.01))
    rank = get_dist_info().rank
    with pytest.raises(StepError) as caught:
        step(state, torch.tensor([[*range(rank, rank + 4), 3 * (rank % 2)]] * 2, dtype=torch.float64))
    return str(caught.value).partition(":")[0] + " " + str(caught.value).rpartition(". ")[2]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_unit_skipped_in_the_first_step_raises_with_auto_microbatch(ranks, strategy):
    world_size = 4 if strategy == "hybrid_shard" else 2
    for message in ranks(world_size).run(skipped_in_the_first_step, strategy):
        assert message == "step Run the same modules in the same order on all ranks."
