"""Factors of a learning rate, told apart from learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.schedules.ahead import peak
from dtrain.types import Schedule

_FAR_BELOW = 0.01
"""If no factor ever comes to this, they are taken for rates."""

_ABSOLUTE = 0.5
"""An optimizer with this rate or a larger one was built for rates."""


def warn_of_rates(
    where: str, factors: Sequence[float | Schedule], of: Sequence[int | None], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Warn if ``factors`` look like learning rates, which would be multiplied by the rates of the optimizer.

    Factors by layer are far below 1 for some groups, but not for all of them. Warm-ups and decays come near 1 at some time.

    Args:
        where: the function that was given the factors, for the warning.
        factors: numbers or schedules.
        of: for each group the index of its factor; None if it has none.
        groups: of the optimizer, with the base rates.
    """
    peaks = [peak(factor) if callable(factor) else factor for factor in factors]
    bases = [(float(group["lr"]), at) for group, at in zip(groups, of, strict=True) if at is not None]
    largest = max((found for found in peaks if found is not None), default=0.0)
    if None in of:  # a group without a factor keeps its rate
        largest = max(largest, 1.0)
    for base, at in bases:
        top = peaks[at]
        if top is None or top <= 0 or base >= _ABSOLUTE:
            continue
        same = callable(factors[at]) and math.isclose(top, base, rel_tol=0.1)
        if largest < _FAR_BELOW or (same and (largest == top or top < _FAR_BELOW)):
            warnings.warn(
                f"{where}: the factors come to {top:.3g} at most, and the optimizer's rate is {base:.3g}, so the run trains at "
                f"{top * base:.3g}. Give factors of the optimizer's rate, as in dt.cosine(1.0, 0.1, steps), or give rates and "
                "build the optimizer with lr=1.0.",
                stacklevel=2,
            )
            return
