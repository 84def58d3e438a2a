"""A second job in a root: a save refuses to continue from a step that the root has left behind, and removes nothing unknown."""

import shutil
from pathlib import Path

import pytest

from checkpoint.states import plain_state, train
from dtrain import storage
from dtrain.checkpoint.checkpoint_info import list_steps
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointError
from dtrain.state import TrainState


def steps_in(root: Path) -> list[int]:
    return [info.step for info in list_steps(root)]


def run(root: Path, state: TrainState, *steps: int, **options) -> TrainState:
    """Train to each of these steps, and save it."""
    for step in steps:
        state = train(state, step - state.step)
        save_sharded(root, state, **options)
    return state


def resumed(root: Path) -> TrainState:
    return load_sharded(root, plain_state(), missing_ok=True)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_job_that_resumed_from_a_step_left_behind_cannot_save(tmp_path, mode):
    first = run(tmp_path, plain_state(), 4, 8)
    late = resumed(tmp_path)
    run(tmp_path, first, 36, 38, 40, keep_last=3)
    assert steps_in(tmp_path) == [36, 38, 40]
    with pytest.raises(CheckpointError, match=r"save_sharded: .* must still end with step 8 .*, got step 40 of run") as refused:
        save_sharded(tmp_path, train(late, 4), keep_last=3, mode=mode).wait()
    assert str(tmp_path) in str(refused.value)
    assert steps_in(tmp_path) == [36, 38, 40], "nothing of the other job may go"


def test_two_jobs_that_began_in_an_empty_root_are_told_apart(tmp_path):
    one, other = resumed(tmp_path), resumed(tmp_path)
    run(tmp_path, one, 2, 4)
    with pytest.raises(CheckpointError, match=r"must still be empty, got step 4 of run"):
        run(tmp_path, other, 6)
    assert steps_in(tmp_path) == [2, 4]


def test_later_save_notices_commits_of_another_job(tmp_path):
    run(tmp_path, plain_state(), 8)
    late, other = resumed(tmp_path), resumed(tmp_path)
    late = run(tmp_path, late, 12, keep_last=3)
    with pytest.raises(CheckpointError, match=r"must still end with step 8 .*, got step 12"):
        run(tmp_path, other, 36)
    other = run(tmp_path, resumed(tmp_path), 36, 38)
    with pytest.raises(CheckpointError, match=r"must still end with step 12 .*, got step 38"):
        run(tmp_path, late, 16, keep_last=1)
    assert steps_in(tmp_path) == [8, 12, 36, 38]


def test_run_goes_back_on_purpose(tmp_path):
    run(tmp_path, plain_state(), 8, 36, 38, 40)
    run(tmp_path, load_sharded(tmp_path / "step-00000008", plain_state()), 12, 16)
    run(tmp_path, resumed(tmp_path), 20)
    assert steps_in(tmp_path) == [8, 36, 38, 40, 12, 16, 20]


def test_steps_removed_by_hand_stop_no_save(tmp_path):
    state = run(tmp_path, plain_state(), 2, 4)
    shutil.rmtree(tmp_path / "step-00000004")
    run(tmp_path, state, 6)
    assert steps_in(tmp_path) == [2, 6]


def test_root_that_was_not_loaded_from_keeps_the_later_steps_found_in_it(tmp_path):
    """A run that saves into two roots, and resumes from one of them."""
    one, two = tmp_path / "one", tmp_path / "two"
    state = run(two, run(one, run(two, plain_state(), 4), 8), 36, 38, 40)
    state = resumed(one)
    for _ in range(3):
        state = train(state, 4)
        save_sharded(one, state, keep_last=1)
        save_sharded(two, state, keep_last=1)
    assert steps_in(one) == [8, 20]
    assert steps_in(two) == [36, 38, 40, 20]


def test_failed_commit_is_no_other_job(tmp_path, monkeypatch):
    state = run(tmp_path, plain_state(), 2)
    rename = storage.rename

    def renames_then_fails(source, target):
        rename(source, target)
        raise OSError(5, "the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "rename", renames_then_fails)
        with pytest.raises(CheckpointError, match="the reply was lost"):
            run(tmp_path, state, 4)
    state = run(tmp_path, train(state, 2), 6)
    assert steps_in(tmp_path)[-1] == 6


def test_refusal_names_the_step_to_load(tmp_path):
    run(tmp_path, plain_state(), 8)
    late = resumed(tmp_path)
    run(tmp_path, resumed(tmp_path), 12)
    folder = tmp_path / "step-00000012"
    with pytest.raises(CheckpointError, match=rf"Another run or job has saved there.* Load {folder} to go on from it"):
        run(tmp_path, late, 16)
    run(tmp_path, load_sharded(folder, plain_state()), 16)
    assert steps_in(tmp_path) == [8, 12, 16]


def test_states_saved_in_another_order_remove_their_own_steps(tmp_path):
    states = {"g": plain_state(), "d": plain_state()}
    for number in range(5):
        states = {name: train(state, 2) for name, state in states.items()}
        ordered = states if number < 3 else {"d": states["d"], "g": states["g"]}
        save_sharded(tmp_path, ordered, keep_last=2)
    assert steps_in(tmp_path) == [8, 10]


def test_states_saved_together_and_alone_are_no_other_job(tmp_path):
    states = {"g": plain_state(), "d": plain_state()}
    states = {name: train(state, 2) for name, state in states.items()}
    save_sharded(tmp_path, states)
    states["g"] = run(tmp_path, states["g"], 4)
    states = {"d": train(states["d"], 4), "g": train(states["g"], 2)}
    save_sharded(tmp_path, states, keep_last=1)
    assert steps_in(tmp_path) == [6]
