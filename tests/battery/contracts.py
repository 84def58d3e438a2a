"""Promises of every transform, as functions that raise ``AssertionError``. Each takes the name of a row of ``transforms``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain as dt
from battery.run import FIRST, STEPS, Fault, InjectedError, Run, begin, differences, snapshot, traces, train
from battery.transforms import make, row
from dtrain.dist.dtensor import to_local
from dtrain.dist.rng import seed_all, set_rng_state
from dtrain.testing import HostSync, Ranks, count_collectives, count_host_syncs
from dtrain.transforms.combinators import between

TOLERANCE = 1e-12  # norm of the difference over norm of all parameters, in float64; rounding gives about 1e-15
FAULTS = ("loss 1", "loss 2", "before grad", "after grad", "before update")


def begun(name: str, **how: Any) -> tuple[Run, dt.TrainState]:
    """A run with the transform of a row, at its beginning."""
    return begin([make(name)], task=row(name).task, **how)


def check_resume_equals_straight(name: str, root: str) -> None:
    """Interrupted in the middle, saved, loaded into a fresh state and continued: every bit is that of the run in one piece."""
    expected, trace = train(*begun(name), STEPS)
    straight = snapshot(expected)
    state, first = train(*begun(name), FIRST)
    dt.save_sharded(root, state)
    run, state = begun(name)
    seed_all(99)  # as a new process would have it
    state = dt.load_sharded(root, state)
    state, second = train(run, state, STEPS)
    changed = differences({**straight, "metrics": trace}, {**snapshot(state), "metrics": first + second})
    assert changed == [], f"resume: {name}: differs from the straight run at {changed}"


def check_never_active_equals_absent(name: str) -> None:
    """Wrapped so that it never acts, it changes no bit of a run; its slice stands there as it was made."""
    runs = []
    for transforms in ([], [between(10**9, 10**9 + 1, make(name))]):
        state, trace = train(*begin(transforms, task=row(name).task), STEPS)
        runs.append({**snapshot(state), "metrics": trace, "slices": None})
    changed = differences(*runs)
    assert changed == [], f"never active: {name}: differs from a run without it at {changed}"


def check_ranks_equal_one(name: str, ranks: Callable[[int], Ranks]) -> None:
    """Two ranks that share each batch end where one does, with the same metrics."""
    alone, *pair = ranks(1).run(trained_numbers, name) + ranks(2).run(trained_numbers, name)
    for result in pair:
        here, there = torch.tensor(alone["params"], dtype=torch.float64), torch.tensor(result["params"], dtype=torch.float64)
        apart = ((here - there).norm() / here.norm()).item()
        assert apart <= TOLERANCE, f"ranks: {name}: parameters on two ranks are {apart:.1e} from those on one"
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-12), f"ranks: {name}: metrics differ"


def trained_numbers(name: str) -> dict[str, Any]:
    """All parameters at the end of a run without dropout, and the metrics of its last step over all ranks."""
    return _numbers(*begun(name, dropout=0.0))


def _numbers(run: Run, state: dt.TrainState) -> dict[str, Any]:
    while state.step < STEPS:
        state, metrics = run.take(state)
    params = [(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().tolist() for p in state.params.values()]
    return {"params": [value for values in params for value in values], "metrics": dt.reduce_metrics(metrics)}


def check_resumed_by_fewer_ranks(name: str, root: str, ranks: Callable[[int], Ranks]) -> None:
    """Saved by two ranks and continued by one, a run ends where one rank alone does."""
    straight, *_ = ranks(1).run(trained_numbers, name)
    ranks(2).run(_saved_in_the_middle, name, root)
    (resumed,) = ranks(1).run(_continued, name, root)
    here, there = (torch.tensor(run["params"], dtype=torch.float64) for run in (straight, resumed))
    apart = ((here - there).norm() / here.norm()).item()
    assert apart <= TOLERANCE, f"fewer ranks: {name}: parameters are {apart:.1e} from those of a run by one rank"


def _saved_in_the_middle(name: str, root: str) -> None:
    state, _ = train(*begun(name, dropout=0.0), FIRST)
    dt.save_sharded(root, state)


def _continued(name: str, root: str) -> dict[str, Any]:
    run, state = begun(name, dropout=0.0)
    return _numbers(run, dt.load_sharded(root, state))


def check_host_syncs(name: str) -> None:
    """A step makes the host wait for the device no more often than it says. The rate is a number, so the optimizer does not."""
    bare, syncs = (_syncs(transforms, row(name).task) for transforms in ([], [make(name)]))
    more = [len(after) - len(before) for before, after in zip(bare, syncs, strict=True)]
    where = sorted({f"{sync.kind} at {sync.location}" for step in syncs for sync in step})
    assert max(more) <= row(name).syncs, f"host syncs: {name}: {max(more)} a step, {row(name).syncs} are allowed: {where}"


def _syncs(transforms: list[dt.Transform], task: str) -> list[list[HostSync]]:
    """Return the causes of host syncs in each step of a run."""
    run, state = begin(transforms, task=task)
    steps = []
    for _ in range(STEPS):
        with count_host_syncs() as seen:
            state, _ = run.take(state)
        steps.append(list(seen.calls))
    return steps


def check_collectives(name: str) -> None:
    """On these ranks, a step gathers and reduces no more than its gradients do, and moves few bytes besides."""
    bare, sent = (_moved(transforms, row(name).task) for transforms in ([], [make(name)]))
    for step, (allowed, moved) in enumerate(zip(bare, sent, strict=True)):
        most = row(name).passes * allowed + row(name).moves
        assert moved <= most, f"collectives: {name}: step {step} moves {moved} bytes, {most} are allowed"


def _moved(transforms: list[dt.Transform], task: str) -> list[int]:
    """Bytes of all collectives but the control records, in each step of a run."""
    run, state = begin(transforms, task=task)
    steps = []
    for _ in range(STEPS):
        with count_collectives() as seen:
            state, _ = run.take(state)
        steps.append(seen.bytes() - seen.bytes(group="control"))
    return steps


def check_points(name: str) -> None:
    """The numbers of a case that is known by hand."""
    points = row(name).points
    assert points is not None, f"points: {name}: has none"
    pairs = [
        (torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64))
        for got, expected in points()
    ]
    assert len(pairs) >= 2, f"points: {name}: needs two or more, has {len(pairs)}"
    assert not all(torch.equal(expected, pairs[0][1]) for _, expected in pairs), f"points: {name}: one number, again and again"
    for number, (got, expected) in enumerate(pairs):
        torch.testing.assert_close(
            got, expected, rtol=1e-5, atol=1e-7, msg=lambda text, number=number: f"points: {name}: number {number}: {text}"
        )


def check_slices_are_plain(name: str) -> None:
    """Nested dicts with text keys, of numbers, text and tensors; a tensor of some size is keyed by its parameter's name."""
    run, state = begun(name)
    for _ in range(2):
        content = (
            state.transform_states.get(made.name, {}) if (made := make(name)).read_only else state.transform_states[made.name]
        )
        problems = [*_not_plain(content, state, "")]
        assert not problems, f"slices: {name}: {problems[0]}"
        state, _ = run.take(state)


