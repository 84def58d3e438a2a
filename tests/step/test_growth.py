"""The work of a step grows with what is trained: with the samples, never with their square, and not with frozen parameters.

Calls are counted, because they have no noise. A call of C is one call, whatever it does.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtrain.data.batch import split_batch

# Four times the samples, and an eighth more for what has no fixed number of calls.
LINEAR = 4.5


def count_calls(fn: Callable[[], object]) -> int:
    """Return the number of calls of Python and C functions in the second call of ``fn``, which finds warm caches."""
    fn()
    calls = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return calls


# Splitting


VALUES_OF_A_SAMPLE: dict[str, Callable[[int], Any]] = {
    "ids": str,
    "numbers": int,
    "token ids": lambda index: [index] * (1 + index % 5),
    "mappings": lambda index: {"id": index},
    "objects": lambda index: object(),
}


@pytest.mark.parametrize("kind", VALUES_OF_A_SAMPLE)
def test_split_of_python_values_is_linear_in_samples(kind):
    def split(samples: int) -> Callable[[], object]:
        values = [VALUES_OF_A_SAMPLE[kind](index) for index in range(samples)]
        batch = {"x": torch.zeros(samples, 2), "values": values}
        return lambda: split_batch(batch, 1)

    assert count_calls(split(1024)) <= LINEAR * count_calls(split(256))
