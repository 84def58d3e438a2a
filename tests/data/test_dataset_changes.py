"""A dataset that the training loop changes: the same batches for any number of loader workers, as without workers."""

import contextlib
import ctypes
import multiprocessing
import random
from functools import partial

import numpy as np
import pytest
import torch

import dtrain as dt
from samples import Curriculum, Levels, Numbers, Remembering, Stream, UnsizedLevels

WORKERS = (0, 1, 4)


def build(dataset, **options) -> dt.Loader:
    return dt.build_loader(dataset, **{"global_batch_size": 4, "seed": 0, **options})


def levels(loader, dataset, change, *, epochs=4, steps=2) -> list[int]:
    """First sample of each batch. ``change(epoch)`` runs in the body of the last batch of each epoch."""
    seen = []
    for number, batch in enumerate(loader.until(f"{epochs}ep")):
        seen.append(int(batch[0]))
        if number % steps == steps - 1:
            change(number // steps + 1)
    return seen


@pytest.mark.parametrize(("workers", "prefetch_factor"), [(0, 2), (1, 5), (2, 1), (4, 2)])
def test_change_at_an_epoch_end_is_seen_in_the_next_epoch(workers, prefetch_factor):
    data = Curriculum()
    loader = build(data, num_workers=workers, prefetch_factor=prefetch_factor)
    assert levels(loader, data, data.set_level) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_change_reaches_spawned_workers():
    data = Curriculum()
    loader = build(data, num_workers=1, start_method="spawn")
    assert levels(loader, data, data.set_level, epochs=2) == [0, 0, 1, 1]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Levels, UnsizedLevels], ids=["length", "no length"])
def test_change_at_an_epoch_end_is_seen_in_the_next_epoch_of_an_iterable(kind, workers):
    data = kind()
    loader = build(data, num_workers=workers, shuffle=False)
    assert levels(loader, data, data.set_level) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("workers", WORKERS)
