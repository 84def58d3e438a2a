import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.curves import linear
from dtrain.schedules.durations import RunLength
from dtrain.schedules.hyperparameters import check_over_run, hyperparameter, peak_value, with_unit


def test_hyperparameter_reads_the_clock_of_the_step():
    assert [hyperparameter(linear(1.0, 0.0, 10), "x")(Clock(step=t)) for t in (0, 5)] == [1.0, 0.5]


def test_hyperparameter_returns_a_number_unchanged():
    assert [hyperparameter(3, "x")(Clock(step=t)) for t in (0, 7)] == [3, 3]


@pytest.mark.parametrize("unit", ["ba", "ep", "sp", "tok", "sec", "dur"])
def test_with_unit_reads_every_count_of_the_clock(unit):
    clock = Clock(step=1, epoch=2, samples=3, tokens=4, seconds=5.0, run_length=RunLength(total=8))
    read = hyperparameter(with_unit(unit, lambda t: 10.0 * t), "x")
    assert read(clock) == {"ba": 10.0, "ep": 20.0, "sp": 30.0, "tok": 40.0, "sec": 50.0, "dur": 1.25}[unit]


@pytest.mark.parametrize("value", ["x", None, True, math.nan, math.inf])
def test_hyperparameter_refuses_other_types(value):
    with pytest.raises(ConfigError, match=r"ema: decay must be a finite number or a schedule \(a function of the step\), got"):
        hyperparameter(value, "ema: decay")


def test_with_unit_refuses_unknown_units():
    with pytest.raises(ConfigError, match="with_unit: unit must be 'ep', 'ba', 'sp', 'tok', 'sec' or 'dur', got 'min'"):
        with_unit("min", linear(1.0, 0.0, 10))
    with pytest.raises(ConfigError, match=r"with_unit: schedule must be a function of a number, got 0.5"):
        with_unit("tok", 0.5)
    with pytest.raises(
        ConfigError, match=r"with_unit: the schedule must not have another unit, got 'sp' and unit='tok'\. Give one unit"
    ):
        with_unit("tok", with_unit("sp", linear(1.0, 0.0, 10)))


RUN = RunLength(total="10ep", steps_per_epoch=100, samples_per_step=8, tokens_per_step=64)


def ahead(schedule, run=RUN, allowed="[0, 1)"):
    return check_over_run(hyperparameter(schedule, "ema: decay", allowed), run)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            dt.schedules.linear(0.5, 1.0, 900),
            r"ema: decay must be in \[0, 1\), got 1\.0 from its schedule at step 900 of a run of 10ep",
        ),
        (dt.schedules.linear(0.5, 1.0, 999), "got 1.0 from its schedule at step 999 of a run"),
        (lambda step: 1.5 if step >= 731 else 0.5, "got 1.5 from its schedule at step 731 of a run"),
        (
            dt.schedules.with_unit("tok", dt.schedules.linear(0.0, 1.0, 60_000)),
            "got 1.0 from its schedule at 60000 tok of a run",
        ),
        (dt.schedules.with_unit("sp", dt.schedules.linear(0.0, 1.0, 7_992)), "got 1.0 from its schedule at 7992 sp of a run"),
        (dt.schedules.with_unit("ep", dt.schedules.linear(0.0, 1.0, 9)), "got 1.0 from its schedule at 9 ep of a run"),
        (
            dt.schedules.with_unit("dur", dt.schedules.linear(0.0, 1.0, 0.5)),
            r"got 1\.0 from its schedule at 0\.5\d* dur of a run",
        ),
        (([0.5] * 10).__getitem__, "ema: decay: the schedule raises at 10 ba of the run: IndexError"),
        (lambda step: float("nan"), "got nan from its schedule at step 0"),
    ],
    ids=["linear", "last step", "jump", "tokens", "samples", "epochs", "share", "raises", "nan"],
)
def test_check_over_run_samples_the_whole_run(schedule, message):
    with pytest.raises(ConfigError, match=message):
        ahead(schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        dt.schedules.linear(0.5, 1.0, 1_000),
        dt.schedules.with_unit("tok", dt.schedules.linear(0.0, 1.0, 64_000)),
        dt.schedules.with_unit("ep", dt.schedules.linear(0.0, 1.0, 10)),
        dt.schedules.with_unit("dur", dt.schedules.linear(0.0, 1.0, 1.0)),
        ([0.5] * 1_000).__getitem__,
        0.9,
    ],
    ids=["steps", "tokens", "epochs", "share", "table", "number"],
)
def test_schedule_may_leave_its_range_at_the_end_of_the_run(schedule):
    assert ahead(schedule) is None


