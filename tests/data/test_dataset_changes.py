"""A dataset that the training loop changes: the same batches for any number of loader workers, as without workers."""

import multiprocessing
import random
import threading
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch

import dtrain as dt
from samples import Curriculum, Levels, Numbers, Remembering, Stream, UnsizedLevels

WORKERS = (0, 1, 4)


def build(dataset, **options) -> dt.data.Loader:
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


@pytest.mark.costly
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
def test_change_within_an_epoch_of_an_iterable_counts_from_the_next_epoch(workers, capfd):
    data, seen = Levels(16), []
    for number, batch in enumerate(build(data, num_workers=workers, shuffle=False).until("2ep")):
        seen.append(int(batch[0]))
        data.level += number < 3
    # Without a worker the dataset itself is read, one batch ahead of the loop.
    assert seen == ([0, 0, 0, 0, 3, 3, 3, 3] if workers else [0, 0, 1, 2, 3, 3, 3, 3])
    lines = [line for line in capfd.readouterr().err.splitlines() if "dataset.level" in line]
    assert len(lines) == (1 if workers else 0), lines
    assert all("in the middle of an epoch of an iterable dataset" in line for line in lines)


class Threaded(Stream):
    """Has a thread of its own that changes it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.beats, self.log = 0, []

    def beat(self) -> None:
        self.beats += 1
        self.log.append(self.beats)


@pytest.mark.parametrize("workers", WORKERS)
def test_iterable_with_counters_and_threads_is_read_as_it_is(workers):
    data, seen = Threaded(40), []
    for batch in build(data, num_workers=workers, shuffle=False).until("2ep"):
        thread = threading.Thread(target=data.beat)
        thread.start()
        thread.join()
        seen += batch.tolist()
    assert seen == [*range(40)] * 2


class Stage(Enum):
    EARLY = 0
    LATE = 1
    LAST = 2
    END = 3


class Slotted:
    """Keeps its level in a slot, and is wrapped by a dataset."""

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.level


class Nested:
    """A dataset that knows a level in many ways."""

    def __init__(self) -> None:
        self.table, self.crops, self.bag = {"level": 0}, {"sizes": [0, 0]}, {0}
        self.weights, self.array, self.scalar = torch.zeros(100), np.zeros(100), np.float32(0)
        self.stage, self.inner, self.parts, self.fn = Stage.EARLY, Slotted(), [Slotted(), Slotted()], float

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.read(self))


PLACES = {
    "entry of a dict": (lambda d: d.table["level"], lambda d, level: d.table.update(level=level)),
    "entry of a list in a dict": (lambda d: d.crops["sizes"][1], lambda d, level: d.crops["sizes"].__setitem__(1, level)),
    "a set": (lambda d: len(d.bag) - 1, lambda d, level: d.bag.add(level)),
    "a tensor, in place": (lambda d: d.weights[0], lambda d, level: d.weights.fill_(level)),
    "another array": (lambda d: d.array[0], lambda d, level: setattr(d, "array", np.full(100, level))),
    "a scalar of numpy": (lambda d: d.scalar, lambda d, level: setattr(d, "scalar", np.float32(level))),
    "an enum": (lambda d: d.stage.value, lambda d, level: setattr(d, "stage", Stage(level))),
    "a slot of a wrapped dataset": (lambda d: d.inner[0], lambda d, level: setattr(d.inner, "level", level)),
    "one of several datasets": (lambda d: d.parts[1][0], lambda d, level: setattr(d.parts[1], "level", level)),
    "another function": (lambda d: d.fn(), lambda d, level: setattr(d, "fn", lambda: level)),
    "a new attribute": (lambda d: getattr(d, "late", 0), lambda d, level: setattr(d, "late", level)),
}


@pytest.mark.parametrize("name", PLACES)
def test_change_is_seen_where_the_dataset_keeps_data(name):
    read, write = PLACES[name]
    data = Nested()
    data.read = read
    # A batch of all samples, so that each epoch has one batch.
    loader = build(data, num_workers=1, global_batch_size=8)
    assert levels(loader, data, partial(write, data), epochs=3, steps=1) == [0, 1, 2]


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
@pytest.mark.parametrize("place", ["transform", "collate", "subset", "concat", "partial"])
def test_change_of_a_transform_or_collate_function_is_seen(place, workers):
    adding, numbers, data = Adding(), Numbers(8), Curriculum()
    loader = {
        "transform": lambda: build(numbers, transform=adding.transform, num_workers=workers),
        "collate": lambda: build(numbers, collate=adding, num_workers=workers),
        "subset": lambda: build(torch.utils.data.Subset(data, range(8)), num_workers=workers),
        "concat": lambda: build(torch.utils.data.ConcatDataset([data]), num_workers=workers),
        "partial": lambda: build(numbers, collate=partial(lambda fn, samples: fn(samples), adding), num_workers=workers),
    }[place]()
    changed = data if place in ("subset", "concat") else adding
    assert levels(loader, changed, changed.set_level, epochs=3) == [0, 0, 1, 1, 2, 2]


def worker_pids(loader, body) -> set[int]:
    """Processes that read the samples of three epochs."""
    return {int(pid) for number, batch in enumerate(loader.until("3ep")) if not body(number) for pid in batch}


class Pids(Curriculum):
    """A dataset whose samples are the id of the process that reads them. Its content does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.items, self._cache = 0, [0] * 1000, {}
        self.model, self.rng, self.lock = torch.nn.Linear(1, 1), random.Random(0), threading.Lock()
        self.generator = torch.Generator()

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.seen = index
        return multiprocessing.current_process().pid


