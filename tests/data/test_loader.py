"""The loader: each sample once per epoch in one order, whatever the ranks, the workers, and the number of resumes."""

import functools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.loader import Loader, build_loader
from dtrain.data.sampler import ElasticSampler
from dtrain.errors import CheckpointMismatchError, ConfigError


class Numbers:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def loader(size=23, batch=5, rank=0, ranks=1, workers=0, seed=0, tail="short", shuffle=True) -> Loader:
    return Loader(
        Numbers(size),
        sampler=ElasticSampler(size=size, seed=seed, shuffle=shuffle),
        global_batch_size=batch,
        rank=rank,
        ranks=ranks,
        workers=workers,
        collate=torch.stack,
        tail=tail,
    )


def order(length, **options) -> list[list[int]]:
    return [batch.tolist() for batch in loader(**options).until(length)]


def test_every_epoch_has_each_sample_once_in_another_order():
    batches = order("3ep")
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3] * 3
    epochs = [functools.reduce(operator.iadd, batches[start : start + 5], []) for start in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_drop_leaves_the_short_batch_out():
    assert [len(batch) for batch in order("2ep", tail="drop")] == [5, 5, 5, 5] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_global_batches_are_the_same_for_every_number_of_ranks(ranks):
    parts = [order("2ep", rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [functools.reduce(operator.iadd, batch, []) for batch in zip(*parts, strict=True)] == order("2ep")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_order(workers):
    assert order("2ep", workers=workers) == order("2ep")


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 12),
    tail=st.sampled_from(["short", "drop"]),
    seed=st.integers(0, 3),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_any_chain_of_resumes_on_any_ranks_sees_the_same_samples(size, batch, tail, seed, legs):
    """Ranks are simulated by argument; each leg runs some batches on some ranks and hands its state to the next one."""
    if tail == "drop" and size < batch:
        tail = "short"
    options = {"size": size, "batch": batch, "tail": tail, "seed": seed}
    total = sum(steps for steps, _ in legs)
    seen, state = [], None
    for steps, ranks in legs:
        group = [loader(rank=rank, ranks=ranks, **options) for rank in range(ranks)]
        for member in group:
            if state is not None:
                member.load_state_dict(state)
        until = group[0].position.batches + steps
        streams = [member.until(until) for member in group]
        seen += [functools.reduce(operator.iadd, (part.tolist() for part in parts), []) for parts in zip(*streams, strict=True)]
        states = [member.state_dict() for member in group]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert seen == order(total, **options)


def test_position_counts_what_was_handed_out_not_what_workers_fetched():
    source = loader(workers=2)
    stream = source.until("1ep")
    next(stream)
    next(stream)
    assert source.state_dict() == {"epoch": 0, "samples": 10, "batches": 2, "size": 23, "seed": 0, "shuffle": 1}
    stream.close()


def test_the_batch_size_may_change_in_the_middle():
    first, second = loader(batch=5), loader(batch=4)
    head = [batch.tolist() for batch in first.until(2)]
    second.load_state_dict(first.state_dict())
    tail = [batch.tolist() for batch in second.until(6)]
    assert functools.reduce(operator.iadd, head + tail, []) == functools.reduce(operator.iadd, order("1ep"), [])
    assert second.position.epoch == 1


def test_until_is_counted_from_the_start_of_the_run():
    source = loader()
    assert len(list(source.until("7ba"))) == 7
    assert list(source.until(7)) == []
    assert len(list(source.until("2ep"))) == 3
    assert source.position.epoch == 2


@pytest.mark.parametrize(("length", "steps"), [("3ep", 15), (4, 4), ("23sp", 5), ("25sp", 6), ("46sp", 10)])
def test_total_steps(length, steps):
    assert loader().total_steps(length) == steps
    assert len(order(length)) == steps


def test_units_that_a_loader_cannot_count_are_refused():
    with pytest.raises(ConfigError, match="cannot count steps in 'tok' \\(100tok\\)"):
        loader().total_steps("100tok")


def test_one_pass_leaves_the_position():
    source = loader()
    next(source.until(1))
    before = source.state_dict()
    assert sorted(functools.reduce(operator.iadd, (batch.tolist() for batch in source.one_pass()), [])) == list(range(23))
    assert source.state_dict() == before


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    order("1ep")
    order("1ep", workers=1)
    assert torch.get_rng_state().equal(before)


def test_a_rank_without_samples_gets_an_empty_batch_of_the_right_kind():
    batches = order("1ep", size=5, batch=4, rank=2, ranks=3)
    assert [len(batch) for batch in batches] == [1, 0]
    last = list(loader(size=5, batch=4, rank=2, ranks=3).until("1ep"))[-1]
    assert (last.shape, last.dtype) == (torch.Size([0]), torch.int64)


@pytest.mark.parametrize("options", [{"size": 24}, {"seed": 1}, {"shuffle": False}])
def test_a_position_in_other_data_is_refused(options):
    with pytest.raises(CheckpointMismatchError, match=f"the saved position was in a dataset with {next(iter(options))}="):
        loader(**options).load_state_dict(loader().state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, got 0"),
        ({"global_batch_size": 2.0}, "global_batch_size must be a whole number of at least 1, got 2.0"),
        ({"workers": -1}, "workers must be a whole number of at least 0, got -1"),
        ({"tail": "wrap"}, "tail must be 'short' or 'drop', got 'wrap'"),
        ({"tail": "drop", "global_batch_size": 4}, "3 samples are less than one global batch of 4; use tail='short'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_loader(Numbers(3), **{"global_batch_size": 2, "seed": 0, **options})


def test_an_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="the dataset has no samples"):
        build_loader(Numbers(0), global_batch_size=2, seed=0)


def test_a_dataset_that_fetches_many_at_once_is_asked_to():
    class Many(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(index) for index in indices]

        def __getitem__(self, index):
            raise AssertionError("one by one")

    loader = build_loader(Many(4), global_batch_size=2, seed=0, shuffle=False)
    assert [batch.tolist() for batch in loader.until("1ep")] == [[0, 1], [2, 3]]
