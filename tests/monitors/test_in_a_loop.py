"""All meters together in a loop that is resumed."""

from functools import partial

import pytest
import torch
from torch import nn

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.losses import mean_loss
from dtrain.monitors.hardware import memory_stats, system_metrics
from dtrain.monitors.meters import collect, eta, learning_rates, mfu, throughput
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.step.compose import compose_step
from dtrain.transforms.hyperparameters import scale_lr

SPEED = {"speed/samples_per_s", "speed/samples_per_s_per_device", "speed/steps_per_s"}
WORK = {"speed/flops_per_s", "speed/flops_per_s_per_device", "speed/mfu"}


def test_resumed_loop_has_all_readings(tmp_path):
    step = compose_step(mean_loss(lambda model, x: model(x).mean(), weight=len), [scale_lr(1.0)])

    def begin():
        model = nn.Linear(3, 1)
        return step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    rates = partial(learning_rates, extra_options=("momentum",))
    meters = (throughput("2ba"), mfu(flops_per_sample=18.0, peak=1e12), memory_stats, eta("20ba"), system_metrics())

    def logged(state):
        numbers = []
        for _ in range(3):
            state, metrics = step(state, torch.ones(5, 3))
            loss = {"loss": reduce_metrics(metrics)["loss"]}
            readings = collect(state, loss, rates, *meters)
            numbers.append(
                {name: value for name, value in readings.items() if not name.startswith("system/")}
            )  # no rate at once
        return state, numbers

    state, (first, second, third) = logged(begin())
    assert not first.keys() & (SPEED | WORK | {"time/left_s"})
    assert second.keys() >= SPEED | WORK | {"loss", "base_lr", "momentum", "memory/rss_bytes", "time/elapsed_s", "time/left_s"}
    assert second.keys() == third.keys()
    assert "speed/tokens_per_s" not in third
    assert third["speed/samples_per_s"] == pytest.approx(5 * third["speed/steps_per_s"])
    assert third["speed/flops_per_s"] == pytest.approx(18.0 * third["speed/samples_per_s"])
    assert 0.0 <= third["speed/productive"] <= 1.0

    save_sharded(tmp_path / "run", state)
    state, (fourth, fifth, _) = logged(load_sharded(tmp_path / "run", begin()))
    assert not fourth.keys() & (SPEED | WORK | {"time/left_s"})
    assert fifth.keys() == third.keys()
    assert state.step == 6
