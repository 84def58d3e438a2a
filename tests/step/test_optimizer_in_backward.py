"""The optimizer's step within backward: the same bits as an ordinary step, of few gradients at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import on_device
from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StaleStateError, StepError
from dtrain.schedules.curves import linear
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step, optimizer_in_backward
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.transform import Transform
from dtrain.testing.checks import memory_budget
from dtrain.transforms.combinators import on_batch
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.hyperparameters import scale_lr
from dtrain.transforms.weights.averaging import ema
from dtrain.typing import LossSum
from shard.models import CASES, SAMPLES, WEIGHTS, Block, batch, make

STEPS = 2
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


CHOSEN = {  # models, each with an optimizer and with how often that runs in a step: once per unit, perhaps once more at the end
    "called twice": ("adamw", (4,)),
    "tied across blocks": ("sgd", (3,)),
    "frozen": ("fused", (3,)),  # one unit of four has nothing to apply
    "everything": ("sgd", (3, 4)),
    "left out": ("sgd", (3,)),
    "some unused": ("adamw", (2, 3)),  # by the parameters that the rank's samples reach
}


def mesh_for(strategy):
    return build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()


def groups(net):
    """Two groups, of which one unit may have parameters in both, and one may hold none of the optimizer's."""
    params = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2][1:], "weight_decay": 0.0, "lr": 0.02},
    ]


def weight_of(batch):
    return batch["weight"].sum()


def shares(name):
    rank, world = get_dist_info().rank, get_dist_info().world_size
    mine = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    return {key: value[mine] for key, value in batch(name, WEIGHTS).items()}


def bits(state):
    """Parameters, optimizer state and averages, on this rank."""
    named = {id(p): name for name, p in state.params.items()}
    tensors = dict(state.params)
    for param, kept in state.optimizer.state.items():
        tensors |= {f"{named[id(param)]} {key}": value for key, value in kept.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"{name} average": value for name, value in state.transform_states["ema"]["params"].items()}
    return {
        name: full_tensor(tensors[name].detach()).clone() for name in sorted(tensors)
    }  # ranks may have stepped in another order


def run(name, net, optimizer, *, early, size):
    transforms = [scale_lr(linear(1.0, 0.5, STEPS)), ema(0.9), on_batch(lambda given, generator: given, name="same")]
    if early:
        step = optimizer_in_backward(
            CASES[name].loss, transforms, batch_spec=batch_spec(weight=weight_of), microbatch_size=size
        )
    else:
        grad = partial(microbatch_step, batch_spec=batch_spec(weight=weight_of), microbatch_size=size)
        step = compose_step(CASES[name].loss, transforms, grad=grad)
    state = step.init(net, optimizer, missing_ok=True)  # of one model a bias is left out
    losses, calls = [], []
    hook = state.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(STEPS):
        state, metrics = step(state, shares(name))
        losses.append(float(metrics["loss"].total))
        assert "lr" in metrics
        assert all(p.grad is None for p in state.params.values())
        assert sorted(map(len, (group["params"] for group in state.optimizer.param_groups))) == sorted(map(len, held(net)))
    hook.remove()
    assert (state.step, state.clock.samples) == (STEPS, STEPS * SAMPLES)
    return bits(state) | {"losses": torch.tensor(losses)}, len(calls)


def held(net):
    return [group["params"] for group in groups(net)]


def compared(strategy):
    """Return by model: the keys that differ between the two ways, and how often the optimizer ran in a step."""
    results = {}
    for index, (name, (kind, _)) in enumerate(CHOSEN.items()):
        ends = []
        for early in (False, True):
            net = make(name)
            if strategy is not None:
                options = {"accumulate": ("local", "sharded")[index % 2], **CASES[name].options}
                net = shard_model(net, mesh_for(strategy), strategy=strategy, **options)
            ends.append(run(name, net, OPTIMIZERS[kind](groups(net)), early=early, size=(1, None, 1)[index % 3]))
        (plain, once), (early, often) = ends
        assert plain.keys() == early.keys()
        results[name] = ([key for key in plain if not torch.equal(plain[key], early[key])], once / STEPS, often / STEPS)
    return results


