"""A loss that writes into its batch: as in plain torch where the batch runs once, one line where it would run a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.testing import inject_fault
from dtrain.testing.checks import check_loss_fn

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
ADVICE = "so the batch cannot run a second time. Clone tensors before"
REFUSED = f"StepError: step 0: loss_fn wrote into its batch (a tensor of shape (4, 3)), {ADVICE} loss_fn changes them."
PEER = "PeerError"


class Written:
    """A loss that doubles its batch: in place (on the given ranks), or not."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        self.ranks = ranks

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
        x = batch["x"].mul_(2) if get_dist_info().rank in self.ranks else batch["x"] * 2
        return dt.LossSum(total=(model(x) - batch["y"]).square().sum(), weight=len(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def on_mesh(strategy: str) -> nn.Module:
    if get_dist_info().world_size == 1 and strategy == "none":
        return net()
    mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
    return dt.shard_model(net(), mesh, strategy=strategy, blocks=(nn.Linear,))


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + get_dist_info().rank)
    return {name: torch.randn(4, width, generator=generator, dtype=torch.float64) for name, width in (("x", 3), ("y", 1))}


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except (dt.errors.DtrainError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".split(": step: rank")[0]
    return "ran"


def twice() -> dt.Transform:
    """A method of the user's that computes the gradient of a step twice."""

    def grad(inner):
        def grad_fn(state, batch, *, microbatch_size=None):
            state, _ = inner(state, batch, microbatch_size=microbatch_size)
            return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    return dt.Transform(name="twice", grad=grad)


def by_hand(state, batch, *, loss_fn, microbatch_size=None):
    """A gradient function of the user's own, which knows nothing of dtrain's."""
    loss = loss_fn(state.model, batch)
    state.drop_gradients()
    (loss.total / loss.weight).backward()
    counted, metrics = dt.microbatch_step(state, {name: value.clone() for name, value in batch.items()}, loss_fn=loss_fn)
    return counted, metrics


METHODS = {
    "sam": ([dt.transforms.sam(0.05)], dt.microbatch_step),
    "sam, microbatches": ([dt.transforms.sam(0.05)], partial(dt.microbatch_step, microbatch_size=2)),
    "sam, grad cache": ([dt.transforms.sam(0.05)], dt.step.grad_cache_step),
    "sam, loss scale": ([dt.transforms.sam(0.05), dt.transforms.loss_scale()], dt.microbatch_step),
    "sam, own gradient": ([dt.transforms.sam(0.05)], by_hand),
    "own method": ([twice()], dt.microbatch_step),
}


def refused(method: str, strategy: str, ranks: tuple[int, ...]) -> list[str]:
    """Return the outcomes of a step, and then of a step with a loss that writes nothing."""
    transforms, grad = METHODS[method]
    model, loss = on_mesh(strategy), Written(ranks)
    step = dt.compose_step(loss, transforms, grad=grad)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = told(lambda: step(state, batch_of(0)))
    loss.ranks = ()
    return [first, told(lambda: step(state, batch_of(1)))]


@pytest.mark.parametrize("method", METHODS)
def test_second_gradient_of_a_written_batch_is_refused(method):
    assert refused(method, "none", (0,)) == [REFUSED, "ran"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_refuse_a_second_gradient_if_one_rank_wrote(ranks, strategy):
    world = 2
    assert ranks(world).run(refused, "sam", strategy, (0, 1)) == [[REFUSED, "ran"]] * world
    first, second = ranks(world).run(refused, "sam, microbatches", strategy, (1,))
    assert first == [PEER, "ran"]
    assert second == [REFUSED, "ran"]


def trained(strategy: str, writes: bool, names: tuple[str, ...]) -> list[Tensor]:
    transforms = {"noise_scale": dt.transforms.noise_scale, "clip": partial(dt.transforms.clip_by_norm, 1.0)}
    model = on_mesh(strategy)
    step = dt.compose_step(Written((0, 1) if writes else ()), [transforms[name]() for name in names])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(3):
        state, _ = step(state, batch_of(number))
    return [full_tensor(param).detach() for param in state.params.values()]


def largest_difference(strategy: str, names: tuple[str, ...]) -> float:
    pairs = zip(trained(strategy, True, names), trained(strategy, False, names), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


# noise_scale computes its second gradient of copies.
@pytest.mark.parametrize("names", [(), ("clip",), ("noise_scale",)])
def test_loss_may_write_into_a_batch_that_runs_once(ranks, names):
    assert largest_difference("none", names) == 0.0
    for strategy in STRATEGIES[::3]:
        assert ranks(2).run(largest_difference, strategy, names) == [0.0] * 2


def test_method_may_write_between_its_two_gradients():
    def grad(inner):
        def grad_fn(state, batch, *, microbatch_size=None):
            state, _ = inner(state, batch, microbatch_size=microbatch_size)
            batch["x"].add_(0.1)
            return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    model = net()
    step = dt.compose_step(Written(()), [dt.Transform(name="perturbed", grad=grad)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert told(lambda: step(state, batch_of(0))) == "ran"


def direct() -> list[str]:
    """Two gradients of one batch without a composed step, of the whole batch and of a part that shares its memory."""
    model = net()
    state = dt.compose_step(Written()).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_of(0)
    half = {name: value[:2] for name, value in batch.items()}
    state, _ = dt.microbatch_step(state, batch, loss_fn=Written())
    return [told(partial(dt.microbatch_step, state, data, loss_fn=Written(()))) for data in (batch, half, batch_of(1))]


@pytest.mark.filterwarnings("ignore:microbatch_step drops the gradient of an earlier batch")
def test_second_call_of_microbatch_step_for_one_step_is_refused():
    assert direct() == [REFUSED, REFUSED.replace("(4, 3)", "(2, 3)"), "ran"]


def cached(writer: str) -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(2) if writer == "model" else x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
        out = model(batch["x"])
        if writer == "loss":
            batch["x"].zero_()
        return dt.LossSum(total=(out - batch["y"]).square().sum(), weight=len(out))

    model = Model()
    state = dt.compose_step(loss).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return told(lambda: dt.step.grad_cache_step(state, batch_of(0), loss_fn=loss, microbatch_size=2))


def test_grad_cache_refuses_inputs_that_changed_before_the_second_forward():
    line = f"StepError: grad_cache_step: loss_fn or the model wrote into its batch (a tensor of shape (4, 3)), {ADVICE} "
    assert cached("model").startswith(line)
    assert cached("loss").startswith(line)
    assert cached("nobody") == "ran"


def selected(ranks: tuple[int, ...]) -> list[str]:
    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].mul_(2) if get_dist_info().rank in ranks else batch["x"]
        return model(x).square().sum(1)

    model = on_mesh("full_shard" if get_dist_info().world_size > 1 else "none")
    step = dt.compose_step(Written(()), [dt.transforms.selective_backprop(losses, 0.5)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [told(lambda: step(state, batch_of(0)))]


def test_selective_backprop_refuses_sample_losses_that_write(ranks):
    line = REFUSED.replace("step 0: loss_fn", "selective_backprop: sample_losses").replace(
        "before loss_fn", "before sample_losses"
    )
    assert selected((0,)) == [line]
    assert selected(()) == ["ran"]
    assert ranks(2).run(selected, (1,)) == [[PEER], [line]]


def evaluated(ranks: tuple[int, ...]) -> str:
    model = on_mesh("full_shard" if get_dist_info().world_size > 1 else "none")
    fn = dt.step.auto_batch_eval(lambda model, inputs: Written(ranks)(model, inputs).total, initial_size=4)
    with inject_fault("raise", at="forward", call=1, rank=0, error=OUT_OF_MEMORY):
        return told(lambda: fn(model, batch_of(0)))


@pytest.mark.costly
def test_auto_batch_eval_refuses_to_repeat_a_written_part(ranks):
    line = REFUSED.replace("step 0: loss_fn", "auto_batch_eval: fn").replace("before loss_fn", "before fn")
    assert evaluated((0,)) == line
    assert evaluated(()) == "ran"
    assert ranks(2).run(evaluated, ()) == ["ran"] * 2
    first, second = ranks(2).run(evaluated, (0,))
    assert first == line
    assert second == "PeerError: auto_batch_eval: rank 0 cannot run its batch again. See its own error."


@pytest.mark.parametrize(
    ("caller", "call"),
    [("check_loss_fn", check_loss_fn), ("count_flops", lambda loss, model, batch: dt.monitors.count_flops(model, batch, loss))],
)
def test_trial_runs_refuse_a_loss_that_writes(caller, call):
    model = net()
    assert told(lambda: call(Written(), model, batch_of(0))) == REFUSED.replace("step 0", caller)
    assert told(lambda: call(Written(()), model, batch_of(0))) == "ran"


SPLIT = "ConfigError: microbatch_step: batch must be without an autograd graph to be split into 2 microbatches"
TWICE = "StepError: step 0: batch must be without an autograd graph to run a second time, got a tensor of shape (4, 1)"
FIXED = nn.Linear(1, 1, dtype=torch.float64).requires_grad_(False)


def discriminate(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    """The loss of a model whose outputs are the batch, with their graph."""
    return dt.LossSum(total=FIXED(batch["made"]).square().sum(), weight=len(batch["made"]))


def discriminate_made(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    return discriminate(model, {"made": model(batch["made"])})


def with_graph(strategy: str) -> list[str]:
    """Run steps on a batch with a graph: whole, split and run twice, and the difference to an update without one."""
    models, said = [], []
    split = partial(dt.microbatch_step, microbatch_size=2)
    for step in (
        dt.compose_step(discriminate_made),
        dt.compose_step(discriminate),
        dt.compose_step(discriminate, grad=split),
        dt.compose_step(discriminate, [dt.transforms.sam(0.05)]),
    ):
        model = on_mesh(strategy)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = batch_of(0)["x"]
        made = model(x) if models else x
        said.append(told(partial(step, state, {"made": made})))
        models.append([full_tensor(param) for param in model.parameters()] if len(models) < 2 else [])
    difference = max((one - other).abs().max().item() for one, other in zip(*models[:2], strict=True))
    return [*said[1:], str(difference)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_with_a_graph_runs_once_as_a_whole(ranks, strategy):
    cases = [with_graph("none"), *ranks(2).run(with_graph, strategy)]
    for whole, split, twice_run, difference in cases:
        assert (whole, float(difference)) == ("ran", pytest.approx(0, abs=1e-15))
        assert split.startswith(SPLIT)
        assert twice_run.startswith(TWICE)


def gradient_of_inputs() -> str:
    """A batch whose tensors need a gradient, without a graph, as for a penalty on gradients."""
    state = dt.compose_step(discriminate_made).init(model := net(), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"made": batch_of(0)["x"].requires_grad_()}
    return told(lambda: dt.microbatch_step(state, batch, loss_fn=discriminate_made, microbatch_size=2))


def test_batch_that_needs_a_gradient_but_has_no_graph_is_split():
    assert gradient_of_inputs() == "ran"
