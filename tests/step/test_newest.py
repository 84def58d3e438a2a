"""The newest state of a model: reachable after an interrupt at any line of a step, and never one between two steps."""

import copy
import gc
import io
import signal
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError, StaleStateError
from dtrain.state import TrainState
from dtrain.step.optimizer import DelayedInterrupt, tick
from dtrain.testing.fault_injection import patch_calls
from interrupts import interrupted_at

BATCH = torch.arange(12.0).reshape(4, 3)
LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def begun(*transforms: dt.Transform, model: nn.Module | None = None) -> tuple[dt.step.Step, TrainState]:
    model = made() if model is None else model
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def by_hand(state: TrainState) -> TrainState:
    state, metrics = dt.microbatch_step(state, BATCH, loss_fn=LOSS)
    return dt.optimizer_step(state, metrics)[0]


EARLY = dt.step.optimizer_in_backward(LOSS, [dt.transforms.ema(0.5)], batch_spec=dt.batch_spec(weight=len))
COMPOSED = dt.compose_step(LOSS, [dt.transforms.ema(0.5), dt.transforms.clip_by_norm(1.0)])
WAYS: dict[str, tuple[dt.step.Step, Callable[[TrainState], TrainState]]] = {
    "composed": (COMPOSED, lambda state: COMPOSED(state, BATCH)[0]),
    "in backward": (EARLY, lambda state: EARLY(state, BATCH)[0]),
    "by hand": (dt.compose_step(LOSS), by_hand),
}


def fingerprint(state: TrainState) -> list[object]:
    """Return all values that a step changes."""
    moments = [value for entries in state.optimizer.state.values() for value in entries.values()]
    slices = [value for entries in state.transform_states.values() for value in torch.utils._pytree.tree_leaves(entries)]
    return [state.step, *(repr(torch.as_tensor(value).tolist()) for value in (*state.params.values(), *moments, *slices))]


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_keyboard_interrupt_at_any_line_keeps_a_whole_step_state(way, stride):
    make, take = WAYS[way]

    def start() -> TrainState:
        model = made()
        return take(make.init(model, torch.optim.AdamW(model.parameters(), lr=0.1)))

    before = fingerprint(start())
    after = fingerprint(take(start()))
    seen, line = set(), 1
    while True:
        state = start()
        if not interrupted_at(line, lambda state=state: take(state)):
            break
        newest = TrainState.newest(state.model)
        reached = fingerprint(newest)
        assert reached in (before, after), f"line {line}"
        seen.add(newest.step)
        newest._check_not_stale("test")
        line += stride
    assert seen == {1, 2}


def test_newest_returns_the_state_lost_by_an_interrupted_function():
    model = made()
    step = dt.compose_step(LOSS, [dt.transforms.ema(0.5)])

    def train() -> None:
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for index in range(10):
            if index == 3:
                raise KeyboardInterrupt
            state, _ = step(state, BATCH)

    try:
        train()
    except KeyboardInterrupt:
        state = TrainState.newest(model)
    assert state.step == 3
    state, _ = step(state, BATCH)
    assert TrainState.newest(model).step == state.step == 4


def test_newest_returns_the_loaded_state_after_load_sharded(tmp_path):
    step, state = begun(dt.transforms.ema(0.5))
    state, _ = step(state, BATCH)
    dt.save_sharded(tmp_path, state)
    step, state = begun(dt.transforms.ema(0.5))
    dt.load_sharded(tmp_path, state)
    assert TrainState.newest(state.model).step == 1
    step(TrainState.newest(state.model), BATCH)


def test_interrupted_load_makes_newest_refuse_the_state(tmp_path):
    step, state = begun(dt.transforms.ema(0.5))
    state, _ = step(state, BATCH)
    dt.save_sharded(tmp_path, state)
    saved = state.params
    step, state = begun(dt.transforms.ema(0.5))
    interrupt = patch_calls("dtrain.checkpoint.load.set_optimizer_", before=lambda: signal.raise_signal(signal.SIGINT))
    with interrupt, pytest.raises(KeyboardInterrupt) as error:
        dt.load_sharded(tmp_path, state)
    assert all(torch.equal(param, saved[name]) for name, param in state.params.items())
    assert "was interrupted" in error.value.__notes__[0]
    with pytest.raises(StaleStateError, match=r"TrainState.newest: .* Build the state anew and load the last checkpoint"):
        TrainState.newest(state.model)
    step, state = begun(dt.transforms.ema(0.5))
    assert dt.load_sharded(tmp_path, state).step == 1


