"""The exponential average: by hand, in any unit of time, in enough bits, and never gathered."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.errors import ConfigError
from dtrain.schedules.durations import RunLength
from dtrain.testing import count_collectives
from dtrain.transforms.weights.averaging import ema, update_ema_
from falling import BATCH, LOSS, average, begin, take, weight


def test_ema_of_a_linear_sequence_matches_the_formula():
    step, state = begin(ema(0.75))
    state = take(step, state)
    assert average(state, "ema") == 0.75 * 4 + 0.25 * 3.5
    state = take(step, state)
    assert average(state, "ema") == 0.75 * (0.75 * 4 + 0.25 * 3.5) + 0.25 * 3.0
    assert state.transform_states["ema"]["averaged"] == 3


def test_ema_does_not_average_integer_tensors():
    model = nn.Linear(1, 1)
    model.lookup = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    step = dt.compose_step(LOSS, [ema(0.75)])
    state, _ = step(step.init(model, torch.optim.SGD([model.weight, model.bias], lr=0.1)), BATCH)
    assert sorted(state.transform_states["ema"]["params"]) == ["bias", "weight"]


class Adapted(nn.Module):
    """A base and an adapter, each one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in (self.base, self.adapter):
            nn.init.constant_(layer.weight, 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def begin_adapted(*, freeze_base: bool = True, every: int = 1) -> tuple[dt.step.Step, dt.TrainState]:
    model = Adapted()
    model.base.requires_grad_(not freeze_base)
    step = dt.compose_step(LOSS, [ema(0.75, every=every)])
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))


def averages(state: dt.TrainState) -> dict[str, float]:
    return {name: average.item() for name, average in state.transform_states["ema"]["params"].items()}


def test_ema_holds_trainable_parameters_only():
    step, state = begin_adapted()
    assert averages(take(step, state)) == {"adapter.weight": 0.75 * 4 + 0.25 * 3.5}


def test_frozen_parameter_keeps_its_value_in_use_average():
    step, state = begin_adapted()
    state = take(step, state)
    with dt.transforms.use_average(state):
        assert [weight.item() for weight in state.model.parameters()] == [4.0, 0.75 * 4 + 0.25 * 3.5]
    assert [weight.item() for weight in state.model.parameters()] == [4.0, 3.5]
    dt.transforms.load_average_(state)
    assert [weight.item() for weight in state.model.parameters()] == [4.0, 0.75 * 4 + 0.25 * 3.5]


@pytest.mark.parametrize("every", [1, 2])
def test_average_of_an_unfrozen_parameter_begins_with_its_frozen_value(every):
    results = []
    for freezes in (False, True):
        # A parameter that only freeze holds back is trainable, so its average exists from the start.
        step, state = begin_adapted(freeze_base=freezes, every=every)
        state.model.base.requires_grad_(False)
        state = take(step, state, 2)
        state.model.base.requires_grad_(True)
        results.append(averages(take(step, state, 3)))
    assert results[0] == results[1]
    assert len(results[1]) == 2


def test_average_of_a_parameter_that_is_frozen_later_continues(tmp_path):
    step, state = begin_adapted(freeze_base=False)
    state = take(step, state)
    state.model.base.requires_grad_(False)
    dt.save_sharded(tmp_path, state)
    state = take(step, state, 2)
    assert averages(state)["base.weight"] != 3.5
    # The script of the resumed run builds the model frozen.
    step, resumed = begin_adapted()
    resumed = take(step, dt.load_sharded(tmp_path, resumed), 2)
    assert averages(resumed) == averages(state)


def test_averages_of_frozen_parameters_in_a_checkpoint_are_loaded(tmp_path):
    step, state = begin_adapted()
    # Earlier releases averaged frozen parameters, too.
    content = state.transform_states["ema"]
    old = {**content, "params": {"base.weight": torch.full((1, 1), 4.0), **content["params"]}}
    dt.save_sharded(tmp_path, take(step, state.with_transform_state("ema", old)))
    step, state = begin_adapted()
    state = take(step, dt.load_sharded(tmp_path, state))
    assert averages(state)["base.weight"] == 4.0
    with dt.transforms.use_average(state):
        assert state.model.base.weight.item() == 4.0


