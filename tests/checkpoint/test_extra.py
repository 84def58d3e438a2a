"""Objects of the caller in a checkpoint: no value, no position of a loader and no rank's own value is lost without an error."""

import gc
import re
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain as dt
from checkpoint.filled import LAYOUTS, laid_out
from dtrain import Checkpointer
from dtrain.checkpoint import not_saved, per_rank
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointMismatchError, ConfigError, DtrainError

CASES = [(world, *case) for world in (1, 2) for case in zip(LAYOUTS[world], ("sync", "async") * 2, strict=True)]
# Start of the message about a loader that is missing.
MISSING = (
    r"save_sharded: the state must hold the position of Loader\(samples=\w+, global_batch_size=\d+, epoch=\d+\), "
    r"or a resume repeats its batches\. Pass it: step\.init\(model, optimizer, loader=loader\)"
)


def loss(model: nn.Module, batch: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def begin(strategy: str = "none", **objects: Any) -> tuple[dt.step.Step, dt.TrainState]:
    torch.manual_seed(0)
    model = laid_out(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), strategy)
    step = dt.compose_step(loss)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), **objects)


def build_loader(data: Any = None, **options: Any) -> dt.data.Loader:
    rows = [torch.full((2,), float(number)) for number in range(8)] if data is None else data
    return dt.build_loader(rows, global_batch_size=2, seed=0, **options)


def train(step: dt.step.Step, state: dt.TrainState, loader: dt.data.Loader, batches: int = 2) -> dt.TrainState:
    for number, batch in enumerate(loader.until("4ep"), 1):
        state, _ = step(state, batch)
        if number == batches:
            break
    return state


@pytest.mark.parametrize("how", ["function", "async", "object", "two states"])
def test_save_without_the_loader_of_the_batches_is_refused(tmp_path, how):
    step, state = begin()
    loader = build_loader()
    state = train(step, state, loader)
    root = tmp_path / "root"
    save = {
        "function": lambda: dt.save_sharded(root, state),
        "async": lambda: dt.save_sharded(root, state, mode="async"),
        "object": lambda: Checkpointer(root).save(state),
        "two states": lambda: dt.save_sharded(root, {"g": state}),
    }[how]
    with pytest.raises(ConfigError, match=MISSING) as caught:
        save()
    assert "loader=dt.checkpoint.not_saved(loader)" in str(caught.value)
    assert not root.exists()


@pytest.mark.parametrize("place", [{}, {"stateful": {"other": [1]}}], ids=["only", "beside a list"])
def test_loader_in_extra_is_refused_with_the_advice(tmp_path, place):
    loader = build_loader()
    _, state = begin(**place)
    for call in (dt.save_sharded, dt.load_sharded):
        with pytest.raises(ConfigError, match=r"extra must not hold a loader of the run, got data=Loader.*loader=loader\)"):
            call(tmp_path / "root", state, extra={"data": loader})
        with pytest.raises(ConfigError, match="extra must not hold a loader"):
            call(tmp_path / "root", state, extra={"data": not_saved(loader)})
    assert not (tmp_path / "root").exists()


def test_loader_and_objects_of_the_state_continue_after_a_load(tmp_path):
    loader, seen = build_loader(), {"epochs": [0]}
    step, state = begin(loader=loader, stateful={"seen": seen})
    assert (state.loader is loader, state.stateful["seen"] is seen, state.restored) == (True, True, None)
    state = train(step, state, loader, 5)
    seen["epochs"].append(5)
    saved = dt.save_sharded(tmp_path, state).result()
    again, given = build_loader(), {"epochs": []}
    step, state = begin(loader=again, stateful={"seen": given})
    state = dt.load_sharded(tmp_path, state)
    assert (state.step, state.clock.epoch, again.position, given) == (5, 1, loader.position, {"epochs": [0, 5]})
    assert (state.restored.step, state.restored.path, state.restored.ignored) == (5, saved.path, ())
    assert state.restored.seconds > 0
    state = train(step, state, again)
    assert (state.step, state.restored.step, again.position.samples) == (7, 5, 6)


