"""Early stopping: decisions computed by hand, after a resume, and equal on all ranks."""

import math

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, PeerError
from dtrain.monitors.early_stopping import early_stop, threshold_stop
from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.schedules.durations import RunLength

NAN, INF = math.nan, math.inf


def clocks(steps, *, run=None, samples=4, epoch=3):
    """The clock after each step; every third one ends an epoch."""
    clock, ticks = Clock(run_length=run), []
    for number in range(steps):
        clock = clock.tick(samples=samples, tokens=10, seconds=0.5, position=EpochPosition(*divmod(number + 1, epoch)))
        ticks.append(clock)
    return ticks


def judged(stop, values, **how):
    return [stop.decide(clock, value) for clock, value in zip(clocks(len(values), **how), values, strict=True)]


@pytest.mark.parametrize(
    ("values", "options", "stops_at", "best"),
    [
        ([3, 2, 1, 1, 1], {}, 5, 1),
        ([3, 2, 2.5, 1.9, 2, 2], {}, 6, 1.9),
        ([1, 2, 3, 3], {"goal": "max"}, None, 3),
        ([1, 3, 2, 3], {"goal": "max"}, 4, 3),
        ([3, 2.9, 2.8, 2.7], {"min_delta": 0.5}, 3, 3),
        ([3, 2.6, 2.5, 2.5], {"min_delta": 0.5}, 3, 3),  # 2.5 is better by 0.5 and no more
        ([3, 2.6, 2.4], {"min_delta": 0.5}, None, 2.4),
        ([NAN, NAN, NAN], {}, 3, None),
        ([NAN, 5, NAN, NAN], {}, 4, 5),
        ([2, NAN, 1, NAN, NAN], {}, 5, 1),
        ([INF, 7, 8, 9], {}, 4, 7),
        ([INF, INF, INF], {}, 3, None),
        ([-INF, -INF, INF], {}, 3, -INF),
        ([-INF, 3, INF, 4, 5], {"goal": "max"}, 5, INF),
    ],
)
def test_early_stop_triggers_after_patience_without_improvement(values, options, stops_at, best):
    stop = early_stop("loss", patience=2, **options)
    answers = judged(stop, values)
    assert (answers.index(True) + 1 if True in answers else None) == stops_at
    assert stop.best == best


@pytest.mark.parametrize(
    ("patience", "stops_at"),
    [("2ba", 3), ("8sp", 3), ("9sp", 4), ("30tok", 4), ("1sec", 3), ("1ep", 3), ("2ep", 6), ("0.2dur", 3), ("0.5dur", 6)],
)
def test_patience_accepts_any_unit(patience, stops_at):
    answers = judged(early_stop("loss", patience=patience), [1.0] * 8, run=RunLength(total=10))
    assert answers.index(True) + 1 == stops_at


def test_patience_as_share_of_run_is_not_rounded():
    stop, late = early_stop("loss", patience="0.1dur"), []
    for best in range(1, 91):  # a better value at each step, then none: 10 steps of 100 later
        stop = early_stop("loss", patience="0.1dur")
        answers = judged(stop, [2.0] * best + [1.0] + [1.0] * 9, run=RunLength(total=100))
        assert True not in answers[best:]
        late.append(stop.decide(clocks(best + 11, run=RunLength(total=100))[-1], 1.0))
    assert all(late)


def test_restored_stop_continues_patience():
    values = [3.0, 2.0, NAN, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    straight = judged(early_stop("loss", patience=3), values)
    for cut in range(len(values)):
        first, second = early_stop("loss", patience=3), early_stop("loss", patience=3)
        times = clocks(len(values))
        answers = [first.decide(times[i], values[i]) for i in range(cut)]
        second.load_state_dict(first.state_dict())
        assert answers + [second.decide(times[i], values[i]) for i in range(cut, len(values))] == straight


def begun():
    model = nn.Linear(1, 4)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=())
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("value", [2.0, NAN, -INF])
def test_early_stop_state_is_saved_in_checkpoint(tmp_path, value):
    step, state = begun()
    state, _ = step(state, torch.ones(2, 1))
    stop = early_stop("loss", patience="5ba")
    stop(state, {"loss": value})
    save_sharded(tmp_path, state, extra={"stop": stop})
    again = early_stop("loss", patience="5ba")
    load_sharded(tmp_path, begun()[1], extra={"stop": again})
    assert again.state_dict() == stop.state_dict()


def test_saved_patience_in_another_unit_is_refused():
    stop = early_stop("loss", patience="2ep")
    judged(stop, [1.0])
    with pytest.raises(ConfigError, match=r"early_stop: patience must have the saved unit 'ep', got '100ba'\. Keep the unit"):
        early_stop("loss", patience=100).load_state_dict(stop.state_dict())


