"""throughput: known numbers out of made-up clocks and spans; a window that follows the run, and begins anew with it."""

import re

import pytest
import torch
from torch import nn

from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.losses import mean_loss
from dtrain.monitors.speed import MovingWindow, throughput
from dtrain.step.compose import compose_step
from dtrain.testing import count_host_syncs
from moments import Run, fake_spans


def test_speeds_are_averaged_over_window(monkeypatch):
    seen, run = fake_spans(monkeypatch), Run()
    speed = throughput("10ba", devices=4)
    seen.add(step=3.0, other=5.0)
    assert speed(run.at(10, 100.0, samples=80, tokens=800)) == {}
    seen.add(step=2.0, data=1.5, evaluate=1.5)
    assert speed(run.at(20, 105.0, samples=160, tokens=1600)) == {
        "speed/samples_per_s": 16.0,
        "speed/tokens_per_s": 160.0,
        "speed/samples_per_s_per_device": 4.0,
        "speed/tokens_per_s_per_device": 40.0,
        "speed/steps_per_s": 2.0,
        "speed/samples_per_s/compute": 40.0,
        "speed/tokens_per_s/compute": 400.0,
        "speed/samples_per_s_per_device/compute": 10.0,
        "speed/tokens_per_s_per_device/compute": 100.0,
        "speed/steps_per_s/compute": 5.0,
        "speed/productive": 0.4,
    }


def test_run_without_tokens_has_no_token_speed(monkeypatch):
    seen, run, speed = fake_spans(monkeypatch), Run(), throughput()
    speed(run.at(1))
    seen.add(step=1.0)
    names = set(speed(run.at(2, 1.0, samples=8)))
    assert names
    assert not any("tokens" in name for name in names)


def rates(run: Run, speed, steps: list[tuple[int, float]]) -> list[float | None]:
    return [speed(run.at(step, seconds, samples=step)).get("speed/steps_per_s") for step, seconds in steps]


@pytest.mark.parametrize(
    ("window", "steps", "expected"),
    [
        # The whole window: 10 steps in 10 s, then in 5 s, then in 1 s.
        pytest.param(
            "10ba", [(10, 10.0), (20, 20.0), (30, 25.0), (40, 26.0)], [None, 1.0, 2.0, 10.0], id="calls-as-the-window"
        ),
        pytest.param("5ba", [(10, 10.0), (20, 20.0), (30, 25.0)], [None, 1.0, 2.0], id="calls-further-apart"),
        pytest.param("20ba", [(10, 10.0), (20, 20.0), (30, 25.0), (40, 26.0)], [None, 1.0, 20 / 15, 20 / 6], id="calls-closer"),
        pytest.param("10sec", [(10, 10.0), (20, 15.0), (30, 20.0), (40, 26.0)], [None, 2.0, 2.0, 20 / 11], id="seconds"),
        pytest.param("10sp", [(10, 10.0), (20, 20.0), (30, 25.0)], [None, 1.0, 2.0], id="samples"),
        pytest.param("10ba", [(0, 0.0), (10, 9.0), (20, 14.0)], [None, None, 2.0], id="step-0-begins-nothing"),
        pytest.param("10ba", [(10, 10.0), (10, 10.0), (20, 15.0)], [None, None, 2.0], id="no-step-since"),
        pytest.param("10ba", [(10, 10.0), (20, 10.0)], [None, None], id="no-time"),
    ],
)
def test_window_follows_recent_steps(window, steps, expected):
    assert rates(Run(), throughput(window), steps) == expected


def test_loaded_checkpoint_restarts_window():
    run, speed = Run(), throughput("10ba")
    assert rates(run, speed, [(10, 1.0), (20, 2.0)]) == [None, 10.0]
    run.run_context.lineage.resumed_from = "checkpoints/step-1000"
    assert rates(run, speed, [(1010, 5000.0), (1020, 5005.0)]) == [None, 2.0]


def test_going_back_in_steps_restarts_window():
    run, speed = Run(), throughput("10ba")
    assert rates(run, speed, [(10, 1.0), (20, 2.0), (15, 1.5), (25, 3.5)]) == [None, 10.0, None, 5.0]


def test_different_run_restarts_window():
    speed = throughput("10ba")
    first, second = Run(), Run()
    assert [*rates(first, speed, [(10, 1.0)]), *rates(second, speed, [(20, 2.0)])] == [None, None]


def test_window_memory_is_bounded():
    window, run = MovingWindow("1000ba", caller="test"), Run()
    found = [window.update(run.at(step, step / 4)) for step in range(1, 5001)]
    assert len(window._samples) <= 103
    assert 1000 <= found[-1].steps <= 1010
    assert found[-1].steps / found[-1].seconds == 4.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"window": "0.1dur"}, "throughput: window must be a length such as '100ba' or '60sec', got '0.1dur'", id="share"
        ),
        pytest.param({"window": "soon"}, "duration: cannot read 'soon'", id="no-duration"),
        pytest.param({"devices": 0}, "throughput: devices must be an integer of at least 1, got 0", id="devices"),
        pytest.param({"devices": True}, "throughput: devices must be an integer of at least 1, got True", id="devices-bool"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        throughput(**options)


def on_ranks() -> tuple[dict[str, float], dict[str, float]]:
    """Equal clocks, but each rank has computed another while."""
    run, speed = Run(), throughput("10ba")
    speed(run.at(10, 10.0, samples=10))
    with spans.span("step"):
        sum(range(1000 * (get_dist_info().rank + 1)))
    found = speed(run.at(20, 15.0, samples=40))
    wall = {name: value for name, value in found.items() if "compute" not in name and "productive" not in name}
    return wall, dict.fromkeys(found, 0.0)


def test_ranks_agree_on_wall_time_and_names(ranks):
    first, second = ranks(2).run(on_ranks)
    assert first == second
    assert first[0]["speed/samples_per_s"] == 6.0
    assert first[0]["speed/samples_per_s_per_device"] == 3.0
    assert "speed/steps_per_s/compute" in first[1]


def test_throughput_needs_no_device_sync():
    model = nn.Linear(3, 1)
    step = compose_step(mean_loss(lambda model, x: model(x).mean(), weight=len))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    state, _ = step(state, torch.ones(5, 3))  # which makes what later steps use
    speed, found = throughput("2ba"), {}
    with count_host_syncs() as seen:
        for _ in range(4):
            state, _ = step(state, torch.ones(5, 3))
            found = speed(state)
    assert seen.count == 0
    assert found["speed/samples_per_s"] == pytest.approx(5 * found["speed/steps_per_s"])


def test_epoch_window_ends_with_epochs():
    run, speed = Run(), throughput("1ep")
    found = []
    for step in range(5, 45, 5):  # epochs of 10 steps; the first takes 2 s a step, the others 1 s
        state = run.at(step, float(step + min(step, 10)), epoch=step // 10)
        found.append(speed(state).get("speed/steps_per_s"))
    # From the first call, then from the first call of the epoch before.
    assert found == [None, 0.5, 10 / 15, 1.0, 1.0, 1.0, 1.0, 1.0]