def test_dropped_run_is_freed_without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        step, state = begun(dt.transforms.ema(0.5))
        state, _ = step(state, BATCH)
        model = state.model
        gone = [weakref.ref(thing) for thing in (state.optimizer, state.transform_states["ema"]["params"]["weight"])]
        del state
        assert [ref() for ref in gone] == [None, None]
        with pytest.raises(ConfigError, match=r"no state of this model is alive. Call newest in the `except` block"):
            TrainState.newest(model)
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_model_copies_and_pickles_have_no_newest_state():
    _, state = begun()
    file = io.BytesIO()
    torch.save(state.model, file)
    file.seek(0)
    for other in (copy.deepcopy(state.model), torch.load(file, weights_only=False)):
        with pytest.raises(ConfigError, match="no state of this model is alive"):
            TrainState.newest(other)
        _, own = begun(model=other)
        assert TrainState.newest(other).optimizer is own.optimizer
    assert TrainState.newest(state.model).optimizer is state.optimizer


def test_newest_returns_the_last_initialized_run_of_a_model():
    _, first = begun()
    _, second = begun(model=first.model)
    assert TrainState.newest(first.model).optimizer is second.optimizer
    assert TrainState.newest(first.model, first.optimizer).optimizer is first.optimizer


def test_newest_selects_partial_runs_by_optimizer():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    step = dt.compose_step(LOSS)
    halves = [step.init(model, torch.optim.SGD(layer.parameters(), lr=0.1), missing_ok=True) for layer in model]
    with pytest.raises(ConfigError, match=r"2 runs train parts of this model \(optimizers: SGD, SGD\). Name the optimizer"):
        TrainState.newest(model)
    halves[0], _ = step(halves[0], BATCH)
    assert [TrainState.newest(model, half.optimizer).step for half in halves] == [1, 0]


def test_newest_accepts_wrapped_and_unwrapped_model():
    model = torch.nn.parallel.DataParallel(made())
    state = dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert TrainState.newest(model.module).model is TrainState.newest(model).model is state.model


class Breaks(torch.optim.SGD):
    """An optimizer that fails when it has changed one parameter."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise MemoryError("no room for moments")


def test_optimizer_error_mid_update_makes_the_state_stale():
    model = made()
    step = dt.compose_step(LOSS)
    state = step.init(model, Breaks(model.parameters(), lr=0.1))
    with pytest.raises(MemoryError, match="no room") as error:
        step(state, BATCH)
    assert "the update was interrupted at step 0" in error.value.__notes__[0]
    for use in (lambda: step(state, BATCH), lambda: TrainState.newest(model)):
        with pytest.raises(StaleStateError, match=r"interrupted at step 0 .*\. Build the state anew and load"):
            use()


def test_newest_raises_between_update_and_tick():
    _, state = begun()
    state, metrics = dt.microbatch_step(state, BATCH, loss_fn=LOSS)
    state, _ = dt.apply_gradients(state, metrics)
    with pytest.raises(StaleStateError, match="step 0 was interrupted after the update and before the tick"):
        TrainState.newest(state.model)
    tick(state)
    assert TrainState.newest(state.model).step == 1


def test_second_interrupt_is_raised_immediately():
    passed = []

    def pressed_twice() -> None:
        with DelayedInterrupt() as held:
            held.begin()
            for press in range(2):
                signal.raise_signal(signal.SIGINT)
                passed.append(press)

    with pytest.raises(KeyboardInterrupt):
        pressed_twice()
    assert passed == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_user_sigint_handler_and_non_main_threads_are_supported():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with DelayedInterrupt() as held:
            held.begin()
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    step, state = begun()
    thread = threading.Thread(target=step, args=(state, BATCH))
    thread.start()
    thread.join()
    assert TrainState.newest(state.model).step == 1


def test_newest_refuses_a_non_module_argument():
    with pytest.raises(ConfigError, match=r"model must be an nn\.Module"):
        TrainState.newest(torch.optim.SGD(made().parameters(), lr=0.1))