def test_change_within_an_epoch_is_seen_in_the_next_batch(workers):
    data = Curriculum(24)
    seen = []
    for number, batch in enumerate(build(data, num_workers=workers).until("1ep")):
        seen.append(int(batch[0]))
        if number == 1:
            data.level = 7
    assert seen == [0, 0, 7, 7, 7, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_change_within_an_epoch_of_an_iterable_is_refused(workers):
    data = Levels(24)
    batches = build(data, num_workers=workers, shuffle=False).until("1ep")
    assert next(batches).tolist() == [0] * 4
    data.level += 1
    with pytest.raises(dt.errors.ConfigError, match=r"loader: the loop changed dataset\.level in the middle of an epoch"):
        next(batches)


class Nested:
    """A dataset, a transform and a collate function that know a level in many ways."""

    class_level = 0

    def __init__(self) -> None:
        self.items, self.table, self.array = [0] * 100, {"level": 0}, np.zeros(100)
        self.weights, self.shared = torch.zeros(100), torch.zeros(1).share_memory_()
        self.value, self.c_value = multiprocessing.Value("i", 0), ctypes.c_int(0)
        self.rng, self.bag = random.Random(0), {0}
        self.inner, self.fn = Curriculum(), lambda: 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.read()

    def read(self) -> int:
        return 0


LEVEL = 0


def global_level() -> int:
    return LEVEL


def set_global(level: int) -> None:
    global LEVEL
    LEVEL = level


def place(read, write):
    """A dataset that reads its level by ``read(dataset)``, and the function that changes it."""

    class Dataset(Nested):
        def read(self) -> int:
            return int(read(self))

    data = Dataset()
    return data, partial(write, data)


def shuffle_rng(data, level):
    data.rng = random.Random(level)


PLACES = {
    "entry of a long list": (lambda d: d.items[50], lambda d, level: d.items.__setitem__(50, level)),
    "entry of a dict": (lambda d: d.table["level"], lambda d, level: d.table.update(level=level)),
    "entry of an array": (lambda d: d.array[50], lambda d, level: d.array.__setitem__(50, level)),
    "a tensor, in place": (lambda d: d.weights[0], lambda d, level: d.weights.fill_(level)),
    "a tensor, through numpy": (lambda d: d.weights[0], lambda d, level: d.weights.numpy().fill(level)),
    "a shared tensor": (lambda d: d.shared[0], lambda d, level: d.shared.fill_(level)),
    "a shared value": (lambda d: d.value.value, lambda d, level: setattr(d.value, "value", level)),
    "an object in the dataset": (lambda d: d.inner.level, lambda d, level: d.inner.set_level(level)),
    "a set": (lambda d: len(d.bag) - 1, lambda d, level: d.bag.add(level)),
    "a function": (lambda d: d.fn(), lambda d, level: setattr(d, "fn", lambda: level)),
    "an attribute of the class": (lambda d: type(d).class_level, lambda d, level: setattr(type(d), "class_level", level)),
    "a generator": (lambda d: d.rng.random() * 1000, lambda d, level: shuffle_rng(d, level)),
    "a new attribute": (lambda d: getattr(d, "late", 0), lambda d, level: setattr(d, "late", level)),
    "a global": (lambda d: global_level(), lambda d, level: set_global(level)),
}


@pytest.mark.parametrize("name", PLACES)
def test_change_is_seen_wherever_the_dataset_keeps_it(name):
    results = []
    for workers in (0, 1):
        set_global(0)
        data, change = place(*PLACES[name])
        # A batch of all samples, so that each epoch has one batch.
        loader = build(data, num_workers=workers, global_batch_size=8)
        results.append(levels(loader, data, change, epochs=3, steps=1))
    assert results[0] == results[1]
    assert len(set(results[0])) == 3, "the change has an effect"


class Adding:
    """Transform and collate function with a level."""

    def __init__(self) -> None:
        self.level = 0

    def transform(self, sample, generator):
        return sample * 0 + self.level

    def __call__(self, samples):
        return torch.stack(samples) * 0 + self.level

    def set_level(self, level: int) -> None:
        self.level = level


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("place", ["transform", "collate", "closure", "subset", "partial"])
def test_change_of_a_transform_or_collate_function_is_seen(place, workers):
    adding, numbers, data = Adding(), Numbers(8), Curriculum()
    loader = {
        "transform": lambda: build(numbers, transform=adding.transform, num_workers=workers),
        "collate": lambda: build(numbers, collate=adding, num_workers=workers),
        "closure": lambda: build(numbers, collate=lambda samples: adding(samples), num_workers=workers),
        "subset": lambda: build(torch.utils.data.Subset(data, range(8)), num_workers=workers),
        "partial": lambda: build(numbers, collate=partial(lambda fn, samples: fn(samples), adding), num_workers=workers),
    }[place]()
    changed = data if place == "subset" else adding
    assert levels(loader, changed, changed.set_level, epochs=3) == [0, 0, 1, 1, 2, 2]


def worker_pids(loader, body) -> set[int]:
    """Processes that read the samples of three epochs."""
    return {int(pid) for number, batch in enumerate(loader.until("3ep")) if not body(number) for pid in batch}


class Pids(Curriculum):
    def __getitem__(self, index: int) -> int:
        return multiprocessing.current_process().pid


def test_unchanged_dataset_keeps_its_workers():
    assert len(worker_pids(build(Pids(), num_workers=2), lambda number: None)) == 2


def test_attribute_of_an_object_that_the_collate_method_does_not_read_keeps_the_workers():
    class Training:
        step = 0

        def count(self, number):
            self.step = number

        def collate(self, samples):
            return torch.tensor(samples)

    training = Training()
    loader = build(Pids(), num_workers=2, collate=training.collate)
    assert len(worker_pids(loader, training.count)) == 2


def test_frequent_changes_within_epochs_print_one_line(capfd):
    data = Curriculum(40)
    loader = build(data, num_workers=1)
    for _ in loader.until("1ep"):
        data.level += 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "loader" in line]
    assert len(lines) == 1, lines
    assert "the loop changed dataset.level in the middle of an epoch 3 times" in lines[0]