def _not_plain(tree: Any, state: dt.TrainState, path: str) -> list[str]:
    if type(tree) is dict:
        bad = [f"{path} has the key {key!r}" for key in tree if type(key) is not str]
        return bad + [problem for key, value in tree.items() for problem in _not_plain(value, state, f"{path}/{key}")]
    if isinstance(tree, torch.Tensor):
        key = path.rsplit("/", 1)[-1]
        if any(to_local(tree).data_ptr() == to_local(param).data_ptr() for param in state.params.values()):
            return [f"{path} is a parameter itself, not a copy"]
        fits = key in state.params and tree.shape == state.params[key].shape
        return [] if fits or tree.ndim == 0 else [f"{path} is a tensor {list(tree.shape)} under no parameter's name"]
    return [] if type(tree) in (int, float, str) else [f"{path} is a {type(tree).__name__}"]


def check_exception_changes_nothing(name: str, where: str, number: int) -> None:
    """Require that step ``number``, failing inside, leaves the run as it was, and that a retry equals an undisturbed step."""
    *_, allowed = _failed([], where, number, row(name).task)
    run, state, before, after = _failed([make(name)], where, number, row(name).task)
    # The model's own forwards, as far as they came, have drawn random numbers and counted in buffers, unless all is taken back.
    runs = [after] if row(name).reruns else [allowed, before] if row(name).undoes else [allowed]
    changed = min((differences({**before, "rng": run["rng"], "buffers": run["buffers"]}, after) for run in runs), key=len)
    assert changed == [], f"exception: {name}: raised in {where!r} of step {number}, which left changes at {changed}"
    set_rng_state(before["rng"])
    for key, buffer in state.model.named_buffers():
        buffer.copy_(before["buffers"][key])
    again, _ = run.take(state)
    # A step with functions of its own divides its gradients earlier, so the undisturbed step has the same functions.
    clean, _ = train(*begun(name, **Fault(where, row(name).task).parts()), number + 1)
    changed = differences(snapshot(clean), snapshot(again))
    assert changed == [], f"exception: {name}: step {number} tried again differs at {changed} from one that never failed"


def _failed(transforms: list[dt.Transform], where: str, number: int, task: str) -> tuple[Run, dt.TrainState, dict, dict]:
    """Return a run whose step ``number`` failed, with snapshots of before and after."""
    fault = Fault(where, task)
    run, state = begin(transforms, task=task, **fault.parts())
    state, _ = train(run, state, number)
    before = {**snapshot(state), "traces": traces(state)}
    with fault.arming(), pytest.raises(InjectedError, match=where):
        run.take(state)
    assert fault.fired
    return run, state, before, {**snapshot(state), "traces": traces(state)}


def check_spent_state_raises(name: str, root: str | Path) -> None:
    """A state that was stepped can be neither stepped nor saved."""
    run, spent = begun(name)
    run.take(spent)
    for what, use in (("step", lambda: run.take(spent)), ("save", lambda: dt.save_sharded(root, spent))):
        try:
            use()
        except dt.errors.StaleStateError:
            continue
        raise AssertionError(f"spent: {name}: {what} took a state that was stepped")
