"""replicate: parameters stay plain tensors, and gradients are reduced in buckets during the last backward of a step."""

import copy
import io
import warnings
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard import replicate
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.shard.spec import get_spec
from dtrain.shard.unshard import describe
from dtrain.state import init_state
from dtrain.step.compose import compose_step
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import apply_gradients, optimizer_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum

SAMPLES, DIM = 8, 6


class Net(nn.Module):
    """Layers of several sizes, a branch that samples choose, a shared layer and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch = nn.Linear(DIM, 16), nn.Linear(16, 16)
        self.shared, self.frozen, self.never = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if (x[:, 0] > 0).any():
            hidden = hidden + self.branch(hidden) * (x[:, :1] > 0)
        hidden = self.frozen(torch.tanh(self.shared(torch.tanh(self.shared(hidden)))))
        return self.head(hidden) * self.scale.exp()


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def whole_batch(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[:, 0] = -x[:, 0].abs()
    x[-1, 0] = 1.0  # the last rank alone uses the branch, in its last microbatch
    return x


def mine(x: torch.Tensor) -> torch.Tensor:
    share = len(x) // get_dist_info().world_size
    return x[get_dist_info().rank * share :][:share]


def squares(net: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=net(x).square().sum(), weight=len(x))


def replicated(net: nn.Module | None = None, **options) -> nn.Module:
    return shard_model(make() if net is None else net, build_mesh(), strategy="replicate", **options)


def state_of(net: nn.Module):
    return init_state(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))


def largest_error(net: nn.Module, reference: nn.Module) -> float:
    """Compare gradients with those of one process; a parameter has a gradient on both sides or on neither."""
    errors = [0.0]
    for (name, param), expected in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            errors.append((param.grad - expected.grad).abs().max().item() / max(expected.grad.abs().max().item(), 1e-3))
    return max(errors)


def reference_of(loss_fn=squares) -> nn.Module:
    net = make()
    (loss_fn(net, whole_batch()).total / SAMPLES).backward()
    return net


def plain_module() -> list:
    net = make()
    params = list(net.parameters())
    net = replicated(net, blocks=(nn.Linear,))
    torch.func.functional_call(net, {name: p.detach() * 2 for name, p in net.named_parameters()}, (mine(whole_batch()),))
    slopes = torch.func.grad(lambda params: torch.func.functional_call(net, params, (mine(whole_batch()),)).sum())(
        {name: p.detach() for name, p in net.named_parameters()}
    )
    return [
        type(net) is Net,
        all(type(m) in (Net, nn.Linear) for m in net.modules()),
        all(type(p) is nn.Parameter for p in params),
        len(slopes) == len(params),
        all(a is b for a, b in zip(params, net.parameters(), strict=True)),
        get_spec(net).strategy == "replicate",
        describe(net).splitlines()[0].startswith("replicate over 2 ranks"),
    ]


def test_replicated_model_stays_a_plain_module(ranks):
    assert ranks(2).run(plain_module) == [[True] * 7] * 2


def copied() -> list:
    net = replicated()
    state = state_of(net)
    state, metrics = microbatch_step(state, mine(whole_batch()), loss_fn=squares)
    twin = copy.deepcopy(net)
    state, _ = optimizer_step(state, metrics)
    moved = not torch.equal(twin.first.weight, net.first.weight)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ConfigError, match="on no mesh"):
        microbatch_step(state_of(twin), mine(whole_batch()), loss_fn=squares)
    again = shard_model(twin, build_mesh(), strategy="replicate")
    microbatch_step(state_of(again), mine(whole_batch()), loss_fn=squares)
    return [
        moved,
        get_spec(copy.deepcopy(net)).strategy == "none",
        type(loaded) is Net and torch.equal(loaded.first.weight, twin.first.weight),
        largest_error(again, reference_of()) <= 1e-12,
        get_spec(net).strategy == "replicate",
    ]


def test_copy_of_a_replicated_model_is_plain_and_can_be_sharded(ranks):
    assert ranks(2).run(copied) == [[True] * 5] * 2


def penalty(net: nn.Module, x: torch.Tensor) -> LossSum:
    """A gradient penalty on the inputs, and one on the parameters."""
    x = x.clone().requires_grad_()
    total = net(x).square().sum()
    slope, *weights = torch.autograd.grad(total, [x, net.first.weight, net.head.weight], create_graph=True)
    return LossSum(total=total + slope.square().sum() + sum(w.sum() for w in weights), weight=len(x))


def through_gradients(size: int | None) -> float:
    net = replicated(blocks=(nn.Linear,))
    state = state_of(net)
    for _ in range(3):
        microbatch_step(state, mine(whole_batch()), loss_fn=penalty, microbatch_size=size)
    return largest_error_of_penalty(net, size)


def largest_error_of_penalty(net: nn.Module, size: int | None) -> float:
    reference = make()
    for batch in whole_batch().split(size or SAMPLES // get_dist_info().world_size):
        (penalty(reference, batch).total / SAMPLES).backward()
    return largest_error(net, reference)


@pytest.mark.parametrize("size", [None, 1])
def test_higher_order_gradients_match_one_process(ranks, size):
    assert max(ranks(2).run(through_gradients, size)) <= 1e-12


def buckets_of(limit: int):
    """Limit the size of buckets in a context."""
    return patch.multiple(replicate, _FIRST_BUCKET_BYTES=limit, _BUCKET_BYTES=limit)


def many_buckets(size: int | None, limit: int) -> list[float]:
    """Errors of four steps. The first step learns how often each parameter gets a gradient, and reduces at its end."""
    with buckets_of(limit):
        net, errors = replicated(), []
    state = state_of(net)
    for _ in range(4):
        microbatch_step(state, mine(whole_batch()), loss_fn=squares, microbatch_size=size)
        errors.append(largest_error(net, reference_of()))
    return errors


@pytest.mark.parametrize("limit", [1, 1000, 2**20])
@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_match_one_process_for_every_size_of_buckets(ranks, world, size, limit):
    for errors in ranks(world).run(many_buckets, size, limit):
        assert max(errors) <= 1e-12


def note_reductions(early: list, seen, grad: torch.Tensor) -> None:
    early.append(seen.count(group="training"))


def when_reduced(limit: int) -> list[list[int]]:
    """By step, the number of all-reduces of gradients before the first layer's backward, and of all."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    with buckets_of(limit):
        net, counts = replicated(net), []
    state = state_of(net)
    for _ in range(3):
        early: list[int] = []
        with count_collectives() as seen:
            note = partial(note_reductions, early, seen)
            handle = net[0].register_forward_hook(lambda layer, inputs, output, note=note: output.register_hook(note) and None)
            state, metrics = microbatch_step(state, torch.ones(4, 4), loss_fn=squares, microbatch_size=1)
            handle.remove()
            state, _ = optimizer_step(state, metrics)
        total = [r for r in seen.records if r.group == "training" and r.dtype == "float32"]
        counts.append([early[-1], len(total)])
        assert early[:-1] == [0] * 3  # earlier microbatches reduce nothing
    return counts


