"""The loader: each sample once per epoch in one order, for any number of ranks, workers and resumes."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dtrain.data.batch import get_batch_infos
from dtrain.data.loader import Loader, build_loader
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError
from dtrain.schedules.clock import EpochPosition
from dtrain.schedules.durations import RunLength
from measure import count_calls
from samples import Numbers, Stream, Troubled, fail

# Calls of an epoch of 16 batches beyond those of a loop with torch's ``default_collate``, with Python 3.11.
BEYOND_HAND = 2014


def loader(size=23, batch=5, rank=0, ranks=1, workers=0, seed=0, last_batch="short", shuffle=True) -> Loader:
    made = build_loader(
        Numbers(size), global_batch_size=batch, num_workers=workers, seed=seed, last_batch=last_batch, shuffle=shuffle
    )
    made._source.options = replace(made._source.options, rank=rank, ranks=ranks)
    return made


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def order(length, **options) -> list[list[int]]:
    return [batch.tolist() for batch in loader(**options).until(length)]


def test_each_epoch_has_each_sample_once_in_a_new_order():
    batches = order("3ep")
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3] * 3
    epochs = [flat(batches[start : start + 5]) for start in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


class Mappings(Numbers):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "x": torch.zeros(4)}


def test_batch_of_small_mappings_makes_no_more_calls_than_before():
    dataset = Mappings(16 * 64)
    source = build_loader(dataset, global_batch_size=64, seed=0)

    def by_hand() -> None:
        for indices in torch.randperm(len(dataset)).split(64):
            default_collate([dataset[index] for index in indices.tolist()])

    def ours() -> None:
        for _ in source:
            pass

    ours()
    assert count_calls(ours) - count_calls(by_hand) <= 1.1 * BEYOND_HAND


def test_drop_omits_the_incomplete_last_batch():
    assert [len(batch) for batch in order("2ep", last_batch="drop")] == [5, 5, 5, 5] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_global_batches_are_the_same_for_every_number_of_ranks(ranks):
    parts = [order("2ep", rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [flat(batch) for batch in zip(*parts, strict=True)] == order("2ep")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_order(workers):
    assert order("2ep", workers=workers) == order("2ep")


def test_position_counts_returned_samples_not_prefetched_samples():
    source = loader(workers=2)
    stream = source.until("1ep")
    next(stream)
    next(stream)
    position = {"epoch": 0, "samples": 10, "batches": 2, "total": 10}
    state = source.state_dict()
    assert state == {"version": 1, **position, "size": 23, "seed": 0, "shuffle": 1, "data": state["data"]}
    assert all(isinstance(value, int) for value in state.values())
    stream.close()


def test_batch_size_may_change_within_an_epoch():
    first, second = loader(batch=5), loader(batch=4)
    head = [batch.tolist() for batch in first.until(2)]
    second.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in second.until(6)]
    assert flat(head + rest) == flat(order("1ep"))
    assert second.position.epoch == 1


@pytest.mark.parametrize("last_batch", ["short", "drop"])
@pytest.mark.parametrize(("before", "after"), [(2, 10), (10, 2), (5, 4)])
def test_epochs_are_counted_in_samples_when_the_batch_size_changes(before, after, last_batch):
    first, second = loader(size=20, batch=before, last_batch=last_batch), loader(size=20, batch=after, last_batch=last_batch)
    seen = flat(batch.tolist() for batch in first.until("1ep"))
    second.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in second.until("3ep")]
    assert len(rest) == 2 * 20 // after
    assert sorted(seen + flat(rest)) == sorted(list(range(20)) * 3)


def test_position_past_the_epoch_end_continues_with_the_next_epoch():
    first, second = loader(size=11, batch=1, last_batch="drop"), loader(size=11, batch=2, last_batch="drop")
    list(first.until(10))
    second.load_state_dict(first.state_dict())
    assert len(list(second.until("2ep"))) == 5


def test_until_accepts_a_number_of_samples():
    source = loader()
    assert sum(len(batch) for batch in source.until("30sp")) == 33  # the batch that crosses 30 is whole: 23 + 5 + 5
    assert list(source.until("33sp")) == []


def test_concurrent_loops_over_one_loader_are_refused():
    source = loader()
    first = source.until("1ep")
    next(first)
    next(source.until("1ep"))
    with pytest.raises(ConfigError, match="another loop moved the position during this loop"):
        next(first)


def test_epoch_end_is_known_during_its_last_batch():
    source = loader(size=10, batch=5)
    assert [get_batch_infos(batch)[0].ends_epoch for batch in source.until("2ep")] == [False, True, False, True]
    assert source._last_batch_info.end == EpochPosition(2, 0)
    assert get_batch_infos(next(source.one_epoch())) == [], "an evaluation is in no epoch of the run"


def test_until_is_counted_from_the_start_of_the_run():
    source = loader()
    assert len(list(source.until("7ba"))) == 7
    assert list(source.until(7)) == []
    assert len(list(source.until("2ep"))) == 3
    assert source.position.epoch == 2


def test_loader_converts_between_units_of_the_run_length():
    length = loader().run_length("2ep")
    assert length == RunLength(total="2ep", steps_per_epoch=loader().steps_per_epoch(), samples_per_step=5)
    assert length.steps() == loader().total_steps("2ep")
    for count in (loader().run_length, loader().total_steps):
        with pytest.raises(ConfigError, match=r"loader: cannot count steps in 'tok' \(100tok\)"):
            count("100tok")


@pytest.mark.parametrize(("length", "total"), [("20sp", "20sp"), ("23sp", "23sp"), ("230sp", "50ba")])
def test_run_length_in_samples_equals_the_loader_step_count(length, total):
    """Each epoch of 23 samples is 5 steps, the last one of 3 samples; by samples alone it would be 4.6."""
    run_length = loader().run_length(length)
    assert run_length.steps() == loader().total_steps(length)
    assert str(run_length.total) == total


@pytest.mark.parametrize(("length", "steps"), [("3ep", 15), (4, 4), ("23sp", 5), ("25sp", 6), ("46sp", 10)])
def test_total_steps_equals_the_number_of_batches(length, steps):
    assert loader().total_steps(length) == steps
    assert len(order(length)) == steps


def test_one_epoch_does_not_change_the_position():
    source = loader()
    next(source.until(1))
    before = source.state_dict()
    assert sorted(flat(batch.tolist() for batch in source.one_epoch())) == list(range(23))
    assert source.state_dict() == before


def test_global_random_generator_is_unchanged():
    before = torch.get_rng_state()
    order("1ep")
    order("1ep", workers=1)
    assert torch.get_rng_state().equal(before)


def test_rank_without_samples_gets_an_empty_batch_of_equal_structure():
    batches = order("1ep", size=5, batch=4, rank=2, ranks=3)
    assert [len(batch) for batch in batches] == [1, 0]
    last = list(loader(size=5, batch=4, rank=2, ranks=3).until("1ep"))[-1]
    assert (last.shape, last.dtype) == (torch.Size([0]), torch.int64)


def test_dataset_of_a_different_size_is_refused_unless_allowed():
    state = loader().state_dict()
    with pytest.raises(CheckpointMismatchError, match=r"which had 23 samples; this one has 24 .*allow_data_change=True"):
        loader(size=24).load_state_dict(state)
    allowed = build_loader(Numbers(24), global_batch_size=5, seed=0, allow_data_change=True)
    allowed.load_state_dict({**state, "samples": 15})
    assert allowed.position.samples == 15


@pytest.mark.parametrize("options", [{"seed": 1}, {"shuffle": False}])
def test_position_of_a_different_order_is_refused(options):
    with pytest.raises(CheckpointMismatchError, match=f"the saved position was in a dataset with {next(iter(options))}="):
        loader(**options).load_state_dict(loader().state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1, got 0"),
        ({"global_batch_size": 2.0}, "global_batch_size must be an integer of at least 1, got 2.0"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"dataset": Numbers(0)}, "the dataset has no samples"),
        ({"last_batch": "wrap"}, "last_batch must be 'short', 'drop' or 'pad', got 'wrap'"),
        (
            {"last_batch": "drop", "global_batch_size": 4},
            "3 samples are less than one global batch of 4. Use last_batch='short'",
        ),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_loader(**{"dataset": Numbers(3), "global_batch_size": 2, "seed": 0, **options})


def without_a_mesh() -> str:
    try:
        build_loader(Numbers(8), global_batch_size=4, seed=0)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_several_ranks_need_a_mesh(ranks):
    assert "2 ranks need a mesh. Pass mesh=" in ranks(2).run(without_a_mesh)[0]


def test_loader_uses_getitems_of_the_dataset():
    class Many(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor(index) for index in indices]

        def __getitem__(self, index):
            raise AssertionError("one by one")

    loader = build_loader(Many(4), global_batch_size=2, seed=0, shuffle=False)
    assert [batch.tolist() for batch in loader.until("1ep")] == [[0, 1], [2, 3]]


def test_samples_skipped_in_the_loop_are_not_read():
    source, seen = build_loader(Troubled(23, 12, fail), global_batch_size=5, seed=0, shuffle=False), []
    for batch in source.until("1ep"):
        seen.append(batch.tolist())
        if len(seen) == 2:
            source.skip(5)
    assert seen == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [15, 16, 17, 18, 19], [20, 21, 22]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_returns_nothing_is_refused(workers):
    source = build_loader(Numbers(8), global_batch_size=2, seed=0, collate=forgetful, num_workers=workers)
    with pytest.raises(DataError, match=r"loader: .*collate: the function returned None"):
        list(source.until("1ep"))


def forgetful(samples):
    return None if 3 in [int(sample) for sample in samples] else torch.stack(samples)


class Announced(Numbers):
    def prefetch(self, indices):
        raise LookupError("no\nsuch shard")


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_prefetch_raises_a_one_line_error(workers):
    source = build_loader(
        Announced(8), global_batch_size=2, seed=0, num_workers=workers, start_method="fork" if workers else None
    )
    with pytest.raises(DataError) as caught:
        list(source.until("1ep"))
    assert str(caught.value) == "loader: prefetch of Announced: LookupError: no such shard"


def test_loader_error_joins_exception_notes_into_one_line():
    class Noted(Numbers):
        def __getitem__(self, index):
            error = ValueError("torn")
            error.add_note("first\nsecond")
            raise error

    with pytest.raises(DataError) as caught:
        list(build_loader(Noted(4), global_batch_size=2, seed=0, shuffle=False).until("1ep"))
    assert str(caught.value) == "loader: first second, sample 0: ValueError: torn"


@pytest.mark.parametrize("last_batch", ["short", "drop", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_plain_loop_is_the_rest_of_this_epoch(last_batch, shuffle):
    options = {"size": 23, "batch": 5, "last_batch": last_batch, "shuffle": shuffle}
    whole = order("3ep", **options)
    per_epoch = len(whole) // 3
    source = loader(**options)
    seen = [next(iter(source)).tolist()]
    for epoch in range(3):
        lengths, batches = zip(*((len(source), batch.tolist()) for batch in source), strict=True)
        assert set(lengths) == {len(batches)} == {len(source)}
        assert (len(batches), source.state_dict()["epoch"]) == (per_epoch - (epoch == 0), epoch + 1)
        seen += batches
    assert (seen, source.steps_per_epoch()) == (whole, per_epoch)


def test_plain_loop_resumes_from_a_checkpoint_and_from_until():
    whole = order("2ep")
    source, resumed = loader(), loader()
    assert [next(source.until("1ep")).tolist() for _ in range(2)] == whole[:2]
    resumed.load_state_dict(source.state_dict())
    assert len(resumed) == 3
    assert [batch.tolist() for batch in resumed] == whole[2:5]
    assert [batch.tolist() for batch in resumed.until("2ep")] == whole[5:]


def test_loader_length_is_the_number_of_batches_of_a_plain_loop():
    assert len(loader(size=10, batch=4)) == 3
    assert len(loader(size=10, batch=4, last_batch="drop")) == 2
    growing = build_loader(Numbers(10), global_batch_size=lambda batch: batch + 1, seed=0)
    for expected in (4, 2, 2):
        assert [len(growing) for _ in growing] == [expected] * expected
        assert len(growing) == expected
    source = loader(size=10, batch=4)
    assert list(source)
    assert len(source) == 3
    assert next(source.until("2ep")) is not None
    assert len(source) == 2
    skipped = loader(size=10, batch=4)
    skipped.skip(5)
    assert len(skipped) == len(list(skipped)) == 2


def test_plain_loop_after_a_load_says_which_epoch_of_the_run_it_is(capsys):
    source, resumed = loader(), loader()
    assert list(source.until("7ba"))
    resumed.load_state_dict(source.state_dict())
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert list(resumed)
    line = 'dtrain: loader: epoch 2 of this run continues; until("2ep") counts the epochs of the run\n'
    assert capsys.readouterr().err == line
    source = loader()
    source.load_state_dict(resumed.state_dict())
    assert len(list(source)) == 5
    assert capsys.readouterr().err == line.replace("continues", "begins").replace("epoch 2", "epoch 4").replace("2ep", "4ep")
    source.load_state_dict(resumed.state_dict())
    assert list(source.until("4ep"))
    assert list(source)
    assert capsys.readouterr().err == ""


def test_length_of_an_iterable_dataset_is_a_type_error_so_that_list_works():
    stream = build_loader(Stream(7), global_batch_size=3, seed=0, shuffle=False)
    with pytest.raises(ConfigError, match=r"loader.len: the dataset has no length. Count in batches") as caught:
        len(stream)
    assert isinstance(caught.value, TypeError)
    assert stream, "which has no length, and is there"
    assert [batch.tolist() for batch in list(stream)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert stream.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("reached", "again", "line"),
    [
        ("3ep", "3ep", '3ep was reached at batch 15; until("6ep") would go on'),
        ("3ep", "2ep", '2ep was reached by batch 15; until("4ep") would go on'),
        ("3ep", "4ba", '4ba was reached by batch 15; until("16ba") would go on'),
        ("10ba", "10ba", '10ba was reached at batch 10; until("20ba") would go on'),
        ("22sp", "22sp", '22sp was reached by batch 5; until("44sp") would go on'),
    ],
)
def test_complete_run_says_how_to_go_on(reached, again, line, capsys):
    source = loader()
    assert list(source.until(reached))
    assert capsys.readouterr().err == "", "a run that goes on says nothing"
    assert list(source.until(again)) == []
    assert capsys.readouterr().err == f"dtrain: until: {line}\n"
    assert next(source.until(line.split('"')[1])) is not None, "the line is right"


def test_a_dict_of_tensors_is_a_dataset_of_rows():
    data = {"x": torch.arange(6.0)[:, None], "y": torch.arange(6)}
    source = build_loader(data, global_batch_size=4, seed=0)
    seen = list(source.one_epoch())
    assert [batch["x"].shape for batch in seen] == [(4, 1), (2, 1)]
    assert sorted(torch.cat([batch["y"] for batch in seen]).tolist()) == list(range(6))
    assert all(torch.equal(batch["x"][:, 0], batch["y"].float()) for batch in seen)
    listed = build_loader(data, global_batch_size=6, seed=0, shuffle=False, collate=list)
    assert [sample["y"].item() for sample in next(listed.one_epoch())] == list(range(6))
    numbered = build_loader({0: {"x": torch.tensor(1)}, 1: {"x": torch.tensor(2)}}, global_batch_size=2, seed=0, shuffle=False)
    assert next(numbered.one_epoch())["x"].tolist() == [1, 2], "samples by number are a dataset as they are"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, r"\{'x': \[3\], 'y': \[2\]\}"),
        ({"x": torch.zeros(3), "names": ["a", "b", "c"]}, r"\{'x': \[3\], 'names': 'list'\}"),
        ({"x": torch.tensor(1.0)}, r"\{'x': \[\]\}"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"\{'x': \[3\], 'y': \[2\]\}"),
        ({}, r"\{\}"),
        ((torch.zeros(3), torch.zeros(2)), r"\{0: \[3\], 1: \[2\]\}"),
    ],
)
def test_columns_without_equal_rows_are_refused(data, shown):
    kind = type(data).__name__
    with pytest.raises(ConfigError, match=rf"build_loader: a {kind} is a dataset of rows, .*got {shown}\. Give tensors"):
        build_loader(data, global_batch_size=2, seed=0)


class Wrapper:
    """A loader that wraps a loader of torch, as other libraries have them."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def __iter__(self):
        return iter(self.loader)


