"""mfu and peak_flops: known numbers, and no share of a peak that nobody knows."""

import re
import warnings

import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.monitors.flops import _PEAKS, peak_flops
from dtrain.monitors.speed import mfu
from moments import Run, fake_spans


def moved(monkeypatch, meter, run: Run) -> dict[str, float]:
    """80 samples of 10 tokens in 4 s, of which 2 s are compute."""
    seen = fake_spans(monkeypatch)
    meter(run.at(10, 10.0, samples=80, tokens=800))
    seen.add(step=2.0, data=2.0)
    return dict(meter(run.at(20, 14.0, samples=160, tokens=1600)))


@pytest.mark.parametrize(
    "each", [{"flops_per_token": 5.0}, {"flops_per_sample": 50.0}], ids=["flops_per_token", "flops_per_sample"]
)
def test_mfu_is_flops_over_time_and_peak(monkeypatch, each):
    assert moved(monkeypatch, mfu(**each, peak=1000.0, devices=2, window="10ba"), Run()) == {
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
        found = moved(monkeypatch, meter, run)
    assert len(seen) == 1
    assert found == {"speed/flops_per_s": 1000.0, "speed/flops_per_s_per_device": 1000.0}


def test_peak_of_known_gpu_is_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = moved(monkeypatch, mfu(flops_per_sample=50.0e9, dtype="bf16"), Run(device="cuda"))
    assert found["speed/mfu"] == 50.0e9 * 80 / 4 / 989.4e12


def test_unknown_gpu_is_named_in_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 9000")
    with pytest.warns(UserWarning, match="peak must be given for an unknown device, got 'Abacus 9000' in fp8"):
        found = moved(monkeypatch, mfu(flops_per_sample=1.0, dtype="fp8"), Run(device="cuda"))
    assert "speed/mfu" not in found


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
def test_invalid_arguments_are_refused(options, message):
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