def test_buckets_are_reduced_during_the_last_backward(ranks):
    assert ranks(2).run(when_reduced, 1) == [[[0, 5], [4, 5], [4, 5]]] * 2
    assert ranks(2).run(when_reduced, 2**20) == [[[0, 1]] * 3] * 2


class Uneven(nn.Module):
    """Runs a shared layer under reentrant checkpointing, so that its gradient arrives in several parts."""

    def __init__(self, times) -> None:
        super().__init__()
        self.shared, self.times = nn.Linear(4, 4), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(self.times()):
            x = checkpoint(lambda value: torch.tanh(self.shared(value)), x, use_reentrant=True)
        return x


def in_parts() -> list:
    plan = iter([2, 2, 1, 2, 3])
    torch.manual_seed(0)
    net = replicated(Uneven(lambda: times).double())
    state, said, errors = state_of(net), "", []
    for times in plan:
        reference = Uneven(lambda times=times: times).double()
        reference.load_state_dict(net.state_dict())
        x = torch.ones(2, 4, dtype=torch.float64)
        (squares(reference, x.clone()).total / 2).backward()
        try:
            microbatch_step(state, x.clone(), loss_fn=squares)
        except StepError as error:
            said = str(error)
        else:
            errors.append(
                max((a.grad - b.grad).abs().max().item() for a, b in zip(net.parameters(), reference.parameters(), strict=True))
            )
    return [len(errors), max(errors) <= 1e-12, said.partition(", ")[0]]


