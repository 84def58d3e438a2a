"""Rows: low precision, and microbatches that fit."""

import torch

import dtrain as dt
from battery.row import Points, Row


def _run(transform: dt.Transform, weight: float, given: list[float]) -> tuple[list[dict[str, float]], float]:
    """The metrics of steps whose loss is ``weight * x``, and the weight after them, at rate 1/2."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).float().mean(), weight=len), [transform])
    state, seen = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), []
    for x in given:
        state, metrics = step(state, torch.full((1, 1), x))
        seen.append(dt.reduce_metrics(metrics))
    return seen, model.weight.item()


def _rounded() -> Points:
    """bfloat16 has seven bits behind the point: 1 + 1/512 is 1 there, and 1 + 3/512 is 1 + 4/512."""
    losses = [_run(dt.transforms.autocast("bf16"), 1.0 + numerator / 512, [1.0])[0][0]["loss"] for numerator in (1, 3)]
    return list(zip(losses, [1.0, 1.0078125], strict=True))


def _scales() -> Points:
    """Twice as large after two updates, half as large after the third, which is infinite and left out."""
    seen, weight = _run(dt.transforms.loss_scale(4.0, grow_every=2), 2.0, [1.0, 1.0, float("inf"), 1.0])
    scales = [metrics["loss_scale"] for metrics in seen]
    return [*zip(scales, [4.0, 4.0, 8.0, 4.0], strict=True), (seen[2]["skipped"], 1.0), (weight, 2.0 - 3 * 0.5)]


ROWS: dict[str, Row] = {
    "autocast": Row(make=lambda: dt.transforms.autocast("bf16"), of=("autocast",), points=_rounded),
    "loss_scale": Row(
        make=lambda: dt.transforms.loss_scale(1000.1, growth=1.3, grow_every=2), of=("loss_scale",), points=_scales, syncs=1
    ),
    "auto_microbatch": Row(make=lambda: dt.auto_microbatch(), of=("auto_microbatch",), undoes=True),
    "auto_microbatch-from-2": Row(make=lambda: dt.auto_microbatch(initial_size=2), undoes=True),
}
