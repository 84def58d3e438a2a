"""Test the words of a run's result: labels of metrics, last and best values, speed, devices and command."""

import numpy as np
import pytest

from dtrain.report.model import MetricSeries, RunReport
from dtrain.report.results import describe_command, describe_devices, format_speed, list_results, metric_label

LABELS = {"loss": "loss", "lr": "learning rate", "held_out/loss": "held-out loss", "grad_norm": "gradient norm",
          "held_out/top_5": "held-out top 5", "eval/loss": "eval/loss"}  # fmt: skip


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
    assert (format_speed(run), describe_devices(run), describe_command(run), list_results(run)) == ("", "", "", [])


def test_devices_and_command_are_those_of_the_last_attempt():
    about = {"devices": {"cpu": [0, 1]}, "world_size": 2, "command": ["train.py", "--out", "my run"]}
    run = RunReport(name="gpt", folder="gpt", about={1: {}, 2: about})
    assert (describe_devices(run), describe_command(run)) == ("2 ranks on cpu", "train.py --out 'my run'")
