"""The work of a step grows with what is trained: with the samples, never with their square, and not with frozen parameters.

Calls are counted, because they have no noise. A call of C is one call, whatever it does.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dtrain as dt
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


# Frozen parameters


class Adapted(nn.Module):
    """One trained layer beside frozen layers, which the forward leaves out, so that they take time from nobody but a step."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(2, 2) for _ in range(frozen // 2)).requires_grad_(False)
        self.adapter = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(x)


class Touches(TorchFunctionMode):
    """Counts the functions and the attributes of tensors that read one of ``tensors``."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._ids, self.count = {id(tensor) for tensor in tensors}, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        flat = [item for value in args for item in (value if isinstance(value, list | tuple) else [value])]
        self.count += any(id(item) in self._ids for item in flat)
        return func(*args, **(kwargs or {}))


def adapter_loss(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


METHODS: dict[str, list[dt.Transform]] = {
    "plain": [],
    "clip": [dt.transforms.clip_by_norm(1.0), dt.transforms.clip_by_value(1.0), dt.transforms.adaptive_clip(0.1)],
    "ema": [dt.transforms.ema(0.9)],
    "swa": [dt.transforms.swa(start=1, end=1000, every=1)],
    "loss scale": [dt.transforms.loss_scale()],
    "nonfinite": [dt.transforms.nonfinite()],
    "auto": [dt.auto_microbatch(initial_size=2)],
    "in backward": [dt.transforms.ema(0.9)],
}


def steps_of(method: str, frozen: int) -> tuple[Callable[[], object], list[Tensor]]:
    """Return a function that runs one step, and the frozen parameters of its model."""
    model = Adapted(frozen)
    size: dict[str, Any] = {} if method == "auto" else {"microbatch_size": 2}
    if method == "in backward":
        spec = dt.batch_spec(weight=len)
        step = dt.step.optimizer_in_backward(adapter_loss, METHODS[method], batch_spec=spec, **size)
    else:
        step = dt.compose_step(adapter_loss, METHODS[method], **size)
    state = step.init(model, torch.optim.AdamW(model.adapter.parameters()))

    def run() -> None:
        nonlocal state
        state, _ = step(state, torch.ones(4, 2))

    return run, list(model.base.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_step_does_not_walk_frozen_parameters(method):
    calls, touches = [], []
    for number in (20, 2000):
        run, frozen = steps_of(method, number)
        run()
        calls.append(count_calls(run))
        with Touches(frozen) as watch:
            run()
        touches.append(watch.count)
    assert calls[0] == calls[1]
    # A step reads the device of the first parameter.
    assert touches[0] == touches[1] < 20


# Evaluation


@pytest.mark.parametrize("size", [None, 1, "auto"])
def test_evaluation_walks_the_modules_once(size):
    def calls_of_a_batch(frozen: int) -> int:
        model, batch = Adapted(frozen), torch.ones(4, 2)

        def calls(count: int) -> int:
            def run() -> None:
                dt.evaluate(model, [batch] * count, adapter_loss, microbatch_size=size)

            # What a first call sets up, and finalizers of what other tests left, add calls.
            return min(count_calls(run) for _ in range(3))

        return calls(6) - calls(2)

    assert calls_of_a_batch(200) == calls_of_a_batch(20)


def test_evaluation_in_parts_is_linear_in_samples():
    def evaluation(samples: int) -> Callable[[], object]:
        batch = {"x": torch.ones(samples, 2), "ids": [str(index) for index in range(samples)]}
        return lambda: dt.evaluate(
            nn.Identity(), [batch], lambda model, part: adapter_loss(model, part["x"]), microbatch_size=1
        )

    assert count_calls(evaluation(1024)) <= LINEAR * count_calls(evaluation(256))