@pytest.mark.parametrize(
    ("values", "options", "answers"),
    [
        ([3, 2, 1], {"threshold": 2}, [False, True, True]),
        ([3, 2.001, NAN], {"threshold": 2}, [False, False, False]),
        ([0.5, 0.9, 0.91], {"threshold": 0.9, "goal": "max"}, [False, True, True]),
        ([3, NAN, 1], {"threshold": 2, "stop_on_nan": True}, [False, True, True]),
        ([INF, -INF], {"threshold": 2}, [False, True]),
    ],
)
def test_threshold_stop_triggers_at_threshold(values, options, answers):
    stop = threshold_stop("loss", **options)
    assert [stop.decide(value) for value in values] == answers


def test_stop_is_recorded_in_ledger(events):
    _, state = begun()
    assert threshold_stop("loss", 2)(state, {"loss": 1.5})
    assert threshold_stop("loss", 2, stop_on_nan=True)(state, {"loss": NAN})
    stop = early_stop("loss", patience=1)
    assert not stop(state, {"loss": 1.0})
    step, state = begun()
    assert stop(step(state, torch.ones(2, 1))[0], {"loss": 1.0})
    assert events == [
        {"name": "threshold_stop", "step": 0, "metric": "loss", "value": 1.5},
        {"name": "threshold_stop", "step": 0, "metric": "loss", "value": "nan"},
        {"name": "early_stop", "step": 1, "metric": "loss", "best": 1.0},
    ]


def decided(case):
    """Ranks that come with numbers of their own."""
    _, state = begun()
    rank = get_dist_info().rank
    try:
        if case == "early":
            stop = early_stop("loss", patience=1)
            stop(state, {"loss": 1.0 + rank})
            return stop.best
        if case == "threshold":
            return threshold_stop("loss", 1.0)(state, {"loss": 1.0 + rank})
        return threshold_stop("loss", 1.0)(state, {"loss": 1.0} if rank == 0 else {"accuracy": 0.5})
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("case", "answer"), [("early", 1.0), ("threshold", True)])
def test_rank_0_decides_for_all(ranks, case, answer):
    assert ranks(2).run(decided, case) == [answer] * 2


def test_metric_missing_on_one_rank_raises_on_all_ranks(ranks):
    here, there = ranks(2).run(decided, "missing")
    assert here == (
        "PeerError: threshold_stop: metric 'loss' must be a number on every rank, got none on rank 1 (1 of 2 ranks). "
        "See the error of rank 1."
    )
    assert there.startswith("ConfigError: threshold_stop: metric must be one of accuracy, got 'loss'. ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: early_stop("", patience=1), "early_stop: metric must be a name, got ''"),
        (lambda: early_stop("loss", patience="soon"), "duration: cannot read 'soon'"),
        (
            lambda: early_stop("loss", patience=1, goal="less"),
            "early_stop: goal must be 'min' or 'max', got",
        ),
        (
            lambda: early_stop("loss", patience=1, min_delta=-1),
            "early_stop: min_delta must be a finite number at least 0, got -1",
        ),
        (
            lambda: early_stop("loss", patience=1, min_delta=NAN),
            "early_stop: min_delta must be a finite number at least 0, got nan",
        ),
        (lambda: threshold_stop(3, 1.0), "threshold_stop: metric must be a name, got 3"),
        (lambda: threshold_stop("loss", NAN), "threshold_stop: threshold must be a finite number, got nan"),
        (lambda: threshold_stop("loss", "low"), "threshold_stop: threshold must be a finite number, got 'low'"),
        (lambda: threshold_stop("loss", 1.0, goal="up"), "threshold_stop: goal must be 'min'"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"eval/loss": 1.0, "accuracy": 0.5}, "early_stop: metric must be one of accuracy, eval/loss, got 'loss'"),
        ({}, "early_stop: metric must be one of none, got 'loss'"),
        ({"loss": "low"}, "early_stop: metric 'loss' must be a number, got 'low'"),
    ],
)
def test_missing_metric_is_named(numbers, message):
    with pytest.raises(ConfigError, match=message):
        early_stop("loss", patience=1)(begun()[1], numbers)


def test_goal_is_needed_where_name_does_not_tell():
    for name in ("eval/loss", "Perplexity", "error_rate"):
        assert judged(early_stop(name, patience=1), [2.0, 1.0]) == [False, False]
        assert threshold_stop(name, 1.0).decide(0.5)
    for name in ("accuracy", "reward", "mine"):
        for make in (lambda name: early_stop(name, patience=1), lambda name: threshold_stop(name, 0.9)):
            with pytest.raises(ConfigError, match=rf"stop: goal must be given for metric '{name}', got None\. Pass goal='max'"):
                make(name)
    for word in ("mode", "maximize"):
        with pytest.raises(TypeError, match=rf"early_stop: has no argument {word}\. Use goal='max'"):
            early_stop("accuracy", patience=1, **{word: "max"})
        with pytest.raises(TypeError, match=rf"threshold_stop: has no argument {word}\. Use goal='max'"):
            threshold_stop("accuracy", 0.9, **{word: "max"})


