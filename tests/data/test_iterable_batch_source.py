"""Datasets that can only be iterated: the same global batches for every number of ranks, and exact resumes."""

from dataclasses import replace
from itertools import chain, zip_longest

import pytest
import torch
from torch.utils.data import IterableDataset

import dtrain as dt
from samples import Remembering, Stream, fail


def build(dataset, rank=0, ranks=1, **options) -> dt.data.Loader:
    made = dt.build_loader(dataset, **{"global_batch_size": 5, "seed": 0, "shuffle": False, **options})
    made._source.options = replace(made._source.options, rank=rank, ranks=ranks)
    return made


def numbers(batches) -> list[int]:
    return list(chain.from_iterable(batch.tolist() for batch in batches))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (3, 0), (7, 0), (1, 2), (2, 2)])
def test_global_batches_are_the_same_for_every_number_of_ranks(ranks, workers):
    parts = [[b.tolist() for b in build(Stream(23), rank, ranks, num_workers=workers).until("2ep")] for rank in range(ranks)]
    batches = [list(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)]
    assert batches == [[*range(first, min(first + 5, 23))] for first in (0, 5, 10, 15, 20)] * 2


def test_iterable_with_a_length_is_iterated():
    class Sized(IterableDataset):
        def __iter__(self):
            return iter(range(7))

        def __len__(self):
            return 7

    loader = build(Sized())
    assert [batch.tolist() for batch in loader.until("1ep")] == [[0, 1, 2, 3, 4], [5, 6]]
    assert (loader.steps_per_epoch(), len(loader)) == (2, 2)


def test_drop_omits_the_incomplete_last_batch():
    assert [len(batch) for batch in build(Stream(23), last_batch="drop").until("2ep")] == [5] * 8


@pytest.mark.parametrize("kind", [Stream, Remembering])
@pytest.mark.parametrize("cut", range(1, 10))
def test_resume_continues_exactly_on_a_different_rank_count(kind, cut):
    first = build(kind(23))
    head = numbers(first.until(cut))
    parts = []
    for rank in range(3):
        second = build(kind(23), rank, 3)
        second.load_state_dict(first.state_dict())
        parts.append([batch.tolist() for batch in second.until("2ep")])
    rest = list(chain.from_iterable(chain.from_iterable(shares) for shares in zip(*parts, strict=True)))
    assert head + rest == [*range(23)] * 2


def test_resume_does_not_reread_a_stateful_dataset():
    first, dataset = build(Remembering(23)), Remembering(23)
    list(first.until(3))
    second = build(dataset)
    second.load_state_dict(first.state_dict())
    list(second.until("1ep"))
    assert dataset.reads == 8


def test_batch_size_may_change_within_an_epoch():
    first = build(Remembering(23))
    head = numbers(first.until(3))
    second = build(Remembering(23), global_batch_size=4)
    second.load_state_dict(first.state_dict())
    assert head + numbers(second.until("1ep")) == [*range(23)]


def test_torch_iterable_datasets_and_torchdata_nodes_are_accepted():
    from torchdata.nodes import IterableWrapper

    class Torch(IterableDataset):
        def __iter__(self):
            return iter(Stream(7))

    assert numbers(build(Torch(), num_workers=1).until("1ep")) == [*range(7)]
    node = IterableWrapper([torch.tensor(number) for number in range(12)])
    first = build(node)
    assert numbers(first.until(2)) == [*range(10)]
    second = build(IterableWrapper([torch.tensor(number) for number in range(12)]))
    second.load_state_dict(first.state_dict())
    assert numbers(second.until("1ep")) == [10, 11]


