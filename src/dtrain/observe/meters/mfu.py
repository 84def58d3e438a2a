"""``mfu``: how much of what the devices could compute goes into the model."""

from __future__ import annotations

import math
import warnings

import torch

from dtrain.dist.init import current
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.observe.meters.peaks import Precise, device_peak
from dtrain.observe.meters.readings import Meter
from dtrain.observe.meters.window import Window
from dtrain.state import TrainState


def mfu(
    *,
    flops_per_token: float | None = None,
    flops_per_sample: float | None = None,
    peak: float | None = None,
    dtype: Precise | torch.dtype = "bf16",
    window: Duration | int | str = "100ba",
    devices: int | None = None,
) -> Meter:
    """A meter of model FLOPs: how many a second, and which share that is of what the devices could do (MFU).

    Formula: ``speed/flops_per_s = flops_per_token * tokens / seconds``, ``speed/mfu = speed/flops_per_s / (devices * peak)``

    It gives ``speed/flops_per_s`` and ``speed/flops_per_s_per_device``, and where the peak is known ``speed/mfu``, over wall
    time, and ``speed/mfu/compute``, over the seconds of this rank whose cause is ``compute``, as ``throughput`` has it. The
    first call begins the window and gives nothing.

    Args:
        flops_per_token: of forward and backward, as ``transformer_flops`` gives it; the batches' tokens must be counted. Either
            this or ``flops_per_sample``.
        flops_per_sample: likewise, as ``measure_flops`` gives it.
        peak: operations a second that one device can do at most. None takes that of ``device_peak`` for the GPU of this rank;
            for another device, or one that is not in its table, there is no ``speed/mfu``, and one warning on rank 0.
        dtype: which of the device's peaks it is to be: what products are computed in. Used without ``peak`` only.
        window: as for ``throughput``.
        devices: how many there are; None for one a rank.

    Collective: none. Host sync: none.

    Raises:
        ConfigError: both or neither of ``flops_per_token`` and ``flops_per_sample``, a number that is not positive, ``devices``
            that is no whole number of at least 1, an unknown dtype, a window that is no duration; in a call, FLOPs per token in
            a run whose tokens are not counted.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    each = _one_of(flops_per_token, flops_per_sample)
    for name, value in (("flops_per_token", flops_per_token), ("flops_per_sample", flops_per_sample), ("peak", peak)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf):
            raise ConfigError(f"mfu: {name} must be a positive number, got {value!r}")
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ConfigError(f"mfu: devices must be a whole number of at least 1, got {devices!r}")
    device_peak("", dtype)  # which refuses an unknown dtype
    seen, known = Window(window, where="mfu"), _Peak(peak, dtype)

    def utilization(state: TrainState) -> dict[str, float]:
        most = known.of(state.device)
        stretch = seen.look(state)
        if stretch is None:
            return {}
        if flops_per_token is not None and not state.clock.tokens:
            raise ConfigError(
                "mfu: the run counts no tokens, which flops_per_token needs; name their axis in the step's batch_spec, or give "
                "flops_per_sample"
            )
        flops, share = each * (stretch.samples if flops_per_token is None else stretch.tokens), devices or current().world_size
        found: dict[str, float] = {}
        if stretch.seconds > 0:
            rate = flops / stretch.seconds
            found |= {"speed/flops_per_s": rate, "speed/flops_per_s_per_device": rate / share}
        for name, seconds in (("speed/mfu", stretch.seconds), ("speed/mfu/compute", stretch.compute)):
            if most is not None and seconds > 0:
                found[name] = flops / seconds / share / most
        return found

    return utilization


def _one_of(flops_per_token: float | None, flops_per_sample: float | None) -> float:
    given = [value for value in (flops_per_token, flops_per_sample) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"mfu: needs either flops_per_token or flops_per_sample, got {flops_per_token=}, {flops_per_sample=}; "
            "dt.transformer_flops and dt.measure_flops give them"
        )
    return given[0]


class _Peak:
    """The peak of a device, looked up once."""

    def __init__(self, given: float | None, dtype: Precise | torch.dtype) -> None:
        self._given, self._dtype = given, dtype
        self._asked = given is not None

    def of(self, device: torch.device) -> float | None:
        if not self._asked:
            self._asked = True
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            self._given = device_peak(name, self._dtype)
            if self._given is None and current().rank == 0:
                warnings.warn(
                    f"mfu: the peak of {name!r} in {self._dtype} is not known, so there is no speed/mfu; give mfu(peak=...), "
                    "operations a second of one device",
                    stacklevel=3,
                )
        return self._given
