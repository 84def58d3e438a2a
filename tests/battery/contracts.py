"""What every transform promises, as functions that raise ``AssertionError``. Each takes the name of a row of ``transforms``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain as dt
from battery.run import FIRST, STEPS, Fault, InjectedError, begin, differences, snapshot, take, traces, train
from battery.transforms import make, row
from dtrain.combinators import between
from dtrain.dist.rng import seed_all, set_rng_state
from dtrain.tensors import local
from dtrain.testing import Ranks

TOLERANCE = 1e-12  # norm of the difference over norm of all parameters, in float64; rounding gives about 1e-15
FAULTS = ("loss 1", "loss 2", "before grad", "after grad", "before update")


def check_resume_equals_straight(name: str, root: str) -> None:
    """Interrupted in the middle, saved, loaded into a fresh state and continued: every bit is that of the run in one piece."""
    expected, trace = train(*begin([make(name)]), STEPS)
    straight = snapshot(expected)
    state, first = train(*begin([make(name)]), FIRST)
    dt.save_sharded(root, state)
    step, state = begin([make(name)])
    seed_all(99)  # as a new process would have it
    state = dt.load_sharded(root, state).state
    state, second = train(step, state, STEPS)
    found = differences({**straight, "metrics": trace}, {**snapshot(state), "metrics": first + second})
    assert found == [], f"resume: {name}: differs from the straight run at {found}"


def check_never_active_equals_absent(name: str) -> None:
    """Wrapped so that it never acts, it changes no bit of a run; its slice stands there as it was made."""
    runs = []
    for transforms in ([], [between(10**9, 10**9 + 1, make(name))]):
        state, trace = train(*begin(transforms), STEPS)
        runs.append({**snapshot(state), "metrics": trace, "slices": None})
    found = differences(*runs)
    assert found == [], f"never active: {name}: differs from a run without it at {found}"


def check_ranks_equal_one(name: str, ranks: Callable[[int], Ranks]) -> None:
    """Two ranks that share each batch end where one does, with the same metrics."""
    alone, *pair = ranks(1).run(trained_numbers, name) + ranks(2).run(trained_numbers, name)
    for found in pair:
        here, there = torch.tensor(alone["params"], dtype=torch.float64), torch.tensor(found["params"], dtype=torch.float64)
        apart = ((here - there).norm() / here.norm()).item()
        assert apart <= TOLERANCE, f"ranks: {name}: parameters on two ranks are {apart:.1e} from those on one"
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-12), f"ranks: {name}: metrics differ"


def trained_numbers(name: str) -> dict[str, Any]:
    """All parameters at the end of a run without dropout, and the metrics of its last step over all ranks."""
    step, state = begin([make(name)], dropout=0.0)
    while state.step < STEPS:
        state, metrics = take(step, state)
    params = [(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().tolist() for p in state.params.values()]
    return {"params": [value for values in params for value in values], "metrics": dt.reduce_metrics(metrics)}


def check_slices_are_plain(name: str) -> None:
    """Nested dicts with text keys, of numbers, text and tensors; a tensor of some size is keyed by its parameter's name."""
    step, state = begin([make(name)])
    for _ in range(2):
        content = state.slices[make(name).name]
        problems = [*_not_plain(content, state, "")]
        assert not problems, f"slices: {name}: {problems[0]}"
        state, _ = take(step, state)


def _not_plain(tree: Any, state: dt.TrainState, path: str) -> list[str]:
    if type(tree) is dict:
        bad = [f"{path} has the key {key!r}" for key in tree if type(key) is not str]
        return bad + [problem for key, value in tree.items() for problem in _not_plain(value, state, f"{path}/{key}")]
    if isinstance(tree, torch.Tensor):
        key = path.rsplit("/", 1)[-1]
        if any(local(tree).data_ptr() == local(param).data_ptr() for param in state.params.values()):
            return [f"{path} is a parameter itself, not a copy"]
        fits = key in state.params and tree.shape == state.params[key].shape
        return [] if fits or tree.ndim == 0 else [f"{path} is a tensor {list(tree.shape)} under no parameter's name"]
    return [] if type(tree) in (int, float, str) else [f"{path} is a {type(tree).__name__}"]


def check_exception_changes_nothing(name: str, where: str, at: int) -> None:
    """Step ``at`` that fails inside leaves the run as it was; tried again, it is the step that never failed."""
    *_, allowed = _failed([], where, at)
    step, state, before, after = _failed([make(name)], where, at)
    # The model's own forwards, as far as they came, have drawn random numbers and counted in buffers, unless all is taken back.
    runs = [after] if row(name).reruns else [allowed, before] if row(name).undoes else [allowed]
    found = min((differences({**before, "rng": run["rng"], "buffers": run["buffers"]}, after) for run in runs), key=len)
    assert found == [], f"exception: {name}: raised in {where!r} of step {at}, which left changes at {found}"
    set_rng_state(before["rng"])
    for key, buffer in state.model.named_buffers():
        buffer.copy_(before["buffers"][key])
    again, _ = take(step, state)
    clean, _ = train(*begin([make(name)]), at + 1)
    found = differences(snapshot(clean), snapshot(again))
    assert found == [], f"exception: {name}: step {at} tried again differs at {found} from one that never failed"


def _failed(transforms: list[dt.Transform], where: str, at: int) -> tuple[dt.Step, dt.TrainState, dict, dict]:
    """A run whose step ``at`` failed, with snapshots of before and after."""
    fault = Fault(where)
    step, state = begin(transforms, **fault.parts())
    state, _ = train(step, state, at)
    before = {**snapshot(state), "traces": traces(state)}
    with fault.arming(), pytest.raises(InjectedError, match=where):
        take(step, state)
    assert fault.fired
    return step, state, before, {**snapshot(state), "traces": traces(state)}


def check_spent_state_raises(name: str, root: str | Path) -> None:
    """A state that was stepped can be neither stepped nor saved."""
    step, spent = begin([make(name)])
    take(step, spent)
    for what, use in (("step", lambda: take(step, spent)), ("save", lambda: dt.save_sharded(root, spent))):
        try:
            use()
        except dt.StaleStateError:
            continue
        raise AssertionError(f"spent: {name}: {what} took a state that was stepped")