def test_repr_shows_settings():
    assert repr(early_stop("loss", patience="2ep")) == "EarlyStop('loss', patience='2ep', best=None)"
    assert repr(threshold_stop("accuracy", 0.5, goal="max")) == "ThresholdStop('accuracy', 0.5, goal='max')"


def rows(count: int = 12) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(float(count))[:, None]}


LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 1.9, 5: 2.2, 6: 2.1, 7: 2.0, 8: 1.0}  # by epoch: patience 2 ends it with 6, not with 4


def measured(state) -> dict[str, float]:
    return {"loss": LOSSES[state.clock.epoch]}


class Killed(Exception):
    """The machine is gone."""


def epochs_of(folder, *, kill_at: int | None = None, patience="2ep", right=True, breaks=False, threshold=None, length="8ep"):
    """The documented loop, from the start or from the checkpoint: the stop, and the steps that it took."""
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch["x"]).mean(), weight=lambda batch: len(batch["x"])))
    loader, taken = dt.build_loader(rows(), global_batch_size=4, seed=0), 0
    stop = early_stop("loss", patience=patience) if threshold is None else threshold_stop("loss", threshold)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0), loader=loader, stateful={"stop": stop})
    state = load_sharded(folder, state, missing_ok=True)
    for batch in loader.until(length) if breaks else loader.until(length, stop=stop):
        state, _ = step(state, batch)
        taken += 1
        if state.crossed("1ep"):
            over = stop(state, measured(state)) if right else False
            save_sharded(folder, state)
            if kill_at == state.clock.epoch:
                raise Killed
            over = over if right else stop(state, measured(state))
            if breaks and over:
                break
    return stop, state, taken


@pytest.mark.parametrize("kill_at", [1, 2, 3, 4, 5, 6])
def test_interrupted_run_stops_at_same_step_as_uninterrupted(tmp_path, kill_at):
    whole, last, taken = epochs_of(tmp_path / "whole")
    assert (whole.best, last.clock.epoch, taken) == (1.9, 6, 18)
    with pytest.raises(Killed):
        epochs_of(tmp_path / "cut", kill_at=kill_at)
    again, end, rest = epochs_of(tmp_path / "cut")
    assert (again.best, end.clock.epoch, rest) == (1.9, 6, 18 - 3 * kill_at)
    assert again.state_dict() == whole.state_dict()


def test_checkpoint_before_stop_decision_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"early_stop: metric 'loss' must be judged before save_sharded, got a checkpoint of step 3 .*before"
    ):
        epochs_of(tmp_path, right=False)


@pytest.mark.parametrize("options", [{}, {"threshold": 2.0}], ids=["early", "threshold"])
def test_stopped_run_does_not_continue_after_restart(tmp_path, options, capsys):
    first, end, taken = epochs_of(tmp_path, **options)
    assert taken
    assert first.stopped
    capsys.readouterr()
    for _ in range(2):
        again, state, taken = epochs_of(tmp_path, **options)
        assert (again.stopped, taken, state.step) == (True, 0, end.step)
        assert "dtrain: until: the run has ended by" in capsys.readouterr().err


def test_loop_without_stop_argument_raises_when_training_past_stop(tmp_path):
    epochs_of(tmp_path, breaks=True)
    with pytest.raises(
        ConfigError, match=r"must end at step 18 where .*, got step 21 after .*loader.until\(length, stop=stop\)"
    ):
        epochs_of(tmp_path, breaks=True)
    assert dt.latest_checkpoint(tmp_path).name == "step-00000018", "what was trained beyond the end is not saved"


def test_larger_patience_continues_stopped_run(tmp_path):
    epochs_of(tmp_path)
    stop, state, taken = epochs_of(tmp_path, patience="4ep")
    assert (stop.best, state.clock.epoch, taken, stop.stopped) == (1.0, 8, 6, False)


def test_several_stops_can_end_one_loop(tmp_path):
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch["x"]).mean(), weight=lambda batch: len(batch["x"])))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loader = dt.build_loader(rows(), global_batch_size=4, seed=0)
    stops = [early_stop("loss", patience="9ep"), threshold_stop("loss", 2.0)]
    for batch in loader.until("8ep", stop=stops):
        state, _ = step(state, batch)
        if state.crossed("1ep"):
            assert [stop(state, measured(state)) for stop in stops] == [False, state.clock.epoch == 2]
    assert state.clock.epoch == 2