def test_checkpoint_of_a_frozen_base_starts_a_run_that_trains_the_base(tmp_path):
    step, state = begin_adapted()
    dt.save_sharded(tmp_path, take(step, state))
    step, state = begin_adapted(freeze_base=False)
    state = dt.load_sharded(tmp_path, state)
    assert averages(state) == {"adapter.weight": 0.75 * 4 + 0.25 * 3.5}
    assert averages(take(step, state))["base.weight"] == 0.75 * 4 + 0.25 * 3.5


def test_half_life_halves_the_weight_of_the_initial_average():
    decay = 2 ** (-1 / 10)
    averages, params = {"w": torch.zeros(1, dtype=torch.float64)}, {"w": torch.ones(1, dtype=torch.float64)}
    for _ in range(10):
        update_ema_(averages, params, decay)
    assert averages["w"].item() == pytest.approx(0.5)
    assert math.log(0.5) / math.log(decay) == pytest.approx(10)


@pytest.mark.parametrize(
    ("half_life", "interval", "decay"),
    [("4ba", 1, 2 ** (-1 / 4)), ("2ep", 3, 2 ** (-3 / 6)), ("8sp", "2ba", 2 ** (-2 / 4)), ("0.5dur", "1ba", 2 ** (-1 / 6))],
    ids=["steps", "epochs", "samples", "share of the run"],
)
def test_half_life_equals_the_equivalent_decay_per_step(half_life, interval, decay):
    run = RunLength(total=12, steps_per_epoch=3, samples_per_step=2)
    by_half_life = take(*begin(ema(half_life=half_life, every=interval), run_length=run), steps=6)
    by_decay = take(*begin(ema(decay, every=interval)), steps=6)
    assert average(by_half_life, "ema") == pytest.approx(average(by_decay, "ema"), rel=1e-7)


def test_half_life_in_epochs_uses_the_loader_of_the_run():
    def state_of(dataset, half_life="2ep"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 4.0)
        loader = dt.build_loader(dataset, global_batch_size=2, seed=0)
        step = dt.compose_step(LOSS, [ema(half_life=half_life)])
        return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.5), loader=loader), loader

    step, state, loader = state_of(torch.ones(6, 1))
    decay = 2 ** (-1 / 6)
    for batch in loader.until("1ba"):
        state, _ = step(state, batch)
    assert average(state, "ema") == pytest.approx(4 * decay + state.params["weight"].item() * (1 - decay), rel=1e-6)
    advice = r"step.init\(..., run_length=loader.run_length\('3ep'\)\)"
    for half_life in ("2tok", "0.5dur"):
        with pytest.raises(ConfigError, match=rf"ema: half_life must be convertible to steps, got '{half_life}'.* {advice}"):
            state_of(torch.ones(6, 1), half_life)


def test_average_starts_from_the_parameters_at_start():
    step, state = begin(ema(0.75, start=2))
    state = take(step, state)
    assert (average(state, "ema"), state.transform_states["ema"]["averaged"]) == (4.0, 0)
    state = take(step, state)
    assert (average(state, "ema"), state.transform_states["ema"]["averaged"]) == (3.0, 1)
    state = take(step, state)
    assert (average(state, "ema"), state.transform_states["ema"]["averaged"]) == (0.75 * 3.0 + 0.25 * 2.5, 2)


def test_epoch_interval_averages_the_parameters_at_each_epoch_end():
    step, state = begin(ema(0.5, every="1ep"))
    state = take(step, state, 2, epoch=3)
    assert average(state, "ema") == 4.0
    state = take(step, state, 2, epoch=3)
    assert average(state, "ema") == 0.5 * 4.0 + 0.5 * 2.5  # of step 3, not of step 4


def test_ema_decay_schedule_is_read_at_the_current_step():
    step, state = begin(ema(lambda t: (0.0, 0.75)[int(t)]))
    state = take(step, state)
    assert average(state, "ema") == 3.5
    state = take(step, state)
    assert average(state, "ema") == 0.75 * 3.5 + 0.25 * 3.0


