"""Peaks from torch's profiler, which sees the allocator itself: a second opinion on every count."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def profiled_peak(step: Callable[[], object], left: int = 0, tries: int = 10) -> int:
    """Return the most bytes that a step holds at once, above those held before it.

    The profiler sees this thread. A buffer that gloo's thread frees looks as if it were never freed, and then the peak is too
    high: such a look is repeated. ``left`` is the bytes that a step leaves behind for good.
    """
    for _ in range(tries):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
        changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for change in sorted(changes, key=lambda event: event.start_ns()):
            live += change.nbytes()
            peak = max(peak, live)
        if live == left:
            return peak
    raise AssertionError(f"the profiler has not seen a step whole in {tries} tries; the last one left {live} bytes")


def local_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List the tensors that exist before a step."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, torch.Tensor))]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held]
