"""readings: the numbers of all sources, and no name twice."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.monitors.meters import collect, learning_rates
from dtrain.testing import count_host_syncs


def speed(state: object) -> dict[str, float]:
    return {"speed": 2.0, "state": state}


def broken(state: object) -> list[float]:
    return [1.0]


def test_readings_keep_the_order_of_sources():
    readings = collect(7, {"loss": 1.5}, speed, {})
    assert list(readings.items()) == [("loss", 1.5), ("speed", 2.0), ("state", 7)]


def test_no_source_gives_no_reading():
    assert collect(None) == {}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        pytest.param(
            [{"lr": 1.0}, speed, {"lr": 2.0}],
            "names must be unique, got 'lr' from source 3 and an earlier source. Rename",
            id="twice",
        ),
        pytest.param(
            [speed, speed], "names must be unique, got 'speed' from source 2 and an earlier source", id="a-meter-twice"
        ),
        pytest.param(
            [[1.0]], "source 1 must be or return a mapping of numbers, got list. Pass a dict, or a meter", id="a-list"
        ),
        pytest.param(
            [{}, broken], "source 2 must be or return a mapping of numbers, got list from the meter broken", id="a-meters-list"
        ),
    ],
)
def test_invalid_sources_are_refused(sources, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        collect(None, *sources)


def state_of(*groups: dict, make=torch.optim.SGD, **options):
    made = [{"params": [torch.nn.Parameter(torch.ones(2))], **group} for group in groups]
    return SimpleNamespace(optimizer=make(made, **{"lr": 0.1, **options}), transform_states={})


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param([{}], {"lr": 0.1}, id="one"),
        pytest.param([{"name": "all"}], {"lr": 0.1}, id="one-with-a-name"),
        pytest.param([{"lr": 0.2}, {}], {"lr/0": 0.2, "lr/1": 0.1}, id="without-names"),
        pytest.param([{"name": "head", "lr": 0.2}, {"name": "rest"}], {"lr/head": 0.2, "lr/rest": 0.1}, id="by-name"),
        pytest.param([{"name": "a"}, {}], {"lr/a": 0.1, "lr/1": 0.1}, id="some-names"),
        pytest.param([{"name": "a"}, {"name": "a"}], {"lr/0": 0.1, "lr/1": 0.1}, id="one-name-twice"),
    ],
)
def test_rates_are_named_by_parameter_group(groups, expected):
    assert learning_rates(state_of(*groups)) == expected


def test_extra_options_are_included():
    state = state_of({"name": "a", "weight_decay": 0.5}, {"name": "b", "momentum": 0.9})
    assert learning_rates(state, extra_options=("weight_decay", "momentum")) == {
        "lr/a": 0.1,
        "lr/b": 0.1,
        "weight_decay/a": 0.5,
        "weight_decay/b": 0.0,
        "momentum/a": 0.0,
        "momentum/b": 0.9,
    }


def test_betas_are_reported_as_two_numbers():
    state = state_of({}, {"betas": (0.5, 0.6)}, make=torch.optim.AdamW)
    readings = learning_rates(state, extra_options=("betas",))
    assert {name: value for name, value in readings.items() if "betas" in name} == {
        "betas0/0": 0.9,
        "betas1/0": 0.999,
        "betas0/1": 0.5,
        "betas1/1": 0.6,
    }


def test_group_without_option_is_omitted():
    state = state_of({}, {})
    state.optimizer.param_groups[1]["extra"] = 3
    assert learning_rates(state, extra_options=("extra",))["extra/1"] == 3.0
    assert "extra/0" not in learning_rates(state, extra_options=("extra",))


def test_tensor_learning_rate_is_read():
    state = state_of({}, lr=torch.tensor(0.25), make=torch.optim.Adam)
    assert learning_rates(state) == {"lr": 0.25}


def test_float_learning_rates_need_no_device_sync():
    with count_host_syncs() as seen:
        learning_rates(state_of({}, {}), extra_options=("weight_decay",))
    assert seen.count == 0


@pytest.mark.parametrize(
    ("also", "message"),
    [
        pytest.param(
            ("betas",), "learning_rates: extra_options must be options of SGD .dampening, .*, got 'betas'", id="unknown"
        ),
        pytest.param(("maximize_by",), "learning_rates: option 'maximize_by' must be a number, got 'x'", id="text"),
        pytest.param(("foreach",), "learning_rates: option 'foreach' must be a number, got None", id="none"),
    ],
)
def test_non_numeric_option_is_refused(also, message):
    state = state_of({"maximize_by": "x"})
    with pytest.raises(ConfigError, match=message):
        learning_rates(state, extra_options=also)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([dt.transforms.scale_lr(0.5)], {"lr": 0.05, "base_lr": 0.1, "weight_decay": 0.25}),
        ([dt.transforms.set_option("lr", 0.3)], {"lr": 0.3, "base_lr": 0.1, "weight_decay": 0.25}),
        (
            [dt.transforms.scale_lr(dt.schedules.constant(0.5)), dt.transforms.scale_option("weight_decay", 2.0)],
            {"lr": 0.05, "base_lr": 0.1, "weight_decay": 0.5, "base_weight_decay": 0.25},
        ),
        ([], {"lr": 0.1, "weight_decay": 0.25}),
    ],
    ids=["scale_lr", "set_option", "both", "none"],
)
def test_learning_rates_are_collected_with_schedule_metrics(transforms, expected):
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), transforms)
    model = torch.nn.Linear(2, 1)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.25))
    state, metrics = step(state, torch.ones(3, 2))
    readings = dt.monitors.collect(state, dt.reduce_metrics(metrics), partial(learning_rates, extra_options=("weight_decay",)))
    assert {name: readings[name] for name in readings if name != "loss"} == pytest.approx(expected)