def test_ema_refuses_an_invalid_scheduled_decay_before_any_change():
    step, state = begin(ema(lambda t: 1.0 + t))
    with pytest.raises(ConfigError, match=r"decay must be in \[0, 1\), got 1\.0 from its schedule at step 0"):
        step(state, BATCH)
    assert (weight(state), average(state, "ema")) == (4.0, 4.0)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_ema_refuses_an_invalid_decay(decay):
    with pytest.raises(ConfigError, match=r"ema: decay must be in \[0, 1\), got"):
        ema(decay)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ema(), "ema: give either decay=0.999 or half_life='1000ba', got decay=None, half_life=None"),
        (lambda: ema(0.9, half_life=3), "ema: give either .*, got decay=0.9, half_life=3"),
        (lambda: ema(math.nan), "ema: decay must be a finite number or a schedule .*, got nan"),
        (lambda: ema("0.9"), "ema: decay must be a finite number or a schedule .*, got '0.9'"),
        (lambda: ema(half_life=0), "duration: needs at least 1 ba, got 0"),
        (lambda: ema(0.9, every="3 weeks"), "duration: unknown unit 'weeks'"),
    ],
    ids=["nothing", "both", "nan", "text", "no half life", "no duration"],
)
def test_ema_refuses_invalid_arguments(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "options",
    [{"every": "0.1dur", "decay": 0.9}, {"start": "0.1dur", "decay": 0.9}, {"half_life": "1ep"}],
    ids=["interval", "start", "half life"],
)
def test_init_refuses_durations_that_need_an_unknown_run_length(options):
    with pytest.raises(ConfigError, match=r"ema: half_life must|clock: .* is a share of the run, whose length is not known"):
        begin(ema(**options))


def test_low_precision_parameters_are_averaged_in_float32():
    average, param = {"w": torch.ones(1)}, {"w": torch.zeros(1, dtype=torch.bfloat16)}
    update_ema_(average, param, 0.999)
    assert average["w"].item() == pytest.approx(0.999)  # bfloat16 has nothing between 0.996 and 1
    model = nn.Linear(1, 1).to(torch.bfloat16)
    step = dt.compose_step(LOSS, [ema(0.999)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {mean.dtype for mean in state.transform_states["ema"]["params"].values()} == {torch.float32}


def test_low_precision_parameters_are_widened_one_at_a_time():
    """All of them at once would take the memory of the average a second time."""
    params = {name: torch.ones(4, dtype=torch.bfloat16) for name in "abc"}
    averages = {name: torch.zeros(4) for name in "abc"}
    widened: list[weakref.ref] = []
    alive: list[int] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten._to_copy:
                widened.append(weakref.ref(out))
                alive.append(sum(ref() is not None for ref in widened))
            return out

    with Mode():
        update_ema_(averages, params, 0.75)
    assert [average.tolist() for average in averages.values()] == [[0.25] * 4] * 3
    assert len(alive) == 3
    assert max(alive) <= 2  # the storage of the last average goes when the next is there


def test_ema_of_complex_numbers():
    average = {"w": torch.tensor([4.0 + 0j])}
    update_ema_(average, {"w": torch.tensor([0.0 + 4j])}, 0.75)
    assert average["w"].item() == 3.0 + 1j


# ---- sharded ----------------------------------------------------------------------------------------------------------------


def sharded(*transforms: dt.Transform) -> tuple[dt.step.Step, dt.TrainState]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    loss = dt.mean_loss(lambda model, x: model(x).float().square().mean(), weight=len)
    step = dt.compose_step(loss, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


INPUT = torch.ones(2, 4, dtype=torch.bfloat16)


def communicated() -> list:
    counts = []
    for transforms in ([], [ema(0.9)]):
        step, state = sharded(*transforms)
        state, _ = step(state, INPUT)
        with count_collectives() as seen:
            step(state, INPUT)
        counts.append(seen.counts())
    return counts


def test_average_of_sharded_parameters_needs_no_collective(ranks):
    for without, with_it in ranks(2).run(communicated):
        assert without == with_it
        assert without["training"]


def saved(root: str) -> list[float]:
    step, state = sharded(ema(0.99))
    for _ in range(3):
        state, _ = step(state, INPUT)
    dt.save_sharded(root, state)
    return [
        value for mean in state.transform_states["ema"]["params"].values() for value in full_tensor(mean).flatten().tolist()
    ]


def loaded(root: str) -> list[float]:
    _, state = sharded(ema(0.99))
    state = dt.load_sharded(root, state)
    means = state.transform_states["ema"]["params"]
    assert {mean.dtype for mean in means.values()} == {torch.float32}
    return [value for mean in means.values() for value in full_tensor(mean).flatten().tolist()]


def test_float32_average_of_two_ranks_is_loaded_by_one_rank(ranks, tmp_path):
    first, second = ranks(2).run(saved, str(tmp_path))
    assert first == second == loaded(str(tmp_path))
