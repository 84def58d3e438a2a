from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StaleStateError
from dtrain.step import gradient_run
from dtrain.step.transform import Transform


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


BATCH = {"x": torch.arange(12.0).reshape(4, 3)}
LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))


def begin(step: dt.step.Step) -> dt.TrainState:
    model = net()
    return step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def recorder(name: str, events: list[str], times: int = 1) -> Transform:
    def loss(inner, context):
        events.append(f"{name}.loss {context.state.step}")
        return inner

    def grad(inner):
        def wrapped(state, batch, **options):
            events.append(f"{name}.grad in")
            for _ in range(times):
                result = inner(state, batch, **options)
            events.append(f"{name}.grad out")
            return result

        return wrapped

    def update(inner):
        def wrapped(state, metrics):
            events.append(f"{name}.update in")
            result = inner(state, metrics)
            events.append(f"{name}.update out")
            return result

        return wrapped

    return Transform(name=name, loss=loss, grad=grad, update=update)


def test_the_first_transform_listed_is_outermost():
    events: list[str] = []
    step = dt.compose_step(LOSS, [recorder("a", events), recorder("b", events)])
    step(begin(step), BATCH)
    assert events == [
        "a.grad in", "b.grad in", "b.loss 0", "a.loss 0", "b.grad out", "a.grad out",
        "a.update in", "b.update in", "b.update out", "a.update out",
    ]  # fmt: skip


def test_clock_ticks_once_per_step_with_repeated_gradients():
    step = dt.compose_step(LOSS, [recorder("sam", [], times=3)])
    state, _ = step(begin(step), BATCH)
    assert (state.step, state.clock.samples) == (1, 4)


def test_skipped_update_changes_only_the_clock():
    skip = Transform(name="skip", update=lambda inner: lambda state, metrics: (state, metrics))
    step = dt.compose_step(LOSS, [skip])
    state = begin(step)
    before = state.model.weight.detach().clone()
    after, _ = step(state, BATCH)
    assert after.step == 1
    assert torch.equal(after.model.weight, before)
    assert after.model.weight.grad is None
    with pytest.raises(StaleStateError):
        step(state, BATCH)


def test_composed_step_matches_manual_step_bit_for_bit():
    step = dt.compose_step(LOSS, [dt.transforms.clip_by_norm(0.5)], grad=partial(dt.microbatch_step, microbatch_size=2))
    composed = begin(step)
    by_hand = begin(dt.compose_step(LOSS))
    for _ in range(3):
        composed, _ = step(composed, BATCH)
        by_hand, metrics = dt.microbatch_step(by_hand, BATCH, loss_fn=LOSS, microbatch_size=2)
        dt.clip_grad_norm_(by_hand.params, 0.5)
        by_hand, metrics = dt.optimizer_step(by_hand, metrics)
    assert torch.equal(composed.model.weight, by_hand.model.weight)
    assert composed.clock.samples == by_hand.clock.samples == 12


def test_loss_wrappers_get_a_generator_that_depends_on_seed_name_and_step():
    drawn = []

    def loss(inner, context):
        drawn.append(torch.rand((), generator=context.generator).item())
        return inner

    step = dt.compose_step(LOSS, [Transform(name="a", loss=loss), Transform(name="b", loss=loss)])
    for _ in range(2):
        state = begin(step)
        for _ in range(2):
            state, _ = step(state, BATCH)
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) == 4


def drawn_by_b(others: list[Transform]) -> list[float]:
    drawn = []

    def loss(inner, context):
        drawn.append(torch.rand((), generator=context.generator).item())
        return inner

    step = dt.compose_step(LOSS, [*others, Transform(name="b", loss=loss)])
    state = begin(step)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return drawn


def test_transform_random_draws_do_not_depend_on_other_transforms():
    def draws_much(inner, context):
        torch.rand(5, generator=context.generator)
        return inner

    alone = drawn_by_b([])
    assert len(set(alone)) == 2
    assert drawn_by_b([dt.transforms.clip_by_norm(1.0), Transform(name="a", loss=draws_much)]) == alone


def drawn_on_each_rank() -> float:
    from dtrain.step.transform import make_step_context

    model = dt.shard_model(net(), dt.build_mesh())
    state = dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return torch.rand((), generator=make_step_context(state, "mixup").generator).item()


def test_each_data_parallel_rank_has_its_own_generator(ranks):
    first, second = ranks(2).run(drawn_on_each_rank)
    assert first != second


def failing(name: str, where: str, *, after: bool) -> Transform:
    """A transform that raises before or after it calls the wrapped function."""

    def half(inner):
        def broken(state, *given, **options):
            if after:
                inner(state, *given, **options)
            raise KeyError(where)

        return broken

    return Transform(name=name, **{where: half})


