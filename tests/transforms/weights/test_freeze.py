"""Frozen parameters: to the optimizer they are not there, backward leaves them out, and everything thaws as it was."""

from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.schedules.durations import RunLength
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import optimizer_in_backward
from dtrain.testing import count_collectives
from dtrain.transforms.combinators import between
from dtrain.transforms.weights.freeze import freeze, freeze_layers
from falling import begin, take, weight

DIM = 4
LOSS = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))).double()


def batch(samples: int = 6) -> torch.Tensor:
    return torch.randn(samples, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def start(*transforms: dt.Transform, **options: object) -> tuple[dt.step.Step, dt.TrainState]:
    model = net()
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), **options)


def test_frozen_optimizer_state_is_kept_and_continues_after_unfreezing():
    step, state = start(between(2, 4, freeze("0.*")))
    param = state.params["0.weight"]
    seen = []
    for _ in range(5):
        state, _ = step(state, batch())
        slots = state.optimizer.state[param]
        seen.append((slots["step"].item(), slots["exp_avg"].clone(), param.detach().clone()))
        assert param.requires_grad
    assert [count for count, _, _ in seen] == [1, 2, 2, 2, 3]
    for number in (2, 3):  # no update, no weight decay, no moment
        assert torch.equal(seen[number][1], seen[1][1])
        assert torch.equal(seen[number][2], seen[1][2])
    assert not torch.equal(seen[4][2], seen[1][2])
    assert [state.optimizer.state[state.params["2.bias"]]["step"].item()] == [5]


def test_manually_frozen_parameter_stays_frozen():
    step, state = start(freeze("0.*"))
    state.params["0.bias"].requires_grad_(False)
    state, _ = step(state, batch())
    assert [param.requires_grad for param in state.params.values()] == [True, False, True, True, True, True]


