"""Test the words of a run's result: labels of metrics, last and best values, speed, devices and command."""

import numpy as np
import pytest

from dtrain.report.model import MetricSeries, RunReport
from dtrain.report.results import (
    describe_command,
    describe_devices,
    describe_parameters,
    format_speed,
    list_results,
    metric_label,
)

LABELS = {"loss": "loss", "lr": "learning rate", "held_out/loss": "held-out loss", "grad_norm": "gradient norm",
          "held_out/top_5": "held-out top 5", "eval/loss": "evaluation loss", "val/top_5": "validation top 5",
          "layers/3/loss": "layers/3/loss",
          "speed/samples_per_s": "samples/s", "speed/flops_per_s_per_device": "flops/s per device",
          "memory/rss_bytes": "process memory", "memory/fragmentation": "memory fragmentation",
          "memory/rss_bytes/rank": "rank with the largest process memory",
          "norm/grad": "norm of gradients", "norm/exp_avg/blocks.0": "norm of first moments of blocks.0"}  # fmt: skip


def series(*values):
    steps, column = np.arange(1.0, len(values) + 1), np.array(values)
    return MetricSeries(steps=steps, values=column, tokens=steps[:0], times=steps[:0], count=len(values), non_finite=0,
                        last=values[-1], last_step=len(values), low=min(values), high=max(values))  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_metric_label_has_words(name):
    assert metric_label(name) == LABELS[name]


def test_held_out_metrics_follow_the_loss_and_earlier_best_values_have_their_step():
    run = RunReport(name="gpt", folder="gpt", series={
        "accuracy": series(0.2, 0.9, 0.8), "held_out/loss": series(1.5), "loss": series(3.0, 1.0, 2.0), "lr": series(0.1),
        "speed/tokens_per_s": series(1.0)})  # fmt: skip
    assert list_results(run) == [
        ("loss", "2 (best 1 at step 2)"), ("held-out loss", "1.5"), ("accuracy", "0.8 (best 0.9 at step 2)")]  # fmt: skip


def test_run_without_facts_has_no_words():
    run = RunReport(name="gpt", folder="gpt")
    words = [format_speed(run), describe_parameters(run), describe_devices(run), describe_command(run)]
    assert (words, list_results(run)) == ([""] * 4, [])


def test_parameters_are_those_of_each_model_in_the_last_attempt():
    def event(attempt, **fields):
        return {"name": "model", "attempt": attempt, "at": 1.0, "rank": 0, "step": None, "fields": fields}

    events = [event(1, parameters=7), event(2, parameters=4352, trainable=4352), event(2, parameters=12)]
    run = RunReport(name="gan", folder="gan", events=events)
    assert describe_parameters(run) == "4,352 and 12"


def test_devices_and_command_are_those_of_the_last_attempt():
    about = {"devices": {"cpu": [0, 1]}, "world_size": 2, "command": ["train.py", "--out", "my run"]}
    run = RunReport(name="gpt", folder="gpt", about={1: {}, 2: about})
    assert (describe_devices(run), describe_command(run)) == ("2 ranks on cpu", "train.py --out 'my run'")