@pytest.mark.costly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_optimizer_in_backward_matches_ordinary_step_bit_for_bit(ranks, strategy):
    for results in ranks(4 if strategy == "hybrid_shard" else 2).run(compared, strategy):
        for name, (differs, once, often) in results.items():
            assert (differs, once) == ([], 1.0), name
            # Plain parameters that FSDP2 would ignore are reduced with their unit.
            expected = (2,) if (strategy, name) == ("replicate", "left out") else CHOSEN[name][1]
            assert often in expected, name


def test_unsharded_model_is_updated_one_parameter_at_a_time():
    for name, (differs, once, often) in compared(None).items():
        assert (differs, once) == ([], 1.0), name
        assert often >= 5, name


WIDTH, DEPTH = 128, 16


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def squares(net, x):
    return LossSum(total=net(x).square().sum(), weight=float(len(x)))


def peaks(strategy):
    """Return the peak memory of a second step, relative to the model's size: compose_step and optimizer_in_backward."""
    size = WIDTH * WIDTH * DEPTH * 4
    ratios = []
    for early in (False, True):
        net = deep() if strategy is None else shard_model(deep(), mesh_for(strategy), strategy=strategy, blocks=(nn.Linear,))
        grad = partial(microbatch_step, batch_spec=batch_spec(weight=len))
        step = optimizer_in_backward(squares, batch_spec=batch_spec(weight=len)) if early else compose_step(squares, grad=grad)
        # The comparison of replicas copies small parameters, and these all are.
        state = step.init(net, torch.optim.AdamW(net.parameters(), foreach=True), replica_check_every=0)
        with memory_budget(2**40) as budget:
            for _ in range(2):
                before = budget.live
                budget.reset()
                state, _ = step(state, torch.ones(2, WIDTH))
        ratios.append((budget.peak - before) / size)
    return ratios


# Of the gradients, and as much again for the optimizer, one layer of sixteen stays. Each rank has half of them where they are
# cut.
@pytest.mark.costly
@pytest.mark.parametrize(
    ("strategy", "saved"), [(None, 1.7), ("full_shard", 0.6), ("hybrid_shard", 0.6), ("replicate", 1.7)], ids=str
)
def test_peak_memory_holds_gradients_of_few_units(ranks, strategy, saved):
    world = {None: 1, "hybrid_shard": 4}.get(strategy, 2)
    for ordinary, early in ranks(world).run(peaks, strategy):
        assert ordinary - early >= saved


