"""Real memory of a real GPU: the size found against the largest that works by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from dtrain.errors import OutOfMemoryError
from dtrain.step.auto_microbatch import auto_microbatch, find_microbatch_size
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

SAMPLES, WIDTH = 4096, 4096


def loss_fn(net: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(total=net(batch).square().sum(), weight=len(batch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_found_size_is_near_the_manual_maximum():
    """A sample takes about 130 MB of activations: 4096 of them do not fit on any GPU of today."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)]
    net = nn.Sequential(*blocks).cuda()
    batch = torch.randn(SAMPLES, 256, WIDTH, pin_memory=True)  # stays on the host: microbatches are moved
    state = compose_step(loss_fn).init(net, torch.optim.SGD(net.parameters(), lr=1e-3))
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
        step = compose_step(loss_fn, transforms, grad=partial(microbatch_step, microbatch_size=size))
        state = step.init(net, torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9))
        batch = torch.randn(SAMPLES, 256, WIDTH, generator=torch.Generator().manual_seed(1))
        state, _ = step(state, batch)
        searched = state.transform_states.get("auto_microbatch", {}).get("size", 0)
        return [param.detach().clone() for param in state.params.values()], searched

    tried, size = run(auto_microbatch(initial_size=SAMPLES))
    assert 0 < size < SAMPLES
    by_hand, _ = run(size=size)
    assert all(torch.equal(a, b) for a, b in zip(tried, by_hand, strict=True))