def test_backward_stops_at_the_first_trainable_layer():
    class Seen(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            Seen.calls += 1
            return grad

    step, state = start(freeze("0.*", start=1))
    state.model[0].register_forward_hook(lambda module, given, made: Seen.apply(made))
    state, _ = step(state, batch())
    assert Seen.calls == 1
    step(state, batch())
    assert Seen.calls == 1


def test_layers_are_frozen_evenly_up_to_the_level():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    step = dt.compose_step(LOSS, [freeze_layers(start="0.2dur", end="0.8dur", level=0.5)])
    state, trained = step.init(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_length=RunLength(total=10)), []
    for _ in range(10):
        before = [layer.bias.item() for layer in model]
        state, _ = step(state, torch.ones(2, 1))
        trained.append("".join(".x"[layer.bias.item() != was] for layer, was in zip(model, before, strict=True)))
    # Of 5 layers floor(0.5 * (t - 2) / 6 * 4): one after half of the way, two at its end.
    assert trained == ["xxxxx"] * 5 + [".xxxx"] * 3 + ["..xxx"] * 2


def test_durations_of_different_units_are_converted_to_steps():
    run = RunLength(total=8, steps_per_epoch=2)
    in_epochs, in_steps = (start(freeze_layers(start=begin, end=8), run_length=run) for begin in ("1ep", 2))
    (step, state), (other_step, other) = in_epochs, in_steps
    for _ in range(7):
        state, other = step(state, batch())[0], other_step(other, batch())[0]
    assert all(torch.equal(a, b) for a, b in zip(state.params.values(), other.params.values(), strict=True))
    assert state.optimizer.state[state.params["0.bias"]]["step"].item() == 5  # frozen from half of the way on


def test_tied_parameter_is_not_frozen_with_its_first_layer():
    model = net()
    model[2].weight = model[0].weight
    step = dt.compose_step(LOSS, [freeze_layers(start=0, end=1)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        before = {name: param.detach().clone() for name, param in state.params.items()}
        state, _ = step(state, batch())
    moved = {name for name, param in state.params.items() if not torch.equal(param, before[name])}
    assert moved == {"0.weight", "2.bias"}


@pytest.mark.parametrize("transform", [freeze("*.weight", start=2), freeze_layers(start=1, end=4)], ids=["freeze", "layers"])
def test_step_in_backward_freezes_the_same_layers(transform):
    ends = []
    whole = dt.compose_step(LOSS, [transform], grad=partial(dt.microbatch_step, batch_spec=dt.batch_spec(weight=len)))
    for step in (whole, optimizer_in_backward(LOSS, [transform], batch_spec=dt.batch_spec(weight=len))):
        model = net()
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(5):
            state, _ = step(state, batch())
        ends.append([param.detach().clone() for param in state.params.values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_fully_frozen_model_is_refused():
    step, state = begin(freeze("**", start=1))
    state = take(step, state)
    with pytest.raises(StepError, match=r"microbatch_step: .* no trainable parameter"):
        take(step, state)
    assert weight(state) == 3.5
    assert state.model.weight.requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: freeze_layers(start=5, end=5), "freeze_layers: start must be before end, got start='5ba', end='5ba'"),
        (lambda: freeze_layers(level=1.5), r"freeze_layers: level must be a finite number at least 0 and at most 1, got 1\.5"),
        (
            lambda: freeze_layers(level="all"),
            r"freeze_layers: level must be a finite number at least 0 and at most 1, got 'all'",
        ),
        (lambda: freeze("a", start="soon"), "duration: cannot read 'soon'"),
        (lambda: freeze(3), r"masked: select must be a pattern of names, a list of patterns, or a function"),
        (lambda: start(freeze("encoder.**")), r"masked: the pattern 'encoder\.\*\*' fits none of 6 parameters"),
        (lambda: start(freeze("0.*", start="0.5dur")), r"clock: 0\.5dur is a share of the run, whose length is not known"),
        (lambda: start(freeze_layers()), "clock: dur is a share of the run, whose length is not known"),
        (
            lambda: start(freeze_layers(start="3ep", end=6), run_length=RunLength(steps_per_epoch=2)),
            "freeze_layers: start must be before end, got steps 6 and 6 of this run",
        ),
    ],
    ids=["empty", "level", "text", "duration", "where", "no fit", "no length", "no length for layers", "units"],
)
def test_freeze_layers_refuses_invalid_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---- sharded ----------------------------------------------------------------------------------------------------------------


def sharded(*transforms: dt.Transform, loss: object = LOSS) -> tuple[dt.step.Step, dt.TrainState]:
    model = dt.shard_model(net(), dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    step = dt.compose_step(loss, transforms)
    return step, step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def communicated() -> list[dict[str, int]]:
    counts = []
    step, state = sharded(freeze_layers(start=0, end=4))
    for _ in range(5):
        with count_collectives() as seen:
            state, _ = step(state, batch())
        counts.append({op: len(seen.select(op=op, group="training")) for op in ("all_gather", "reduce_scatter")})
    return counts


def test_frozen_unit_skips_gradient_reduction_and_most_gathers(ranks):
    for counts in ranks(2).run(communicated):
        whole, one, both = counts[0], counts[2], counts[4]
        assert (counts[1], counts[3]) == (whole, one)
        assert [whole["reduce_scatter"] - frozen["reduce_scatter"] for frozen in (one, both)] == [1, 2]
        # FSDP2 gathers the next unit of backward ahead, and does not know that backward ends there.
        assert [whole["all_gather"] - frozen["all_gather"] for frozen in (one, both)] == [0, 1]


def out_of_memory_when_frozen(failing_step: int, inside: bool = False) -> list:
    """Rank 1 runs out of memory in a step that has other collectives than those before it."""
    armed = []

    def loss(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        made = LOSS(model, x)
        if armed and get_dist_info().rank == 1 and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return made

    transforms = [freeze_layers(start=0, end=8), auto_microbatch(initial_size=4, grow_every=None)]
    step, state = sharded(*(transforms[::-1] if inside else transforms), loss=loss)
    for _ in range(6):
        armed = [True] if state.step == failing_step else []
        state, _ = step(state, batch(4))
    sizes = state.transform_states["auto_microbatch"]["size"]
    return [sizes, [full_tensor(param).flatten().tolist() for param in state.params.values()]]


@pytest.mark.parametrize("inside", [False, True], ids=["around auto_microbatch", "inside of it"])
def test_out_of_memory_in_the_freezing_step_is_retried(ranks, inside):
    undisturbed = ranks(2).run(out_of_memory_when_frozen, 99)
    retried = ranks(2).run(out_of_memory_when_frozen, 4, inside, timeout_s=60)  # the first step without the first layer
    assert [size for size, _ in retried] == [2, 2]
    assert retried[0] == retried[1]
    values = [torch.tensor([v for param in run[0][1] for v in param], dtype=torch.float64) for run in (undisturbed, retried)]
    assert (values[0] - values[1]).norm() <= 1e-12 * values[0].norm()