class Escapes(nn.Module):
    """A model that uses a weight in two units, of which FSDP2 knows one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.first(x))


def broken(kind):
    """Make a step that fails after the optimizer has run on the last unit: its error, and the state afterwards."""

    def loss(net, x):
        x.requires_grad_()
        if kind == "in backward" and get_dist_info().rank == 0:
            x.register_hook(fails)
        wrong = 1.0 if kind == "weight" else 0.0
        return LossSum(total=net(x).square().sum(), weight=len(x) + wrong)

    def fails(grad):
        raise ValueError("bad layer")

    step = optimizer_in_backward(loss, batch_spec=batch_spec(weight=len))
    net = shard_model(Escapes(), build_mesh(), blocks=("first", "last"))
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.5))
    before = full_tensor(state.params["last.weight"].detach()).clone()
    try:
        step(state, torch.ones(2, 3))
    except Exception as error:  # noqa: BLE001  # ranks hear of it in different ways
        said = [type(error).__name__, *getattr(error, "__notes__", [])]
    try:
        step(state, torch.ones(2, 3))
    except StaleStateError:
        said.append("spent")
    changed = not torch.equal(before, full_tensor(state.params["last.weight"].detach()))
    grads = [name for name, p in state.params.items() if p.grad is not None]
    return [*said, changed, grads]


a_gpu_reports_later = pytest.mark.skipif(on_device.DEVICE is not None, reason="the step after it reports a weight on a GPU")


@pytest.mark.parametrize(
    ("kind", "error"), [("in backward", "ValueError"), pytest.param("weight", "StepError", marks=a_gpu_reports_later)]
)
def test_error_after_partial_update_makes_the_state_stale(ranks, kind, error):
    note = (
        "optimizer_in_backward: the optimizer had already run on some of the parameters, so this step can be neither finished "
        "nor repeated. Build a new state and load the last checkpoint."
    )
    (outcome,) = ranks(1).run(broken, kind)
    assert outcome == [error, note, "spent", True, []]


def test_error_before_backward_keeps_the_state_valid():
    def loss(net, x):
        raise ValueError("no loss")

    net = nn.Linear(3, 3)
    step = optimizer_in_backward(loss, batch_spec=batch_spec(weight=len))
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for _ in range(2):
        with pytest.raises(ValueError, match="no loss") as caught:
            step(state, torch.ones(2, 3))
        assert not hasattr(caught.value, "__notes__")


def test_second_gradient_after_parameter_update_is_refused(ranks):
    assert ranks(1).run(used_outside_of_its_unit) == ["optimizer_in_backward: a parameter got a second gradient"]


def used_outside_of_its_unit():
    net = shard_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), build_mesh(), blocks=("1",))
    shard = net[1].weight  # as the optimizer holds it: a second path to the parameter, around FSDP2

    def loss(net, x):
        x = x + 0 * shard.to_local().sum()  # the end of backward
        return LossSum(total=net(x).square().sum(), weight=len(x))

    step = optimizer_in_backward(loss, batch_spec=batch_spec(weight=len))
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.5))
    try:
        step(state, torch.ones(2, 3))
    except StepError as error:
        return str(error)[:56]
    return "no error"


def refused_step(transforms=(), weight=len):
    return optimizer_in_backward(squares, transforms, batch_spec=batch_spec(weight=weight))


@pytest.mark.parametrize(
    ("make_step", "message"),
    [
        pytest.param(lambda: refused_step([clip_by_norm(1.0)]), "transform 'clip_by_norm' may need the gradient", id="clip"),
        pytest.param(
            lambda: refused_step([Transform(name="mine", grad=lambda inner: inner)]), "the transform 'mine'", id="grad"
        ),
        pytest.param(
            lambda: refused_step([Transform(name="mine", grad_step=lambda inner: inner, uses_grad=False)]),
            "the transform 'mine'",
            id="grad-step",
        ),
        pytest.param(lambda: refused_step(weight=None), "batch_spec must have a weight, got BatchSpec", id="no-weight"),
        pytest.param(lambda: refused_step(ema(0.9)), r"optimizer_in_backward: transforms must be a list", id="no-list"),
        pytest.param(
            lambda: refused_step([ema(0.9), ema(0.8)]), "optimizer_in_backward: transform names must differ", id="twice"
        ),
    ],
)
def test_unsupported_options_are_refused_at_construction(make_step, message):
    with pytest.raises(ConfigError, match=message):
        make_step()


def test_tensor_and_context_parallel_ranks_are_refused():
    net = nn.Linear(WIDTH, 1)
    step = refused_step()
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="tensor and context parallelism are not supported"):
        step(state._replace(spec=replace(state.spec, ranks_per_batch=2)), torch.ones(2, WIDTH))


def test_ranks_without_samples_join_the_step(ranks):
    assert ranks(2).run(ragged) == [[]] * 2


def ragged():
    """Rank 1 has no sample: it repeats one of rank 0's with weight zero, which reaches every parameter."""
    ends = []
    for early in (False, True):
        net = shard_model(make("called twice"), build_mesh(), blocks=(Block,))
        grad = partial(microbatch_step, batch_spec=batch_spec(weight=weight_of))
        loss = CASES["called twice"].loss
        step = (
            optimizer_in_backward(loss, [ema(0.9)], batch_spec=batch_spec(weight=weight_of))
            if early
            else compose_step(loss, [ema(0.9)], grad=grad)
        )
        state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        given = batch("called twice", WEIGHTS)
        mine = given if get_dist_info().rank == 0 else {key: value[:0] for key, value in given.items()}
        for _ in range(2):
            state, _ = step(state, mine)
        ends.append(bits(state))
    return [key for key in ends[0] if not torch.equal(ends[0][key], ends[1][key])]
