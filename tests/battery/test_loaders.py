"""Every loader keeps every contract; and for every contract there is a broken loader that it must detect."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dtrain as dt
from battery.loaders import BATCH, BROKEN, DATASETS, ROWS, SIZE, SLOW_ROWS, Row, ids, row
from dtrain.dist.init import get_dist_info

EPOCHS = 2
WORLD_SIZES = (1, 2, 3, 4)


def global_batches(loaders: list[dt.data.Loader], until: int | str) -> list[list[int]]:
    """Return the samples of all ranks together, batch by batch."""
    return [
        list(chain.from_iterable(map(ids, parts))) for parts in zip(*(loader.until(until) for loader in loaders), strict=True)
    ]


def group(made: Row, ranks: int) -> list[dt.data.Loader]:
    return [made.make(rank, ranks) for rank in range(ranks)]


def check_once(name: str) -> None:
    """Every epoch has each sample once (with ``tail="drop"`` none twice), in an order of its own if it is shuffled."""
    made = row(name)
    seen = list(chain.from_iterable(global_batches(group(made, 1), f"{EPOCHS}ep")))
    first, second = seen[: made.epoch()], seen[made.epoch() :]
    assert len(seen) == EPOCHS * made.epoch(), f"once: {name}: {len(seen)} samples"
    for epoch in (first, second):
        assert len(set(epoch)) == made.epoch(), f"once: {name}: a sample comes twice"
        assert set(epoch) <= set(range(SIZE))
    assert (first != second) == made.shuffle, f"once: {name}: the epochs have the same order"
    assert made.shuffle or first == list(range(made.epoch())), f"once: {name}: not in the order of the dataset"


def check_order(name: str, world_sizes: tuple[int, ...] = WORLD_SIZES) -> None:
    """Global batches are the same for every number of ranks and workers; ranks' shares differ by at most one sample."""
    made = row(name)
    expected = global_batches(group(made.plain(), 1), f"{EPOCHS}ep")
    for ranks in world_sizes:
        assert global_batches(group(made, ranks), f"{EPOCHS}ep") == expected, f"order: {name}: differs on {ranks} ranks"
        first = [len(ids(next(loader.until(1)))) for loader in group(made, ranks)]
        assert max(first) - min(first) <= 1, f"order: {name}: shares of {first}"


def check_resume(name: str, batch: int, before: int, after: int) -> None:
    """Stopped behind any batch and continued at another world size, a run sees the rest exactly."""
    made = row(name)
    expected = global_batches(group(made.plain(), 1), f"{EPOCHS}ep")
    first, second = group(made, before), group(made, after)
    head = global_batches(first, batch) if batch else []
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    batches = head + global_batches(second, f"{EPOCHS}ep")
    assert batches == expected, f"resume: {name}: behind batch {batch}, from {before} to {after} ranks"


def check_position(name: str) -> None:
    """The state is a few whole numbers, equal on all ranks, and counts delivered batches, not batches fetched ahead."""
    loaders = group(row(name), 2)
    streams = [loader.until(f"{EPOCHS}ep") for loader in loaders]
    for stream in streams:
        next(stream), next(stream)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1], f"position: {name}: differs between ranks"
    assert all(type(value) is int for value in states[0].values()), f"position: {name}: not a few whole numbers: {states[0]}"
    assert len(states[0]) <= 9, f"position: {name}: not a few whole numbers: {states[0]}"
    assert (states[0]["samples"], states[0]["batches"]) == (2 * BATCH, 2), f"position: {name}"
    for stream in streams:
        stream.close()


pytestmark = pytest.mark.sample(3, by="name")
each_row = pytest.mark.parametrize("name", ROWS)
slow = pytest.mark.parametrize("name", SLOW_ROWS)


def broken(contract: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, (breaks, _) in BROKEN.items() if breaks == contract])


@each_row
def test_each_sample_is_read_once_per_epoch(name):
    check_once(name)


@each_row
def test_global_batches_are_the_same_for_every_number_of_ranks(name):
    check_order(name)


@slow
def test_global_batches_are_the_same_with_workers(name):
    check_order(name, (2,))


@each_row
@given(batch=st.integers(0, 8), before=st.sampled_from(WORLD_SIZES), after=st.sampled_from(WORLD_SIZES))
@settings(max_examples=15, deadline=None)
def test_run_resumes_after_any_batch_on_any_rank_count(name, batch, before, after):
    check_resume(name, batch, before, after)


@slow
def test_run_with_workers_resumes_within_an_epoch(name):
    check_resume(name, 7, 1, 2)


@pytest.mark.parametrize("name", [*ROWS, *SLOW_ROWS])
def test_position_is_a_few_integers(name):
    check_position(name)


def handed_out(name: str) -> list[list[int]]:
    """The batches of this real rank."""
    made = row(name)
    mesh = dt.build_mesh()
    data = DATASETS[made.dataset]()
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=BATCH, seed=3, shuffle=made.shuffle, last_batch=made.tail)
    assert (loader._source.options.rank, loader._source.options.ranks) == (get_dist_info().rank, get_dist_info().world_size)
    return [ids(batch) for batch in loader.until(f"{EPOCHS}ep")]


@pytest.mark.costly
def test_process_ranks_get_the_batches_of_simulated_ranks(ranks):
    simulated = [[ids(batch) for batch in loader.until(f"{EPOCHS}ep")] for loader in group(row("list-shuffled-short"), 2)]
    assert ranks(2).run(handed_out, "list-shuffled-short") == simulated


@broken("once")
def test_sample_once_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"once: {name}: (a sample comes twice|the epochs have the same order)"):
        check_once(name)


@broken("order")
def test_order_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"order: {name}: differs on 2 ranks"):
        check_order(name)


@broken("resume")
def test_resume_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"resume: {name}: behind batch 2, from 1 to 2 ranks"):
        check_resume(name, 2, 1, 2)


@broken("position")
def test_position_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"position: {name}: not a few whole numbers"):
        check_position(name)


def test_every_contract_has_a_violating_case():
    assert {contract for contract, _ in BROKEN.values()} == {"once", "order", "resume", "position"}
