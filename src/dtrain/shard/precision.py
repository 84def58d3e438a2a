"""``Precision``: which dtype parameters, gradient reductions and outputs have while a sharded model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtrain.errors import ConfigError

DType = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a sharded model's compute; None keeps the dtype that parameters are stored in.

    Args:
        param: of parameters in forward and backward (the optimizer keeps the stored ones).
        reduce: of gradients while they are summed over ranks; None means the dtype of ``param``.
        output: of what the root module returns.
    """

    param: DType | None = None
    reduce: DType | None = None
    output: DType | None = None

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "output"):
            value = getattr(self, name)
            if value is not None and value not in _DTYPES:
                raise ConfigError(f"Precision: {name} must be one of {', '.join(_DTYPES)} or None, got {value!r}")

    def policy(self) -> MixedPrecisionPolicy:
        """The same as FSDP2 takes it."""
        param, reduce, output = (_DTYPES[v] if v else None for v in (self.param, self.reduce, self.output))
        return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
