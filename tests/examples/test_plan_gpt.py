"""The example of a workload: planned by name, as ``dtrain plan`` does."""

from pathlib import Path

import dtrain as dt
from dtrain.planning.workload import load_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_gpt.py"


def test_memory_estimate_accepts_the_gpt_example():
    sizes = {"layers": 2, "heads": 2, "dim": 32, "seq": 16, "vocab": 64}
    with load_workload(f"{EXAMPLE}:workload", sizes) as workload:
        plan = dt.planning.estimate_memory(workload, world_size=512, microbatch_size=4)
    assert plan.parameter_count == 2 * 64 * 32 + 2 * (12 * 32 * 32 + 2 * 32) + 32
    assert plan.peak_phase == "backward"
    assert {call.op for call in plan.traffic} == {"all_gather", "reduce_scatter", "all_reduce"}
