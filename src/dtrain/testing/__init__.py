"""Test distributed code: run real ranks that never hang, inject faults, count collectives and host syncs.

    def collectives_of_a_step():
        step, state = new_run()
        with dt.testing.count_collectives() as records:
            step(state, torch.ones(2, 4))
        return records.count(op="reduce_scatter")

    def test_one_reduction_per_unit():
        assert dt.testing.run_ranks(collectives_of_a_step, 2) == [3, 3]

Functions run on real ranks at the top level of a file. ``inject_fault`` and ``memory_budget`` test failures.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.testing.checks import MemoryBudget as MemoryBudget
    from dtrain.testing.checks import check_loss_fn as check_loss_fn
    from dtrain.testing.checks import memory_budget as memory_budget
    from dtrain.testing.counters import CollectiveCall as CollectiveCall
    from dtrain.testing.counters import CollectiveRecords as CollectiveRecords
    from dtrain.testing.counters import HostSync as HostSync
    from dtrain.testing.counters import HostSyncRecords as HostSyncRecords
    from dtrain.testing.counters import count_collectives as count_collectives
    from dtrain.testing.counters import count_host_syncs as count_host_syncs
    from dtrain.testing.fault_injection import FaultPoint as FaultPoint
    from dtrain.testing.fault_injection import inject_fault as inject_fault
    from dtrain.testing.ranks import Ranks as Ranks
    from dtrain.testing.ranks import run_ranks as run_ranks

__getattr__, __dir__ = attach(__name__, __file__)
