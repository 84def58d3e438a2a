"""A global batch size that is a schedule: every sample once, the same batches for every number of ranks, and any resume."""

import itertools
from dataclasses import replace

import pytest
import torch

import dtrain as dt
from dtrain.errors import ConfigError

SIZE = 50


def growing(step: float) -> float:
    return 3.0 + step / 2  # 3, 3, 4, 4, 5, ...


def loader(size=growing, rank=0, ranks=1, **options) -> dt.data.Loader:
    made = dt.build_loader(torch.arange(SIZE), global_batch_size=size, seed=1, **options)
    made._source.options = replace(made._source.options, rank=rank, ranks=ranks)
    return made


def batches(source: dt.data.Loader, until="2ep") -> list[list[int]]:
    return [batch.tolist() for batch in source.until(until)]


def test_scheduled_batch_sizes_cover_each_sample_once_per_epoch():
    drawn = batches(loader())
    sizes = [len(batch) for batch in drawn]
    assert sizes == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 6], "each epoch's last batch is what is left of it"
    flat = [index for batch in drawn for index in batch]
    assert sorted(flat[:SIZE]) == sorted(flat[SIZE:]) == list(range(SIZE))


def test_resume_at_any_position_continues_with_the_same_batches():
    whole = batches(loader())
    for stop in range(1, len(whole)):
        first = loader()
        begun = [batch.tolist() for batch in first.until(stop)]
        again = loader()
        again.load_state_dict(first.state_dict())
        assert begun + batches(again) == whole


def test_batch_size_schedule_is_not_called_after_the_run():
    sizes = [20, 20, 10]
    source = loader(lambda step: sizes[step])
    assert source.total_steps("1ep") == 3
    assert [len(batch) for batch in batches(source, "1ep")] == sizes


@pytest.mark.parametrize("ranks", [2, 3])
def test_batches_do_not_depend_on_the_number_of_ranks(ranks):
    shares = [batches(loader(rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == [
        sorted(batch) for batch in batches(loader())
    ]


@pytest.mark.parametrize("length", ["2ep", "1ep", "30sp", 7])
def test_total_steps_counts_scheduled_batch_sizes(length):
    source = loader()
    steps = source.total_steps(length)
    assert steps == len(batches(source, length))
    assert source.run_length(length) == dt.schedules.RunLength(total=steps)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: loader(last_batch="drop"),
            "a schedule of global_batch_size needs an indexed dataset and last_batch='short'",
        ),
        (lambda: loader(dt.schedules.with_unit("tok", growing)), "global_batch_size must be a schedule of steps, got 'tok'"),
        (lambda: batches(loader(lambda step: 2.0 - step)), "must give 1 or more, got 0.0 at batch 2"),
        (lambda: loader().steps_per_epoch(), "steps_per_epoch differs between epochs, because global_batch_size is a schedule"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
