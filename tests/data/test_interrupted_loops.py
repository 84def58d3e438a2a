"""A loop that was interrupted and is run again in the same process, as in a notebook: no batch is lost, none is repeated."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
from interrupts import interrupted_at

DATA = torch.arange(24.0)
LENGTH = "2ep"
LOADER = ("data/loader.py", "data/position.py")


class Stream(torch.utils.data.IterableDataset):
    """A stream of the data in order."""

    def __init__(self, data: Tensor = DATA) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.data


class Remembering(Stream):
    """Begins where its state says, and keeps the very state that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.place = {"at": 0}

    def __iter__(self) -> Iterator[Tensor]:
        while self.place["at"] < len(DATA):
            self.place["at"] += 1
            yield DATA[self.place["at"] - 1]
        self.place["at"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state


class Bad(torch.utils.data.Dataset):
    """Every fourth sample cannot be read."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> Tensor:
        if index % 4 == 1:
            raise ValueError("cannot be decoded")
        return DATA[index]


def loader_of(kind: str, **options) -> dt.data.Loader:
    data, shuffle = {"map": (DATA, True), "stream": (Stream(), False), "remembers": (Remembering(), False)}[kind]
    return dt.build_loader(data, global_batch_size=4, seed=1, shuffle=shuffle, **options)


def loss_of(come_to: Callable[[str], None]) -> dt.typing.LossFn:
    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        come_to("in the step")
        return model(batch[:, None] / 24).square().mean()

    return dt.mean_loss(mean, weight=len)


LOSS = loss_of(lambda _: None)


class Run:
    """A run whose loop is interrupted at each of some places, (where in the body, batches before), and run again."""

    def __init__(
        self,
        loader: dt.data.Loader,
        interrupts: tuple[tuple[str, int], ...] = (),
        *,
        by_hand: bool = False,
        plain: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.loader, self.left, self.by_hand, self.plain = loader, list(interrupts), by_hand, plain
        self.model, self.used = nn.Linear(1, 1), []
        self.loss_fn = loss_of(self.come_to)
        self.step = dt.compose_step(self.loss_fn, [dt.transforms.ema(0.5)])
        self.state = self.step.init(self.model, torch.optim.AdamW(self.model.parameters(), lr=0.1))

    def come_to(self, place: str) -> None:
        if (place, len(self.used)) in self.left:
            self.left.remove((place, len(self.used)))
            raise KeyboardInterrupt

    def take(self, batch: Tensor) -> None:
        if self.by_hand:
            self.state, metrics = dt.microbatch_step(self.state, batch, loss_fn=self.loss_fn)
            self.come_to("between the halves")
            self.state, _ = dt.optimizer_step(self.state, metrics)
        else:
            self.state, _ = self.step(self.state, batch)
        self.used.append(batch.tolist())

    def cell(self) -> None:
        """The loop, once."""
        for batches in self.loops():
            for batch in batches:
                self.come_to("before the step")
                self.take(batch)
                self.come_to("after the step")

    def loops(self) -> Iterator[Iterable[Tensor]]:
        """The loop to the end of the run, or one plain loop over the loader for each epoch that is left."""
        while self.plain and self.loader.state_dict()["epoch"] < 2:
            yield self.loader
        yield self.loader.until(LENGTH)

    def to_the_end(self) -> tuple[list[list[float]], list[float], int]:
        """Run the loop until nothing interrupts it; the batches of all steps, the weights, and the position."""
        while True:
            try:
                self.cell()
            except KeyboardInterrupt:
                continue
            assert not self.left, "an interrupt never came"
            return self.used, self.model.weight.flatten().tolist(), self.loader.state_dict()["batches"]


PLACES = ["before the step", "in the step", "after the step"]


@pytest.mark.parametrize("kind", ["map", "stream", "remembers"])
@pytest.mark.parametrize("after", [1, 5, 6, 7, 11], ids=["early", "last of an epoch", "first of an epoch", "later", "last"])
@pytest.mark.parametrize("place", PLACES)
def test_new_loop_repeats_the_batch_of_an_interrupted_step(kind, after, place):
    number = after + (place == "after the step")
    assert Run(loader_of(kind), ((place, number),)).to_the_end() == Run(loader_of(kind)).to_the_end()


@pytest.mark.parametrize("kind", ["map", "stream", "remembers"])
@pytest.mark.parametrize("place", PLACES)
def test_plain_loops_repeat_the_batch_of_an_interrupted_step(kind, place):
    whole = Run(loader_of(kind)).to_the_end()
    for after in (1, 5, 6, 7, 11):
        run = Run(loader_of(kind), ((place, after + (place == "after the step")),), plain=True)
        assert run.to_the_end() == whole, f"after {after} batches"


@pytest.mark.parametrize("kind", ["map", "remembers"])
def test_worker_read_ahead_does_not_change_the_repeated_batch(kind):
    places = (("in the step", 2), ("before the step", 6))
    assert Run(loader_of(kind, num_workers=1), places).to_the_end() == Run(loader_of(kind)).to_the_end()


@pytest.mark.parametrize("kind", ["map", "stream", "remembers"])
def test_batch_is_repeated_after_several_interrupts(kind):
    places = (*[("in the step", 0)] * 2, *[("in the step", 3)] * 3, ("before the step", 3), ("in the step", 6))
    assert Run(loader_of(kind), places).to_the_end() == Run(loader_of(kind)).to_the_end()


@pytest.mark.parametrize("place", [*PLACES, "between the halves"])
def test_interrupt_between_gradient_and_update_repeats_the_batch(place):
    places = (("between the halves", 3), (place, 3 + (place == "after the step")))
    interrupted = Run(loader_of("map"), places, by_hand=True).to_the_end()
    assert interrupted == Run(loader_of("map"), by_hand=True).to_the_end()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["map", "remembers"])
@pytest.mark.parametrize("begun", ["in the step", "after the step"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupt_at_any_loader_line_loses_no_batch(kind, begun, stride):
    whole = Run(loader_of(kind)).to_the_end()
    line = 1
    while True:
        run = Run(loader_of(kind), ((begun, 1),))
        with pytest.raises(KeyboardInterrupt):
            run.cell()
        was_interrupted = interrupted_at(line, run.cell, within=LOADER)
        assert run.to_the_end() == whole, f"line {line}"
        if not was_interrupted:
            break
        line += stride
    assert line > 100


def test_state_dict_between_loops_does_not_change_batches():
    run = Run(loader_of("remembers"), (("in the step", 3),))
    with pytest.raises(KeyboardInterrupt):
        run.cell()
    saved = run.loader.state_dict()
    assert (saved["batches"], saved["dataset"]) == (3, {"at": 12})
    assert run.to_the_end() == Run(loader_of("remembers")).to_the_end()
    other = loader_of("remembers")
    other.load_state_dict(saved)
    assert [batch.tolist() for batch in other.until(LENGTH)] == run.used[3:]


def test_load_state_dict_between_loops_sets_the_next_batch():
    run = Run(loader_of("map"), (("in the step", 3),))
    begin = run.loader.state_dict()
    with pytest.raises(KeyboardInterrupt):
        run.cell()
    run.loader.load_state_dict(begin)
    assert next(run.loader.until(LENGTH)).tolist() == run.used[0]


def test_skip_omits_the_interrupted_batch():
    run, whole = Run(loader_of("map"), (("in the step", 3),)), Run(loader_of("map")).to_the_end()[0]
    with pytest.raises(KeyboardInterrupt):
        run.cell()
    run.loader.skip(0)
    assert run.to_the_end()[0] == whole[:3] + whole[4:]


def test_update_that_a_loop_by_hand_leaves_out_uses_up_its_batch(tmp_path):
    def begun() -> tuple[dt.data.Loader, dt.TrainState]:
        loader, model = loader_of("map"), nn.Linear(1, 1)
        state = dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
        return loader, state

    loader, state = begun()
    batches = loader.until(LENGTH)
    state, _ = dt.microbatch_step(state, next(batches), loss_fn=LOSS)
    state.drop_gradients()
    second = next(batches)
    state, metrics = dt.microbatch_step(state, second, loss_fn=LOSS)
    state, _ = dt.optimizer_step(state, metrics)
    dt.save_sharded(tmp_path, state)
    assert (state.step, state.clock.samples) == (1, 4)
    expected = next(batches).tolist()

    loader, state = begun()
    dt.load_sharded(tmp_path, state)
    assert next(loader.until(LENGTH)).tolist() == expected


def test_first_step_consumes_a_batch_shared_by_two_states():
    loader, whole, used, failed = loader_of("map"), Run(loader_of("map")).to_the_end()[0], [], []
    one, other = Run(loader), Run(loader)

    def cell() -> None:
        for batch in loader.until(LENGTH):
            one.take(batch)
            if len(used) == 2 and not failed:
                failed.append(batch.tolist())
                raise KeyboardInterrupt
            other.take(batch)
            used.append(batch.tolist())

    with pytest.raises(KeyboardInterrupt):
        cell()
    cell()
    assert one.used == whole, "the step that was complete is not repeated"
    assert other.used == used == whole[:2] + whole[3:]


@pytest.mark.parametrize("named", [False, True], ids=["", "one named"])
@pytest.mark.parametrize("after", [0, 3])
def test_zipped_loaders_repeat_the_interrupted_batch_together(named, after):
    whole = [[batch.tolist() for batch in loader_of(kind).until(LENGTH)] for kind in ("map", "stream")]
    loaders, used, stopped = (loader_of("map"), loader_of("stream")), [], []
    model = nn.Linear(1, 1)

    def mean(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        if len(used) == after and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return model((pair[0] + pair[1])[:, None]).square().mean()

    step = dt.compose_step(dt.mean_loss(mean, weight=lambda pair: len(pair[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = [step.init(model, optimizer, loader=loaders[0]) if named else step.init(model, optimizer)]

    def cell() -> None:
        for pair in zip(*[loader.until(LENGTH) for loader in loaders], strict=True):
            states.append(step(states[-1], pair)[0])
            used.append([batch.tolist() for batch in pair])

    with pytest.raises(KeyboardInterrupt):
        cell()
    assert [loader.state_dict()["batches"] for loader in loaders] == [after, after]
    cell()
    assert used == [list(pair) for pair in zip(*whole, strict=True)]


@pytest.mark.parametrize("after", [1, 6])
def test_cloned_batch_is_repeated_after_an_interrupt(after):
    run, whole = Run(loader_of("map"), (("in the step", after),)), Run(loader_of("map")).to_the_end()[0]
    take = run.take
    run.take = lambda batch: take(batch.clone())
    assert run.to_the_end()[0] == whole


def test_repeated_batch_may_be_cloned():
    run = Run(loader_of("map"), (("in the step", 3),))
    with pytest.raises(KeyboardInterrupt):
        run.cell()
    for batch in run.loader.until(LENGTH):
        run.take(batch.clone())
        assert run.loader.state_dict()["batches"] == len(run.used)


def test_unreadable_samples_of_a_repeated_batch_are_counted_once():
    def loader() -> dt.data.Loader:
        return dt.build_loader(Bad(), global_batch_size=4, seed=1, shuffle=False, on_error="skip")

    run, whole = Run(loader(), (("in the step", 0), ("in the step", 3), ("in the step", 3))), Run(loader())
    assert run.to_the_end() == whole.to_the_end()
    assert run.loader.skipped == whole.loader.skipped
    assert run.loader.skipped.count == 12


def test_second_loop_during_a_step_is_refused():
    loader = loader_of("map")
    run = Run(loader)
    first = loader.until(LENGTH)
    run.take(next(first))
    next(first)
    next(loader.until(LENGTH))
    with pytest.raises(dt.errors.ConfigError, match="another loop moved the position during this loop"):
        next(first)


# ---- on several ranks


def on_a_rank(kind: str, numbers: list[int], place: str) -> list:
    """The batches of the steps of two cells, the first one interrupted at batch ``at[rank]``; and how the second one ended."""
    mesh = dt.build_mesh()
    rank, _ = dt.dist.data_rank(mesh)
    options = {"mesh": mesh, "global_batch_size": 4, "seed": 1}
    if kind == "already split":
        stream = Stream(torch.arange([5.0, 9.0][rank]) + 100 * rank)
        loader = dt.build_loader(stream, shuffle=False, pre_sharded=True, **options)
    else:
        loader = dt.build_loader(DATA, **options)
    model = dt.shard_model(nn.Linear(1, 1), mesh)
    used, left = [], [(place, number) for number in numbers[rank : rank + 1]]

    def come_to(here: str) -> None:
        if (here, len(used)) in left:
            left.clear()
            raise KeyboardInterrupt

    loss_fn = loss_of(come_to)
    step = dt.compose_step(loss_fn)

    def taken(state: dt.TrainState, batch: Tensor) -> dt.TrainState:
        if place != "between the halves":
            return step(state, batch)[0]
        state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn)
        come_to("between the halves")
        return dt.optimizer_step(state, metrics)[0]

    states = [step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))]

    def cell() -> None:
        for batch in loader.until(LENGTH):
            come_to("before the step")
            states.append(taken(states[-1], batch))
            used.append(batch.tolist())
            come_to("after the step")

    try:
        try:
            cell()
        except KeyboardInterrupt:
            cell()
    except dt.errors.DtrainError as error:
        return [used, f"{type(error).__name__}: {error}"]
    return [used, loader.state_dict()["epoch"]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "number"), [("map", 3), ("already split", 1), ("already split", 2), ("already split", 4)])
def test_ranks_interrupted_together_repeat_the_same_batch(ranks, kind, number, place):
    if (kind, number, place) == ("already split", 4, "in the step"):
        pytest.skip("rank 0 has no sample left, so its step runs no loss that could be interrupted")
    number += place == "after the step"
    whole = ranks(2).run(on_a_rank, kind, [], place)
    assert ranks(2).run(on_a_rank, kind, [number, number], place) == whole
    assert [end for _, end in whole] == [2, 2]


def test_rank_interrupted_before_its_step_catches_up(ranks):
    whole = ranks(2).run(on_a_rank, "map", [], "before the step")
    assert ranks(2).run(on_a_rank, "map", [3, 2], "before the step") == whole


def test_step_on_one_rank_only_raises_a_position_error(ranks):
    for _, end in ranks(2).run(on_a_rank, "map", [3, 2], "between the halves"):
        assert end.startswith("StepError: step: rank 1 is at another place in its data than rank 0")


def cut_at_the_end_of_an_epoch() -> list:
    mesh = dt.build_mesh()
    rank, _ = dt.dist.data_rank(mesh)
    stream = Stream(torch.arange([5.0, 9.0][rank]))
    loader = dt.build_loader(stream, mesh=mesh, global_batch_size=4, seed=1, shuffle=False, pre_sharded=True)
    model = dt.shard_model(nn.Linear(1, 1), mesh)
    step = dt.compose_step(loss_of(lambda place: None))
    state, counts = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), []
    for length in (5, "2ep"):
        for batch in loader.until(length):
            state, _ = step(state, batch)
            counts.append(len(batch))
    return [counts, state.clock.epoch]


def test_loop_continues_with_the_next_epoch_on_all_ranks(ranks):
    assert ranks(2).run(cut_at_the_end_of_an_epoch) == [[[2, 2, 1, 0, 0] * 2, 2], [[2, 2, 2, 2, 1] * 2, 2]]


def counting_run(source, *, joined=True):
    """Return a step, and its state, that holds ``source``; the loss keeps the samples of each step in ``seen``."""
    seen = []

    def loss_fn(model, batch):
        seen.append(batch.tolist())
        return dt.sum_loss(model(batch[:, None]).square().flatten())

    model, step = nn.Linear(1, 1), dt.compose_step(loss_fn)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.0), loader=source if joined else None), seen


def whole_epoch(kind):
    return [batch.tolist() for batch in loader_of(kind).until("1ep")]


@pytest.mark.parametrize("kind", ["map", "stream", "remembers"])
@pytest.mark.parametrize("when", ["before init", "before the loop", "after a load", "in the middle"])
def test_batch_that_was_looked_at_is_issued_again_to_the_run(kind, when, tmp_path):
    source = loader_of(kind)
    if when == "before init":
        next(iter(source))
    step, state, seen = counting_run(source)
    if when == "before the loop":
        next(iter(source))
        next(iter(source))
    if when == "in the middle":
        for batch in source.until("2ba"):
            state, _ = step(state, batch)
        next(iter(source))
    if when == "after a load":
        for batch in source.until("2ba"):
            state, _ = step(state, batch)
        next(iter(source))
        dt.save_sharded(tmp_path / "ckpt", state)
        source, first = loader_of(kind), seen
        step, state, seen = counting_run(source)
        state = dt.load_sharded(tmp_path / "ckpt", state)
        next(iter(source))
        seen += first
    for batch in source.until("1ep"):
        state, _ = step(state, batch)
    assert seen == whole_epoch(kind)
    assert state.crossed("1ep")


def test_batch_whose_step_ran_on_copies_is_not_issued_again():
    source = loader_of("map")
    step, state, seen = counting_run(source)
    for _ in range(2):
        for batch in source.until("1ep"):
            state, _ = step(state, batch.clone())
            break
    assert seen == whole_epoch("map")[:2]


def test_loop_of_a_run_may_leave_out_batches():
    source = loader_of("map")
    step, state, seen = counting_run(source)
    for index, batch in enumerate(source):
        if index % 2:
            state, _ = step(state, batch)
    assert seen == whole_epoch("map")[1::2]
    assert source.position.epoch == 1


@pytest.mark.parametrize(("depth", "lost"), [(0, []), (1, []), (2, [3]), (3, [3, 4])])
def test_save_names_the_batches_that_a_loop_holds_back(depth, lost, recwarn):
    loader, waiting = loader_of("map"), []
    run = Run(loader)
    for batch in loader.until(LENGTH):
        waiting.append(batch)
        if len(waiting) > depth:
            run.take(waiting.pop(0))
        if len(run.used) == 2:
            run.loader.state_dict()
            break
    messages = [str(warning.message) for warning in recwarn]
    assert [f"leaves out batches {lost} of the run" in message for message in messages] == [True] * bool(lost)


def test_loop_that_leaves_out_batches_saves_without_a_warning(recwarn):
    run = Run(loader_of("map"))
    for number, batch in enumerate(run.loader.until(LENGTH)):
        if number % 3 == 0:
            run.take(batch)
        run.loader.state_dict()
    assert not recwarn.list