def touch_unwatched(data: Pids, number: int) -> None:
    data._cache[number] = number
    data.items[0] = number
    data.rng.random()
    torch.rand(1, generator=data.generator)
    with torch.no_grad():
        data.model.weight.add_(1)


BODIES = {
    "nothing": lambda data, number: None,
    "what is not watched": touch_unwatched,
    "a read of a sample": lambda data, number: data[number] and None,
}


@pytest.mark.parametrize("name", BODIES)
def test_body_without_a_change_of_watched_data_keeps_the_workers(name):
    data = Pids()
    assert len(worker_pids(build(data, num_workers=2), partial(BODIES[name], data))) == 2


@pytest.mark.parametrize("kind", ["list", "TensorDataset", "dict of tensors", "collate with imports"])
def test_common_datasets_keep_their_workers(kind):
    def collate(samples):
        import torch

        return torch.tensor([multiprocessing.current_process().pid for _ in samples])

    data = {
        "list": [0] * 1000,
        "TensorDataset": torch.utils.data.TensorDataset(torch.zeros(1000)),
        "dict of tensors": {"x": torch.zeros(1000)},
        "collate with imports": Numbers(1000),
    }[kind]
    loader = build(data, num_workers=1, collate=collate, global_batch_size=500)
    assert len(worker_pids(loader, lambda number: None)) == 1


def test_object_of_a_method_that_is_neither_a_dataset_nor_callable_is_not_watched():
    class Training:
        step = 0

        def count(self, number):
            self.step = number

        def collate(self, samples):
            return torch.tensor(samples)

    training = Training()
    loader = build(Pids(), num_workers=2, collate=training.collate)
    assert len(worker_pids(loader, training.count)) == 2


def test_attribute_that_changes_with_every_batch_costs_three_restarts_and_is_seen_in_the_next_epoch(capfd):
    class Both(Pids):
        def __getitem__(self, index):
            return torch.tensor([self.level, super().__getitem__(index)])

    data, seen, pids = Both(), [], []
    data.size = 40
    for batch in build(data, num_workers=1).until("2ep"):
        seen.append(int(batch[0][0]))
        pids.append(int(batch[0][1]))
        data.level += 1
    assert seen == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3] + [10] * 10
    assert len(set(pids[:10])) == 4, "three restarts"
    assert len(set(pids[10:])) == 1
    lines = [line for line in capfd.readouterr().err.splitlines() if "loader" in line]
    assert len(lines) == 1, lines
    assert "dataset.level changes with every batch; workers see it at the end of each epoch from now on" in lines[0]


def test_other_attributes_are_still_seen_at_once_after_one_changed_with_every_batch():
    data, seen = Curriculum(40), []
    data.losses = []
    for number, batch in enumerate(build(data, num_workers=1).until("1ep")):
        seen.append(int(batch[0]))
        data.losses.append(0.5)
        data.level += number == 6
    assert seen == [0] * 7 + [1] * 3


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
    """Losses of a training whose dataset changes at epoch ends; the epochs of a stream that one rank changes."""
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
    stream.note = 0
    loader = dt.build_loader(stream, shuffle=False, **options)
    for batch in loader.until("2ep"):
        # One rank alone changes an attribute that samples do not read. No rank may stop or wait.
        stream.note += rank == ranks - 1
        state, _ = step(state, batch)
    return [*results, loader.position.epoch]


@pytest.mark.parametrize("count", [1, 2])
def test_curriculum_gives_the_same_losses_on_any_number_of_ranks_and_workers(ranks, count):
    [expected] = ranks(1).run(curriculum_of_a_rank, 0)
    for result in ranks(count).run(curriculum_of_a_rank, 2):
        assert result[:-1] == pytest.approx(expected[:-1], rel=1e-12)
        assert result[-1] == 2, "a change within an epoch ends no loop"
