"""``Precision``: which dtype parameters, gradient reductions, buffers and outputs have while a sharded model computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtrain.errors import ConfigError
from dtrain.names import buffer_slots, clean_modules

DType = Literal["fp32", "bf16", "fp16"]
Preset = Literal["DEFAULT", "PURE", "FULL"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIELDS = ("param", "reduce", "buffer", "output")
_LOW = ("bf16", "fp16")
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)

# By preset, the fields that are in the low precision (True) or in float32 (False). The others keep the dtype that is stored.
_PRESETS: dict[str, dict[str, bool]] = {
    "DEFAULT": {"param": True, "reduce": False},
    "PURE": {"param": True, "reduce": True},
    "FULL": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a sharded model's compute: ``"fp32"``, ``"bf16"``, ``"fp16"``; None keeps the stored one.

    >>> Precision.preset("DEFAULT", "bf16")
    Precision(param='bf16', reduce='fp32', buffer=None, output=None)

    Args:
        param: of parameters, and of floating inputs, in forward and backward (the optimizer keeps the stored ones).
        reduce: of gradients while ranks are summed; None means float32, or a wider dtype of compute. The gradients of a step's
            microbatches are always added up in at least float32.
        buffer: that all floating-point buffers are stored in from ``shard_model`` on, rotary frequencies and other tables
            included. Integers and complex numbers keep theirs. No preset sets this field.
        output: of the floating tensors that the root module returns.

    Normalisations with running statistics (BatchNorm) are left alone by ``param`` and ``buffer``: their parameters and
    statistics are computed with as they are stored, since in 8 or 11 bits a moving average stops moving.

    Raises:
        ConfigError: another dtype.
    """

    param: DType | None = None
    reduce: DType | None = None
    buffer: DType | None = None
    output: DType | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or value not in _DTYPES):
                raise ConfigError(f"Precision: {name} must be one of {', '.join(_DTYPES)} or None, got {value!r}")

    @classmethod
    def preset(cls, name: Preset, low: Literal["bf16", "fp16"] = "bf16") -> Precision:
        """A usual combination by name.

        Args:
            name: ``"DEFAULT"`` computes with parameters in the low precision and sums gradients in float32. ``"PURE"`` also
                sums the gradients of ranks in the low precision. ``"FULL"`` sets no field.
            low: the low precision.

        Buffers keep their dtype: a table in the low precision is another table. ``Precision(buffer=...)`` casts them.

        Raises:
            ConfigError: another name or dtype.
        """
        if not isinstance(name, str) or name not in _PRESETS:
            raise ConfigError(f"Precision.preset: name must be one of {', '.join(_PRESETS)}, got {name!r}")
        if not isinstance(low, str) or low not in _LOW:
            raise ConfigError(f"Precision.preset: low must be one of {', '.join(_LOW)}, got {low!r}")
        return replace(cls(), **{field: low if is_low else "fp32" for field, is_low in _PRESETS[name].items()})

    def policy(self, stored: torch.dtype) -> MixedPrecisionPolicy:
        """Return the policy of FSDP2 for a unit whose trainable parameters are ``stored`` in that dtype. It has no buffers."""
        param, output = (_DTYPES[v] if v else None for v in (self.param, self.output))
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=self._reduced(param or stored), output_dtype=output)

    def as_stored(self, stored: torch.dtype) -> MixedPrecisionPolicy:
        """Return the policy of a unit that computes with parameters as they are stored and inputs as they come."""
        return MixedPrecisionPolicy(reduce_dtype=self._reduced(stored), cast_forward_inputs=False)

    def _reduced(self, computed: torch.dtype) -> torch.dtype:
        # Said in any case: torch 2.15 takes the stored dtype for None, and older versions take the computed one.
        return _DTYPES[self.reduce] if self.reduce else wide(computed)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up many numbers of ``dtype``: float32 for bfloat16 and float16, else ``dtype``."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def keeps_dtype(module: nn.Module) -> bool:
    """Return True if ``module`` computes as it is stored, whatever the precision: it keeps running statistics of its own."""
    return isinstance(module, _WITH_STATISTICS) and module.running_mean is not None


def units_apart(model: nn.Module, precision: Precision | None) -> Iterator[nn.Module]:
    """The modules that must be units of their own, since they compute in other dtypes than what is around them."""
    if precision is not None and precision.param is not None:
        for name, module in clean_modules(model):
            if name and keeps_dtype(module) and any(True for _ in module.parameters()):
                yield module


def cast_buffers_(model: nn.Module, precision: Precision | None) -> None:
    """Store the floating-point buffers in the dtype of ``precision``. Mutates: ``model``; on meta, what is made later."""
    if precision is None or precision.buffer is None:
        return
    dtype = _DTYPES[precision.buffer]
    for _, module, key in list(buffer_slots(model)):
        buffer = module._buffers[key]
        if buffer is not None and buffer.is_floating_point() and not keeps_dtype(module):
            module._buffers[key] = buffer.to(dtype)