def test_loaded_clock_without_its_loader_is_an_error_in_both_directions(tmp_path):
    loader = build_loader()
    step, state = begin(loader=loader)
    dt.save_sharded(tmp_path / "with", train(step, state, loader))
    dt.save_sharded(tmp_path / "without", begin()[1])
    with pytest.raises(CheckpointMismatchError, match=r"1 entry differs.* marks loader with not_saved: pass ignore=.* or take"):
        dt.load_sharded(tmp_path / "with", begin(loader=not_saved(loader))[1])
    with pytest.raises(CheckpointMismatchError, match=r'holds loader. Pass each .* ignore=\["loader", "stateful/loader"\] to'):
        dt.load_sharded(tmp_path / "with", begin(stateful={"loader": loader})[1])
    with pytest.raises(CheckpointMismatchError, match=r"loader must be a loader of the same library .*, got Rows"):
        dt.load_sharded(tmp_path / "with", begin(loader=Rows())[1])
    message = r"loader: checkpoint a value, here nothing|Pass step.init\(model, optimizer, loader=loader\) to load"
    with pytest.raises(CheckpointMismatchError, match=message):
        dt.load_sharded(tmp_path / "with", begin()[1])
    with pytest.raises(CheckpointMismatchError, match=r'ignore=\["loader"\] to keep the current values'):
        dt.load_sharded(tmp_path / "without", begin(loader=loader)[1])
    again = build_loader()
    state = dt.load_sharded(tmp_path / "with", begin(loader=again)[1], ignore=["loader"])
    assert (state.step, again.position.samples, state.restored.ignored) == (2, 0, ("loader",))
    assert dt.load_sharded(tmp_path / "without", begin(loader=again)[1], ignore=["loader"]).step == 0
    state = dt.load_sharded(tmp_path / "with", begin(loader=again)[1], scope="weights")
    assert (state.step, state.restored.step, again.position.samples) == (0, 2, 0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DataLoader": (
        {"loader": torch.utils.data.DataLoader([torch.ones(2)])},
        r"init: loader must resume in the middle of an epoch, got a torch DataLoader, which cannot. Use dt.build_loader",
    ),
    "list": ({"loader": [1]}, "init: loader must have state_dict and load_state_dict, got list. Use dt.build_loader"),
    "per_rank": ({"loader": per_rank([1])}, "init: loader must be a loader, got per_rank"),
    "number": ({"stateful": {"a": 1}}, "init: stateful: a must be filled in place by a load, which int 1 cannot"),
    "no dict": ({"stateful": [1]}, "init: stateful must be a dict of named objects, got list"),
    "name": ({"stateful": {1: [2]}}, "init: stateful must have string names, got int 1"),
    "generator": (
        {"stateful": {"gen": torch.Generator()}},
        "stateful: gen must be an object with .*, got torch.*Generator. Wrap",
    ),
    "set": ({"stateful": {"a": {1}}}, "stateful: a must be an object with .*, or a dict, list or tensor, got builtins.set"),
    "array": ({"stateful": {"a": torch.ones(1, device="cpu").numpy()}}, r"got numpy.ndarray. Pass torch.from_numpy\(array\)"),
    "class": ({"stateful": {"a": nn.Linear}}, "got the class Linear"),
    "function": ({"stateful": {"a": len}}, "got builtins.builtin_function_or_method"),
    "two marks": ({"stateful": {"a": not_saved(per_rank([1]))}}, "init: stateful: a must have one mark, got two"),
}


@pytest.mark.parametrize(("objects", "message"), REFUSED.values(), ids=REFUSED)
def test_object_that_cannot_resume_is_refused_by_init_in_one_line(objects, message):
    with pytest.raises(ConfigError, match=message) as caught:
        begin(**objects)
    assert "\n" not in str(caught.value)


