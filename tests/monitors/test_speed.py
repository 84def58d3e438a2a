"""throughput: known numbers out of made-up clocks and spans; a window that follows the run, and begins anew with it."""

import re
import warnings

import pytest
import torch
from torch import nn

from dtrain import spans
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.losses import mean_loss
from dtrain.monitors.flops import _PEAKS, peak_flops
from dtrain.monitors.meters import MovingWindow, mfu, throughput
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
    run._run_context.lineage.resumed_from = "checkpoints/step-1000"
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
    windows = [window.update(run.at(step, step / 4)) for step in range(1, 5001)]
    assert len(window._samples) <= 103
    assert 1000 <= windows[-1].steps <= 1010
    assert windows[-1].steps / windows[-1].seconds == 4.0


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
    readings = speed(run.at(20, 15.0, samples=40))
    wall = {name: value for name, value in readings.items() if "compute" not in name and "productive" not in name}
    return wall, dict.fromkeys(readings, 0.0)


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
    state, _ = step(state, torch.ones(5, 3))  # allocates the tensors of later steps
    speed, readings = throughput("2ba"), {}
    with count_host_syncs() as seen:
        for _ in range(4):
            state, _ = step(state, torch.ones(5, 3))
            readings = speed(state)
    assert seen.count == 0
    assert readings["speed/samples_per_s"] == pytest.approx(5 * readings["speed/steps_per_s"])


