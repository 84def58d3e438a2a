"""Curves of the recipe cards as SVG: schedules over the step, and the effect of a method as a function of one number.

Each curve is computed by the function that the card describes. ``python tests/written.py`` writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

import dtrain as dt
from battery import effects
from battery.plot import Plot, svg
from dtrain.schedules.durations import Duration
from dtrain.transforms.batches.sequence_length_warmup import length_ramp

IMAGES = Path(__file__).parents[2] / "docs" / "images" / "recipes"

SCHEDULES: dict[str, tuple[int, tuple[str, ...]]] = {
    "constant": (1000, ("constant(1.0)",)),
    "cosine": (1000, ("cosine(1.0, 0.1, 1000)",)),
    "cosine_restarts": (700, ("cosine_restarts(1.0, 0.0, 100, multiplier=2)",)),
    "exponential": (1000, ("exponential(1.0, 0.1, 500)", "exponential(1.0, 0.1, 250, end=0.05)")),
    "inverse_sqrt": (1000, ("inverse_sqrt(1.0, 100)", "warmup(inverse_sqrt(1.0, 100), 100)")),
    "linear": (1000, ("linear(1.0, 0.0, 1000)", "warmup(linear(1.0, 0.0, 1000), 100)")),
    "multi_step": (900, ("multi_step(1.0, 0.1, [300, 600, 800])",)),
    "one_cycle": (1000, ("one_cycle(0.04, 1.0, 0.0, 1000)", "one_cycle(0.04, 1.0, 0.0, 1000, shape='linear')")),
    "polynomial": (1000, ("polynomial(1.0, 0.0, 1000, power=0.9)", "polynomial(1.0, 0.0, 1000, power=2)")),
    "step_decay": (1000, ("step_decay(1.0, 0.5, 200)",)),
    "warmup": (1000, ("warmup(cosine(1.0, 0.0, 1000), 100)",)),
    "warmup_stable_decay": (
        1000,
        (
            "warmup_stable_decay(1.0, warmup=50, decay_start=800, decay=200)",
            "warmup_stable_decay(1.0, warmup=50, decay_start=800, decay=200, shape='1-sqrt')",
        ),
    ),
    "combine_schedules": (
        1000,
        (
            "sequential([linear(0.0, 1.0, 200), cosine(1.0, 0.0, 800)], [200])",
            "clip(cosine(1.0, 0.0, 1000), low=0.25, high=0.75)",
        ),
    ),
}
"""By card, the length of the picture in steps, and the schedules in it, of ``dt.schedules``."""


def written(code: str) -> str:
    """Return a schedule as a loop writes it, with ``dt.schedules.`` before each name."""
    return re.sub(r"\b(?=[a-z_]+\()", "dt.schedules.", code)


def scheduled(name: str) -> Plot:
    """Evaluate the schedules of a card."""
    steps, codes = SCHEDULES[name]
    lines = {}
    for code in codes:
        schedule = eval(written(code), {"dt": dt})
        dt.compose_step(lambda model, batch: dt.LossSum(total=batch, weight=1), [dt.transforms.scale_lr(schedule)])
        lines[code] = [(t, schedule(t)) for t in range(0, steps + 1, 5)]
    return Plot(x="step", y="factor of the rate", lines=lines, about="")


def clipped_norm() -> Plot:
    def after(norm: float) -> float:
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.tensor([norm])
        dt.clip_grad_norm_({"weight": weight}, 1.0)
        return abs(float(weight.grad))

    points = [(k / 20, after(k / 20)) for k in range(81)]
    return Plot(x="norm before", y="norm after", lines={"": points}, about="`clip_by_norm(1.0)`: the direction stays.")


def clipped_value() -> Plot:
    values = torch.linspace(-3, 3, 121)
    weight = torch.zeros(121, requires_grad=True)
    weight.grad = values.clone()
    dt.transforms.clip_grad_value_({"weight": weight}, 1.0)
    points = list(zip(values.tolist(), weight.grad.tolist(), strict=True))
    return Plot(x="element before", y="element after", lines={"": points}, about="`clip_by_value(1.0)`, for each element.")


def averaged() -> Plot:
    generator = torch.Generator().manual_seed(0)
    raw, ema, weight = [], [], 1.0
    average = {"weight": torch.ones(1)}
    for step in range(300):
        weight += -0.02 * weight + 0.06 * float(torch.randn((), generator=generator))
        dt.transforms.update_ema_(average, {"weight": torch.tensor([weight])}, 0.95)
        raw.append((step, weight))
        ema.append((step, float(average["weight"])))
    return Plot(
        x="step", y="weight", lines={"parameter": raw, "average, decay 0.95": ema}, about="A noisy parameter, and its average."
    )


def equal_average() -> Plot:
    generator = torch.Generator().manual_seed(0)
    raw, swa, weight = [], [], 1.0
    average, count = {"weight": torch.zeros(1)}, 0
    for step in range(300):
        weight += -0.02 * weight + 0.06 * float(torch.randn((), generator=generator))
        raw.append((step, weight))
        if step >= 200 and step % 10 == 0:
            dt.transforms.update_swa_(average, {"weight": torch.tensor([weight])}, count)
            count += 1
            swa.append((step, float(average["weight"])))
    about = "A noisy parameter, and the equal average of its values since step 200, every 10 steps."
    return Plot(x="step", y="weight", lines={"parameter": raw, "average": swa}, about=about)


def biases() -> Plot:
    bias = dt.surgery.alibi_bias(4, 33)[:, -1].flip(-1)
    lines = {f"head {head + 1}": [(d, float(bias[head, d])) for d in range(33)] for head in range(4)}
    return Plot(
        x="distance of two tokens",
        y="bias",
        lines=lines,
        about="The bias of the scores with 4 heads, by the distance of query and key.",
    )


def dropped() -> Plot:
    lines = {
        f'drop_rates(0.5, 12, "{kind}")': list(enumerate(dt.surgery.drop_rates(0.5, 12, kind), start=1))
        for kind in ("linear", "uniform")
    }
    return Plot(x="block", y="drop rate", lines=lines, about="The rate at which each of 12 blocks is skipped.")


def kept() -> Plot:
    lines = {f"keep={keep}": [(p / 100, (p / 100) ** (1 / keep - 1)) for p in range(101)] for keep in (0.5, 0.25)}
    return Plot(
        x="percentile of the loss in the batch",
        y="relative chance",
        lines=lines,
        about="The chance of a sample, relative to that of the largest loss.",
    )


def frozen() -> Plot:
    loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss_fn, [dt.transforms.freeze_layers(start=50, end=100)])
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(12)))
    for param in model.parameters():
        torch.nn.init.ones_(param)
    state, points = step.init(model, torch.optim.SGD(model.parameters(), lr=1e-3)), []
    for k in range(101):
        before = [layer.bias.item() for layer in model]
        state, _ = step(state, torch.ones(2, 1))
        points.append((k, sum(layer.bias.item() == bias for layer, bias in zip(model, before, strict=True))))
    return Plot(
        x="step", y="frozen layers", lines={"": points}, about="12 layers in a run of 100 steps, `start=50`, `end=100`."
    )


def singular_values() -> Plot:
    values = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)

    def mapped(value: torch.Tensor) -> float:
        rest = (1 - value**2).clamp(min=0).sqrt()  # so that the norm of the matrix is 1
        return float(dt.optim.orthogonalize(torch.diag(torch.stack([value, rest])))[0, 0])

    points = [(float(value), mapped(value)) for value in values]
    return Plot(
        x="singular value before",
        y="singular value after",
        lines={"": points},
        about="`orthogonalize` maps the singular values of a matrix of norm 1 near 1.",
    )


def smoothed() -> Plot:
    rows = {
        f"smoothing={s}": dt.transforms.smooth_labels(torch.tensor([3]), s, num_classes=8)[0].tolist() for s in (0.0, 0.1, 0.4)
    }
    lines = {name: list(enumerate(row)) for name, row in rows.items()}
    return Plot(x="class", y="target", lines=lines, about="The target of a sample of class 3 out of 8.")


def lengths() -> Plot:
    ramp = length_ramp(Duration.parse("300ba"), 8, 1024, 8)
    points = [(step, ramp(dt.schedules.Clock(step=step))) for step in range(0, 1001, 5)]
    about = 'Tokens of a sequence with `end="300ba"`, `initial_length=8`, `max_length=1024`.'
    return Plot(x="step", y="length", lines={"": points}, about=about)


PLOTS: dict[str, Callable[[], Plot]] = {
    "clip_by_norm": clipped_norm,
    "clip_by_value": clipped_value,
    "ema": averaged,
    "swa": equal_average,
    "alibi": biases,
    "stochastic_depth": dropped,
    "selective_backprop": kept,
    "freeze_layers": frozen,
    "sequence_length_warmup": lengths,
    "Muon": singular_values,
    "label_smoothing": smoothed,
}
NAMES = (*SCHEDULES, *PLOTS, *effects.PLOTS)


@cache
def plots() -> dict[str, Plot]:
    """Compute the plot of each card that has a plot."""
    made = {name: make() for name, make in (PLOTS | effects.PLOTS).items()}
    return {**{name: scheduled(name) for name in SCHEDULES}, **made}


def files() -> Iterator[tuple[Path, str]]:
    """Yield each picture and its text."""
    for name, plot in plots().items():
        yield IMAGES / f"{name}.svg", svg(plot)