class Rows:
    """A loader of another library, whose state belongs to its rank if ``own`` is True."""

    def __init__(self, *, own: bool = False) -> None:
        self.at, self.own = 0, own

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 8:
            self.at += 1
            yield torch.full((2, 2), float(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "draws": torch.tensor([get_dist_info().rank * self.own])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.drawn = state["at"], int(state["draws"])


def save_rows(root: str, own: bool) -> None:
    loader = Rows(own=own)
    step, state = begin("full_shard", loader=loader)
    for batch in loader:
        state, _ = step(state, batch)
        if state.step == 3:
            break
    dt.save_sharded(root, state)


def load_rows(root: str) -> list[Any]:
    loader = Rows()
    _, state = begin("full_shard", loader=loader)
    try:
        state = dt.load_sharded(root, state)
    except CheckpointMismatchError as error:
        return [str(error)]
    return [state.step, loader.at, loader.drawn]


@pytest.mark.costly
def test_loader_of_another_library_resumes_and_may_differ_between_ranks(tmp_path, ranks):
    ranks(2).run(save_rows, str(tmp_path / "equal"), False)
    assert ranks(2).run(load_rows, str(tmp_path / "equal")) == [[3, 3, 0]] * 2
    # Equal states of two ranks would make one rank read half of the samples.
    assert "loader has a value for each of 2 ranks" in ranks(1).run(load_rows, str(tmp_path / "equal"))[0][0]
    ranks(2).run(save_rows, str(tmp_path / "own"), True)
    dt.checkpoint.verify(tmp_path / "own")
    assert ranks(2).run(load_rows, str(tmp_path / "own")) == [[3, 3, 0], [3, 3, 1]]
    ((message,),) = ranks(1).run(load_rows, str(tmp_path / "own"))
    assert "loader has a value for each of 2 ranks, and this run has 1" in message
    assert "ignore=['loader'] to start anew" in message


class Counted:
    """An object that counts how often its state is taken and given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("save")
        return {"value": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load")


def test_object_of_two_states_is_saved_and_loaded_once(tmp_path):
    loader, shared = build_loader(), Counted()
    step, g = begin(loader=loader, stateful={"shared": shared, "own": [1]})
    d = begin(loader=loader, stateful={"again": shared, "own": [2]})[1]
    for batch in loader.until("3ba"):
        (g, _), (d, _) = step(g, batch), step(d, batch)
    dt.save_sharded(tmp_path, {"g": g, "d": d})
    assert shared.calls == ["save"]
    again, back, own = build_loader(), Counted(), [[], []]
    names = {"g": "shared", "d": "again"}
    fresh = {
        name: begin(loader=again, stateful={names[name]: back, "own": own[index]})[1] for index, name in enumerate(("g", "d"))
    }
    states = dt.load_sharded(tmp_path, fresh)
    assert (back.calls, own, again.position.samples) == (["load"], [[1], [2]], 6)
    assert [(state.step, state.restored.step) for state in states.values()] == [(3, 3)] * 2
    alone = build_loader()
    d = begin(loader=alone, stateful={"again": Counted(), "own": []})[1]
    assert dt.load_sharded(tmp_path, {"d": d}, ignore=["states/g"])["d"].step == 3
    assert alone.position.samples == 6, "the loader is stored with the other state"
    mixed = [1]
    fresh = {"g": begin(stateful={"own": mixed})[1], "d": begin(stateful={"own": mixed})[1]}
    with pytest.raises(CheckpointMismatchError, match="stateful/own and states/g/stateful/own were two objects"):
        dt.load_sharded(tmp_path, fresh, ignore=["loader", "stateful/again", "stateful/shared"])


def test_further_loader_belongs_to_the_stateful_objects(tmp_path):
    first, second = build_loader(), build_loader()
    step, state = begin(loader=first)
    state = train(step, train(step, state, first, 1), second, 2)
    with pytest.raises(ConfigError, match=MISSING):
        dt.save_sharded(tmp_path / "root", state)
    step, state = begin(loader=(first := build_loader()), stateful={"second": (second := build_loader())})
    for one, other in zip(first.until("2ba"), second.until("2ba"), strict=True):
        state, _ = step(state, {"x": one, "y": other}["x" if state.step % 2 else "y"])
    state = train(step, state, second, 1)
    dt.save_sharded(tmp_path / "root", state)
    again = [build_loader(), build_loader()]
    dt.load_sharded(tmp_path / "root", begin(loader=again[0], stateful={"second": again[1]})[1])
    assert [loader.position for loader in again] == [first.position, second.position]


def test_weights_need_no_loader(tmp_path):
    step, state = begin()
    loader = build_loader()
    state = train(step, state, loader)
    assert dt.save_sharded(tmp_path, state, scope="weights").result().step == 2


def test_loader_of_an_earlier_phase_is_not_demanded(tmp_path):
    step, state = begin(loader=not_saved(None))
    first, second = build_loader(), build_loader()
    state = train(step, train(step, state, first, 1), second, 2)
    with pytest.raises(ConfigError, match=r"position of Loader\(samples=8, global_batch_size=2, epoch=0\)"):
        dt.save_sharded(tmp_path / "root", state)
    step, state = begin(stateful={"second": second})
    state = train(step, train(step, state, first, 1), second, 1)
    assert dt.save_sharded(tmp_path / "root", state).result().step == 2


def test_message_leaves_out_the_names_of_the_data(tmp_path):
    step, state = begin()
    rows = [torch.ones(2)] * 8
    loader = build_loader(rows)
    loader._fingerprint["shards"] = [f"shard-{number}" for number in range(1000)]
    state = train(step, state, loader)
    with pytest.raises(ConfigError, match=MISSING) as caught:
        dt.save_sharded(tmp_path / "root", state)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.costly
def test_vanished_loader_is_refused_and_the_advice_works(tmp_path):
    step, state = begin()
    state = train(step, state, build_loader())
    gc.collect()
    with pytest.raises(ConfigError, match=r"position of the last loader, which no longer exists, .*not_saved\(loader\)"):
        dt.save_sharded(tmp_path / "root", state)
    step, state = begin(stateful={"cache": not_saved({"a": 1})})
    state = train(step, state, build_loader())
    gc.collect()
    with pytest.raises(ConfigError, match="position of the last loader, which no longer exists"):
        dt.save_sharded(tmp_path / "root", state)
    step, state = begin(loader=not_saved(None))
    state = train(step, state, build_loader())
    gc.collect()
    assert dt.save_sharded(tmp_path / "root", state).result().step == 2
    assert dt.load_sharded(tmp_path / "root", begin()[1]).step == 2


def test_mark_of_a_vanished_loader_stands_for_no_loader_that_exists(tmp_path):
    step, state = begin(loader=not_saved(None))
    loader = build_loader()
    state = train(step, state, loader)
    with pytest.raises(ConfigError, match=MISSING):
        dt.save_sharded(tmp_path / "root", state)


@pytest.mark.parametrize("world", [1, 2])
def test_load_into_a_trained_state_moves_its_loader_back(ranks, tmp_path, world):
    ranks(world).run(load_twice, str(tmp_path))


def load_twice(folder):
    root = Path(folder)
    strategy = "none" if get_dist_info().world_size == 1 else "full_shard"
    loader = build_loader(mesh=dt.build_mesh() if strategy != "none" else None)
    step, state = begin(strategy, loader=loader)
    state = train(step, state, loader)
    dt.save_sharded(root, state)
    state = train(step, state, loader)
    state = dt.load_sharded(root, state)
    assert loader.position.samples == 4
    dt.save_sharded(root / "again", state)
    state = train(step, state, loader)
    assert (state.step, state.clock.samples) == (4, 8)
    assert (state.clock.epoch, loader.position.samples) == (1, 0)
    dt.save_sharded(root, state)


def test_load_of_weights_begins_with_the_current_position(tmp_path):
    loader = build_loader()
    step, state = begin(loader=loader)
    state = train(step, state, loader)
    dt.save_sharded(tmp_path / "one", state)
    state = dt.load_sharded(tmp_path / "one", state, scope="weights")
    state = train(step, state, loader)
    dt.save_sharded(tmp_path / "two", state)
    assert [info.step for info in dt.checkpoint.list_steps(tmp_path / "two")] == [state.step]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Without a state, so that it cannot continue in the middle."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(16.0).reshape(8, 2))


def test_loader_left_out_on_purpose_starts_anew(tmp_path):
    loader = build_loader(Stream(), shuffle=False)
    step, state = begin(loader=not_saved(loader))
    assert state.loader is loader
    state = train(step, state, loader, 4)
    assert state.clock.epoch == 1, "the clock counts the epochs of the loader"
    dt.save_sharded(tmp_path, state)
    again = build_loader(Stream(), shuffle=False)
    with pytest.raises(CheckpointMismatchError, match="loader: checkpoint nothing, here a value"):
        dt.load_sharded(tmp_path, begin(loader=again)[1])
    state = dt.load_sharded(tmp_path, begin(loader=not_saved(again))[1])
    assert (state.step, again.position.samples) == (4, 0)


def test_plain_data_loader_marked_as_not_saved_trains_and_saves(tmp_path):
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2)
    step, state = begin(loader=not_saved(loader))
    for batch in loader:
        state, _ = step(state, batch)
    assert dt.save_sharded(tmp_path, state).result().step == 2
    assert dt.load_sharded(tmp_path, begin(loader=not_saved(loader))[1]).step == 2


def copies_only(root):
    strategy = "none" if get_dist_info().world_size == 1 else "full_shard"
    step, state = begin(strategy)
    loader = build_loader(mesh=state.spec.mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader.until("4ba"):
            state, _ = step(state, batch * 2)
            dt.save_sharded(root, state)
    return [str(warning.message) for warning in caught if "should hold the position of" in str(warning.message)]


@pytest.mark.parametrize("world", [1, 2])
def test_loader_whose_batches_were_copied_gets_one_warning_on_rank_0(ranks, tmp_path, world):
    first, *others = ranks(world).run(copies_only, str(tmp_path))
    assert len(first) == 1
    assert first[0].startswith(
        "save_sharded: the state should hold the position of Loader(samples=8, global_batch_size=2, epoch=0)"
    )
    assert others == [[]] * (world - 1)


def schedule_rates(root, held):
    """Return the rates of a run of 2 steps, and of 2 steps of its resume, which builds all anew."""
    rates = []
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 2.0**-number)
        step = dt.compose_step(loss)
        state = dt.load_sharded(root, step.init(model, optimizer, stateful=held(scheduler)), missing_ok=True)
        for _ in range(2):
            rates.append(optimizer.param_groups[0]["lr"])
            state, _ = step(state, torch.ones(2, 2))
            scheduler.step()
            dt.save_sharded(root, state)
    return rates


def test_scheduler_of_torch_that_the_state_lacks_gets_one_warning_in_a_run(tmp_path):
    with pytest.warns(UserWarning, match="the state should hold the scheduler of the optimizer, or a resume starts") as caught:
        rates = schedule_rates(tmp_path, lambda scheduler: {})
    assert [Path(warning.filename).name for warning in caught] == ["test_extra.py"] * 2
    # The loaded rate is right for one step. Then the scheduler counts from 0.
    assert rates == [1.0, 0.5, 0.25, 0.5]


@pytest.mark.parametrize("name", ["itself", "in an object", "left out"])
def test_scheduler_of_torch_in_the_state_gets_no_warning(tmp_path, recwarn, name):
    class Training:
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def state_dict(self):
            return self.scheduler.state_dict()

        def load_state_dict(self, state):
            self.scheduler.load_state_dict(state)

    held = {"itself": lambda scheduler: scheduler, "in an object": Training, "left out": not_saved}[name]
    rates = schedule_rates(tmp_path / "root", lambda scheduler: {"scheduler": held(scheduler)})
    assert name == "left out" or rates == [1.0, 0.5, 0.25, 0.125]
    assert not [warning for warning in recwarn if "should hold" in str(warning.message)]


def test_loader_of_the_state_counts_epochs_of_copied_batches_without_a_warning(tmp_path, recwarn):
    loader = build_loader()
    step, state = begin(loader=loader)
    for batch in loader.until("4ba"):
        state, _ = step(state, batch * 2)
    dt.save_sharded(tmp_path / "root", state)
    assert state.clock.epoch == 1
    assert not [warning for warning in recwarn if "should hold" in str(warning.message)]


def test_kept_batch_of_another_loader_refuses_no_save(tmp_path):
    step, state = begin()
    kept = iter((held_out := build_loader()).until("1ep"))
    fixed = next(kept)
    for batch in torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2):
        state, _ = step(state, batch)
        dt.evaluate(state.model, [fixed], loss)
    with pytest.warns(UserWarning, match="save_sharded: the state should hold the position of") as caught:
        dt.save_sharded(tmp_path, state)
    assert caught[0].filename == __file__, "the line of the loop"
    assert held_out.position.samples == 2


def test_end_of_one_loop_keeps_the_loader_of_another(tmp_path):
    first, second = build_loader(), build_loader()
    step, state = begin(stateful={"first": first})
    one = first.until("2ba")
    next(one)
    batch = next(other := second.until("2ba"))
    one.close()
    state, _ = step(state, batch * 2)
    with pytest.warns(UserWarning, match="save_sharded: the state should hold the position of"):
        dt.save_sharded(tmp_path, state)
    other.close()


def test_both_of_two_loaders_that_take_turns_are_needed(tmp_path):
    first, second = build_loader(), build_loader()
    states = [begin(stateful={"first": first}), begin(stateful={"first": first, "second": second})]
    for _, (step, state) in enumerate(states):
        for one, other in zip(first.until("2ep"), second.until("2ep"), strict=False):
            state, _ = step(state, one)
            state, _ = step(state, other)
            if state.step == 4:
                break
        if "second" in state.stateful:
            assert dt.save_sharded(tmp_path / "root", state).result().written
        else:
            with pytest.raises(ConfigError, match=MISSING):
                dt.save_sharded(tmp_path / "root", state)


def test_hand_made_batches_need_no_loader(tmp_path):
    step, state = begin()
    held_out = build_loader()
    for _ in range(2):
        dt.evaluate(state.model, held_out, loss)
        state, _ = step(state, torch.ones(2, 2))
    assert dt.save_sharded(tmp_path, state).result().step == 2


def test_plain_data_are_filled_in_place(tmp_path):
    _, state = begin()
    tensor = torch.arange(3.0)
    saved = {
        "best": {"loss": 1.5, "at": {"step": 7}, "rows": [tensor, {"a": 1}], "gone": (1, 2)},
        "history": [1.0, float("inf")],
        "table": tensor * 2,
        "counts": Counter(a=3),
        "order": OrderedDict(z=1, a=2),
    }
    dt.save_sharded(tmp_path, state, extra=saved)
    inner, held, row = {"step": 0}, torch.zeros(3), {"b": 2}
    best: dict[str, Any] = {"loss": 9.0, "at": inner, "rows": [held, row], "new": 1}
    history: list[float] = [0.0, 1.0, 2.0]
    table, counts, order = torch.zeros(3), Counter(b=1), OrderedDict(a=0)
    given = {"best": best, "history": history, "table": table, "counts": counts, "order": order}
    dt.load_sharded(tmp_path, begin()[1], extra=given)
    assert (best["loss"], best["gone"], set(best)) == (1.5, (1, 2), {"loss", "at", "rows", "gone"})
    assert (best["at"] is inner, best["rows"][0] is held, best["rows"][1] is row) == (True, True, True)
    assert (inner, held.tolist(), row) == ({"step": 7}, [0.0, 1.0, 2.0], {"a": 1})
    assert history == [1.0, float("inf")]
    assert table.tolist() == [0.0, 2.0, 4.0]
    assert (counts, type(counts), order, list(order)) == (Counter(a=3), Counter, OrderedDict(z=1, a=2), ["z", "a"])


def test_parts_of_plain_data_keep_their_kind(tmp_path):
    saved = {"seen": Counter(a=1), "order": OrderedDict(z=1, a=torch.ones(1)), "held": Counter(b=2), "other": Counter(c=3)}
    dt.save_sharded(tmp_path, begin()[1], extra={"box": saved})
    held, other = Counter(x=1), {"y": 1}
    box: dict[str, Any] = {"held": held, "other": other}
    dt.load_sharded(tmp_path, begin()[1], extra={"box": box})
    assert repr(box) == repr(saved)
    assert (box["held"] is held, other) == (True, {"y": 1})
    box["seen"]["b"] += 1


def test_object_that_occurs_twice_is_filled_once(tmp_path):
    dt.save_sharded(tmp_path, begin()[1], extra={"rows": [[1], [2]]})
    row: list[int] = []
    rows = [row, row]
    dt.load_sharded(tmp_path, begin()[1], extra={"rows": rows})
    assert rows == [[1], [2]]


UNFILLED: dict[str, Any] = {"number": 3, "text": "a", "None": None, "tuple": ([],), "bool": True, "own number": per_rank(2)}


@pytest.mark.parametrize("value", UNFILLED.values(), ids=UNFILLED)
def test_value_that_a_load_cannot_fill_is_refused_by_save_and_load(tmp_path, value):
    _, state = begin()
    message = r"extra: note must be filled in place by a load, which .* cannot. Put it into a dict .*\{'note': \{'value'"
    with pytest.raises(ConfigError, match="save_sharded: " + message):
        dt.save_sharded(tmp_path / "root", state, extra={"note": value})
    assert not (tmp_path / "root").exists()
    dt.save_sharded(tmp_path / "root", state, extra={"note": [1]})
    with pytest.raises(ConfigError, match="load_sharded: " + message):
        dt.load_sharded(tmp_path / "root", state, extra={"note": value})
    state._check_not_stale("test")


@pytest.mark.parametrize("name", [None, 3, ("a",)], ids=str)
def test_name_that_is_no_text_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"save_sharded: extra must have string names, got {type(name).__name__}"):
        dt.save_sharded(tmp_path / "root", begin()[1], extra={name: []})
    assert not (tmp_path / "root").exists()


MISFITS: dict[str, tuple[Any, str]] = {
    "list for dict": ([], "is stored as a dict, and a list was passed"),
    "tensor for dict": (torch.zeros(2), "is stored as dict|is stored as a dict, and a tensor was passed"),
    "marked": (per_rank({}), "was saved as a single value. Pass the object without dt.checkpoint.per_rank"),
}


@pytest.mark.parametrize(("value", "message"), MISFITS.values(), ids=MISFITS)
def test_value_of_another_kind_is_refused_before_anything_changes(tmp_path, value, message):
    step, state = begin()
    dt.save_sharded(tmp_path, step(state, torch.ones(2, 2))[0], extra={"note": {"a": 1}, "other": [1]})
    _, fresh = begin()
    before, other = [param.clone() for param in fresh.params.values()], [0]
    with pytest.raises(CheckpointMismatchError, match=f"extra: note ({message})"):
        dt.load_sharded(tmp_path, fresh, extra={"note": value, "other": other})
    assert other == [0]
    assert all(map(torch.equal, fresh.params.values(), before))


def test_tensor_that_cannot_be_filled_is_refused(tmp_path):
    dt.save_sharded(tmp_path, begin()[1], extra={"table": torch.ones(2)})
    with torch.inference_mode():
        inference = torch.zeros(2)
    targets = {
        r"is stored as F32 \[2\], and a tensor torch.float32 \[3\]": torch.zeros(3),
        r"is stored as F32 \[2\], and a tensor torch.int64": torch.zeros(2, dtype=torch.int64),
        r"got an expanded tensor with strides \(0,\)": torch.zeros(1).expand(2),
        "inference mode": inference,
    }
    for message, target in targets.items():
        with pytest.raises(CheckpointMismatchError, match=f"extra: table .*{message}"):
            dt.load_sharded(tmp_path, begin()[1], extra={"table": target})


class Hidden:
    """An object whose tensor belongs to its rank."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((2,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


def own_values(rank: float) -> dict[str, Any]:
    return {"tensor": torch.full((2,), rank), "object": Hidden(rank), "plain": {"rank": rank, "inner": [torch.tensor(rank)]}}


def values_of(extra: dict[str, Any]) -> list[Any]:
    plain = extra["plain"]
    return [extra["tensor"].tolist(), extra["object"].tensor.tolist(), plain["rank"], float(plain["inner"][0])]


def refusal(call: Any) -> str:
    try:
        call()
    except DtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unequal_saves(root: str, mode: Any) -> dict[str, str]:
    rank = get_dist_info().rank
    _, state = begin("full_shard")
    refusals = {}
    for name, value in own_values(float(rank)).items():
        refusals[name] = refusal(
            lambda name=name, value=value: dt.save_sharded(root, state, extra={name: value, "same": [1]}, mode=mode)
        )
    marks = {"mine": per_rank([1]) if rank == 0 else [1]}
    refusals["mine"] = refusal(lambda: dt.save_sharded(root, state, extra=marks, mode=mode))
    return refusals


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_that_differ_between_ranks_are_refused(tmp_path, ranks, mode):
    for refusals in ranks(2).run(unequal_saves, str(tmp_path / "root"), mode):
        for name in ("tensor", "object", "plain"):
            assert refusals[name] == (
                f"ConfigError: save_sharded: extra/{name} must be equal on all ranks, but ranks [1] differ from rank 0. "
                f'Make it equal on all ranks, or extra={{"{name}": dt.checkpoint.per_rank(...)}} saves one value per rank.'
            )
        assert "extra/mine must be equal on all ranks" in refusals["mine"]
    assert not (tmp_path / "root").exists()


def save_own(root: str, strategy: str, mode: Any, several: bool) -> None:
    extra = {name: per_rank(value) for name, value in own_values(float(get_dist_info().rank)).items()}
    _, state = begin(strategy)
    dt.save_sharded(root, {"g": state} if several else state, extra={**extra, "same": [5]}, mode=mode).wait()


def load_own(root: str, strategy: str, several: bool) -> list[Any]:
    _, state = begin(strategy)
    values, same = own_values(-1.0), [0]
    extra = {**{name: per_rank(value) for name, value in values.items()}, "same": same}
    dt.load_sharded(root, {"g": state} if several else state, extra=extra)
    return [values_of(values), same]


def odd_names(root: str) -> list[Any]:
    rank = get_dist_info().rank
    _, state = begin("full_shard")
    dt.save_sharded(root, state, extra={"$": per_rank({"$": rank, 3: torch.tensor(rank)}), "a/b~c": per_rank([rank])})
    dollar: dict[Any, Any] = {}
    slash: list[int] = []
    dt.load_sharded(root, begin("full_shard")[1], extra={"$": per_rank(dollar), "a/b~c": per_rank(slash)})
    return [dollar["$"], int(dollar[3]), slash]


@pytest.mark.parametrize("world", [1, 2])
def test_marked_values_with_odd_names_come_back(tmp_path, ranks, world):
    assert ranks(world).run(odd_names, str(tmp_path)) == [[rank, rank, [rank]] for rank in range(world)]


def load_unmarked(root: str) -> list[str]:
    _, state = begin("full_shard")
    plain = {**own_values(-1.0), "same": [0]}
    marked = {name: per_rank(value) for name, value in own_values(-1.0).items()} | {"same": [0]}
    ignore = ["extra/tensor", "extra/object", "extra/plain"]
    return [
        refusal(lambda: dt.load_sharded(root, state, extra=plain)),
        refusal(lambda: dt.load_sharded(root, state, extra=marked)),
        refusal(lambda: dt.load_sharded(root, state, extra={"same": [0]}, ignore=ignore)),
    ]


@pytest.mark.parametrize(("world", "strategy", "mode"), CASES)
def test_marked_values_come_back_to_their_rank(tmp_path, ranks, world, strategy, mode):
    ranks(world).run(save_own, str(tmp_path), strategy, mode, strategy == "replicate")
    dt.checkpoint.verify(tmp_path)
    for rank, loaded in enumerate(ranks(world).run(load_own, str(tmp_path), strategy, strategy == "replicate")):
        assert loaded == [[[rank] * 2, [rank] * 2, rank, rank], [5]]


def test_marked_values_need_their_mark_and_their_number_of_ranks(tmp_path, ranks):
    ranks(2).run(save_own, str(tmp_path), "full_shard", "sync", False)
    for world in (1, 2, 3):
        for plain, marked, ignored in ranks(world).run(load_unmarked, str(tmp_path)):
            assert re.search("extra: tensor was saved as a value per rank. Pass the object with dt.checkpoint.per_rank", plain)
            if world == 2:
                assert marked == "nothing"
            else:
                assert f"extra: tensor has a value for each of 2 ranks, and this run has {world}. Load on 2 ranks" in marked
            assert ignored == ("nothing" if world != 2 else ignored)


def save_without_loader(root: str, strategy: str, mode: Any) -> list[str]:
    step, state = begin(strategy)
    loader = build_loader(mesh=state.spec.mesh)
    missing = train(step, state, loader)
    refused = refusal(lambda: dt.save_sharded(root, missing, mode=mode))
    # One rank has forgotten the loader.
    loader = build_loader(mesh=state.spec.mesh)
    step, state = begin(strategy, **({"loader": loader} if get_dist_info().rank else {}))
    one = train(step, state, loader)
    on_one = refusal(lambda: dt.save_sharded(root, one, mode=mode))
    loader = build_loader(mesh=state.spec.mesh)
    step, state = begin(strategy, loader=loader)
    state = train(step, state, loader)
    return [refused, on_one, refusal(lambda: dt.save_sharded(root, state, mode=mode).wait())]


@pytest.mark.parametrize(("world", "strategy", "mode"), CASES)
def test_save_without_the_loader_is_refused_on_all_ranks(tmp_path, ranks, world, strategy, mode):
    for missing, on_one, given in ranks(world).run(save_without_loader, str(tmp_path / "root"), strategy, mode):
        assert "save_sharded: the state must hold the position of Loader" in missing
        assert "save_sharded: the state must hold the position of Loader" in on_one
        assert given == "nothing"


def unequal_objects(root: str) -> list[str]:
    rank = get_dist_info().rank
    plain = begin("full_shard", stateful={"seen": [rank]})[1]
    marked = begin("full_shard", stateful={"seen": per_rank(seen := [rank])})[1]
    refusals = [refusal(lambda: dt.save_sharded(root, plain)), refusal(lambda: dt.save_sharded(root, marked))]
    seen[:] = []
    dt.load_sharded(root, marked)
    return [*refusals, seen]


def test_objects_of_the_state_must_be_equal_or_marked(tmp_path, ranks):
    for rank, (plain, marked, seen) in enumerate(ranks(2).run(unequal_objects, str(tmp_path / "root"))):
        assert plain == (
            "ConfigError: save_sharded: stateful/seen must be equal on all ranks, but ranks [1] differ from rank 0. "
            'Make it equal on all ranks, or stateful={"seen": dt.checkpoint.per_rank(...)} saves one value per rank.'
        )
        assert (marked, seen) == ("nothing", [rank])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_data_loader_of_torchdata_resumes_in_the_middle(tmp_path, shuffle):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def first_steps(root: Path | None, until: int) -> list[Any]:
        torch.manual_seed(3)
        rows = [torch.full((2,), float(number)) for number in range(8)]
        loader = stateful.StatefulDataLoader(rows, batch_size=2, shuffle=shuffle)
        step, state = begin(loader=loader)
        state = state if root is None else dt.load_sharded(root, state, missing_ok=True)
        seen = []
        for batch in loader:
            state, _ = step(state, batch)
            seen.append(batch[:, 0].tolist())
            if state.step == until:
                break
        if root is not None:
            dt.save_sharded(root, state)
        return seen

    whole = first_steps(None, 4)
    assert first_steps(tmp_path, 2) + first_steps(tmp_path, 4) == whole


def changed_after_save(root: str) -> list[Any]:
    strategy = "none" if get_dist_info().world_size == 1 else "full_shard"
    rank, written = get_dist_info().rank, []

    def fresh(**more: Any) -> tuple[Any, dt.step.Step, dt.TrainState, dict[str, Any]]:
        loader, best = build_loader(mesh=dt.build_mesh() if strategy != "none" else None), {"acc": 0.0}
        own = {"of_rank": per_rank({"value": 0})}
        step, state = begin(strategy, loader=loader, stateful={"best": best, **own, **more})
        return loader, step, state, best

    def save(state: dt.TrainState, **options: Any) -> None:
        written.append(dt.save_sharded(root, state, **options).result().written)

    loader, step, state, best = fresh()
    state = train(step, state, loader)
    save(state)
    best["acc"] = 0.5
    save(state, mode="async")
    # One rank's own value decides for all.
    state.stateful["of_rank"]["value"] = int(rank == get_dist_info().world_size - 1)
    save(state)
    save(state, mode="async")
    loader.skip(2)
    save(state)
    save(state, extra={"note": [torch.ones(2)]})
    save(state)
    loader, _, state, best = fresh()
    state = dt.load_sharded(root, state)
    loaded = [best, state.stateful["of_rank"]["value"], loader.position.samples]
    save(state)
    loader, _, state, best = fresh(new=[1])
    save(dt.load_sharded(root, state, ignore=["loader", "stateful/new"]))
    loader, _, state, best = fresh(new=[])
    state = dt.load_sharded(root, state)
    return [written, *loaded, loader.position.samples, state.stateful["new"]]


@pytest.mark.parametrize("world", [1, 2])
def test_final_save_writes_what_changed_since_the_save_of_the_step(ranks, tmp_path, world):
    written = [True, True, True, False, True, True, True, False, True]
    for rank, results in enumerate(ranks(world).run(changed_after_save, str(tmp_path))):
        assert results == [written, {"acc": 0.5}, int(rank == world - 1), 6, 0, [1]]


def test_save_after_a_load_without_some_names_is_written(tmp_path):
    step, state = begin(stateful={"note": [1]})
    dt.save_sharded(tmp_path, step(state, torch.ones(2, 2))[0])
    _, state = begin(stateful={"note": []})
    assert dt.save_sharded(tmp_path, dt.load_sharded(tmp_path, state, ignore=["0.*"])).result().written


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_free_save_needs_no_space_and_removes_old_steps(tmp_path, monkeypatch, mode):
    step, state = begin()
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 2))
        dt.save_sharded(tmp_path, state, mode=mode)
    dt.save_sharded(tmp_path, state).wait()
    monkeypatch.setattr("dtrain.storage.free_bytes", lambda path: 1)
    assert not dt.save_sharded(tmp_path, state, mode=mode, keep_last=1).result().written
    assert [info.step for info in dt.checkpoint.list_steps(tmp_path)] == [3]
    state, _ = step(state, torch.ones(2, 2))
    with pytest.raises(dt.errors.CheckpointError, match="free space of"):
        dt.save_sharded(tmp_path, state, mode=mode).wait()


