"""Describe the result of a run in words: last and best metrics, speed, devices and command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.report.model import RunReport

# Words for names that the library and the examples log.
_WORDS = {
    "lr": "learning rate",
    "base_lr": "base learning rate",
    "grad_norm": "gradient norm",
    "memory/out_of_memory": "out-of-memory errors",
    "memory/retries": "allocator retries",
    "speed/mfu": "model FLOPs utilization",
    "speed/mfu/compute": "model FLOPs utilization, compute alone",
    "speed/productive": "share of compute",
    "norm/update_ratio": "norm of updates over norm of parameters",
}
_NORMS = {
    "grad": "gradients",
    "param": "parameters",
    "update": "updates",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "momentum_buffer": "momentum",
}
_GROUPS = {"held_out": "held-out", "eval": "evaluation", "val": "validation"}
_LOWER_IS_BETTER, _HIGHER_IS_BETTER = ("loss", "perplexity", "error", "distance"), ("accuracy", "right", "found")
# Measurements of the machine and settings of the step are no results.
_NO_RESULTS = ("speed/", "throughput/", "memory/", "mem/", "mfu", "lr", "base_lr", "norm/")


def metric_label(name: str) -> str:
    """Return the name of a metric in words and units.

    >>> (
    ...     metric_label("held_out/grad_norm"),
    ...     metric_label("speed/tokens_per_s_per_device"),
    ...     metric_label("memory/peak_rss_bytes"),
    ... )
    ('held-out gradient norm', 'tokens/s per device', 'peak process memory')
    """
    if name in _WORDS:
        return _WORDS[name]
    group, _, rest = name.partition("/")
    if group in _GROUPS and rest:
        return f"{_GROUPS[group]} {metric_label(rest)}"
    if group == "speed" and rest:
        return _replace(rest, (("_per_s", "/s"), ("_per_device", " per device"), ("/compute", ", compute alone")))
    if group == "memory" and rest:
        # A metric that is a maximum over ranks has the rank beside it.
        if rest.endswith("/rank"):
            return f"rank with the largest {metric_label(name.removesuffix('/rank'))}"
        words = _replace(rest.removesuffix("_bytes"), (("rss", "process"),))
        return f"{words} memory" if rest.endswith("_bytes") else f"memory {words}"
    if group == "norm" and rest:
        kind, _, part = rest.partition("/")
        return f"norm of {_NORMS.get(kind, kind)}{f' of {part}' if part else ''}"
    return name if rest else _replace(name, ())


def _replace(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name.replace("_", " ")


def list_results(run: RunReport) -> list[tuple[str, str]]:
    """Return the label and the last value of each metric: the loss, held-out metrics, then others.

    A loss or an accuracy that was better at an earlier step has its best value, too.
    """
    names = [name for name in run.series if not name.startswith(_NO_RESULTS)]
    names.sort(key=lambda name: (name != "loss", name.partition("/")[0] not in _GROUPS, "loss" not in name, "/" in name, name))
    results = []
    for name in names:
        series, word = run.series[name], name.rsplit("/", 1)[-1]
        text = "not finite" if series.last is None else f"{series.last:.4g}"
        best = None
        if any(part in word for part in _LOWER_IS_BETTER):
            best = series.low
        elif any(part in word for part in _HIGHER_IS_BETTER):
            best = series.high
        if best is not None and f"{best:.4g}" != text:
            # The series keeps its extremes, so the step of the best value is among its points.
            step = series.steps[(series.values == best).argmax()]
            text = f"{text} (best {best:.4g} at step {step:,.0f})"
        results.append((metric_label(name), text))
    return results


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


def describe_parameters(run: RunReport) -> str:
    """Return the number of parameters of each model in the last attempt, ``"472,352"``; empty if unknown."""
    models = [event for event in run.events if event["name"] == "model"]
    last = [event["fields"] for event in models if event["attempt"] == models[-1]["attempt"]]
    counts = [f"{fields['parameters']:,}" for fields in last if isinstance(fields.get("parameters"), int)]
    return " and ".join(counts)


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