def test_step_init_warns_for_a_run_of_unknown_length():
    told = ahead(dt.schedules.linear(0.5, 1.0, 12_345), run=None)
    assert told is not None
    assert "ema: decay must be in [0, 1), got 1.0 from its schedule at step 12345. A run of that length stops there" in told
    assert ahead(dt.schedules.linear(0.5, 0.999, 12_345), run=None) is None
    assert ahead(([0.5] * 10).__getitem__, run=None) is None  # a table of the run's steps
    assert (
        ahead(dt.schedules.step_decay(1.0, 0.5, 5_000), run=None, allowed="(0, inf]") is None
    )  # 0 after millions of steps, by rounding


def test_unconvertible_run_is_checked_like_a_run_of_unknown_length():
    seconds = dt.schedules.with_unit("sec", dt.schedules.linear(0.0, 1.0, 3600))
    told = ahead(seconds)
    assert told is not None
    assert "at 3600 sec" in told


@pytest.mark.parametrize(
    "transform",
    [
        dt.transforms.ema(dt.schedules.linear(0.9, 1.0, 50)),
        dt.transforms.clip_by_norm(dt.schedules.cosine(1.0, 0.0, 50)),
        dt.transforms.clip_by_value(dt.schedules.cosine(1.0, 0.0, 50)),
        dt.transforms.adaptive_clip(dt.schedules.cosine(1.0, 0.0, 50)),
        dt.transforms.sam(dt.schedules.cosine(1.0, 0.0, 50)),
        dt.transforms.noise_scale(dt.schedules.linear(0.9, 1.0, 50)),
        dt.transforms.diloco(2, lr=dt.schedules.linear(0.5, -0.1, 50)),
        dt.transforms.diloco(2, momentum=dt.schedules.linear(0.9, 1.0, 50)),
        dt.transforms.label_smoothing(dt.schedules.linear(0.0, 1.1, 50), num_classes=2),
        dt.transforms.mixup(dt.schedules.linear(1.0, -1.0, 50), num_classes=2),
        dt.transforms.cutmix(dt.schedules.linear(1.0, -1.0, 50), num_classes=2),
        dt.transforms.colout(dt.schedules.linear(0.0, 1.0, 50)),
        dt.transforms.colout(0.1, dt.schedules.linear(0.0, 1.0, 50)),
        dt.transforms.cutout(dt.schedules.linear(0.0, 1.1, 50)),
        dt.transforms.augmix(dt.schedules.linear(0.0, 11.0, 50)),
        dt.transforms.rand_augment(dt.schedules.linear(0.0, 11.0, 50)),
        dt.transforms.progressive_resizing(dt.schedules.linear(0.5, 1.1, 50)),
        dt.transforms.sequence_length_warmup(dt.schedules.linear(9.0, 0.0, 50)),
        dt.transforms.scale_lr(dt.schedules.linear(1.0, -0.1, 50)),
        dt.transforms.scale_option("weight_decay", dt.schedules.linear(1.0, -0.1, 50)),
        dt.transforms.set_option("momentum", dt.schedules.linear(0.5, 1.0, 50)),
        dt.transforms.masked(dt.transforms.clip_by_norm(dt.schedules.cosine(1.0, 0.0, 50)), "weight"),
    ],
    ids=lambda transform: transform.name,
)
def test_step_init_refuses_every_schedule_that_leaves_its_range_in_the_run(transform):
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [transform])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with pytest.raises(ConfigError, match=r"must be .*, got .* from its schedule at step \d+ of a run of 100ba"):
        step.init(model, optimizer, run_length=RunLength(total=100))