def test_epoch_window_ends_with_epochs():
    run, speed = Run(), throughput("1ep")
    rates = []
    for step in range(5, 45, 5):  # epochs of 10 steps; the first takes 2 s a step, the others 1 s
        state = run.at(step, float(step + min(step, 10)), epoch=step // 10)
        rates.append(speed(state).get("speed/steps_per_s"))
    # From the first call, then from the first call of the epoch before.
    assert rates == [None, 0.5, 10 / 15, 1.0, 1.0, 1.0, 1.0, 1.0]


def moved(monkeypatch, meter, run: Run) -> dict[str, float]:
    """80 samples of 10 tokens in 4 s, of which 2 s are compute."""
    seen = fake_spans(monkeypatch)
    meter(run.at(10, 10.0, samples=80, tokens=800))
    seen.add(step=2.0, data=2.0)
    return dict(meter(run.at(20, 14.0, samples=160, tokens=1600)))


@pytest.mark.parametrize(
    "flops", [{"flops_per_token": 5.0}, {"flops_per_sample": 50.0}], ids=["flops_per_token", "flops_per_sample"]
)
def test_mfu_is_flops_over_time_and_peak(monkeypatch, flops):
    assert moved(monkeypatch, mfu(**flops, peak=1000.0, devices=2, window="10ba"), Run()) == {
        "speed/flops_per_s": 1000.0,
        "speed/flops_per_s_per_device": 500.0,
        "speed/mfu": 0.5,
        "speed/mfu/compute": 1.0,
    }


def test_missing_peak_omits_mfu_and_warns_once(monkeypatch):
    meter, run = mfu(flops_per_sample=50.0), Run()
    with pytest.warns(
        UserWarning, match="mfu: peak must be given for an unknown device, got 'cpu' in bf16. speed/mfu is left out. Pass mfu"
    ) as seen:
        readings = moved(monkeypatch, meter, run)
    assert len(seen) == 1
    assert readings == {"speed/flops_per_s": 1000.0, "speed/flops_per_s_per_device": 1000.0}


def test_peak_of_known_gpu_is_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    readings = moved(monkeypatch, mfu(flops_per_sample=50.0e9, dtype="bf16"), Run(device="cuda"))
    assert readings["speed/mfu"] == 50.0e9 * 80 / 4 / 989.4e12


def test_unknown_gpu_is_named_in_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 9000")
    with pytest.warns(UserWarning, match="peak must be given for an unknown device, got 'Abacus 9000' in fp8"):
        readings = moved(monkeypatch, mfu(flops_per_sample=1.0, dtype="fp8"), Run(device="cuda"))
    assert "speed/mfu" not in readings


def test_flops_per_token_without_counted_tokens_is_refused():
    meter, run = mfu(flops_per_token=5.0, peak=1.0), Run()
    meter(run.at(1, 1.0, samples=8))
    with pytest.raises(ConfigError, match=r"mfu: flops_per_token must be used in a run .* got no tokens\. Name the token axis"):
        meter(run.at(2, 2.0, samples=16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {}, "mfu: exactly one of flops_per_token and flops_per_sample must be given, got flops_per_token=None", id="neither"
        ),
        pytest.param({"flops_per_token": 1.0, "flops_per_sample": 1.0}, "mfu: exactly one of flops_per_token and", id="both"),
        pytest.param({"flops_per_token": 0}, "mfu: flops_per_token must be a finite number above 0, got 0", id="no-work"),
        pytest.param({"flops_per_sample": "6N"}, "mfu: flops_per_sample must be a finite number above 0, got '6N'", id="text"),
        pytest.param(
            {"flops_per_token": 1, "peak": float("inf")},
            "mfu: peak must be a finite number above 0, got inf",
            id="infinite-peak",
        ),
        pytest.param({"flops_per_token": 1, "devices": 1.5}, "mfu: devices must be an integer of at least 1", id="devices"),
        pytest.param({"flops_per_token": 1, "dtype": "int8"}, "dtype must be one of fp32, tf32, fp16, bf16, fp8", id="dtype"),
        pytest.param({"flops_per_token": 1, "window": "1dur"}, "mfu: window must be a length such as '100ba'", id="window"),
    ],
)
def test_invalid_arguments_of_mfu_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        mfu(**options)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        pytest.param("NVIDIA A100-SXM4-80GB", "bf16", 312.0, id="A100-sxm"),
        pytest.param("NVIDIA A100-PCIE-40GB", torch.bfloat16, 312.0, id="A100-pcie"),
        pytest.param("NVIDIA H100 80GB HBM3", "bf16", 989.4, id="H100-sxm"),
        pytest.param("NVIDIA H100 PCIe", "bf16", 756.0, id="H100-pcie"),
        pytest.param("NVIDIA H100 NVL", "bf16", 835.5, id="H100-nvl"),
        pytest.param("NVIDIA H200", "fp8", 1978.9, id="H200"),
        pytest.param("NVIDIA H200 NVL", torch.float8_e4m3fn, 1670.5, id="H200-nvl"),
        pytest.param("NVIDIA GH200 480GB", "tf32", 494.7, id="GH200"),
        pytest.param("NVIDIA B200", "bf16", 2250.0, id="B200"),
        pytest.param("NVIDIA L4", "bf16", 121.0, id="L4"),
        pytest.param("NVIDIA L40", "bf16", None, id="L40-is-no-L4"),
        pytest.param("NVIDIA L40S", "bf16", 362.0, id="L40S"),
        pytest.param("NVIDIA A10", torch.float32, 31.2, id="A10"),
        pytest.param("Tesla V100-SXM2-16GB", "fp16", 125.0, id="V100-sxm"),
        pytest.param("Tesla V100-PCIE-32GB", torch.float16, 112.0, id="V100-pcie"),
        pytest.param("Tesla V100-SXM2-16GB", "bf16", None, id="V100-has-no-bf16"),
        pytest.param("Tesla T4", "fp16", 65.0, id="T4"),
        pytest.param("NVIDIA GeForce RTX 4090", "bf16", 165.2, id="4090"),
        pytest.param("NVIDIA GeForce RTX 3090", "bf16", 71.0, id="3090"),
        pytest.param("AMD Instinct MI300X", "bf16", 1307.4, id="MI300X"),
        pytest.param("AMD Instinct MI250X", "bf16", 191.5, id="MI250X"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None, id="laptop"),
        pytest.param("NVIDIA GeForce RTX 4090 D", "bf16", None, id="4090-D"),
        pytest.param("NVIDIA GeForce RTX 3090 Ti", "bf16", None, id="3090-Ti"),
        pytest.param("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None, id="a-slice"),
        pytest.param("NVIDIA A10G", "bf16", None, id="A10G-is-no-A10"),
        pytest.param("NVIDIA H1000", "bf16", None, id="H1000-is-no-H100"),
        pytest.param("cpu", "fp32", None, id="cpu"),
    ],
)
def test_peaks_match_exact_device_name(name, dtype, tera):
    assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"peak_flops: dtype must be one of fp32, tf32, .*got torch.int8"):
        peak_flops("NVIDIA H200", torch.int8)


def test_narrower_dtypes_have_higher_or_equal_peaks():
    for name, row in _PEAKS.items():
        speeds = [row[kind] for kind in ("fp32", "tf32", "fp16", "fp8") if kind in row]
        assert speeds == sorted(speeds), name
        assert row.get("bf16", row["fp16"]) == row["fp16"], name


def unknown_peak() -> int:
    """Return the number of warnings on this rank."""
    meter, run = mfu(flops_per_sample=1.0), Run()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        meter(run.at(1, 1.0, samples=8))
        meter(run.at(2, 2.0, samples=16))
    return len(seen) + 10 * get_dist_info().rank


def test_only_rank_0_warns(ranks):
    assert ranks(2).run(unknown_peak) == [1, 10]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_installed_gpu_has_peak_or_warning():
    name = torch.cuda.get_device_name()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mfu(flops_per_sample=1.0)(Run(device="cuda").at(1))
    assert (peak_flops(name, "bf16") is None) == (len(seen) == 1)