def batches_of_all_kinds(data):
    torch_data, nodes = torch.utils.data, pytest.importorskip("torchdata.nodes")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torch_data.DataLoader(data, batch_size=4)
    node = nodes.Batcher(nodes.IterableWrapper(data), 4)
    return {
        "DataLoader": loader,
        "StatefulDataLoader": stateful.StatefulDataLoader(data, batch_size=4),
        "iterator of a DataLoader": iter(loader),
        "iterator of workers": iter(torch_data.DataLoader(data, batch_size=4, num_workers=1)),
        "loader of another library": Wrapper(loader),
        "loader of this library": build_loader(data, global_batch_size=4, seed=0),
        "batching node": node,
        "loader of a batching node": nodes.Loader(node),
    }


# torchdata reads all names of torch.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_instead_of_samples_are_refused(shuffle):
    for name, batches in batches_of_all_kinds(list(range(16))).items():
        with pytest.raises(
            ConfigError, match=r"build_loader: dataset must hold samples, got batches of a \w+\. Give the dataset"
        ):
            pytest.fail(f"{name}: {build_loader(batches, global_batch_size=4, seed=0, shuffle=shuffle)}")


def test_sampler_instead_of_a_dataset_is_refused():
    order = torch.utils.data.SequentialSampler(range(16))
    for sampler in (order, torch.utils.data.BatchSampler(order, 4, drop_last=False)):
        with pytest.raises(ConfigError, match=rf"got the sampler {type(sampler).__name__}\. Give the dataset"):
            build_loader(sampler, global_batch_size=4, seed=0, shuffle=False)


def test_dataset_with_a_collate_function_of_its_own_is_accepted():
    class Own(torch.utils.data.IterableDataset):
        batch_size, collate_fn = 4, None

        def __iter__(self):
            return iter(range(8))

    assert flat(batch.tolist() for batch in build_loader(Own(), global_batch_size=4, seed=0, shuffle=False).until("1ep")) == [
        *range(8)
    ]
