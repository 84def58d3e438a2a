"""Estimate the memory of a training run before it starts, without the machine.

    workload = dt.planning.Workload(model=build_model, loss_fn=loss_fn, batch=example_batch)
    estimate = dt.planning.estimate_memory(workload, ranks=64)
    print(estimate)

A simulated step runs on fake tensors with a fake process group, so no memory and no device is needed.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.planning.estimate import LargestMicrobatch as LargestMicrobatch
    from dtrain.planning.estimate import MemoryEstimate as MemoryEstimate
    from dtrain.planning.estimate import StrategyEstimate as StrategyEstimate
    from dtrain.planning.estimate import compare_strategies as compare_strategies
    from dtrain.planning.estimate import estimate_memory as estimate_memory
    from dtrain.planning.estimate import largest_microbatch as largest_microbatch
    from dtrain.planning.resource_usage import CollectiveTraffic as CollectiveTraffic
    from dtrain.planning.resource_usage import MemoryBreakdown as MemoryBreakdown
    from dtrain.planning.simulate import ParallelismConfig as ParallelismConfig
    from dtrain.planning.workload import Workload as Workload

__getattr__, __dir__ = attach(__name__, __file__)