def test_step_init_without_a_length_warns_except_inside_every():
    schedule = dt.schedules.linear(0.9, 1.0, 50)
    loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.warns(
        UserWarning, match=r"ema: decay must be in \[0, 1\), got 1\.0 from its schedule at step 50\. A run of that length"
    ):
        dt.compose_step(loss, [dt.transforms.ema(schedule)]).init(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dt.compose_step(loss, [dt.transforms.between(0, 50, dt.transforms.ema(schedule))]).init(
            model, optimizer, run_length=RunLength(total=100)
        )


def test_check_over_run_names_the_first_failing_step():
    loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss, [dt.transforms.between(0, 9, dt.transforms.ema(lambda step: 0.5 + step / 4))])
    model = nn.Linear(2, 2)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        state, _ = step(state, torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"ema: decay must be in \[0, 1\), got 1\.0 from its schedule at step 2\. Keep the"):
        step(state, torch.ones(1, 2))


def test_peak_value_finds_the_largest_value():
    assert peak_value(dt.schedules.cosine(3e-4, 0.0, 100)) == 3e-4
    assert peak_value(dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 100_000), 2_000)) == pytest.approx(1.0, rel=0.01)
    assert peak_value(dt.schedules.with_unit("dur", dt.schedules.linear(0.0, 1.0, 1.0))) == 1.0
    assert peak_value([0.25, 0.5].__getitem__) == 0.5
    assert peak_value([].__getitem__) is None


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)],
    ids=["float32", "float64", "array", "tensor", "fraction"],
)
def test_numbers_of_any_kind_become_floats(value):
    for given in (value, lambda step: value):
        read = hyperparameter(given, "x", "[0, 1)")(Clock())
        assert read == 0.5
        assert type(read) is float


def test_whole_numbers_of_a_schedule_stay_whole():
    assert [type(hyperparameter(lambda step, value=value: value, "x")(Clock())) for value in (3, np.int64(3))] == [int, int]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (None, r"got None from its schedule at step 7\. Does the function return\?"),
        ("0.5", r"got '0\.5' from its schedule at step 7\. Return a float"),
        (np.array([0.5]), r"got array\(\[0\.5\]\) from its schedule at step 7\. Return a float"),
        (1j, r"got 1j from its schedule at step 7\. Return a float"),
    ],
    ids=["none", "text", "array", "complex"],
)
@pytest.mark.parametrize("allowed", [None, "[0, 1)"])
def test_schedule_that_returns_no_number_is_refused(value, advice, allowed):
    with pytest.raises(ConfigError, match=f"x must be a number, {advice}"):
        hyperparameter(lambda step: value, "x", allowed)(Clock(step=7))


def test_schedule_that_returns_nothing_late_in_the_run_is_found_before_the_run():
    late = hyperparameter(lambda step: 0.5 if step < 40 else None, "x", "[0, 1)")
    with pytest.raises(ConfigError, match=r"x must be a number, got None from its schedule at step 40\. Does the function"):
        check_over_run(late, RunLength(total=100))
    assert "x must be a number, got None from its schedule at step 40." in (check_over_run(late, None) or "")


def test_scheduler_of_torch_is_refused_with_the_value_to_pass():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    for scheduler in (torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5), torch.optim.lr_scheduler.LambdaLR):
        with pytest.raises(ConfigError, match=r"scale_lr: factor must be .*, got torch's LambdaLR.*the function that LambdaLR"):
            dt.transforms.scale_lr(scheduler)


def test_numbers_of_numpy_scale_an_option_of_numpy():
    loss = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss, [dt.transforms.scale_lr(lambda step: np.float32(0.5))])
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr"] = np.float32(0.5)
    before = model.weight.item()
    step(step.init(model, optimizer), torch.ones(1, 1))
    assert model.weight.item() == pytest.approx(before - 0.25)
