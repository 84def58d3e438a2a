"""Options of groups as schedules: the groups they select, refusals, and that all is as it was afterwards."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.optim.groups import ParamGroup, param_groups
from dtrain.schedules.curves import linear
from dtrain.transforms.hyperparameters import scale_lr, scale_option, set_option

LOSS = dt.mean_loss(lambda model, batch: model(batch).sum() / len(batch), weight=len)
BATCH = torch.ones(2, 3)


def begin(*transforms: dt.Transform, named: bool = True) -> tuple[dt.step.Step, dt.TrainState]:
    """Two layers with groups ``body``, ``body.no_decay``, ``head``, ``head.no_decay``."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = param_groups(model, ParamGroup("body", "0.*"), ParamGroup("head", "1.*", {"lr": 0.2}), weight_decay=0.1)
    if not named:
        groups = [{key: value for key, value in group.items() if key != "name"} for group in groups]
    step = dt.compose_step(LOSS, list(transforms))
    return step, step.init(model, torch.optim.AdamW(groups, lr=0.4, betas=(0.8, 0.9)))


def seen(*transforms: dt.Transform, option: str, named: bool = True) -> tuple[list, dict[str, float]]:
    """The option of each group while the optimizer runs, and the metrics of the step."""
    step, state = begin(*transforms, named=named)
    values = []
    state.optimizer.register_step_pre_hook(lambda optimizer, *_: values.extend(g[option] for g in optimizer.param_groups))
    _, metrics = step(state, BATCH)
    return values, dt.reduce_metrics(metrics)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.5, [0.2, 0.2, 0.1, 0.1]),
        (linear(0.5, 0.0, 10), [0.2, 0.2, 0.1, 0.1]),
        ({"head": 0.5}, [0.4, 0.4, 0.1, 0.1]),
        ({"head.no_decay": 0.5, "body": linear(0.25, 0.0, 10)}, [0.1, 0.1, 0.2, 0.1]),
        ({"**.no_decay": 0.5}, [0.4, 0.2, 0.2, 0.1]),
        ({"body": dt.schedules.with_unit("sp", lambda samples: 0.5 + samples)}, [0.2, 0.2, 0.2, 0.2]),
    ],
    ids=["number", "schedule", "rule", "two", "pattern", "samples"],
)
def test_each_group_gets_its_own_lr_factor(given, expected):
    assert seen(scale_lr(given), option="lr")[0] == pytest.approx(expected)


def test_metrics_report_the_first_group_or_each_named_group():
    assert seen(scale_lr(0.5), option="lr")[1]["lr"] == 0.2
    by_name = seen(scale_lr({"head": 0.5}), option="lr")[1]
    assert {k: v for k, v in by_name.items() if k != "loss"} == {"lr": 0.4, "lr.head": 0.1, "lr.head.no_decay": 0.1}
    assert seen(scale_option("weight_decay", 0.5), option="lr")[1]["weight_decay"] == 0.05
    by_name = seen(set_option("eps", {"head": 0.5}), option="eps")[1]
    assert {k: v for k, v in by_name.items() if k != "loss"} == {"eps.head": 0.5, "eps.head.no_decay": 0.5}


def test_scale_option_and_set_option_change_group_options():
    assert seen(scale_option("weight_decay", 0.5), option="weight_decay")[0] == [0.05, 0.0, 0.05, 0.0]
    assert seen(set_option("weight_decay", 0.5), option="weight_decay")[0] == [0.5] * 4
    assert seen(set_option("betas.1", {"head": 0.5}), option="betas")[0] == [(0.8, 0.9)] * 2 + [(0.8, 0.5)] * 2
    assert seen(scale_option("betas.0", 0.5), option="betas")[0] == [(0.4, 0.9)] * 4


