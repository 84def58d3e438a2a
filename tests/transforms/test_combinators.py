"""Combinators: the steps and parameters of a wrapped transform, and the arguments of a batch function."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import generator
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import RunLength
from dtrain.step.normalization import make_metric
from dtrain.step.transform import Transform, make_step_context
from dtrain.transforms.combinators import between, every, masked, named, on_batch
from origins import placed, places

BATCH = torch.arange(12.0).reshape(4, 3) / 12
LOSS = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)


def begin(step: dt.step.Step, lr: float = 0.1) -> dt.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    return step.init(model, torch.optim.SGD(model.parameters(), lr=lr))


def recorder(seen: list, name: str = "recorder") -> Transform:
    """Writes down each seam that it is asked at: its name, the step, and the parameters that it sees."""

    def loss(inner, context):
        seen.append(("loss", context.state.step, list(context.state.params)))
        return inner

    def half(where: str, inner):
        def wrapped(state, *given, **options):
            seen.append((where, state.step, list(state.params)))
            after, metrics = inner(state, *given, **options)
            seen.append((f"{where} out", after.step, list(after.params)))
            return after, metrics

        return wrapped

    def init(state):
        return {"params": {param: torch.zeros(()) for param in state.params}}

    return Transform(name=name, init=init, loss=loss, grad=partial(half, "grad"), update=partial(half, "update"))


SEAMS = ["grad", "loss", "grad out", "update", "update out"]


def steps_at_which(wrap, steps: int, clock: Clock | None = None, end_of_epoch=lambda t: False) -> list[int]:
    """The steps in which a wrapped transform acts, out of ``steps``; in each it acts at all of its seams."""
    seen: list = []
    step = dt.compose_step(LOSS, [wrap(recorder(seen))])
    state = begin(step)
    for begun, ended in places(end_of_epoch, steps):
        state, _ = step(state, placed(BATCH, begun, ended))
    acted = list(dict.fromkeys(number for _, number, _ in seen))
    assert [where for where, *_ in seen] == SEAMS * len(acted)
    return acted


def test_every_acts_in_the_first_step_of_each_interval():
    assert steps_at_which(partial(every, 3), 10) == [0, 3, 6, 9]
    assert steps_at_which(partial(every, "4ba"), 10) == [0, 4, 8]
    assert steps_at_which(partial(every, 1), 4) == [0, 1, 2, 3]


def test_every_acts_after_a_boundary_of_any_unit():
    assert steps_at_which(partial(every, "10sp"), 10) == [0, 3, 5, 8], "four samples a step"
    assert steps_at_which(partial(every, "1sp"), 4) == [0, 1, 2, 3]
    assert steps_at_which(partial(every, "1h"), 4) == [0]


def test_every_acts_in_the_first_step_of_epochs():
    ends = lambda t: t in (1, 4, 6)  # noqa: E731  # epochs of 2, 3, 2 and more steps
    assert steps_at_which(partial(every, "1ep"), 10, end_of_epoch=ends) == [0, 2, 5, 7]
    assert steps_at_which(partial(every, "2ep"), 10, end_of_epoch=ends) == [0, 5]


@pytest.mark.parametrize("interval", ["3ba", "1ep", "2ep"])
def test_every_acts_after_each_boundary_that_the_clock_crossed(interval):
    seen: list = []
    step = dt.compose_step(LOSS, [every(interval, recorder(seen))])
    state, crossed = begin(step), [0]
    for number, (begun, ended) in enumerate(places(lambda number: number in (1, 2, 6), 9)):
        state, _ = step(state, placed(BATCH, begun, ended))
        crossed += [state.step] if state.crossed(interval) and number < 8 else []
    assert list(dict.fromkeys(number for _, number, _ in seen)) == crossed


def test_between_acts_from_start_on_and_before_end():
    assert steps_at_which(partial(between, 2, 5), 8) == [2, 3, 4]
    assert steps_at_which(partial(between, 0, 2), 4) == [0, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda transform: every("0.5dur", transform),
        lambda transform: between("0.5dur", "1ep", transform),
        lambda transform: between(3, "0.5dur", transform),
        lambda transform: masked(every("0.5dur", transform), "**"),
    ],
    ids=["every", "start", "end", "masked"],
)
def test_run_fraction_of_unknown_length_is_refused_at_init(make):
    model = nn.Linear(1, 1)
    step = dt.compose_step(LOSS, [make(dt.transforms.ema(0.5))])
    with pytest.raises(ConfigError, match=r"clock: 0\.5dur is a share of the run, whose length is not known"):
        step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), run_length=RunLength(total=10))


def test_between_accepts_any_clock_unit():
    assert steps_at_which(partial(between, "8sp", "20sp"), 8) == [2, 3, 4]  # four samples a step
    assert steps_at_which(partial(between, "1ep", "2ep"), 8, end_of_epoch=lambda t: t in (1, 4)) == [2, 3, 4]
    assert steps_at_which(partial(between, "1ep", "4ba"), 8, end_of_epoch=lambda t: t == 1) == [2, 3]


def test_every_and_between_nest():
    assert steps_at_which(lambda t: every(2, between(3, 8, t)), 10) == [4, 6]


def trained(transforms, steps: int = 4) -> tuple[dt.TrainState, dt.typing.Metrics]:
    step = dt.compose_step(LOSS, transforms)
    state = begin(step)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, metrics


def test_ema_under_every_updates_only_in_active_steps():
    state, _ = trained([every(2, dt.transforms.ema(0.5))], 1)
    first = {name: value.clone() for name, value in state.transform_states["ema"]["params"].items()}
    state, _ = trained([every(2, dt.transforms.ema(0.5))], 2)
    assert all(torch.equal(value, first[name]) for name, value in state.transform_states["ema"]["params"].items())


def test_lr_is_unscaled_after_between_ends():
    _, metrics = trained([between(0, 2, dt.transforms.scale_lr(0.5))])
    plain, _ = trained([])
    state, _ = trained([between(0, 2, dt.transforms.scale_lr(0.0))], 6)
    assert "lr" not in metrics
    assert torch.equal(state.params["0.weight"], plain.params["0.weight"])


@pytest.mark.parametrize("wrap", [partial(every, 2), partial(between, 1, 3), lambda t: masked(t, "**")])
def test_wrappers_do_not_change_the_checkpoint_format(tmp_path, wrap):
    state, _ = trained([wrap(dt.transforms.ema(0.5))])
    dt.save_sharded(tmp_path, state)
    bare = dt.load_sharded(tmp_path, begin(dt.compose_step(LOSS, [dt.transforms.ema(0.5)])))
    for name, average in state.transform_states["ema"]["params"].items():
        assert torch.equal(average, bare.transform_states["ema"]["params"][name])


ALL = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("0.*", ["0.weight", "0.bias"]),
        (["*.bias", "2.**"], ["0.bias", "2.bias", "2.weight"]),
        (lambda name, param: param.ndim == 2, ["0.weight", "2.weight"]),
        ("**", ALL),
    ],
)
def test_masked_transform_sees_selected_parameters_and_inner_transforms_all(where, names):
    outside, seen, inside = [], [], []
    transforms = [recorder(outside, "outside"), masked(recorder(seen), where), recorder(inside, "inside")]
    state, _ = trained(transforms, 1)
    assert [(seam, params) for seam, _, params in seen] == [(seam, names) for seam in SEAMS]
    assert [params for _, _, params in inside + outside] == [ALL] * 2 * len(SEAMS)
    assert list(state.transform_states["recorder"]["params"]) == names
    assert list(state.params) == ALL
    assert type(state.params) is dict


def test_mask_pattern_matches_any_name_of_a_tied_parameter():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embed"].weight
    seen: list = []
    transform = masked(masked(recorder(seen), ["head.**"]), "*.weight")
    state = dt.compose_step(LOSS, [transform]).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(state.transform_states["recorder"]["params"]) == ["embed.weight"]
    alone = dt.compose_step(LOSS, [masked(recorder(seen), "head.**")]).init(model, state.optimizer)
    assert list(alone.transform_states["recorder"]["params"]) == ["embed.weight", "head.bias"]


def test_nested_masks_intersect():
    seen: list = []
    trained([masked(masked(recorder(seen), "*.weight"), "0.*")], 1)
    assert [params for _, _, params in seen] == [["0.weight"]] * len(SEAMS)


def test_masked_clip_uses_and_scales_only_selected_gradients():
    step = dt.compose_step(LOSS, [masked(dt.transforms.clip_by_norm(0.01, eps=0.0), "0.**")])
    state, plain = begin(step, lr=1.0), begin(dt.compose_step(LOSS), lr=1.0)
    before = {name: param.detach().clone() for name, param in state.params.items()}
    plain, _ = dt.microbatch_step(plain, BATCH, loss_fn=LOSS)
    grads = {name: param.grad for name, param in plain.params.items()}
    norm = torch.cat([grads["0.weight"].flatten(), grads["0.bias"]]).norm()
    state, metrics = step(state, BATCH)
    assert norm > 0.01
    assert metrics["grad_norm"].total.item() == pytest.approx(norm.item(), rel=1e-6)
    for name, param in state.params.items():
        factor = 0.01 / norm if name.startswith("0.") else 1.0
        torch.testing.assert_close(before[name] - param, grads[name] * factor)


def test_masked_ema_stores_only_selected_parameters():
    state, _ = trained([masked(dt.transforms.ema(0.5), "2.**")])
    whole, _ = trained([dt.transforms.ema(0.5)])
    assert list(state.transform_states["ema"]["params"]) == ["2.weight", "2.bias"]
    assert torch.equal(state.transform_states["ema"]["params"]["2.bias"], whole.transform_states["ema"]["params"]["2.bias"])


def test_masked_transform_may_skip_the_update():
    skip = Transform(name="skip", update=lambda inner: lambda state, metrics: (state, metrics))
    state, _ = trained([masked(skip, "0.*")], 1)
    assert (list(state.params), state.step) == (ALL, 1)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("head.**", r"the pattern 'head\.\*\*'"),
        (["0.*", "head"], "the pattern 'head'"),
        (lambda name, param: False, "the predicate"),
        ([], "an empty list of patterns"),
    ],
)
def test_mask_without_matches_is_refused_at_init(where, what):
    with pytest.raises(
        ConfigError, match=rf"^masked: {what} fits none of 4 parameters \(first: '0\.weight'\)\. Print the names with"
    ):
        begin(dt.compose_step(LOSS, [masked(dt.transforms.ema(0.5), where)]))


@pytest.mark.parametrize("where", [3, None, [3]])
def test_invalid_mask_type_is_refused(where):
    with pytest.raises(ConfigError, match=r"masked: .*got \[?(3|None)\]?"):
        masked(dt.transforms.ema(0.5), where)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every(0, dt.transforms.ema(0.5)), "needs at least 1 ba, got 0"),
        (lambda: every("3 apples", dt.transforms.ema(0.5)), "unknown unit 'apples'"),
        (
            lambda: every(10, dt.transforms.ema),
            r"every: got the function ema.*dt\.transforms\.every\(10, dt\.transforms\.ema\(\.\.\.\)\)",
        ),
        (
            lambda: every(dt.transforms.ema(0.5), 10),
            r"every: needs a Transform, got 10\. Use dt\.transforms\.every\(10, dt\.transforms\.ema\(0\.999\)\)",
        ),
        (lambda: between(5, 5, dt.transforms.ema(0.5)), "between: start must be before end, got start='5ba', end='5ba'"),
        (
            lambda: between("3ep", "2ep", dt.transforms.ema(0.5)),
            "between: start must be before end, got start='3ep', end='2ep'",
        ),
        (lambda: between(0, 0, dt.transforms.ema(0.5)), "needs at least 1 ba, got 0"),
        (lambda: between(-1, 5, dt.transforms.ema(0.5)), "needs at least 0, got -1 ba"),
        (lambda: between(False, 5, dt.transforms.ema(0.5)), "needs a whole number of ba, got False ba"),
        (lambda: between(0, 5, None), "between: needs a Transform, got None"),
        (lambda: masked(dt.transforms.clip_by_norm, "0.*"), "masked: got the function clip_by_norm"),
        (lambda: named("slow", dt.transforms.ema), "named: got the function ema"),
        (lambda: named(dt.transforms.ema(0.5), "slow"), "named: needs a Transform, got 'slow'"),
        (lambda: named("a b", dt.transforms.ema(0.5)), "named: name must be letters, digits and underscores, got 'a b'"),
        (lambda: named("more", dt.auto_microbatch()), "named: transform must be .*, got 'auto_microbatch'. List"),
        (lambda: named("more", dt.transforms.scale_lr(0.5)), "named: transform must be .*, got 'scale_lr'. Give .* schedule"),
        (lambda: on_batch(None, name="x"), r"on_batch: fn must be a function \(batch, generator\) -> batch, got None"),
        (lambda: on_batch(lambda b, g: b, name="a b"), "name must be letters, digits and underscores, got 'a b'"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_batch_function_runs_before_the_microbatch_split():
    given, split = [], []

    def reverse(batch, generator):
        given.append(batch.clone())
        return batch.flip(0)

    def loss(model, x):
        split.append(x)
        return LOSS(model, x)

    step = dt.compose_step(loss, [on_batch(reverse, name="reverse")], grad=partial(dt.microbatch_step, microbatch_size=3))
    step(begin(step), BATCH)
    assert torch.equal(given[0], BATCH)
    assert [len(microbatch) for microbatch in split] == [3, 1]
    assert torch.equal(torch.cat(split), BATCH.flip(0))


def test_batch_function_generator_is_reproducible_within_a_step():
    drawn = []

    def draw(batch, source):
        drawn.append(torch.rand((), generator=source).item())
        return batch

    def twice(inner):
        def again(state, batch, **options):
            inner(state, batch, **options)
            return inner(state, batch, **options)

        return again

    step = dt.compose_step(LOSS, [Transform(name="twice", grad=twice), on_batch(draw, name="draw")])
    state = begin(step)
    expected = [torch.rand((), generator=generator("cpu", 0, "draw", number, 0)).item() for number in (0, 1)]
    assert torch.rand((), generator=make_step_context(state, "draw").generator).item() == expected[0]
    for _ in range(2):
        state, _ = step(state, BATCH)
    assert drawn == [expected[0]] * 2 + [expected[1]] * 2


def test_batch_function_that_returns_none_is_refused():
    step = dt.compose_step(LOSS, [on_batch(lambda batch, source: None, name="inplace")])
    with pytest.raises(ConfigError, match=r"on_batch: the function of 'inplace' returned None. Return the new batch"):
        step(begin(step), BATCH)


def idle_rank_with_new_keys(source: str) -> list:
    """The last batch has a sample for rank 0 only; the batch function makes the key that the loss reads."""
    mesh = dt.build_mesh()
    net = dt.shard_model(nn.Linear(3, 2), mesh)

    def loss(model, batch):
        return LOSS(model, batch["doubled"])

    step = dt.compose_step(loss, [on_batch(lambda batch, source: {"doubled": 2 * batch["x"]}, name="double")])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batches: Iterable = [{"x": torch.ones(1 - state.spec.data_rank, 3)}]
    if source == "loader":
        batches = dt.build_loader([{"x": torch.ones(3)}] * 5, mesh=mesh, global_batch_size=4, seed=0).until("1ep")
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    return losses


@pytest.mark.parametrize(("source", "steps"), [("hand", 1), ("loader", 2)])
def test_batch_function_runs_on_a_rank_without_samples(ranks, source, steps):
    first, second = ranks(2).run(idle_rank_with_new_keys, source)
    assert first == second
    assert len(first) == steps
    assert min(first) > 0


def batch_method_that_fails(rank: int) -> list[str]:
    """Rank 1's function raises, or rank 0's (by ``rank``); then all ranks continue."""
    model = dt.shard_model(nn.Linear(3, 2), dt.build_mesh())
    fails = [True]

    def fn(batch, source):
        if fails.pop() and get_dist_info().rank == rank:
            raise ValueError("no partner for this sample")
        return batch

    twice = [on_batch(fn, name="mix"), on_batch(lambda batch, source: batch * 1.0, name="scale")]
    step = dt.compose_step(LOSS, twice)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        step(state, BATCH)
    except (ValueError, RuntimeError) as error:
        fails.append(False)
        step(state, BATCH)
        return [type(error).__name__, str(error)]
    return ["no error"]


def test_a_batch_function_that_fails_on_one_rank_raises_on_all(ranks):
    answers = ranks(2).run(batch_method_that_fails, 1)
    assert answers[1] == ["ValueError", "no partner for this sample"]
    assert answers[0] == ["PeerError", "step: rank 1 could not use its batch (1 of 2 ranks). See the error of that rank."]


def averages(state: dt.TrainState) -> dict[str, torch.Tensor]:
    return {name: flat(content["params"].values()) for name, content in state.transform_states.items() if "params" in content}


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def state_after(transforms: list[Transform], steps: int = 3) -> dt.TrainState:
    step = dt.compose_step(LOSS, transforms)
    state = begin(step)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


FAST, SLOW = dt.transforms.ema(0.5), dt.transforms.ema(0.9)


@pytest.mark.parametrize(
    "transforms",
    [
        pytest.param([FAST, named("slow", SLOW)], id="the second"),
        pytest.param([named("slow", SLOW), FAST], id="the first"),
        pytest.param([named("slow", named("other", SLOW)), FAST], id="twice"),
        pytest.param([named("slow", replace(SLOW, name="other")), FAST], id="after replace"),
        pytest.param([named("ema", named("slow", FAST)), named("slow", SLOW)], id="exchanged"),
        pytest.param([every(1, FAST), every(1, named("slow", SLOW))], id="inside of every"),
        pytest.param([FAST, named("slow", masked(every(1, SLOW), "**"))], id="around every and masked"),
    ],
)
def test_named_average_equals_the_average_alone(transforms):
    state = state_after(transforms)
    assert list(state.transform_states) == [transform.name for transform in transforms]
    fast, slow = (averages(state_after([each]))["ema"] for each in (FAST, SLOW))
    torch.testing.assert_close(averages(state), {"ema": fast, "slow": slow}, rtol=0, atol=0)
    with dt.transforms.use_average(state, "slow"):
        torch.testing.assert_close(flat(state.params.values()), slow, rtol=0, atol=0)


def test_named_transforms_are_saved_and_resumed_by_name(tmp_path):
    step = dt.compose_step(LOSS, [FAST, named("slow", SLOW)])
    state = state_after([FAST, named("slow", SLOW)], 3)
    dt.save_sharded(tmp_path, state)
    whole = averages(step(state, BATCH)[0])
    loaded = dt.load_sharded(tmp_path, begin(step))
    torch.testing.assert_close(averages(step(loaded, BATCH)[0]), whole, rtol=0, atol=0)


def test_named_batch_function_has_its_own_random_numbers():
    drawn: dict[str, list[float]] = {"first": [], "second": []}

    def draw(name, batch, generator):
        drawn[name].append(torch.rand((), generator=generator).item())
        return batch

    first, second = (on_batch(partial(draw, name), name="noise") for name in drawn)
    state = state_after([first, named("more_noise", second)], 2)
    assert state.seed == 0
    assert len({*drawn["first"], *drawn["second"]}) == 4


def test_named_loss_wrapper_sees_its_state():
    seen: list = []

    def transform(value: int) -> Transform:
        def loss(inner, context):
            seen.append((context.state.transform_states["mine"]["value"], context.generator.initial_seed()))
            return inner

        return Transform(name="mine", init=lambda state: {"value": value}, loss=loss)

    state_after([transform(1), named("second", transform(2))], 1)
    assert sorted(value for value, _ in seen) == [1, 2]
    assert len({seed for _, seed in seen}) == 2


def test_named_clips_of_two_parts_equal_the_clips_alone():
    clip = dt.transforms.clip_by_norm(0.01)
    both = state_after([masked(clip, "0.*"), named("clip_last", masked(clip, "2.*"))])
    state = begin(step := dt.compose_step(LOSS, [recorder_of_clips()]))
    for _ in range(3):
        state, _ = step(state, BATCH)
    torch.testing.assert_close(flat(both.params.values()), flat(state.params.values()))


def recorder_of_clips() -> Transform:
    def update(inner):
        def update_fn(state, metrics):
            for prefix in ("0.", "2."):
                torch.nn.utils.clip_grad_norm_([param for name, param in state.params.items() if name.startswith(prefix)], 0.01)
            return inner(state, metrics)

        return update_fn

    return Transform(name="by_hand", update=update)


def test_two_watches_of_two_metrics_keep_their_losses_apart():
    def add_metric(inner):
        def grad_fn(state, batch, *, microbatch_size=None):
            state, metrics = inner(state, batch, microbatch_size=microbatch_size)
            value = float("nan") if state.step == 1 else 1.0
            return state, {**metrics, "other": make_metric(value, 1.0, state.device)}

        return grad_fn

    watch = [dt.monitors.watch_loss(), named("watch_other", dt.monitors.watch_loss(metric="other"))]
    step = dt.compose_step(LOSS, [Transform(name="other", grad=add_metric), *watch])
    state = begin(step)
    for _ in range(3):
        state, _ = step(state, BATCH)
    with pytest.raises(dt.errors.NonFiniteError, match="step 1 was nan"):
        step(state, BATCH)


@pytest.mark.parametrize(
    ("transform", "name"), [(FAST, "slow"), (dt.transforms.swa(start=1, end=3, every=1), "mine"), (every(2, FAST), "slow")]
)
@pytest.mark.parametrize("where", [lambda transform: transform, lambda transform: masked(transform, "**")])
def test_renaming_a_state_by_replace_is_refused_with_the_right_line(transform, name, where):
    step = dt.compose_step(LOSS, [FAST, where(replace(transform, name=name))])
    with pytest.raises(ConfigError, match=rf"made as '{transform.name}'.*dt\.transforms\.named\('{name}', transform\)"):
        begin(step)


def test_renaming_a_transform_without_state_by_replace_still_works():
    clip = dt.transforms.clip_by_norm(1.0)
    assert state_after([clip, replace(clip, name="clip_again")]).step == 3
    own = recorder([], "own")
    assert state_after([replace(own, name="other", grad=None, loss=None, update=None)]).step == 3


@pytest.mark.parametrize(
    ("transform", "advice"),
    [
        (FAST, r"dt\.transforms\.named\('ema_2', transform\)"),
        (dt.transforms.scale_lr(0.5), "one schedule"),
        (dt.transforms.loss_scale(), "List loss_scale once"),
        (dt.auto_microbatch(), "List auto_microbatch once"),
    ],
)
def test_transform_listed_twice_is_refused_with_advice_that_works(transform, advice):
    with pytest.raises(ConfigError, match=f"names must differ.*{advice}"):
        dt.compose_step(LOSS, [transform, transform])