def test_gradient_in_several_parts_is_complete_or_an_error(ranks):
    for count, exact, said in ranks(2).run(in_parts):
        assert (count, exact) == (4, True)
        assert said.startswith("microbatch_step: backward added to the gradient of 'shared.")


def frozen_later() -> list[float]:
    net, errors = replicated(), []
    state = state_of(net)
    for frozen in (False, True, True, False, False):
        net.shared.requires_grad_(not frozen)
        reference = make()
        reference.shared.requires_grad_(not frozen)
        (squares(reference, whole_batch()).total / SAMPLES).backward()
        microbatch_step(state, mine(whole_batch()), loss_fn=squares, microbatch_size=2)
        errors.append(largest_error(net, reference))
    return errors


def test_parameters_may_be_frozen_and_thawed(ranks):
    for errors in ranks(2).run(frozen_later):
        assert max(errors) <= 1e-12


def rounded(reduce: str | None) -> list:
    """Sums of bfloat16 gradients are accumulated in float32, and reduced in the dtype of reductions."""
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    net = replicated(net, precision=Precision(reduce=reduce) if reduce else None)
    state = state_of(net)
    x = torch.ones(256 + 2 * get_dist_info().rank, 1, dtype=torch.bfloat16)
    loss_fn = lambda net, x: LossSum(total=net(x).sum(), weight=0.5)  # noqa: E731
    assert describe(net).splitlines()[2].split()[-2] == ("bfloat16" if reduce == "bf16" else "float32")
    with count_collectives() as seen:
        microbatch_step(state, x, loss_fn=loss_fn, microbatch_size=1)
    dtypes = {r.dtype for r in seen.records if r.group == "training"} - {"float64"}
    return [net.weight.grad.item(), str(net.weight.grad.dtype), sorted(dtypes)]


@pytest.mark.parametrize("reduce", [None, "fp32", "bf16"])
def test_sums_are_reduced_in_the_dtype_of_the_precision(ranks, reduce):
    dtype = "bfloat16" if reduce == "bf16" else "float32"
    for mean, stored, dtypes in ranks(2).run(rounded, reduce):
        assert (stored, dtypes) == ("torch.bfloat16", [dtype])
        assert mean == pytest.approx(514 / (0.5 * 514), rel=0.01)


