"""Exchanges of the control plane on a virtual network, up to 4,096 ranks: results, costs, and the names of missing ranks."""

from __future__ import annotations

import math
from functools import partial

import pytest

from dtrain.dist.control_protocol import Layout, RowSpec, all_gather, count_rounds, gather, peers_of, reduce_rows
from dtrain.dist.incident_protocol import (
    BUSY,
    EARLY,
    FAILED,
    LOST,
    TIMED_OUT,
    WAITED,
    ArrivalReport,
    Sign,
    format_ranks,
    judge,
    mark_wait,
)
from table.simulated_failures import SIMULATED, simulate
from virtual_network import Network, report_incident, run_exchange, run_reports

LAYOUTS = [
    (world, size) for world in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 30) for size in range(1, world + 1) if world % size == 0
]
RECORD = RowSpec(12)


@pytest.mark.parametrize(("world", "node_size"), LAYOUTS)
def test_all_gather_returns_all_payloads_by_rank(world, node_size):
    payloads = [str(rank).encode() * (rank % 4) for rank in range(world)]
    exchange = run_exchange(lambda layout: all_gather(layout, payloads[layout.rank]), world, node_size)
    assert world == 1 or exchange.results == dict.fromkeys(range(world), payloads)


@pytest.mark.parametrize(("world", "node_size"), LAYOUTS)
def test_rounds_are_the_messages_in_sequence(world, node_size):
    network = Network(local_latency_s=1, latency_s=1000, cpu_s=0, bytes_per_s=math.inf)
    exchange = run_exchange(lambda layout: reduce_rows(layout, [1.0] * 12, RECORD), world, node_size, network=network)
    last, rounds = max(exchange.seconds.values(), default=0), count_rounds(world, node_size)
    law = rounds.local + 1000 * rounds.remote
    powers_of_two = node_size.bit_count() == 1 == (world // node_size).bit_count()
    assert last == law if powers_of_two else law / 2 < last <= law


@pytest.mark.parametrize(("world", "node_size"), [layout for layout in LAYOUTS if layout[0] > 1])
def test_gather_returns_all_payloads_on_one_rank(world, node_size):
    payloads = [f"rank {rank}".encode() for rank in range(world)]
    for dst in range(world):
        exchange = run_exchange(lambda layout, dst=dst: gather(layout, payloads[layout.rank], dst), world, node_size)
        assert exchange.results == {rank: payloads if rank == dst else None for rank in range(world)}


@pytest.mark.parametrize(("world", "node_size"), [layout for layout in LAYOUTS if layout[0] > 1])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_summary_of_several_nodes_equals_the_summary_of_all_rows(world, node_size, block):
    spec = RowSpec(3, compared=((0, 1), (2,)), block=block)
    for odd in (None, 0, world // 2, world - 1):
        rows = [(float(rank // block), 2.0, float(rank == odd)) for rank in range(world)]
        exchange = run_exchange(lambda layout, rows=rows: reduce_rows(layout, rows[layout.rank], spec), world, node_size)
        assert {summary for summary, _ in exchange.results.values()} == {spec.summarize(rows)}


def test_summary_finds_the_first_rank_that_differs_from_its_block():
    spec = RowSpec(2, compared=((0,), (1,)), block=4)
    rows = [(float(rank // 4 * 10), 0.0) for rank in range(16)]
    rows[6], rows[11] = (99.0, 0.0), (10.0, 7.0)
    for node_size in (1, 2, 4, 8, 16):
        exchange = run_exchange(lambda layout: reduce_rows(layout, rows[layout.rank], spec), 16, node_size)
        assert {summary.changes for summary, _ in exchange.results.values()} == {(6.0, 11.0)}


@pytest.mark.parametrize(("world", "node_size"), [*LAYOUTS, (512, 8), (512, 1), (1000, 8), (520, 4)])
def test_ranks_are_connected_to_a_logarithmic_number_of_ranks(world, node_size):
    used = run_exchange(lambda layout: reduce_rows(layout, [1.0] * 12, RECORD), world, node_size).peers
    gathered = run_exchange(lambda layout: gather(layout, b"x", world - 1), world, node_size).peers
    for rank in range(0, world, max(1, world // 64)):
        layout = Layout(rank, world, node_size)
        peers = peers_of(layout)
        assert used[rank] | gathered[rank] <= peers
        assert all(rank in peers_of(Layout(peer, world, node_size)) for peer in peers)
        assert len(peers) <= 2 * math.ceil(math.log2(node_size)) + math.ceil(math.log2(layout.num_nodes)) + 1


# Bars of a record, in simulated seconds; a message takes a rank 15 microseconds to send or to receive.
@pytest.mark.parametrize(
    ("world", "latency_s", "at_most_s"), [(512, 25e-6, 1e-3), (4096, 25e-6, 2e-3), (512, 100e-6, 2e-3), (4096, 100e-6, 3e-3)]
)
def test_record_takes_few_messages_in_sequence(world, latency_s, at_most_s):
    network = Network(latency_s=latency_s)
    exchange = run_exchange(lambda layout: reduce_rows(layout, [1.0] * 12, RECORD), world, 8, network=network)
    assert {summary.sums for summary, _ in exchange.results.values()} == {(float(world),) * 12}
    assert max(exchange.seconds.values()) <= at_most_s
    assert max(exchange.bytes.values()) <= 8000


@pytest.mark.parametrize("fault", SIMULATED, ids=lambda fault: fault.name)
@pytest.mark.parametrize("world", [16, 512, pytest.param(4096, marks=pytest.mark.slow)])
def test_simulated_fault_names_no_innocent_rank(fault, world):
    outcome = simulate(fault, world)
    assert outcome.innocent == outcome.unsaid == set()
    # A rank that raises later may have waited before.
    assert len(outcome.found.reports) >= outcome.living
    assert outcome.found.requests <= 9 * world + 200


def test_failures_spread_over_30_s_name_no_innocent_of_4096_ranks():
    (fault,) = (fault for fault in SIMULATED if fault.name == "a tenth of the ranks raise, spread over 30 s")
    outcome = simulate(fault, 4096)
    assert outcome.innocent == outcome.unsaid == set()
    assert len(outcome.found.reports) >= outcome.living


def test_innocent_rank_of_a_report_is_detected():
    """Without the connections of the control plane a rank that still waits gives no sign."""
    outcome = run_reports(partial(report, 8), {0: 600.0, 1: 601.0}, stopped=[7])
    assert outcome.reports[0].missing == list(range(2, 8))


def report(world: int, rank: int, peer: int | None, *, waited_s: float = 600.0, mark: int | None = None) -> object:
    mark = mark_wait(waited_s, 600.0) if mark is None else mark
    sign = Sign(mark=mark, caller="step", error="ValueError: disk full" if mark == FAILED else "", peer=peer)
    return report_incident("control/7", rank, world, sign, grace_s=5.0)


@pytest.mark.parametrize("world", [2, 25, 512, 4096])
def test_missing_ranks_are_named_without_a_mistake(world):
    missing = sorted({rank for rank in (3, 17, *range(40, 48), 1000, 4095) if rank < world} or {1})
    node_size = min(world, 8) if world != 25 else 5
    stuck = run_exchange(lambda layout: reduce_rows(layout, [1.0] * 12, RECORD), world, node_size, missing=missing)
    assert len(stuck.results) == 0
    survivors = [rank for rank in range(world) if rank not in missing]
    failed_at = {rank: 600.0 + rank * 7919 % 1000 / 1000 for rank in survivors}
    # The first missing rank says why it left, and the others say nothing. Then all ranks time out.
    failed_at[missing[0]] = 599.0

    def start(rank: int, peer: int | None) -> object:
        return report(world, rank, peer, mark=FAILED if rank == missing[0] else None)

    outcome = run_reports(start, failed_at, stopped=missing[1:])
    assert outcome.reports.keys() == set(survivors)
    expected = ArrivalReport(
        missing=missing,
        silent=missing[1:],
        late=[],
        timed_out=True,
        notes={missing[0]: "ValueError: disk full"},
        callers=outcome.reports[survivors[0]].callers,
        pairs=[],
    )
    assert all(seen == expected for seen in outcome.reports.values())
    assert outcome.requests <= 9 * world + 200
    assert outcome.last < 620


def test_late_rank_is_told_from_a_missing_rank():
    failed_at = {**dict.fromkeys(range(49), 600.0), 49: 602.0}
    outcome = run_reports(lambda rank, peer: report(50, rank, peer, waited_s=0.1 if rank == 49 else 600.0), failed_at)
    assert all((seen.missing, seen.late) == ([], [49]) for seen in outcome.reports.values())


def test_rank_that_comes_after_the_report_is_late():
    failed_at = {**dict.fromkeys(range(4), 600.0), 4: 640.0}
    outcome = run_reports(lambda rank, peer: report(5, rank, peer, waited_s=0.1 if rank == 4 else 600.0), failed_at)
    seen = [(one.missing, one.late) for _, one in sorted(outcome.reports.items())]
    assert seen == [([4], [])] * 4 + [([], [4])]


def test_places_of_ranks_are_reported():
    def start(rank: int, peer: int | None) -> object:
        sign = Sign(mark=mark_wait(600, 600), caller="leaving init_dist" if rank == 2 else "step")
        return report_incident("control/7", rank, 4, sign, grace_s=5)

    reports = run_reports(start, dict.fromkeys(range(4), 600.0)).reports
    assert all(sorted(report_of_rank.callers.values()) == ["leaving init_dist", "step"] for report_of_rank in reports.values())
    assert all(report_of_rank.callers[2] == "leaving init_dist" for report_of_rank in reports.values())


def judged(marks: list[int], **given: object) -> ArrivalReport:
    return judge(marks, **{"errors": {}, "peers": {}, "broken": {}, "callers": {}, **given})


def test_all_failed_ranks_are_named_and_equal_errors_are_listed_once():
    errors = {rank: f"ValueError: {'disk' if rank % 2 else 'memory'} full" for rank in range(9)}
    outcome = judged([FAILED] * 9 + [WAITED], errors=errors)
    assert (outcome.missing, outcome.silent) == (list(range(9)), [])
    assert outcome.notes == {0: "ValueError: memory full", 1: "ValueError: disk full"}


def test_cause_is_found_from_the_signs_of_all_ranks():
    # A dead rank, which two others lost.
    assert judged([LOST, 0, LOST], peers={0: 1, 2: 1}).missing == [1]
    # A connection between living ranks.
    outcome = judged([LOST, WAITED, LOST, BUSY], peers={0: 2, 2: 0})
    assert (outcome.missing, outcome.pairs) == ([], [(0, 2)])
    # A rank that computes is no cause, except if other ranks have waited for the whole timeout.
    assert judged([EARLY, WAITED, BUSY]).missing == []
    assert judged([EARLY, TIMED_OUT, BUSY]).missing == [2]
    # A collective that failed on one rank, and no other fault.
    assert judged([LOST, WAITED], broken={0: "RuntimeError: no"}).broken == {0: "RuntimeError: no"}
    assert judged([LOST, WAITED, 0], broken={0: "RuntimeError: no"}).broken == {}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "[]"),
        ([3], "[3]"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([17, 3, *range(40, 48)], "[3, 17, 40-47]"),
        (range(0, 4096, 2), "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 2038 more]"),
        (range(4096), "[0-4095]"),
    ],
)
def test_list_of_ranks_fits_a_line(ranks, text):
    assert format_ranks(ranks) == text
