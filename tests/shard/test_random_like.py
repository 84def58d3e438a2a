"""Draws of ``random_like`` are those of one process, in every layout; resumed runs continue the draws."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError

STRATEGIES = ("replicate", "full_shard", "shard_grad_op", "hybrid_shard")
DATA = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A matrix of several blocks of draws that no two ranks cut at a block, a scalar, an uneven matrix, and a cube."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12_002), nn.Linear(12_002, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.cube = nn.Parameter(torch.ones(3, 2, 2))

    def forward(self, x):
        return self.last(self.first(x)) * self.scale * self.cube.sum()


def noise(amount, where):
    def add(state):
        for name, param in state.params.items():
            param.grad.add_(dt.step.random_like(state, param.grad, "noise", name), alpha=amount)

    def update(inner):
        def update_fn(state, metrics):
            add(state)
            return inner(state, metrics)

        return update_fn

    def grad(inner):
        def grad_fn(state, batch, *, microbatch_size=None):
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            add(state)
            return state, metrics

        return grad_fn

    return dt.Transform(name="noise", **{where: {"grad": grad, "update": update}[where]})


def begin(strategy, where="update", tp=False, small=False):
    torch.manual_seed(0)
    model = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)) if small else Net()).double()
    if strategy is not None:
        world = get_dist_info().world_size
        mesh = dt.build_mesh(dp_replicate=2 if strategy == "hybrid_shard" and world > 1 else 1, tp=2 if tp else 1)
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()} if tp else None
        strategy = "full_shard" if strategy == "hybrid_shard" and world == 1 else strategy
        model = dt.shard_model(model, mesh, strategy=strategy, blocks=(nn.Linear,), tp_plan=plan)
    step = dt.compose_step(lambda m, x: dt.LossSum(total=m(x).square().sum() * 1e-9, weight=len(x)), [noise(1e-3, where)])
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), seed=3)


def train(step, state, until):
    index, count = state.spec.data_rank, state.spec.data_ranks
    while state.step < until:
        state, _ = step(state, DATA[index::count])
    return state


def weights(state):
    return {name: whole.clone() for name, whole in dt.full_params(state)}


def differences(cases, path):
    """The largest difference of each case to the weights of one process, relative to the largest weight."""
    one, largest = torch.load(path), []
    for case in cases:
        own = weights(train(*begin(*case), 2))
        largest.append(max(float((own[name] - one[name]).abs().max() / one[name].abs().max()) for name in one))
    return largest


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_draws_are_those_of_one_process(ranks, world, tmp_path):
    cases = [(strategy, "update") for strategy in STRATEGIES] + [("replicate", "grad"), ("full_shard", "grad")]
    cases += [("full_shard", "update", True)] if world > 1 else []
    expected, plain = weights(train(*begin(None), 2)), weights(begin(None)[1])
    assert all(not expected[name].equal(plain[name]) for name in plain), "the noise reaches every parameter"
    torch.save(expected, tmp_path / "weights")
    for largest in ranks(world).run(differences, cases, str(tmp_path / "weights")):
        # Ranks add the gradients in another order.
        assert dict(zip(cases, largest, strict=True)) == dict.fromkeys(cases, pytest.approx(0.0, abs=1e-13))


def resumed(root, steps):
    step, state = begin("full_shard", small=True)
    state = dt.load_sharded(root, state, missing_ok=True)
    state = train(step, state, steps)
    dt.save_sharded(root, state)
    return [value for whole in weights(state).values() for value in whole.flatten().tolist()]


def test_a_resumed_run_draws_the_same_numbers(ranks, tmp_path):
    ranks(2).run(resumed, str(tmp_path / "a"), 2)
    assert ranks(2).run(resumed, str(tmp_path / "a"), 4) == ranks(2).run(resumed, str(tmp_path / "b"), 4)


def state_of(*, seed=0):
    model = nn.Linear(2, 2)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
    return step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)


def test_streams_differ_by_seed_and_name_and_repeat():
    state, other = state_of(), state_of(seed=1)
    like = torch.empty(5, 3)
    draw = dt.step.random_like(state, like, "a")
    assert draw.equal(dt.step.random_like(state, like, "a"))
    assert not draw.equal(dt.step.random_like(state, like, "b"))
    assert not draw.equal(dt.step.random_like(state, like, "a", "b"))
    assert not draw.equal(dt.step.random_like(other, like, "a"))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (70_000,), (2, 70_000), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shape_and_dtype_are_kept(shape, dtype):
    drawn = dt.step.random_like(state_of(), torch.empty(shape, dtype=dtype), "a", sample=torch.rand)
    assert drawn.shape == shape
    assert drawn.dtype == dtype
    assert not isinstance(drawn, DTensor)
    assert ((drawn >= 0) & (drawn <= 1)).all()


def test_any_distribution_can_be_drawn():
    signs = dt.step.random_like(state_of(), torch.empty(100, dtype=torch.int64), "a", sample=partial(torch.randint, 0, 2))
    assert sorted(signs.unique().tolist()) == [0, 1]


def test_a_stream_without_a_name_is_refused():
    with pytest.raises(ConfigError, match="random_like: names must have at least one name, got none"):
        dt.step.random_like(state_of(), torch.empty(2))
