"""``device_peak``: what a device could compute at most, as its vendor says."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from dtrain.errors import ConfigError

Precise: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
"""What products are computed in; ``tf32`` is float32 whose products torch may round (``set_float32_matmul_precision``)."""

_DTYPES: dict[torch.dtype, Precise] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

_HOPPER = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9}

# Words of the name that torch gives -> 10**12 operations a second, dense. A row holds for names with all its words; of several
# the one with the most. Words are whole ones, so that "L4" is not L40S, and "A10" not A100.
_PEAKS: dict[str, dict[str, float]] = {
    "B200": {"fp32": 75.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0},
    "GB200": {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0},
    "GH200": _HOPPER,
    "H200": _HOPPER,
    "H200 NVL": _HOPPER_NVL,
    "H100": _HOPPER,
    "H100 PCIe": {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0},
    "H100 NVL": _HOPPER_NVL,
    "A100": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    "A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0},
    "L40S": {"fp32": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0},
    "L4": {"fp32": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.5},
    "V100 SXM2": {"fp32": 15.7, "fp16": 125.0},
    "V100 SXM3": {"fp32": 15.7, "fp16": 125.0},
    "V100 PCIE": {"fp32": 14.0, "fp16": 112.0},
    "V100S PCIE": {"fp32": 16.4, "fp16": 130.0},
    "T4": {"fp32": 8.1, "fp16": 65.0},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0},
    "MI325X": _MI300X,
    "MI300X": _MI300X,
    "MI250X": {"fp32": 47.9, "fp16": 191.5, "bf16": 191.5},
    "MI250": {"fp32": 45.3, "fp16": 181.0, "bf16": 181.0},
}
_OTHERS = ("Laptop", "Mobile", "Max-Q", "D", "Ti", "MIG", "GRID")  # words of relatives that are slower or faster than the row


def device_peak(name: str, dtype: Precise | torch.dtype) -> float | None:
    """Operations a second that the device called ``name`` can do at most in products of ``dtype``, or None: not known.

    Dense, of matrix units where the device has some for this dtype, accumulated in float32 as torch does: datasheets often
    print twice that, which holds for sparse weights. Of devices that come in two parts torch sees each as a device, so the
    figures of MI250 and MI250X are those of one part. A slice of a GPU, and relatives such as a laptop's, are not known.

    Args:
        name: as ``torch.cuda.get_device_name()`` has it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: ``"fp32"``, ``"tf32"``, ``"fp16"``, ``"bf16"``, ``"fp8"``, or torch's dtype; ``torch.float32`` is ``"fp32"``.

    Raises:
        ConfigError: another dtype.

    Source: the vendors' datasheets: NVIDIA GB200, B200 (HGX), GH200, H200, H100, A100, A40, A10, L40S, L4, V100, T4;
    NVIDIA Ada and Ampere GA102 architecture papers (RTX 4090, 3090); AMD Instinct MI325X, MI300X, MI250X, MI250. Figures that
    are given with sparsity are halved.

    Example:
        >>> device_peak("NVIDIA A100-SXM4-80GB", "bf16"), device_peak("Tesla T4", "bf16"), device_peak("abacus", "fp32")
        (312000000000000.0, None, None)
    """
    kind = _DTYPES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if kind is None or kind not in get_args(Precise):
        raise ConfigError(f"device_peak: dtype must be one of {', '.join(get_args(Precise))}, got {dtype!r}")
    words = set(name.replace("-", " ").replace("_", " ").split())
    if words & set(_OTHERS):
        return None
    fitting = [row for row in _PEAKS if set(row.split()) <= words]
    if not fitting:
        return None
    tera = _PEAKS[max(fitting, key=lambda row: len(row.split()))].get(kind)
    return None if tera is None else tera * 1e12
