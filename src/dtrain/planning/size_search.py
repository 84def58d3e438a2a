"""Estimate steps of one layout by microbatch size, and find the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dtrain.planning.memory_trace import LinearTrace, MemoryBreakdown, StepPhase
from dtrain.planning.simulate import ParallelismConfig, SimulatedRun, StepUsage
from dtrain.planning.step_work import CollectiveTraffic, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory and communication of the rank with the largest shards in one step. Sizes are in bytes.

    Args:
        config: layout of the model.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: microbatches per step of a rank.
        parameter_count: elements of all parameters, over all ranks.
        peak: most bytes held at once.
        peak_phase: phase of the peak: ``"forward"``, ``"backward"`` or ``"update"``.
        peaks: most bytes held at once in each phase.
        at_rest: bytes of each part between steps. An asynchronous save copies parameters, optimizer and transforms to the host.
        at_peak: bytes of each part at the peak; they add up to the peak.
        max_by_part: most bytes of each part, at any time.
        traffic: collectives by kind, sorted by the bytes sent.
        batch_bytes: bytes of the rank's batch of one step.
        work: floating-point operations of a step, and memory traffic of the optimizer.
    """

    config: ParallelismConfig
    microbatch_size: int
    microbatches: int
    parameter_count: int
    peak: int
    peak_phase: StepPhase
    peaks: Mapping[StepPhase, int]
    at_rest: MemoryBreakdown
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown
    traffic: tuple[CollectiveTraffic, ...]
    batch_bytes: int
    work: StepWork

    @property
    def bytes_sent(self) -> int:
        """Bytes that a rank sends in a step, over all collectives."""
        return sum(each.bytes_sent for each in self.traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicrobatch:
    """Result of ``largest_microbatch``.

    Args:
        microbatch_size: samples; 0 if one sample does not fit.
        estimate: estimate for this size, or for one sample.
        memory: memory of the device, in bytes.
        sizes_tried: number of simulated sizes.
    """

    microbatch_size: int
    estimate: MemoryEstimate
    memory: int
    sizes_tried: int


class SizeEstimates:
    """Estimates of one layout by microbatch size.

    The traces of two simulated sizes give those of larger sizes, if the same operations ran with both.
    """

    def __init__(
        self,
        run: SimulatedRun,
        config: ParallelismConfig,
        microbatches: int,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self._run, self._config, self._microbatches, self._on_step = run, config, microbatches, on_step
        self._steps: dict[int, StepUsage] = {}
        self._linear: LinearTrace | None = None
        self._by_size: dict[int, MemoryEstimate] = {}

    @property
    def sizes_tried(self) -> int:
        """Number of simulated sizes."""
        return len(self._steps)

    def of(self, size: int) -> MemoryEstimate:
        """Return the estimate of ``size``, simulated or from the line through two simulated sizes."""
        if size not in self._by_size:
            if self._linear is None or size < max(self._steps):
                self.simulate(size)
            else:
                last = self._steps[max(self._steps)]
                self._by_size[size] = self._estimate(size, replace(last, trace=self._linear.at(size)))
        return self._by_size[size]

    def simulate(self, size: int) -> bool:
        """Simulate a step with ``size``. Return False, and forget the line, if the memory differs from the prediction."""
        if size in self._steps:
            return True
        predicted = self._by_size.get(size)
        if self._on_step is not None:
            self._on_step(size)
        self._steps[size] = self._run.step(size, self._microbatches)
        estimate = self._estimate(size, self._steps[size])
        is_right = predicted is None or _has_same_memory(predicted, estimate)
        if not is_right:
            self._linear = None
            self._by_size = {known: self._estimate(known, step) for known, step in self._steps.items()}
        self._by_size[size] = estimate
        if len(self._steps) == 2:
            self._linear = LinearTrace.between({known: step.trace for known, step in self._steps.items()})
        return is_right

    def _estimate(self, size: int, step: StepUsage) -> MemoryEstimate:
        memory = step.trace.memory()
        peak_phase = max(memory.peaks, key=lambda phase: memory.peaks[phase])
        return MemoryEstimate(
            config=self._config,
            microbatch_size=size,
            microbatches=self._microbatches,
            parameter_count=self._run.parameter_count,
            peak=memory.peaks[peak_phase],
            peak_phase=peak_phase,
            peaks=memory.peaks,
            at_rest=memory.at_rest,
            at_peak=memory.at_peak,
            max_by_part=memory.max_by_part,
            traffic=step.traffic,
            batch_bytes=step.batch_bytes,
            work=step.work,
        )


def _has_same_memory(one: MemoryEstimate, two: MemoryEstimate) -> bool:
    return (one.peaks, one.at_peak, one.max_by_part) == (two.peaks, two.at_peak, two.max_by_part)


def find_largest(estimates: SizeEstimates, memory: int, limit: int, max_size: int) -> LargestMicrobatch:
    """Return the largest size from 1 to ``max_size`` whose peak is within ``limit``. A step with that size is simulated.

    If the step differs from the prediction, the search begins again without predictions.
    """
    best = search_largest(estimates, limit, max_size)
    while not estimates.simulate(max(best, 1)):
        best = search_largest(estimates, limit, max_size)
    estimate = estimates.of(max(best, 1))
    return LargestMicrobatch(microbatch_size=best, estimate=estimate, memory=memory, sizes_tried=estimates.sizes_tried)


def search_largest(estimates: SizeEstimates, limit: int, max_size: int) -> int:
    """Return the largest size from 1 to ``max_size`` whose peak is within ``limit``; 0 if no size is.

    At each time of a step the live bytes are a linear function of the size, so their peak is a maximum of linear functions and
    convex. A line through two sizes that both fit, or that both do not fit, is below the peak outside of the two sizes. So a
    size that is too large for the line is too large. Each iteration tries the largest remaining size (Newton's method on a
    convex function), which meets each of the linear functions at most twice.
    """
    best, too_large, guess = 0, max_size + 1, 1
    # The last size that fits, and the last one that does not.
    last: dict[bool, int] = {}
    while best + 1 < too_large:
        fits = estimates.of(guess).peak <= limit
        if fits:
            best = guess
        else:
            too_large = guess
        if fits in last:
            low, high = sorted((last[fits], guess))
            low_peak = estimates.of(low).peak
            rise = estimates.of(high).peak - low_peak
            if rise > 0:
                first = low + (limit - low_peak) * (high - low) // rise + 1
                too_large = max(best + 1, min(too_large, first))
        last[fits] = guess
        guess = min(_SECOND_GUESS, too_large - 1) if guess == 1 else too_large - 1
    return best


# The size after 1. With 2, memory that does not depend on the size would hide more of the slope.
_SECOND_GUESS = 4
