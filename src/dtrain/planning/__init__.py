"""Estimate the memory and communication of a training run before it starts, without its devices.

    workload = dt.planning.Workload(model=build_model, loss_fn=loss_fn, batch=make_batch, blocks=(Block,))
    estimate = dt.planning.estimate_memory(workload, world_size=64, microbatch_size=4)
    print(estimate.peak, estimate.peak_phase)

A simulated step runs on fake tensors with a fake process group, so it needs neither the memory nor the devices.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.planning.device_facts import DeviceFacts as DeviceFacts
    from dtrain.planning.device_facts import measure_device as measure_device
    from dtrain.planning.estimate import LargestMicrobatch as LargestMicrobatch
    from dtrain.planning.estimate import LibraryMemory as LibraryMemory
    from dtrain.planning.estimate import MemoryEstimate as MemoryEstimate
    from dtrain.planning.estimate import PlanProgress as PlanProgress
    from dtrain.planning.estimate import StrategyEstimate as StrategyEstimate
    from dtrain.planning.estimate import compare_strategies as compare_strategies
    from dtrain.planning.estimate import estimate_memory as estimate_memory
    from dtrain.planning.estimate import largest_microbatch as largest_microbatch
    from dtrain.planning.estimate import library_memory as library_memory
    from dtrain.planning.memory_trace import MemoryBreakdown as MemoryBreakdown
    from dtrain.planning.simulate import ParallelismConfig as ParallelismConfig
    from dtrain.planning.step_time import NETWORKS as NETWORKS
    from dtrain.planning.step_time import Accelerator as Accelerator
    from dtrain.planning.step_time import Network as Network
    from dtrain.planning.step_time import StepSeconds as StepSeconds
    from dtrain.planning.step_time import communication_seconds as communication_seconds
    from dtrain.planning.step_time import control_seconds as control_seconds
    from dtrain.planning.step_time import step_seconds as step_seconds
    from dtrain.planning.step_work import CollectiveTraffic as CollectiveTraffic
    from dtrain.planning.step_work import StepWork as StepWork
    from dtrain.planning.workload import Workload as Workload

__getattr__, __dir__ = attach(__name__, __file__)