def layouts() -> list:
    """A gradient has the layout of its parameter, so that fused optimizers take both."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 2)).to(memory_format=torch.channels_last)
    net = replicated(net)
    state = state_of(net)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    microbatch_step(state, images, loss_fn=squares)
    return [p.grad.stride() == p.stride() for p in net.parameters()]


def test_gradients_have_the_layout_of_their_parameters(ranks):
    assert ranks(2).run(layouts) == [[True] * 4] * 2


def kept_alive() -> list[bool]:
    net = replicated()
    state = state_of(net)
    for _ in range(2):
        microbatch_step(state, mine(whole_batch()), loss_fn=squares)
    alive = [weakref.ref(net), *(weakref.ref(p) for p in net.parameters())]
    del net, state
    import gc

    gc.collect()
    return [ref() is None for ref in alive]


def test_replicated_model_is_freed(ranks):
    assert all(all(freed) for freed in ranks(2).run(kept_alive))


def with_the_cache() -> float:
    net = replicated()
    grad_cache_step(state_of(net), mine(whole_batch()), loss_fn=squares, microbatch_size=2)
    return largest_error(net, reference_of())


def test_grad_cache_matches_one_process(ranks):
    assert max(ranks(2).run(with_the_cache)) <= 1e-12


def direct_use() -> float:
    """A loss that reads a parameter itself, and a step under the cache."""

    def loss_fn(net, x):
        loss = squares(net, x)
        return LossSum(total=loss.total + len(x) * net.head.weight.square().sum(), weight=loss.weight)

    net = replicated(blocks=(nn.Linear,))
    errors = []
    for grad in (microbatch_step, partial(grad_cache_step, microbatch_size=2)):
        grad(state_of(net), mine(whole_batch()), loss_fn=loss_fn)
        errors.append(largest_error(net, reference_of(loss_fn)))
    return max(errors)


def test_loss_may_use_parameters_directly(ranks):
    assert max(ranks(2).run(direct_use)) <= 1e-12


def by_hand() -> list[str]:
    """A backward outside of a step, before and after a step."""
    net = replicated()
    state, said = state_of(net), []
    for step in (lambda: None, lambda: microbatch_step(state, mine(whole_batch()), loss_fn=squares)):
        step()
        with count_collectives() as seen:
            net(mine(whole_batch())).sum().backward()
        said.append(str(seen.count()))
        try:
            apply_gradients(state, {})
        except StepError as error:
            said.append(str(error).partition(", got")[0])
    state, metrics = microbatch_step(state, mine(whole_batch()), loss_fn=squares)
    apply_gradients(state, metrics)
    return said


def test_backward_outside_of_a_step_is_local_and_not_applied(ranks):
    assert ranks(2).run(by_hand) == [["0", "apply_gradients: gradients must come from a step"] * 2] * 2


def updated_by_hand() -> list[list[str]]:
    """Warnings of an update after a backward outside of a step, after a step, and of another model's optimizer."""
    net, other = replicated(), nn.Linear(1, 1)
    # The updates leave other values on each rank.
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.1), []
    state = compose_step(squares).init(net, optimizer, replica_check_every=0)

    def backward_outside() -> None:
        net(mine(whole_batch())).sum().backward()

    def step() -> None:
        microbatch_step(state, mine(whole_batch()), loss_fn=squares)

    for prepare, optimizer in ((backward_outside, state.optimizer), (step, state.optimizer)):
        prepare()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        seen.append([str(warning.message) for warning in caught])
    backward_outside()
    other(torch.ones(1, 1)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD(other.parameters()).step()
    return [*seen, [str(warning.message) for warning in caught]]


def test_update_by_hand_with_gradients_of_one_rank_warns(ranks):
    for by_hand, of_step, of_other in ranks(2).run(updated_by_hand):
        assert len(by_hand) == 1
        assert by_hand[0].startswith("optimizer.step: the gradients are those of a backward outside of a step")
        assert of_step == of_other == []
    assert ranks(1).run(updated_by_hand) == [[[], [], []]]


def on_meta() -> list:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    from dtrain.shard.materialize import materialize

    net = materialize(shard_model(net, build_mesh(), strategy="replicate"), seed=0)
    step = compose_step(squares)
    state = step.init(net, torch.optim.AdamW(net.parameters(), fused=True))
    for _ in range(3):
        state, _ = step(state, torch.randn(2, 4, generator=torch.Generator().manual_seed(get_dist_info().rank)))
    return [p.tolist() for p in net.parameters()]


def test_replicas_stay_equal_after_materialize(ranks):
    first, second = ranks(2).run(on_meta)
    assert first == second