def test_loader_length_follows_the_dataset_length():
    sized = Stream(23)
    with pytest.raises(dt.errors.ConfigError, match=r"loader.total_steps: the dataset has no length. Count in batches"):
        build(sized).total_steps("3ep")
    Sized = type("Sized", (Stream,), {"__len__": lambda self: self.size})
    assert build(Sized(23)).total_steps("3ep") == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "an iterable dataset has its own order. Use shuffle=False"),
        ({"last_batch": "pad"}, "last_batch='pad' needs an indexed dataset"),
        ({"dataset": 7}, r"dataset must have len and \[\], or be iterable, got a int"),
        ({"dataset": [1, 2], "pre_sharded": True}, "pre_sharded needs an iterable dataset"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(dt.errors.ConfigError, match=message):
        build(options.pop("dataset", Stream(5)), **options)


def test_a_stream_without_samples_is_refused():
    with pytest.raises(dt.errors.ConfigError, match="returned no sample in a whole epoch"):
        list(build(Stream(0)).until("2ep"))


def test_failing_stream_raises_a_one_line_error():
    class Bad(Stream):
        def __iter__(self):
            yield torch.tensor(0)
            fail()

    with pytest.raises(dt.errors.DataError, match="loader: ValueError: cannot be decoded: no such codec"):
        list(build(Bad(3), num_workers=1).until("1ep"))


# ---- split over ranks by the dataset itself


def ragged_run(sizes: list[int], plain: bool = False) -> tuple[list[list[int]], list[int], list[int]]:
    """Train on streams of unequal length for two epochs; return this rank's samples, those of each step, the last position."""
    mesh = dt.build_mesh()
    rank, _ = dt.dist.data_rank(mesh)
    model = dt.shard_model(torch.nn.Linear(1, 1), mesh)
    stream = Stream(sizes[rank], start=100 * rank)
    loader = dt.build_loader(stream, mesh=mesh, global_batch_size=4, seed=0, shuffle=False, pre_sharded=True)
    step = dt.compose_step(lambda model, batch: dt.LossSum(total=model(batch[:, None].float()).sum(), weight=len(batch)), [])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen, counts = [], []
    for batch in chain(loader, loader) if plain else loader.until("2ep"):
        before = state.clock.samples
        seen.append(batch.tolist())
        state, _ = step(state, batch)
        counts.append(state.clock.samples - before)
    assert state.clock.epoch == 2
    return seen, counts, [loader.position.epoch, loader.position.samples]


def test_ranks_with_uneven_streams_end_the_epoch_together(ranks):
    (one, counts, end), (two, others, _) = ranks(2).run(ragged_run, [3, 7])
    assert one == [[0, 1], [2], [], []] * 2
    assert two == [[100, 101], [102, 103], [104, 105], [106]] * 2
    assert counts == others == [4, 3, 2, 1] * 2
    assert end == [2, 0]
    assert ranks(2).run(ragged_run, [3, 7], True) == [[one, counts, end], [two, others, end]]


def test_resume_after_one_exhausted_rank_ends_epochs_together(ranks):
    for cut in (1, 2, 3, 4, 5):
        whole, rest = ranks(2).run(resumed_ragged_run, [3, 7], cut)
        assert whole == ([[0, 1], [2], [], []] * 2)[cut:]
        assert rest == ([[100, 101], [102, 103], [104, 105], [106]] * 2)[cut:]


def resumed_ragged_run(sizes: list[int], cut: int) -> list[list[int]]:
    """Return a rank's batches of two epochs after a resume behind batch ``cut``."""
    mesh = dt.build_mesh()
    rank, _ = dt.dist.data_rank(mesh)
    model = dt.shard_model(torch.nn.Linear(1, 1), mesh)
    step = dt.compose_step(lambda model, batch: dt.LossSum(total=model(batch[:, None].float()).sum(), weight=len(batch)), [])

    def run(position, length):
        stream = Stream(sizes[rank], start=100 * rank)
        loader = dt.build_loader(stream, mesh=mesh, global_batch_size=4, seed=0, shuffle=False, pre_sharded=True)
        if position is not None:
            loader.load_state_dict(position)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
        seen = []
        for batch in loader.until(length):
            seen.append(batch.tolist())
            state, _ = step(state, batch)
        return seen, loader.state_dict()

    _, position = run(None, cut)
    return run(position, "2ep")[0]


# ---- states, skips and draws


class Sized(Remembering):
    def __len__(self):
        return self.size


@pytest.mark.parametrize("kind", [Stream, Remembering, Sized])
def test_skip_omits_samples_of_an_iterable_dataset(kind):
    loader = build(kind(23))
    assert numbers(loader.until(1)) == [*range(5)]
    loader.skip(7)
    assert numbers(loader.until("1ep")) == [*range(12, 23)]
    seen, loader = [], build(kind(23))
    for batch in loader.until("1ep"):
        seen += batch.tolist()
        if len(seen) == 5:
            loader.skip(7)
    assert seen == [*range(5), *range(12, 23)]


def test_skip_is_refused_for_pre_sharded_datasets():
    with pytest.raises(dt.errors.ConfigError, match=r"loader.skip: .*split over ranks"):
        build(Stream(23), pre_sharded=True).skip(5)


@pytest.mark.parametrize("cut", [1, 4, 5, 7, 10, 12])
@pytest.mark.parametrize("buffer", [1, 4])
def test_a_shuffled_hugging_face_stream_resumes_in_any_epoch(cut, buffer):
    import datasets

    def stream():
        whole = datasets.Dataset.from_dict({"id": list(range(23))}).to_iterable_dataset(num_shards=3)
        return whole.shuffle(7, buffer_size=buffer).map(lambda sample: sample)

    def ids(batches):
        return [batch["id"].tolist() for batch in batches]

    whole = ids(build(stream()).until("3ep"))
    first = build(stream())
    head = ids(first.until(cut))
    second = build(stream())
    second.load_state_dict(first.state_dict())
    assert head + ids(second.until("3ep")) == whole


class Live(Remembering):
    """Its state is always the same object."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.live = {"at": 0}

    def state_dict(self):
        self.live["at"] = self.at
        return self.live


def test_state_dict_follows_the_last_returned_batch():
    first = build(Live(23))
    head = numbers(first.until(2))
    second = build(Live(23))
    second.load_state_dict(first.state_dict())
    assert head + numbers(second.until("1ep")) == [*range(23)]


class Shuffling(Stream):
    """Draws its order when it begins, and noise on the way, from the global generators."""

    def __iter__(self):
        order = torch.randperm(self.size).tolist()
        return (torch.tensor([number, torch.rand(()).item()], dtype=torch.float64) for number in order)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cut", [1, 3, 5, 6, 8])
def test_resume_reproduces_the_random_numbers_of_an_uninterrupted_run(cut, workers):
    whole = [batch.tolist() for batch in build(Shuffling(23), num_workers=workers).until("2ep")]
    first = build(Shuffling(23))
    head = [batch.tolist() for batch in first.until(cut)]
    second = build(Shuffling(23), num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert head + [batch.tolist() for batch in second.until("2ep")] == whole


@pytest.mark.parametrize("kind", [Stream, Remembering, Sized])
def test_evaluation_within_an_epoch_does_not_change_training_batches(kind):
    loader, seen = build(kind(23)), []
    for batch in loader.until("2ep"):
        seen += batch.tolist()
        if len(seen) in (10, 23, 28):
            assert numbers(loader.one_epoch()) == [*range(23)]
    assert seen == [*range(23)] * 2


def first_tokens(batches) -> list[int]:
    return list(
        chain.from_iterable((batch if torch.is_tensor(batch) else batch["input_ids"][:, 0]).tolist() for batch in batches)
    )


SHARED = {"stateful": lambda: Remembering(23), "node": lambda: dt.data.pack_tokens([[k] * 4 for k in range(23)], seq=4)}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_over_one_dataset_object_do_not_move_each_other(kind, workers):
    dataset = SHARED[kind]()
    train, held, seen = build(dataset, num_workers=workers), build(dataset, global_batch_size=4), []
    for batch in train.until("2ep"):
        seen += first_tokens([batch])
        if len(seen) in (5, 23, 33):
            assert first_tokens(held.one_epoch()) == [*range(23)]
        elif len(seen) in (10, 38):
            next(held.one_epoch())
    assert seen == [*range(23)] * 2


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize(
    "epochs", [lambda loader: loader.until("1ep"), lambda loader: loader.one_epoch()], ids=["until", "one"]
)
def test_loops_over_one_dataset_object_may_alternate(kind, epochs):
    dataset = SHARED[kind]()
    one, other = build(dataset), build(dataset, global_batch_size=4)
    pairs = [*zip_longest(one.until("1ep"), epochs(other))]
    assert first_tokens(pair[0] for pair in pairs if pair[0] is not None) == [*range(23)]
    assert first_tokens(pair[1] for pair in pairs) == [*range(23)]


@pytest.mark.parametrize("kind", SHARED)
def test_new_loader_over_a_dataset_that_was_read_begins_at_its_start(kind):
    dataset = SHARED[kind]()
    next(build(dataset).until("1ep"))
    assert first_tokens(build(dataset).until("1ep")) == [*range(23)]


def drawn(sample, generator):
    return torch.stack([sample.double(), torch.rand((), generator=generator).double()])


def test_pre_sharded_ranks_draw_different_numbers_and_reproduce_after_resume():
    def member(rank):
        return build(Stream(8, start=100 * rank), rank, 2, global_batch_size=4, pre_sharded=True, transform=drawn)

    whole = [[batch.tolist() for batch in member(rank).until("2ep")] for rank in range(2)]
    assert len({value for batches in whole for batch in batches for _, value in batch}) == 32
    for rank, cut in ((0, 1), (1, 3), (0, 4), (1, 6)):
        first, second = member(rank), member(rank)
        head = [batch.tolist() for batch in first.until(cut)]
        second.load_state_dict(first.state_dict())
        assert head + [batch.tolist() for batch in second.until("2ep")] == whole[rank]


class Counting:
    """An iterator that knows how many samples it has left: none, and it is false."""

    def __init__(self, size):
        self.left = size

    def __iter__(self):
        return self

    def __len__(self):
        return self.left

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.tensor(self.left)


def test_iterator_with_a_length_can_be_used_for_several_epochs():
    class Fresh:
        def __iter__(self):
            return Counting(10)

    assert numbers(build(Fresh()).until("2ep")) == [*range(9, -1, -1)] * 2
