"""Describe the result of a run in words: last and best metrics, speed, devices and command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.report.model import MetricSeries, RunReport

# Words for names that the library and the examples log.
_WORDS = {"lr": "learning rate", "grad_norm": "gradient norm", "held_out": "held-out", "s": "seconds"}
_LOWER_IS_BETTER, _HIGHER_IS_BETTER = ("loss", "perplexity", "error"), ("accuracy", "right", "found")
_HELD_OUT = ("held_out/", "eval/", "val/")
# Measurements of the machine and settings of the step are no results.
_NO_RESULTS = ("speed/", "throughput/", "memory/", "mem/", "mfu", "lr", "base_lr", "norm/")


def metric_label(name: str) -> str:
    """Return the name of a metric in words: ``"held_out/grad_norm"`` becomes ``"held-out gradient norm"``."""
    if name.startswith("held_out/"):
        return f"{_WORDS['held_out']} {metric_label(name.removeprefix('held_out/'))}"
    return _WORDS.get(name, name.replace("_", " ") if "/" not in name else name)


def list_results(run: RunReport) -> list[tuple[str, str]]:
    """Return the label and the last value of each metric: the loss, held-out metrics, then others.

    A loss or an accuracy that was better at an earlier step has its best value, too.
    """
    names = [name for name in run.series if not name.startswith(_NO_RESULTS)]
    names.sort(key=lambda name: (name != "loss", not name.startswith(_HELD_OUT), "loss" not in name, "/" in name, name))
    return [(metric_label(name), _format_result(name, run.series[name])) for name in names]


def _format_result(name: str, series: MetricSeries) -> str:
    if series.last is None:
        return "not finite"
    text = f"{series.last:.4g}"
    word = name.rsplit("/", 1)[-1]
    best = None
    if any(each in word for each in _LOWER_IS_BETTER):
        best = series.low
    elif any(each in word for each in _HIGHER_IS_BETTER):
        best = series.high
    # The series keeps its extremes, so the step of the best value is among its points.
    if best is None or f"{best:.4g}" == text:
        return text
    step = series.steps[(series.values == best).argmax()]
    return f"{text} (best {best:.4g} at step {step:,.0f})"


def format_speed(run: RunReport) -> str:
    """Return the median speed over the slices of the timeline, ``"51,200 tokens/s"``; empty if unknown."""
    slices = run.timeline
    if slices is None:
        return ""
    for unit in ("tokens", "samples", "steps"):
        done = getattr(slices, unit)
        counts = (done > 0) & (slices.seconds > 0)
        if counts.any():
            rates = sorted((done[counts] / slices.seconds[counts]).tolist())
            rate = rates[len(rates) // 2]
            return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"
    return ""


def describe_devices(run: RunReport) -> str:
    """Return the devices of the last attempt, ``"2 ranks on cpu"``; empty if unknown."""
    about = run.about[max(run.about)] if run.about else {}
    devices, size = about.get("devices"), about.get("world_size")
    if not isinstance(devices, dict) or not isinstance(size, int):
        return ""
    return f"{size} rank{'s' if size != 1 else ''} on {', '.join(map(str, devices))}"


def describe_command(run: RunReport) -> str:
    """Return the command of the last attempt; empty if unknown."""
    command = run.about[max(run.about)].get("command") if run.about else None
    return shlex.join(map(str, command)) if isinstance(command, list) else ""