@pytest.mark.parametrize(("where", "after"), [("grad", True), ("grad", False), ("update", False), ("update", True)])
def test_failed_step_clears_gradients(where, after):
    step = dt.compose_step(LOSS, [dt.transforms.clip_by_norm(0.1), failing("broken", where, after=after)])
    state = begin(step)
    with pytest.raises(KeyError, match=where):
        step(state, BATCH)
    assert all(param.grad is None for param in state.params.values())


def test_stale_state_is_refused_without_clearing_newer_gradients():
    step = dt.compose_step(LOSS)
    spent = begin(step)
    state, _ = step(spent, BATCH)
    dt.microbatch_step(state, BATCH, loss_fn=LOSS)
    with pytest.raises(StaleStateError, match=r"step: this state was stepped already \(step 0\)"):
        step(spent, BATCH)
    assert all(param.grad is not None for param in state.params.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), r"loss_fn must be a function \(model, batch\) -> LossSum, got None. Write compose_step\(loss_fn, \["),
        (([dt.transforms.ema(0.9)],), r"loss_fn must be a function .*, got \[Transform\(name='ema'"),
        (
            (LOSS, dt.transforms.ema(0.9)),
            r"transforms must be a list, got the Transform 'ema'. Write compose_step\(loss_fn, \[dt\.transforms\.ema",
        ),
        ((LOSS, None), "transforms must be a list, got None"),
        (
            (LOSS, [dt.transforms.ema]),
            r"got the function ema instead of its result. Use compose_step\(loss_fn, \[dt\.transforms\.ema\(\.\.\.\)\]\)",
        ),
        ((LOSS, [0.9]), r"needs a Transform, got 0\.9. Use compose_step\(loss_fn, \[dt\.transforms\.ema\(0\.999\)\]\)"),
        ((LOSS, [Transform]), "needs a Transform, got <class"),
    ],
)
def test_invalid_compose_step_arguments_are_refused(given, message):
    with pytest.raises(ConfigError, match=f"compose_step: {message}") as caught:
        dt.compose_step(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("argument", ["grad", "update"])
def test_non_callable_grad_or_update_is_refused(argument):
    with pytest.raises(ConfigError, match=f"compose_step: {argument} must be a function .*, got 8. Write"):
        dt.compose_step(LOSS, **{argument: 8})


class Counted:
    """A loss that records the samples of each microbatch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: dict) -> dt.LossSum:
        self.sizes.append(len(batch["x"]))
        return LOSS(model, batch)


def own_grad(state, batch, *, loss_fn, microbatch_size=None):
    return dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=microbatch_size)


def bare_grad(state, batch, *, loss_fn):
    return dt.microbatch_step(state, batch, loss_fn=loss_fn)


def any_grad(state, batch, **options):
    return dt.microbatch_step(state, batch, **options)


SPEC = dt.batch_spec({"x": "seq batch"})


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"microbatch_size": 2}, [2, 2, 1]),
        ({"microbatch_size": 2, "grad": own_grad}, [2, 2, 1]),
        ({"microbatch_size": 3, "grad": any_grad}, [3, 2]),
        ({"microbatch_size": 2, "grad": partial(own_grad)}, [2, 2, 1]),
        ({"grad": bare_grad}, [5]),
    ],
    ids=["default", "own", "any", "partial", "none given"],
)
def test_step_passes_the_microbatch_size_to_its_grad(options, sizes):
    loss = Counted()
    step = dt.compose_step(loss, [dt.transforms.loss_scale(initial_scale=2.0)], **options)
    step(begin(step), {"x": torch.ones(5, 3)})
    assert loss.sizes == sizes


@pytest.mark.parametrize("grad", [dt.microbatch_step, any_grad], ids=["default", "any"])
def test_step_passes_the_batch_spec_to_its_grad(grad):
    loss = dt.mean_loss(lambda model, batch: model(batch["x"].t()).square().mean(), weight=lambda batch: batch["x"].shape[1])
    step = dt.compose_step(loss, batch_spec=SPEC, microbatch_size=2, grad=grad)
    state, _ = step(begin(step), {"x": torch.ones(3, 5)})
    assert state.clock.samples == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"grad": own_grad, "batch_spec": SPEC},
            r"grad must take batch_spec= to use it, got own_grad\(state, batch, \*, loss_fn, microbatch_size=None\)",
        ),
        ({"grad": bare_grad, "microbatch_size": 2}, r"grad must take microbatch_size= .* leave microbatch_size out"),
        ({"grad": partial(own_grad, microbatch_size=4), "microbatch_size": 2}, "microbatch_size must be given once"),
        ({"microbatch_size": 0}, "microbatch_size must be an integer of at least 1, got 0"),
        ({"batch_spec": {"x": "batch seq"}}, r"batch_spec must be a BatchSpec, got {'x': .* Write dt.batch_spec\(...\)"),
        (
            {"microbatch_size": 2, "transforms": [dt.auto_microbatch()]},
            r"microbatch_size must be None beside auto_microbatch, got 2. .* auto_microbatch\(initial_size=2\)",
        ),
    ],
    ids=["own spec", "bare size", "twice", "zero", "dict", "auto"],
)
def test_options_that_no_grad_would_use_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^compose_step: {message}"):
        dt.compose_step(LOSS, **options)


def test_duplicate_transform_names_are_refused():
    with pytest.raises(ConfigError, match=r"transform names must differ .* got 'ema' twice"):
        dt.compose_step(LOSS, [dt.transforms.ema(0.9), dt.transforms.ema(0.99)])


def test_transform_name_with_invalid_characters_is_refused():
    with pytest.raises(ConfigError, match="name must be letters, digits and underscores, got 'a/b'"):
        Transform(name="a/b")


def test_state_without_the_steps_transform_states_is_refused():
    state = begin(dt.compose_step(LOSS))
    with pytest.raises(ConfigError, match=r"the state has no transform state for \['ema'\]"):
        dt.compose_step(LOSS, [dt.transforms.ema(0.9)])(state, BATCH)


def test_init_refuses_an_optimizer_of_other_parameters():
    model = net()
    with pytest.raises(ConfigError, match=r"2 of 2 optimizer parameters are not in the model \(first: shape \(2, 3\)\)"):
        dt.compose_step(LOSS).init(model, torch.optim.SGD(net().parameters(), lr=0.1))


def test_init_refuses_a_model_without_storage():
    with torch.device("meta"):
        model = net()
    with pytest.raises(ConfigError, match=r"2 of 2 parameters are on the meta device \(first: weight\)"):
        dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_init_refuses_a_model_without_parameters():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="the model has no parameters"):
        dt.compose_step(LOSS).init(nn.Identity(), optimizer)


def test_repr_of_state_and_step_is_short():
    step = dt.compose_step(LOSS, [dt.transforms.ema(0.9)])
    assert repr(step) == "Step(ema)"
    assert repr(begin(step)) == "TrainState(step=0, params=2, strategy='none', optimizer=SGD, transform_states=['ema'], seed=0)"


def test_tied_parameters_are_captured_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    state = dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(state.params) == ["0.weight"]
    assert state.aliases == {"1.weight": "0.weight"}


class Hurried:
    """``time`` in which every reading is later than the last by an hour times the rank, and a second more."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now = rank, 0.0

    def monotonic(self) -> float:
        self.now += 1.0 + 3600.0 * self.rank
        return self.now


def crossed_by_the_wall_clock() -> list[list[bool]]:
    """Return the answers about wall-clock intervals after each step, on a rank whose own clock is wrong."""
    seen: list[int] = []

    def act(inner):
        return lambda state, metrics: seen.append(state.step) or inner(state, metrics)

    acting = dt.Transform(name="acting", update=act)
    step = dt.compose_step(LOSS, [dt.transforms.every("3sec", acting)])
    torch.manual_seed(0)
    model = dt.shard_model(nn.Linear(3, 2), dt.build_mesh(), strategy="replicate")
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    real = gradient_run.time
    gradient_run.time = Hurried(get_dist_info().rank)
    crossings = []
    try:
        for _ in range(8):
            state, _ = step(state, BATCH)
            crossings.append([state.crossed("3sec"), state.crossed("1h"), state.reached("5sec")])
    finally:
        gradient_run.time = real
    return [*crossings, seen]


def test_wall_clock_intervals_follow_rank_0_on_all_ranks(ranks):
    """Rank 1's clock is an hour a step ahead: by its own clock it would save, and wait for ranks that do not save."""
    one, two = ranks(2).run(crossed_by_the_wall_clock)
    assert one == two
    seconds = [0, 1, 2, 3, 4, 5, 6, 7]  # of rank 0; the first step has nothing to count from
    assert one[:-1] == [[now in (3, 6), False, now >= 5] for now in seconds]
    assert one[-1] == [0, 4, 7], "the first step, and those after a boundary"


def test_read_only_transform_keeps_no_state_across_restarts(tmp_path):
    def build(transforms):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len), transforms)
        return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))

    looks = Transform(name="looks", init=lambda state: {"kept": 1}, update=lambda inner: inner, read_only=True)
    step, state = build([looks])
    state, _ = step(state, torch.ones(2, 3))
    assert state.transform_states == {}
    dt.save_sharded(tmp_path / "with", state)
    plain, fresh = build([])
    resumed = dt.load_sharded(tmp_path / "with", fresh)
    assert resumed.step == 1
    resumed, _ = plain(resumed, torch.ones(2, 3))
    dt.save_sharded(tmp_path / "without", resumed)
    assert dt.load_sharded(tmp_path / "without", build([looks])[1]).step == 2
    with pytest.raises(dt.errors.CheckpointMismatchError, match="a transform"):
        dt.load_sharded(tmp_path / "without", build([Transform(name="looks", update=lambda inner: inner)])[1])
