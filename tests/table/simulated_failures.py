"""Faults of many ranks on a virtual network, and the ranks that the others name: rows of the truth table.

The rules are the library's own (``dtrain.dist.incident_protocol``), and so are the connections of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dtrain.dist.control_protocol import Layout, peers_of
from dtrain.dist.incident_protocol import BUSY, FAILED, ArrivalReport, Sign, StoreProtocol, mark_wait
from virtual_network import Reports, report_incident, run_reports

NODE_SIZE = 8
TIMEOUT_S = 600.0
GRACE_S = 5.0
SPREAD_S = 30.0


def spread(rank: int) -> float:
    """Return a time from 0 to ``SPREAD_S``, in no order of ranks."""
    return rank * 7919 % 1000 / 1000 * SPREAD_S


@dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """One row.

    Args:
        name: text of the row.
        raises: virtual time at which ranks raise an exception, by number of ranks.
        dies: virtual time at which ranks die.
        stopped: ranks that are stopped, and keep their connections.
        times_out: if True, the other ranks time out, spread over ``SPREAD_S``.
        broken: pairs of living ranks whose connection breaks.
        busy: function that returns True for ranks that compute.
    """

    name: str
    raises: Callable[[int], Mapping[int, float]] = lambda world: {}
    dies: Callable[[int], Mapping[int, float]] = lambda world: {}
    stopped: Callable[[int], Sequence[int]] = lambda world: ()
    times_out: bool = False
    broken: Callable[[int], Sequence[tuple[int, int]]] = lambda world: ()
    busy: Callable[[int], bool] = lambda rank: False


@dataclass(kw_only=True)
class SimulatedOutcome:
    """Result of a row.

    Args:
        culprits: ranks that may be named.
        living: number of ranks that neither fail nor are stopped.
        found: reports, requests and times.
        innocent: ranks that were named without a reason.
        unsaid: ranks whose report names no rank.
    """

    culprits: set[int]
    living: int
    found: Reports
    innocent: set[int] = field(default_factory=set)
    unsaid: set[int] = field(default_factory=set)


def some_nodes(world: int) -> range:
    """Return the ranks of node 1 of several."""
    return range(NODE_SIZE, 2 * NODE_SIZE)


SIMULATED = [
    SimulatedFault(name="a rank raises in its step", raises=lambda world: {world - 2: 1.0}),
    SimulatedFault(
        name="a tenth of the ranks raise, spread over 30 s",
        raises=lambda world: {rank: spread(rank) for rank in range(3, world, 10)},
        busy=lambda rank: rank % 3 == 0,
    ),
    SimulatedFault(name="ranks die, spread over 30 s", dies=lambda world: {rank: spread(rank) for rank in range(5, world, 50)}),
    SimulatedFault(name="all ranks of node 1 are killed", dies=lambda world: dict.fromkeys(some_nodes(world), 1.0)),
    SimulatedFault(
        name="ranks are stopped (SIGSTOP), and the others time out over 30 s",
        stopped=lambda world: sorted({3, 17 % world, world - 1}),
        times_out=True,
    ),
    SimulatedFault(
        name="ranks compute for too long, and the others time out over 30 s",
        stopped=lambda world: (),
        times_out=True,
        busy=lambda rank: rank in (3, 12),
    ),
    SimulatedFault(name="one connection between two living ranks breaks", broken=lambda world: [(0, NODE_SIZE)]),
    SimulatedFault(name="a rank closes its control channel", raises=lambda world: {2: 1.0}),
]


def simulate(fault: SimulatedFault, world: int) -> SimulatedOutcome:
    """Run a row on ``world`` virtual ranks."""
    raises, dies, stopped, broken = fault.raises(world), fault.dies(world), fault.stopped(world), fault.broken(world)
    slow = {rank for rank in range(world) if fault.busy(rank)} if fault.times_out else set()
    lost = {*dies, *stopped}
    failed_at = dict(raises)
    if fault.times_out:
        failed_at |= {rank: TIMEOUT_S + spread(rank) for rank in range(world) if rank not in lost | slow}

    def start(rank: int, peer: int | None) -> StoreProtocol[ArrivalReport | None]:
        if peer is None and rank in raises:
            sign = Sign(mark=FAILED, error=f"ValueError: on rank {rank}")
        else:
            waited_s = TIMEOUT_S if peer is None else TIMEOUT_S * 0.9 if fault.times_out else 1.0
            mark = BUSY if fault.busy(rank) else mark_wait(waited_s, TIMEOUT_S)
            sign = Sign(mark=mark, caller="step" if mark != BUSY else "", peer=peer)
        return report_incident("control/0", rank, world, sign, grace_s=GRACE_S)

    layouts = [Layout(rank, world, min(world, NODE_SIZE)) for rank in range(world)]
    reports = run_reports(
        start,
        failed_at,
        peers=lambda rank: peers_of(layouts[rank]),
        stopped=stopped,
        dead=dies,
        broken=dict.fromkeys(broken, 1.0),
    )
    culprits = {*raises, *lost, *slow, *(rank for pair in broken for rank in pair)}
    named = {rank: _named(report) for rank, report in reports.reports.items()}
    return SimulatedOutcome(
        culprits=culprits,
        living=world - len({*raises, *lost}),
        found=reports,
        innocent=set().union(*named.values()) - culprits,
        unsaid={rank for rank, ranks in named.items() if not ranks},
    )


def _named(report: ArrivalReport) -> set[int]:
    late = set() if report.missing or report.pairs else {*report.late, *report.broken}
    return {*report.missing, *(rank for pair in report.pairs for rank in pair), *late}
