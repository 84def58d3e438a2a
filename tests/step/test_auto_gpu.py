"""Real out of memory on a GPU: the size found against the largest that works, below a limit on torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dtrain.errors import OutOfMemoryError
from dtrain.step.auto_microbatch import auto_microbatch, find_microbatch_size
from dtrain.step.compose import compose_step
from dtrain.typing import LossSum

SAMPLES, TOKENS, WIDTH = 1024, 64, 1024
"""A batch of 256 MiB, which a host draws in a second."""


@contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Let torch's allocator raise out of memory beyond ``limit`` bytes, however large the GPU is."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def loss_fn(net: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=net(batch).square().sum(), weight=len(batch))


def batch_on_the_host() -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_found_size_is_near_the_manual_maximum():
    """A sample takes about 8 MiB of activations: about half of the batch fits."""
    torch.manual_seed(0)
    with memory_limit(4 * 2**30), torch.device("cuda"):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)))
        state = compose_step(loss_fn).init(net, torch.optim.SGD(net.parameters(), lr=1e-3))
        batch = batch_on_the_host()
        report = find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0)
        assert report.size < report.largest_batch
        low, high = report.size, report.largest_batch
        while low < high:
            middle = (low + high + 1) // 2
            try:
                find_microbatch_size(state, batch, loss_fn=loss_fn, headroom=0.0, min_size=middle, divisor=10**6)
                low = middle
            except OutOfMemoryError:
                high = middle - 1
    assert report.size >= 0.9 * low


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_step_after_gpu_oom_equals_step_with_the_found_size():
    def run(*transforms, size: int | None = None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU(), nn.Linear(WIDTH, 1)).cuda()
        step = compose_step(loss_fn, transforms, microbatch_size=size)
        state = step.init(net, torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9))
        state, _ = step(state, batch_on_the_host())
        searched = state.transform_states.get("auto_microbatch", {}).get("size", 0)
        return [param.detach().clone() for param in state.params.values()], searched

    with memory_limit(2**29):
        tried, size = run(auto_microbatch(initial_size=SAMPLES))
        assert 0 < size < SAMPLES
        by_hand, _ = run(size=size)
    assert all(torch.equal(a, b) for a, b in zip(tried, by_hand, strict=True))