def test_stop_of_the_loop_that_has_judged_must_be_saved(tmp_path):
    def run(held: bool, judge: bool = True, extra: Any = None) -> bool:
        loader, stop = build_loader(), dt.monitors.early_stop("loss", patience=5)
        step, state = begin(loader=loader, stateful={"stop": stop} if held else {})
        for batch in loader.until("2ba", stop=stop):
            state, _ = step(state, batch)
        if judge:
            stop(state, {"loss": 1.0})
        return dt.save_sharded(tmp_path / "root", state, extra=extra and {"stop": stop}).result().written

    message = r"must hold EarlyStop\('loss'.* of loader.until\(stop=\.\.\.\).*stateful=\{'stop': stop\}"
    with pytest.raises(ConfigError, match=message):
        run(held=False)
    assert not (tmp_path / "root").exists()
    for number, options in enumerate(({"held": True}, {"held": False, "judge": False}, {"held": False, "extra": True})):
        assert run(**options), number
        (tmp_path / "root").rename(tmp_path / str(number))


def test_state_that_a_load_has_spent_names_the_load(tmp_path):
    step, state = begin()
    dt.save_sharded(tmp_path, state)
    loaded = dt.load_sharded(tmp_path, state)
    for spent in (state, state):
        with pytest.raises(
            dt.errors.StaleStateError, match=r"passed to load_sharded.*`state = dt.load_sharded\(\"ckpt\", state"
        ):
            step(spent, torch.ones(2, 2))
    newer, _ = step(loaded, torch.ones(2, 2))
    with pytest.raises(dt.errors.StaleStateError, match="this state was stepped already"):
        step(loaded, torch.ones(2, 2))
    assert newer.step == 1


class Refusing(Rows):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no such thing")


def test_object_that_refuses_its_state_is_named(tmp_path):
    dt.save_sharded(tmp_path, begin(stateful={"rows": Rows()})[1])
    with pytest.raises(ValueError, match="no such thing") as caught:
        dt.load_sharded(tmp_path, begin(stateful={"rows": Refusing()})[1])
    assert caught.value.__notes__ == ["load_sharded: stateful/rows did not take its stored state."]


def test_value_inside_an_object_is_named_as_the_run_names_it(tmp_path):
    _, state = begin(stateful={"box": {"gen": torch.Generator()}})
    with pytest.raises(ConfigError, match=r"^stateful/box/gen: state must be tensors and plain data"):
        dt.save_sharded(tmp_path / "root", state)
