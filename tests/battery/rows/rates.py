"""Rows: options of the optimizer as schedules."""

from __future__ import annotations

import torch
from torch import nn

import dtrain as dt
from battery.row import Points, Row
from dtrain.optim.groups import ParamGroup, param_groups
from dtrain.transforms.combinators import every
from dtrain.transforms.hyperparameters import scale_option, set_option


def _warm() -> dt.typing.Schedule:
    return dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 7), 2)


def _trained(transform: dt.Transform, steps: int, **options: float) -> list[list[float]]:
    """Two parameters, 4 and 2, after each step with gradients of 1: SGD with lr=0.5 for ``body``, 0.25 for ``head``."""
    model = nn.ParameterDict({"body": nn.Parameter(torch.tensor(4.0)), "head": nn.Parameter(torch.tensor(2.0))}).double()
    loss = dt.mean_loss(lambda model, batch: model["body"] + model["head"] + 0.0 * batch.sum(), weight=len)
    groups = param_groups(model, ParamGroup("body", "body", {"weight_decay": 0.5}), ParamGroup("head", "head", {"lr": 0.25}))
    step = dt.compose_step(loss, [transform])
    state, values = step.init(model, torch.optim.SGD(groups, lr=0.5, **options)), []
    for _ in range(steps):
        state, _ = step(state, torch.ones(1, dtype=torch.float64))
        values.append([param.item() for param in state.params.values()])
    return values


def _lr_points() -> Points:
    """The head's rate is halved and then zero; the body's is as it was: p - 0.5 * (1 + 0.5 p), which is 0.75 p - 0.5."""
    values = _trained(dt.transforms.scale_lr({"head": dt.schedules.linear(0.5, 0.0, 1)}), 2)
    return [(values[0], [2.5, 2 - 0.125]), (values[1], [1.375, 2 - 0.125])]


def _option_points() -> Points:
    """The decay of the body is 0.5 in the first step, and half of that in the second: p - 0.5 * (1 + 0.25 p)."""
    values = _trained(scale_option("weight_decay", dt.schedules.linear(1.0, 0.0, 2)), 2)
    return [(values[0], [2.5, 1.75]), (values[1], [2.5 - 0.5 * 1.625, 1.5])]


def _set_points() -> Points:
    """A momentum of 0.8 and then 0.4: the second step of the head is 0.25 * (0.4 * 1 + 1)."""
    values = _trained(set_option("momentum", dt.schedules.linear(0.8, 0.0, 2)), 2, momentum=0.9)
    return [(values[0], [2.5, 1.75]), (values[1][1], 1.75 - 0.25 * 1.4), (values[1][0], 2.5 - 0.5 * (0.4 * 3 + 1 + 0.5 * 2.5))]


ROWS: dict[str, Row] = {
    "scale_lr": Row(make=lambda: dt.transforms.scale_lr(_warm())),
    "scale_lr-by-group": Row(
        make=lambda: dt.transforms.scale_lr({"first": _warm(), "la*": 0.5}), of=("scale_lr",), points=_lr_points
    ),
    "every-scale_lr": Row(make=lambda: every(2, dt.transforms.scale_lr(_warm()))),
    "scale_option": Row(make=lambda: scale_option("momentum", {"last": _warm()}), of=("scale_option",), points=_option_points),
    "set_option": Row(
        make=lambda: set_option("weight_decay", dt.schedules.linear(0.1, 0.0, 7)), of=("set_option",), points=_set_points
    ),
    "every-set_option": Row(make=lambda: every("1ep", set_option("momentum", 0.5))),
}