def test_scale_lr_scales_the_value_of_an_earlier_set_option():
    assert seen(set_option("lr", 0.6), scale_lr(0.5), option="lr")[0] == [0.3] * 4


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_group_options_are_restored_after_a_step(fails):
    transforms = [scale_lr({"head": 0.5}), scale_option("betas.0", 0.5), set_option("weight_decay", 0.7)]
    step, state = begin(*transforms)
    before = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]

    def fail(*_):
        if fails:
            raise BrokenError

    state.optimizer.register_step_pre_hook(fail)
    if fails:
        with pytest.raises(BrokenError):
            step(state, BATCH)
    else:
        step(state, BATCH)
    assert [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scale_lr({}), "scale_lr: the mapping must not be empty, got {}"),
        (lambda: scale_lr({1.5: 0.5}), "scale_lr: names of groups must be text or positions, got 1.5"),
        (lambda: scale_lr({True: 0.5}), "scale_lr: names of groups must be text or positions, got True"),
        (lambda: scale_lr({None: 0.5}), "scale_lr: names of groups must be text or positions, got None"),
        (lambda: scale_lr({"head": -1}), r"scale_lr: factor of 'head' must be in \[0, inf\), got -1\."),
        (lambda: scale_lr({"head": "no"}), "scale_lr: factor of 'head' must be a finite number or a schedule .*, got 'no'"),
        (lambda: set_option("momentum", -0.5), r"set_momentum: value must be in \[0, 1\), got -0\.5\."),
        (
            lambda: scale_option("lr", 0.5),
            r"scale_option: option must not be 'lr', got 'lr'\. Use dt.transforms.scale_lr\(schedule\)",
        ),
        (lambda: scale_option(3, 0.5), "scale_option: option must be a name such as 'weight_decay' or 'betas.0', got 3"),
        (lambda: set_option("", 0.5), "set_option: option must be a name .* got ''"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            scale_lr({"tail": 0.5}),
            r"scale_lr: a group named 'tail' must exist, got the groups body, body.no_decay, head, head.no_decay\. Build named",
        ),
        (
            scale_lr({"head": 0.5, "**.no_decay": 0.5}),
            r"scale_lr: one pattern must match the group 'head.no_decay', got 'head' and '\*\*.no_decay'",
        ),
        (
            scale_option("momentum", 0.5),
            r"scale_momentum: option must be a number in the group 'body' of AdamW, got 'momentum'\. .*lr, .*betas.0, betas.1",
        ),
        (set_option("betas", 0.5), "set_betas: option must be a number in the group 'body' of AdamW, got 'betas'"),
        (set_option("betas.2", 0.5), "set_betas_2: option must be a number in the group 'body' of AdamW, got 'betas.2'"),
        (set_option("lr.0", 0.5), "set_lr_0: option must be a number in the group 'body' of AdamW, got 'lr.0'"),
    ],
    ids=["unknown group", "two fit", "no option", "several numbers", "too far", "no list"],
)
def test_init_refuses_options_unknown_to_the_optimizer(transform, message):
    with pytest.raises(ConfigError, match=message):
        begin(transform)


def test_unnamed_groups_are_refused_with_a_listing():
    with pytest.raises(ConfigError, match=r"a group named 'head' must exist, got the groups 0 \(no name\), 1 \(no name\)"):
        begin(scale_lr({"head": 0.5}), named=False)
    with pytest.raises(
        ConfigError, match=r"a group at position 4 must exist, got the groups 0 \(no name\), .* their positions"
    ):
        begin(scale_lr({4: 0.5}), named=False)


def test_positions_select_unnamed_groups():
    decays, metrics = seen(set_option("weight_decay", {0: 0.3, 3: linear(0.5, 0.0, 10)}), option="weight_decay", named=False)
    assert decays == [0.3, 0.0, 0.1, 0.5]
    assert {name: value for name, value in metrics.items() if name != "loss"} == {"weight_decay.0": 0.3, "weight_decay.3": 0.5}
    assert seen(scale_lr({2: 0.5}), option="lr", named=False)[0] == pytest.approx([0.4, 0.4, 0.1, 0.2])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            scale_lr({"head": lambda t: -1.0}),
            r"scale_lr: factor of 'head' must be in \[0, inf\), got -1\.0 from",
        ),
        (set_option("betas.0", lambda t: 1.0), r"set_betas_0: value must be in \[0, 1\), got 1\.0 from"),
        (scale_option("betas.1", 2.0), "scale_betas_1: betas.1 must be below 1, got 1.8"),
    ],
)
def test_value_out_of_range_is_refused_before_any_change(transform, message):
    step, state = begin(transform)
    before = [p.detach().clone() for p in state.params.values()]
    with pytest.raises(ConfigError, match=message):
        step(state, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, state.params.values(), strict=True))
