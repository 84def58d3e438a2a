"""For tests of distributed code: real ranks that never hang, faults on purpose, and counters of what code costs."""

from dtrain.testing.budget import MemoryBudget, memory_budget
from dtrain.testing.collectives import Collective, SeenCollectives, count_collectives
from dtrain.testing.faults import FaultPoint, fault
from dtrain.testing.host_syncs import HostSync, SeenHostSyncs, count_host_syncs
from dtrain.testing.losses import check_loss_fn
from dtrain.testing.ranks import Ranks, run_ranks

__all__ = [
    "Collective",
    "FaultPoint",
    "HostSync",
    "MemoryBudget",
    "Ranks",
    "SeenCollectives",
    "SeenHostSyncs",
    "check_loss_fn",
    "count_collectives",
    "count_host_syncs",
    "fault",
    "memory_budget",
    "run_ranks",
]