def test_change_within_a_long_list_prints_one_line_and_is_seen_in_the_next_epoch(capfd):
    data, change = place(*PLACES["entry of a long list"])
    loader, seen = build(data, num_workers=1), []
    for number, batch in enumerate(loader.until("2ep")):
        seen.append(int(batch[0]))
        if number == 0:
            change(5)
    assert seen == [0, 0, 5, 5]
    assert "the loop changed dataset.items in the middle of an epoch" in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [2, 3, 5])
def test_resume_of_a_changed_dataset_continues_exactly(workers, cut):
    def run(loader, data, until):
        seen = []
        for batch in loader.until(until):
            seen.append(batch.tolist())
            if loader.position.samples == 0:
                data.level = loader.position.epoch * 100
        return seen

    class Shifted(Curriculum):
        def __getitem__(self, index):
            return self.level + index

    def make(level=0):
        data = Shifted()
        data.level = level
        return data, build(data, num_workers=workers)

    data, whole = make()
    expected = run(whole, data, "4ep")
    data, first = make()
    head = run(first, data, cut)
    data, second = make(data.level)
    second.load_state_dict(first.state_dict())
    assert head + run(second, data, "4ep") == expected


class SelfCounting(Stream):
    """Changes itself while it is read."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.reads, self.cache = 0, {}

    def __iter__(self):
        for sample in super().__iter__():
            self.reads += 1
            self.cache[self.reads] = sample
            yield sample


@pytest.mark.parametrize("kind", [SelfCounting, Remembering])
@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_that_changes_itself_is_accepted(kind, workers):
    loader = build(kind(23), num_workers=workers, shuffle=False)
    seen = []
    for batch in loader.until("2ep"):
        seen += batch.tolist()
        if len(seen) in (4, 23, 27):
            assert len([*loader.one_epoch()]) == 6
    assert seen == [*range(23)] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_of_the_same_dataset_does_not_hide_a_change(workers):
    data = Curriculum()
    loader = build(data, num_workers=workers)

    def change(level):
        assert len([*loader.one_epoch()]) == 2
        data.level = level

    assert levels(loader, data, change, epochs=3) == [0, 0, 1, 1, 2, 2]


def curriculum_of_a_rank(workers: int) -> list[float]:
    """Losses of a training whose dataset changes at epoch ends; the samples until a change within an iterable's epoch."""
    mesh, results = dt.build_mesh(), []
    torch.manual_seed(0)
    step = dt.compose_step(lambda model, x: dt.LossSum(total=model(x.double()[:, None]).square().sum(), weight=len(x)))
    model = dt.shard_model(torch.nn.Linear(1, 1, dtype=torch.float64), mesh)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=1e-3), allow_equal_batches=True)
    options = {"mesh": mesh, "global_batch_size": 4, "seed": 0, "num_workers": workers, "start_method": "fork"}
    data = Curriculum()
    for batch in dt.build_loader(data, **options).until("3ep"):
        state, metrics = step(state, batch)
        results.append(float(dt.reduce_metrics(metrics)["loss"]))
        data.level += state.step % 2 == 0
    stream, rank, ranks = Levels(24), torch.distributed.get_rank(), torch.distributed.get_world_size()
    loader = dt.build_loader(stream, shuffle=False, **options)
    with contextlib.suppress(dt.DtrainError):
        for batch in loader.until("1ep"):
            # One rank alone changes its dataset. All ranks must end.
            stream.level += rank == ranks - 1
            state, _ = step(state, batch)
    return [*results, loader.position.samples]


@pytest.mark.parametrize("count", [1, 2])
def test_curriculum_gives_the_same_losses_on_any_number_of_ranks_and_workers(ranks, count):
    [expected] = ranks(1).run(curriculum_of_a_rank, 0)
    for result in ranks(count).run(curriculum_of_a_rank, 2):
        assert result[:-1] == pytest.approx(expected[:-1], rel=1e-12)
        assert result[-1] < 24, "the change within an epoch ended the loop on all ranks"
